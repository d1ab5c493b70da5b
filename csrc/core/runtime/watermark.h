/* gate: a number that grows, and threads that wait until it has.
 *
 * One thread makes things in their order and says now and then how many there are; others
 * use them meanwhile, each when the one that it needs has been made.  What was written
 * before mls_watermark_advance(g, n) is seen behind mls_watermark_wait(g, n).
 */
#ifndef MLS_WATERMARK_H
#define MLS_WATERMARK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

typedef struct mls_watermark {
    atomic_size_t open; /* how many there are; never fewer than before */
    pthread_mutex_t lock;
    pthread_cond_t grown;
} mls_watermark;

/* Of none.  End with mls_watermark_fini, when nobody waits any more. */
void mls_watermark_init(mls_watermark *gate);
void mls_watermark_fini(mls_watermark *gate);

/* The first `count` are there; SIZE_MAX: nobody is to wait any more. */
void mls_watermark_advance(mls_watermark *gate, size_t count);

/* Wait until the first `count` are there; returns at once where they are. */
void mls_watermark_wait(mls_watermark *gate, size_t count);

#endif
