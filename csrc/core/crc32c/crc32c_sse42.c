/* crc32c_sse42: CRC32C with the CRC instruction of SSE4.2, and PCLMULQDQ.
 *
 * The CRC instruction processes 8 bytes per cycle with a latency of three cycles. Lanes
 * (crc32c_interleave.h) are joined by a carry-less multiplication, which is cheap enough
 * for short lanes too.
 *
 * With 16-byte vectors, folding (crc32c_clmul.h) is not faster than the CRC instruction.
 * But it uses another execution unit, so a long range gives half of its bytes to each.
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

/* A lane of `bytes` bytes, x**(8 * bytes - 33) and x**(16 * bytes - 33). The exponents
 * are lower by 33 because the CRC instruction that reduces the product multiplies it by
 * x**33. */
typedef struct lane_size {
    size_t bytes;
    uint32_t past_one, past_two;
} lane_size;

/* From the longest: joining takes time, and long lanes need long ranges. The shortest
 * leaves less than 192 bytes. */
static const lane_size sizes[] = {
    {4096, 0x82f89c77U, 0x54a86326U},
    {512, 0xdd7e3b0cU, 0x170076faU},
    {64, 0x9e4addf8U, 0x0d3b6092U},
};

TARGET_INLINE crc_word add_word(crc_word crc, uint64_t word)
{
    return _mm_crc32_u64(crc, word);
}

TARGET_INLINE crc_word add_byte(crc_word crc, unsigned char byte)
{
    return _mm_crc32_u8((uint32_t)crc, byte);
}

/* Return `crc` moved past the bytes that `power` represents. */
TARGET_INLINE crc_word shift_checksum(crc_word crc, uint32_t power)
{
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc),
                                                 _mm_cvtsi32_si128((int)power), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

#    include "crc32c/crc32c_interleave.h"

/* ---- both instructions in parallel ---- */

enum {
    LANE = 4096,     /* bytes of each of three lanes; folding takes 3 * LANE */
    BLOCK = 6 * LANE /* bytes of both halves */
};

TARGET_INLINE __m128i load16(const unsigned char *from)
{
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

/* Return the two constants of fold_vector for a move. */
TARGET_INLINE __m128i move_constants(mls_crc_move move)
{
    const mls_crc_power power = mls_crc_powers[move];
    return _mm_set_epi64x(power.upper, power.lower);
}

/* Move a remainder by the two products of crc32c_constants.h and add `next`, the data at
 * the new position. */
TARGET_INLINE __m128i fold_vector(__m128i remainder, __m128i power, __m128i next)
{
    const __m128i lower = _mm_clmulepi64_si128(remainder, power, 0x00);
    const __m128i upper = _mm_clmulepi64_si128(remainder, power, 0x11);
    return _mm_xor_si128(_mm_xor_si128(lower, upper), next);
}

/* Continue a checksum register over the 32 bytes at `from`. */
TARGET_INLINE crc_word add_words(crc_word crc, const unsigned char *from)
{
    crc = add_word(add_word(crc, load8(from)), load8(from + 8));
    return add_word(add_word(crc, load8(from + 16)), load8(from + 24));
}

/* Continue the checksum over one block of BLOCK bytes at `from`: three CRC lanes over its
 * first half, and six remainders over its second half. Six hide the latency of the
 * multiplication. */
TARGET_INLINE crc_word add_block(crc_word crc, const unsigned char *from)
{
    const unsigned char *half = from + 3 * LANE;
    const __m128i next = move_constants(MLS_CRC_BY_96);
    const __m128i zero = _mm_setzero_si128();
    __m128i a = zero, b = zero, c = zero, d = zero, e = zero, f = zero;
    crc_word second = 0, third = 0;
    for (size_t i = 0; i < LANE; i += 32, half += 96) {
        crc = add_words(crc, from + i);
        second = add_words(second, from + LANE + i);
        third = add_words(third, from + 2 * LANE + i);
        a = fold_vector(a, next, load16(half));
        b = fold_vector(b, next, load16(half + 16));
        c = fold_vector(c, next, load16(half + 32));
        d = fold_vector(d, next, load16(half + 48));
        e = fold_vector(e, next, load16(half + 64));
        f = fold_vector(f, next, load16(half + 80));
    }
    crc = shift_checksum(crc, mls_crc_powers[MLS_CRC_BY_8192].upper) ^
          shift_checksum(second, mls_crc_powers[MLS_CRC_BY_4096].upper) ^ third;
    f = fold_vector(a, move_constants(MLS_CRC_BY_80),
                    f); /* move all to the position of the last one */
    f = fold_vector(b, move_constants(MLS_CRC_BY_64), f);
    f = fold_vector(c, move_constants(MLS_CRC_BY_48), f);
    f = fold_vector(d, move_constants(MLS_CRC_BY_32), f);
    f = fold_vector(e, move_constants(MLS_CRC_BY_16), f);
    const crc_word first8 = add_word(0, (uint64_t)_mm_cvtsi128_si64(f));
    return shift_checksum(crc, mls_crc_powers[MLS_CRC_BY_12288].upper) ^
           add_word(first8, (uint64_t)_mm_extract_epi64(f, 1));
}

/* Continue the checksum `start`: whole blocks, then the rest. Copies do not use this:
 * memory limits them anyway. */
TARGET static uint32_t update_blocks(uint32_t start, const void *data, size_t bytes)
{
    const unsigned char *from = data;
    crc_word crc = ~start;
    for (; bytes >= BLOCK; bytes -= BLOCK, from += BLOCK) {
        crc = add_block(crc, from);
    }
    return update_run(~(uint32_t)crc, from, bytes);
}

const mls_crc_kernels mls_crc_x86 = {.update = update_blocks,
                                     .copy = copy_run,
                                     .copy_variants = MLS_STORE_BIT(MLS_STORE_CACHED)};

#endif
