/* reduce: sum, minimum and maximum over ranks; sums over micro-batches; scaling; norms.
 *
 * Sums are computed element by element in the order of the sources. 8- and 16-bit floats
 * are summed in float32 and rounded once. The bits depend neither on threads, nor on how
 * an array is divided, nor on the instruction set. Integers wrap. In minima and maxima a
 * NaN wins.
 *
 * A norm partial sums squares in float64, in blocks of MLS_NORM_BLOCK elements from the
 * start of the array, each block with one fixed tree, and then the blocks in order. A
 * caller that divides an array at multiples of MLS_NORM_BLOCK, and passes the same norm
 * partial from one part to the next, gets the same bits. Only the payload and sign of a
 * NaN may depend on the instruction set.
 */
#ifndef MLS_REDUCE_H
#define MLS_REDUCE_H

#include "array/copy/copy.h"
#include "array/tensor.h"
#include "base/status.h"
#include "runtime/thread_pool.h"

enum { MLS_NORM_BLOCK = 4096 };

/* Figures of an array's elements; zero it before the first use. */
typedef struct mls_norm_partial {
    double squares;     /* sum of squares; for complex numbers, of both components */
    uint64_t nonfinite; /* number of infinite or NaN elements */
} mls_norm_partial;

typedef enum mls_reduce_op {
    MLS_REDUCE_SUM,
    MLS_REDUCE_MIN,
    MLS_REDUCE_MAX
} mls_reduce_op;

typedef struct mls_reduction {
    mls_dtype dtype;     /* of the sources */
    mls_dtype out_dtype; /* `dtype`, or float32 for 8- and 16-bit floats */
    mls_reduce_op op;
    double divisor; /* divides a sum of floats before it is rounded; 1 for none */
} mls_reduction;

/* Checks a reduction.
 * - MLS_E_DTYPE: the dtype does not support the op or the output dtype (sums of bool,
 *   minima of complex numbers, 8-bit floats into anything but float32).
 * - MLS_E_VALUE: the divisor is 0 or not finite in the dtype of the computation, or not 1
 *   for anything but a sum of floats or complex numbers.
 */
mls_code mls_reduce_check(const mls_reduction *r, mls_status *st);

/* Checks `count` (at least 1) sources and an output for mls_reduce_run, and sets the
 * number of elements `*n` and the two dtypes of `r`. Errors call the arrays "sources[i]"
 * and "out". Errors of mls_reduce_check, and:
 * - MLS_E_SHAPE: an array is not packed, aligned and in native byte order, or has not as
 *   many elements as sources[0]. Shapes are not compared.
 * - MLS_E_DTYPE: the sources have different dtypes.
 * - MLS_E_OVERLAP: a source shares memory with the output and is not the output. */
mls_code mls_reduce_check_arrays(const mls_tensor *const *sources, size_t count,
                                 const mls_tensor *out, mls_reduction *r, size_t *n,
                                 mls_status *st);

/* Reduces `count` (at least 1) arrays of n elements, in their order, into `out`. `out`
 * may be one of the sources if the dtypes are equal. Arrays are aligned to their items.
 * The caller has checked the reduction `r` with mls_reduce_check. A large `destination`
 * may be written with non-temporal stores (cpu_store_choice.h). Adds the output's figures
 * to `partial` (NULL for none). Uses one thread. */
void mls_reduce_run(const mls_kernels *kernels, const mls_reduction *r,
                    const void *const *sources, size_t count, void *out, size_t n,
                    mls_destination destination, mls_norm_partial *partial);

/* Checks the arguments of mls_accumulate: the same errors, but nothing is added. */
mls_code mls_accumulate_check(const mls_tensor *dst, const mls_tensor *src, double scale,
                              mls_status *st);

/* Computes dst += scale * src, for any strides and byte orders: any float dtype into a
 * float of 16 bits or more, or two equal dtypes that have a sum. Computes in float64 if
 * either is float64, else in float32; rounds the product, the sum, and once more to dst's
 * dtype. Adds figures of the new dst to `partial` (NULL for none). The pool (NULL for
 * this thread only) shares the work if both arrays are packed.
 * - MLS_E_SHAPE: the shapes differ.
 * - MLS_E_DTYPE: mixed integer dtypes, bool, or an 8-bit float as dst.
 * - MLS_E_VALUE: the scale is not finite in the dtype of the computation, or not 1 for
 *   integers.
 * - MLS_E_OVERLAP: the arrays share memory and are not the same elements, or dst has
 *   several indices for one element.
 * - MLS_E_SIZE: more elements than size_t can count.
 * On error nothing is changed.
 */
mls_code mls_accumulate(mls_cpu cpu, mls_pool *pool, const mls_tensor *dst,
                        const mls_tensor *src, double scale, mls_norm_partial *partial,
                        mls_status *st);

/* Checks the arguments of mls_scale: the same errors, but nothing is scaled. */
mls_code mls_scale_check(const mls_tensor *t, double factor, mls_status *st);

/* Computes t *= factor, for floats of 16 bits or more and complex numbers; computes and
 * rounds like mls_accumulate, and uses the pool like it. MLS_E_DTYPE, MLS_E_VALUE,
 * MLS_E_OVERLAP, MLS_E_SIZE: as for mls_accumulate. */
mls_code mls_scale(mls_cpu cpu, mls_pool *pool, const mls_tensor *t, double factor,
                   mls_status *st);

/* Checks that an array has a norm. MLS_E_DTYPE: its dtype is packed. */
mls_code mls_norm_partial_check(const mls_tensor *t, mls_status *st);

/* Adds the figures of an array to `partial`; integers are always finite. The caller has
 * checked the array with mls_norm_partial_check.
 * Strided arrays are read in C order, on this thread; the pool (NULL: none) shares packed
 * arrays. */
void mls_norm_partial_of(mls_cpu cpu, mls_pool *pool, const mls_tensor *t,
                         mls_norm_partial *partial);

#endif
