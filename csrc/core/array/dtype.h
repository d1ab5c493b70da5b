/* dtype: the element types that the core knows, and their names elsewhere.
 *
 * All of them can be copied, filled with zeros and stored in files.  The first four are
 * also converted into one another (copy.h).  Types that NumPy lacks are known by size.
 */
#ifndef MLS_DTYPE_H
#define MLS_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

/* Floats come first, in the order in which tables of conversions are indexed.  The
 * numbers never leave the process: files hold names. */
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
    MLS_F8_E4M3, /* no infinity; "FN" in other places */
    MLS_F8_E5M2,
    MLS_F8_E8M0,     /* a power of two, no sign and no zero */
    MLS_F8_E4M3FNUZ, /* no infinity, no negative zero */
    MLS_F8_E5M2FNUZ, /* the same with a wider range */
    MLS_DTYPE_COUNT
} mls_dtype;

/* How many dtypes, from the first, take part in conversions. */
enum { MLS_CONVERTIBLE = 4 };

typedef struct mls_dtype_info {
    const char *name;      /* NumPy's or ml_dtypes' name, such as "float16" */
    const char *file_name; /* the safetensors name, such as "F16" */
    size_t item_bytes;
} mls_dtype_info;

/* Facts of a dtype; never NULL for a valid one. */
const mls_dtype_info *mls_dtype_of(mls_dtype dtype);

/* Look a dtype up by either name (`length` bytes, no NUL needed); false where unknown. */
bool mls_dtype_from_name(const char *name, size_t length, mls_dtype *out);
bool mls_dtype_from_file_name(const char *name, size_t length, mls_dtype *out);

/* Whether elements of `from` can be converted to `to`; equal types always can. */
bool mls_dtype_converts(mls_dtype from, mls_dtype to);

#endif
