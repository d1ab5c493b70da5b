/* diff: how much the elements of two tensors differ: definitions of equal, distance and
 * NaN.
 *
 * Definitions:
 * - Two elements are equal if their bits are equal or if both are NaN. So -0 and 0
 *   differ, with a distance of 0.
 * - The distance is |a - b|, the relative distance |a - b| / max(|a|, |b|), both in
 *   float64; 0 / 0 counts as 0.
 * - An element that is NaN on one side only is counted separately and does not enter the
 *   maxima.
 * - The distance between infinity and any other number is infinite, in both measures; so
 *   is the distance of two float64 if it overflows.
 * - 64-bit integers are subtracted exactly and rounded once. A bool is its byte.
 * - The distance of complex numbers is the modulus of their difference. A complex number
 *   is NaN or infinite if a component is; NaN takes precedence.
 *
 * The scalar table is the reference: every other table computes the same numbers, bit for
 * bit.
 */
#ifndef MLS_DIFF_H
#define MLS_DIFF_H

#include "array/copy/copy.h"
#include "array/tensor.h"
#include "runtime/thread_pool.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Result for a run, a tensor, or several of them; initialise with zeros. */
typedef struct mls_diff_result {
    uint64_t changed; /* unequal elements, including NaN on one side */
    uint64_t nan;     /* of these, elements that are NaN on exactly one side */
    double max_abs;   /* 0 if nothing changed */
    double max_rel;   /* 0 .. 2, or infinity */
} mls_diff_result;

/* Compares `count` elements, packed and in native byte order, and adds the result. `into`
 * must be zeroed or hold results of the same dtype: kernels rely on its ratio being that
 * of two such elements. */
typedef void (*mls_diff_run)(const void *a, const void *b, size_t count,
                             mls_diff_result *into);

typedef struct mls_diff_kernels {
    mls_diff_run run[MLS_DTYPE_COUNT]; /* complete */
} mls_diff_kernels;

/* Returns the table for an instruction set that mls_cpu_offers. Never NULL; constant. */
const mls_diff_kernels *mls_diff_of(mls_cpu cpu);

/* Checks two tensors: the same shape and dtype, with any strides and byte orders; they
 * may share memory. MLS_E_SHAPE, MLS_E_DTYPE. MLS_E_SIZE: more elements than size_t can
 * count, which is possible with strides of 0. */
mls_code mls_diff_check(const mls_tensor *a, const mls_tensor *b, mls_status *st);

/* A pair that passed mls_diff_check. */
typedef struct mls_diff_pair {
    const mls_tensor *a, *b;
} mls_diff_pair;

/* Compares `count` pairs, and stores the result of each in `out`, which has `count`
 * entries. The threads of the pool (NULL: none) share large tensors. MLS_E_MEMORY: `out`
 * is unchanged. */
mls_code mls_diff(const mls_diff_kernels *kernels, mls_pool *pool,
                  const mls_diff_pair *pairs, size_t count, mls_diff_result *out,
                  mls_status *st);

/* Returns whether all elements of all `count` pairs are equal, as defined above; stops at
 * the first difference. The threads of the pool (NULL: none) share the work. Cannot
 * fail. */
bool mls_diff_same(const mls_diff_kernels *kernels, mls_pool *pool,
                   const mls_diff_pair *pairs, size_t count);

#endif
