/* reduce_kernels: what the kernel files share; private to reduce*.c.
 *
 * Each kernel file defines one table and nothing else that is seen outside.  Whether the
 * machine at hand can run a table is for mls_cpu_offers to say, and reduce.c is the one
 * place that chooses.
 *
 * Complex numbers have no entries: to all of this they are twice as many float32.
 */
#ifndef MLS_REDUCE_KERNELS_H
#define MLS_REDUCE_KERNELS_H

#include "array/float_convert.h"
#include "gradients/reduce/reduce.h"
#include "runtime/cpu_features.h"

enum {
    MLS_REDUCE_OPS = 3,
    MLS_SQUARE_LANES = 32 /* sums that squares go to in turn, to be folded at the end */
};

/* Items start .. start + n - 1 of `count` sources become those of `out`.  `divisor` is 1
 * for what cannot be divided. */
typedef void (*mls_reduce_kernel)(void *out, const void *const *sources, size_t count,
                                  size_t start, size_t n, double divisor);

/* dst += scale * src for n items, which may be the same memory. */
typedef void (*mls_add_kernel)(void *dst, const void *src, size_t n, double scale);

/* items *= factor. */
typedef void (*mls_scale_kernel)(void *items, size_t n, double factor);

/* The sum of the squares of one block: item i goes to lane i % MLS_SQUARE_LANES. */
typedef double (*mls_squares_kernel)(const void *items, size_t n);

/* The sum of one block into its own dtype, and the sum of its squares. */
typedef double (*mls_sum_squares_kernel)(void *out, const void *const *sources,
                                         size_t count, size_t start, size_t n,
                                         double divisor);

/* In the scalar table NULL stands for what is not offered; in the others it stands for
 * the scalar table's entry, which also ends the runs that fill no vector.  `sum_squares`
 * may be missing everywhere: then it is a sum, and squares. */
typedef struct mls_reduce_kernels {
    mls_reduce_kernel same[MLS_REDUCE_OPS][MLS_DTYPE_COUNT]; /* into their own dtype */
    mls_reduce_kernel wide[MLS_REDUCE_OPS][MLS_DTYPE_COUNT]; /* into float32 */
    mls_add_kernel add[MLS_CONVERTIBLE][MLS_DTYPE_COUNT];    /* [dst][src], floats */
    mls_scale_kernel scale[MLS_CONVERTIBLE];
    mls_squares_kernel squares[MLS_DTYPE_COUNT];
    mls_sum_squares_kernel sum_squares[MLS_CONVERTIBLE];
} mls_reduce_kernels;

/* The tables, constant. */
extern const mls_reduce_kernels mls_reduce_scalar;
#if defined(__x86_64__)
extern const mls_reduce_kernels mls_reduce_avx2;
extern const mls_reduce_kernels mls_reduce_avx512;

/* The sum of float32 of the AVX2 table, which the AVX-512 table has too. */
void mls_sum_f32_avx2(void *out, const void *const *sources, size_t count, size_t start,
                      size_t n, double divisor);
#endif
#if defined(__aarch64__)
extern const mls_reduce_kernels mls_reduce_neon;
#endif

/* How many of n items are infinite or NaN.  The only one there is: it is asked about a
 * block whose squares do not add up to a number, and those are rare. */
uint64_t mls_reduce_nonfinite(mls_dtype dtype, const void *items, size_t n);

/* The lanes of a block as one number, by halves: part of what a tally's bits are. */
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
