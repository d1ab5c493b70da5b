/* plan_slots_scalar: the oracle, one number at a time.
 *
 * The loops are those of all kernels; a register is a double here.
 */
#include "plan_slots_kernels.h"

#define TARGET
#define MLS_PLAN_TABLE mls_plan_scalar

enum { LANES = 1, COLUMNS = 2 };
typedef double doubles;

static inline doubles load(const double *p)
{
    return *p;
}

static inline void store(double *p, doubles value)
{
    *p = value;
}

static inline doubles repeat(double value)
{
    return value;
}

static inline doubles add(doubles a, doubles b)
{
    return a + b;
}

static inline doubles subtract(doubles a, doubles b)
{
    return a - b;
}

/* Nothing here is NaN: infinities are added, never subtracted from each other. */
static inline doubles least(doubles a, doubles b)
{
    return b < a ? b : a;
}

#include "plan_slots_lanes.h"
