/* differ_avx512: compare elements with AVX-512, 8 doubles at a time.
 *
 * The loops are those of differ_lanes.h; here is what one register does.  Comparisons
 * give a mask, and unsigned integers are converted by instructions of their own.
 */
#include "differ_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET                                                                       \
        __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,popcnt")))

enum { WIDTH = 64, LANES = 8 };
typedef __m512d vector;
typedef __m512 wide;
typedef __mmask16 flags; /* of doubles, the lower half */
#    define NO_FLAGS 0

/* 8 items of 2, of 4 and of 8 bytes, or of 1, from any address. */
TARGET static inline __m128i load_128(const unsigned char *items)
{
    return _mm_loadu_si128((const __m128i *)(const void *)items);
}

/* Half a register. */
TARGET static inline __m256i load_256(const unsigned char *items)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)items);
}

/* The upper half is zero. */
TARGET static inline __m128i load_64(const unsigned char *items)
{
    return _mm_loadl_epi64((const __m128i *)(const void *)items);
}

/* Floats: all of these are exact. */
TARGET static inline vector load_f64(const unsigned char *items)
{
    return _mm512_loadu_pd(items);
}

/* Widened once. */
TARGET static inline vector load_f32(const unsigned char *items)
{
    return _mm512_cvtps_pd(_mm256_castsi256_ps(load_256(items)));
}

/* Widened twice: by the instruction for float16, then to doubles. */
TARGET static inline vector load_f16(const unsigned char *items)
{
    return _mm512_cvtps_pd(_mm256_cvtph_ps(load_128(items)));
}

/* Each is the upper half of a float. */
TARGET static inline vector load_bf16(const unsigned char *items)
{
    const __m256i widened = _mm256_cvtepu16_epi32(load_128(items));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(widened, 16)));
}

/* Integers: exact up to 32 bits. */
TARGET static inline vector load_i32(const unsigned char *items)
{
    return _mm512_cvtepi32_pd(load_256(items));
}

/* An instruction of its own. */
TARGET static inline vector load_u32(const unsigned char *items)
{
    return _mm512_cvtepu32_pd(load_256(items));
}

/* With the sign spread over 32 bits. */
TARGET static inline vector load_i16(const unsigned char *items)
{
    return _mm512_cvtepi32_pd(_mm256_cvtepi16_epi32(load_128(items)));
}

/* With zeros above, so that the signed conversion serves. */
TARGET static inline vector load_u16(const unsigned char *items)
{
    return _mm512_cvtepi32_pd(_mm256_cvtepu16_epi32(load_128(items)));
}

/* As 16 bits, from fewer bytes. */
TARGET static inline vector load_i8(const unsigned char *items)
{
    return _mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(load_64(items)));
}

/* As above, with zeros. */
TARGET static inline vector load_u8(const unsigned char *items)
{
    return _mm512_cvtepi32_pd(_mm256_cvtepu8_epi32(load_64(items)));
}

/* Arithmetic on 8 doubles. */
TARGET static inline vector repeat(double value)
{
    return _mm512_set1_pd(value);
}

/* Rounded once, as the oracle's is. */
TARGET static inline vector subtract(vector x, vector y)
{
    return _mm512_sub_pd(x, y);
}

/* The slow one: 16 cycles where the others take one. */
TARGET static inline vector divide(vector x, vector y)
{
    return _mm512_div_pd(x, y);
}

/* Without its sign, that of NaN too. */
TARGET static inline vector magnitude(vector x)
{
    return _mm512_abs_pd(x);
}

/* The instruction gives its second operand where one is NaN. */
TARGET static inline vector larger(vector x, vector y)
{
    return _mm512_max_pd(x, y);
}

/* Across the lanes, half by half. */
TARGET static inline double greatest(vector x)
{
    return _mm512_reduce_max_pd(x);
}

/* The product is not rounded, so the sign of what is left is right. */
TARGET static inline flags exceeds(vector d, vector m, vector ratio, vector half)
{
    const vector rest = _mm512_fnmadd_pd(ratio, m, d);
    return _mm512_cmp_pd_mask(rest, _mm512_mul_pd(half, m), _CMP_GT_OQ);
}

/* NaN compares as neither more nor less nor equal. */
TARGET static inline flags unordered(vector x, vector y)
{
    return _mm512_cmp_pd_mask(x, y, _CMP_UNORD_Q);
}

/* Flags are bits of a mask register. */
TARGET static inline flags either(flags x, flags y)
{
    return (flags)(x | y);
}

/* In step with `either`. */
TARGET static inline flags both(flags x, flags y)
{
    return (flags)(x & y);
}

/* One test for all lanes. */
TARGET static inline bool any(flags x)
{
    return x != 0;
}

/* The unequal_N for items of the given bits. */
#    define DEFINE_UNEQUAL(bytes, bits)                                                  \
        TARGET static inline size_t unequal_##bytes(const unsigned char *a,              \
                                                    const unsigned char *b)              \
        {                                                                                \
            return (size_t)__builtin_popcountll(_mm512_cmpneq_epi##bits##_mask(          \
                _mm512_loadu_si512(a), _mm512_loadu_si512(b)));                          \
        }

DEFINE_UNEQUAL(1, 8)
DEFINE_UNEQUAL(2, 16)
DEFINE_UNEQUAL(4, 32)
DEFINE_UNEQUAL(8, 64)

/* The sieve of 16-bit floats: 16 floats at a time. */
TARGET static inline wide wide_f16(const unsigned char *items)
{
    return _mm512_cvtph_ps(load_256(items));
}

/* As in load_bf16. */
TARGET static inline wide wide_bf16(const unsigned char *items)
{
    const __m512i bits = _mm512_cvtepu16_epi32(load_256(items));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

/* The same float in all lanes. */
TARGET static inline wide wide_repeat(float value)
{
    return _mm512_set1_ps(value);
}

/* Rounded to float32: this is what the sieve has to reckon with. */
TARGET static inline wide wide_subtract(wide x, wide y)
{
    return _mm512_sub_ps(x, y);
}

/* Slow for subnormal numbers, which weights hardly ever are. */
TARGET static inline wide wide_multiply(wide x, wide y)
{
    return _mm512_mul_ps(x, y);
}

/* As in `magnitude`. */
TARGET static inline wide wide_magnitude(wide x)
{
    return _mm512_abs_ps(x);
}

/* The larger magnitude decides the relative distance. */
TARGET static inline wide wide_larger(wide x, wide y)
{
    return _mm512_max_ps(x, y);
}

/* The smaller one decides whether a difference is rounded. */
TARGET static inline wide wide_smaller(wide x, wide y)
{
    return _mm512_min_ps(x, y);
}

/* Ordered and quiet: NaN is never above, and sets no exception flag. */
TARGET static inline flags wide_above(wide x, wide y)
{
    return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ);
}

/* As above, equality included. */
TARGET static inline flags wide_least(wide x, wide y)
{
    return _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ);
}

/* As in `unordered`. */
TARGET static inline flags wide_unordered(wide x, wide y)
{
    return _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q);
}

#    include "differ_lanes.h"

/* mls_cpu_offers(MLS_CPU_AVX512) must be true before any of these is called. */
const mls_differ_kernels mls_differ_avx512 = {.run = MLS_DIFFER_TABLE};

#endif
