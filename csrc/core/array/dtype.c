/* dtype: one table of facts, indexed by mls_dtype.
 *
 * The order of the enum is its whole meaning: the table, the kernel tables and the test
 * for conversions all index by it.  Names are found by a walk over nineteen entries,
 * which is less work than any hash of so short a list, and each is compared with its
 * length, so that text from a file needs no terminating NUL.
 */
#include "array/dtype.h"

#include "array/float_convert.h"

#include <string.h>

/* Both names of a type and its size.  The names are those that NumPy or ml_dtypes give
 * the type; the file names are fixed by the safetensors format. */
#define ENTRY(kind, id, suffix, name, file_name, item, code, decode)                     \
    [MLS_##id] = {name, file_name, sizeof(item), kind},
#define FLOAT_ENTRY(...)   ENTRY(MLS_KIND_FLOAT, __VA_ARGS__)
#define INT_ENTRY(...)     ENTRY(MLS_KIND_INT, __VA_ARGS__)
#define UINT_ENTRY(...)    ENTRY(MLS_KIND_UINT, __VA_ARGS__)
#define BOOLEAN_ENTRY(...) ENTRY(MLS_KIND_BOOL, __VA_ARGS__)
#define COMPLEX_ENTRY(...) ENTRY(MLS_KIND_COMPLEX, __VA_ARGS__)
#define FLOAT8_ENTRY(...)  ENTRY(MLS_KIND_FLOAT8, __VA_ARGS__)
static const mls_dtype_info infos[MLS_DTYPE_COUNT] = {
    MLS_FLOAT_DTYPES(FLOAT_ENTRY) MLS_INT_DTYPES(INT_ENTRY) MLS_UINT_DTYPES(UINT_ENTRY)
        MLS_BOOL_DTYPES(BOOLEAN_ENTRY) MLS_COMPLEX_DTYPES(COMPLEX_ENTRY)
            MLS_FLOAT8_DTYPES(FLOAT8_ENTRY)};

const mls_dtype_info *mls_dtype_of(mls_dtype dtype)
{
    return &infos[dtype];
}

/* Whether the first `length` bytes of `name` are all of `known`. */
static bool same_text(const char *known, const char *name, size_t length)
{
    return strlen(known) == length && memcmp(known, name, length) == 0;
}

/* Walked, not hashed: there are few, and each name is looked up once. */
bool mls_dtype_from_name(const char *name, size_t length, mls_dtype *out)
{
    for (int i = 0; i < MLS_DTYPE_COUNT; i++) {
        if (same_text(infos[i].name, name, length)) {
            *out = (mls_dtype)i;
            return true;
        }
    }
    return false;
}

/* The same by the name that files have; the two sets of names do not mix. */
bool mls_dtype_from_file_name(const char *name, size_t length, mls_dtype *out)
{
    for (int i = 0; i < MLS_DTYPE_COUNT; i++) {
        if (same_text(infos[i].file_name, name, length)) {
            *out = (mls_dtype)i;
            return true;
        }
    }
    return false;
}

/* Types that do not convert are still copied to their own kind, bit for bit. */
bool mls_dtype_converts(mls_dtype from, mls_dtype to)
{
    return from == to || ((int)from < MLS_CONVERTIBLE && (int)to < MLS_CONVERTIBLE);
}
