/* digest_avx2: the inner loop of digests with AVX2, 8 words at a time. */
#include "state/digest_kernels.h"

#if defined(__x86_64__)

#    include "simd/avx2.h"

typedef __m256i sums;

#    include "state/digest_x86.h"

#    include "state/digest_loops.h"

const mls_digest_kernels mls_digest_avx2 = {.add_words = add_words};

#endif
