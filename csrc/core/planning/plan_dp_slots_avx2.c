/* plan_dp_slots_avx2: min-plus products with AVX2, 8 floats at a time; the loops are in
 * plan_dp_slots_loops.h. */
#include "planning/plan_dp_slots_kernels.h"

#if defined(__x86_64__)

#    include "simd/avx2.h"

#    define MLS_PLAN_TABLE mls_plan_avx2
enum { COLUMNS = 2 };

#    include "planning/plan_dp_slots_loops.h"

#endif
