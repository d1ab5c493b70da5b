/* crc32c_interleave: CRC32C with a CRC instruction, in three lanes, for any instruction
 * set.
 *
 * The CRC instruction takes 8 bytes, and its latency exceeds the interval at which it can
 * be issued. So three lanes run in parallel over consecutive ranges. At the end, the
 * checksum of each lane is moved past the bytes of the lanes after it, and the results
 * are added.
 *
 * Private to crc32c_sse42.c and crc32c_armv8.c, which must define before they include it:
 *   TARGET, TARGET_INLINE   attributes that allow the instruction set
 *   crc_word                the type that the instruction works on
 *   lane_size, sizes        `bytes` of a lane, and the powers with which shift_checksum
 *                           moves past one and two lanes; ordered from the longest
 *   add_word, add_byte      the checksum after 8 bytes, after one
 *   shift_checksum          the checksum moved past the bytes of a power
 */
#ifndef MLS_CRC32C_INTERLEAVE_H
#define MLS_CRC32C_INTERLEAVE_H

/* Load 8 bytes at any address; one instruction. */
TARGET_INLINE uint64_t load8(const unsigned char *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Continue a checksum register over three consecutive lanes of `size->bytes` bytes at
 * `from`, read in parallel, and join their checksums. If `copies`, copies the bytes to
 * `to`. */
TARGET_INLINE crc_word checksum_lanes(crc_word crc, unsigned char *to,
                                      const unsigned char *from, const lane_size *size,
                                      bool copies)
{
    const size_t lane = size->bytes;
    crc_word second = 0, third = 0;
    for (size_t i = 0; i < lane; i += 8) {
        const uint64_t a = load8(from + i);
        const uint64_t b = load8(from + lane + i);
        const uint64_t c = load8(from + 2 * lane + i);
        if (copies) {
            memcpy(to + i, &a, 8);
            memcpy(to + lane + i, &b, 8);
            memcpy(to + 2 * lane + i, &c, 8);
        }
        crc = add_word(crc, a);
        second = add_word(second, b);
        third = add_word(third, c);
    }
    return shift_checksum(crc, size->past_two) ^ shift_checksum(second, size->past_one) ^
           third;
}

/* Continue the checksum `start` over a range, and if `copies` copy it to `to`. Long lanes
 * first, then shorter ones, then words and bytes, so that short ranges do not pay for
 * joining long lanes. `copies` is constant after inlining, so the stores vanish if it is
 * false. */
TARGET_INLINE uint32_t checksum_range(uint32_t start, unsigned char *to,
                                      const unsigned char *from, size_t bytes,
                                      bool copies)
{
    crc_word crc = ~start;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t step = 3 * sizes[s].bytes;
        for (; bytes >= step; bytes -= step, from += step) {
            crc = checksum_lanes(crc, to, from, &sizes[s], copies);
            to = copies ? to + step : NULL;
        }
    }
    for (; bytes >= 8; bytes -= 8, from += 8) {
        const uint64_t word = load8(from);
        if (copies) {
            memcpy(to, &word, 8);
            to += 8;
        }
        crc = add_word(crc, word);
    }
    for (size_t i = 0; i < bytes; i++) {
        if (copies) {
            to[i] = from[i];
        }
        crc = add_byte(crc, from[i]);
    }
    return ~(uint32_t)crc;
}

/* `update` of the table that includes this file; in crc32c_sse42.c the end of one. */
TARGET static uint32_t update_run(uint32_t crc, const void *data, size_t bytes)
{
    return checksum_range(crc, NULL, data, bytes, false);
}

/* `copy` of the table. One pass for load, checksum and store: two passes over a large
 * range cost more than the arithmetic. */
TARGET static uint32_t copy_run(uint32_t crc, void *dst, const void *src, size_t bytes,
                                mls_store store)
{
    (void)store;
    return checksum_range(crc, dst, src, bytes, true);
}

#endif
