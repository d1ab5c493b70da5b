/* watermark: a monotonic counter that threads can wait for.
 *
 * One thread produces items in order and publishes their number now and then. Other
 * threads wait until the item that they need has been produced. Writes before
 * mls_watermark_advance(g, n) are visible after mls_watermark_wait(g, n).
 */
#ifndef MLS_WATERMARK_H
#define MLS_WATERMARK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

typedef struct mls_watermark {
    atomic_size_t open; /* items produced so far; never decreases */
    pthread_mutex_t lock;
    pthread_cond_t grown;
} mls_watermark;

/* Initialise to 0. The caller ends it with mls_watermark_fini, when no thread waits any
 * more. */
void mls_watermark_init(mls_watermark *gate);
void mls_watermark_fini(mls_watermark *gate);

/* Publish that the first `count` items exist. SIZE_MAX releases all waiters for good. */
void mls_watermark_advance(mls_watermark *gate, size_t count);

/* Wait until the first `count` items exist. Returns at once if they do. */
void mls_watermark_wait(mls_watermark *gate, size_t count);

#endif
