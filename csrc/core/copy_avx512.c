/* copy_avx512: copy, fill and convert with AVX-512, 64 bytes of destination at a time.
 *
 * The same pieces as in copy_avx2.c for a register twice as wide; the loops are those of
 * copy_x86.h.  Two things are simpler here: comparisons give a mask, and items are
 * narrowed by one instruction that keeps their order.  The set's own bfloat16 instruction
 * is not used: few machines have it, and it treats subnormal numbers as zero.
 */
#include "copy_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <string.h>

#    define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))

enum { WIDTH = 64 }; /* bytes of a vector */
typedef __m512i vector;

/* One register from memory or to it, at any address. */
TARGET static inline vector load(const unsigned char *src)
{
    return _mm512_loadu_si512(src);
}

TARGET static inline void store(unsigned char *dst, vector value)
{
    _mm512_storeu_si512(dst, value);
}

/* To an address that is a multiple of WIDTH, round the cache. */
TARGET static inline void store_past_cache(unsigned char *dst, vector value)
{
    _mm512_stream_si512((__m512i *)(void *)dst, value);
}

/* Eight bytes eight times over. */
TARGET static inline vector repeat(uint64_t bytes)
{
    return _mm512_set1_epi64((long long)bytes);
}

/* 16 floats as the lower halves of 16 lanes of bfloat16, rounded to nearest even, by the
 * same addition as in copy_avx2.c; a NaN keeps its upper half with the quiet bit set. */
TARGET static inline __m512i round_to_brain(__m512i bits)
{
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    const __mmask16 nan =
        _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
    const __m512i upper = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    return _mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40));
}

/* The two halves of a register. */
TARGET static inline __m512i join(__m256i low, __m256i high)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* 16 float16 from memory as floats; always exact. */
TARGET static inline __m512 load_halves(const unsigned char *src)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)src));
}

/* 16 bfloat16 from memory as the bits of floats: each is the upper half of one. */
TARGET static inline __m512i load_brains(const unsigned char *src)
{
    const __m256i brains = _mm256_loadu_si256((const __m256i *)(const void *)src);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(brains), 16);
}

/* 16 floats as float16.  The rounding is named, so that the thread's own mode has no say.
 */
TARGET static inline __m256i to_halves(__m512 values)
{
    return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* 16 floats as bfloat16, in order. */
TARGET static inline __m256i to_brains(__m512i bits)
{
    return _mm512_cvtepi32_epi16(round_to_brain(bits));
}

/* The vector_A_B of copy_x86.h: from 2-byte to 4-byte items 16 are read, else 32. */
TARGET static inline vector vector_f32_f16(const unsigned char *src)
{
    return join(to_halves(_mm512_loadu_ps(src)), to_halves(_mm512_loadu_ps(src + 64)));
}

TARGET static inline vector vector_f16_f32(const unsigned char *src)
{
    return _mm512_castps_si512(load_halves(src));
}

TARGET static inline vector vector_f32_bf16(const unsigned char *src)
{
    return join(to_brains(load(src)), to_brains(load(src + 64)));
}

TARGET static inline vector vector_bf16_f32(const unsigned char *src)
{
    return load_brains(src);
}

TARGET static inline vector vector_f16_bf16(const unsigned char *src)
{
    return join(to_brains(_mm512_castps_si512(load_halves(src))),
                to_brains(_mm512_castps_si512(load_halves(src + 32))));
}

TARGET static inline vector vector_bf16_f16(const unsigned char *src)
{
    return join(to_halves(_mm512_castsi512_ps(load_brains(src))),
                to_halves(_mm512_castsi512_ps(load_brains(src + 32))));
}

#    include "copy_x86.h"

/* mls_cpu_offers(MLS_CPU_AVX512) must be true before any of these is called. */
const mls_kernels mls_kernels_avx512 = {
    .cpu = MLS_CPU_AVX512,
    .copy = copy_run,
    .fill = fill_run,
    .convert = MLS_CONVERT_TABLE,
};

#endif
