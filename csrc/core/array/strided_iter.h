/* strided_iter: iterates over one or two strided views of equal shape, run by run.
 *
 * A view is first simplified: axes of length 1 are dropped, the others are sorted by the
 * stride of the first view, and axes that are contiguous with each other in both views
 * are merged. The innermost axis is then the longest run that the layout allows. Both
 * views yield their elements in the same order; the order itself is unspecified.
 */
#ifndef MLS_STRIDED_ITER_H
#define MLS_STRIDED_ITER_H

#include "array/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* Plain data: may be copied, owns nothing. */
typedef struct mls_strided_iter {
    size_t length;            /* elements in each run, at least 1 */
    ptrdiff_t a_step, b_step; /* bytes between neighbouring elements of a run */
    int rank;                 /* number of axes outside the run; 0 if there is one run */
    size_t shape[MLS_MAX_RANK]; /* of the axes outside the run, as are the strides */
    ptrdiff_t a_strides[MLS_MAX_RANK];
    ptrdiff_t b_strides[MLS_MAX_RANK];
    size_t index[MLS_MAX_RANK]; /* position on each outer axis */
} mls_strided_iter;

/* Start at the first run, at offset 0 of the views `a` and `b`. `b` must have the shape
 * of `a`; NULL means a view with the strides of `a`. Returns false if the views are
 * empty; `iter` must then not be used. */
bool mls_strided_iter_init(mls_strided_iter *iter, const mls_tensor *a,
                           const mls_tensor *b);

/* Advance to the next run and update `*a` and `*b`, its offsets in bytes from the data of
 * both views. Returns false after the last run; the offsets are then invalid. Counts like
 * an odometer: an axis at its end returns to 0 and the next outer axis advances. Inline,
 * because runs may be very short. */
static inline bool mls_strided_iter_next(mls_strided_iter *iter, ptrdiff_t *a,
                                         ptrdiff_t *b)
{
    for (int axis = iter->rank - 1; axis >= 0; axis--) {
        *a += iter->a_strides[axis];
        *b += iter->b_strides[axis];
        if (++iter->index[axis] < iter->shape[axis]) {
            return true;
        }
        *a -= iter->a_strides[axis] * (ptrdiff_t)iter->shape[axis];
        *b -= iter->b_strides[axis] * (ptrdiff_t)iter->shape[axis];
        iter->index[axis] = 0;
    }
    return false;
}

/* Move to run number `run`, counted from 0, and set `*a` and `*b` to its offsets in bytes
 * from the data of both views. The caller ensures that the run exists. */
void mls_strided_iter_seek(mls_strided_iter *iter, size_t run, ptrdiff_t *a,
                           ptrdiff_t *b);

/* Copy `count` items of `item` bytes (1, 2, 4 or 8), which start `stride` bytes apart at
 * `from`, to adjacent memory at `packed`. */
void mls_gather(unsigned char *packed, const unsigned char *from, ptrdiff_t stride,
                size_t item, size_t count);

/* The inverse of mls_gather: copy `count` adjacent items of `item` bytes from `packed` to
 * addresses `stride` bytes apart, from `to` on. */
static inline void mls_scatter(unsigned char *to, ptrdiff_t stride,
                               const unsigned char *packed, size_t item, size_t count)
{
    for (size_t i = 0; i < count; i++, to += stride) {
        memcpy(to, packed + i * item, item);
    }
}

/* Return how many bytes are reversed together to change the byte order of a dtype: the
 * item size, or half of it for complex numbers. */
size_t mls_swap_unit(mls_dtype dtype);

/* Reverse the bytes of each `unit` bytes in place, which changes the byte order. `bytes`
 * is the size of all items, a multiple of `unit`. */
void mls_swap_items(unsigned char *items, size_t bytes, size_t unit);

#endif
