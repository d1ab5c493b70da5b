/* differ_kernels: what the kernel files share; private to differ*.c.
 *
 * Each kernel file defines one table and nothing else that is seen outside.  Whether the
 * machine at hand can run a table is for mls_cpu_offers to say, and mls_diff_of is the
 * one place that chooses.
 */
#ifndef MLS_DIFF_KERNELS_H
#define MLS_DIFF_KERNELS_H

#include "array/float_convert.h"
#include "state/diff/diff.h"

/* The tables, constant and complete. */
extern const mls_diff_kernels mls_diff_scalar;
#if defined(__x86_64__)
extern const mls_diff_kernels mls_diff_avx2;
extern const mls_diff_kernels mls_diff_avx512;
#endif
#if defined(__aarch64__)
extern const mls_diff_kernels mls_diff_neon;
#endif

/* The oracle's runs, for what fills no vector, for what has NaN in it, and for dtypes
 * without a vector kernel. */
#define MLS_DIFF_DECLARATION(id, suffix, ...)                                            \
    void mls_diff_##suffix(const void *a, const void *b, size_t count,                   \
                           mls_diff_result *into);
MLS_DTYPES(MLS_DIFF_DECLARATION)

/* The part of every table that only the oracle has runs for. */
#define MLS_DIFF_ENTRY(id, suffix, ...) [MLS_##id] = mls_diff_##suffix,
#define MLS_DIFF_RARE                                                                    \
    [MLS_I64] = mls_diff_i64, [MLS_U64] = mls_diff_u64,                                  \
    MLS_COMPLEX_DTYPES(MLS_DIFF_ENTRY) MLS_FLOAT8_DTYPES(MLS_DIFF_ENTRY)

/* Define the registers of `bytes` bytes that diff_simd.h computes with, by the
 * compiler's vector extensions.  Comparisons give lanes of ones. */
#define MLS_DIFF_REGISTERS(bytes)                                                        \
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
enum { MLS_DIFF_NEAREST = 0x1F80, MLS_DIFF_UP = 0x5F80 }; /* no traps, no flushing */

static inline unsigned mls_diff_control(void)
{
    unsigned control;
    __asm__ volatile("stmxcsr %0" : "=m"(control));
    return control;
}

/* The compiler moves no load and no store past this, nor what is computed from one. */
static inline void mls_diff_set_control(unsigned control)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(control) : "memory");
}
#elif defined(__aarch64__)
enum { MLS_DIFF_NEAREST = 0, MLS_DIFF_UP = 1 << 22 }; /* no traps, no flushing */

static inline unsigned mls_diff_control(void)
{
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return (unsigned)control;
}

/* The compiler moves no load and no store past this, nor what is computed from one. */
static inline void mls_diff_set_control(unsigned control)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)control) : "memory");
}
#endif

/* The relative distance that goes with the greatest distance, once a run is through:
 * where that is infinite, this is. */
static inline double mls_diff_settle(double max_abs, double max_rel)
{
    return max_abs > 0x1.fffffffffffffp+1023 ? max_abs : max_rel;
}

/* Half a unit in the last place of `value` (0 for 0), a little less: a quotient is
 * rounded to something greater than `value` only where it exceeds it by that much. */
static inline double mls_diff_half_unit(double value)
{
    const double power = mls_f64_from_bits(mls_f64_bits(value) & 0x7FF0000000000000U);
    return power * (0x1p-53 * (1 - 0x1p-30));
}

#endif
