/* x86: operations that AVX2 and AVX-512 have alike.
 *
 * Private to avx2.h and avx512.h, which define MLS_TARGET, WIDTH and these names and then
 * include this file:
 * - MLS_MM(name), MLS_HALF_MM(name): the intrinsics for a whole and for half a register
 * - half_floats, half_register: the types of half registers
 * - load_half, load_quarter, store_half: load and store a part of a register at any
 *   address, by intrinsics: with memcpy gcc merges the store into the conversion, which
 *   made float16 sums 16 % slower (AMD EPYC)
 */
#ifndef MLS_SIMD_X86_H
#define MLS_SIMD_X86_H

/* The smaller of two floats, the larger of two doubles, in each lane; `y` if one of them
 * is NaN. */
MLS_TARGET static inline floats least_f32(floats x, floats y)
{
    return MLS_MM(min_ps)(x, y);
}

MLS_TARGET static inline doubles most_f64(doubles x, doubles y)
{
    return MLS_MM(max_pd)(x, y);
}

/* floats_X loads a register full of items of a dtype, at any address, as floats; exact
 * for every dtype. */
MLS_TARGET static inline floats floats_f16(const unsigned char *items)
{
    return MLS_MM(cvtph_ps)(load_half(items));
}

/* A bfloat16 is the upper half of a float. */
MLS_TARGET static inline floats floats_bf16(const unsigned char *items)
{
    return (floats)MLS_MM(slli_epi32)(MLS_MM(cvtepu16_epi32)(load_half(items)), 16);
}

/* Returns floats rounded to float16, to nearest even. The rounding mode is explicit, so
 * the thread's own mode does not matter. */
MLS_TARGET static inline half_register half_f16(floats values)
{
    return MLS_MM(cvtps_ph)(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

MLS_TARGET static inline void store_f16(unsigned char *items, floats values)
{
    store_half(items, half_f16(values));
}

/* Returns the value that store_f16 leaves in memory, as floats. Compilers merge the
 * common computation. */
MLS_TARGET static inline floats kept_f16(floats values)
{
    return MLS_MM(cvtph_ps)(half_f16(values));
}

/* doubles_X loads half as many items as doubles; exact for every dtype. */
MLS_TARGET static inline doubles doubles_f32(const unsigned char *items)
{
    return MLS_MM(cvtps_pd)((half_floats)load_half(items));
}

MLS_TARGET static inline doubles doubles_f16(const unsigned char *items)
{
    return MLS_MM(cvtps_pd)(MLS_HALF_MM(cvtph_ps)(load_quarter(items)));
}

MLS_TARGET static inline doubles doubles_bf16(const unsigned char *items)
{
    return MLS_MM(cvtps_pd)((half_floats)MLS_HALF_MM(slli_epi32)(
        MLS_HALF_MM(cvtepu16_epi32)(load_quarter(items)), 16));
}

/* As doubles_f32, of signed integers of 32 bits. */
MLS_TARGET static inline doubles doubles_i32(const unsigned char *items)
{
    return MLS_MM(cvtepi32_pd)(load_half(items));
}

#endif
