/* plan_slots_avx2: min-plus products with AVX2, 4 doubles at a time.
 *
 * The loops are those of plan_slots_lanes.h; here is what one register does.
 */
#include "plan_slots_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET         __attribute__((target("avx2")))
#    define MLS_PLAN_TABLE mls_plan_avx2

enum { LANES = 4, COLUMNS = 2 };
typedef __m256d doubles;

/* From any address, and to any. */
TARGET static inline doubles load(const double *p)
{
    return _mm256_loadu_pd(p);
}

TARGET static inline void store(double *p, doubles values)
{
    _mm256_storeu_pd(p, values);
}

/* The same number in all lanes. */
TARGET static inline doubles repeat(double value)
{
    return _mm256_set1_pd(value);
}

TARGET static inline doubles add(doubles a, doubles b)
{
    return _mm256_add_pd(a, b);
}

TARGET static inline doubles subtract(doubles a, doubles b)
{
    return _mm256_sub_pd(a, b);
}

/* Without NaN, of which there is none. */
TARGET static inline doubles least(doubles a, doubles b)
{
    return _mm256_min_pd(a, b);
}

#    include "plan_slots_lanes.h"

#endif
