/* diff_x86: the operations of diff_simd.h that AVX2 and AVX-512 have alike.
 *
 * Private to diff_avx2.c and diff_avx512.c, which define these names and then include
 * this file:
 *     TARGET              the attribute that lets a function use the instruction set
 *     MM(name)            the intrinsic for a whole register, such as _mm256_name
 *     whole_register, half_register    the types of integer registers
 */
#ifndef MLS_DIFF_X86_H
#define MLS_DIFF_X86_H

#include <string.h>

/* The instruction returns its second operand if one is NaN. */
TARGET static inline wide wide_max(wide x, wide y)
{
    return MM(max_ps)(x, y);
}

TARGET static inline vector max(vector x, vector y)
{
    return MM(max_pd)(x, y);
}

TARGET static inline signed_32 signed_max(signed_32 x, signed_32 y)
{
    return (signed_32)MM(max_epi32)((whole_register)x, (whole_register)y);
}

TARGET static inline wide wide_fma(wide x, wide y, wide z)
{
    return MM(fmadd_ps)(x, y, z);
}

TARGET static inline vector fma_of(vector x, vector y, vector z)
{
    return MM(fmadd_pd)(x, y, z);
}

/* Intrinsics, because not all compilers use these instructions for the conversion. */
TARGET static inline vector widened(half_wide x)
{
    return MM(cvtps_pd)(x);
}

TARGET static inline vector signed_widened(half_signed x)
{
    return MM(cvtepi32_pd)((half_register)x);
}

TARGET static inline wide wide_f16(const unsigned char *items)
{
    half_register halves;
    memcpy(&halves, items, sizeof halves);
    return MM(cvtph_ps)(halves);
}

#endif
