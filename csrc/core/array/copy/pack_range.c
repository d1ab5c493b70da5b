/* pack_range: copies a range of a tensor's elements, counted in C order, as a few boxes.
 *
 * Each step copies the largest box that starts at the current element and does not pass
 * the end of the range: consecutive indices along one axis with everything inside them.
 * Boxes grow towards the middle of the range and then shrink, so there are at most two
 * for each axis.
 */
#include "array/copy/pack_range.h"

#include <string.h>

/* Return the view of `n` indices along `axis` from the element `first` on, counted in C
 * order: outer axes have one index, inner ones all. `inner[i]` is the number of elements
 * inside one index of axis i. */
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

/* Copy elements first .. first + count - 1 of `t`, counted in C order, to adjacent
 * elements of `dtype` at `memory` if `packs`, else from there. Each iteration of the
 * outer loop copies one box. Its axis is the outermost one such that `first` is at the
 * start of an index and the range includes that whole index. */
static void copy_range(const mls_kernels *kernels, const mls_tensor *t, mls_dtype dtype,
                       size_t first, size_t count, unsigned char *memory, bool packs)
{
    const size_t item = mls_dtype_of(dtype)->item_bytes;
    size_t inner[MLS_MAX_RANK]; /* elements inside one index of each axis */
    size_t element_count = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        inner[i] = element_count;
        element_count *= t->shape[i];
    }
    /* the range of an empty tensor is empty, so the divisions below are never by 0 */
    const size_t end = first + count;
    while (first < end) {
        int axis = 0;
        while (axis < t->rank - 1 &&
               (first % inner[axis] != 0 || first + inner[axis] > end)) {
            axis++;
        }
        mls_tensor box = *t;
        size_t run_elements = 1;
        if (t->rank > 0) {
            /* the indices left on the axis, limited by the range */
            const size_t left = t->shape[axis] - first / inner[axis] % t->shape[axis];
            const size_t fits = (end - first) / inner[axis];
            const size_t n = fits < left ? fits : left;
            box = box_at(t, inner, axis, first, n);
            run_elements = n * inner[axis];
        }
        mls_tensor packed;
        mls_status ignored; /* cannot fail: the box is part of a tensor in memory */
        (void)mls_tensor_init(&packed, memory, dtype, box.rank, box.shape, &ignored);
        mls_copy(kernels, packs ? &packed : &box, packs ? &box : &packed, mls_cached());
        memory += run_elements * item;
        first += run_elements;
    }
}

void mls_pack_range(const mls_kernels *kernels, const mls_tensor *t, mls_dtype dtype,
                    size_t first, size_t count, unsigned char *to)
{
    copy_range(kernels, t, dtype, first, count, to, true);
}

void mls_unpack_range(const mls_kernels *kernels, const mls_tensor *t, size_t first,
                      size_t count, unsigned char *from)
{
    copy_range(kernels, t, t->dtype, first, count, from, false);
}
