/* dtype: finds a dtype by its name in NumPy or in files; which dtypes convert; elements
 * in an item of a packed dtype.
 *
 * One table of names and sizes is indexed by mls_dtype.
 *
 * The kernel tables and the check for conversions use the same order. Names are found by
 * a linear search, as the table is short. They are compared with their length, so text
 * from a file needs no terminating NUL.
 */
#include "array/dtype.h"

#include "array/float_convert.h"
#include "base/size.h"

#include <string.h>

/* Kernels and mls_element handle other sizes as 8 bytes. */
#define CHECK_ITEM(id, suffix, name, file_name, item, ...)                               \
    _Static_assert(sizeof(item) == 1 || sizeof(item) == 2 || sizeof(item) == 4 ||        \
                       sizeof(item) == 8,                                                \
                   "an item of " name " must have 1, 2, 4 or 8 bytes");
MLS_DTYPES(CHECK_ITEM)

/* The first name is NumPy's or ml_dtypes'; the safetensors format defines the second. */
#define ENTRY(kind, id, suffix, name, file_name, item, code, decode)                     \
    [MLS_##id] = {name, file_name, sizeof(item), 8 * sizeof(item), kind},
#define PACKED_ENTRY(id, suffix, name, file_name, item, code, bits)                      \
    [MLS_##id] = {name, file_name, sizeof(item), bits, MLS_KIND_PACKED},
#define FLOAT_ENTRY(...)   ENTRY(MLS_KIND_FLOAT, __VA_ARGS__)
#define INT_ENTRY(...)     ENTRY(MLS_KIND_INT, __VA_ARGS__)
#define UINT_ENTRY(...)    ENTRY(MLS_KIND_UINT, __VA_ARGS__)
#define BOOLEAN_ENTRY(...) ENTRY(MLS_KIND_BOOL, __VA_ARGS__)
#define COMPLEX_ENTRY(...) ENTRY(MLS_KIND_COMPLEX, __VA_ARGS__)
#define FLOAT8_ENTRY(...)  ENTRY(MLS_KIND_FLOAT8, __VA_ARGS__)
static const mls_dtype_info infos[MLS_DTYPE_COUNT] = {
    MLS_FLOAT_DTYPES(FLOAT_ENTRY) MLS_INT_DTYPES(INT_ENTRY) MLS_UINT_DTYPES(UINT_ENTRY)
        MLS_BOOL_DTYPES(BOOLEAN_ENTRY) MLS_COMPLEX_DTYPES(COMPLEX_ENTRY)
            MLS_FLOAT8_DTYPES(FLOAT8_ENTRY) MLS_PACKED_DTYPES(PACKED_ENTRY)};

const mls_dtype_info *mls_dtype_of(mls_dtype dtype)
{
    return &infos[dtype];
}

/* Set `*out` to the dtype with this name of `length` bytes: its safetensors name if
 * `in_files`, else NumPy's. Returns false if the name is unknown. */
static bool find_dtype(const char *name, size_t length, bool in_files, mls_dtype *out)
{
    for (int i = 0; i < MLS_DTYPE_COUNT; i++) {
        const char *dtype_name = in_files ? infos[i].file_name : infos[i].name;
        if (strlen(dtype_name) == length && memcmp(dtype_name, name, length) == 0) {
            *out = (mls_dtype)i;
            return true;
        }
    }
    return false;
}

bool mls_dtype_from_name(const char *name, size_t length, mls_dtype *out)
{
    return find_dtype(name, length, false, out);
}

bool mls_dtype_from_file_name(const char *name, size_t length, mls_dtype *out)
{
    return find_dtype(name, length, true, out);
}

/* Set `*out` to the number of units of `to` bits that have as many bits as `count` units
 * of `from` bits. Returns false if that is not a whole number, or too large. */
static bool convert_count(size_t count, size_t from, size_t to, size_t *out)
{
    size_t bits;
    if (from == to) {
        *out = count;
        return true;
    }
    if (!mls_size_mul(count, from, &bits) || bits % to != 0) {
        return false;
    }
    *out = bits / to;
    return true;
}

bool mls_dtype_items(mls_dtype dtype, size_t elements, size_t *items)
{
    const mls_dtype_info *info = &infos[dtype];
    return convert_count(elements, info->element_bits, 8 * info->item_bytes, items);
}

bool mls_dtype_elements(mls_dtype dtype, size_t items, size_t *elements)
{
    const mls_dtype_info *info = &infos[dtype];
    return convert_count(items, 8 * info->item_bytes, info->element_bits, elements);
}

/* A type that does not convert can still be copied to the same type. */
bool mls_dtype_converts(mls_dtype from, mls_dtype to)
{
    return from == to || ((int)from < MLS_CONVERTIBLE && (int)to < MLS_CONVERTIBLE);
}
