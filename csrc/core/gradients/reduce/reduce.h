/* reduce: arrays of several ranks, or of several micro-batches, become one.
 *
 * Sums are made element by element in the order of the sources, 8- and 16-bit floats in
 * float32 and rounded once: the bits depend on neither threads, nor on where an array is
 * cut, nor on the instruction set.  Integers wrap.  In minima and maxima a NaN wins.
 *
 * A tally adds up squares in double, in blocks of MLS_TALLY_BLOCK elements from the start
 * of the array, each by one fixed tree, and the blocks in order: who cuts an array at
 * multiples of that, and passes the same tally from one part to the next, gets the same
 * bits.  Only the payload and sign of a NaN may depend on the instruction set.
 */
#ifndef MLS_REDUCE_H
#define MLS_REDUCE_H

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"
#include "base/status.h"
#include "array/tensor.h"

enum { MLS_TALLY_BLOCK = 4096 };

/* What is known of the elements of an array; zero it before the first use. */
typedef struct mls_tally {
    double squares;     /* sum of the squares; complex numbers count both parts */
    uint64_t nonfinite; /* elements that are infinite or NaN */
} mls_tally;

typedef enum mls_reduce_op {
    MLS_REDUCE_SUM,
    MLS_REDUCE_MIN,
    MLS_REDUCE_MAX
} mls_reduce_op;

typedef struct mls_reduction {
    mls_dtype dtype;     /* of the sources */
    mls_dtype out_dtype; /* the same, or float32 for 8- and 16-bit floats */
    mls_reduce_op op;
    double
        divisor; /* what a sum of floats is divided by before it is rounded; 1 for none */
} mls_reduction;

/* Whether a reduction makes sense: MLS_E_DTYPE for an op or an output that the dtype does
 * not have (sums of bool, minima of complex numbers, 8-bit floats as anything but
 * float32), MLS_E_VALUE for a divisor that is 0 or not finite in what the sum is computed
 * in, or not 1 for anything but a sum of floats or complex numbers. */
mls_code mls_reduce_check(const mls_reduction *r, mls_status *st);

/* Reduce `count` arrays of n elements, in their order, into `out`, which may be one of
 * them where the dtypes are equal.  Arrays are aligned to their items.  The reduction was
 * checked and `count` is at least 1.  A large `destination` may be stored past the cache
 * (store_choice.h).  `tally` (NULL for none) gets the output's figures added.  One
 * thread. */
void mls_reduce_run(const mls_kernels *kernels, const mls_reduction *r,
                    const void *const *sources, size_t count, void *out, size_t n,
                    mls_destination destination, mls_tally *tally);

/* Whether mls_accumulate would do it: the errors are the same. */
mls_code mls_accumulate_check(const mls_tensor *dst, const mls_tensor *src, double scale,
                              mls_status *st);

/* dst += scale * src, of any strides and byte orders: any float to a float of 16 bits or
 * more, or two equal dtypes that have a sum.  Computed in float64 where one of them is
 * that, else in float32, product and sum rounded each, and once more to what dst holds.
 * `tally` (NULL for none) gets figures of the new dst added.  Where both lie packed, the
 * pool (NULL for this thread alone) shares the work.
 * MLS_E_SHAPE.  MLS_E_DTYPE: mixed integers, bool, an 8-bit float as dst.  MLS_E_VALUE: a
 * scale that is not finite in what is computed in, or other than 1 with integers.
 * MLS_E_OVERLAP: shared memory, unless both are the same elements, or a dst with several
 * places for one element.  MLS_E_SIZE.  After an error nothing was changed. */
mls_code mls_accumulate(mls_cpu cpu, mls_pool *pool, const mls_tensor *dst,
                        const mls_tensor *src, double scale, mls_tally *tally,
                        mls_status *st);

/* Whether mls_scale would do it: the errors are the same. */
mls_code mls_scale_check(const mls_tensor *t, double factor, mls_status *st);

/* t *= factor, for floats of 16 bits or more and complex numbers; computed as above.
 * MLS_E_DTYPE, MLS_E_VALUE, MLS_E_OVERLAP, MLS_E_SIZE, as above. */
mls_code mls_scale(mls_cpu cpu, mls_pool *pool, const mls_tensor *t, double factor,
                   mls_status *st);

/* Add the figures of an array to `tally`; any dtype, where integers are always finite.
 * For strided arrays elements come in C order, on this thread. */
void mls_tally_of(mls_cpu cpu, mls_pool *pool, const mls_tensor *t, mls_tally *tally);

#endif
