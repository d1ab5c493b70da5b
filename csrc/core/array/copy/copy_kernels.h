/* copy_kernels: what the kernel files share; private to copy*.c.
 *
 * Each kernel file defines one table and nothing else that is seen outside.  A table
 * exists only where its architecture does; whether the machine at hand can run it is for
 * mls_cpu_offers to say, and mls_kernels_of is the one place that chooses.
 */
#ifndef MLS_COPY_KERNELS_H
#define MLS_COPY_KERNELS_H

#include "array/copy/copy.h"

/* The tables, constant and complete: no entry but the diagonal of `convert` is NULL. */
extern const mls_kernels mls_kernels_scalar;
#if defined(__x86_64__)
extern const mls_kernels mls_kernels_avx2;
extern const mls_kernels mls_kernels_avx512;
#endif
#if defined(__aarch64__)
extern const mls_kernels mls_kernels_neon;
#endif

/* The oracle's runs, for the ends of vector runs and for pairs without a vector kernel.
 * mls_run_A_B converts A to B. */
void mls_run_f16_bf16(void *dst, const void *src, size_t count, mls_store store);
void mls_run_f16_f32(void *dst, const void *src, size_t count, mls_store store);
void mls_run_f16_f64(void *dst, const void *src, size_t count, mls_store store);
void mls_run_bf16_f16(void *dst, const void *src, size_t count, mls_store store);
void mls_run_bf16_f32(void *dst, const void *src, size_t count, mls_store store);
void mls_run_bf16_f64(void *dst, const void *src, size_t count, mls_store store);
void mls_run_f32_f16(void *dst, const void *src, size_t count, mls_store store);
void mls_run_f32_bf16(void *dst, const void *src, size_t count, mls_store store);
void mls_run_f32_f64(void *dst, const void *src, size_t count, mls_store store);
void mls_run_f64_f16(void *dst, const void *src, size_t count, mls_store store);
void mls_run_f64_bf16(void *dst, const void *src, size_t count, mls_store store);
void mls_run_f64_f32(void *dst, const void *src, size_t count, mls_store store);

/* The conversions of a vector table, whose file has runs called A_B for the pairs of 16-
 * and 32-bit floats; those with float64 are rare and left to the oracle's. */
#define MLS_CONVERT_TABLE                                                                \
    {                                                                                    \
        [MLS_F16] =                                                                      \
            {[MLS_BF16] = f16_bf16, [MLS_F32] = f16_f32, [MLS_F64] = mls_run_f16_f64},   \
        [MLS_BF16] =                                                                     \
            {[MLS_F16] = bf16_f16, [MLS_F32] = bf16_f32, [MLS_F64] = mls_run_bf16_f64},  \
        [MLS_F32] =                                                                      \
            {[MLS_F16] = f32_f16, [MLS_BF16] = f32_bf16, [MLS_F64] = mls_run_f32_f64},   \
        [MLS_F64] = {[MLS_F16] = mls_run_f64_f16,                                        \
                     [MLS_BF16] = mls_run_f64_bf16,                                      \
                     [MLS_F32] = mls_run_f64_f32},                                       \
    }

/* Whether a pattern repeats one byte, as zero does: the C library's memset fills it. */
static inline bool mls_pattern_is_byte(uint64_t pattern)
{
    return pattern == (pattern & 0xFFU) * 0x0101010101010101U;
}

/* The pattern as it reads `offset` bytes further on: what a fill goes on with after
 * storing that many bytes. */
static inline uint64_t mls_pattern_at(uint64_t pattern, size_t offset)
{
    const unsigned bits = (unsigned)(offset % 8) * 8;
    return bits == 0 ? pattern : (pattern >> bits) | (pattern << (64 - bits));
}

/* Bytes from `address` up to the next multiple of `alignment` (a power of two); 0 where
 * it is one already. */
static inline size_t mls_bytes_to_align(const void *address, size_t alignment)
{
    return (size_t)(-(uintptr_t)address & (alignment - 1));
}

#endif
