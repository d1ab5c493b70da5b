/* ARMv8 CRC: three lanes side by side over neighbouring stretches, since the instruction
 * answers later than it can be issued.  The lanes are joined by a plain multiplication,
 * which needs no further extension and is rare enough not to matter.
 */
#include "crc32c.h"

#if defined(__aarch64__)

#    include <stdbool.h>
#    include <string.h>

#    if defined(__linux__)
#        include <sys/auxv.h>
#    endif

#    define TARGET        __attribute__((target("crc")))
#    define TARGET_INLINE static inline __attribute__((always_inline, target("crc")))

enum { LANE_BYTES = 8192 };
#    define PAST_ONE 0x28461564U /* x**(8 * LANE_BYTES) */
#    define PAST_TWO 0xbf455269U /* x**(16 * LANE_BYTES) */

/* Asks the system: user code may not read the registers that say so. */
bool mls_crc_arm_offered(void)
{
#    if defined(__linux__)
    enum { CRC_BIT = 1 << 7 }; /* HWCAP_CRC32; optional in the first ARMv8 */
    return (getauxval(AT_HWCAP) & CRC_BIT) != 0;
#    else
    return true; /* every Mac has it */
#    endif
}

/* Written as assembly because compilers name the intrinsics and the header differently;
 * the function's target lets the assembler accept it. */
TARGET_INLINE uint32_t take8(uint32_t crc, uint64_t word)
{
    uint32_t result;
    __asm__("crc32cx %w0, %w1, %x2" : "=r"(result) : "r"(crc), "r"(word));
    return result;
}

/* One byte. */
TARGET_INLINE uint32_t take1(uint32_t crc, unsigned char byte)
{
    uint32_t result;
    __asm__("crc32cb %w0, %w1, %w2" : "=r"(result) : "r"(crc), "r"((uint32_t)byte));
    return result;
}

/* Unaligned load; one instruction. */
TARGET_INLINE uint64_t load8(const unsigned char *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Three neighbouring lanes, joined at the end; `to` is not used unless `copies`. */
TARGET_INLINE uint32_t three_lanes(uint32_t crc, unsigned char *to,
                                   const unsigned char *from, bool copies)
{
    const size_t lane = LANE_BYTES;
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < lane; i += 8) {
        const uint64_t a = load8(from + i);
        const uint64_t b = load8(from + lane + i);
        const uint64_t c = load8(from + 2 * lane + i);
        if (copies) {
            memcpy(to + i, &a, 8);
            memcpy(to + lane + i, &b, 8);
            memcpy(to + 2 * lane + i, &c, 8);
        }
        crc = take8(crc, a);
        second = take8(second, b);
        third = take8(third, c);
    }
    return mls_crc_multiply(crc, PAST_TWO) ^ mls_crc_multiply(second, PAST_ONE) ^ third;
}

/* Lanes while they fit, then words, then bytes.  `copies` is a constant wherever this
 * is inlined. */
TARGET_INLINE uint32_t run(uint32_t start, unsigned char *to, const unsigned char *from,
                           size_t bytes, bool copies)
{
    const size_t step = 3 * (size_t)LANE_BYTES;
    uint32_t crc = ~start;
    for (; bytes >= step; bytes -= step, from += step) {
        crc = three_lanes(crc, to, from, copies);
        to = copies ? to + step : NULL;
    }
    for (; bytes >= 8; bytes -= 8, from += 8) {
        const uint64_t word = load8(from);
        if (copies) {
            memcpy(to, &word, 8);
            to += 8;
        }
        crc = take8(crc, word);
    }
    for (size_t i = 0; i < bytes; i++) {
        if (copies) {
            to[i] = from[i];
        }
        crc = take1(crc, from[i]);
    }
    return ~crc;
}

/* Checksum alone. */
TARGET static uint32_t update_arm(uint32_t crc, const void *data, size_t bytes)
{
    return run(crc, NULL, data, bytes, false);
}

/* Loads, checksums and stores in one pass. */
TARGET static uint32_t copy_arm(uint32_t crc, void *dst, const void *src, size_t bytes)
{
    return run(crc, dst, src, bytes, true);
}

const mls_crc_kernels mls_crc_arm = {.update = update_arm, .copy = copy_arm};

#endif
