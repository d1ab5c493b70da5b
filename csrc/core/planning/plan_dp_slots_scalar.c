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

/* Any address is valid. */
static inline floats load(const float *p)
{
    return *p;
}

static inline void store(float *p, floats value)
{
    *p = value;
}

static inline floats repeat(float value)
{
    return value;
}

static inline floats add(floats a, floats b)
{
    return a + b;
}

/* NaN does not occur: infinities are added, never subtracted from each other. */
static inline floats least(floats a, floats b)
{
    return b < a ? b : a;
}

#include "planning/plan_dp_slots_simd.h"
