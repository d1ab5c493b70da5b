/* quantize_kernels: declarations shared by kv_quantize*.c; private to them.
 *
 * Every function handles one group, of a multiple of 8 elements. Functions for an
 * instruction set compute the same bits as the plain ones.
 */
#ifndef MLS_QUANTIZE_KERNELS_H
#define MLS_QUANTIZE_KERNELS_H

#include "kv/kv_quantize.h"
#include "runtime/cpu_features.h"

/* The extremes of a group; undefined unless all elements are finite. */
typedef struct mls_group_range {
    float low, high;
    bool is_finite;
} mls_group_range;

typedef struct mls_group_kernels {
    mls_group_range (*measure)(const float *x, size_t count);
    /* Compute clip((x - bias) / scale, 0, levels), rounded to nearest even. */
    void (*encode)(const float *x, size_t count, float scale, float bias, float levels,
                   unsigned char *codes);
    /* Compute scale * code + bias. */
    void (*decode)(const unsigned char *codes, size_t count, float scale, float bias,
                   float *x);
    /* Pack `count` 4-bit codes, one in each byte, two into each byte; and the reverse. */
    void (*join)(const unsigned char *from, size_t count, unsigned char *to);
    void (*split)(const unsigned char *from, size_t count, unsigned char *to);
} mls_group_kernels;

MLS_CPU_AVX2_TABLES(mls_group_kernels, mls_group);

#endif
