/* tensor: a strided view of somebody else's memory.
 *
 * A view borrows: whoever owns the memory keeps it alive while the view is in use.  It
 * describes any NumPy array or CPU torch tensor: any strides (negative, zero, not a
 * multiple of the item size), either byte order.
 */
#ifndef MLS_TENSOR_H
#define MLS_TENSOR_H

#include "array/dtype.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MLS_MAX_RANK = 64 }; /* NumPy's own limit */

typedef struct mls_tensor {
    unsigned char *data; /* the element at index 0, 0, ... */
    mls_dtype dtype;
    bool swapped; /* items are stored in the byte order that is not this machine's */
    int rank;
    size_t shape[MLS_MAX_RANK];      /* elements along each axis */
    ptrdiff_t strides[MLS_MAX_RANK]; /* bytes from one index to the next */
} mls_tensor;

/* A C-contiguous view of `data`.
 * MLS_E_SHAPE: rank over MLS_MAX_RANK.  MLS_E_SIZE: more bytes than memory has. */
mls_code mls_tensor_init(mls_tensor *out, void *data, mls_dtype dtype, int rank,
                         const size_t *shape, mls_status *st);

size_t mls_tensor_item_bytes(const mls_tensor *t);

/* Number of elements, and their bytes when packed; false where they overflow. */
bool mls_tensor_count(const mls_tensor *t, size_t *out);
bool mls_tensor_bytes(const mls_tensor *t, size_t *out);

/* Whether the elements lie packed in C order (true for an empty view). */
bool mls_tensor_is_contiguous(const mls_tensor *t);

/* The part of `t` from `start`, `length` long, along `axis`.  The caller has checked
 * that it lies inside. */
mls_tensor mls_tensor_slice(const mls_tensor *t, int axis, size_t start, size_t length);

/* The addresses from the lowest byte of a view up to one past its highest; false for an
 * empty view, which has none. */
bool mls_tensor_range(const mls_tensor *t, uintptr_t *low, uintptr_t *high);

/* Whether the address ranges of two views meet.  Two views that interleave without
 * sharing an element count as overlapping. */
bool mls_tensor_overlap(const mls_tensor *a, const mls_tensor *b);

/* Write a shape as "(2, 3)" into `text`, cut to `room` bytes.  Returns `text`. */
char *mls_shape_text(char *text, size_t room, int rank, const size_t *shape);

#endif
