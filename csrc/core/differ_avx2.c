/* differ_avx2: compare elements with AVX2, 4 doubles at a time.
 *
 * The loops are those of differ_lanes.h; here is what one register does.  Comparisons
 * give lanes of all ones or all zeros; unsigned integers of 32 bits, for which there is
 * no conversion, are moved into the signed range and back.
 */
#include "differ_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET __attribute__((target("avx2,fma,f16c,popcnt")))

enum { WIDTH = 32, LANES = 4 };
typedef __m256d vector;
typedef __m256 wide;
typedef __m256d flags; /* of floats, 8 of half the width */
#    define NO_FLAGS _mm256_setzero_pd()

/* 4 items of 4, of 2 and of 1 byte, from any address. */
TARGET static inline __m128i load_128(const unsigned char *items)
{
    return _mm_loadu_si128((const __m128i *)(const void *)items);
}

/* The upper half is zero. */
TARGET static inline __m128i load_64(const unsigned char *items)
{
    return _mm_loadl_epi64((const __m128i *)(const void *)items);
}

/* By memcpy, since there is no load of so little. */
TARGET static inline __m128i load_32(const unsigned char *items)
{
    int bits;
    memcpy(&bits, items, sizeof bits);
    return _mm_cvtsi32_si128(bits);
}

/* Floats: all of these are exact. */
TARGET static inline vector load_f64(const unsigned char *items)
{
    return _mm256_loadu_pd((const double *)(const void *)items);
}

/* Widened once. */
TARGET static inline vector load_f32(const unsigned char *items)
{
    return _mm256_cvtps_pd(_mm_castsi128_ps(load_128(items)));
}

/* Widened twice: by the instruction for float16, then to doubles. */
TARGET static inline vector load_f16(const unsigned char *items)
{
    return _mm256_cvtps_pd(_mm_cvtph_ps(load_64(items)));
}

/* Each is the upper half of a float. */
TARGET static inline vector load_bf16(const unsigned char *items)
{
    const __m128i widened = _mm_cvtepu16_epi32(load_64(items));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(widened, 16)));
}

/* Integers: exact up to 32 bits. */
TARGET static inline vector load_i32(const unsigned char *items)
{
    return _mm256_cvtepi32_pd(load_128(items));
}

/* Moved down by 2**31 as an integer, and up again as a double. */
TARGET static inline vector load_u32(const unsigned char *items)
{
    const __m128i moved = _mm_xor_si128(load_128(items), _mm_set1_epi32(INT32_MIN));
    return _mm256_add_pd(_mm256_cvtepi32_pd(moved), _mm256_set1_pd(0x1p31));
}

/* With the sign spread over 32 bits. */
TARGET static inline vector load_i16(const unsigned char *items)
{
    return _mm256_cvtepi32_pd(_mm_cvtepi16_epi32(load_64(items)));
}

/* With zeros above, so that the signed conversion serves. */
TARGET static inline vector load_u16(const unsigned char *items)
{
    return _mm256_cvtepi32_pd(_mm_cvtepu16_epi32(load_64(items)));
}

/* As 16 bits, from fewer bytes. */
TARGET static inline vector load_i8(const unsigned char *items)
{
    return _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(load_32(items)));
}

/* As above, with zeros. */
TARGET static inline vector load_u8(const unsigned char *items)
{
    return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(load_32(items)));
}

/* Arithmetic on 4 doubles. */
TARGET static inline vector repeat(double value)
{
    return _mm256_set1_pd(value);
}

/* Rounded once, as the oracle's is. */
TARGET static inline vector subtract(vector x, vector y)
{
    return _mm256_sub_pd(x, y);
}

/* The slow one, which is why the loops avoid it. */
TARGET static inline vector divide(vector x, vector y)
{
    return _mm256_div_pd(x, y);
}

/* Without its sign, that of NaN too. */
TARGET static inline vector magnitude(vector x)
{
    return _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
}

/* The instruction gives its second operand where one is NaN. */
TARGET static inline vector larger(vector x, vector y)
{
    return _mm256_max_pd(x, y);
}

/* Across the lanes, half by half. */
TARGET static inline double greatest(vector x)
{
    const __m128d two =
        _mm_max_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
    return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
}

/* The product is not rounded, so the sign of what is left is right. */
TARGET static inline flags exceeds(vector d, vector m, vector ratio, vector half)
{
    const vector rest = _mm256_fnmadd_pd(ratio, m, d);
    return _mm256_cmp_pd(rest, _mm256_mul_pd(half, m), _CMP_GT_OQ);
}

/* NaN compares as neither more nor less nor equal. */
TARGET static inline flags unordered(vector x, vector y)
{
    return _mm256_cmp_pd(x, y, _CMP_UNORD_Q);
}

/* Flags are lanes of ones; the mask has a bit for each 4 bytes. */
TARGET static inline flags either(flags x, flags y)
{
    return _mm256_or_pd(x, y);
}

/* In step with `either`. */
TARGET static inline flags both(flags x, flags y)
{
    return _mm256_and_pd(x, y);
}

/* One test for all lanes. */
TARGET static inline bool any(flags x)
{
    return _mm256_movemask_ps(_mm256_castpd_ps(x)) != 0;
}

/* The unequal_N for items of the given bits: the mask has a bit for each byte. */
#    define DEFINE_UNEQUAL(bytes, bits)                                                  \
        TARGET static inline size_t unequal_##bytes(const unsigned char *a,              \
                                                    const unsigned char *b)              \
        {                                                                                \
            const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)a);      \
            const __m256i y = _mm256_loadu_si256((const __m256i *)(const void *)b);      \
            const int equal = _mm256_movemask_epi8(_mm256_cmpeq_epi##bits(x, y));        \
            return (size_t)__builtin_popcount(~(unsigned)equal) / (bytes);               \
        }

DEFINE_UNEQUAL(1, 8)
DEFINE_UNEQUAL(2, 16)
DEFINE_UNEQUAL(4, 32)
DEFINE_UNEQUAL(8, 64)

/* The sieve of 16-bit floats: 8 floats at a time. */
TARGET static inline wide wide_f16(const unsigned char *items)
{
    return _mm256_cvtph_ps(load_128(items));
}

/* As in load_bf16. */
TARGET static inline wide wide_bf16(const unsigned char *items)
{
    const __m256i bits = _mm256_cvtepu16_epi32(load_128(items));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

/* The same float in all lanes. */
TARGET static inline wide wide_repeat(float value)
{
    return _mm256_set1_ps(value);
}

/* Rounded to float32: this is what the sieve has to reckon with. */
TARGET static inline wide wide_subtract(wide x, wide y)
{
    return _mm256_sub_ps(x, y);
}

/* Slow for subnormal numbers, which weights hardly ever are. */
TARGET static inline wide wide_multiply(wide x, wide y)
{
    return _mm256_mul_ps(x, y);
}

/* As in `magnitude`. */
TARGET static inline wide wide_magnitude(wide x)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x);
}

/* The larger magnitude decides the relative distance. */
TARGET static inline wide wide_larger(wide x, wide y)
{
    return _mm256_max_ps(x, y);
}

/* The smaller one decides whether a difference is rounded. */
TARGET static inline wide wide_smaller(wide x, wide y)
{
    return _mm256_min_ps(x, y);
}

/* Ordered and quiet: NaN is never above, and sets no exception flag. */
TARGET static inline flags wide_above(wide x, wide y)
{
    return _mm256_castps_pd(_mm256_cmp_ps(x, y, _CMP_GT_OQ));
}

/* As above, equality included. */
TARGET static inline flags wide_least(wide x, wide y)
{
    return _mm256_castps_pd(_mm256_cmp_ps(x, y, _CMP_GE_OQ));
}

/* As in `unordered`. */
TARGET static inline flags wide_unordered(wide x, wide y)
{
    return _mm256_castps_pd(_mm256_cmp_ps(x, y, _CMP_UNORD_Q));
}

#    include "differ_lanes.h"

/* mls_cpu_offers(MLS_CPU_AVX2) must be true before any of these is called. */
const mls_differ_kernels mls_differ_avx2 = {.run = MLS_DIFFER_TABLE};

#endif
