/* kv_quantize_avx2: the groups of kv_quantize with AVX2.
 *
 * A vector has 8 floats, as many as a group has lanes. GCC does not make vectors of the
 * plain loops, because comparisons of floats may trap.
 */
#include "kv/quantize_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <string.h>

#    define TARGET __attribute__((target("avx2")))

enum { LANES = 8 };

TARGET static float smallest(__m256 v)
{
    __m128 w = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_min_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_min_ss(w, _mm_movehdup_ps(w)));
}

TARGET static float largest(__m256 v)
{
    __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_max_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}

TARGET static mls_group_range measure(const float *x, size_t count)
{
    __m256 low = _mm256_loadu_ps(x), high = low, not_finite = _mm256_setzero_ps();
    for (size_t i = 0; i < count; i += LANES) {
        const __m256 value = _mm256_loadu_ps(x + i);
        low = _mm256_min_ps(value, low);
        high = _mm256_max_ps(value, high);
        /* 0 becomes NaN once an element is infinite or NaN */
        not_finite = _mm256_add_ps(not_finite, _mm256_sub_ps(value, value));
    }
    const __m256 is_nan = _mm256_cmp_ps(not_finite, not_finite, _CMP_UNORD_Q);
    return (mls_group_range){smallest(low), largest(high),
                             _mm256_movemask_ps(is_nan) == 0};
}

TARGET static void encode(const float *x, size_t count, float scale, float bias,
                          float levels, unsigned char *codes)
{
    const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
    const __m256 most = _mm256_set1_ps(levels), zero = _mm256_setzero_ps();
    for (size_t i = 0; i < count; i += LANES) {
        __m256 v = _mm256_sub_ps(_mm256_loadu_ps(x + i), biases);
        v = _mm256_max_ps(_mm256_div_ps(v, scales), zero); /* NaN: zero */
        const __m256i wide = _mm256_cvtps_epi32(_mm256_min_ps(v, most));
        const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(wide),
                                              _mm256_extracti128_si256(wide, 1));
        _mm_storel_epi64((__m128i *)(void *)(codes + i), _mm_packus_epi16(pairs, pairs));
    }
}

TARGET static void decode(const unsigned char *codes, size_t count, float scale,
                          float bias, float *x)
{
    const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
    for (size_t i = 0; i < count; i += LANES) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(codes + i));
        const __m256 v = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_mul_ps(v, scales), biases));
    }
}

TARGET static void join(const unsigned char *from, size_t count, unsigned char *to)
{
    const __m128i weights = _mm_set1_epi16(0x1001); /* 1 and 16 */
    for (size_t i = 0; i < count; i += LANES) {
        const __m128i codes = _mm_loadl_epi64((const __m128i *)(const void *)(from + i));
        const __m128i pairs = _mm_maddubs_epi16(codes, weights);
        const int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
        memcpy(to + i / 2, &bytes, sizeof bytes);
    }
}

TARGET static void split(const unsigned char *from, size_t count, unsigned char *to)
{
    const __m128i low = _mm_set1_epi8(15);
    for (size_t i = 0; i < count; i += LANES) {
        int bytes;
        memcpy(&bytes, from + i / 2, sizeof bytes);
        const __m128i wide = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(bytes));
        const __m128i codes =
            _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), low);
        _mm_storel_epi64((__m128i *)(void *)(to + i), codes);
    }
}

const mls_group_kernels mls_group_avx2 = {measure, encode, decode, join, split};

#endif
