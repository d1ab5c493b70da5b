/* kv_buffer: a cache that grows and shrinks inside memory reserved for it.
 *
 * The rows of one head lie `capacity` positions apart, so the cache of every length up to
 * there is a strided view of the same memory and changing the length copies nothing. What
 * is beyond the length reads as zeros whenever it comes into view.  Not thread-safe: the
 * caller has a lock.
 */
#ifndef MLS_KV_BUFFER_H
#define MLS_KV_BUFFER_H

#include "array/copy/copy.h"
#include "base/memory.h"
#include "runtime/thread_pool.h"

typedef struct mls_kv_buffer {
    mls_pages pages;
    mls_dtype dtype;
    size_t layers, heads, head_dim;
    size_t length;   /* positions in view */
    size_t capacity; /* positions reserved */
} mls_kv_buffer;

/* Reserve zeroed memory for `capacity` positions.  `shape` has MLS_KV_RANK entries; its
 * sequence length comes into view.  Gives: end with mls_kv_buffer_fini.
 * MLS_E_CAPACITY: capacity below the length.  MLS_E_SIZE, MLS_E_MEMORY. */
mls_code mls_kv_buffer_init(mls_kv_buffer *out, const size_t *shape, size_t capacity,
                            mls_dtype dtype, mls_status *st);

void mls_kv_buffer_fini(mls_kv_buffer *buffer); /* accepts a zeroed struct */

/* The cache as it is now.  Shares the buffer's memory. */
mls_tensor mls_kv_buffer_view(const mls_kv_buffer *buffer);

/* Copy `src`, of the view's shape and of a dtype that converts, into the view.  The pages
 * are asked for in large pieces, which is faster than a fault for each.  Cannot fail. */
void mls_kv_buffer_fill(const mls_kv_buffer *buffer, const mls_kernels *kernels,
                        mls_pool *pool, const mls_tensor *src);

/* Change the length, keeping the first `position` positions and zeroing what was in view
 * beyond them.  Copies nothing; zeroing costs what is dropped.
 * Messages call the position `position_name`.
 * MLS_E_CAPACITY: length beyond the capacity, position beyond either length. */
mls_code mls_kv_buffer_resize(mls_kv_buffer *buffer, const mls_kernels *kernels,
                              size_t length, size_t position, const char *position_name,
                              mls_status *st);

/* Raise the capacity.  The rows move apart inside the one buffer, last row first, so the
 * peak is the new size and not the sum of both (where pages cannot be moved, memory.h, they
 * are copied).  Views of the old memory become invalid.
 * MLS_E_CAPACITY: below the present capacity.  MLS_E_SIZE, MLS_E_MEMORY: unchanged. */
mls_code mls_kv_buffer_reserve(mls_kv_buffer *buffer, size_t capacity, mls_status *st);

#endif
