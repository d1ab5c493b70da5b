/* diff_avx2: compares elements with AVX2, 4 doubles at a time; the loops are in
 * diff_simd.h. */
#include "state/diff/diff_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET   __attribute__((target("avx2,fma,f16c")))
#    define MM(name) _mm256_##name

typedef __m256i whole_register;
typedef __m128i half_register;
enum { WIDTH = 32 };
MLS_DIFF_REGISTERS(32);

#    include "state/diff/diff_x86.h"

TARGET static inline bool any(bits_32 x)
{
    return _mm256_testz_si256((__m256i)x, (__m256i)x) == 0;
}

#    include "state/diff/diff_simd.h"

/* Requires mls_cpu_offers(MLS_CPU_AVX2). */
const mls_diff_kernels mls_diff_avx2 = {.run = MLS_DIFF_TABLE};

#endif
