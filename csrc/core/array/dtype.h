/* dtype: the element types of the core and their names in NumPy and in files.
 *
 * All of them can be copied, filled with zeros and stored in files. The first four can
 * also be converted into one another (copy.h).
 */
#ifndef MLS_DTYPE_H
#define MLS_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

/* Floats come first, in the order that indexes the conversion tables. The numbers never
 * leave the process: files contain names. */
typedef enum mls_dtype {
    MLS_F16,
    MLS_BF16, /* the upper half of a float32 */
    MLS_F32,
    MLS_F64,
    MLS_I8,
    MLS_I16,
    MLS_I32,
    MLS_I64,
    MLS_U8,
    MLS_U16,
    MLS_U32,
    MLS_U64,
    MLS_BOOL,
    MLS_C64,     /* two float32 */
    MLS_F8_E4M3, /* no infinity; elsewhere called "FN" */
    MLS_F8_E5M2,
    MLS_F8_E8M0,     /* a power of two, no sign and no zero */
    MLS_F8_E4M3FNUZ, /* no infinity, no negative zero */
    MLS_F8_E5M2FNUZ, /* the same with a wider range */
    MLS_DTYPE_COUNT
} mls_dtype;

/* Number of dtypes, from the first, that take part in conversions. */
enum { MLS_CONVERTIBLE = 4 };

typedef struct mls_dtype_info {
    const char *name;      /* NumPy's or ml_dtypes' name, such as "float16" */
    const char *file_name; /* the safetensors name, such as "F16" */
    size_t item_bytes;
} mls_dtype_info;

/* Return name and size of a dtype; never NULL for a valid one. */
const mls_dtype_info *mls_dtype_of(mls_dtype dtype);

/* Find a dtype by one of its names (`length` bytes, no NUL needed). Returns false if the
 * name is unknown. */
bool mls_dtype_from_name(const char *name, size_t length, mls_dtype *out);
bool mls_dtype_from_file_name(const char *name, size_t length, mls_dtype *out);

/* Return whether elements of `from` can be converted to `to`; true for equal types. */
bool mls_dtype_converts(mls_dtype from, mls_dtype to);

#endif
