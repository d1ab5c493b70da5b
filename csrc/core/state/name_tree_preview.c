/* name_tree_preview: chooses rows level by level, and then arranges them in pre-order.
 *
 * The choice is breadth-first, so that the top levels are complete before any branch goes
 * deeper. Both passes use an explicit list instead of recursion: the tree may be very
 * deep.
 */
#include "state/name_tree_preview.h"

#include "base/memory.h"

#include <string.h>

typedef struct preview_state {
    const mls_name_node *nodes;
    size_t max_rows, max_children;
    bool *open;                       /* one for each node */
    mls_name_tree_preview_row *rows;  /* the result */
    mls_name_tree_preview_row *stack; /* rows still to write, the next one on top */
    uint32_t *queue;                  /* nodes that may be opened, level by level */
} preview_state;

static size_t child_count(const preview_state *o, uint32_t node)
{
    size_t count = 0;
    for (uint32_t child = o->nodes[node].first_child; child != MLS_NAME_NONE;
         child = o->nodes[child].next_sibling) {
        count++;
    }
    return count;
}

/* Returns the rows that the children of a node need. The root's children are also limited
 * to the available rows. */
static size_t rows_for(const preview_state *o, uint32_t node)
{
    const size_t count = child_count(o, node);
    size_t most = o->max_children;
    if (node == 0 && o->max_rows < most) {
        most = o->max_rows;
    }
    return count < most ? count : most;
}

/* Computes the rows for a node's children, `room` of them: the first ones, one that
 * counts the hidden ones, and the last one. */
static void child_rows(const preview_state *o, uint32_t node, size_t room,
                       mls_name_tree_preview_row *out)
{
    const size_t count = child_count(o, node);
    const size_t hidden = count > room ? count - room + 1 : 0;
    const size_t last = hidden > 0 && room >= 3 ? 1 : 0;
    const size_t first = hidden > 0 ? room - 1 - last : room;
    size_t row = 0, at = 0;
    for (uint32_t child = o->nodes[node].first_child; row < room;
         child = o->nodes[child].next_sibling, at++) {
        if (at < first || at >= first + hidden) {
            out[row++] = (mls_name_tree_preview_row){.node = child};
        } else if (at == first) {
            out[row++] =
                (mls_name_tree_preview_row){.node = child, .hidden = (uint32_t)hidden};
        }
    }
}

static size_t choose_rows(preview_state *o)
{
    size_t used = 0, head = 0, tail = 0;
    o->queue[tail++] = 0;
    while (head < tail) {
        const uint32_t node = o->queue[head++];
        /* a node with a single name shows that name in its own row */
        if (node != 0 && o->nodes[node].count == 1) {
            continue;
        }
        const size_t wanted = rows_for(o, node);
        if (wanted == 0 || wanted > o->max_rows - used) {
            continue;
        }
        child_rows(o, node, wanted, o->rows);
        o->open[node] = true;
        used += wanted;
        for (size_t i = 0; i < wanted; i++) {
            if (o->rows[i].hidden == 0) {
                o->queue[tail++] = o->rows[i].node;
            }
        }
    }
    return used;
}

static size_t push_children(preview_state *o, uint32_t node, size_t depth)
{
    const size_t count = rows_for(o, node);
    mls_name_tree_preview_row *top = o->stack + depth;
    child_rows(o, node, count, top);
    for (size_t low = 0, high = count; low + 1 < high; low++) {
        const mls_name_tree_preview_row kept = top[low];
        top[low] = top[--high];
        top[high] = kept;
    }
    return depth + count;
}

/* Writes the rows of all open nodes in pre-order; returns their number. */
static size_t arrange_rows(preview_state *o)
{
    size_t count = 0;
    size_t depth = o->open[0] ? push_children(o, 0, 0) : 0;
    while (depth > 0) {
        mls_name_tree_preview_row row = o->stack[--depth];
        row.open = row.hidden == 0 && o->open[row.node];
        o->rows[count++] = row;
        if (row.open) {
            depth = push_children(o, row.node, depth);
        }
    }
    return count;
}

/* The stack never holds more rows than the result, because `choose_rows` counted each
 * row. */
mls_code mls_name_tree_preview_new(const mls_name_tree *names, size_t max_rows,
                                   size_t max_children, mls_name_tree_preview_row **rows,
                                   size_t *count, mls_status *st)
{
    const size_t nodes = mls_name_tree_size(names);
    /* at most as many rows as nodes, for any limit */
    preview_state o = {.nodes = mls_name_tree_nodes(names),
                       .max_rows = max_rows < nodes ? max_rows : nodes,
                       .max_children = max_children};
    o.open = mls_alloc(nodes, sizeof *o.open);
    o.rows = mls_alloc(o.max_rows, sizeof *o.rows);
    o.stack = mls_alloc(o.max_rows, sizeof *o.stack);
    o.queue = mls_alloc(o.max_rows + 1, sizeof *o.queue);
    const bool good =
        o.open != NULL && o.rows != NULL && o.stack != NULL && o.queue != NULL;
    if (good) {
        (void)choose_rows(&o);
        *count = arrange_rows(&o);
        *rows = o.rows;
    } else {
        mls_free(o.rows);
    }
    mls_free(o.open);
    mls_free(o.stack);
    mls_free(o.queue);
    return good ? MLS_OK
                : mls_fail(st, MLS_E_MEMORY, "no memory for an outline of %zu names",
                           nodes);
}

/* ---- contents of rows ---- */

/* Dtypes are compared by name: arrays may have dtypes that the core does not know. */
static void add_sum(mls_name_tree_preview_sum *whole,
                    const mls_name_tree_preview_sum *part)
{
    whole->bytes += part->bytes;
    if (whole->dtype == NULL) {
        whole->dtype = part->dtype;
    } else if (part->dtype != NULL && strcmp(whole->dtype, part->dtype) != 0) {
        whole->dtype = "mixed";
    }
}

/* Parents come before their children, so in a backward pass each sum is complete before
 * it is added to its parent's. */
mls_code mls_name_tree_preview_sums(const mls_name_tree *names,
                                    const mls_name_tree_preview_sum *leaves,
                                    mls_name_tree_preview_sum **sums, mls_status *st)
{
    const mls_name_node *nodes = mls_name_tree_nodes(names);
    mls_name_tree_preview_sum *list = mls_alloc(mls_name_tree_size(names), sizeof *list);
    if (list == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the sums of %zu layers",
                        mls_name_tree_size(names));
    }
    for (size_t i = mls_name_tree_size(names); i-- > 0;) {
        if (nodes[i].name != MLS_NAME_NONE) {
            add_sum(&list[i], &leaves[nodes[i].name]);
        }
        if (nodes[i].parent != MLS_NAME_NONE) {
            add_sum(&list[nodes[i].parent], &list[i]);
        }
    }
    *sums = list;
    return MLS_OK;
}

static void add_hidden(const mls_name_node *nodes, const mls_name_tree_preview_sum *sums,
                       const mls_name_tree_preview_row *row,
                       mls_name_tree_preview_entry *out)
{
    uint32_t node = row->node;
    for (uint32_t i = 0; i < row->hidden && node != MLS_NAME_NONE; i++) {
        add_sum(&out->sum, &sums[node]);
        out->count += nodes[node].count;
        node = nodes[node].next_sibling;
    }
}

mls_name_tree_preview_entry
mls_name_tree_preview_describe(const mls_name_tree *names,
                               const mls_name_tree_preview_sum *sums,
                               const mls_name_tree_preview_row *row)
{
    const mls_name_node *nodes = mls_name_tree_nodes(names);
    const mls_name_node *node = &nodes[row->node], *leaf = node;
    mls_name_tree_preview_entry out = {.name = MLS_NAME_NONE};
    if (row->hidden > 0) {
        add_hidden(nodes, sums, row, &out);
    } else {
        out.count = node->count;
        out.sum = sums[row->node];
        while (out.count == 1 && leaf->name == MLS_NAME_NONE) {
            leaf = &nodes[leaf->first_child];
        }
        out.name = leaf->name;
    }
    const size_t above = node->path.length - node->segment.length;
    out.label = (mls_str){leaf->path.data + above, leaf->path.length - above};
    return out;
}
