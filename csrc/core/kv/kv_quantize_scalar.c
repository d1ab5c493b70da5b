/* kv_quantize_scalar: arithmetic of quantized caches in plain C (scales, biases, rounding
 * of codes): the reference.
 *
 * There are kernels for float only: other dtypes are converted before and after.
 */
#include "kv/quantize_kernels.h"

#include <string.h>

/* Set the scale and the bias of a group whose values are `low` .. `high`; `max_code` is
 * the largest code. The bias is the extreme with the larger absolute value, and 0 is a
 * whole number of steps from it, so that 0 has an exact code. mlx does the same
 * operations in the same order. Returns false if `high - low` is not finite. */
static bool choose_affine(float low, float high, float max_code, float *scale,
                          float *bias)
{
    const bool from_low = fabsf(low) > fabsf(high);
    const float step = (high - low) / max_code;
    const float least = 1e-7F; /* the least scale of mlx */
    const float step_size = step > least ? step : least;
    const float edge = from_low ? low : high;
    *scale = from_low ? step_size : -step_size;
    *bias = 0;
    const float steps = rintf(edge / *scale); /* from 0 to the edge */
    if (fabsf(steps) > 0) {
        *scale = edge / steps;
        *bias = edge;
    }
    return isfinite(high - low);
}

/* Set the scale and the bias of the group of `size` elements at `x`; `max_code` is the
 * largest code. Returns false if an element or the range of the group is not finite. */
static bool choose_group_scale(const float *x, size_t size, float max_code, float *scale,
                               float *bias)
{
    float low = x[0], high = x[0];
    float not_finite = 0; /* becomes NaN once an element is infinite or NaN */
    for (size_t i = 0; i < size; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        not_finite += x[i] - x[i];
    }
    return choose_affine(low, high, max_code, scale, bias) && !isnan(not_finite);
}

/* Return the code of the value `x`: (x - bias) / scale, rounded to an integer, ties to
 * even, and clipped to 0 .. `max_code`. A NaN becomes 0. */
static unsigned char encode_value(float x, float scale, float bias, float max_code)
{
    const float round = 0x1.8p23F; /* adding it rounds to an integer, ties to even */
    float code = (x - bias) / scale;
    code = code > 0 ? code : 0;
    code = code < max_code ? code : max_code;
    return (unsigned char)(int32_t)((code + round) - round);
}

/* Quantize the float32 values of `run`, group by group. Returns false if an element or
 * the range of some group is not finite; the other groups are still quantized. */
static bool quantize_run(const mls_group_run *run)
{
    const float max_code = (float)((1U << run->bits) - 1);
    unsigned char codes[8];
    float x[MLS_QUANTIZE_MOST_GROUP];
    bool is_finite = true;
    for (size_t group = 0; group < run->groups; group++) {
        const size_t bytes = run->size * sizeof *x, item = sizeof(float);
        float scale, bias;
        memcpy(x, (const unsigned char *)run->values + group * bytes, bytes);
        is_finite =
            choose_group_scale(x, run->size, max_code, &scale, &bias) && is_finite;
        memcpy((unsigned char *)run->scales + group * item, &scale, item);
        memcpy((unsigned char *)run->biases + group * item, &bias, item);
        unsigned char *joined = run->codes + group * run->size * run->bits / 8;
        for (size_t i = 0; i < run->size; i += 8, joined += run->bits) {
            for (size_t k = 0; k < 8; k++) {
                codes[k] = encode_value(x[i + k], scale, bias, max_code);
            }
            mls_join_8(codes, run->bits, joined);
        }
    }
    return is_finite;
}

/* Write scale * code + bias of each code of `run` to `run->values`, as float32. */
static void dequantize_run(const mls_group_run *run)
{
    unsigned char codes[8];
    float x[8];
    unsigned char *values = run->values;
    const unsigned char *joined = run->codes;
    for (size_t group = 0; group < run->groups; group++) {
        const size_t item = sizeof(float);
        float scale, bias;
        memcpy(&scale, (const unsigned char *)run->scales + group * item, item);
        memcpy(&bias, (const unsigned char *)run->biases + group * item, item);
        for (size_t i = 0; i < run->size; i += 8, joined += run->bits) {
            mls_split_8(joined, run->bits, codes);
            for (size_t k = 0; k < 8; k++) {
                x[k] = scale * (float)codes[k] + bias;
            }
            memcpy(values, x, sizeof x);
            values += sizeof x;
        }
    }
}

const mls_group_kernels mls_group_scalar = {.quantize = {[MLS_F32] = quantize_run},
                                            .dequantize = {[MLS_F32] = dequantize_run}};
