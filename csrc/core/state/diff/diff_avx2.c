/* diff_avx2: compares elements with AVX2, 4 doubles at a time; the loops are in
 * diff_simd.h. */
#include "state/diff/diff_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET __attribute__((target("avx2,fma,f16c")))

enum { WIDTH = 32 };
MLS_DIFF_REGISTERS(32);

/* The instruction returns its second operand if one is NaN. */
TARGET static inline wide wide_max(wide x, wide y)
{
    return _mm256_max_ps(x, y);
}

TARGET static inline vector max(vector x, vector y)
{
    return _mm256_max_pd(x, y);
}

TARGET static inline signed_32 signed_max(signed_32 x, signed_32 y)
{
    return (signed_32)_mm256_max_epi32((__m256i)x, (__m256i)y);
}

TARGET static inline wide wide_fma(wide x, wide y, wide z)
{
    return _mm256_fmadd_ps(x, y, z);
}

TARGET static inline vector fma_of(vector x, vector y, vector z)
{
    return _mm256_fmadd_pd(x, y, z);
}

/* Intrinsics, because not all compilers use these instructions for the conversion. */
TARGET static inline vector widened(half_wide x)
{
    return _mm256_cvtps_pd(x);
}

TARGET static inline vector signed_widened(half_signed x)
{
    return _mm256_cvtepi32_pd((__m128i)x);
}

TARGET static inline wide wide_f16(const unsigned char *items)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)items));
}

TARGET static inline bool any(bits_32 x)
{
    return _mm256_testz_si256((__m256i)x, (__m256i)x) == 0;
}

#    include "state/diff/diff_simd.h"

/* Requires mls_cpu_offers(MLS_CPU_AVX2). */
const mls_diff_kernels mls_diff_avx2 = {.run = MLS_DIFF_TABLE};

#endif
