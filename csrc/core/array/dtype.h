/* dtype: the element types of the core, their names in NumPy and in files (dtypes.def),
 * and their sizes.
 *
 * All of them can be copied, filled with zeros and stored in files. The group
 * MLS_FLOAT_DTYPES can also be converted into one another (copy.h).
 */
#ifndef MLS_DTYPE_H
#define MLS_DTYPE_H

#include "array/dtypes.def"

#include <stdbool.h>
#include <stddef.h>

/* One enumerator for each line of dtypes.def, in its order.  The numbers never leave the
 * process: files contain names. */
#define MLS_DTYPE_ENUMERATOR(id, ...) MLS_##id,
typedef enum mls_dtype { MLS_DTYPES(MLS_DTYPE_ENUMERATOR) MLS_DTYPE_COUNT } mls_dtype;

/* Number of dtypes, from the first, that take part in conversions. */
#define MLS_DTYPE_PLUS_ONE(...) +1
enum { MLS_CONVERTIBLE = 0 MLS_FLOAT_DTYPES(MLS_DTYPE_PLUS_ONE) };

/* The group of dtypes.def that a dtype belongs to. */
typedef enum mls_dtype_kind {
    MLS_KIND_FLOAT,
    MLS_KIND_INT,
    MLS_KIND_UINT,
    MLS_KIND_BOOL,
    MLS_KIND_COMPLEX,
    MLS_KIND_FLOAT8,
    MLS_KIND_PACKED
} mls_dtype_kind;

typedef struct mls_dtype_info {
    const char *name;      /* NumPy's or ml_dtypes' name, such as "float16" */
    const char *file_name; /* the safetensors name, such as "F16" */
    size_t item_bytes;
    size_t element_bits; /* fewer than those of an item only for MLS_KIND_PACKED */
    mls_dtype_kind kind;
} mls_dtype_info;

/* Return name and size of a dtype; never NULL for a valid one. */
const mls_dtype_info *mls_dtype_of(mls_dtype dtype);

/* Set `*out` to the dtype whose `name` or `file_name` is these `length` bytes (no NUL
 * needed). Returns false if the name is unknown. */
bool mls_dtype_from_name(const char *name, size_t length, mls_dtype *out);
bool mls_dtype_from_file_name(const char *name, size_t length, mls_dtype *out);

/* Convert the length of a tensor's last axis from the elements that a safetensors file
 * counts to the items of an array, or back; both are equal unless the dtype is packed.
 * Return false if the result is not a whole number or does not fit. */
bool mls_dtype_items(mls_dtype dtype, size_t elements, size_t *items);
bool mls_dtype_elements(mls_dtype dtype, size_t items, size_t *elements);

/* Return whether elements of `from` can be converted to `to`; true for equal types. */
bool mls_dtype_converts(mls_dtype from, mls_dtype to);

#endif
