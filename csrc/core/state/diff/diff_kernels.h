/* differ_kernels: what the kernel files share; private to differ*.c.
 *
 * Each kernel file defines one table and nothing else that is seen outside.  Whether the
 * machine at hand can run a table is for mls_cpu_offers to say, and mls_differ_of is the
 * one place that chooses.
 */
#ifndef MLS_DIFFER_KERNELS_H
#define MLS_DIFFER_KERNELS_H

#include "array/float_convert.h"
#include "state/diff/diff.h"

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

/* Define the registers of `bytes` bytes that diff_simd.h computes with, by the
 * compiler's vector extensions.  Comparisons give lanes of ones. */
#define MLS_DIFFER_REGISTERS(bytes)                                                      \
    typedef double vector __attribute__((vector_size(bytes)));                           \
    typedef float wide __attribute__((vector_size(bytes)));                              \
    typedef float half_wide __attribute__((vector_size((bytes) / 2)));                   \
    typedef int32_t signed_32 __attribute__((vector_size(bytes)));                       \
    typedef int32_t half_signed __attribute__((vector_size((bytes) / 2)));               \
    typedef uint8_t bits_8 __attribute__((vector_size(bytes)));                          \
    typedef uint16_t bits_16 __attribute__((vector_size(bytes)));                        \
    typedef uint32_t bits_32 __attribute__((vector_size(bytes)));                        \
    typedef uint64_t bits_64 __attribute__((vector_size(bytes)))

/* The processor's control register for floating-point arithmetic. */
#if defined(__x86_64__)
enum { MLS_DIFFER_NEAREST = 0x1F80, MLS_DIFFER_UP = 0x5F80 }; /* no traps, no flushing */

static inline unsigned mls_differ_control(void)
{
    unsigned control;
    __asm__ volatile("stmxcsr %0" : "=m"(control));
    return control;
}

/* The compiler moves no load and no store past this, nor what is computed from one. */
static inline void mls_differ_set_control(unsigned control)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(control) : "memory");
}
#elif defined(__aarch64__)
enum { MLS_DIFFER_NEAREST = 0, MLS_DIFFER_UP = 1 << 22 }; /* no traps, no flushing */

static inline unsigned mls_differ_control(void)
{
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return (unsigned)control;
}

/* The compiler moves no load and no store past this, nor what is computed from one. */
static inline void mls_differ_set_control(unsigned control)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)control) : "memory");
}
#endif

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
