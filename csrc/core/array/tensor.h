/* tensor: a strided view of borrowed memory.
 *
 * The owner must keep the memory alive while the view is in use. A view can describe any
 * NumPy array or CPU torch tensor: any strides (negative, zero, not a multiple of the
 * item size) and either byte order.
 */
#ifndef MLS_TENSOR_H
#define MLS_TENSOR_H

#include "array/dtype.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MLS_MAX_RANK = 64 }; /* the same limit as NumPy */

typedef struct mls_tensor {
    unsigned char *data; /* the element at index 0, 0, ... */
    mls_dtype dtype;
    bool swapped; /* items are stored in the opposite of this machine's byte order */
    int rank;
    size_t shape[MLS_MAX_RANK];      /* elements along each axis */
    ptrdiff_t strides[MLS_MAX_RANK]; /* bytes between neighbouring indices */
} mls_tensor;

/* Set `*out` to a C-contiguous view of `data`, which may be NULL, with `rank` axes of the
 * lengths `shape`, in this machine's byte order.
 * MLS_E_SHAPE: rank over MLS_MAX_RANK. MLS_E_SIZE: the shape exceeds the address
 * space. */
mls_code mls_tensor_init(mls_tensor *out, void *data, mls_dtype dtype, int rank,
                         const size_t *shape, mls_status *st);

/* Return the bytes of one element of the dtype, as it is stored in an array. */
size_t mls_tensor_item_bytes(const mls_tensor *t);

/* Set `*out` to the number of elements (mls_tensor_count), or to their bytes when packed
 * (mls_tensor_bytes). Return false on overflow. */
bool mls_tensor_count(const mls_tensor *t, size_t *out);
bool mls_tensor_bytes(const mls_tensor *t, size_t *out);

/* Return whether the elements are packed in C order (true for an empty view). */
bool mls_tensor_is_contiguous(const mls_tensor *t);

/* Return a view of the indices start .. start + length - 1 of `axis`, with all of the
 * other axes. The caller has checked that these indices exist. */
mls_tensor mls_tensor_slice(const mls_tensor *t, int axis, size_t start, size_t length);

/* Return whether the address of every element is a valid number, which is true for arrays
 * in memory, but not for any shape and strides. */
bool mls_tensor_is_addressable(const mls_tensor *t);

/* Set `*low` to the lowest address of the view's bytes and `*high` to one past the
 * highest. Returns false for an empty view. */
bool mls_tensor_range(const mls_tensor *t, uintptr_t *low, uintptr_t *high);

/* Return whether two views of equal shapes have the same elements at the same addresses.
 * The stride of an axis of length 1 does not matter; dtypes are not compared. */
bool mls_tensor_same_view(const mls_tensor *a, const mls_tensor *b);

/* Return whether two shapes have the same rank and dimensions. */
static inline bool mls_shape_equal(int rank, const size_t *shape, int other_rank,
                                   const size_t *other)
{
    bool is_same = rank == other_rank;
    for (int axis = 0; is_same && axis < rank; axis++) {
        is_same = shape[axis] == other[axis];
    }
    return is_same;
}

/* Write `rank` lengths as "(2, 3)" into `text`, cut off to `room` bytes with the NUL.
 * Returns `text`. */
char *mls_shape_text(char *text, size_t room, int rank, const size_t *shape);

#endif
