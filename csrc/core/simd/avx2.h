/* avx2: AVX2 and F16C, 8 floats or 4 doubles at a time, rounding to float16 and bfloat16,
 * for kernels that run only if mls_cpu_offers(MLS_CPU_AVX2).
 *
 * FMA instructions are not used, because product and sum are rounded separately. x86.h
 * has the conversions that AVX2 and AVX-512 share.
 */
#ifndef MLS_SIMD_AVX2_H
#define MLS_SIMD_AVX2_H

#include <immintrin.h>

#define MLS_TARGET        __attribute__((target("avx2,f16c")))
#define MLS_MM(name)      _mm256_##name
#define MLS_HALF_MM(name) _mm_##name

enum { WIDTH = 32 };
typedef __m128 half_floats;
typedef __m128i half_register;

#include "simd/registers.h"

MLS_TARGET static inline __m128i load_half(const unsigned char *items)
{
    return _mm_loadu_si128((const __m128i *)(const void *)items);
}

/* Loads 8 bytes; the upper half is zero. */
MLS_TARGET static inline __m128i load_quarter(const unsigned char *items)
{
    return _mm_loadl_epi64((const __m128i *)(const void *)items);
}

MLS_TARGET static inline void store_half(unsigned char *items, __m128i half)
{
    _mm_storeu_si128((__m128i *)(void *)items, half);
}

#include "simd/x86.h"

/* Rounds to bfloat16, ties to even, by an addition on the bits; the results are in the
 * upper halves of the 32-bit lanes, and the lower ones are undefined. Wrong for NaN. */
MLS_TARGET static inline __m256i rounded_numbers(floats values)
{
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    return _mm256_add_epi32(bits, bias);
}

/* As rounded_numbers, but a NaN keeps its upper half with the quiet bit set. */
MLS_TARGET static inline __m256i rounded_upper(floats values)
{
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(rounded_numbers(values), quiet, nan);
}

/* Stores floats rounded to bfloat16, as rounded_upper, to any address. */
MLS_TARGET static inline void store_bf16(unsigned char *items, floats values)
{
    const __m256i all = _mm256_srli_epi32(rounded_upper(values), 16);
    const __m128i low = _mm256_castsi256_si128(all);
    const __m128i high = _mm256_extracti128_si256(all, 1);
    store_half(items, _mm_packus_epi32(low, high));
}

/* Rounds both to bfloat16 and interleaves them: `even` in the lower halves of the 32-bit
 * lanes, `odd` in the upper halves, so that memory has the items in turn. NaNs are rare:
 * one branch is cheaper than two blends. */
MLS_TARGET static inline floats join_bf16(floats even, floats odd)
{
    enum { UPPER_HALVES = 0xAA };
    __m256i low = rounded_numbers(even), high = rounded_numbers(odd);
    if (_mm256_movemask_ps(_mm256_cmp_ps(even, odd, _CMP_UNORD_Q)) != 0) {
        low = rounded_upper(even);
        high = rounded_upper(odd);
    }
    return _mm256_castsi256_ps(
        _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, UPPER_HALVES));
}

MLS_TARGET static inline doubles lower_half(floats values)
{
    return _mm256_cvtps_pd(_mm256_castps256_ps128(values));
}

MLS_TARGET static inline doubles upper_half(floats values)
{
    return _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
}

/* Returns a register with `first` and then `second`, rounded to float16 (pack_bf16: to
 * bfloat16). */
MLS_TARGET static inline floats pack_f16(floats first, floats second)
{
    return _mm256_castsi256_ps(_mm256_set_m128i(half_f16(second), half_f16(first)));
}

/* The pack instruction works on each 128-bit half, so the result is reordered. */
MLS_TARGET static inline floats pack_bf16(floats first, floats second)
{
    const __m256i packed =
        _mm256_packus_epi32(_mm256_srli_epi32(rounded_upper(first), 16),
                            _mm256_srli_epi32(rounded_upper(second), 16));
    return _mm256_castsi256_ps(_mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
}

#endif
