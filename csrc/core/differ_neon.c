/* differ_neon: compare elements with NEON, 2 doubles at a time.
 *
 * The loops are those of differ_lanes.h; here is what one register does.  Every arm64
 * processor has these instructions, so nothing is asked of it first.
 */
#include "differ_kernels.h"

#if defined(__aarch64__)

#    include <arm_neon.h>

#    define TARGET /* nothing has to be asked for */

enum { WIDTH = 16, LANES = 2 };
typedef float64x2_t vector;
typedef float32x4_t wide;
typedef uint64x2_t flags; /* of floats, 4 of half the width */
#    define NO_FLAGS vdupq_n_u64(0)

/* 2 items of 4 bytes, from any address; below, of 2 and 1 bytes in the lowest lanes. */
static inline uint32x2_t load_64(const unsigned char *items)
{
    return vreinterpret_u32_u8(vld1_u8(items));
}

/* By memcpy, for any alignment. */
static inline uint16x4_t load_32(const unsigned char *items)
{
    uint32_t bits;
    memcpy(&bits, items, sizeof bits);
    return vreinterpret_u16_u32(vdup_n_u32(bits));
}

/* As above. */
static inline uint8x8_t load_16(const unsigned char *items)
{
    uint16_t bits;
    memcpy(&bits, items, sizeof bits);
    return vreinterpret_u8_u16(vdup_n_u16(bits));
}

/* Floats: all of these are exact. */
static inline vector load_f64(const unsigned char *items)
{
    return vreinterpretq_f64_u8(vld1q_u8(items));
}

/* Widened once. */
static inline vector load_f32(const unsigned char *items)
{
    return vcvt_f64_f32(vreinterpret_f32_u32(load_64(items)));
}

/* Four are widened, of which two are asked for. */
static inline vector load_f16(const unsigned char *items)
{
    const float16x4_t halves = vreinterpret_f16_u16(load_32(items));
    return vcvt_f64_f32(vget_low_f32(vcvt_f32_f16(halves)));
}

/* Each is the upper half of a float; two of four are asked for. */
static inline vector load_bf16(const unsigned char *items)
{
    const uint32x4_t widened = vshll_n_u16(load_32(items), 16);
    return vcvt_f64_f32(vget_low_f32(vreinterpretq_f32_u32(widened)));
}

/* Integers: exact, being of 32 bits at most.  Each is first made a 64-bit one. */
static inline vector from_signed(int32x2_t items)
{
    return vcvtq_f64_s64(vmovl_s32(items));
}

/* As above, with zeros. */
static inline vector from_unsigned(uint32x2_t items)
{
    return vcvtq_f64_u64(vmovl_u32(items));
}

static inline vector load_i32(const unsigned char *items)
{
    return from_signed(vreinterpret_s32_u32(load_64(items)));
}

/* With zeros above. */
static inline vector load_u32(const unsigned char *items)
{
    return from_unsigned(load_64(items));
}

/* With the sign spread over 32 bits. */
static inline vector load_i16(const unsigned char *items)
{
    return from_signed(vget_low_s32(vmovl_s16(vreinterpret_s16_u16(load_32(items)))));
}

/* As above, from fewer bytes. */
static inline vector load_u16(const unsigned char *items)
{
    return from_unsigned(vget_low_u32(vmovl_u16(load_32(items))));
}

/* By way of 16 bits. */
static inline vector load_i8(const unsigned char *items)
{
    const int16x8_t widened = vmovl_s8(vreinterpret_s8_u8(load_16(items)));
    return from_signed(vget_low_s32(vmovl_s16(vget_low_s16(widened))));
}

/* As above, from fewer bytes. */
static inline vector load_u8(const unsigned char *items)
{
    const uint16x8_t widened = vmovl_u8(load_16(items));
    return from_unsigned(vget_low_u32(vmovl_u16(vget_low_u16(widened))));
}

/* Arithmetic on 2 doubles. */
static inline vector repeat(double value)
{
    return vdupq_n_f64(value);
}

/* Rounded once, as the oracle's is. */
static inline vector subtract(vector x, vector y)
{
    return vsubq_f64(x, y);
}

/* The slow one, which is why the loops avoid it. */
static inline vector divide(vector x, vector y)
{
    return vdivq_f64(x, y);
}

/* Without its sign, that of NaN too. */
static inline vector magnitude(vector x)
{
    return vabsq_f64(x);
}

/* This comparison is false where x is NaN. */
static inline vector larger(vector x, vector y)
{
    return vbslq_f64(vcgtq_f64(x, y), x, y);
}

/* One instruction. */
static inline double greatest(vector x)
{
    return vmaxvq_f64(x);
}

/* The product is not rounded, so the sign of what is left is right. */
static inline flags exceeds(vector d, vector m, vector ratio, vector half)
{
    return vcgtq_f64(vfmsq_f64(d, ratio, m), vmulq_f64(half, m));
}

/* NaN equals nothing, itself included. */
static inline flags unordered(vector x, vector y)
{
    const uint64x2_t numbers = vandq_u64(vceqq_f64(x, x), vceqq_f64(y, y));
    return veorq_u64(numbers, vdupq_n_u64(UINT64_MAX));
}

/* Flags are lanes of ones. */
static inline flags either(flags x, flags y)
{
    return vorrq_u64(x, y);
}

/* In step with `either`. */
static inline flags both(flags x, flags y)
{
    return vandq_u64(x, y);
}

/* One test for all lanes. */
static inline bool any(flags x)
{
    return vmaxvq_u32(vreinterpretq_u32_u64(x)) != 0;
}

/* The unequal_N for items of the given bits: equal ones are lanes of ones, so each takes
 * one off. */
#    define DEFINE_UNEQUAL(bytes, bits)                                                  \
        static inline size_t unequal_##bytes(const unsigned char *a,                     \
                                             const unsigned char *b)                     \
        {                                                                                \
            const uint8x16_t x = vld1q_u8(a), y = vld1q_u8(b);                           \
            const uint##bits##_t equal =                                                 \
                ADD_UP(bits, vceqq_u##bits(AS_ITEMS(bits, x), AS_ITEMS(bits, y)));       \
            return WIDTH / (bytes) - (size_t)(uint##bits##_t)(0 - equal);                \
        }
#    define ADD_UP(bits, lanes)        vaddvq_u##bits(lanes)
#    define AS_ITEMS(bits, lanes)      vreinterpretq_u##bits##_u8(lanes)
/* bytes are items already */
#    define vreinterpretq_u8_u8(lanes) (lanes)

DEFINE_UNEQUAL(1, 8)
DEFINE_UNEQUAL(2, 16)
DEFINE_UNEQUAL(4, 32)
DEFINE_UNEQUAL(8, 64)

/* The sieve of 16-bit floats: 4 floats at a time. */
static inline wide wide_f16(const unsigned char *items)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(items)));
}

/* As in load_bf16. */
static inline wide wide_bf16(const unsigned char *items)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(items)), 16));
}

/* The same float in all lanes. */
static inline wide wide_repeat(float value)
{
    return vdupq_n_f32(value);
}

/* Rounded to float32: this is what the sieve has to reckon with. */
static inline wide wide_subtract(wide x, wide y)
{
    return vsubq_f32(x, y);
}

/* Slow for subnormal numbers, which weights hardly ever are. */
static inline wide wide_multiply(wide x, wide y)
{
    return vmulq_f32(x, y);
}

/* As in `magnitude`. */
static inline wide wide_magnitude(wide x)
{
    return vabsq_f32(x);
}

/* The larger magnitude decides the relative distance. */
static inline wide wide_larger(wide x, wide y)
{
    return vmaxq_f32(x, y);
}

/* The smaller one decides whether a difference is rounded. */
static inline wide wide_smaller(wide x, wide y)
{
    return vminq_f32(x, y);
}

/* Ordered and quiet: NaN is never above, and sets no exception flag. */
static inline flags wide_above(wide x, wide y)
{
    return vreinterpretq_u64_u32(vcgtq_f32(x, y));
}

/* As above, equality included. */
static inline flags wide_least(wide x, wide y)
{
    return vreinterpretq_u64_u32(vcgeq_f32(x, y));
}

/* As in `unordered`. */
static inline flags wide_unordered(wide x, wide y)
{
    const uint32x4_t numbers = vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y));
    return vreinterpretq_u64_u32(vmvnq_u32(numbers));
}

#    include "differ_lanes.h"

/* For every arm64 machine. */
const mls_differ_kernels mls_differ_neon = {.run = MLS_DIFFER_TABLE};

#endif
