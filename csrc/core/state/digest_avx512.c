/* digest_avx512: the inner loop of digests with AVX-512, 16 words at a time. */
#include "state/digest_kernels.h"

#if defined(__x86_64__)

#    include "simd/avx512.h"

typedef __m512i sums;

#    include "state/digest_x86.h"

#    include "state/digest_loops.h"

const mls_digest_kernels mls_digest_avx512 = {.add_words = add_words};

#endif
