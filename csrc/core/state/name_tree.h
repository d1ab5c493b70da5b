/* names: the dotted names of tensors as a tree.
 *
 * "layers.0.attn.weight" lies under "layers", "layers.0" and "layers.0.attn".  The tree
 * is made once for a list of names; afterwards every layer is found by its own name, and
 * what lies under it is listed in time that grows with the layer and not with the model.
 *
 * Names are borrowed and must outlive the tree.  Any bytes are a name: empty segments, as
 * in "a..b" or ".a", are segments like any other.
 */
#ifndef MLS_NAMES_H
#define MLS_NAMES_H

#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MLS_NAME_NONE UINT32_MAX

/* One segment at its place.  Node 0 is the root, whose path is empty. */
typedef struct mls_name_node {
    mls_text path;         /* from the start of the name to the end of this segment */
    mls_text segment;      /* the last part of `path` */
    uint32_t parent;       /* MLS_NAME_NONE for the root */
    uint32_t first_child;  /* in the order of the list; MLS_NAME_NONE: none */
    uint32_t next_sibling; /* MLS_NAME_NONE: none */
    uint32_t name;         /* position of the name that ends here, or MLS_NAME_NONE */
    uint32_t count;        /* names at or under this node */
    uint32_t depth;        /* segments of `path`: 0 for the root */
} mls_name_node;

typedef struct mls_names mls_names;

/* Make the tree of `count` names.  Gives: free with mls_names_free.
 * MLS_E_VALUE: a name occurs twice (it is the status's name).  MLS_E_CAPACITY: more than
 * 2**31 nodes.  MLS_E_MEMORY.  `*out` is untouched on failure. */
mls_code mls_names_new(const mls_text *names, size_t count, mls_names **out,
                       mls_status *st);

void mls_names_free(mls_names *names); /* accepts NULL */

/* All nodes, parents before their children; their number. */
const mls_name_node *mls_names_nodes(const mls_names *names);
size_t mls_names_size(const mls_names *names);

/* The node whose path is `path`, or MLS_NAME_NONE; the root for an empty one.  This and
 * all that follows take as long as the path and what lies under the node are, however
 * many names there are. */
uint32_t mls_names_find(const mls_names *names, mls_text path);

/* Position in the list of a whole name, or MLS_NAME_NONE. */
uint32_t mls_names_position(const mls_names *names, mls_text name);

/* Positions, rising, of the names that lie under `node` (the one that ends at it left
 * out), into `out`, which has room for the node's count.  Returns how many. */
size_t mls_names_under(const mls_names *names, uint32_t node, uint32_t *out);

/* The nodes that are layers: with a depth of 0, those right under which a name ends; else
 * those of that depth with any name under them.  In the order of the first such name of
 * each.  The root counts like any other node.  Gives: free `*out` with mls_free.
 * MLS_E_MEMORY: both results are untouched. */
mls_code mls_names_layers(const mls_names *names, uint32_t depth, uint32_t **out,
                          size_t *count, mls_status *st);

/* The node after `node` in pre-order within the tree under `top`, or MLS_NAME_NONE.  With
 * `skip`, what lies under `node` is passed over. */
uint32_t mls_names_next(const mls_names *names, uint32_t top, uint32_t node, bool skip);

#endif
