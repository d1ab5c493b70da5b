/* kv_buffer: a key-value cache that changes its length in reserved memory without a copy.
 *
 * The rows of the cache (kv_transition.h) are `capacity` positions apart, so the cache of
 * any length up to the capacity is a strided view of the same memory, and changing the
 * length copies nothing. Positions beyond the length read as zeros when the length grows.
 * Not thread-safe: the caller uses a lock.
 */
#ifndef MLS_KV_BUFFER_H
#define MLS_KV_BUFFER_H

#include "array/copy/copy.h"
#include "base/memory.h"
#include "kv/kv_transition.h"
#include "runtime/thread_pool.h"

typedef struct mls_kv_buffer {
    mls_pages pages;
    mls_dtype dtype;
    int rank, axis;                /* number of axes; the sequence */
    size_t shape[MLS_KV_MAX_RANK]; /* of the view */
    size_t capacity;               /* positions reserved */
} mls_kv_buffer;

/* Reserve zeroed memory for `capacity` positions. `shape` is the initial shape, and
 * `axis` is the sequence; both passed mls_kv_find_axis. The caller ends the buffer with
 * mls_kv_buffer_fini.
 * MLS_E_CAPACITY: `capacity` is below the initial length. MLS_E_SIZE: the bytes exceed
 * the address space. MLS_E_MEMORY. `*out` is untouched on failure. */
mls_code mls_kv_buffer_init(mls_kv_buffer *out, int rank, const size_t *shape, int axis,
                            size_t capacity, mls_dtype dtype, mls_status *st);

void mls_kv_buffer_fini(mls_kv_buffer *buffer); /* accepts a zeroed struct */

/* Return the number of positions in the view. */
static inline size_t mls_kv_buffer_length(const mls_kv_buffer *buffer)
{
    return buffer->shape[buffer->axis];
}

/* Return a tensor of the positions below the current length. It borrows the buffer's
 * memory, and is valid until mls_kv_buffer_reserve or mls_kv_buffer_fini. */
mls_tensor mls_kv_buffer_view(const mls_kv_buffer *buffer);

/* Copy `src` into the view of all positions below the length. `src` must have the view's
 * shape and a dtype that converts to the buffer's. `pool` may be NULL: one thread copies
 * then. Pages are requested in large ranges, which is faster than one fault for each.
 * Cannot fail. */
void mls_kv_buffer_fill(const mls_kv_buffer *buffer, const mls_kernels *kernels,
                        mls_pool *pool, const mls_tensor *src);

/* Change the length to `length` positions, keep the first `position` of them, and zero
 * the other positions of the old view. Copies nothing: the cost is the zeroing.
 * `position_name` names `position` in messages.
 * MLS_E_CAPACITY: `length` exceeds the capacity, or `position` exceeds the old or the new
 * length; the buffer is unchanged then. */
mls_code mls_kv_buffer_resize(mls_kv_buffer *buffer, const mls_kernels *kernels,
                              size_t length, size_t position, const char *position_name,
                              mls_status *st);

/* Raise the capacity to `capacity` positions. The rows move apart inside the one buffer,
 * last row first, so the peak is the new size, not the sum of both. (The pages are copied
 * if the system cannot move them, see memory.h.) Views of the old memory become invalid.
 * MLS_E_CAPACITY: `capacity` is below the current one. MLS_E_SIZE: the bytes exceed the
 * address space. MLS_E_MEMORY. The buffer is unchanged on failure. */
mls_code mls_kv_buffer_reserve(mls_kv_buffer *buffer, size_t capacity, mls_status *st);

#endif
