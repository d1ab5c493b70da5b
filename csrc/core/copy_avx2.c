/* copy_avx2: copy, fill and convert with AVX2 and F16C, 32 bytes of destination at a
 * time.
 *
 * This file gives the pieces that depend on the register: loads, stores and one
 * conversion of a whole register for each pair of formats.  The loops around them,
 * alignment and streaming are those of copy_x86.h, which is included below and compiled
 * for this set.
 *
 * Halves are float16, which the processor converts itself; brains are bfloat16, for which
 * AVX2 has no instruction: they are made by integer arithmetic, as in convert.h.
 */
#include "copy_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <string.h>

#    define TARGET __attribute__((target("avx2,f16c")))

enum { WIDTH = 32 }; /* bytes of a vector */
typedef __m256i vector;

/* One register from memory or to it, at any address. */
TARGET static inline vector load(const unsigned char *src)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)src);
}

TARGET static inline void store(unsigned char *dst, vector value)
{
    _mm256_storeu_si256((__m256i *)(void *)dst, value);
}

/* To an address that is a multiple of WIDTH, round the cache. */
TARGET static inline void store_past_cache(unsigned char *dst, vector value)
{
    _mm256_stream_si256((__m256i *)(void *)dst, value);
}

/* Eight bytes four times over. */
TARGET static inline vector repeat(uint64_t bytes)
{
    return _mm256_set1_epi64x((long long)bytes);
}

/* 8 floats as the lower halves of 8 lanes of bfloat16, rounded to nearest even.  Adding
 * just less than half a unit, and one more where the result would be odd, carries into
 * the upper half exactly when rounding goes up.  NaN takes its upper half with the quiet
 * bit set: it must not be rounded, which could make it infinity. */
TARGET static inline __m256i round_to_brain(__m256i bits)
{
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, nan);
}

/* The two halves of a register. */
TARGET static inline __m256i join(__m128i low, __m128i high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

/* 8 float16 from memory as floats; always exact. */
TARGET static inline __m256 load_halves(const unsigned char *src)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)src));
}

/* 8 bfloat16 from memory as the bits of floats: each is the upper half of one. */
TARGET static inline __m256i load_brains(const unsigned char *src)
{
    const __m128i brains = _mm_loadu_si128((const __m128i *)(const void *)src);
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(brains), 16);
}

/* 8 floats as float16.  The rounding is named, so that the thread's own mode has no say.
 */
TARGET static inline __m128i to_halves(__m256 values)
{
    return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Two times 8 brains as 16; packing works per 128-bit half, so the halves are reordered.
 */
TARGET static inline __m256i pack_brains(__m256i low, __m256i high)
{
    const __m256i packed = _mm256_packus_epi32(round_to_brain(low), round_to_brain(high));
    return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
}

/* The vector_A_B of copy_x86.h: from 2-byte to 4-byte items 8 are read, else 16. */
TARGET static inline vector vector_f32_f16(const unsigned char *src)
{
    return join(to_halves(_mm256_castsi256_ps(load(src))),
                to_halves(_mm256_castsi256_ps(load(src + 32))));
}

TARGET static inline vector vector_f16_f32(const unsigned char *src)
{
    return _mm256_castps_si256(load_halves(src));
}

TARGET static inline vector vector_f32_bf16(const unsigned char *src)
{
    return pack_brains(load(src), load(src + 32));
}

TARGET static inline vector vector_bf16_f32(const unsigned char *src)
{
    return load_brains(src);
}

TARGET static inline vector vector_f16_bf16(const unsigned char *src)
{
    return pack_brains(_mm256_castps_si256(load_halves(src)),
                       _mm256_castps_si256(load_halves(src + 16)));
}

TARGET static inline vector vector_bf16_f16(const unsigned char *src)
{
    return join(to_halves(_mm256_castsi256_ps(load_brains(src))),
                to_halves(_mm256_castsi256_ps(load_brains(src + 16))));
}

#    include "copy_x86.h"

/* mls_cpu_offers(MLS_CPU_AVX2) must be true before any of these is called. */
const mls_kernels mls_kernels_avx2 = {
    .cpu = MLS_CPU_AVX2,
    .copy = copy_run,
    .fill = fill_run,
    .convert = MLS_CONVERT_TABLE,
};

#endif
