/* kv_quantize_avx2: the groups of kv_quantize with AVX2.
 *
 * A vector has 8 floats, and the size of a group is a multiple of 8. Scales and biases
 * are computed for 8 groups at a time. GCC does not make vectors of the plain loops,
 * because comparisons of floats may trap.
 */
#include "kv/quantize_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET __attribute__((target("avx2")))

enum { LANES = 8, BYTES = 16 };

TARGET static inline __m128i load_16(const void *bytes)
{
    return _mm_loadu_si128((const __m128i *)bytes);
}

TARGET static inline void store_16(void *bytes, __m128i v)
{
    _mm_storeu_si128((__m128i *)bytes, v);
}

/* ---- scales and biases ---- */

TARGET static inline float smallest(__m256 v)
{
    __m128 w = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_min_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_min_ss(w, _mm_movehdup_ps(w)));
}

TARGET static inline float largest(__m256 v)
{
    __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_max_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}

TARGET static inline bool has_nan(__m256 v)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0;
}

/* mls_choose_affine for 8 groups. Returns NaN in lanes whose range is not finite. */
TARGET static inline __m256 choose_8(const float *lows, const float *highs, __m256 levels,
                                     float *scales, float *biases)
{
    const __m256 sign = _mm256_set1_ps(-0.0F), zero = _mm256_setzero_ps();
    const __m256 low = _mm256_loadu_ps(lows), high = _mm256_loadu_ps(highs);
    const __m256 range = _mm256_sub_ps(high, low);
    const __m256 from_low = _mm256_cmp_ps(_mm256_andnot_ps(sign, low),
                                          _mm256_andnot_ps(sign, high), _CMP_GT_OQ);
    const __m256 size =
        _mm256_max_ps(_mm256_div_ps(range, levels), _mm256_set1_ps(1e-7F));
    const __m256 scale = _mm256_xor_ps(size, _mm256_andnot_ps(from_low, sign));
    const __m256 edge = _mm256_blendv_ps(high, low, from_low);
    const __m256 steps = _mm256_round_ps(_mm256_div_ps(edge, scale),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 moves = _mm256_cmp_ps(_mm256_andnot_ps(sign, steps), zero, _CMP_GT_OQ);
    _mm256_storeu_ps(scales, _mm256_blendv_ps(scale, _mm256_div_ps(edge, steps), moves));
    _mm256_storeu_ps(biases, _mm256_and_ps(edge, moves));
    return _mm256_mul_ps(range, zero);
}

TARGET static bool choose(const float *x, size_t groups, size_t size, float levels,
                          float *scales, float *biases)
{
    const __m256 most = _mm256_set1_ps(levels), zero = _mm256_setzero_ps();
    __m256 not_finite = zero; /* gets the bits of a NaN */
    float lows[LANES], highs[LANES];
    for (size_t first = 0; first < groups; first += LANES) {
        const size_t count = groups - first < LANES ? groups - first : LANES;
        for (size_t group = 0; group < count; group++, x += size) {
            __m256 low = _mm256_loadu_ps(x), high = low;
            for (size_t i = 0; i < size; i += LANES) {
                const __m256 value = _mm256_loadu_ps(x + i);
                low = _mm256_min_ps(value, low);
                high = _mm256_max_ps(value, high);
                not_finite = _mm256_or_ps(not_finite, _mm256_mul_ps(value, zero));
            }
            lows[group] = smallest(low);
            highs[group] = largest(high);
        }
        if (count == LANES) {
            not_finite = _mm256_or_ps(
                not_finite, choose_8(lows, highs, most, scales + first, biases + first));
            continue;
        }
        for (size_t i = 0; i < count; i++) {
            if (!mls_choose_affine(lows[i], highs[i], levels, &scales[first + i],
                                   &biases[first + i])) {
                return false;
            }
        }
    }
    return !has_nan(not_finite);
}

/* ---- codes ---- */

TARGET static inline __m256i encode_8(const float *x, __m256 scale, __m256 bias,
                                      __m256 levels)
{
    const __m256 v = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(x), bias), scale);
    const __m256 positive = _mm256_max_ps(v, _mm256_setzero_ps()); /* NaN: zero */
    return _mm256_cvtps_epi32(_mm256_min_ps(positive, levels));
}

TARGET static void encode(const float *x, size_t groups, size_t size, float levels,
                          const float *scales, const float *biases, unsigned char *codes)
{
    const __m256 most = _mm256_set1_ps(levels);
    for (size_t group = 0; group < groups; group++) {
        const __m256 scale = _mm256_set1_ps(scales[group]);
        const __m256 bias = _mm256_set1_ps(biases[group]);
        for (size_t i = 0; i < size; i += LANES, x += LANES, codes += LANES) {
            const __m256i wide = encode_8(x, scale, bias, most);
            const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(wide),
                                                  _mm256_extracti128_si256(wide, 1));
            _mm_storel_epi64((__m128i *)(void *)codes, _mm_packus_epi16(pairs, pairs));
        }
    }
}

TARGET static void decode(const unsigned char *codes, size_t groups, size_t size,
                          const float *scales, const float *biases, float *x)
{
    for (size_t group = 0; group < groups; group++) {
        const __m256 scale = _mm256_set1_ps(scales[group]);
        const __m256 bias = _mm256_set1_ps(biases[group]);
        for (size_t i = 0; i < size; i += LANES, x += LANES, codes += LANES) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)codes);
            const __m256 v = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
            _mm256_storeu_ps(x, _mm256_add_ps(_mm256_mul_ps(v, scale), bias));
        }
    }
}

/* ---- strings of bits ---- */

/* Joins 16 codes at a time: pairs of codes by one multiplication, pairs of pairs by the
 * next one, and 8 codes by shifts in each half of the register. */
TARGET static void join(const unsigned char *codes, size_t count, unsigned bits,
                        unsigned char *joined)
{
    const __m128i pair_weights = _mm_set1_epi16((short)(1 | 1 << (bits + 8)));
    const __m128i weights = _mm_set1_epi32(1 | 1 << (2 * bits + 16));
    const __m128i low = _mm_set1_epi64x(0xFFFFFFFF);
    const __m128i shift = _mm_cvtsi32_si128((int)(32 - 4 * bits));
    unsigned char places[BYTES];
    for (unsigned i = 0; i < BYTES; i++) { /* a place of 128 and more becomes 0 */
        places[i] = (unsigned char)(i < bits ? i : i < 2 * bits ? 8 + i - bits : 128);
    }
    const __m128i order = load_16(places);
    size_t i = 0;
    for (; i + BYTES <= count; i += BYTES, joined += 2 * bits) {
        const __m128i pairs = _mm_maddubs_epi16(load_16(codes + i), pair_weights);
        const __m128i fours = _mm_madd_epi16(pairs, weights);
        const __m128i upper = _mm_srl_epi64(_mm_andnot_si128(low, fours), shift);
        const __m128i eights = _mm_or_si128(_mm_and_si128(low, fours), upper);
        store_16(joined, _mm_shuffle_epi8(eights, order));
    }
    if (i < count) {
        mls_join_8(codes + i, bits, joined);
    }
}

/* Splits 16 codes at a time. A 16-bit lane gets the two bytes with its code, a
 * multiplication moves the code to the upper end of the lane, and a shift to the lower
 * one. */
TARGET static void split(const unsigned char *joined, size_t count, unsigned bits,
                         unsigned char *codes)
{
    unsigned char places[2 * BYTES];
    uint16_t factors[BYTES];
    for (unsigned i = 0; i < BYTES; i++) {
        places[2 * i] = (unsigned char)(i * bits / 8);
        places[2 * i + 1] = (unsigned char)(i * bits / 8 + 1);
        factors[i] = (uint16_t)(1U << (16 - bits - i * bits % 8));
    }
    const __m256i order = _mm256_loadu_si256((const __m256i *)(const void *)places);
    const __m256i factor = _mm256_loadu_si256((const __m256i *)(const void *)factors);
    const __m128i shift = _mm_cvtsi32_si128((int)(16 - bits));
    size_t i = 0;
    for (; i + BYTES <= count; i += BYTES, joined += 2 * bits) {
        const __m256i bytes = _mm256_broadcastsi128_si256(load_16(joined));
        const __m256i lanes =
            _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, order), factor);
        const __m256i wide = _mm256_srl_epi16(lanes, shift);
        store_16(codes + i, _mm_packus_epi16(_mm256_castsi256_si128(wide),
                                             _mm256_extracti128_si256(wide, 1)));
    }
    if (i < count) {
        mls_split_8(joined, bits, codes + i);
    }
}

const mls_group_kernels mls_group_avx2 = {choose, encode, decode, join, split};

#endif
