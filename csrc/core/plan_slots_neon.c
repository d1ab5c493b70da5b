/* plan_slots_neon: min-plus products with NEON, 2 doubles at a time.
 *
 * The loops are those of plan_slots_lanes.h; here is what one register does.
 */
#include "plan_slots_kernels.h"

#if defined(__aarch64__)

#    include <arm_neon.h>

#    define TARGET
#    define MLS_PLAN_TABLE mls_plan_neon

enum { LANES = 2, COLUMNS = 4 };
typedef float64x2_t doubles;

/* From any address, and to any. */
TARGET static inline doubles load(const double *p)
{
    return vld1q_f64(p);
}

TARGET static inline void store(double *p, doubles values)
{
    vst1q_f64(p, values);
}

/* The same number in all lanes. */
TARGET static inline doubles repeat(double value)
{
    return vdupq_n_f64(value);
}

TARGET static inline doubles add(doubles a, doubles b)
{
    return vaddq_f64(a, b);
}

TARGET static inline doubles subtract(doubles a, doubles b)
{
    return vsubq_f64(a, b);
}

/* Without NaN, of which there is none. */
TARGET static inline doubles least(doubles a, doubles b)
{
    return vminq_f64(a, b);
}

#    include "plan_slots_lanes.h"

#endif
