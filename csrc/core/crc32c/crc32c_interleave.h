/* crc32c_lanes: runs of a CRC instruction, written once for every instruction set.
 *
 * Such an instruction takes 8 bytes at a time and answers later than the next can be
 * issued, so three lanes run side by side over neighbouring stretches; in the end each is
 * moved past the bytes of those behind it, and they are added.
 *
 * Private to crc32c_sse42.c and crc32c_armv8.c, which include it after they have defined:
 *   TARGET, TARGET_INLINE   what lets a function use the instruction set
 *   crc_word                the type that the instruction works on
 *   lane_size, sizes        `bytes` of a lane, and what `shifted` wants for moving past
 *                           one and two of them; from the longest to the shortest
 *   take8, take1            the checksum after 8 bytes, after one
 *   shifted                 the checksum moved past the bytes that a power stands for
 */
#ifndef MLS_CRC32C_LANES_H
#define MLS_CRC32C_LANES_H

/* Unaligned load; one instruction. */
TARGET_INLINE uint64_t load8(const unsigned char *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Three neighbouring lanes, joined at the end; `to` is not used unless `copies`. */
TARGET_INLINE crc_word three_lanes(crc_word crc, unsigned char *to,
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
        crc = take8(crc, a);
        second = take8(second, b);
        third = take8(third, c);
    }
    return shifted(crc, size->past_two) ^ shifted(second, size->past_one) ^ third;
}

/* The longest lanes first, then shorter ones for what is left, then words and bytes:
 * short runs do not pay for the joining of long ones.  `copies` is a constant wherever
 * this is inlined, and the stores vanish where it is false. */
TARGET_INLINE uint32_t run(uint32_t start, unsigned char *to, const unsigned char *from,
                           size_t bytes, bool copies)
{
    crc_word crc = ~start;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t step = 3 * sizes[s].bytes;
        for (; bytes >= step; bytes -= step, from += step) {
            crc = three_lanes(crc, to, from, &sizes[s], copies);
            to = copies ? to + step : NULL;
        }
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
    return ~(uint32_t)crc;
}

/* Checksum alone. */
TARGET static uint32_t update_run(uint32_t crc, const void *data, size_t bytes)
{
    return run(crc, NULL, data, bytes, false);
}

/* Loads, checksums and stores in one pass: two passes over a large run cost more than
 * the arithmetic. */
TARGET static uint32_t copy_run(uint32_t crc, void *dst, const void *src, size_t bytes,
                                mls_store store)
{
    (void)store;
    return run(crc, dst, src, bytes, true);
}

#endif
