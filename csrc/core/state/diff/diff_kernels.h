/* diff_kernels: tables and helpers of the kernel files; private to diff*.c.
 *
 * Each kernel file defines one table; mls_diff_of chooses the table. mls_cpu_offers tests
 * whether the processor supports a table's instruction set.
 */
#ifndef MLS_DIFF_KERNELS_H
#define MLS_DIFF_KERNELS_H

#include "array/float_convert.h"
#include "state/diff/diff.h"

/* The tables; constant and complete. */
MLS_CPU_TABLES(mls_diff_kernels, mls_diff);

/* The reference kernels. Vector kernels use them for the last items that do not fill a
 * vector, for blocks with NaN, and for dtypes without a vector kernel. */
#define MLS_DIFF_DECLARATION(id, suffix, ...)                                            \
    void mls_diff_##suffix(const void *a, const void *b, size_t count,                   \
                           mls_diff_result *into);
MLS_DTYPES(MLS_DIFF_DECLARATION)

/* Entries of every table that have only a reference kernel. */
#define MLS_DIFF_ENTRY(id, suffix, ...) [MLS_##id] = mls_diff_##suffix,
#define MLS_DIFF_RARE                                                                    \
    [MLS_I64] = mls_diff_i64, [MLS_U64] = mls_diff_u64,                                  \
    MLS_COMPLEX_DTYPES(MLS_DIFF_ENTRY) MLS_FLOAT8_DTYPES(MLS_DIFF_ENTRY)

/* Defines the registers of `bytes` bytes for diff_simd.h, with the compiler's vector
 * extensions. Comparisons yield lanes with all bits set. */
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
enum {
    MLS_DIFF_NEAREST = 0x1F80,
    MLS_DIFF_UP = 0x5F80
}; /* no traps, no flushing to zero */

static inline unsigned mls_diff_control(void)
{
    unsigned control;
    __asm__ volatile("stmxcsr %0" : "=m"(control));
    return control;
}

/* The compiler does not move loads or stores, or computations from loaded values, across
 * this call. */
static inline void mls_diff_set_control(unsigned control)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(control) : "memory");
}
#elif defined(__aarch64__)
enum { MLS_DIFF_NEAREST = 0, MLS_DIFF_UP = 1 << 22 }; /* no traps, no flushing to zero */

static inline unsigned mls_diff_control(void)
{
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return (unsigned)control;
}

/* The compiler does not move loads or stores, or computations from loaded values, across
 * this call. */
static inline void mls_diff_set_control(unsigned control)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)control) : "memory");
}
#endif

/* Returns the greatest relative distance at the end of a run: infinite if the greatest
 * distance is. */
static inline double mls_diff_final_ratio(double max_abs, double max_rel)
{
    return max_abs > 0x1.fffffffffffffp+1023 ? max_abs : max_rel;
}

/* Returns slightly less than half a unit in the last place of `value` (0 for 0). A
 * quotient is rounded to more than `value` only if it exceeds `value` by that much. */
static inline double mls_diff_half_unit(double value)
{
    const double power = mls_f64_from_bits(mls_f64_bits(value) & 0x7FF0000000000000U);
    return power * (0x1p-53 * (1 - 0x1p-30));
}

#endif
