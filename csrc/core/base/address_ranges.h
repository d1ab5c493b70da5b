/* span: ranges of addresses, sorted, to find out which memory is shared.
 *
 * Whoever sweeps sorted spans needs to remember little: a span meets one before it
 * exactly where it starts below the highest end so far.
 */
#ifndef MLS_SPAN_H
#define MLS_SPAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Memory that is written or read. */
typedef struct mls_span {
    uintptr_t low, high; /* `high` is one past the highest byte */
    size_t owner;        /* whose it is, a number of the caller's */
    bool written;
} mls_span;

/* Sort by `low`; spans that start together stay in their order.  `spare` has as much room
 * as `spans`; both are overwritten, and the one that holds the result is returned. */
mls_span *mls_spans_sort(mls_span *spans, mls_span *spare, size_t count);

/* Find the owners of the same memory.  `sorted` spans overlap only if they are equal and
 * their owners are of one kind, `kinds[owner]`.  Sets `tied[owner]` for each owner whose
 * memory a later owner has too.  False: two spans overlap in another way; `pair` gets
 * both owners. */
bool mls_spans_tied(const mls_span *sorted, size_t count, const size_t *kinds, bool *tied,
                    size_t *pair);

#endif
