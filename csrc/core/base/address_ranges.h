/* address_ranges: sorted ranges of addresses, to find memory that several arrays share.
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
    bool written;
} mls_address_range;

/* Sort by `low`; the sort is stable. `spare` must have room for `count` ranges. Both
 * arrays are overwritten. Returns the one that holds the result. */
mls_address_range *mls_address_ranges_sort(mls_address_range *spans,
                                           mls_address_range *spare, size_t count);

/* Find arrays that own the same memory. Two ranges of `sorted` may overlap only if they
 * are equal and their owners have the same kind, `kinds[owner]`. Sets `tied[owner]` for
 * each owner whose range is repeated by a later owner. Returns false if two ranges
 * overlap in another way, and stores their owners in `pair`. */
bool mls_address_ranges_tied(const mls_address_range *sorted, size_t count,
                             const size_t *kinds, bool *tied, size_t *pair);

#endif
