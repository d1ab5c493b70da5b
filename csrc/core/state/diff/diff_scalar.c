/* differ_scalar: the oracle.  Plain C, one element at a time, for every dtype.
 *
 * These runs are what every vector kernel is compared with, bit for bit, and what it
 * calls where NaN makes the rules many.  They are written to be read.  Only one thing is
 * for speed: blocks whose bytes are equal are passed over, since most of what is
 * compared has not changed.
 */
#include "array/float_convert.h"
#include "state/diff/diff_kernels.h"

#include <math.h>

enum { BLOCK = 4096 }; /* bytes that are compared at once, first */

/* Count an element that is not the same, and measure it where neither side is NaN.
 * `largest` is the larger of the two magnitudes. */
static void note(double distance, double largest, mls_difference *into)
{
    double relative = largest > 0 ? distance / largest : 0;
    if (isinf(distance)) {
        relative = distance;
    }
    into->changed++;
    into->max_abs = distance > into->max_abs ? distance : into->max_abs;
    into->max_rel = relative > into->max_rel ? relative : into->max_rel;
}

/* NaN on one side; the caller knows that it is not on both. */
static void note_nan(mls_difference *into)
{
    into->changed++;
    into->nan++;
}

/* Two elements whose bits differ, as the numbers they stand for. */
static void measure(double a, double b, mls_difference *into)
{
    if (isnan(a) || isnan(b)) {
        if (!isnan(a) || !isnan(b)) {
            note_nan(into);
        }
        return;
    }
    const double largest = fabs(a) > fabs(b) ? fabs(a) : fabs(b);
    note(fabs(a - b), largest, into);
}

/* Exactly subtracted, without a sign in the way; then rounded once. */
static void measure_u64(uint64_t a, uint64_t b, mls_difference *into)
{
    const uint64_t large = a > b ? a : b;
    const uint64_t small = a > b ? b : a;
    note((double)(large - small), (double)large, into);
}

/* The magnitude of the smallest number fits an unsigned one only. */
static uint64_t magnitude(int64_t value)
{
    return value < 0 ? (uint64_t)0 - (uint64_t)value : (uint64_t)value;
}

/* As above.  The difference of two signed numbers is right as an unsigned one. */
static void measure_i64(int64_t a, int64_t b, mls_difference *into)
{
    const uint64_t distance =
        a > b ? (uint64_t)a - (uint64_t)b : (uint64_t)b - (uint64_t)a;
    const uint64_t largest = magnitude(a) > magnitude(b) ? magnitude(a) : magnitude(b);
    note((double)distance, (double)largest, into);
}

/* Two float32; squares and sums of such are far inside the range of a double. */
typedef struct complex_pair {
    float real, imaginary;
} complex_pair;

/* The square root is rounded correctly everywhere, which hypot is not. */
static double modulus(double real, double imaginary)
{
    return sqrt(real * real + imaginary * imaginary);
}

/* An infinite part may not meet its equal, whose difference would be NaN. */
static void measure_complex(complex_pair a, complex_pair b, mls_difference *into)
{
    const bool a_nan = isnan(a.real) || isnan(a.imaginary);
    const bool b_nan = isnan(b.real) || isnan(b.imaginary);
    if (a_nan || b_nan) {
        if (a_nan != b_nan) {
            note_nan(into);
        }
        return;
    }
    const double left = modulus((double)a.real, (double)a.imaginary);
    const double right = modulus((double)b.real, (double)b.imaginary);
    const double largest = left > right ? left : right;
    note(isinf(largest) ? largest
                        : modulus((double)a.real - (double)b.real,
                                  (double)a.imaginary - (double)b.imaginary),
         largest, into);
}

/* Define a run over elements of `type`, loaded as x and y, whose bits `type` holds as
 * they are; `action` measures two that differ.  Addresses may be unaligned, so both
 * sides go through memcpy. */
#define DEFINE_RUN(name, type, action)                                                   \
    void name(const void *a, const void *b, size_t count, mls_difference *into)          \
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

/* Types whose values are doubles. */
#define DEFINE_VALUES(name, type, decode)                                                \
    DEFINE_RUN(name, type, measure((double)decode(x), (double)decode(y), into))

DEFINE_VALUES(mls_differ_f16, uint16_t, mls_f32_from_f16)
DEFINE_VALUES(mls_differ_bf16, uint16_t, mls_f32_from_bf16)
DEFINE_VALUES(mls_differ_f32, uint32_t, mls_f32_from_bits)
DEFINE_VALUES(mls_differ_f64, uint64_t, mls_f64_from_bits)
DEFINE_VALUES(mls_differ_i8, int8_t, )
DEFINE_VALUES(mls_differ_i16, int16_t, )
DEFINE_VALUES(mls_differ_i32, int32_t, )
DEFINE_VALUES(mls_differ_u8, uint8_t, )
DEFINE_VALUES(mls_differ_u16, uint16_t, )
DEFINE_VALUES(mls_differ_u32, uint32_t, )
DEFINE_VALUES(mls_differ_e4m3, uint8_t, mls_f64_from_e4m3)
DEFINE_VALUES(mls_differ_e5m2, uint8_t, mls_f64_from_e5m2)
DEFINE_VALUES(mls_differ_e8m0, uint8_t, mls_f64_from_e8m0)
DEFINE_VALUES(mls_differ_e4m3fnuz, uint8_t, mls_f64_from_e4m3fnuz)
DEFINE_VALUES(mls_differ_e5m2fnuz, uint8_t, mls_f64_from_e5m2fnuz)
DEFINE_RUN(mls_differ_i64, int64_t, measure_i64(x, y, into))
DEFINE_RUN(mls_differ_u64, uint64_t, measure_u64(x, y, into))
DEFINE_RUN(mls_differ_c64, complex_pair, measure_complex(x, y, into))

/* Complete by itself. */
const mls_differ_kernels mls_differ_scalar = {
    .run = {[MLS_F16] = mls_differ_f16,
            [MLS_BF16] = mls_differ_bf16,
            [MLS_F32] = mls_differ_f32,
            [MLS_F64] = mls_differ_f64,
            [MLS_I8] = mls_differ_i8,
            [MLS_I16] = mls_differ_i16,
            [MLS_I32] = mls_differ_i32,
            [MLS_U8] = mls_differ_u8,
            [MLS_U16] = mls_differ_u16,
            [MLS_U32] = mls_differ_u32,
            [MLS_BOOL] = mls_differ_u8,
            MLS_DIFFER_RARE},
};
