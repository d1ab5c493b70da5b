/* crc32c_avx2: CRC32C with AVX2 and VPCLMULQDQ, 32 bytes at a time; the loops are in
 * crc32c_clmul.h.
 *
 * For the many processors that have VPCLMULQDQ but not AVX-512. Processors without
 * VPCLMULQDQ process 16 bytes at a time (crc32c_sse42.c).
 */
#include "crc32c/crc32c.h"

#if defined(__x86_64__)

#    include "crc32c/crc32c_constants.h"

#    include <immintrin.h>
#    include <stdbool.h>
#    include <string.h>

#    define SET           "avx2,vpclmulqdq,pclmul,sse4.2,crc32"
#    define TARGET        __attribute__((target(SET)))
#    define TARGET_INLINE static inline __attribute__((always_inline, target(SET)))

enum { WIDTH = 32 }; /* bytes of a vector */
typedef __m256i vector;

static const mls_crc_lanes by_vectors = {MLS_CRC_BY_32, MLS_CRC_BY_64, MLS_CRC_BY_96,
                                         MLS_CRC_BY_128};
static const mls_crc_lanes by_pages = {MLS_CRC_BY_4096, MLS_CRC_BY_8192, MLS_CRC_BY_12288,
                                       MLS_CRC_BY_12320};

/* Checked separately from the sets of cpu_features.h, since VPCLMULQDQ occurs with and
 * without AVX-512. It needs no registers beyond those of the sets. Uses the value that
 * the compiler's runtime library stored at load time: CPUID takes 10 microseconds and
 * more under a hypervisor, for every checksum of a small file. */
bool mls_crc_fold_offered(void)
{
    return __builtin_cpu_supports("vpclmulqdq") != 0;
}

/* Store to an address that is a multiple of WIDTH, bypassing the cache. */
TARGET_INLINE void store_past_cache(unsigned char *dst, vector value)
{
    _mm256_stream_si256((__m256i *)(void *)dst, value);
}

/* Return a vector with `bytes` in its first 4 bytes and zeros after them. */
TARGET_INLINE vector make_vector4(uint32_t bytes)
{
    return _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)bytes));
}

/* Each 16 bytes get the same two constants, because all move by the same distance. */
TARGET_INLINE vector move_constants(mls_crc_move move)
{
    const mls_crc_power power = mls_crc_powers[move];
    return _mm256_set_epi64x(power.upper, power.lower, power.upper, power.lower);
}

/* Add the two products of crc32c_constants.h and the data. */
TARGET_INLINE vector fold_vector(vector remainder, vector power, vector data)
{
    const vector lower = _mm256_clmulepi64_epi128(remainder, power, 0x00);
    const vector upper = _mm256_clmulepi64_epi128(remainder, power, 0x11);
    return lower ^ upper ^ data;
}

#    include "crc32c/crc32c_clmul.h"

const mls_crc_kernels mls_crc_avx2 = {.update = update_run,
                                      .copy = copy_run,
                                      .copy_variants = MLS_STORE_BIT(MLS_STORE_CACHED) |
                                                       MLS_STORE_BIT(MLS_STORE_STREAM)};

#endif
