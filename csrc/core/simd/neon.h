/* neon: NEON, 4 floats or 2 doubles at a time, rounding to float16 and bfloat16. Every
 * arm64 processor has it.
 *
 * Instructions for bfloat16 are an optional extension, so integer arithmetic converts it.
 */
#ifndef MLS_SIMD_NEON_H
#define MLS_SIMD_NEON_H

#include <arm_neon.h>

#define MLS_TARGET /* no attribute is needed */

enum { WIDTH = 16 };

#include "simd/registers.h"

/* The smaller of two floats, none of them NaN. */
static inline floats least_f32(floats x, floats y)
{
    return vminq_f32(x, y);
}

/* The larger of two doubles; the number if one of them is NaN. */
static inline doubles most_f64(doubles x, doubles y)
{
    return vmaxnmq_f64(x, y);
}

/* floats_X loads a register full of items of a dtype, at any address, as floats; exact
 * for every dtype. */
static inline floats floats_f16(const unsigned char *items)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(items)));
}

/* A bfloat16 is the upper half of a float. */
static inline floats floats_bf16(const unsigned char *items)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(items)), 16));
}

/* store_X: rounds to nearest even. Uses the thread's rounding mode: to nearest, unless
 * changed. */
static inline void store_f16(unsigned char *items, floats values)
{
    vst1_u8(items, vreinterpret_u8_f16(vcvt_f16_f32(values)));
}

/* Returns floats rounded to bfloat16, ties to even, by an addition on the bits. A NaN,
 * which does not equal itself, keeps its upper half with the quiet bit set. */
static inline uint16x4_t rounded_bf16(floats values)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(values);
    const uint32x4_t number = vceqq_f32(values, values);
    const uint32x4_t upper = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
    const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7FFFU));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
    const uint32x4_t quiet = vorrq_u32(upper, vdupq_n_u32(0x40U));
    return vmovn_u32(vbslq_u32(number, rounded, quiet));
}

static inline void store_bf16(unsigned char *items, floats values)
{
    vst1_u8(items, vreinterpret_u8_u16(rounded_bf16(values)));
}

/* Rounds both to bfloat16 and interleaves them: `even` in the lower halves of the 32-bit
 * lanes, `odd` in the upper halves, so that memory has the items in turn. */
static inline floats join_bf16(floats even, floats odd)
{
    const uint32x4_t lower = vmovl_u16(rounded_bf16(even));
    return vreinterpretq_f32_u32(vorrq_u32(lower, vshll_n_u16(rounded_bf16(odd), 16)));
}

/* Returns the value that store_f16 leaves in memory, as floats. Compilers merge the
 * common computation. */
static inline floats kept_f16(floats values)
{
    return vcvt_f32_f16(vcvt_f16_f32(values));
}

static inline doubles lower_half(floats values)
{
    return vcvt_f64_f32(vget_low_f32(values));
}

static inline doubles upper_half(floats values)
{
    return vcvt_f64_f32(vget_high_f32(values));
}

static inline uint32x2_t load_64(const unsigned char *items)
{
    return vreinterpret_u32_u8(vld1_u8(items));
}

/* Loads 4 bytes from any address into both halves of a register of 8 bytes. */
static inline uint16x4_t load_32(const unsigned char *items)
{
    uint32_t bits;
    memcpy(&bits, items, sizeof bits);
    return vreinterpret_u16_u32(vdup_n_u32(bits));
}

/* doubles_X loads half as many items as doubles; exact for every dtype. */
static inline doubles doubles_f32(const unsigned char *items)
{
    return vcvt_f64_f32(vreinterpret_f32_u32(load_64(items)));
}

/* Converts four items and uses two. */
static inline doubles doubles_f16(const unsigned char *items)
{
    const float16x4_t halves = vreinterpret_f16_u16(load_32(items));
    return vcvt_f64_f32(vget_low_f32(vcvt_f32_f16(halves)));
}

static inline doubles doubles_bf16(const unsigned char *items)
{
    const uint32x4_t widened = vshll_n_u16(load_32(items), 16);
    return vcvt_f64_f32(vget_low_f32(vreinterpretq_f32_u32(widened)));
}

/* As doubles_f32, of signed integers of 32 bits. */
static inline doubles doubles_i32(const unsigned char *items)
{
    return vcvtq_f64_s64(vmovl_s32(vreinterpret_s32_u32(load_64(items))));
}

/* Returns a register with `first` and then `second`, rounded to float16 (pack_bf16: to
 * bfloat16). */
static inline floats pack_f16(floats first, floats second)
{
    return vreinterpretq_f32_f16(vcombine_f16(vcvt_f16_f32(first), vcvt_f16_f32(second)));
}

static inline floats pack_bf16(floats first, floats second)
{
    return vreinterpretq_f32_u16(vcombine_u16(rounded_bf16(first), rounded_bf16(second)));
}

#endif
