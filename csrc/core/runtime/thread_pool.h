/* pool: a few threads that run the same function on many indices.
 *
 * Threads start with the first run that wants more than one, and sleep between runs.
 * Fork: a child finds that the process changed, abandons its parent's threads (which do
 * not exist there) and starts its own when it needs them.
 */
#ifndef MLS_POOL_H
#define MLS_POOL_H

#include "base/status.h"

#include <stddef.h>

typedef struct mls_pool mls_pool;

enum {
    MLS_POOL_MAX_THREADS = 64,
    /* Bytes of the result from which several threads are used for work that is as fast as
     * copying.  Below it there is one, as in the simple way that a call replaces, so no
     * processor can lose by it: starting a thread's part takes tens of microseconds, and
     * a copy of fewer bytes not much longer.  On a virtual Zen 3 with two processors two
     * threads took 0.7 times as long as one for 8 MiB, and as long as one for 4 MiB. */
    MLS_POOL_COPY_BYTES = 8 << 20
};

/* One piece of work: `context` is the caller's, `index` runs from 0 to count - 1. */
typedef void (*mls_task)(void *context, size_t index);

/* Gives: free with mls_pool_free.  `threads` counts the calling one: 1 never starts any.
 * MLS_E_VALUE: 0 or more than MLS_POOL_MAX_THREADS.  MLS_E_MEMORY. */
mls_code mls_pool_new(size_t threads, mls_pool **out, mls_status *st);

/* Stops and joins the threads of this process.  Accepts NULL.  No run may be going on. */
void mls_pool_free(mls_pool *pool);

size_t mls_pool_threads(const mls_pool *pool);

/* Change the number of threads; waits for a run that is going on.  MLS_E_VALUE as above.
 */
mls_code mls_pool_resize(mls_pool *pool, size_t threads, mls_status *st);

/* Run task(context, i) for every i < count, the calling thread taking part, and return
 * when all are done.  Never fails: where no thread can be started, or where another run
 * is going on, the calling thread does it all.  A NULL pool is a pool of one thread. */
void mls_pool_run(mls_pool *pool, mls_task task, void *context, size_t count);

/* The same, but the calling thread does `own(context)` before it takes part; others begin
 * meanwhile, if there are any. */
void mls_pool_run_beside(mls_pool *pool, void (*own)(void *context), mls_task task,
                         void *context, size_t count);

#endif
