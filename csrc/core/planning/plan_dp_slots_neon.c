/* plan_dp_slots_neon: min-plus products with NEON, 4 floats at a time; the loops are in
 * plan_dp_slots_loops.h. */
#include "planning/plan_dp_slots_kernels.h"

#if defined(__aarch64__)

#    include "simd/neon.h"

#    define MLS_PLAN_TABLE mls_plan_neon
enum { COLUMNS = 4 };

#    include "planning/plan_dp_slots_loops.h"

#endif
