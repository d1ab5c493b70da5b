/* plan_dp_slots_scalar: inner loops of the solver by slots in plain C: the reference.
 *
 * Uses the loops of all kernels; a register is one float here.
 */
#include "planning/plan_dp_slots_kernels.h"

#define MLS_TARGET /* no attribute */
#include "simd/inlined_loops.h"

#define MLS_PLAN_TABLE mls_plan_scalar
enum { FLOATS = 1, COLUMNS = 2 };
typedef float floats;

/* NaN does not occur: infinities are added, never subtracted from each other. */
static inline floats least_f32(floats x, floats y)
{
    return y < x ? y : x;
}

static inline floats repeat(float value)
{
    return value;
}

#include "planning/plan_dp_slots_loops.h"
