/* diff_scalar: which elements count as changed, and the largest differences: the
 * reference.
 *
 * Plain C, one element at a time, for every dtype.
 *
 * Tests compare every vector kernel with these, bit for bit, and the vector kernels call
 * them for blocks with NaN. They are written for readability, with one optimisation:
 * blocks with equal bytes are skipped, because most compared data has not changed.
 */
#include "array/float_convert.h"
#include "state/diff/diff_kernels.h"

#include <math.h>

enum { BLOCK = 4096 }; /* bytes compared with memcmp first */

/* Count an unequal element without NaN on either side, and update the maxima. `distance`
 * is the magnitude of their difference, `largest` the larger of their magnitudes. The
 * relative distance is their quotient: 0 for two zeros, infinite if `distance` is. */
static void add_difference(double distance, double largest, mls_diff_result *into)
{
    double relative = largest > 0 ? distance / largest : 0;
    if (isinf(distance)) {
        relative = distance;
    }
    into->changed++;
    into->max_abs = distance > into->max_abs ? distance : into->max_abs;
    into->max_rel = relative > into->max_rel ? relative : into->max_rel;
}

/* Count an unequal element that is NaN on one side. */
static void add_nan(mls_diff_result *into)
{
    into->changed++;
    into->nan++;
}

/* Compare the values of two elements whose bits differ. A NaN on one side is counted as
 * such; two NaNs are equal. */
static void measure_values(double a, double b, mls_diff_result *into)
{
    if (isnan(a) || isnan(b)) {
        if (!isnan(a) || !isnan(b)) {
            add_nan(into);
        }
        return;
    }
    const double largest = fabs(a) > fabs(b) ? fabs(a) : fabs(b);
    add_difference(fabs(a - b), largest, into);
}

/* Compare two unequal unsigned numbers: subtract exactly, then round once. */
static void measure_u64(uint64_t a, uint64_t b, mls_diff_result *into)
{
    const uint64_t large = a > b ? a : b;
    const uint64_t small = a > b ? b : a;
    add_difference((double)(large - small), (double)large, into);
}

/* Return the magnitude of `value`, unsigned because 2^63, for INT64_MIN, does not fit
 * int64_t. */
static uint64_t magnitude(int64_t value)
{
    return value < 0 ? (uint64_t)0 - (uint64_t)value : (uint64_t)value;
}

/* Compare two unequal signed numbers: their difference is exact as an unsigned number. */
static void measure_i64(int64_t a, int64_t b, mls_diff_result *into)
{
    const uint64_t distance =
        a > b ? (uint64_t)a - (uint64_t)b : (uint64_t)b - (uint64_t)a;
    const uint64_t largest = magnitude(a) > magnitude(b) ? magnitude(a) : magnitude(b);
    add_difference((double)distance, (double)largest, into);
}

/* Return the modulus of a complex number. The squares of two float32 and their sum do not
 * overflow a double. sqrt is correctly rounded everywhere; hypot is not. */
static double modulus(double real, double imaginary)
{
    return sqrt(real * real + imaginary * imaginary);
}

/* Compare two complex numbers whose bits differ, by the modulus of their difference. If
 * one is infinite, so is the distance: the difference of two equal infinities would be
 * NaN. */
static void measure_complex(mls_complex64 a, mls_complex64 b, mls_diff_result *into)
{
    const bool a_nan = isnan(a.real) || isnan(a.imaginary);
    const bool b_nan = isnan(b.real) || isnan(b.imaginary);
    if (a_nan || b_nan) {
        if (a_nan != b_nan) {
            add_nan(into);
        }
        return;
    }
    const double left = modulus((double)a.real, (double)a.imaginary);
    const double right = modulus((double)b.real, (double)b.imaginary);
    const double largest = left > right ? left : right;
    add_difference(isinf(largest) ? largest
                                  : modulus((double)a.real - (double)b.real,
                                            (double)a.imaginary - (double)b.imaginary),
                   largest, into);
}

/* Defines a kernel for elements of `type`, which holds their bits, loaded as x and y.
 * `action` compares two that differ. Addresses may be unaligned, so both sides are loaded
 * with memcpy. */
#define DEFINE_RUN(name, type, action)                                                   \
    void name(const void *a, const void *b, size_t count, mls_diff_result *into)         \
    {                                                                                    \
        const unsigned char *left = a, *right = b;                                       \
        for (size_t done = 0; done < count; done += BLOCK / sizeof(type)) {              \
            const size_t rest = count - done;                                            \
            const size_t items =                                                         \
                rest < BLOCK / sizeof(type) ? rest : BLOCK / sizeof(type);               \
            const size_t start = done * sizeof(type);                                    \
            if (memcmp(left + start, right + start, items * sizeof(type)) == 0) {        \
                continue;                                                                \
            }                                                                            \
            for (size_t i = start; i < start + items * sizeof(type);                     \
                 i += sizeof(type)) {                                                    \
                type x, y;                                                               \
                memcpy(&x, left + i, sizeof x);                                          \
                memcpy(&y, right + i, sizeof y);                                         \
                if (memcmp(left + i, right + i, sizeof x) != 0) {                        \
                    action;                                                              \
                }                                                                        \
            }                                                                            \
        }                                                                                \
    }

/* Floats are compared as doubles; integers exactly. */
#define DEFINE_VALUES(id, suffix, name, file_name, item, code, decode)                   \
    DEFINE_RUN(mls_diff_##suffix, item,                                                  \
               measure_values((double)decode(x), (double)decode(y), into))
#define DEFINE_INT(id, suffix, name, file_name, item, ...)                               \
    DEFINE_RUN(mls_diff_##suffix, item, measure_i64(x, y, into))
#define DEFINE_UINT(id, suffix, name, file_name, item, ...)                              \
    DEFINE_RUN(mls_diff_##suffix, item, measure_u64(x, y, into))

MLS_FLOAT_DTYPES(DEFINE_VALUES)
MLS_INT_DTYPES(DEFINE_INT)
MLS_UINT_DTYPES(DEFINE_UINT)
MLS_FLOAT8_DTYPES(DEFINE_VALUES)
DEFINE_RUN(mls_diff_c64, mls_complex64, measure_complex(x, y, into))

const mls_diff_kernels mls_diff_scalar = {.run = {MLS_DTYPES(MLS_DIFF_ENTRY)}};
