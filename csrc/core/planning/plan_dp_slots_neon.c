/* plan_dp_slots_neon: min-plus products with NEON, 4 floats at a time.
 *
 * The loops are in plan_dp_slots_simd.h.
 */
#include "planning/plan_dp_slots_kernels.h"

#if defined(__aarch64__)

#    include <arm_neon.h>

#    define TARGET
#    define MLS_PLAN_TABLE mls_plan_neon

/* floats in a register; columns of a tile processed together */
enum { LANES = 4, COLUMNS = 4 };
typedef float32x4_t floats;

/* NaN does not occur. */
TARGET static inline floats least(floats a, floats b)
{
    return vminq_f32(a, b);
}

#    include "planning/plan_dp_slots_simd.h"

#endif
