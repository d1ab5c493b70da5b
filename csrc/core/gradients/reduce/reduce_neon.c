/* reduce_neon: sums and norm partials with NEON; the loops are in reduce_loops.h. */
#include "gradients/reduce/reduce_kernels.h"

#if defined(__aarch64__)

#    include "simd/neon.h"

#    include "gradients/reduce/reduce_loops.h"

const mls_reduce_kernels mls_reduce_neon = MLS_REDUCE_TABLE;

#endif
