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

#endif
