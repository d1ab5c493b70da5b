/* stretches: a counter for each, and one for those that nobody has taken.
 *
 * A counter may be driven past its stretch's end by threads that come too late: by no
 * more than there are threads, since each looks before it counts.
 */
#include "runtime/work_stealing.h"

#include "base/memory.h"

#include <stdint.h>

/* The counters are not shared yet. */
bool mls_stretches_init(mls_stretches *all, const size_t *starts, size_t count)
{
    *all = (mls_stretches){.starts = starts, .count = count};
    all->next = mls_alloc(count, sizeof *all->next);
    if (all->next == NULL) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        atomic_init(&all->next[i], starts[i]);
    }
    atomic_init(&all->untouched, 0);
    return true;
}

/* The starts are the caller's. */
void mls_stretches_fini(mls_stretches *all)
{
    mls_free(all->next);
}

/* The next item of one stretch, if any is left.  Items say nothing about memory: what
 * they stand for was there before the threads began. */
static bool take_from(mls_stretches *all, size_t which, size_t *item)
{
    const size_t end = all->starts[which + 1];
    if (atomic_load_explicit(&all->next[which], memory_order_relaxed) >= end) {
        return false;
    }
    *item = atomic_fetch_add_explicit(&all->next[which], 1, memory_order_relaxed);
    return *item < end;
}

/* Untouched ones first.  Helpers begin behind the stretch that they were at and stay with
 * the one that they find, so that they seldom look through all of them. */
bool mls_stretches_take(mls_stretches *all, size_t *mine, size_t *item)
{
    if (*mine < all->count && take_from(all, *mine, item)) {
        return true;
    }
    while (atomic_load_explicit(&all->untouched, memory_order_relaxed) < all->count) {
        *mine = atomic_fetch_add_explicit(&all->untouched, 1, memory_order_relaxed);
        if (*mine < all->count && take_from(all, *mine, item)) {
            return true;
        }
    }
    for (size_t i = 0, at = *mine; i < all->count; i++) {
        at = at + 1 < all->count ? at + 1 : 0;
        if (take_from(all, at, item)) {
            *mine = at;
            return true;
        }
    }
    return false;
}
