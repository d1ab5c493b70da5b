/* work_stealing: work queues of consecutive items, shared by threads.
 *
 * Items 0 .. n - 1 are divided into consecutive queues, such as the parts of one file.
 * Each thread takes a queue that no thread has started and works through it in order. If
 * none is left, it takes items from other threads' queues, so that all threads end
 * together.
 */
#ifndef MLS_WORK_STEALING_H
#define MLS_WORK_STEALING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* Initialised by mls_work_queues_init. */
typedef struct mls_work_queues {
    const size_t
        *starts;  /* the first item of each queue, and the end of the last; borrowed */
    size_t count; /* number of queues */
    atomic_size_t *next;     /* the next item of each queue */
    atomic_size_t untouched; /* the first queue that no thread has started */
} mls_work_queues;

/* Initialise `count` queues: queue i has items starts[i] .. starts[i + 1] - 1. `starts`
 * is borrowed and has `count` + 1 entries. The caller ends the queues with
 * mls_work_queues_fini. Returns false if memory runs out. */
bool mls_work_queues_init(mls_work_queues *queues, const size_t *starts, size_t count);

/* Accepts a zeroed struct. */
void mls_work_queues_fini(mls_work_queues *queues);

/* Set `*item` to the next item for a thread; each item is taken once. Returns false if no
 * item is left in any queue. `*queue` is the number of the thread's current queue; the
 * caller sets it to SIZE_MAX before the first call. */
bool mls_work_queues_take(mls_work_queues *queues, size_t *queue, size_t *item);

#endif
