/* address_ranges: sorted ranges of addresses, to find memory that several arrays share;
 * overlap.h compares elements.
 *
 * A sweep over sorted ranges needs only the highest end so far: a range overlaps an
 * earlier one exactly if it starts below that end.
 */
#ifndef MLS_ADDRESS_RANGES_H
#define MLS_ADDRESS_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A range of memory that is written or read. */
typedef struct mls_address_range {
    uintptr_t low, high; /* `high` is one past the highest byte */
    size_t owner; /* index of the array that owns the memory, chosen by the caller */
    bool written; /* by the owner; false: only read */
} mls_address_range;

/* Sort the `count` ranges of `ranges` by `low`; the sort is stable. `spare` must have
 * room for `count` ranges. Both arrays are overwritten. Returns the one that holds the
 * result. */
mls_address_range *mls_address_ranges_sort(mls_address_range *ranges,
                                           mls_address_range *spare, size_t count);

/* How two owners share memory. */
typedef enum mls_sharing {
    MLS_APART, /* not at all: they interleave */
    MLS_TIED,  /* they are the same array */
    MLS_MIXED, /* in another way */
} mls_sharing;

/* Find owners of the same memory. `sorted` has `count` ranges, sorted by `low`. Calls
 * compare(data, a, b) for two owners whose ranges overlap, `a` being the one with the
 * lower or earlier range. A tied pair ends the search for `a`: `b`, the same array, is
 * compared with the rest. Sets tied[owner] for the smaller owner of each tied pair.
 * Returns false at the first mixed pair, and stores its owners in pair[0] and
 * pair[1]. */
bool mls_address_ranges_tied(const mls_address_range *sorted, size_t count,
                             mls_sharing (*compare)(const void *data, size_t a, size_t b),
                             const void *data, bool *tied, size_t *pair);

#endif
