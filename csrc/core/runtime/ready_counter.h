/* ready_counter: a monotonic counter that threads can wait for.
 *
 * One thread produces items in order and publishes their number now and then. Other
 * threads wait until the item that they need has been produced. Writes before
 * mls_ready_counter_advance(counter, n) are visible after mls_ready_counter_wait(counter,
 * n).
 */
#ifndef MLS_READY_COUNTER_H
#define MLS_READY_COUNTER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

typedef struct mls_ready_counter {
    atomic_size_t produced; /* items produced so far; never decreases */
    pthread_mutex_t lock;
    pthread_cond_t grown; /* signals that `produced` has grown */
} mls_ready_counter;

/* Initialise to 0. The caller ends it with mls_ready_counter_fini, when no thread waits
 * any more. */
void mls_ready_counter_init(mls_ready_counter *counter);
void mls_ready_counter_fini(mls_ready_counter *counter);

/* Publish that the first `count` items exist. SIZE_MAX releases all waiters for good. */
void mls_ready_counter_advance(mls_ready_counter *counter, size_t count);

/* Wait until the first `count` items exist. Returns at once if they do. */
void mls_ready_counter_wait(mls_ready_counter *counter, size_t count);

#endif
