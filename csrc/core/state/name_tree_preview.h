/* outline: which part of a large tree of names to show on one page.
 *
 * Rows are spent from the top down: the children of the root first, then those of each
 * node shown, level by level, as long as there are rows.  Of many siblings the first ones
 * and the last are shown, with one row that counts the others.
 */
#ifndef MLS_OUTLINE_H
#define MLS_OUTLINE_H

#include "state/name_tree.h"

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

/* What is known of some arrays together. */
typedef struct mls_outline_sum {
    uint64_t bytes;
    const char *dtype; /* the one that all have, "mixed", or NULL: there are none */
} mls_outline_sum;

/* Sum up what lies at or under each node; `leaves[i]` is that of name number i.  Gives:
 * free `*sums`, one for each node, with mls_free.  MLS_E_MEMORY. */
mls_code mls_outline_sums(const mls_names *names, const mls_outline_sum *leaves,
                          mls_outline_sum **sums, mls_status *st);

/* What a row shows. */
typedef struct mls_outline_entry {
    mls_text label; /* what is left of the path below the row's parent */
    uint32_t name;  /* whose shape is shown, or MLS_NAME_NONE */
    size_t count;   /* names that the row stands for */
    mls_outline_sum sum;
} mls_outline_entry;

/* Of a node with a single name at or under it, the label goes down to that name.  A
 * tensor with others under it, as "a" of "a" and "a.b", shows its shape too. */
mls_outline_entry mls_outline_describe(const mls_names *names,
                                       const mls_outline_sum *sums,
                                       const mls_outline_row *row);

#endif
