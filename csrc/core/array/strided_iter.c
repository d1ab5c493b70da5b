/* strided_iter: merges the axes of strided views into runs, steps through them, gathers
 * items, and reverses their bytes.
 *
 * Speed depends on the length of the innermost axis. So axes are sorted by the first
 * view's stride, largest first, and then merged from the outside in. The second view uses
 * the same order; the layouts are usually equal, and both then merge equally far.
 */
#include "array/strided_iter.h"

/* ---- simplifying views ---- */

/* Return the absolute value of a stride; unsigned negation is correct for PTRDIFF_MIN
 * too. */
static size_t magnitude(ptrdiff_t stride)
{
    return stride < 0 ? (size_t)0 - (size_t)stride : (size_t)stride;
}

/* Insert an axis of `length` indices, with its strides in bytes in both views, so that
 * the first view's strides stay in descending order, without regard to signs. */
static void insert_axis(mls_strided_iter *iter, size_t length, ptrdiff_t a_stride,
                        ptrdiff_t b_stride)
{
    int place = iter->rank;
    while (place > 0 && magnitude(iter->a_strides[place - 1]) < magnitude(a_stride)) {
        iter->shape[place] = iter->shape[place - 1];
        iter->a_strides[place] = iter->a_strides[place - 1];
        iter->b_strides[place] = iter->b_strides[place - 1];
        place--;
    }
    iter->shape[place] = length;
    iter->a_strides[place] = a_stride;
    iter->b_strides[place] = b_stride;
    iter->rank++;
}

/* Merge each axis with the next inner one if its stride equals the length of the inner
 * axis times the inner stride, in both views. */
static void merge_axes(mls_strided_iter *iter)
{
    int last = 0; /* the last axis of the result so far */
    for (int axis = 1; axis < iter->rank; axis++) {
        const ptrdiff_t length = (ptrdiff_t)iter->shape[axis];
        if (iter->a_strides[last] == iter->a_strides[axis] * length &&
            iter->b_strides[last] == iter->b_strides[axis] * length) {
            iter->shape[last] *= iter->shape[axis];
        } else {
            last++;
            iter->shape[last] = iter->shape[axis];
        }
        iter->a_strides[last] = iter->a_strides[axis];
        iter->b_strides[last] = iter->b_strides[axis];
    }
    iter->rank = last + 1;
}

/* Start an iteration at the first run; false: the views are empty. Sort and merge the
 * axes. The innermost axis becomes the run; mls_strided_iter_next counts the others. */
bool mls_strided_iter_init(mls_strided_iter *iter, const mls_tensor *a,
                           const mls_tensor *b)
{
    iter->rank = 0;
    for (int axis = 0; axis < a->rank; axis++) {
        if (a->shape[axis] == 0) {
            return false;
        }
        if (a->shape[axis] > 1) {
            insert_axis(iter, a->shape[axis], a->strides[axis],
                        b == NULL ? a->strides[axis] : b->strides[axis]);
        }
    }
    if (iter->rank == 0) { /* one element */
        const ptrdiff_t item = (ptrdiff_t)mls_tensor_item_bytes(a);
        insert_axis(iter, 1, item,
                    b == NULL ? item : (ptrdiff_t)mls_tensor_item_bytes(b));
    }
    merge_axes(iter);
    iter->rank--;
    iter->length = iter->shape[iter->rank];
    iter->a_step = iter->a_strides[iter->rank];
    iter->b_step = iter->b_strides[iter->rank];
    memset(iter->index, 0, (size_t)iter->rank * sizeof iter->index[0]);
    return true;
}

/* ---- stepping ---- */

/* Move to a run by its number. Split the run's number into one index for each axis, the
 * last axis fastest. */
void mls_strided_iter_seek(mls_strided_iter *iter, size_t run, ptrdiff_t *a, ptrdiff_t *b)
{
    ptrdiff_t a_at = 0, b_at = 0;
    for (int axis = iter->rank - 1; axis >= 0; axis--) {
        iter->index[axis] = run % iter->shape[axis];
        run /= iter->shape[axis];
        a_at += iter->a_strides[axis] * (ptrdiff_t)iter->index[axis];
        b_at += iter->b_strides[axis] * (ptrdiff_t)iter->index[axis];
    }
    *a = a_at;
    *b = b_at;
}

/* ---- items ---- */

/* mls_gather for one item size: inlined with a constant `item`, so that each copy is one
 * load and one store. */
static inline __attribute__((always_inline)) void gather_items(unsigned char *packed,
                                                               const unsigned char *from,
                                                               ptrdiff_t stride,
                                                               size_t item, size_t count)
{
    for (size_t i = 0; i < count; i++, from += stride) {
        memcpy(packed + i * item, from, item);
    }
}

/* Copy items that are `stride` bytes apart to adjacent memory. Choose a loop for the item
 * size; the default is 8 bytes. */
void mls_gather(unsigned char *packed, const unsigned char *from, ptrdiff_t stride,
                size_t item, size_t count)
{
    if (stride == (ptrdiff_t)item) {
        memcpy(packed, from, item * count);
        return;
    }
    switch (item) {
    case 1:
        gather_items(packed, from, stride, 1, count);
        break;
    case 2:
        gather_items(packed, from, stride, 2, count);
        break;
    case 4:
        gather_items(packed, from, stride, 4, count);
        break;
    default:
        gather_items(packed, from, stride, 8, count);
        break;
    }
}

/* Real and imaginary part of a complex number are swapped separately. */
size_t mls_swap_unit(mls_dtype dtype)
{
    return dtype == MLS_C64 ? 4 : mls_dtype_of(dtype)->item_bytes;
}

typedef uint64_t swap_words __attribute__((vector_size(32)));

/* Reverse the bytes of each unit in place; `bytes`: of all, at most a swap_words. */
static inline void swap_in_words(unsigned char *items, size_t bytes, size_t unit)
{
    const uint64_t odd_bytes = 0x00FF00FF00FF00FFU, odd_pairs = 0x0000FFFF0000FFFFU;
    swap_words words = {0};
    memcpy(&words, items, bytes);
    if (unit >= 2) {
        words = (words & odd_bytes) << 8 | (words >> 8 & odd_bytes);
    }
    if (unit >= 4) {
        words = (words & odd_pairs) << 16 | (words >> 16 & odd_pairs);
    }
    if (unit >= 8) {
        words = words << 32 | words >> 32;
    }
    memcpy(items, &words, bytes);
}

/* Reverse the bytes of each unit in place, which converts the byte order. Byte by byte,
 * it took 4 times as long. */
void mls_swap_items(unsigned char *items, size_t bytes, size_t unit)
{
    size_t start = 0;
    for (; start + sizeof(swap_words) <= bytes; start += sizeof(swap_words)) {
        swap_in_words(items + start, sizeof(swap_words), unit);
    }
    swap_in_words(items + start, bytes - start, unit);
}
