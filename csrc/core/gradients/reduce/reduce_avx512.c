/* reduce_avx512: sums and norm partials with AVX-512; the loops are in reduce_loops.h. */
#include "gradients/reduce/reduce_kernels.h"

#if defined(__x86_64__)

#    include "simd/avx512.h"

/* Float32 sums use 32-byte registers: two threads that add float32 arrays are
 * memory-bound and took 3 to 10 % longer with 64-byte registers (16 to 256 MiB, AMD EPYC
 * family 25 model 17). */
#    define MLS_SUM_F32 mls_sum_f32_avx2

#    include "gradients/reduce/reduce_loops.h"

const mls_reduce_kernels mls_reduce_avx512 = MLS_REDUCE_TABLE;

#endif
