/* ams_sketch: adds an array to its sketch: random signs from a hash of the index, 64
 * elements at a time. */
#include "gradients/ams_sketch.h"

#include "array/float_convert.h"

#include <math.h>
#include <string.h>

/* Return the signs of the 64 elements of block `block` (from 0), one bit each: output
 * number `block` of splitmix64 (Steele, Lea and Flood, 2014) with this seed. Any block
 * can be computed directly, so a part of an array does not need the elements before it.
 * Products wrap intentionally. */
static uint64_t signs_of(uint64_t seed, uint64_t block)
{
    uint64_t z = seed + (block + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Read the element at address `at` as float64 into `*out`. Returns false for bool,
 * complex and 8-bit float dtypes. Integers beyond 53 bits are rounded; the sketch's
 * magnitude bounds the error. */
static bool read_element(const unsigned char *at, mls_dtype dtype, double *out)
{
#define ELEMENT_CASE(id, suffix, name, file_name, item, code, decode)                    \
    case MLS_##id: {                                                                     \
        item value;                                                                      \
        memcpy(&value, at, sizeof value);                                                \
        *out = (double)decode(value);                                                    \
        return true;                                                                     \
    }
    switch (dtype) {
        MLS_FLOAT_DTYPES(ELEMENT_CASE)
        MLS_INT_DTYPES(ELEMENT_CASE)
        MLS_UINT_DTYPES(ELEMENT_CASE)
    default:
        return false;
    }
#undef ELEMENT_CASE
}

/* Add `count` elements to a sketch. The sum is built in a copy, so an error leaves the
 * caller's sketch unchanged. */
mls_code mls_ams_sketch_add(mls_ams_sketch *sketch, const void *data, mls_dtype dtype,
                            size_t start, size_t count, uint64_t seed, mls_status *st)
{
    const size_t item = mls_dtype_of(dtype)->item_bytes;
    const unsigned char *at = data;
    mls_ams_sketch sum = *sketch;
    uint64_t signs = 0;
    for (size_t i = start; i < start + count; i++, at += item) {
        double value = 0;
        if (!read_element(at, dtype, &value)) {
            mls_fail(st, MLS_E_DTYPE, "dtype %s cannot be verified: not a number",
                     mls_dtype_of(dtype)->name);
            return mls_status_got(st, "%s", mls_dtype_of(dtype)->name);
        }
        /* Blocks are counted from the array's first element, not the part's, so an
         * element has the same sign however the array is divided. */
        if (i == start || i % 64 == 0) {
            signs = signs_of(seed, i / 64);
        }
        sum.signed_sum += (signs >> (i % 64)) & 1 ? -value : value;
        sum.magnitude += fabs(value);
    }
    *sketch = sum;
    return MLS_OK;
}
