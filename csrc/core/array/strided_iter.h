/* walk: two strided views of one shape as runs of memory, and items packed or turned.
 *
 * A view is reduced first: axes of one index go, the others are ordered by the stride of
 * the first view, and axes that run on in both views are merged.  Whatever the layout
 * was, the innermost axis is then the longest run that memory offers.  The order in which
 * elements come is the same for both views, and no other promise is made about it.
 */
#ifndef MLS_WALK_H
#define MLS_WALK_H

#include "array/tensor.h"

#include <stdbool.h>
#include <stddef.h>

/* Plain storage, to be copied at will; nothing to free. */
typedef struct mls_walk {
    size_t length;            /* elements of each run, at least 1 */
    ptrdiff_t a_step, b_step; /* bytes from one element of a run to the next */
    int rank;                 /* axes outside the run; 0 where there is one run */
    size_t shape[MLS_MAX_RANK];
    ptrdiff_t a_strides[MLS_MAX_RANK];
    ptrdiff_t b_strides[MLS_MAX_RANK];
    size_t index[MLS_MAX_RANK]; /* of each outer axis, as mls_walk_next counts it */
} mls_walk;

/* Start at the first run, whose element 0 is that of both views: offset 0.  `b` has the
 * shape of `a`; NULL stands for a view like `a`.  False where there is nothing to walk;
 * `w` is then of no use. */
bool mls_walk_init(mls_walk *w, const mls_tensor *a, const mls_tensor *b);

/* Go on to the next run: both offsets, in bytes from the views' `data`, move along; false
 * at the end, where they are of no use.  Counts like an odometer: an axis that is through
 * goes back, and the next outer one moves.  Inline, since runs may be very short. */
static inline bool mls_walk_next(mls_walk *w, ptrdiff_t *a, ptrdiff_t *b)
{
    for (int axis = w->rank - 1; axis >= 0; axis--) {
        *a += w->a_strides[axis];
        *b += w->b_strides[axis];
        if (++w->index[axis] < w->shape[axis]) {
            return true;
        }
        *a -= w->a_strides[axis] * (ptrdiff_t)w->shape[axis];
        *b -= w->b_strides[axis] * (ptrdiff_t)w->shape[axis];
        w->index[axis] = 0;
    }
    return false;
}

/* Go to run number `run`, counted from 0; the caller knows that there are so many. */
void mls_walk_seek(mls_walk *w, size_t run, ptrdiff_t *a, ptrdiff_t *b);

/* Collect `count` items of `item` bytes, which lie `stride` apart, into `packed`. */
void mls_gather(unsigned char *packed, const unsigned char *from, ptrdiff_t stride,
                size_t item, size_t count);

/* Bytes that are turned as one: an item, but a complex number is two of them. */
size_t mls_swap_unit(mls_dtype dtype);

/* Turn each `unit` of `bytes` bytes end for end, in place. */
void mls_swap_items(unsigned char *items, size_t bytes, size_t unit);

#endif
