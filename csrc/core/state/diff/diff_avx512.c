/* diff_avx512: compares elements with AVX-512, 8 doubles at a time; the loops are in
 * diff_simd.h. */
#include "state/diff/diff_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define TARGET   __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#    define MM(name) _mm512_##name

typedef __m512i whole_register;
typedef __m256i half_register;
enum { WIDTH = 64 };
MLS_DIFF_REGISTERS(64);

#    include "state/diff/diff_x86.h"

TARGET static inline bool any(bits_32 x)
{
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
}

#    include "state/diff/diff_simd.h"

/* Requires mls_cpu_offers(MLS_CPU_AVX512). */
const mls_diff_kernels mls_diff_avx512 = {.run = MLS_DIFF_TABLE};

#endif
