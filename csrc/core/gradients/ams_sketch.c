/* sketch: signs from a hash, sixty-four at a time. */
#include "gradients/ams_sketch.h"

#include "array/float_convert.h"

#include <math.h>
#include <string.h>

/* The signs of 64 elements, one in each bit: what splitmix64 (Steele, Lea and Flood,
 * 2014) gives as output number `block`, from 0, when it starts from `seed`.  It can be
 * asked for any block, so that a part of an array needs nothing of what lies before it.
 * Products wrap, as they are meant to. */
static uint64_t signs_of(uint64_t seed, uint64_t block)
{
    uint64_t z = seed + (block + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* One element as float64; false where the dtype has no such thing: bool, complex numbers
 * and 8-bit floats.  Integers beyond 53 bits are rounded; the magnitude tells the caller
 * how much that may be. */
static bool element(const unsigned char *at, mls_dtype dtype, double *out)
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

/* Works on a copy: after an error the caller's sketch is as it was. */
mls_code mls_ams_sketch_add(mls_ams_sketch *sketch, const void *data, mls_dtype dtype,
                            size_t start, size_t count, uint64_t seed, mls_status *st)
{
    const size_t item = mls_dtype_of(dtype)->item_bytes;
    const unsigned char *at = data;
    mls_ams_sketch sum = *sketch;
    uint64_t signs = 0;
    for (size_t i = start; i < start + count; i++, at += item) {
        double value = 0;
        if (!element(at, dtype, &value)) {
            mls_fail(st, MLS_E_DTYPE, "dtype %s cannot be verified: not a number",
                     mls_dtype_of(dtype)->name);
            mls_status_got(st, "%s", mls_dtype_of(dtype)->name);
            return MLS_E_DTYPE;
        }
        /* blocks count from the array's first element, not from the part's: who cuts an
         * array anywhere gives each element the same sign */
        if (i == start || i % 64 == 0) {
            signs = signs_of(seed, i / 64);
        }
        sum.signed_sum += (signs >> (i % 64)) & 1 ? -value : value;
        sum.magnitude += fabs(value);
    }
    *sketch = sum;
    return MLS_OK;
}
