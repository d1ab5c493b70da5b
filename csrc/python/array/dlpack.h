/* dlpack: the structures of the DLPack exchange protocol, version 1.1
 * (https://dmlc.github.io/dlpack/latest/c_api.html).
 *
 * An exporter's __dlpack__ returns a capsule that contains one of the two managed
 * structures. A consumer renames the capsule and calls the deleter when it is done.
 * Without a consumer, the capsule frees its structure; array_view.c relies on this. Field
 * order and widths are a binary interface: do not change them.
 */
#ifndef MLSPY_DLPACK_H
#define MLSPY_DLPACK_H

#include <stdint.h>

enum {
    DLPACK_CPU = 1,
    DLPACK_CUDA_HOST = 3
}; /* device types whose memory the CPU can read */

/* Type codes; from 7 on, floats of 8 bits or less. dtypes.def names the codes that the
 * core supports. */
enum {
    DLPACK_INT = 0,
    DLPACK_UINT = 1,
    DLPACK_FLOAT = 2,
    DLPACK_OPAQUE = 3,
    DLPACK_BFLOAT = 4,
    DLPACK_COMPLEX = 5,
    DLPACK_BOOL = 6,
    DLPACK_F8_E3M4 = 7,
    DLPACK_F8_E4M3 = 8,
    DLPACK_F8_E4M3B11FNUZ = 9,
    DLPACK_F8_E4M3FN = 10,
    DLPACK_F8_E4M3FNUZ = 11,
    DLPACK_F8_E5M2 = 12,
    DLPACK_F8_E5M2FNUZ = 13,
    DLPACK_F8_E8M0FNU = 14,
    DLPACK_F6_E2M3FN = 15,
    DLPACK_F6_E3M2FN = 16,
    DLPACK_F4_E2M1FN = 17,
    DLPACK_CODES
};

enum { DLPACK_READ_ONLY = 1 }; /* flag of dlpack_managed_versioned.flags */

/* `bits` is the size of one lane. Vector types have several lanes; the core supports none
 * of them. */
typedef struct dlpack_dtype {
    uint8_t code; /* element kind */
    uint8_t bits;
    uint16_t lanes;
} dlpack_dtype;

/* The address of the first element is `data` + `byte_offset`. */
typedef struct dlpack_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t rank;
    dlpack_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL means C order */
    uint64_t byte_offset;
} dlpack_tensor;

/* Content of a capsule named "dltensor". */
typedef struct dlpack_managed {
    dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct dlpack_managed *self);
} dlpack_managed;

/* Content of a capsule named "dltensor_versioned". */
typedef struct dlpack_managed_versioned {
    uint32_t major;
    uint32_t minor;
    void *context;
    void (*deleter)(struct dlpack_managed_versioned *self);
    uint64_t flags;
    dlpack_tensor tensor;
} dlpack_managed_versioned;

/* Content of the capsule "dlpack_exchange_api", which a type may have as
 * __dlpack_c_exchange_api__ (version 1.2 of the specification). It is valid until the
 * process ends. Functions that mlstate does not call have a placeholder type. */
typedef struct dlpack_exchange {
    uint32_t major; /* a different version has different functions */
    uint32_t minor;
    const void *earlier;
    void (*allocate)(void);
    void (*managed_of)(void);
    void (*object_of)(void);
    /* Fill `out`, which borrows everything from `object`. Returns 0, or -1 with an
     * exception set. NULL if the exporter does not support it. */
    int (*tensor_of)(void *object, dlpack_tensor *out);
    void (*stream)(void);
} dlpack_exchange;

#endif
