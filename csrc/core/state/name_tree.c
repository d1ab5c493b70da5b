/* names: the tree of dotted names.
 *
 * All nodes lie in one array, and one open-addressing table finds the child of a node by
 * its segment: there are no lists to search, however many children a node has.  A first
 * child is known to its parent and is not in the table: so each name needs one place of
 * it at most, where it leaves the names before it, and the table never has to grow. Names
 * of one layer usually follow each other, so each name is begun at the node that it
 * shares with the name before it; most of a name is then compared and not looked up.
 *
 * Nothing here recurses: a name of thousands of segments is as good as any.
 *
 * Once made, a tree is only read, so any number of threads may use it.
 */
#include "state/name_tree.h"

#include "base/memory.h"
#include "base/size.h"

#include <string.h>

/* Node numbers stay clear of MLS_NAME_NONE, and twice their number fits a slot's hash. */
#define MAX_NODES ((size_t)1 << 31)

/* One place of the table.  The root is nobody's child, so node 0 means empty. */
typedef struct name_slot {
    uint32_t hash;
    uint32_t node;
} name_slot;

/* Nodes are known by number and never by pointer while the tree is made: the array moves
 * when it grows. */
struct mls_names {
    mls_name_node *nodes;
    size_t size, room;
    name_slot *slots;  /* all children but the first ones */
    size_t slot_count; /* a power of two */
};

/* ---- the table ---- */

/* Hash of a segment under a parent. */
static uint32_t hash_segment(uint32_t parent, mls_text segment)
{
    return (uint32_t)mls_text_hash(parent, segment);
}

/* The slot that holds the child, or the empty one where it belongs.  There always is an
 * empty one, since the table is at most half full. */
static name_slot *find_slot(const mls_names *names, uint32_t hash, uint32_t parent,
                            mls_text segment)
{
    const size_t mask = names->slot_count - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
        name_slot *slot = &names->slots[at];
        if (slot->node == 0) {
            return slot;
        }
        /* other hashes need no look at the node */
        if (slot->hash == hash) {
            const mls_name_node *node = &names->nodes[slot->node];
            if (node->parent == parent && mls_text_equal(node->segment, segment)) {
                return slot;
            }
        }
    }
}

/* The child with this segment, or 0: the root is no child, so the number is free. */
static uint32_t find_child(const mls_names *names, uint32_t parent, mls_text segment)
{
    /* the first child and an only child are decided without the table */
    const uint32_t first = names->nodes[parent].first_child;
    if (first == MLS_NAME_NONE) {
        return 0;
    }
    if (mls_text_equal(names->nodes[first].segment, segment)) {
        return first;
    }
    if (names->nodes[first].next_sibling == MLS_NAME_NONE) {
        return 0;
    }
    return find_slot(names, hash_segment(parent, segment), parent, segment)->node;
}

/* Whether a node other than the root is where `name` ends. */
static bool ends_at(const mls_names *names, uint32_t node, mls_text name)
{
    return node != 0 && names->nodes[node].path.length == name.length;
}

/* The segment of `name` that comes after `node`, a node on its way. */
static mls_text segment_after(const mls_names *names, uint32_t node, mls_text name)
{
    const size_t start = node == 0 ? 0 : names->nodes[node].path.length + 1;
    const char *from = name.data + start;
    const char *dot = memchr(from, '.', name.length - start);
    return (mls_text){from, dot == NULL ? name.length - start : (size_t)(dot - from)};
}

/* ---- making the tree ---- */

/* The one message for a list that the machine cannot hold. */
static mls_code no_memory(mls_status *st)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory for the tree of names");
}

/* Room for one more node.  Doubling keeps the copying in proportion; on failure the nodes
 * are what they were. */
static mls_code reserve_node(mls_names *names, mls_status *st)
{
    if (names->size == MAX_NODES) {
        return mls_fail(st, MLS_E_CAPACITY, "the names have more than %zu segments",
                        MAX_NODES);
    }
    if (names->size == names->room) {
        size_t room;
        mls_name_node *nodes = mls_size_mul(names->room, 2, &room)
                                   ? mls_realloc(names->nodes, room, sizeof *nodes)
                                   : NULL;
        if (nodes == NULL) {
            return no_memory(st);
        }
        names->nodes = nodes;
        names->room = room;
    }
    return MLS_OK;
}

/* Append a node to its parent's children.  Room for it is there.  While the tree is made,
 * `count` holds the last child, so that appending needs no walk. */
static uint32_t append_node(mls_names *names, uint32_t parent, mls_text path,
                            mls_text segment)
{
    const uint32_t added = (uint32_t)names->size++;
    mls_name_node *above = &names->nodes[parent];
    names->nodes[added] = (mls_name_node){.path = path,
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
        *find_slot(names, hash, parent, segment) =
            (name_slot){.hash = hash, .node = added};
        names->nodes[above->count].next_sibling = added;
    }
    above->count = added;
    return added;
}

/* How many bytes two texts share at their start. */
static size_t common_length(mls_text a, mls_text b)
{
    const size_t shorter = a.length < b.length ? a.length : b.length;
    size_t at = 0;
    /* whole words first */
    while (shorter - at >= 8 && memcmp(a.data + at, b.data + at, 8) == 0) {
        at += 8;
    }
    while (at < shorter && a.data[at] == b.data[at]) {
        at++;
    }
    return at;
}

/* The deepest node that `name` shares with the name that ends at `leaf`.  The way up from
 * there is never longer than the way down that made it. */
static uint32_t shared_node(const mls_names *names, uint32_t leaf, mls_text name)
{
    const size_t common = common_length(names->nodes[leaf].path, name);
    uint32_t node = leaf;
    while (node != 0) {
        const size_t length = names->nodes[node].path.length;
        if (length <= common && (length == name.length || name.data[length] == '.')) {
            break;
        }
        node = names->nodes[node].parent;
    }
    return node;
}

/* The node where `name` ends, made with all that leads to it.  `*leaf` is where the name
 * before it ends, and becomes this one's.  A failure leaves nodes that lead nowhere: the
 * caller drops the whole tree. */
static mls_code add_path(mls_names *names, mls_text name, uint32_t *leaf, mls_status *st)
{
    uint32_t node = shared_node(names, *leaf, name);
    while (!ends_at(names, node, name)) {
        const mls_text segment = segment_after(names, node, name);
        uint32_t child = find_child(names, node, segment);
        if (child == 0) {
            const mls_code code = reserve_node(names, st);
            if (code != MLS_OK) {
                return code;
            }
            const size_t end = (size_t)(segment.data - name.data) + segment.length;
            child = append_node(names, node, (mls_text){name.data, end}, segment);
        }
        node = child;
    }
    *leaf = node;
    return MLS_OK;
}

/* All names in turn.  A name that ends where another one did is found here without a set
 * of its own: the node knows who came first. */
static mls_code add_names(mls_names *names, const mls_text *list, size_t count,
                          mls_status *st)
{
    uint32_t leaf = 0;
    for (size_t i = 0; i < count; i++) {
        /* memchr and arithmetic want no NULL, not even for no bytes */
        const mls_text name = list[i].length == 0 ? (mls_text){.data = ""} : list[i];
        const mls_code code = add_path(names, name, &leaf, st);
        if (code != MLS_OK) {
            return code;
        }
        mls_name_node *node = &names->nodes[leaf];
        if (node->name != MLS_NAME_NONE) {
            mls_fail(st, MLS_E_VALUE, "names %u and %zu of the list are the same",
                     (unsigned)node->name, i);
            mls_status_name(st, name.data, name.length);
            return MLS_E_VALUE;
        }
        node->name = (uint32_t)i;
    }
    return MLS_OK;
}

/* Put the number of names where the last child was.  Children come after their parents,
 * so one way back through the array sums them up. */
static void count_names(mls_names *names)
{
    for (size_t i = 0; i < names->size; i++) {
        names->nodes[i].count = names->nodes[i].name != MLS_NAME_NONE;
    }
    for (size_t i = names->size; i-- > 1;) {
        names->nodes[names->nodes[i].parent].count += names->nodes[i].count;
    }
}

/* An empty tree for `count` names.  Models have up to two and a half nodes for each name,
 * and what is too much is never touched; the table is at most half full. */
static mls_names *names_alloc(size_t count)
{
    mls_names *names = mls_alloc(1, sizeof *names);
    if (names == NULL) {
        return NULL;
    }
    /* at least a few, for short lists of deep names */
    names->room = 2 * count + count / 2 + 8;
    names->slot_count = 16;
    while (names->slot_count < 2 * count) {
        names->slot_count *= 2;
    }
    names->nodes = mls_realloc(NULL, names->room, sizeof *names->nodes);
    names->slots = mls_alloc(names->slot_count, sizeof *names->slots);
    if (names->nodes == NULL || names->slots == NULL) {
        mls_names_free(names);
        return NULL;
    }
    names->nodes[0] = (mls_name_node){.path = {.data = ""},
                                      .segment = {.data = ""},
                                      .parent = MLS_NAME_NONE,
                                      .first_child = MLS_NAME_NONE,
                                      .next_sibling = MLS_NAME_NONE,
                                      .name = MLS_NAME_NONE};
    names->size = 1;
    return names;
}

/* The tree is whole before the caller sees it: a failure drops all of it. */
mls_code mls_names_new(const mls_text *names, size_t count, mls_names **out,
                       mls_status *st)
{
    /* each name has a node of its own; with this, no sum below can wrap */
    if (count >= MAX_NODES || count > SIZE_MAX / 8) {
        return mls_fail(st, MLS_E_CAPACITY, "%zu names have more than %zu segments",
                        count, MAX_NODES);
    }
    mls_names *made = names_alloc(count);
    if (made == NULL) {
        return no_memory(st);
    }
    const mls_code code = add_names(made, names, count, st);
    if (code != MLS_OK) {
        mls_names_free(made);
        return code;
    }
    count_names(made);
    *out = made;
    return MLS_OK;
}

/* Half-made ones too: what is not there yet is NULL. */
void mls_names_free(mls_names *names)
{
    if (names != NULL) {
        mls_free(names->nodes);
        mls_free(names->slots);
        mls_free(names);
    }
}

/* ---- looking things up ---- */

/* One array, in the order in which the nodes were met: readers may walk it directly. */
const mls_name_node *mls_names_nodes(const mls_names *names)
{
    return names->nodes;
}

/* The root counts. */
size_t mls_names_size(const mls_names *names)
{
    return names->size;
}

/* Down from the root, one lookup for each segment; an empty path has one, empty segment.
 */
static uint32_t descend(const mls_names *names, mls_text path)
{
    const mls_text name = path.length == 0 ? (mls_text){.data = ""} : path;
    uint32_t node = 0;
    while (!ends_at(names, node, name)) {
        node = find_child(names, node, segment_after(names, node, name));
        if (node == 0) {
            return MLS_NAME_NONE;
        }
    }
    return node;
}

/* The root's path is empty as well, and it is the one that is meant. */
uint32_t mls_names_find(const mls_names *names, mls_text path)
{
    return path.length == 0 ? 0 : descend(names, path);
}

/* No special case here: an empty name lies under the root and is not the root.  A path on
 * the way to longer names has a node too, which then has no position. */
uint32_t mls_names_position(const mls_names *names, mls_text name)
{
    const uint32_t node = descend(names, name);
    return node == MLS_NAME_NONE ? MLS_NAME_NONE : names->nodes[node].name;
}

/* The links are enough to find the way back: no stack, however deep the tree is.
 * The walk stops at `top` on its way up, and so never sees the siblings of `top`. */
uint32_t mls_names_next(const mls_names *names, uint32_t top, uint32_t node, bool skip)
{
    const mls_name_node *nodes = names->nodes;
    if (!skip && nodes[node].first_child != MLS_NAME_NONE) {
        return nodes[node].first_child;
    }
    while (node != top && nodes[node].next_sibling == MLS_NAME_NONE) {
        node = nodes[node].parent;
    }
    return node == top ? MLS_NAME_NONE : nodes[node].next_sibling;
}

/* Let the value at `at` of a heap sink to its place. */
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

/* Heap sort: in place, and n log n for any order.  qsort promises neither, and names come
 * from files. */
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

/* Where the names of a layer are not together in the list, the tree has another order
 * than the list, and the positions are sorted. */
size_t mls_names_under(const mls_names *names, uint32_t node, uint32_t *out)
{
    size_t count = 0;
    bool rising = true;
    for (uint32_t at = mls_names_next(names, node, node, false); at != MLS_NAME_NONE;
         at = mls_names_next(names, node, at, false)) {
        const uint32_t position = names->nodes[at].name;
        if (position != MLS_NAME_NONE) {
            rising = rising && (count == 0 || out[count - 1] < position);
            out[count++] = position;
        }
    }
    if (!rising) {
        sort_positions(out, count);
    }
    return count;
}

/* ---- layers ---- */

/* The smaller of two positions, where MLS_NAME_NONE is the largest. */
static uint32_t earlier(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Into `first`, for every node, the first name that makes it a layer.  Children come
 * after their parents, so from the end each node is complete when it is passed on. */
static void find_first(const mls_names *names, bool direct, uint32_t *first)
{
    const mls_name_node *nodes = mls_names_nodes(names);
    const size_t size = mls_names_size(names);
    for (size_t i = 0; i < size; i++) {
        first[i] = MLS_NAME_NONE;
    }
    for (size_t i = size; i-- > 1;) {
        const uint32_t own = direct ? nodes[i].name : earlier(nodes[i].name, first[i]);
        first[nodes[i].parent] = earlier(first[nodes[i].parent], own);
    }
}

/* No two layers of one kind have the same first name: it has one parent, and one ancestor
 * at each depth.  So the names themselves are the order.
 *
 * `layers` first has the layer of each name that begins one, and is then packed in place:
 * what is written is never in front of what is read. */
mls_code mls_names_layers(const mls_names *names, uint32_t depth, uint32_t **out,
                          size_t *count, mls_status *st)
{
    const mls_name_node *nodes = mls_names_nodes(names);
    const size_t size = mls_names_size(names);
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
    find_first(names, depth == 0, first);
    for (size_t i = 0; i < size; i++) {
        if (first[i] != MLS_NAME_NONE && (depth == 0 || nodes[i].depth == depth)) {
            layers[first[i]] = (uint32_t)i;
        }
    }
    size_t found = 0;
    for (size_t i = 0; i < name_count; i++) {
        if (layers[i] != MLS_NAME_NONE) {
            layers[found++] = layers[i];
        }
    }
    mls_free(first);
    *out = layers;
    *count = found;
    return MLS_OK;
}
