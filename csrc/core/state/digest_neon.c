/* digest_neon: the inner loop of digests with NEON, 4 words at a time. */
#include "state/digest_kernels.h"

#if defined(__aarch64__)

#    include "simd/neon.h"

typedef uint64x2_t sums;

MLS_INLINED sums add_products(sums total, words values, words keys)
{
    const sums lower = vmlal_u32(total, vget_low_u32(values), vget_low_u32(keys));
    return vmlal_high_u32(lower, values, keys);
}

#    include "state/digest_loops.h"

const mls_digest_kernels mls_digest_neon = {.add_words = add_words};

#endif
