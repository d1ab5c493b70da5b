/* AVX2 with VPCLMULQDQ: 32 bytes at a time by carry-less multiplication; the loops are
 * those of crc32c_clmul.h.  For the many processors that have the instruction but no
 * AVX-512.  Those that lack it too take 16 bytes at a time (crc32c_sse42.c).
 */
#include "crc32c/crc32c.h"

#if defined(__x86_64__)

#    include "crc32c/crc32c_constants.h"

#    include <immintrin.h>
#    include <stdbool.h>

#    define SET           "avx2,vpclmulqdq,pclmul,sse4.2,crc32"
#    define TARGET        __attribute__((target(SET)))
#    define TARGET_INLINE static inline __attribute__((always_inline, target(SET)))

enum { WIDTH = 32 }; /* bytes of a vector */
typedef __m256i vector;

/* How far a lane stands before the last one, and from its next block. */
typedef struct lane_size {
    mls_crc_move past_one, past_two, past_three, next_block;
} lane_size;

static const lane_size by_vectors = {MLS_CRC_BY_32, MLS_CRC_BY_64, MLS_CRC_BY_96,
                                     MLS_CRC_BY_128};
static const lane_size by_pages = {MLS_CRC_BY_4096, MLS_CRC_BY_8192, MLS_CRC_BY_12288,
                                   MLS_CRC_BY_12320};

/* Asked apart from the sets of cpu_features.h, since processors have it with and without AVX-512.
 * Of registers it needs none that those sets do not.  The compiler's library asked the
 * processor when the program was loaded: CPUID takes 10 microseconds and more under a
 * hypervisor, and every checksum of a small file would begin with it. */
bool mls_crc_fold_offered(void)
{
    return __builtin_cpu_supports("vpclmulqdq") != 0;
}

/* One register from memory or to it, at any address. */
TARGET_INLINE vector load(const unsigned char *src)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)src);
}

TARGET_INLINE void store(unsigned char *dst, vector value)
{
    _mm256_storeu_si256((__m256i *)(void *)dst, value);
}

/* To an address that is a multiple of WIDTH, round the cache. */
TARGET_INLINE void store_past_cache(unsigned char *dst, vector value)
{
    _mm256_stream_si256((__m256i *)(void *)dst, value);
}

/* Zero but for the first 4 bytes. */
TARGET_INLINE vector first4(uint32_t bytes)
{
    return _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)bytes));
}

/* The sum of polynomials. */
TARGET_INLINE vector added(vector a, vector b)
{
    return _mm256_xor_si256(a, b);
}

/* Each 16 bytes get the same two constants: all of them move by as much. */
TARGET_INLINE vector constants(mls_crc_move move)
{
    const mls_crc_power power = mls_crc_powers[move];
    return _mm256_set_epi64x(power.upper, power.lower, power.upper, power.lower);
}

/* The two products of crc32c_constants.h, and the data. */
TARGET_INLINE vector fold(vector remainder, vector power, vector data)
{
    const vector lower = _mm256_clmulepi64_epi128(remainder, power, 0x00);
    const vector upper = _mm256_clmulepi64_epi128(remainder, power, 0x11);
    return added(added(lower, upper), data);
}

#    include "crc32c/crc32c_clmul.h"

const mls_crc_kernels mls_crc_avx2 = {
    .update = update_run, .copy = copy_run, .copy_variants = 2};

#endif
