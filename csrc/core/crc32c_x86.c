/* SSE4.2: the CRC instruction takes 8 bytes a cycle but answers after three, so three
 * lanes run side by side over neighbouring stretches and are joined by a carry-less
 * multiplication, which moves a checksum past the bytes of the later lanes.
 */
#include "crc32c.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <stdbool.h>
#    include <string.h>

#    define TARGET __attribute__((target("sse4.2,crc32,pclmul")))
#    define TARGET_INLINE                                                                \
        static inline __attribute__((always_inline, target("sse4.2,crc32,pclmul")))

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

/* Unaligned load; one instruction. */
TARGET_INLINE uint64_t load8(const unsigned char *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* `crc` moved past the bytes that `power` stands for. */
TARGET_INLINE uint64_t shifted(uint64_t crc, uint32_t power)
{
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc),
                                                 _mm_cvtsi32_si128((int)power), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* Three lanes of `lane` bytes each; `to` is NULL where nothing is copied. */
TARGET_INLINE uint64_t three_lanes(uint64_t crc, unsigned char *to,
                                   const unsigned char *from, const lane_size *size,
                                   bool copies)
{
    const size_t lane = size->bytes;
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < lane; i += 8) {
        const uint64_t a = load8(from + i);
        const uint64_t b = load8(from + lane + i);
        const uint64_t c = load8(from + 2 * lane + i);
        if (copies) {
            memcpy(to + i, &a, 8);
            memcpy(to + lane + i, &b, 8);
            memcpy(to + 2 * lane + i, &c, 8);
        }
        crc = _mm_crc32_u64(crc, a);
        second = _mm_crc32_u64(second, b);
        third = _mm_crc32_u64(third, c);
    }
    return shifted(crc, size->past_two) ^ shifted(second, size->past_one) ^ third;
}

/* The longest lanes first, then shorter ones for what is left, then words and bytes:
 * short runs do not pay for the joining of long ones.  `copies` is a constant wherever
 * this is inlined, and the stores vanish where it is false. */
TARGET_INLINE uint32_t run(uint32_t start, unsigned char *to, const unsigned char *from,
                           size_t bytes, bool copies)
{
    uint64_t crc = ~start;
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
        crc = _mm_crc32_u64(crc, word);
    }
    uint32_t last = (uint32_t)crc;
    for (size_t i = 0; i < bytes; i++) {
        if (copies) {
            to[i] = from[i];
        }
        last = _mm_crc32_u8(last, from[i]);
    }
    return ~last;
}

/* Checksum alone. */
TARGET static uint32_t update_x86(uint32_t crc, const void *data, size_t bytes)
{
    return run(crc, NULL, data, bytes, false);
}

/* Loads, checksums and stores in one pass: two passes over a large run cost more than
 * the arithmetic. */
TARGET static uint32_t copy_x86(uint32_t crc, void *dst, const void *src, size_t bytes)
{
    return run(crc, dst, src, bytes, true);
}

const mls_crc_kernels mls_crc_x86 = {.update = update_x86, .copy = copy_x86};

#endif
