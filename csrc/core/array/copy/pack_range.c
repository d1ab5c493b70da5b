/* pack: a run of elements as a few boxes.
 *
 * From where the run starts, the largest box is taken that starts there and does not go
 * beyond its end: some indices along one axis, with all that lies inside them.  Boxes
 * grow up to the middle of the run and then shrink, so there are at most two for each
 * axis.
 */
#include "array/copy/pack_range.h"

#include <string.h>

/* The view of `n` indices along `axis`, from those at which element `first` lies; the
 * axes in front have that one index only. */
static mls_tensor box_at(const mls_tensor *t, const size_t *inner, int axis, size_t first,
                         size_t n)
{
    mls_tensor box = *t;
    for (int i = 0; i <= axis; i++) {
        box =
            mls_tensor_slice(&box, i, first / inner[i] % t->shape[i], i == axis ? n : 1);
    }
    return box;
}

/* Each turn of the outer loop takes one box.  The axis that it grows along is the
 * outermost one at which the run stands at the start of an index and has all of that
 * index left. */
void mls_pack(const mls_kernels *kernels, const mls_tensor *t, size_t first, size_t count,
              unsigned char *to)
{
    const size_t item = mls_tensor_item_bytes(t);
    size_t inner[MLS_MAX_RANK]; /* elements of one index along each axis */
    size_t whole = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        inner[i] = whole;
        whole *= t->shape[i];
    }
    /* a tensor without elements has no run to pack, so nothing is divided by 0 below */
    const size_t end = first + count;
    while (first < end) {
        int axis = 0;
        while (axis < t->rank - 1 &&
               (first % inner[axis] != 0 || first + inner[axis] > end)) {
            axis++;
        }
        mls_tensor box = *t;
        size_t taken = 1;
        if (t->rank > 0) {
            /* as many indices as the axis and the run both have from here on */
            const size_t left = t->shape[axis] - first / inner[axis] % t->shape[axis];
            const size_t fits = (end - first) / inner[axis];
            const size_t n = fits < left ? fits : left;
            box = box_at(t, inner, axis, first, n);
            taken = n * inner[axis];
        }
        mls_tensor packed;
        mls_status ignored; /* a part of what lies in memory */
        (void)mls_tensor_init(&packed, to, t->dtype, box.rank, box.shape, &ignored);
        mls_copy(kernels, &packed, &box, mls_cached());
        to += taken * item;
        first += taken;
    }
}
