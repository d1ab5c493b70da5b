/* plan_slots_avx512: min-plus products with AVX-512, 16 floats at a time.
 *
 * The loops are those of plan_slots_simd.h; here is what one register does.
 */
#include "planning/slots/plan_slots_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET         __attribute__((target("avx512f")))
#    define MLS_PLAN_TABLE mls_plan_avx512

/* Of one register, and of a tile at a time. */
enum { LANES = 16, COLUMNS = 4 };
typedef __m512 floats;

/* From any address, and to any. */
TARGET static inline floats load(const float *p)
{
    return _mm512_loadu_ps(p);
}

/* As above. */
TARGET static inline void store(float *p, floats values)
{
    _mm512_storeu_ps(p, values);
}

/* The same number in all lanes. */
TARGET static inline floats repeat(float value)
{
    return _mm512_set1_ps(value);
}

/* Rounded as every kernel's additions are. */
TARGET static inline floats add(floats a, floats b)
{
    return _mm512_add_ps(a, b);
}

/* Without NaN, of which there is none. */
TARGET static inline floats least(floats a, floats b)
{
    return _mm512_min_ps(a, b);
}

#    include "planning/slots/plan_slots_simd.h"

#endif
