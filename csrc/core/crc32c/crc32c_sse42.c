/* SSE4.2: the CRC instruction takes 8 bytes a cycle but answers after three.  Lanes
 * (crc32c_interleave.h) are joined by a carry-less multiplication, which is cheap enough for
 * short ones too.
 *
 * Where no vectors wider than 16 bytes can be multiplied (crc32c_clmul.h), multiplication
 * is no quicker than the CRC instruction; but another part of the processor does it, so
 * that long runs give one half to each.
 */
#include "crc32c/crc32c.h"

#if defined(__x86_64__)

#    include "crc32c/crc32c_constants.h"

#    include <immintrin.h>
#    include <stdbool.h>
#    include <string.h>

#    define TARGET __attribute__((target("sse4.2,crc32,pclmul")))
#    define TARGET_INLINE                                                                \
        static inline __attribute__((always_inline, target("sse4.2,crc32,pclmul")))

typedef uint64_t crc_word; /* the upper half is always zero */

/* A lane of `bytes` bytes, and x**(8 * bytes - 33), x**(16 * bytes - 33): the CRC
 * instruction that reduces a product of two checksums multiplies it by x**33 besides. */
typedef struct lane_size {
    size_t bytes;
    uint32_t past_one, past_two;
} lane_size;

/* From the longest: joining costs time, and long lanes need long runs.  What the shortest
 * leaves over is under 192 bytes. */
static const lane_size sizes[] = {
    {4096, 0x82f89c77U, 0x54a86326U},
    {512, 0xdd7e3b0cU, 0x170076faU},
    {64, 0x9e4addf8U, 0x0d3b6092U},
};

TARGET_INLINE crc_word take8(crc_word crc, uint64_t word)
{
    return _mm_crc32_u64(crc, word);
}

TARGET_INLINE crc_word take1(crc_word crc, unsigned char byte)
{
    return _mm_crc32_u8((uint32_t)crc, byte);
}

/* `crc` moved past the bytes that `power` stands for. */
TARGET_INLINE crc_word shifted(crc_word crc, uint32_t power)
{
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc),
                                                 _mm_cvtsi32_si128((int)power), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

#    include "crc32c/crc32c_interleave.h"

/* ---- both instructions side by side ---- */

enum {
    LANE = 4096, /* bytes of each of three lanes; folding takes as many as all three */
    BLOCK = 6 * LANE /* bytes of both halves */
};

/* 16 bytes as a remainder, at any address. */
TARGET_INLINE __m128i load16(const unsigned char *from)
{
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

/* What `fold` wants for a move. */
TARGET_INLINE __m128i constants(mls_crc_move move)
{
    const mls_crc_power power = mls_crc_powers[move];
    return _mm_set_epi64x(power.upper, power.lower);
}

/* A remainder moved by the two products of crc32c_constants.h, and what lies there added. */
TARGET_INLINE __m128i fold(__m128i remainder, __m128i power, __m128i there)
{
    const __m128i lower = _mm_clmulepi64_si128(remainder, power, 0x00);
    const __m128i upper = _mm_clmulepi64_si128(remainder, power, 0x11);
    return _mm_xor_si128(_mm_xor_si128(lower, upper), there);
}

/* Four words, one after the other. */
TARGET_INLINE crc_word take32(crc_word crc, const unsigned char *from)
{
    crc = take8(take8(crc, load8(from)), load8(from + 8));
    return take8(take8(crc, load8(from + 16)), load8(from + 24));
}

/* One block: lanes over its first half, and over the second six remainders, as many as it
 * takes that none waits for its multiplication. */
TARGET_INLINE crc_word take_block(crc_word crc, const unsigned char *from)
{
    const unsigned char *half = from + 3 * LANE;
    const __m128i next = constants(MLS_CRC_BY_96);
    const __m128i nothing = _mm_setzero_si128();
    __m128i a = nothing, b = nothing, c = nothing, d = nothing, e = nothing, f = nothing;
    crc_word second = 0, third = 0;
    for (size_t i = 0; i < LANE; i += 32, half += 96) {
        crc = take32(crc, from + i);
        second = take32(second, from + LANE + i);
        third = take32(third, from + 2 * LANE + i);
        a = fold(a, next, load16(half));
        b = fold(b, next, load16(half + 16));
        c = fold(c, next, load16(half + 32));
        d = fold(d, next, load16(half + 48));
        e = fold(e, next, load16(half + 64));
        f = fold(f, next, load16(half + 80));
    }
    crc = shifted(crc, mls_crc_powers[MLS_CRC_BY_8192].upper) ^
          shifted(second, mls_crc_powers[MLS_CRC_BY_4096].upper) ^ third;
    f = fold(a, constants(MLS_CRC_BY_80), f); /* all to where the last one stands */
    f = fold(b, constants(MLS_CRC_BY_64), f);
    f = fold(c, constants(MLS_CRC_BY_48), f);
    f = fold(d, constants(MLS_CRC_BY_32), f);
    f = fold(e, constants(MLS_CRC_BY_16), f);
    const crc_word first8 = take8(0, (uint64_t)_mm_cvtsi128_si64(f));
    return shifted(crc, mls_crc_powers[MLS_CRC_BY_12288].upper) ^
           take8(first8, (uint64_t)_mm_extract_epi64(f, 1));
}

/* Blocks, then what is left.  Copies do without: they wait for memory in any case. */
TARGET static uint32_t update_blocks(uint32_t start, const void *data, size_t bytes)
{
    const unsigned char *from = data;
    crc_word crc = ~start;
    for (; bytes >= BLOCK; bytes -= BLOCK, from += BLOCK) {
        crc = take_block(crc, from);
    }
    return update_run(~(uint32_t)crc, from, bytes);
}

const mls_crc_kernels mls_crc_x86 = {
    .update = update_blocks, .copy = copy_run, .copy_variants = 1};

#endif
