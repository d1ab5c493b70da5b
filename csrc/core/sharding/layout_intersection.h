/* meeting: which parts of a layout have something of a given part.
 *
 * Found by arithmetic, not by looking at every part: a tensor that was cut for thousands
 * of ranks costs a rank as many steps as there are parts that it needs.
 */
#ifndef MLS_MEETING_H
#define MLS_MEETING_H

#include "sharding/layout.h"

#include <stdbool.h>
#include <stddef.h>

/* The numbers of those parts, in rising order.  Plain storage: nothing to free. */
typedef struct mls_meeting {
    const mls_layout *layout; /* borrowed, like `to` */
    const mls_part *to;
    mls_part near;                      /* the smallest box that has all of `to` */
    int depth;                          /* steps that are decided; -1: no more parts */
    mls_part box[MLS_LAYOUT_STEPS + 1]; /* what each step cuts; the last is the part */
    size_t from[MLS_LAYOUT_STEPS];      /* positions that are still to be looked at ... */
    size_t end[MLS_LAYOUT_STEPS];       /* ... in each step */
} mls_meeting;

/* Start.  `to` is a part of a tensor of `shape`, and `layout` one that fits it
 * (mls_layout_part has accepted both).  Cannot fail. */
void mls_meeting_init(mls_meeting *meeting, const mls_layout *layout, int rank,
                      const size_t *shape, const mls_part *to);

/* The next part that has an element of `to`; false after the last. */
bool mls_meeting_next(mls_meeting *meeting, size_t *part);

#endif
