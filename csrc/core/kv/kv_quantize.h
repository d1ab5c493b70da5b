/* kv_quantize: quantized caches: codes of 2 to 8 bits with a scale and a bias for each
 * group, as mlx has them.
 *
 * A group is `group` adjacent elements of the last axis. Its elements are approximated by
 * scale * code + bias, with a code of 0 .. 2**bits - 1. The codes of the last axis are
 * one string of bits, the first code in the lowest bits of the first 32-bit word. Codes
 * of 3, 5 and 6 bits cross the ends of words.
 *
 * mlx.core.quantize in affine mode on a CPU gives the same layout and the same bits:
 * arithmetic in float, and codes that are computed before scale and bias are rounded to
 * the dtype of the values.
 */
#ifndef MLS_KV_QUANTIZE_H
#define MLS_KV_QUANTIZE_H

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"

enum {
    MLS_QUANTIZE_UNIT = 8,      /* a group of 4- or 8-bit codes is a multiple of this, */
    MLS_QUANTIZE_ODD_UNIT = 32, /* and of other codes, so that it fills whole words */
    MLS_QUANTIZE_MOST_GROUP = 4096 /* a tile on the stack holds at least one group */
};

/* Codes with their scales and biases. The views have the shape of the values, except for
 * the last axis: see mls_quantized_lengths. The memory is borrowed. */
typedef struct mls_quantized {
    mls_tensor codes;          /* uint32 */
    mls_tensor scales, biases; /* the dtype of the values */
    unsigned bits;             /* 2, 3, 4, 5, 6 or 8 */
    size_t group;
} mls_quantized;

/* Compute the lengths of the last axis of codes (`*words`, 32-bit words) and of scales
 * and biases (`*groups`), for values whose last axis has `length` elements. `bits` is the
 * size of a code, and `group` is the number of elements with one scale.
 * MLS_E_VALUE: bits are not 2, 3, 4, 5, 6 or 8, or the group is not a multiple of 32 up
 * to 4096 (of 8 for 4 and 8 bits).
 * MLS_E_SHAPE: the group does not divide the length. */
mls_code mls_quantized_lengths(size_t length, unsigned bits, size_t group, size_t *words,
                               size_t *groups, mls_status *st);

/* Check that `values` and the views of `quantized` belong together. mls_quantize,
 * mls_dequantize and mls_quantize_loss require it.
 * MLS_E_SHAPE, MLS_E_VALUE: as for mls_quantized_lengths; a rank of 0; a view whose shape
 * does not match the values.
 * MLS_E_DTYPE: values that are not float16, bfloat16 or float32, scales or biases of
 * another dtype, or codes that are not uint32. */
mls_code mls_quantize_check(const mls_tensor *values, const mls_quantized *quantized,
                            mls_status *st);

/* Write the codes, scales and biases of `values` to the views of `dst`, which must not
 * overlap `values`. The threads of `pool` (NULL: none) share large arrays.
 * MLS_E_VALUE: a value is not finite, or a group spans more than float can hold; the
 * content of `dst` is undefined then. */
mls_code mls_quantize(const mls_kernels *kernels, mls_pool *pool,
                      const mls_quantized *dst, const mls_tensor *values, mls_status *st);

/* Write scale * code + bias of each code of `src` to `values`, which must not overlap the
 * views of `src`. The result is computed in float and rounded once. The threads of `pool`
 * (NULL: none) share large arrays. Cannot fail. */
void mls_dequantize(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *values,
                    const mls_quantized *src);

/* How far the values of codes are from the original ones. */
typedef struct mls_quantization_loss {
    double largest;       /* absolute difference */
    double squares;       /* sum of the squares of all differences, and */
    double value_squares; /* of the original values */
} mls_quantization_loss;

/* Compare the original `values` with those that mls_dequantize computes from `quantized`,
 * which must have passed mls_quantize_check. One thread adds in a fixed order, so every
 * instruction set returns the same bits. */
mls_quantization_loss mls_quantize_loss(const mls_kernels *kernels,
                                        const mls_tensor *values,
                                        const mls_quantized *quantized);

#endif
