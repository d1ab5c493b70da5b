/* work_stealing: the next item for a thread: of its queue, or of another thread's.
 *
 * There is one counter for each queue, and one for the queues not yet started.
 *
 * Late threads may increment a counter past the end of its queue, but by at most the
 * number of threads, since each thread checks before it increments.
 */
#include "runtime/work_stealing.h"

#include "base/memory.h"

#include <stdint.h>

/* Initialise the queues that `starts` divides the items into. Plain initialisation of the
 * counters: they are not shared yet. */
bool mls_work_queues_init(mls_work_queues *queues, const size_t *starts, size_t count)
{
    *queues = (mls_work_queues){.starts = starts, .count = count};
    queues->next = mls_alloc(count, sizeof *queues->next);
    if (queues->next == NULL) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        atomic_init(&queues->next[i], starts[i]);
    }
    atomic_init(&queues->untouched, 0);
    return true;
}

/* `starts` belongs to the caller. */
void mls_work_queues_fini(mls_work_queues *queues)
{
    mls_free(queues->next);
}

/* Set `*item` to the next item of queue number `queue`; false: none is left in it.
 * Relaxed order is enough: the data behind the items was written before the threads
 * started. */
static bool take_queue_item(mls_work_queues *queues, size_t queue, size_t *item)
{
    const size_t end = queues->starts[queue + 1];
    if (atomic_load_explicit(&queues->next[queue], memory_order_relaxed) >= end) {
        return false;
    }
    *item = atomic_fetch_add_explicit(&queues->next[queue], 1, memory_order_relaxed);
    return *item < end;
}

/* Set `*item` to the next item for a thread; false: none is left. Look into the thread's
 * own queue, then queues that no thread has started, then all others. The last search
 * begins after the current queue. The thread continues with the queue that it found an
 * item in, so it seldom searches all queues. */
bool mls_work_queues_take(mls_work_queues *queues, size_t *queue, size_t *item)
{
    if (*queue < queues->count && take_queue_item(queues, *queue, item)) {
        return true;
    }
    while (atomic_load_explicit(&queues->untouched, memory_order_relaxed) <
           queues->count) {
        *queue = atomic_fetch_add_explicit(&queues->untouched, 1, memory_order_relaxed);
        if (*queue < queues->count && take_queue_item(queues, *queue, item)) {
            return true;
        }
    }
    for (size_t i = 0, at = *queue; i < queues->count; i++) {
        at = at + 1 < queues->count ? at + 1 : 0;
        if (take_queue_item(queues, at, item)) {
            *queue = at;
            return true;
        }
    }
    return false;
}
