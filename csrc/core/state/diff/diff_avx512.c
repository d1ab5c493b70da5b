/* diff_avx512: compares elements with AVX-512, 8 doubles at a time; the loops are in
 * diff_simd.h. */
#include "state/diff/diff_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))

enum { WIDTH = 64 };
MLS_DIFF_REGISTERS(64);

/* The instruction returns its second operand if one is NaN. */
TARGET static inline wide wide_max(wide x, wide y)
{
    return _mm512_max_ps(x, y);
}

TARGET static inline vector max(vector x, vector y)
{
    return _mm512_max_pd(x, y);
}

TARGET static inline signed_32 signed_max(signed_32 x, signed_32 y)
{
    return (signed_32)_mm512_max_epi32((__m512i)x, (__m512i)y);
}

TARGET static inline wide wide_fma(wide x, wide y, wide z)
{
    return _mm512_fmadd_ps(x, y, z);
}

TARGET static inline vector fma_of(vector x, vector y, vector z)
{
    return _mm512_fmadd_pd(x, y, z);
}

/* Intrinsics, because not all compilers use these instructions for the conversion. */
TARGET static inline vector widened(half_wide x)
{
    return _mm512_cvtps_pd(x);
}

TARGET static inline vector signed_widened(half_signed x)
{
    return _mm512_cvtepi32_pd((__m256i)x);
}

TARGET static inline wide wide_f16(const unsigned char *items)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)items));
}

TARGET static inline bool any(bits_32 x)
{
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
}

#    include "state/diff/diff_simd.h"

/* Requires mls_cpu_offers(MLS_CPU_AVX512). */
const mls_diff_kernels mls_diff_avx512 = {.run = MLS_DIFF_TABLE};

#endif
