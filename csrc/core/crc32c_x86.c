/* SSE4.2: the CRC instruction takes 8 bytes a cycle but answers after three.  Lanes
 * (crc32c_lanes.h) are joined by a carry-less multiplication, which is cheap enough for
 * short ones too.
 */
#include "crc32c.h"

#if defined(__x86_64__)

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

#    include "crc32c_lanes.h"

const mls_crc_kernels mls_crc_x86 = {.update = update_run, .copy = copy_run};

#endif
