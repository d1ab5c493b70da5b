/* name_tree: finds the layers in dotted names, and the names below a layer; refuses
 * duplicate names.
 *
 * All nodes are in one array. A hash table with open addressing finds the child of a node
 * by its segment, so a lookup does not depend on the number of children. The first child
 * of a node is linked from its parent and is not in the table. So each name adds at most
 * one entry, at the segment in which it differs from the names before it, and the table
 * never grows. Names of one layer are usually adjacent, so insertion of a name begins at
 * the node that it shares with the previous name; most of a name is then compared, not
 * looked up.
 *
 * No function recurses: names may have thousands of segments.
 *
 * A finished tree is read-only, so any number of threads may use it.
 */
#include "state/name_tree.h"

#include "base/memory.h"

#include <string.h>

/* Keeps node numbers below MLS_NAME_NONE, and twice their number within a slot's hash. */
#define MAX_NODES ((size_t)1 << 31)

/* An entry of the table. The root is not a child, so node 0 means empty. */
typedef struct name_slot {
    uint32_t hash;
    uint32_t node;
} name_slot;

/* During construction nodes are identified by number, not by pointer: the array moves
 * when it grows. */
struct mls_name_tree {
    mls_name_node *nodes;
    size_t size, room;
    name_slot *slots;  /* all children except first children */
    size_t slot_count; /* a power of two */
};

/* ---- the table ---- */

/* Return the hash of the child of node `parent` with this segment. */
static uint32_t hash_segment(uint32_t parent, mls_str segment)
{
    return (uint32_t)mls_str_hash(parent, segment);
}

/* Return the slot of the child of `parent` with this segment, or the empty slot for it.
 * `hash` is from hash_segment. The table is at most half full, so an empty slot
 * exists. */
static name_slot *find_slot(const mls_name_tree *tree, uint32_t hash, uint32_t parent,
                            mls_str segment)
{
    const size_t mask = tree->slot_count - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
        name_slot *slot = &tree->slots[at];
        if (slot->node == 0) {
            return slot;
        }
        /* compare nodes only if the hashes are equal */
        if (slot->hash == hash) {
            const mls_name_node *node = &tree->nodes[slot->node];
            if (node->parent == parent && mls_str_equal(node->segment, segment)) {
                return slot;
            }
        }
    }
}

/* Return the child of `parent` with this segment, or 0 if there is none: the root is
 * never a child. */
static uint32_t find_child(const mls_name_tree *tree, uint32_t parent, mls_str segment)
{
    /* the first child and an only child need no table lookup */
    const uint32_t first = tree->nodes[parent].first_child;
    if (first == MLS_NAME_NONE) {
        return 0;
    }
    if (mls_str_equal(tree->nodes[first].segment, segment)) {
        return first;
    }
    if (tree->nodes[first].next_sibling == MLS_NAME_NONE) {
        return 0;
    }
    return find_slot(tree, hash_segment(parent, segment), parent, segment)->node;
}

/* Return whether `name` ends at `node`, which is on its path. The root is never an end:
 * the empty name has one empty segment below it. */
static bool ends_at(const mls_name_tree *tree, uint32_t node, mls_str name)
{
    return node != 0 && tree->nodes[node].path.length == name.length;
}

/* Return the segment of `name` that follows `node`, which is on its path and not its
 * end. */
static mls_str segment_after(const mls_name_tree *tree, uint32_t node, mls_str name)
{
    const size_t start = node == 0 ? 0 : tree->nodes[node].path.length + 1;
    const char *from = name.data + start;
    const char *dot = memchr(from, '.', name.length - start);
    return (mls_str){from, dot == NULL ? name.length - start : (size_t)(dot - from)};
}

/* ---- construction ---- */

/* Report MLS_E_MEMORY. */
static mls_code no_memory(mls_status *st)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory for the tree of names");
}

/* Report MLS_E_CAPACITY. */
static mls_code too_many_segments(mls_status *st)
{
    return mls_fail(st, MLS_E_CAPACITY, "the names have more than %zu segments",
                    MAX_NODES);
}

/* Ensure room for one more node, by doubling. MLS_E_CAPACITY, MLS_E_MEMORY: the nodes are
 * unchanged. */
static mls_code reserve_node(mls_name_tree *tree, mls_status *st)
{
    if (tree->size == MAX_NODES) {
        return too_many_segments(st);
    }
    mls_name_node *nodes = mls_grow(tree->nodes, tree->size, &tree->room, sizeof *nodes);
    if (nodes == NULL) {
        return no_memory(st);
    }
    tree->nodes = nodes;
    return MLS_OK;
}

/* Append a child with this path and last segment to `parent` and return its number; room
 * is reserved. The first child has no slot in the table: find_child compares it directly.
 * During construction a node's `count` holds its last child, so appending takes constant
 * time. */
static uint32_t append_node(mls_name_tree *tree, uint32_t parent, mls_str path,
                            mls_str segment)
{
    const uint32_t added = (uint32_t)tree->size++;
    mls_name_node *above = &tree->nodes[parent];
    tree->nodes[added] = (mls_name_node){.path = path,
                                         .segment = segment,
                                         .parent = parent,
                                         .first_child = MLS_NAME_NONE,
                                         .next_sibling = MLS_NAME_NONE,
                                         .name = MLS_NAME_NONE,
                                         .depth = above->depth + 1};
    if (above->first_child == MLS_NAME_NONE) {
        above->first_child = added;
    } else {
        const uint32_t hash = hash_segment(parent, segment);
        *find_slot(tree, hash, parent, segment) =
            (name_slot){.hash = hash, .node = added};
        tree->nodes[above->count].next_sibling = added;
    }
    above->count = added;
    return added;
}

/* Return how many bytes two texts have in common at their start. */
static size_t common_length(mls_str a, mls_str b)
{
    const size_t shorter = a.length < b.length ? a.length : b.length;
    size_t length = 0;
    /* eight bytes at a time first */
    while (shorter - length >= 8 && memcmp(a.data + length, b.data + length, 8) == 0) {
        length += 8;
    }
    while (length < shorter && a.data[length] == b.data[length]) {
        length++;
    }
    return length;
}

/* Return the deepest node on the paths of both `name` and the name that ends at `leaf`,
 * possibly the root (0). The way up is never longer than the way down that inserted the
 * previous name. */
static uint32_t shared_node(const mls_name_tree *tree, uint32_t leaf, mls_str name)
{
    const size_t common = common_length(tree->nodes[leaf].path, name);
    uint32_t node = leaf;
    while (node != 0) {
        const size_t length = tree->nodes[node].path.length;
        if (length <= common && (length == name.length || name.data[length] == '.')) {
            break;
        }
        node = tree->nodes[node].parent;
    }
    return node;
}

/* Insert `name` with all nodes on its path. `*leaf` is the node of the previous name (0:
 * none), and becomes this one's node. MLS_E_CAPACITY, MLS_E_MEMORY: unfinished nodes
 * remain, and the caller frees the whole tree. */
static mls_code add_path(mls_name_tree *tree, mls_str name, uint32_t *leaf,
                         mls_status *st)
{
    uint32_t node = shared_node(tree, *leaf, name);
    while (!ends_at(tree, node, name)) {
        const mls_str segment = segment_after(tree, node, name);
        uint32_t child = find_child(tree, node, segment);
        if (child == 0) {
            const mls_code code = reserve_node(tree, st);
            if (code != MLS_OK) {
                return code;
            }
            const size_t end = (size_t)(segment.data - name.data) + segment.length;
            child = append_node(tree, node, (mls_str){name.data, end}, segment);
        }
        node = child;
    }
    *leaf = node;
    return MLS_OK;
}

/* Insert all `count` names of `list`. The node where a name ends records the name, so a
 * duplicate (MLS_E_VALUE) is detected without a set. After an error the caller frees the
 * tree. */
static mls_code add_names(mls_name_tree *tree, const mls_str *list, size_t count,
                          mls_status *st)
{
    uint32_t leaf = 0;
    for (size_t i = 0; i < count; i++) {
        /* memchr and pointer arithmetic do not allow NULL, even for no bytes */
        const mls_str name = list[i].length == 0 ? (mls_str){.data = ""} : list[i];
        const mls_code code = add_path(tree, name, &leaf, st);
        if (code != MLS_OK) {
            return code;
        }
        mls_name_node *node = &tree->nodes[leaf];
        if (node->name != MLS_NAME_NONE) {
            mls_fail(st, MLS_E_VALUE, "names %u and %zu of the list are the same",
                     (unsigned)node->name, i);
            return mls_status_name(st, name.data, name.length);
        }
        node->name = (uint32_t)i;
    }
    return MLS_OK;
}

/* Replace each node's `count` by the number of names at and below it. Children come after
 * their parents, so one backward pass sums them. */
static void count_names(mls_name_tree *tree)
{
    for (size_t i = 0; i < tree->size; i++) {
        tree->nodes[i].count = tree->nodes[i].name != MLS_NAME_NONE;
    }
    for (size_t i = tree->size; i-- > 1;) {
        tree->nodes[tree->nodes[i].parent].count += tree->nodes[i].count;
    }
}

/* Allocate an empty tree for `count` names; NULL if memory runs out. Models have up to
 * 2.5 nodes for each name, and unused memory is never touched. The table is at most half
 * full. */
static mls_name_tree *alloc_tree(size_t count)
{
    mls_name_tree *tree = mls_alloc(1, sizeof *tree);
    if (tree == NULL) {
        return NULL;
    }
    /* a minimum, for short lists of deep names */
    tree->room = 2 * count + count / 2 + 8;
    tree->slot_count = 16;
    while (tree->slot_count < 2 * count) {
        tree->slot_count *= 2;
    }
    tree->nodes = mls_realloc(NULL, tree->room, sizeof *tree->nodes);
    tree->slots = mls_alloc(tree->slot_count, sizeof *tree->slots);
    if (tree->nodes == NULL || tree->slots == NULL) {
        mls_name_tree_free(tree);
        return NULL;
    }
    tree->nodes[0] = (mls_name_node){.path = {.data = ""},
                                     .segment = {.data = ""},
                                     .parent = MLS_NAME_NONE,
                                     .first_child = MLS_NAME_NONE,
                                     .next_sibling = MLS_NAME_NONE,
                                     .name = MLS_NAME_NONE};
    tree->size = 1;
    return tree;
}

/* Build the tree of a list of names. After a failure the whole tree is freed. */
mls_code mls_name_tree_new(const mls_str *names, size_t count, mls_name_tree **out,
                           mls_status *st)
{
    /* each name has its own node; this check rules out overflow below */
    if (count >= MAX_NODES || count > SIZE_MAX / 8) {
        return too_many_segments(st);
    }
    mls_name_tree *tree = alloc_tree(count);
    if (tree == NULL) {
        return no_memory(st);
    }
    const mls_code code = add_names(tree, names, count, st);
    if (code != MLS_OK) {
        mls_name_tree_free(tree);
        return code;
    }
    count_names(tree);
    *out = tree;
    return MLS_OK;
}

/* Frees a tree; accepts NULL. The names were borrowed. */
void mls_name_tree_free(mls_name_tree *tree)
{
    if (tree != NULL) {
        mls_free(tree->nodes);
        mls_free(tree->slots);
        mls_free(tree);
    }
}

/* ---- lookup ---- */

const mls_name_node *mls_name_tree_nodes(const mls_name_tree *tree)
{
    return tree->nodes;
}

size_t mls_name_tree_size(const mls_name_tree *tree)
{
    return tree->size;
}

/* Descend from the root with one lookup for each segment; an empty path has one empty
 * segment. */
uint32_t mls_name_tree_find(const mls_name_tree *tree, mls_str path)
{
    const mls_str name = path.length == 0 ? (mls_str){.data = ""} : path;
    uint32_t node = 0;
    while (!ends_at(tree, node, name)) {
        node = find_child(tree, node, segment_after(tree, node, name));
        if (node == 0) {
            return MLS_NAME_NONE;
        }
    }
    return node;
}

/* Return the node after `node` in pre-order within the subtree of `top`, or MLS_NAME_NONE
 * at its end. Follows the links, without a stack, so depth is unlimited. Stops at `top`
 * on the way up, before the siblings of `top`. */
static uint32_t next_node(const mls_name_tree *tree, uint32_t top, uint32_t node)
{
    const mls_name_node *nodes = tree->nodes;
    if (nodes[node].first_child != MLS_NAME_NONE) {
        return nodes[node].first_child;
    }
    while (node != top && nodes[node].next_sibling == MLS_NAME_NONE) {
        node = nodes[node].parent;
    }
    return node == top ? MLS_NAME_NONE : nodes[node].next_sibling;
}

/* Move the value at index `at` of a heap of `count` values down to its position; the
 * largest value of a heap is at index 0. */
static void sift_down(uint32_t *heap, size_t at, size_t count)
{
    const uint32_t value = heap[at];
    for (size_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1] > heap[child]) {
            child++;
        }
        if (heap[child] <= value) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
}

/* Sort `count` positions in ascending order. Heap sort: in place, and O(n log n) for any
 * input. qsort guarantees neither, and names may come from untrusted files. */
static void sort_positions(uint32_t *positions, size_t count)
{
    for (size_t i = count / 2; i-- > 0;) {
        sift_down(positions, i, count);
    }
    for (size_t last = count; last-- > 1;) {
        const uint32_t largest = positions[0];
        positions[0] = positions[last];
        positions[last] = largest;
        sift_down(positions, 0, last);
    }
}

/* Walk the subtree in pre-order. The positions ascend, unless names of a layer are not
 * adjacent in the list; they are sorted then. */
size_t mls_name_tree_under(const mls_name_tree *tree, uint32_t node, uint32_t *out)
{
    size_t count = 0;
    bool is_ascending = true;
    for (uint32_t at = next_node(tree, node, node); at != MLS_NAME_NONE;
         at = next_node(tree, node, at)) {
        const uint32_t position = tree->nodes[at].name;
        if (position != MLS_NAME_NONE) {
            is_ascending = is_ascending && (count == 0 || out[count - 1] < position);
            out[count++] = position;
        }
    }
    if (!is_ascending) {
        sort_positions(out, count);
    }
    return count;
}

/* ---- layers ---- */

/* Return the smaller of two positions. MLS_NAME_NONE compares as the largest. */
static uint32_t earlier_position(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Set `first[i]` of each node i to the position of the first name that makes it a layer:
 * of the names that end at its children (`is_direct`), or of all names below it;
 * MLS_NAME_NONE if there is none. Children come after their parents, so in a backward
 * pass each node is complete before it is passed on. */
static void find_first_names(const mls_name_tree *tree, bool is_direct, uint32_t *first)
{
    const mls_name_node *nodes = tree->nodes;
    const size_t size = tree->size;
    for (size_t i = 0; i < size; i++) {
        first[i] = MLS_NAME_NONE;
    }
    for (size_t i = size; i-- > 1;) {
        const uint32_t own_position =
            is_direct ? nodes[i].name : earlier_position(nodes[i].name, first[i]);
        first[nodes[i].parent] = earlier_position(first[nodes[i].parent], own_position);
    }
}

/* List the layers in the order of their first names. Two layers of the same kind never
 * have the same first name, because a name has one parent and one ancestor at each depth.
 * `layers` first holds the layer of each name that begins one, and is then packed in
 * place: the write position never passes the read position. */
mls_code mls_name_tree_layers(const mls_name_tree *tree, uint32_t depth, uint32_t **out,
                              size_t *count, mls_status *st)
{
    const mls_name_node *nodes = tree->nodes;
    const size_t size = tree->size;
    const size_t name_count = nodes[0].count;
    uint32_t *first = mls_alloc(size, sizeof *first);
    uint32_t *layers = mls_alloc(name_count, sizeof *layers);
    if (first == NULL || layers == NULL) {
        mls_free(first);
        mls_free(layers);
        return mls_fail(st, MLS_E_MEMORY, "no memory for the layers of %zu names",
                        name_count);
    }
    for (size_t i = 0; i < name_count; i++) {
        layers[i] = MLS_NAME_NONE;
    }
    find_first_names(tree, depth == 0, first);
    for (size_t i = 0; i < size; i++) {
        if (first[i] != MLS_NAME_NONE && (depth == 0 || nodes[i].depth == depth)) {
            layers[first[i]] = (uint32_t)i;
        }
    }
    size_t layer_count = 0;
    for (size_t i = 0; i < name_count; i++) {
        if (layers[i] != MLS_NAME_NONE) {
            layers[layer_count++] = layers[i];
        }
    }
    mls_free(first);
    *out = layers;
    *count = layer_count;
    return MLS_OK;
}
