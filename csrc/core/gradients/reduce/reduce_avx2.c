/* reduce_avx2: sums and tallies with AVX2 and F16C, 8 floats or 4 doubles at a time.
 *
 * The loops are those of reduce_simd.h; here is what one register does.  The set has
 * FMA as well, which is not used: product and sum are rounded each.
 */
#include "gradients/reduce/reduce_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET __attribute__((target("avx2,f16c")))

enum { WIDTH = 32 };
typedef __m256 floats;
typedef __m256d doubles;

/* Half a register from any address. */
TARGET static inline __m128i load_128(const unsigned char *items)
{
    return _mm_loadu_si128((const __m128i *)(const void *)items);
}

/* The upper half is zero. */
TARGET static inline __m128i load_64(const unsigned char *items)
{
    return _mm_loadl_epi64((const __m128i *)(const void *)items);
}

/* Floats: all of these are exact. */
TARGET static inline floats floats_f32(const unsigned char *items)
{
    return _mm256_loadu_ps((const float *)(const void *)items);
}

/* By the instruction for it. */
TARGET static inline floats floats_f16(const unsigned char *items)
{
    return _mm256_cvtph_ps(load_128(items));
}

/* Each is the upper half of a float. */
TARGET static inline floats floats_bf16(const unsigned char *items)
{
    const __m256i widened = _mm256_cvtepu16_epi32(load_128(items));
    return _mm256_castsi256_ps(_mm256_slli_epi32(widened, 16));
}

/* As they are. */
TARGET static inline void store_f32(unsigned char *items, floats values)
{
    _mm256_storeu_ps((float *)(void *)items, values);
}

/* The rounding is named, so that the thread's own mode has no say. */
TARGET static inline void store_f16(unsigned char *items, floats values)
{
    const __m128i halves =
        _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)(void *)items, halves);
}

/* Rounded by an addition, as in copy_avx2.c, in the upper halves; NaNs are lost. */
TARGET static inline __m256i rounded_numbers(floats values)
{
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    return _mm256_add_epi32(bits, bias);
}

/* The same; a NaN keeps its upper half with the quiet bit set. */
TARGET static inline __m256i rounded_upper(floats values)
{
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(rounded_numbers(values), quiet, nan);
}

/* The same in the lower halves. */
TARGET static inline __m256i rounded_bf16(floats values)
{
    return _mm256_srli_epi32(rounded_upper(values), 16);
}

/* The lower halves of both, in one. */
TARGET static inline void store_bf16(unsigned char *items, floats values)
{
    const __m256i all = rounded_bf16(values);
    const __m128i low = _mm256_castsi256_si128(all);
    const __m128i high = _mm256_extracti128_si256(all, 1);
    _mm_storeu_si128((__m128i *)(void *)items, _mm_packus_epi32(low, high));
}

/* The lower halves of pairs. */
TARGET static inline floats even_bf16(floats pairs)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}

/* The upper ones, which are where those of a float are. */
TARGET static inline floats odd_bf16(floats pairs)
{
    const __m256i upper = _mm256_set1_epi32((int)0xFFFF0000U);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), upper));
}

/* Each rounded, in its half.  NaNs are rare: one branch is cheaper than two blends. */
TARGET static inline floats join_bf16(floats even, floats odd)
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

/* What store_X leaves of floats.  Compilers compute what both have in common once. */
TARGET static inline floats kept_f32(floats values)
{
    return values;
}

/* There and back. */
TARGET static inline floats kept_f16(floats values)
{
    return _mm256_cvtph_ps(
        _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* The first half of the floats, and the second, as doubles. */
TARGET static inline doubles lower_half(floats values)
{
    return _mm256_cvtps_pd(_mm256_castps256_ps128(values));
}

/* As above. */
TARGET static inline doubles upper_half(floats values)
{
    return _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
}

/* Doubles: exact as well. */
TARGET static inline doubles doubles_f64(const unsigned char *items)
{
    return _mm256_loadu_pd((const double *)(const void *)items);
}

/* Widened once. */
TARGET static inline doubles doubles_f32(const unsigned char *items)
{
    return _mm256_cvtps_pd(_mm_castsi128_ps(load_128(items)));
}

/* Widened twice. */
TARGET static inline doubles doubles_f16(const unsigned char *items)
{
    return _mm256_cvtps_pd(_mm_cvtph_ps(load_64(items)));
}

/* As above. */
TARGET static inline doubles doubles_bf16(const unsigned char *items)
{
    const __m128i widened = _mm_cvtepu16_epi32(load_64(items));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(widened, 16)));
}

/* To any address. */
TARGET static inline void store_f64(unsigned char *items, doubles values)
{
    _mm256_storeu_pd((double *)(void *)items, values);
}

/* The same number in all lanes. */
TARGET static inline floats repeat(float value)
{
    return _mm256_set1_ps(value);
}

/* As above. */
TARGET static inline doubles repeat_f64(double value)
{
    return _mm256_set1_pd(value);
}

#    include "gradients/reduce/reduce_simd.h"

void mls_sum_f32_avx2(void *out, const void *const *sources, size_t count, size_t start,
                      size_t n, double divisor)
{
    sum_f32(out, sources, count, start, n, divisor);
}

/* mls_cpu_offers(MLS_CPU_AVX2) must be true before any of these is called. */
const mls_reduce_kernels mls_reduce_avx2 = MLS_REDUCE_TABLE;

#endif
