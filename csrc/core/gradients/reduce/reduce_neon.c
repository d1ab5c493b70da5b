/* reduce_neon: sums and tallies with NEON, 4 floats or 2 doubles at a time.
 *
 * The loops are those of reduce_simd.h; here is what one register does.  Every arm64
 * processor has these instructions, so nothing is asked of it first.
 */
#include "gradients/reduce/reduce_kernels.h"

#if defined(__aarch64__)

#    include <arm_neon.h>

#    define TARGET /* nothing has to be asked for */

enum { WIDTH = 16 };
typedef float32x4_t floats;
typedef float64x2_t doubles;

/* Floats: all of these are exact. */
static inline floats floats_f32(const unsigned char *items)
{
    return vreinterpretq_f32_u8(vld1q_u8(items));
}

/* By the instruction for it. */
static inline floats floats_f16(const unsigned char *items)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(items)));
}

/* Each is the upper half of a float. */
static inline floats floats_bf16(const unsigned char *items)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(items)), 16));
}

/* As they are. */
static inline void store_f32(unsigned char *items, floats values)
{
    vst1q_u8(items, vreinterpretq_u8_f32(values));
}

/* In the rounding mode of the thread: to nearest, unless changed. */
static inline void store_f16(unsigned char *items, floats values)
{
    vst1_u8(items, vreinterpret_u8_f16(vcvt_f16_f32(values)));
}

/* Rounded by an addition, as in copy_neon.c; a NaN, which does not equal itself, keeps
 * its upper half with the quiet bit set. */
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

/* Four halves. */
static inline void store_bf16(unsigned char *items, floats values)
{
    vst1_u8(items, vreinterpret_u8_u16(rounded_bf16(values)));
}

/* The lower halves of pairs. */
static inline floats even_bf16(floats pairs)
{
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs), 16));
}

/* The upper ones, which are where those of a float are. */
static inline floats odd_bf16(floats pairs)
{
    const uint32x4_t upper = vdupq_n_u32(0xFFFF0000U);
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), upper));
}

/* Each rounded, in its half. */
static inline floats join_bf16(floats even, floats odd)
{
    const uint32x4_t lower = vmovl_u16(rounded_bf16(even));
    return vreinterpretq_f32_u32(vorrq_u32(lower, vshll_n_u16(rounded_bf16(odd), 16)));
}

/* What store_X leaves of floats.  Compilers compute what both have in common once. */
static inline floats kept_f32(floats values)
{
    return values;
}

/* There and back. */
static inline floats kept_f16(floats values)
{
    return vcvt_f32_f16(vcvt_f16_f32(values));
}

/* The first half of the floats, and the second, as doubles. */
static inline doubles lower_half(floats values)
{
    return vcvt_f64_f32(vget_low_f32(values));
}

/* As above. */
static inline doubles upper_half(floats values)
{
    return vcvt_f64_f32(vget_high_f32(values));
}

/* Two items of 4 or of 2 bytes, from any address. */
static inline uint32x2_t load_64(const unsigned char *items)
{
    return vreinterpret_u32_u8(vld1_u8(items));
}

/* By memcpy; the upper half repeats the lower one. */
static inline uint16x4_t load_32(const unsigned char *items)
{
    uint32_t bits;
    memcpy(&bits, items, sizeof bits);
    return vreinterpret_u16_u32(vdup_n_u32(bits));
}

/* Doubles: exact as well. */
static inline doubles doubles_f64(const unsigned char *items)
{
    return vreinterpretq_f64_u8(vld1q_u8(items));
}

/* Widened once. */
static inline doubles doubles_f32(const unsigned char *items)
{
    return vcvt_f64_f32(vreinterpret_f32_u32(load_64(items)));
}

/* Four are widened, of which two are asked for. */
static inline doubles doubles_f16(const unsigned char *items)
{
    const float16x4_t halves = vreinterpret_f16_u16(load_32(items));
    return vcvt_f64_f32(vget_low_f32(vcvt_f32_f16(halves)));
}

/* As above. */
static inline doubles doubles_bf16(const unsigned char *items)
{
    const uint32x4_t widened = vshll_n_u16(load_32(items), 16);
    return vcvt_f64_f32(vget_low_f32(vreinterpretq_f32_u32(widened)));
}

/* To any address. */
static inline void store_f64(unsigned char *items, doubles values)
{
    vst1q_u8(items, vreinterpretq_u8_f64(values));
}

/* The same number in all lanes. */
static inline floats repeat(float value)
{
    return vdupq_n_f32(value);
}

/* As above. */
static inline doubles repeat_f64(double value)
{
    return vdupq_n_f64(value);
}

#    include "gradients/reduce/reduce_simd.h"

/* For every arm64 machine. */
const mls_reduce_kernels mls_reduce_neon = MLS_REDUCE_TABLE;

#endif
