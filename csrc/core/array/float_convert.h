/* float_convert: rounding, overflow and NaN of one float converted to another format, by
 * integer arithmetic; decodes float8.
 *
 * Every vector kernel must produce the same results as these functions. They round to
 * nearest, ties to even. A NaN becomes a quiet NaN with the upper bits of its payload, as
 * in hardware instructions; a finite value beyond the range becomes infinity. The 8-bit
 * formats are only read.
 *
 * Sources of the formats: IEEE 754-2019 for binary16, binary32 and binary64; bfloat16 is
 * the upper half of a binary32; E4M3 and E5M2 follow the OCP 8-bit Floating Point
 * Specification 1.0, E8M0 the OCP Microscaling Formats Specification 1.0; the FNUZ
 * formats have one zero, no infinity, and NaN in place of negative zero.
 */
#ifndef MLS_FLOAT_CONVERT_H
#define MLS_FLOAT_CONVERT_H

#include <stdint.h>
#include <string.h>

/* One element of complex64 in memory. */
typedef struct mls_complex64 {
    float real, imaginary;
} mls_complex64;

/* Convert between floats and their bits with memcpy, since pointer casts break the
 * aliasing rules. */
static inline uint32_t mls_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float mls_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint64_t mls_f64_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double mls_f64_from_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Return `value` / 2**`shift`, rounded to nearest, ties to even; 1 <= shift <= 63. */
static inline uint64_t mls_round_shift(uint64_t value, unsigned shift)
{
    const uint64_t half = (uint64_t)1 << (shift - 1);
    const uint64_t rest = value & ((half << 1) - 1);
    const uint64_t quotient = value >> shift;
    return quotient + (uint64_t)(rest > half || (rest == half && (quotient & 1U) != 0));
}

/* Convert the bits of a float16. Exact: every float16 is representable. A signalling NaN
 * becomes quiet. */
static inline float mls_f32_from_f16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000U) << 16;
    const uint32_t magnitude = half & 0x7FFFU;
    if (magnitude > 0x7C00U) { /* NaN: quiet */
        return mls_f32_from_bits(sign | 0x7FC00000U | ((magnitude & 0x3FFU) << 13));
    }
    if (magnitude == 0x7C00U) {
        return mls_f32_from_bits(sign | 0x7F800000U);
    }
    if (magnitude >= 0x400U) { /* normal: rebias the exponent by 127 - 15 */
        return mls_f32_from_bits(sign | ((magnitude << 13) + 0x38000000U));
    }
    const float small = (float)magnitude * 0x1p-24F; /* zero or subnormal: exact */
    return mls_f32_from_bits(sign | mls_f32_bits(small));
}

/* Return the bits of the nearest float16, ties to even. The exponent is rebiased by
 * subtraction, so that rounding may carry from the mantissa into the exponent, and from
 * the largest subnormal to the smallest normal number. */
static inline uint16_t mls_f16_from_f32(float value)
{
    const uint32_t bits = mls_f32_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000U;
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    uint32_t half;
    if (magnitude > 0x7F800000U) { /* NaN: quiet */
        half = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
    } else if (magnitude >= 0x477FF000U) { /* 65520 and up round to infinity */
        half = 0x7C00U;
    } else if (magnitude >= 0x38800000U) { /* 2**-14 and up: normal */
        half = (uint32_t)mls_round_shift(magnitude - 0x38000000U, 13);
    } else if (magnitude >= 0x33000000U) { /* 2**-25 and up: multiples of 2**-24 */
        const uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
        half = (uint32_t)mls_round_shift(mantissa, 126U - (magnitude >> 23));
    } else {
        half = 0;
    }
    return (uint16_t)(sign | half);
}

/* Return the bits of the nearest float16, ties to even. Converts without a float in
 * between: rounding twice could give the wrong result at a tie. */
static inline uint16_t mls_f16_from_f64(double value)
{
    const uint64_t bits = mls_f64_bits(value);
    const uint64_t sign = (bits >> 48) & 0x8000U;
    const uint64_t magnitude = bits & 0x7FFFFFFFFFFFFFFFU;
    uint64_t half;
    if (magnitude > 0x7FF0000000000000U) { /* NaN: quiet */
        half = 0x7E00U | ((magnitude >> 42) & 0x3FFU);
    } else if (magnitude >= 0x40EFFE0000000000U) { /* 65520 and up */
        half = 0x7C00U;
    } else if (magnitude >= 0x3F10000000000000U) { /* 2**-14 and up */
        half = mls_round_shift(magnitude - 0x3F00000000000000U, 42);
    } else if (magnitude >=
               0x3E60000000000000U) { /* 2**-25 and up: multiples of 2**-24 */
        const uint64_t mantissa = (magnitude & 0xFFFFFFFFFFFFFU) | 0x10000000000000U;
        half = mls_round_shift(mantissa, 1051U - (unsigned)(magnitude >> 52));
    } else {
        half = 0;
    }
    return (uint16_t)(sign | half);
}

/* Convert the bits of a bfloat16. Exact: a bfloat16 is the upper half of a float. A
 * signalling NaN stays one. */
static inline float mls_f32_from_bf16(uint16_t bf16)
{
    return mls_f32_from_bits((uint32_t)bf16 << 16);
}

/* Return the bits of the nearest bfloat16, ties to even. Rounding the bits rounds the
 * value and keeps infinity. A NaN must not be rounded. */
static inline uint16_t mls_bf16_from_f32(float value)
{
    const uint32_t bits = mls_f32_bits(value);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U) { /* NaN: quiet */
        return (uint16_t)((bits >> 16) | 0x40U);
    }
    return (uint16_t)mls_round_shift(bits, 16);
}

/* Return 2**exponent; the exponent must be valid for a normal number. */
static inline double mls_f64_power(int exponent)
{
    return mls_f64_from_bits((uint64_t)(exponent + 1023) << 52);
}

/* Decode 8 bits: a sign, an exponent, and `digits` bits of mantissa. `bias` is subtracted
 * from the exponent. Infinity and NaN are not recognised here: the caller handles their
 * bytes. */
static inline double mls_f64_from_f8(uint8_t bits, unsigned digits, int bias)
{
    const unsigned exponent = (bits & 0x7FU) >> digits;
    const unsigned mantissa = bits & ((1U << digits) - 1);
    /* a subnormal number has no implicit 1 and the exponent of the smallest normal
     * number */
    const unsigned significand = exponent == 0 ? mantissa : mantissa | 1U << digits;
    const int place = (exponent == 0 ? 1 : (int)exponent) - bias - (int)digits;
    const double value = (double)significand * mls_f64_power(place);
    return (bits & 0x80U) != 0 ? -value : value;
}

/* Return a quiet NaN. */
static inline double mls_f64_nan(void)
{
    return mls_f64_from_bits(0x7FF8000000000000U);
}

/* Decode an E4M3 byte. The two bytes with all bits but the sign set are NaN; the format
 * has no infinity. */
static inline double mls_f64_from_e4m3(uint8_t bits)
{
    return (bits & 0x7FU) == 0x7FU ? mls_f64_nan() : mls_f64_from_f8(bits, 3, 7);
}

/* Decode an E5M2 byte: the upper half of a float16, infinity and NaN included. */
static inline double mls_f64_from_e5m2(uint8_t bits)
{
    return (double)mls_f32_from_f16((uint16_t)(bits << 8));
}

/* Decode an E8M0 byte, an exponent alone: 2**-127 to 2**127; all ones is NaN. */
static inline double mls_f64_from_e8m0(uint8_t bits)
{
    return bits == 0xFFU ? mls_f64_nan() : mls_f64_power((int)bits - 127);
}

/* Decode an E4M3 byte of the FNUZ formats: their bias is larger by one, and only 0x80 is
 * NaN. */
static inline double mls_f64_from_e4m3fnuz(uint8_t bits)
{
    return bits == 0x80U ? mls_f64_nan() : mls_f64_from_f8(bits, 3, 8);
}

static inline double mls_f64_from_e5m2fnuz(uint8_t bits)
{
    return bits == 0x80U ? mls_f64_nan() : mls_f64_from_f8(bits, 2, 16);
}

#endif
