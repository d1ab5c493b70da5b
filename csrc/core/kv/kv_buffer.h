/* kv_buffer: a key-value cache that grows and shrinks within reserved memory.
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
 * mls_kv_buffer_fini. MLS_E_CAPACITY: capacity below the length. MLS_E_SIZE,
 * MLS_E_MEMORY. */
mls_code mls_kv_buffer_init(mls_kv_buffer *out, int rank, const size_t *shape, int axis,
                            size_t capacity, mls_dtype dtype, mls_status *st);

void mls_kv_buffer_fini(mls_kv_buffer *buffer); /* accepts a zeroed struct */

/* Return the number of positions in the view. */
static inline size_t mls_kv_buffer_length(const mls_kv_buffer *buffer)
{
    return buffer->shape[buffer->axis];
}

/* Return the cache at its current length. The view borrows the buffer's memory. */
mls_tensor mls_kv_buffer_view(const mls_kv_buffer *buffer);

/* Copy `src` into the view. It must have the view's shape and a dtype that converts.
 * Pages are requested in large ranges, which is faster than one fault for each. Cannot
 * fail. */
void mls_kv_buffer_fill(const mls_kv_buffer *buffer, const mls_kernels *kernels,
                        mls_pool *pool, const mls_tensor *src);

/* Change the length, keep the first `position` positions and zero the others in the old
 * view. Copies nothing; the cost is the zeroing. Messages call the position
 * `position_name`. MLS_E_CAPACITY: the length exceeds the capacity, or the position
 * exceeds either length. */
mls_code mls_kv_buffer_resize(mls_kv_buffer *buffer, const mls_kernels *kernels,
                              size_t length, size_t position, const char *position_name,
                              mls_status *st);

/* Raise the capacity. The rows move apart inside the one buffer, last row first, so the
 * peak is the new size, not the sum of both. (The pages are copied if the system cannot
 * move them, see memory.h.) Views of the old memory become invalid.
 * MLS_E_CAPACITY: below the current capacity. MLS_E_SIZE, MLS_E_MEMORY. The buffer is
 * unchanged on failure. */
mls_code mls_kv_buffer_reserve(mls_kv_buffer *buffer, size_t capacity, mls_status *st);

#endif
