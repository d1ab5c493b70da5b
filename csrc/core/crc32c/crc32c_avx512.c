/* crc32c_avx512: CRC32C with AVX-512 and VPCLMULQDQ, 64 bytes at a time; the loops are in
 * crc32c_clmul.h.
 *
 * VPCLMULQDQ is newer than AVX-512: see mls_crc_fold_offered.
 */
#include "crc32c/crc32c.h"

#if defined(__x86_64__)

#    include "crc32c/crc32c_constants.h"

#    include <immintrin.h>
#    include <stdbool.h>
#    include <string.h>

#    define SET           "avx512f,avx512bw,avx512dq,avx512vl,vpclmulqdq,pclmul,sse4.2,crc32"
#    define TARGET        __attribute__((target(SET)))
#    define TARGET_INLINE static inline __attribute__((always_inline, target(SET)))

enum { WIDTH = 64 }; /* bytes of a vector */
typedef __m512i vector;

static const mls_crc_lanes by_vectors = {MLS_CRC_BY_64, MLS_CRC_BY_128, MLS_CRC_BY_192,
                                         MLS_CRC_BY_256};
static const mls_crc_lanes by_pages = {MLS_CRC_BY_4096, MLS_CRC_BY_8192, MLS_CRC_BY_12288,
                                       MLS_CRC_BY_12352};

TARGET_INLINE void store_past_cache(unsigned char *dst, vector value)
{
    _mm512_stream_si512((__m512i *)(void *)dst, value);
}

TARGET_INLINE vector make_vector4(uint32_t bytes)
{
    return _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)bytes));
}

/* Each 16 bytes get the same two constants, because all move by the same distance. */
TARGET_INLINE vector move_constants(mls_crc_move move)
{
    const mls_crc_power power = mls_crc_powers[move];
    return _mm512_set4_epi64(power.upper, power.lower, power.upper, power.lower);
}

/* Add the two products of crc32c_constants.h and the data; 0x96 is the XOR of three
 * operands. */
TARGET_INLINE vector fold_vector(vector remainder, vector power, vector data)
{
    const vector lower = _mm512_clmulepi64_epi128(remainder, power, 0x00);
    const vector upper = _mm512_clmulepi64_epi128(remainder, power, 0x11);
    return _mm512_ternarylogic_epi64(lower, upper, data, 0x96);
}

#    include "crc32c/crc32c_clmul.h"

const mls_crc_kernels mls_crc_avx512 = {.update = update_run,
                                        .copy = copy_run,
                                        .copy_variants = MLS_STORE_BIT(MLS_STORE_CACHED) |
                                                         MLS_STORE_BIT(MLS_STORE_STREAM)};

#endif
