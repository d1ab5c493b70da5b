/* thread_pool: a pool of threads and its greatest size; the bytes above which copies use
 * it.
 *
 * Threads start with the first run that needs more than one, and sleep between runs.
 * After fork, the child detects the new process id, abandons its parent's threads (which
 * do not exist in the child) and starts its own when it needs them.
 */
#ifndef MLS_THREAD_POOL_H
#define MLS_THREAD_POOL_H

#include "base/status.h"

#include <stddef.h>

typedef struct mls_pool mls_pool;

enum {
    MLS_POOL_MAX_THREADS = 64,
    /* Copy-bound work uses several threads if its result has at least so many bytes.
     * Smaller work uses one thread, because waking a thread takes tens of microseconds
     * and a smaller copy hardly longer. On a virtual Zen 3 with two processors, two
     * threads took 0.7 times as long as one for 8 MiB, and the same time for 4 MiB. */
    MLS_POOL_COPY_BYTES = 8 << 20
};

/* One unit of work. `context` is the caller's; `index` is 0 to count - 1. */
typedef void (*mls_task)(void *context, size_t index);

/* Return the default number of threads: the number of processors that this process may
 * run on, but at most 4. */
size_t mls_pool_default_threads(void);

/* Create a pool. The caller frees it with mls_pool_free. `threads` includes the calling
 * thread: 1 never starts another. MLS_E_VALUE: 0 or more than MLS_POOL_MAX_THREADS.
 * MLS_E_MEMORY: an allocation failed. */
mls_code mls_pool_new(size_t threads, mls_pool **out, mls_status *st);

/* Stop and join the threads of this process. Accepts NULL. No run may be in progress. */
void mls_pool_free(mls_pool *pool);

/* Return the number of threads, including the calling one; none need be started yet. */
size_t mls_pool_threads(const mls_pool *pool);

/* Change the number of threads, including the calling one; waits for a run in progress.
 * MLS_E_VALUE: 0 or more than MLS_POOL_MAX_THREADS; nothing changes then. */
mls_code mls_pool_resize(mls_pool *pool, size_t threads, mls_status *st);

/* Run task(context, i) for every i < count and return when all are done. The calling
 * thread takes part. Never fails: if no thread can be started, or another run is in
 * progress, the calling thread does all the work. A NULL pool is a pool of one thread. */
void mls_pool_run(mls_pool *pool, mls_task task, void *context, size_t count);

/* mls_pool_run, but the calling thread first calls `caller_task(context)`, while other
 * threads, if any, already run tasks. */
void mls_pool_run_helped(mls_pool *pool, void (*caller_task)(void *context),
                         mls_task task, void *context, size_t count);

#endif
