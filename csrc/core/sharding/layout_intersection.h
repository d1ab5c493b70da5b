/* layout_intersection: the parts of a layout that intersect a given part.
 *
 * They are computed, not searched: for a tensor divided among thousands of ranks, a
 * rank's cost is proportional to the number of parts that it needs.
 */
#ifndef MLS_LAYOUT_INTERSECTION_H
#define MLS_LAYOUT_INTERSECTION_H

#include "sharding/layout.h"

#include <stdbool.h>
#include <stddef.h>

/* Iterates over the numbers of those parts, in ascending order. Owns no memory. */
typedef struct mls_layout_intersection {
    const mls_layout *layout; /* borrowed, like `to` */
    const mls_part *to;
    mls_part bounds; /* bounding box of `to` */
    int depth;       /* number of steps whose part is chosen; -1 at the end */
    mls_part box[MLS_LAYOUT_STEPS +
                 1]; /* the box before each step; the last one is the part */
    size_t from[MLS_LAYOUT_STEPS]; /* number of the next part to visit ... */
    size_t end[MLS_LAYOUT_STEPS];  /* ... and the end, in each step */
} mls_layout_intersection;

/* Start the iteration. `to` is a part of a tensor with `rank` axes of the lengths
 * `shape`, and `layout` is valid for that shape (mls_layout_part has accepted both).
 * Cannot fail. */
void mls_layout_intersection_init(mls_layout_intersection *iter, const mls_layout *layout,
                                  int rank, const size_t *shape, const mls_part *to);

/* Set `*part` to the number of the next part that shares an element with `to`; returns
 * false after the last. */
bool mls_layout_intersection_next(mls_layout_intersection *iter, size_t *part);

#endif
