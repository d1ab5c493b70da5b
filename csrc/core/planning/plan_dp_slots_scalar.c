/* plan_dp_slots_scalar: the reference kernel, one number at a time.
 *
 * Uses the loops of all kernels; a register is one float here.
 */
#include "planning/plan_dp_slots_kernels.h"

#define TARGET
#define MLS_PLAN_TABLE mls_plan_scalar

/* floats in a register; columns of a tile processed together */
enum { LANES = 1, COLUMNS = 2 };
typedef float floats;

/* NaN does not occur: infinities are added, never subtracted from each other. */
static inline floats least(floats a, floats b)
{
    return b < a ? b : a;
}

#include "planning/plan_dp_slots_simd.h"
