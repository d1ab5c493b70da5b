/* copy_kernels: declarations that copy.c and the kernel files share; private to copy*.c.
 *
 * Each kernel file exports its tables and nothing else. A table exists only on its
 * architecture. mls_cpu_offers tells whether the machine can run it; only mls_kernels_of
 * chooses one.
 */
#ifndef MLS_COPY_KERNELS_H
#define MLS_COPY_KERNELS_H

#include "array/copy/copy.h"

/* Constant tables. No entry is NULL except `pad_rows` and the diagonal of `convert`. */
MLS_CPU_TABLES(mls_kernels, mls_kernels);

/* The scalar runs, used for the ends of vector runs and for pairs without a vector
 * kernel. mls_run_A_B converts A to B. */
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

/* The conversions of a vector table. Its file defines runs named A_B for pairs of 16- and
 * 32-bit floats. Conversions from or to float64 are rare and use the scalar runs. */
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

/* Return whether all bytes of the pattern are equal, as in zero; memset can then fill
 * it. */
static inline bool mls_pattern_is_byte(uint64_t pattern)
{
    return pattern == (pattern & 0xFFU) * 0x0101010101010101U;
}

/* Return the pattern to continue a fill with, after `offset` bytes of it were stored. */
static inline uint64_t mls_pattern_at(uint64_t pattern, size_t offset)
{
    const unsigned bits = (unsigned)(offset % 8) * 8;
    return bits == 0 ? pattern : (pattern >> bits) | (pattern << (64 - bits));
}

/* Return the bytes from `address` up to the next multiple of `alignment` (a power of
 * two); 0 if it is already a multiple. */
static inline size_t mls_bytes_to_align(const void *address, size_t alignment)
{
    return (size_t)(-(uintptr_t)address & (alignment - 1));
}

#endif
