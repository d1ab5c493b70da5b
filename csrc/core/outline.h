/* outline: which part of a large tree of names to show on one page.
 *
 * Rows are spent from the top down: the children of the root first, then those of each
 * node shown, level by level, as long as there are rows.  Of many siblings the first ones
 * and the last are shown, with one row that counts the others.
 */
#ifndef MLS_OUTLINE_H
#define MLS_OUTLINE_H

#include "names.h"

typedef struct mls_outline_row {
    uint32_t
        node; /* the node shown or, where `hidden` is not 0, the first one left out */
    uint32_t hidden; /* siblings that this row stands for; 0: the row is `node` itself */
    bool open;       /* rows for what lies under `node` follow */
} mls_outline_row;

/* Choose at most `max_rows` rows, in pre-order, and of the children of one node at most
 * `max_children` (at least 3) with the row that counts.  A node whose children do not all
 * get their rows stays closed, and so does one with a single name at or under it.  The
 * root has no row.
 * Gives: free `*rows` with mls_free.  MLS_E_MEMORY: both results are untouched. */
mls_code mls_outline_new(const mls_names *names, size_t max_rows, size_t max_children,
                         mls_outline_row **rows, size_t *count, mls_status *st);

#endif
