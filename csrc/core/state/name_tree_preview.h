/* name_tree_preview: chooses the part of a large name tree that fits one page.
 *
 * Rows are assigned from the top down: first the children of the root, then the children
 * of each shown node, level by level, while rows are left. Of many siblings the first
 * ones and the last one are shown, and one row counts the others.
 */
#ifndef MLS_NAME_TREE_PREVIEW_H
#define MLS_NAME_TREE_PREVIEW_H

#include "state/name_tree.h"

typedef struct mls_name_tree_preview_row {
    uint32_t node;   /* the shown node, or the first hidden one if `hidden` is not 0 */
    uint32_t hidden; /* siblings that this row counts; 0: the row shows `node` */
    bool open;       /* rows for the children of `node` follow */
} mls_name_tree_preview_row;

/* Chooses at most `max_rows` rows, in pre-order. The children of one node take at most
 * `max_children` rows (at least 3), including the row that counts. A node stays closed if
 * not all of its children's rows fit, or if it has a single name at or below it. The root
 * has no row. Free `*rows` with mls_free. MLS_E_MEMORY: both results are unchanged. */
mls_code mls_name_tree_preview_new(const mls_name_tree *names, size_t max_rows,
                                   size_t max_children, mls_name_tree_preview_row **rows,
                                   size_t *count, mls_status *st);

/* Total of some arrays. */
typedef struct mls_name_tree_preview_sum {
    uint64_t bytes;
    const char *dtype; /* common dtype, "mixed", or NULL if there are no arrays */
} mls_name_tree_preview_sum;

/* Sums the names at or below each node; `leaves[i]` belongs to name i. Free `*sums` (one
 * for each node) with mls_free. MLS_E_MEMORY. */
mls_code mls_name_tree_preview_sums(const mls_name_tree *names,
                                    const mls_name_tree_preview_sum *leaves,
                                    mls_name_tree_preview_sum **sums, mls_status *st);

/* The contents of a row. */
typedef struct mls_name_tree_preview_entry {
    mls_str label; /* path below the row's parent */
    uint32_t name; /* the name whose shape is shown, or MLS_NAME_NONE */
    size_t count;  /* number of names in the row */
    mls_name_tree_preview_sum sum;
} mls_name_tree_preview_entry;

/* Returns the contents of a row. If a node has a single name at or below it, the label
 * extends to that name. A tensor with other names below it, as "a" with "a.b", shows its
 * shape too. */
mls_name_tree_preview_entry
mls_name_tree_preview_describe(const mls_name_tree *names,
                               const mls_name_tree_preview_sum *sums,
                               const mls_name_tree_preview_row *row);

#endif
