/* plan_dp_slots_avx2: min-plus products with AVX2, 8 floats at a time.
 *
 * The loops are in plan_dp_slots_simd.h.
 */
#include "planning/plan_dp_slots_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET         __attribute__((target("avx2")))
#    define MLS_PLAN_TABLE mls_plan_avx2

/* floats in a register; columns of a tile processed together */
enum { LANES = 8, COLUMNS = 2 };
typedef __m256 floats;

/* NaN does not occur. */
TARGET static inline floats least(floats a, floats b)
{
    return _mm256_min_ps(a, b);
}

#    include "planning/plan_dp_slots_simd.h"

#endif
