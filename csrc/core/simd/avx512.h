/* avx512: AVX-512, 16 floats or 8 doubles at a time, rounding to float16 and bfloat16,
 * for kernels that run only if mls_cpu_offers(MLS_CPU_AVX512).
 *
 * The bfloat16 instructions are not used: they treat subnormal numbers as zero.
 */
#ifndef MLS_SIMD_AVX512_H
#define MLS_SIMD_AVX512_H

#include <immintrin.h>

#define MLS_TARGET        __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#define MLS_MM(name)      _mm512_##name
#define MLS_HALF_MM(name) _mm256_##name

enum { WIDTH = 64 };
typedef __m256 half_floats;
typedef __m256i half_register;

#include "simd/registers.h"

MLS_TARGET static inline __m128i load_quarter(const unsigned char *items)
{
    return _mm_loadu_si128((const __m128i *)(const void *)items);
}

MLS_TARGET static inline __m256i load_half(const unsigned char *items)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)items);
}

MLS_TARGET static inline void store_half(unsigned char *items, __m256i half)
{
    _mm256_storeu_si256((__m256i *)(void *)items, half);
}

#include "simd/x86.h"

/* Rounds to bfloat16, ties to even, by an addition on the bits; the results are in the
 * upper halves of the 32-bit lanes, and the lower ones are undefined. A NaN keeps its
 * upper half with the quiet bit set. */
MLS_TARGET static inline __m512i rounded_bf16(floats values)
{
    const __m512i bits = _mm512_castps_si512(values);
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << 16));
    const __m512i half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    const __m512i even = _mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
    return _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(1 << 22));
}

MLS_TARGET static inline void store_bf16(unsigned char *items, floats values)
{
    const __m512i upper = _mm512_srli_epi32(rounded_bf16(values), 16);
    store_half(items, _mm512_cvtepi32_epi16(upper));
}

/* Rounds both to bfloat16 and interleaves them: `even` in the lower halves of the 32-bit
 * lanes, `odd` in the upper halves, so that memory has the items in turn. */
MLS_TARGET static inline floats join_bf16(floats even, floats odd)
{
    const __m512i lower = _mm512_srli_epi32(rounded_bf16(even), 16);
    const __mmask32 odds = 0xAAAAAAAAU;
    return _mm512_castsi512_ps(_mm512_mask_blend_epi16(odds, lower, rounded_bf16(odd)));
}

MLS_TARGET static inline doubles lower_half(floats values)
{
    return _mm512_cvtps_pd(_mm512_castps512_ps256(values));
}

MLS_TARGET static inline doubles upper_half(floats values)
{
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1));
}

#endif
