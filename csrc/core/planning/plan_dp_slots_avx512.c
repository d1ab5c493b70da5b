/* plan_dp_slots_avx512: min-plus products with AVX-512, 16 floats at a time; the loops
 * are in plan_dp_slots_loops.h. */
#include "planning/plan_dp_slots_kernels.h"

#if defined(__x86_64__)

#    include "simd/avx512.h"

#    define MLS_PLAN_TABLE mls_plan_avx512
enum { COLUMNS = 4 };

#    include "planning/plan_dp_slots_loops.h"

#endif
