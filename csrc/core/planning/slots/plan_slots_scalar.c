/* plan_slots_scalar: the oracle, one number at a time.
 *
 * The loops are those of all kernels; a register is a float here.
 */
#include "planning/slots/plan_slots_kernels.h"

#define TARGET
#define MLS_PLAN_TABLE mls_plan_scalar

/* Of one register, and of a tile at a time. */
enum { LANES = 1, COLUMNS = 2 };
typedef float floats;

/* Any address will do. */
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

/* Nothing here is NaN: infinities are added, never subtracted from each other. */
static inline floats least(floats a, floats b)
{
    return b < a ? b : a;
}

#include "planning/slots/plan_slots_simd.h"
