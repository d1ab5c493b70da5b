/* differ_kernels: what the kernel files share; private to differ*.c.
 *
 * Each kernel file defines one table and nothing else that is seen outside.  Whether the
 * machine at hand can run a table is for mls_cpu_offers to say, and mls_differ_of is the
 * one place that chooses.
 */
#ifndef MLS_DIFFER_KERNELS_H
#define MLS_DIFFER_KERNELS_H

#include "convert.h"
#include "differ.h"

/* The tables, constant and complete. */
extern const mls_differ_kernels mls_differ_scalar;
#if defined(__x86_64__)
extern const mls_differ_kernels mls_differ_avx2;
extern const mls_differ_kernels mls_differ_avx512;
#endif
#if defined(__aarch64__)
extern const mls_differ_kernels mls_differ_neon;
#endif

/* The oracle's runs, for what fills no vector, for what has NaN in it, and for dtypes
 * without a vector kernel. */
void mls_differ_f16(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_bf16(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_f32(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_f64(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_i8(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_i16(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_i32(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_i64(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_u8(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_u16(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_u32(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_u64(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_c64(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_e4m3(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_e5m2(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_e8m0(const void *a, const void *b, size_t count, mls_difference *into);
void mls_differ_e4m3fnuz(const void *a, const void *b, size_t count,
                         mls_difference *into);
void mls_differ_e5m2fnuz(const void *a, const void *b, size_t count,
                         mls_difference *into);

/* The part of every table that only the oracle has runs for. */
#define MLS_DIFFER_RARE                                                                  \
    [MLS_I64] = mls_differ_i64, [MLS_U64] = mls_differ_u64, [MLS_C64] = mls_differ_c64,  \
    [MLS_F8_E4M3] = mls_differ_e4m3, [MLS_F8_E5M2] = mls_differ_e5m2,                    \
    [MLS_F8_E8M0] = mls_differ_e8m0, [MLS_F8_E4M3FNUZ] = mls_differ_e4m3fnuz,            \
    [MLS_F8_E5M2FNUZ] = mls_differ_e5m2fnuz

/* The relative distance that goes with the greatest distance, once a run is through:
 * where that is infinite, this is. */
static inline double mls_differ_settle(double max_abs, double max_rel)
{
    return max_abs > 0x1.fffffffffffffp+1023 ? max_abs : max_rel;
}

/* Half a unit in the last place of `value` (0 for 0), a little less: a quotient is
 * rounded to something greater than `value` only where it exceeds it by that much. */
static inline double mls_differ_half_unit(double value)
{
    const double power = mls_f64_from_bits(mls_f64_bits(value) & 0x7FF0000000000000U);
    return power * (0x1p-53 * (1 - 0x1p-30));
}

#endif
