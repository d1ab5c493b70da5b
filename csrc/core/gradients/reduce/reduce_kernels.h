/* reduce_kernels: types and tables of the files with arithmetic, and the order of a
 * block's squares; private to reduce*.c.
 *
 * Each kernel file defines one table; reduce.c chooses the table. mls_cpu_offers tests
 * whether the processor supports a table's instruction set.
 *
 * Complex numbers have no entries: the kernels see twice as many float32 items.
 */
#ifndef MLS_REDUCE_KERNELS_H
#define MLS_REDUCE_KERNELS_H

#include "array/float_convert.h"
#include "gradients/reduce/reduce.h"
#include "runtime/cpu_features.h"

enum {
    MLS_REDUCE_OPS = 3,
    MLS_SQUARE_LANES = 32 /* partial sums of squares of a block */
};

/* Reduces items start .. start + n - 1 of `count` sources into the same items of `out`.
 * `divisor` is 1 for reductions that cannot be divided. */
typedef void (*mls_reduce_kernel)(void *out, const void *const *sources, size_t count,
                                  size_t start, size_t n, double divisor);

/* Computes dst += scale * src for n items; both may be the same memory. */
typedef void (*mls_add_kernel)(void *dst, const void *src, size_t n, double scale);

/* Computes items *= factor. */
typedef void (*mls_scale_kernel)(void *items, size_t n, double factor);

/* Returns the sum of squares of one block; item i is added to lane i %
 * MLS_SQUARE_LANES. */
typedef double (*mls_squares_kernel)(const void *items, size_t n);

/* Computes the sum of one block in its own dtype, and returns the sum of its squares. */
typedef double (*mls_sum_squares_kernel)(void *out, const void *const *sources,
                                         size_t count, size_t start, size_t n,
                                         double divisor);

/* In the scalar table, NULL means "not supported". In the other tables it means "use the
 * scalar table's entry"; that entry also handles the last items that do not fill a
 * vector. `sum_squares` may be NULL in every table: then the sum and its squares are
 * separate passes. */
typedef struct mls_reduce_kernels {
    mls_reduce_kernel same[MLS_REDUCE_OPS][MLS_DTYPE_COUNT]; /* into the same dtype */
    mls_reduce_kernel wide[MLS_REDUCE_OPS][MLS_DTYPE_COUNT]; /* into float32 */
    mls_add_kernel add[MLS_CONVERTIBLE][MLS_DTYPE_COUNT];    /* [dst][src], floats */
    mls_scale_kernel scale[MLS_CONVERTIBLE];
    mls_squares_kernel squares[MLS_DTYPE_COUNT];
    mls_sum_squares_kernel sum_squares[MLS_CONVERTIBLE];
} mls_reduce_kernels;

/* The tables; constant. */
MLS_CPU_TABLES(mls_reduce_kernels, mls_reduce);
#if defined(__x86_64__)
/* The float32 sum of the AVX2 table, which the AVX-512 table uses too. */
void mls_sum_f32_avx2(void *out, const void *const *sources, size_t count, size_t start,
                      size_t n, double divisor);
#endif

/* Returns how many of n elements are infinite or NaN. It has only a scalar version: it is
 * called only for blocks whose squares do not add up to a finite number, which are
 * rare. */
uint64_t mls_reduce_nonfinite(mls_dtype dtype, const void *items, size_t n);

/* Returns the sum of the MLS_SQUARE_LANES lanes of a block, and overwrites them. They are
 * added pairwise, halving their number each time; this order is part of the definition of
 * a norm partial's bits. */
static inline double mls_fold_squares(double *lanes)
{
    for (size_t half = MLS_SQUARE_LANES / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < half; i++) {
            lanes[i] += lanes[i + half];
        }
    }
    return lanes[0];
}

#endif
