/* plan_dp_slots_avx512: min-plus products with AVX-512, 16 floats at a time.
 *
 * The loops are in plan_dp_slots_simd.h.
 */
#include "planning/plan_dp_slots_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET         __attribute__((target("avx512f")))
#    define MLS_PLAN_TABLE mls_plan_avx512

/* floats in a register; columns of a tile processed together */
enum { LANES = 16, COLUMNS = 4 };
typedef __m512 floats;

/* NaN does not occur. */
TARGET static inline floats least(floats a, floats b)
{
    return _mm512_min_ps(a, b);
}

#    include "planning/plan_dp_slots_simd.h"

#endif
