/* plan_slots_neon: min-plus products with NEON, 4 floats at a time.
 *
 * The loops are those of plan_slots_simd.h; here is what one register does.
 */
#include "planning/slots/plan_slots_kernels.h"

#if defined(__aarch64__)

#    include <arm_neon.h>

#    define TARGET
#    define MLS_PLAN_TABLE mls_plan_neon

/* Of one register, and of a tile at a time. */
enum { LANES = 4, COLUMNS = 4 };
typedef float32x4_t floats;

/* From any address, and to any. */
TARGET static inline floats load(const float *p)
{
    return vld1q_f32(p);
}

/* As above. */
TARGET static inline void store(float *p, floats values)
{
    vst1q_f32(p, values);
}

/* The same number in all lanes. */
TARGET static inline floats repeat(float value)
{
    return vdupq_n_f32(value);
}

/* Rounded as every kernel's additions are. */
TARGET static inline floats add(floats a, floats b)
{
    return vaddq_f32(a, b);
}

/* Without NaN, of which there is none. */
TARGET static inline floats least(floats a, floats b)
{
    return vminq_f32(a, b);
}

#    include "planning/slots/plan_slots_simd.h"

#endif
