/* tensor: elements, bytes, contiguity, slices and address range of a strided view; a
 * shape as text for errors.
 *
 * Sizes are multiplied with size.h, since shapes come from files and from callers. An
 * axis of length 0 makes the view empty, regardless of the other axes: it then has no
 * elements, is contiguous and overlaps nothing. Strides are in bytes and arbitrary; only
 * mls_tensor_init computes them.
 */
#include "array/tensor.h"

#include "base/size.h"

#include <stdint.h>
#include <stdio.h>

/* Make a C-contiguous view of `data`. Compute strides from the last axis outwards. Sizes
 * must fit a ptrdiff_t, since strides are signed and pointers are subtracted. */
mls_code mls_tensor_init(mls_tensor *out, void *data, mls_dtype dtype, int rank,
                         const size_t *shape, mls_status *st)
{
    if (rank < 0 || rank > MLS_MAX_RANK) {
        return mls_fail(st, MLS_E_SHAPE, "%d dimensions: at most %d are supported", rank,
                        (int)MLS_MAX_RANK);
    }
    mls_tensor t = {.data = data, .dtype = dtype, .rank = rank};
    size_t stride = mls_dtype_of(dtype)->item_bytes;
    for (int axis = rank - 1; axis >= 0; axis--) {
        t.shape[axis] = shape[axis];
        t.strides[axis] = (ptrdiff_t)stride;
        /* an empty axis makes the whole view empty, so its stride does not matter */
        if (!mls_size_mul(stride, shape[axis] == 0 ? 1 : shape[axis], &stride) ||
            stride > PTRDIFF_MAX) {
            char text[MLS_FACT_BYTES];
            return mls_fail(st, MLS_E_SIZE, "shape %s of %s is larger than memory",
                            mls_shape_text(text, sizeof text, rank, shape),
                            mls_dtype_of(dtype)->name);
        }
    }
    *out = t;
    return MLS_OK;
}

/* The dtype's size; strides may place items further apart. */
size_t mls_tensor_item_bytes(const mls_tensor *t)
{
    return mls_dtype_of(t->dtype)->item_bytes;
}

/* Set `*out` to the number of elements; false: overflow. Read all axes before an overflow
 * is reported, since a later empty axis makes the product 0. */
bool mls_tensor_count(const mls_tensor *t, size_t *out)
{
    size_t count = 1;
    bool fits = true;
    for (int axis = 0; axis < t->rank; axis++) {
        if (t->shape[axis] == 0) {
            *out = 0;
            return true;
        }
        fits = fits && mls_size_mul(count, t->shape[axis], &count);
    }
    if (fits) {
        *out = count;
    }
    return fits;
}

/* The packed size, regardless of strides: the size of a copy of the view. */
bool mls_tensor_bytes(const mls_tensor *t, size_t *out)
{
    size_t count;
    return mls_tensor_count(t, &count) &&
           mls_size_mul(count, mls_tensor_item_bytes(t), out);
}

/* Return whether the elements are packed in C order. Compare each stride with the bytes
 * of all inner axes. The strides of axes of length 1 are never used, so they do not
 * count. */
bool mls_tensor_is_contiguous(const mls_tensor *t)
{
    ptrdiff_t expected = (ptrdiff_t)mls_tensor_item_bytes(t);
    bool is_packed = true;
    for (int axis = t->rank - 1; axis >= 0; axis--) {
        if (t->shape[axis] == 0) {
            return true;
        }
        is_packed = is_packed && (t->shape[axis] == 1 || t->strides[axis] == expected);
        expected = (ptrdiff_t)((size_t)expected * t->shape[axis]);
    }
    return is_packed;
}

/* Return the view of some indices of one axis. Move the address and set the length. An
 * empty slice may start at the very end: its address is never read. An empty view may
 * have a null pointer, to which nothing may be added. */
mls_tensor mls_tensor_slice(const mls_tensor *t, int axis, size_t start, size_t length)
{
    mls_tensor part = *t;
    if (part.data != NULL) {
        part.data += (ptrdiff_t)start * t->strides[axis];
    }
    part.shape[axis] = length;
    return part;
}

/* Return whether any axis has length 0. A tensor of rank 0 has one element. */
static bool is_empty(const mls_tensor *t)
{
    for (int axis = 0; axis < t->rank; axis++) {
        if (t->shape[axis] == 0) {
            return true;
        }
    }
    return false;
}

/* Return whether every element has a valid address. Compute the lowest and the highest
 * address of an element: positive strides lead forth from `data`, negative ones back.
 * Returns false if one overflows. */
bool mls_tensor_is_addressable(const mls_tensor *t)
{
    ptrdiff_t forth = 0, back = 0;
    if (is_empty(t)) {
        return true;
    }
    for (int axis = 0; axis < t->rank; axis++) {
        ptrdiff_t *sum = t->strides[axis] < 0 ? &back : &forth;
        ptrdiff_t reach; /* bytes from the first index to the last */
        if (__builtin_mul_overflow(t->strides[axis], t->shape[axis] - 1, &reach) ||
            __builtin_add_overflow(*sum, reach, sum)) {
            return false;
        }
    }
    uintptr_t address; /* of the last or the first element; only its overflow matters */
    return !__builtin_add_overflow((uintptr_t)t->data, forth, &address) &&
           !__builtin_add_overflow((uintptr_t)t->data, back, &address);
}

/* Set `*low` and `*high` to the range of addresses; false: the view is empty. The sums
 * cannot wrap, because all addresses are inside the owner's memory. The strides of an
 * empty view may be any numbers, so they are not read. */
bool mls_tensor_range(const mls_tensor *t, uintptr_t *low, uintptr_t *high)
{
    *low = (uintptr_t)t->data;
    *high = (uintptr_t)t->data + mls_tensor_item_bytes(t);
    if (is_empty(t)) {
        return false;
    }
    for (int axis = 0; axis < t->rank; axis++) {
        const ptrdiff_t reach = (ptrdiff_t)(t->shape[axis] - 1) * t->strides[axis];
        if (reach < 0) {
            *low -= (uintptr_t)(-reach);
        } else {
            *high += (uintptr_t)reach;
        }
    }
    return true;
}

/* Return whether two views of equal shapes have the same elements. Compare addresses and
 * strides, which decide the address of every element if the shapes are equal. */
bool mls_tensor_same_view(const mls_tensor *a, const mls_tensor *b)
{
    bool is_same = a->data == b->data;
    for (int axis = 0; is_same && axis < a->rank; axis++) {
        is_same = a->shape[axis] <= 1 || a->strides[axis] == b->strides[axis];
    }
    return is_same;
}

/* Write a shape as text, such as "(2, 3)". snprintf returns the length before it is cut
 * off, so `used` may exceed `room`; printing then ends. A single dimension has Python's
 * comma: "(3,)". */
char *mls_shape_text(char *text, size_t room, int rank, const size_t *shape)
{
    size_t used = (size_t)snprintf(text, room, "(");
    for (int axis = 0; axis < rank && used < room; axis++) {
        used += (size_t)snprintf(text + used, room - used, axis == 0 ? "%zu" : ", %zu",
                                 shape[axis]);
    }
    if (used < room) {
        snprintf(text + used, room - used, rank == 1 ? ",)" : ")");
    }
    return text;
}
