/* dtype: one table of names and sizes, indexed by mls_dtype.
 *
 * The kernel tables and the check for conversions use the same order. Names are found by
 * a linear search over nineteen entries. They are compared with their length, so text
 * from a file needs no terminating NUL.
 */
#include "array/dtype.h"

#include <string.h>

/* The first name is NumPy's or ml_dtypes'; the safetensors format defines the second. */
static const mls_dtype_info infos[MLS_DTYPE_COUNT] = {
    [MLS_F16] = {"float16", "F16", 2},
    [MLS_BF16] = {"bfloat16", "BF16", 2},
    [MLS_F32] = {"float32", "F32", 4},
    [MLS_F64] = {"float64", "F64", 8},
    [MLS_I8] = {"int8", "I8", 1},
    [MLS_I16] = {"int16", "I16", 2},
    [MLS_I32] = {"int32", "I32", 4},
    [MLS_I64] = {"int64", "I64", 8},
    [MLS_U8] = {"uint8", "U8", 1},
    [MLS_U16] = {"uint16", "U16", 2},
    [MLS_U32] = {"uint32", "U32", 4},
    [MLS_U64] = {"uint64", "U64", 8},
    [MLS_BOOL] = {"bool", "BOOL", 1},
    [MLS_C64] = {"complex64", "C64", 8},
    [MLS_F8_E4M3] = {"float8_e4m3fn", "F8_E4M3", 1},
    [MLS_F8_E5M2] = {"float8_e5m2", "F8_E5M2", 1},
    [MLS_F8_E8M0] = {"float8_e8m0fnu", "F8_E8M0", 1},
    [MLS_F8_E4M3FNUZ] = {"float8_e4m3fnuz", "F8_E4M3FNUZ", 1},
    [MLS_F8_E5M2FNUZ] = {"float8_e5m2fnuz", "F8_E5M2FNUZ", 1},
};

const mls_dtype_info *mls_dtype_of(mls_dtype dtype)
{
    return &infos[dtype];
}

/* Return whether the `length` bytes of `name` equal `known`. */
static bool same_text(const char *known, const char *name, size_t length)
{
    return strlen(known) == length && memcmp(known, name, length) == 0;
}

/* Linear search: the table is short, and each name is looked up once. */
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

/* The same for the names in files; the two sets of names are separate. */
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

/* A type that does not convert can still be copied to the same type. */
bool mls_dtype_converts(mls_dtype from, mls_dtype to)
{
    return from == to || ((int)from < MLS_CONVERTIBLE && (int)to < MLS_CONVERTIBLE);
}
