/* outline: which part of a large tree of names to show on one page.
 *
 * Rows are spent from the top down: the children of the root first, then those of each
 * node shown, level by level, as long as there are rows.  Of many siblings the first ones
 * and the last are shown, with one row that counts the others.
 */
#ifndef MLS_NAME_TREE_PREVIEW_H
#define MLS_NAME_TREE_PREVIEW_H

#include "state/name_tree.h"

typedef struct mls_name_tree_preview_row {
    uint32_t
        node; /* the node shown or, where `hidden` is not 0, the first one left out */
    uint32_t hidden; /* siblings that this row stands for; 0: the row is `node` itself */
    bool open;       /* rows for what lies under `node` follow */
} mls_name_tree_preview_row;

/* Choose at most `max_rows` rows, in pre-order, and of the children of one node at most
 * `max_children` (at least 3) with the row that counts.  A node whose children do not all
 * get their rows stays closed, and so does one with a single name at or under it.  The
 * root has no row.
 * Gives: free `*rows` with mls_free.  MLS_E_MEMORY: both results are untouched. */
mls_code mls_name_tree_preview_new(const mls_name_tree *names, size_t max_rows,
                                   size_t max_children, mls_name_tree_preview_row **rows,
                                   size_t *count, mls_status *st);

/* What is known of some arrays together. */
typedef struct mls_name_tree_preview_sum {
    uint64_t bytes;
    const char *dtype; /* the one that all have, "mixed", or NULL: there are none */
} mls_name_tree_preview_sum;

/* Sum up what lies at or under each node; `leaves[i]` is that of name number i.  Gives:
 * free `*sums`, one for each node, with mls_free.  MLS_E_MEMORY. */
mls_code mls_name_tree_preview_sums(const mls_name_tree *names,
                                    const mls_name_tree_preview_sum *leaves,
                                    mls_name_tree_preview_sum **sums, mls_status *st);

/* What a row shows. */
typedef struct mls_name_tree_preview_entry {
    mls_str label; /* what is left of the path below the row's parent */
    uint32_t name; /* whose shape is shown, or MLS_NAME_NONE */
    size_t count;  /* names that the row stands for */
    mls_name_tree_preview_sum sum;
} mls_name_tree_preview_entry;

/* Of a node with a single name at or under it, the label goes down to that name.  A
 * tensor with others under it, as "a" of "a" and "a.b", shows its shape too. */
mls_name_tree_preview_entry
mls_name_tree_preview_describe(const mls_name_tree *names,
                               const mls_name_tree_preview_sum *sums,
                               const mls_name_tree_preview_row *row);

#endif
