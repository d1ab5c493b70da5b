/* crc32c_constants: the constants that move a remainder forward, for folding
 * (crc32c_clmul.h, crc32c_sse42.c).
 *
 * Bits represent powers of x in reverse order, as everywhere in this checksum: bit 0 of
 * 64 is x**63. Of the two halves of 16 bytes the lower one, L, comes first. The 16 bytes
 * are the polynomial L * x**64 + H. If `n` more bits follow them, they represent
 *
 *     L * x**(n + 64) + H * x**n
 *
 * which is, modulo the checksum's polynomial, the sum of two products of 64 by 32 bits:
 * 16 bytes again. Two carry-less multiplications thus move a remainder by n bits.
 *
 * The powers are reduced to 32 bits and stored in the lower half of 64; in reverse order
 * this is a factor of x**32. A product of 64 by 64 bits has 127 bits, not 128, so it is
 * one bit lower than it should be; in reverse order this is a factor of x. The constants
 * compensate for both: they are x**(n + 64 - 33) and x**(n - 33).
 *
 * Private to crc32c*.c and to the test that computes each constant.
 */
#ifndef MLS_CRC32C_CONSTANTS_H
#define MLS_CRC32C_CONSTANTS_H

#include <stddef.h>
#include <stdint.h>

/* The Castagnoli polynomial without its highest power, and 1, in this bit order: bit 31
 * of 32 is x**0. */
#define MLS_CRC_POLYNOMIAL 0x82F63B78U
#define MLS_CRC_X_TO_THE_0 0x80000000U

/* Return a times b in the field of the checksum. Schoolbook multiplication, one bit of
 * `a` at a time. */
static inline uint32_t mls_crc_multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (; a != 0; a <<= 1) { /* from x**0 upwards; each step multiplies b by x */
        product ^= (a & MLS_CRC_X_TO_THE_0) != 0 ? b : 0;
        b = (b >> 1) ^ ((b & 1U) != 0 ? MLS_CRC_POLYNOMIAL : 0);
    }
    return product;
}

/* Distance of a move in bytes: a sum of vectors (16, 32 or 64 bytes) and pages. */
typedef enum mls_crc_move {
    MLS_CRC_BY_16,
    MLS_CRC_BY_32,
    MLS_CRC_BY_48,
    MLS_CRC_BY_64,
    MLS_CRC_BY_80,
    MLS_CRC_BY_96,
    MLS_CRC_BY_128,
    MLS_CRC_BY_192,
    MLS_CRC_BY_256,
    MLS_CRC_BY_4096,
    MLS_CRC_BY_8192,
    MLS_CRC_BY_12288,
    MLS_CRC_BY_12320,
    MLS_CRC_BY_12352,
    MLS_CRC_MOVES
} mls_crc_move;

/* Distances of lanes from the last one, and from a lane to its next block. */
typedef struct mls_crc_lanes {
    mls_crc_move past_one, past_two, past_three, next_block;
} mls_crc_lanes;

/* The constants of one move, in the bit order of mls_crc_multiply. */
typedef struct mls_crc_power {
    size_t bytes;
    uint32_t lower; /* x**(8 * bytes + 31), for the half that comes first */
    uint32_t upper; /* x**(8 * bytes - 33) */
} mls_crc_power;

/* With a constant index, the compiler inlines the constants. */
static const mls_crc_power mls_crc_powers[MLS_CRC_MOVES] = {
    [MLS_CRC_BY_16] = {16, 0xf20c0dfeU, 0x493c7d27U},
    [MLS_CRC_BY_32] = {32, 0x3da6d0cbU, 0xba4fc28eU},
    [MLS_CRC_BY_48] = {48, 0x1c291d04U, 0xddc0152bU},
    [MLS_CRC_BY_64] = {64, 0x740eef02U, 0x9e4addf8U},
    [MLS_CRC_BY_80] = {80, 0x083a6eecU, 0x39d3b296U},
    [MLS_CRC_BY_96] = {96, 0xc49f4f67U, 0x0715ce53U},
    [MLS_CRC_BY_128] = {128, 0x6992cea2U, 0x0d3b6092U},
    [MLS_CRC_BY_192] = {192, 0xa87ab8a8U, 0xab7aff2aU},
    [MLS_CRC_BY_256] = {256, 0xdcb17aa4U, 0xb9e02b86U},
    [MLS_CRC_BY_4096] = {4096, 0xc2a5b65eU, 0x82f89c77U},
    [MLS_CRC_BY_8192] = {8192, 0xe040e0acU, 0x54a86326U},
    [MLS_CRC_BY_12288] = {12288, 0xe1e5a161U, 0xc1f19ee1U},
    [MLS_CRC_BY_12320] = {12320, 0x7fbd0f71U, 0x4b7708c5U},
    [MLS_CRC_BY_12352] = {12352, 0xd5f1007fU, 0x85de9078U},
};

#endif
