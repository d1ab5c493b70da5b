/* differ: how much the elements of two tensors differ.
 *
 * Two elements are the same where their bits are, or where both are NaN; so -0 and 0
 * differ, by a distance of 0.  Of those that are not the same, the distance |a - b| and
 * the relative distance |a - b| / max(|a|, |b|) are measured in float64; 0 / 0 counts as
 * 0. An element that is NaN on one side only is counted apart and takes no part in the
 * maxima.  Infinity and anything else are infinitely far apart, in both measures; so are
 * two float64 whose distance is beyond float64.  Integers of 64 bits are subtracted
 * exactly and rounded once; a bool is its byte.  The distance of complex numbers is the
 * modulus of their difference; one is NaN, or infinite, where a part of it is, and NaN
 * comes first.
 *
 * The scalar table is the oracle: every other one gives the same numbers, bit for bit.
 */
#ifndef MLS_DIFFER_H
#define MLS_DIFFER_H

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"
#include "array/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of a run, a tensor, or several put together; starts zeroed. */
typedef struct mls_difference {
    uint64_t changed; /* elements that are not the same, NaN on one side included */
    uint64_t nan;     /* of those, the ones that are NaN on exactly one side */
    double max_abs;   /* 0 where nothing changed */
    double max_rel;   /* 0 .. 2, or infinity */
} mls_difference;

/* Add what `count` elements, packed and in this machine's byte order, differ by.  `into`
 * is zeroed, or has what runs of the same dtype found: a run may take for granted that
 * the ratio there is one of two such elements. */
typedef void (*mls_differ_run)(const void *a, const void *b, size_t count,
                               mls_difference *into);

typedef struct mls_differ_kernels {
    mls_differ_run run[MLS_DTYPE_COUNT]; /* complete */
} mls_differ_kernels;

/* The table for a set that mls_cpu_offers.  Never NULL; constant. */
const mls_differ_kernels *mls_differ_of(mls_cpu cpu);

/* Two tensors of the same shape and dtype, any strides and byte orders, which may share
 * memory.  MLS_E_SHAPE, MLS_E_DTYPE.  MLS_E_SIZE: more elements than a size_t counts,
 * which strides of 0 allow. */
mls_code mls_differ_check(const mls_tensor *a, const mls_tensor *b, mls_status *st);

/* A pair that mls_differ_check passed. */
typedef struct mls_differ_pair {
    const mls_tensor *a, *b;
} mls_differ_pair;

/* Measure `count` pairs into `out`.  Large tensors are shared out over the pool.
 * MLS_E_MEMORY: `out` is untouched. */
mls_code mls_differ(const mls_differ_kernels *kernels, mls_pool *pool,
                    const mls_differ_pair *pairs, size_t count, mls_difference *out,
                    mls_status *st);

/* Whether all elements of all pairs are the same, in the sense above; stops early. */
bool mls_differ_same(const mls_differ_kernels *kernels, mls_pool *pool,
                     const mls_differ_pair *pairs, size_t count);

#endif
