/* name_tree: the dotted names of tensors as a tree.
 *
 * "layers.0.attn.weight" is below "layers", "layers.0" and "layers.0.attn". The tree is
 * built once for a list of names. Afterwards any layer is found by its name, and its
 * names are listed in time proportional to the layer, not the model.
 *
 * Names are borrowed and must outlive the tree. Names may contain any bytes; empty
 * segments, as in "a..b" or ".a", are valid.
 */
#ifndef MLS_NAME_TREE_H
#define MLS_NAME_TREE_H

#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MLS_NAME_NONE UINT32_MAX

/* One segment at its position in the tree. Node 0 is the root, whose path is empty. */
typedef struct mls_name_node {
    mls_str path;          /* from the start of the name to the end of this segment */
    mls_str segment;       /* last segment of `path` */
    uint32_t parent;       /* MLS_NAME_NONE for the root */
    uint32_t first_child;  /* in list order; MLS_NAME_NONE: none */
    uint32_t next_sibling; /* MLS_NAME_NONE: none */
    uint32_t name;         /* position of the name that ends here, or MLS_NAME_NONE */
    uint32_t count;        /* names at or below this node */
    uint32_t depth;        /* segments of `path`: 0 for the root */
} mls_name_node;

typedef struct mls_name_tree mls_name_tree;

/* Builds the tree of `count` names. Free with mls_name_tree_free. On failure `*out` is
 * unchanged.
 * - MLS_E_VALUE: a name is repeated (the status's name).
 * - MLS_E_CAPACITY: more than 2**31 nodes.
 * - MLS_E_MEMORY.
 */
mls_code mls_name_tree_new(const mls_str *names, size_t count, mls_name_tree **out,
                           mls_status *st);

void mls_name_tree_free(mls_name_tree *tree); /* accepts NULL */

/* Return all nodes, parents before their children, and their number. */
const mls_name_node *mls_name_tree_nodes(const mls_name_tree *tree);
size_t mls_name_tree_size(const mls_name_tree *tree);

/* Returns the node with this path, or MLS_NAME_NONE; the root has no path. This and the
 * following functions take time proportional to the path and to the nodes below the
 * result, independent of the number of names. */
uint32_t mls_name_tree_find(const mls_name_tree *tree, mls_str path);

/* Writes the positions (in the list of names) of the names below `node` to `out`, in
 * ascending order and without the name that ends at `node`. `out` has room for the node's
 * count. Returns their number. */
size_t mls_name_tree_under(const mls_name_tree *tree, uint32_t node, uint32_t *out);

/* Computes the nodes that are layers, in the order of their first names. With depth 0, a
 * layer is the parent of a name's last segment. With another depth, a layer is a node of
 * that depth with at least one name below it. The root counts as a node. `*out` receives
 * `*count` node numbers; free it with mls_free. MLS_E_MEMORY: both results are
 * unchanged. */
mls_code mls_name_tree_layers(const mls_name_tree *tree, uint32_t depth, uint32_t **out,
                              size_t *count, mls_status *st);

#endif
