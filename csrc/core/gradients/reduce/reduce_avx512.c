/* reduce_avx512: sums and tallies with AVX-512, 16 floats or 8 doubles at a time.
 *
 * The loops are those of reduce_simd.h; here is what one register does.  The set's own
 * bfloat16 instructions are not used: they treat subnormal numbers as zero.
 */
#include "gradients/reduce/reduce_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))

enum { WIDTH = 64 };
typedef __m512 floats;
typedef __m512d doubles;

/* 16 and 32 bytes from any address. */
TARGET static inline __m128i load_128(const unsigned char *items)
{
    return _mm_loadu_si128((const __m128i *)(const void *)items);
}

/* Half a register. */
TARGET static inline __m256i load_256(const unsigned char *items)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)items);
}

/* Floats: all of these are exact. */
TARGET static inline floats floats_f32(const unsigned char *items)
{
    return _mm512_loadu_ps(items);
}

/* By the instruction for it. */
TARGET static inline floats floats_f16(const unsigned char *items)
{
    return _mm512_cvtph_ps(load_256(items));
}

/* Each is the upper half of a float. */
TARGET static inline floats floats_bf16(const unsigned char *items)
{
    const __m512i widened = _mm512_cvtepu16_epi32(load_256(items));
    return _mm512_castsi512_ps(_mm512_slli_epi32(widened, 16));
}

/* As they are. */
TARGET static inline void store_f32(unsigned char *items, floats values)
{
    _mm512_storeu_ps(items, values);
}

/* The rounding is named, so that the thread's own mode has no say. */
TARGET static inline void store_f16(unsigned char *items, floats values)
{
    const __m256i halves =
        _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((__m256i *)(void *)items, halves);
}

/* Rounded by an addition, as in copy_avx2.c, in the upper halves; a NaN keeps its upper
 * half with the quiet bit set. */
TARGET static inline __m512i rounded_bf16(floats values)
{
    const __m512i bits = _mm512_castps_si512(values);
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << 16));
    const __m512i half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    const __m512i even = _mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
    return _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(1 << 22));
}

/* The upper halves alone. */
TARGET static inline void store_bf16(unsigned char *items, floats values)
{
    const __m512i upper = _mm512_srli_epi32(rounded_bf16(values), 16);
    _mm256_storeu_si256((__m256i *)(void *)items, _mm512_cvtepi32_epi16(upper));
}

/* The lower halves of pairs. */
TARGET static inline floats even_bf16(floats pairs)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}

/* The upper ones, which are where those of a float are. */
TARGET static inline floats odd_bf16(floats pairs)
{
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000U);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), upper));
}

/* Each rounded, in its half. */
TARGET static inline floats join_bf16(floats even, floats odd)
{
    const __m512i lower = _mm512_srli_epi32(rounded_bf16(even), 16);
    const __mmask32 odds = 0xAAAAAAAAU;
    return _mm512_castsi512_ps(_mm512_mask_blend_epi16(odds, lower, rounded_bf16(odd)));
}

/* What store_X leaves of floats.  Compilers compute what both have in common once. */
TARGET static inline floats kept_f32(floats values)
{
    return values;
}

/* There and back. */
TARGET static inline floats kept_f16(floats values)
{
    return _mm512_cvtph_ps(
        _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* The first half of the floats, and the second, as doubles. */
TARGET static inline doubles lower_half(floats values)
{
    return _mm512_cvtps_pd(_mm512_castps512_ps256(values));
}

/* As above. */
TARGET static inline doubles upper_half(floats values)
{
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1));
}

/* Doubles: exact as well. */
TARGET static inline doubles doubles_f64(const unsigned char *items)
{
    return _mm512_loadu_pd(items);
}

/* Widened once. */
TARGET static inline doubles doubles_f32(const unsigned char *items)
{
    return _mm512_cvtps_pd(_mm256_castsi256_ps(load_256(items)));
}

/* Widened twice. */
TARGET static inline doubles doubles_f16(const unsigned char *items)
{
    return _mm512_cvtps_pd(_mm256_cvtph_ps(load_128(items)));
}

/* As above. */
TARGET static inline doubles doubles_bf16(const unsigned char *items)
{
    const __m256i widened = _mm256_cvtepu16_epi32(load_128(items));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(widened, 16)));
}

/* To any address. */
TARGET static inline void store_f64(unsigned char *items, doubles values)
{
    _mm512_storeu_pd(items, values);
}

/* The same number in all lanes. */
TARGET static inline floats repeat(float value)
{
    return _mm512_set1_ps(value);
}

/* As above. */
TARGET static inline doubles repeat_f64(double value)
{
    return _mm512_set1_pd(value);
}

/* Two threads that add arrays of float32 are bound by memory, and took 3 to 10 % longer
 * with registers of 64 bytes than with 32 (16 to 256 MiB, AMD EPYC family 25 model 17).
 */
#    define MLS_SUM_F32 mls_sum_f32_avx2

#    include "gradients/reduce/reduce_simd.h"

/* mls_cpu_offers(MLS_CPU_AVX512) must be true before any of these is called. */
const mls_reduce_kernels mls_reduce_avx512 = MLS_REDUCE_TABLE;

#endif
