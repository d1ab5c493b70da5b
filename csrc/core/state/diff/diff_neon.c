/* diff_neon: compares elements with NEON, 2 doubles at a time; the loops are in
 * diff_simd.h. Every arm64 processor has these instructions. */
#include "state/diff/diff_kernels.h"

#if defined(__aarch64__)

#    include <arm_neon.h>

#    define TARGET /* no attribute is needed */

enum { WIDTH = 16 };
MLS_DIFF_REGISTERS(16);

/* Returns the number if only one of them is NaN. */
static inline wide wide_max(wide x, wide y)
{
    return vmaxnmq_f32(x, y);
}

static inline vector max(vector x, vector y)
{
    return vmaxnmq_f64(x, y);
}

static inline signed_32 signed_max(signed_32 x, signed_32 y)
{
    return vmaxq_s32(x, y);
}

static inline wide wide_fma(wide x, wide y, wide z)
{
    return vfmaq_f32(z, x, y);
}

static inline vector fma_of(vector x, vector y, vector z)
{
    return vfmaq_f64(z, x, y);
}

/* Intrinsics, because not all compilers use these instructions for the conversion. */
static inline vector widened(half_wide x)
{
    return vcvt_f64_f32(x);
}

static inline vector signed_widened(half_signed x)
{
    return vcvtq_f64_s64(vmovl_s32(x));
}

static inline wide wide_f16(const unsigned char *items)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(items)));
}

static inline bool any(bits_32 x)
{
    return vmaxvq_u32(x) != 0;
}

#    include "state/diff/diff_simd.h"

const mls_diff_kernels mls_diff_neon = {.run = MLS_DIFF_TABLE};

#endif
