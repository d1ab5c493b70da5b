/* copy_scalar: the oracle.  Plain C, one element at a time, for every pair of float
 * formats.
 *
 * These runs are what every vector kernel is compared with, bit for bit, and what it
 * calls for the ends of a run that fill no vector.  They are written to be read: the
 * rules of rounding are in float_convert.h, and nothing here depends on the processor.
 *
 * The table is also the whole of what a machine without vector kernels uses.
 */
#include "array/float_convert.h"
#include "array/copy/copy_kernels.h"

#include <string.h>

/* Define a run that loads a `from_type`, applies `expression` to `x`, and stores it as
 * `to_type`.  Addresses may be unaligned, so both sides go through memcpy. */
#define DEFINE_RUN(name, from_type, to_type, expression)                                 \
    void name(void *dst, const void *src, size_t count, mls_store store)                 \
    {                                                                                    \
        (void)store;                                                                     \
        unsigned char *to = dst;                                                         \
        const unsigned char *from = src;                                                 \
        for (size_t i = 0; i < count; i++) {                                             \
            from_type x;                                                                 \
            memcpy(&x, from + i * sizeof x, sizeof x);                                   \
            const to_type y = (expression);                                              \
            memcpy(to + i * sizeof y, &y, sizeof y);                                     \
        }                                                                                \
    }

DEFINE_RUN(mls_run_f16_f32, uint16_t, float, mls_f32_from_f16(x))
DEFINE_RUN(mls_run_f16_f64, uint16_t, double, (double)mls_f32_from_f16(x))
DEFINE_RUN(mls_run_f16_bf16, uint16_t, uint16_t, mls_bf16_from_f32(mls_f32_from_f16(x)))
DEFINE_RUN(mls_run_bf16_f16, uint16_t, uint16_t, mls_f16_from_f32(mls_f32_from_bf16(x)))
DEFINE_RUN(mls_run_bf16_f32, uint16_t, float, mls_f32_from_bf16(x))
DEFINE_RUN(mls_run_bf16_f64, uint16_t, double, (double)mls_f32_from_bf16(x))
DEFINE_RUN(mls_run_f32_f16, float, uint16_t, mls_f16_from_f32(x))
DEFINE_RUN(mls_run_f32_bf16, float, uint16_t, mls_bf16_from_f32(x))
DEFINE_RUN(mls_run_f32_f64, float, double, (double)x)
DEFINE_RUN(mls_run_f64_f16, double, uint16_t, mls_f16_from_f64(x))
/* bfloat16 has no direct rule for double: torch and ml_dtypes both pass through float. */
DEFINE_RUN(mls_run_f64_bf16, double, uint16_t, mls_bf16_from_f32((float)x))
DEFINE_RUN(mls_run_f64_f32, double, float, (float)x)

/* The C library's copy, the one variant of this table. */
static void copy_run(void *dst, const void *src, size_t bytes, mls_store store)
{
    (void)store;
    memcpy(dst, src, bytes);
}

/* Whole patterns, then as much of one as is left. */
static void fill_run(void *dst, uint64_t pattern, size_t bytes, mls_store store)
{
    (void)store;
    if (mls_pattern_is_byte(pattern)) {
        memset(dst, (int)(pattern & 0xFFU), bytes);
        return;
    }
    unsigned char *to = dst;
    size_t done = 0;
    for (; done + sizeof pattern <= bytes; done += sizeof pattern) {
        memcpy(to + done, &pattern, sizeof pattern);
    }
    memcpy(to + done, &pattern, bytes - done);
}

/* Complete by itself: every pair, nothing borrowed from another table. */
const mls_kernels mls_kernels_scalar = {
    .cpu = MLS_CPU_SCALAR,
    .copy_variants = 1,
    .variants = 1,
    .copy = copy_run,
    .fill = fill_run,
    .convert = {[MLS_F16] = {[MLS_BF16] = mls_run_f16_bf16,
                             [MLS_F32] = mls_run_f16_f32,
                             [MLS_F64] = mls_run_f16_f64},
                [MLS_BF16] = {[MLS_F16] = mls_run_bf16_f16,
                              [MLS_F32] = mls_run_bf16_f32,
                              [MLS_F64] = mls_run_bf16_f64},
                [MLS_F32] = {[MLS_F16] = mls_run_f32_f16,
                             [MLS_BF16] = mls_run_f32_bf16,
                             [MLS_F64] = mls_run_f32_f64},
                [MLS_F64] = {[MLS_F16] = mls_run_f64_f16,
                             [MLS_BF16] = mls_run_f64_bf16,
                             [MLS_F32] = mls_run_f64_f32}},
};
