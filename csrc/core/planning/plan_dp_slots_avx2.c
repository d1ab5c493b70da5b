/* plan_dp_slots_avx2: min-plus products with AVX2, 8 floats at a time.
 *
 * The loops are in plan_dp_slots_simd.h; this file defines the operations on one
 * register.
 */
#include "planning/plan_dp_slots_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET         __attribute__((target("avx2")))
#    define MLS_PLAN_TABLE mls_plan_avx2

/* floats in a register; columns of a tile processed together */
enum { LANES = 8, COLUMNS = 2 };
typedef __m256 floats;

/* Any address is valid. */
TARGET static inline floats load(const float *p)
{
    return _mm256_loadu_ps(p);
}

TARGET static inline void store(float *p, floats values)
{
    _mm256_storeu_ps(p, values);
}

TARGET static inline floats repeat(float value)
{
    return _mm256_set1_ps(value);
}

TARGET static inline floats add(floats a, floats b)
{
    return _mm256_add_ps(a, b);
}

/* NaN does not occur. */
TARGET static inline floats least(floats a, floats b)
{
    return _mm256_min_ps(a, b);
}

#    include "planning/plan_dp_slots_simd.h"

#endif
