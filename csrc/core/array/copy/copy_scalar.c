/* copy_scalar: copies, fills and converts packed elements in plain C, for every pair of
 * float formats: the reference.
 *
 * Every vector kernel must match these runs bit for bit, and calls them for the elements
 * that do not fill a vector. They are written for clarity: the rounding rules are in
 * float_convert.h, and nothing depends on the processor.
 *
 * A machine without vector kernels uses this table.
 */
#include "array/copy/copy_kernels.h"
#include "array/float_convert.h"

#include <string.h>

/* Define a run that loads a `from_type` as `x`, evaluates `expression`, and stores the
 * result as `to_type`. Uses memcpy, because addresses may be unaligned. */
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
/* torch and ml_dtypes convert double to bfloat16 by way of float; so does this run. */
DEFINE_RUN(mls_run_f64_bf16, double, uint16_t, mls_bf16_from_f32((float)x))
DEFINE_RUN(mls_run_f64_f32, double, float, (float)x)

/* The kernel `copy`. memcpy chooses the stores; `store` is not used. */
static void copy_run(void *dst, const void *src, size_t bytes, mls_store store)
{
    (void)store;
    memcpy(dst, src, bytes);
}

/* Repeat the 8 bytes of `pattern` over `bytes` bytes; the last repetition may be cut
 * off. */
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

const mls_kernels mls_kernels_scalar = {
    .cpu = MLS_CPU_SCALAR,
    .copy_variants = MLS_STORE_BIT(MLS_STORE_CACHED),
    .variants = MLS_STORE_BIT(MLS_STORE_CACHED),
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
