/* reduce_avx2: sums and norm partials with AVX2 and F16C; the loops are in
 * reduce_loops.h. */
#include "gradients/reduce/reduce_kernels.h"

#if defined(__x86_64__)

#    include "simd/avx2.h"

#    include "gradients/reduce/reduce_loops.h"

void mls_sum_f32_avx2(void *out, const void *const *sources, size_t count, size_t start,
                      size_t n, double divisor)
{
    sum_f32(out, sources, count, start, n, divisor);
}

const mls_reduce_kernels mls_reduce_avx2 = MLS_REDUCE_TABLE;

#endif
