/* quantize_kernels: declarations shared by kv_quantize*.c; private to them.
 *
 * Every function handles `groups` packed groups of `size` elements each; `size` is a
 * multiple of 8. Functions for an instruction set compute the same bits as the scalar
 * ones.
 */
#ifndef MLS_QUANTIZE_KERNELS_H
#define MLS_QUANTIZE_KERNELS_H

#include "base/exact_float.h"
#include "kv/kv_quantize.h"
#include "runtime/cpu_features.h"

#include <math.h>

/* Bytes behind joined codes that `join` may write and `split` may read. */
enum { MLS_QUANTIZE_SLACK = 16 };

typedef struct mls_group_kernels {
    /* Choose scale and bias of each group for codes of 0 .. levels. Returns false if an
     * element or the range of a group is not finite. */
    bool (*choose)(const float *x, size_t groups, size_t size, float levels,
                   float *scales, float *biases);
    /* Compute clip((x - bias) / scale, 0, levels), rounded to nearest even. */
    void (*encode)(const float *x, size_t groups, size_t size, float levels,
                   const float *scales, const float *biases, unsigned char *codes);
    /* Compute scale * code + bias. */
    void (*decode)(const unsigned char *codes, size_t groups, size_t size,
                   const float *scales, const float *biases, float *x);
    /* Join `count` codes, one in each byte, into a string of bits; and the reverse. bits
     * is 2 to 6. */
    void (*join)(const unsigned char *codes, size_t count, unsigned bits,
                 unsigned char *joined);
    void (*split)(const unsigned char *joined, size_t count, unsigned bits,
                  unsigned char *codes);
} mls_group_kernels;

MLS_CPU_AVX2_TABLES(mls_group_kernels, mls_group);

/* Choose scale and bias for values of low .. high. The bias is the extreme with the
 * larger absolute value, and 0 is a whole number of steps from it. mlx does the same
 * operations in the same order. Returns false if the range is not finite. */
static inline bool mls_choose_affine(float low, float high, float levels, float *scale,
                                     float *bias)
{
    const bool from_low = fabsf(low) > fabsf(high);
    const float step = (high - low) / levels, least = 1e-7F;
    const float size = step > least ? step : least;
    const float edge = from_low ? low : high;
    *scale = from_low ? size : -size;
    *bias = 0;
    const float steps = rintf(edge / *scale); /* from 0 to the edge */
    if (fabsf(steps) > 0) {
        *scale = edge / steps;
        *bias = edge;
    }
    return isfinite(high - low);
}

/* Join 8 codes to `bits` bytes. */
static inline void mls_join_8(const unsigned char *codes, unsigned bits,
                              unsigned char *joined)
{
    uint64_t string = 0;
    for (unsigned i = 0; i < 8; i++) {
        string |= (uint64_t)codes[i] << (i * bits);
    }
    for (unsigned i = 0; i < bits; i++) {
        joined[i] = (unsigned char)(string >> (8 * i));
    }
}

/* Split `bits` bytes to 8 codes. */
static inline void mls_split_8(const unsigned char *joined, unsigned bits,
                               unsigned char *codes)
{
    uint64_t string = 0;
    for (unsigned i = 0; i < bits; i++) {
        string |= (uint64_t)joined[i] << (8 * i);
    }
    for (unsigned i = 0; i < 8; i++) {
        codes[i] = (unsigned char)(string >> (i * bits) & ((1U << bits) - 1));
    }
}

#endif
