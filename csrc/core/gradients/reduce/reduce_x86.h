/* reduce_x86: the conversions of reduce_simd.h that AVX2 and AVX-512 have alike.
 *
 * Private to reduce_avx2.c and reduce_avx512.c, which define these names and then include
 * this file:
 *     TARGET             the attribute that lets a function use the instruction set
 *     MM(name), HALF_MM(name)    the intrinsics for a whole and for half a register
 *     half_floats, half_register    the types of half registers
 *     load_half, load_quarter, store_half    load and store a part of a register at any
 *                        address, by intrinsics: with memcpy gcc merges the store into
 *                        the conversion, which made float16 sums 16 % slower (AMD EPYC)
 */
#ifndef MLS_REDUCE_X86_H
#define MLS_REDUCE_X86_H

/* floats_X: exact for every dtype. */
TARGET static inline floats floats_f16(const unsigned char *items)
{
    return MM(cvtph_ps)(load_half(items));
}

/* A bfloat16 is the upper half of a float. */
TARGET static inline floats floats_bf16(const unsigned char *items)
{
    return (floats)MM(slli_epi32)(MM(cvtepu16_epi32)(load_half(items)), 16);
}

/* store_X: rounds to nearest even. The rounding mode is explicit, so the thread's own
 * mode does not matter. */
TARGET static inline void store_f16(unsigned char *items, floats values)
{
    store_half(items,
               MM(cvtps_ph)(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* The value that store_f16 leaves. Compilers merge the common computation. */
TARGET static inline floats kept_f16(floats values)
{
    return MM(cvtph_ps)(
        MM(cvtps_ph)(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* doubles_X: exact for every dtype. */
TARGET static inline doubles doubles_f32(const unsigned char *items)
{
    return MM(cvtps_pd)((half_floats)load_half(items));
}

TARGET static inline doubles doubles_f16(const unsigned char *items)
{
    return MM(cvtps_pd)(HALF_MM(cvtph_ps)(load_quarter(items)));
}

TARGET static inline doubles doubles_bf16(const unsigned char *items)
{
    return MM(cvtps_pd)((half_floats)HALF_MM(slli_epi32)(
        HALF_MM(cvtepu16_epi32)(load_quarter(items)), 16));
}

#endif
