/* shard_layers: which elements each layer of a shard shows, and which are zero because no
 * layer stores them.
 *
 * A layer stores the elements of its row ranges; without rows it is full and stores all.
 * Elements are visible in the newest layer that stores them.
 *
 * A sweep over the shard has one cursor for each layer. At each position the newest layer
 * that stores the element is visible, until its range ends or a range of a newer layer
 * begins. Each step ends at a boundary of some row range, so the number of steps is at
 * most twice the number of row ranges, plus one. */
#include "checkpoint/storage/shard_layers.h"

#include "base/search.h"

/* Return the number of elements that a layer stores; a full layer (`row` 0) stores all
 * `elements` of the shard. */
size_t mls_layer_element_count(const mls_layer *layer, size_t elements)
{
    if (layer->row == 0) {
        return elements;
    }
    if (layer->stored_count == 0) {
        return 0;
    }
    /* the last range's `at` counts the elements before it */
    const mls_row_range *last = &layer->stored[layer->stored_count - 1];
    return last->at + last->count;
}

/* Start at row 0; the shard's last row may be shorter. */
mls_rows mls_layer_rows(size_t row, size_t elements)
{
    return (mls_rows){.row = row,
                      .elements = elements,
                      .row_count = elements / row + (elements % row != 0 ? 1 : 0)};
}

/* Convert a pair of numbers (rows to skip, rows stored) to the next range of elements;
 * false: the pair is invalid, and nothing changes. Rows are checked before the
 * multiplication, so the product is at most the number of elements. */
bool mls_rows_next(mls_rows *rows, uint64_t skip, uint64_t count, mls_row_range *out)
{
    const size_t row = rows->row, left = rows->row_count - rows->at;
    if ((skip == 0 && rows->at > 0) || count == 0 || skip > left || count > left - skip) {
        return false;
    }
    const size_t first = rows->at + (size_t)skip;
    rows->at = first + (size_t)count;
    const size_t end = rows->at == rows->row_count ? rows->elements : rows->at * row;
    *out = (mls_row_range){first * row, end - first * row, rows->stored_before};
    rows->stored_before += out->count;
    return true;
}

/* Each range has two numbers: round up for a text with an odd number of them, which is
 * invalid. */
size_t mls_layer_rows_count(mls_str text)
{
    return (mls_str_count(text, ',') + 1) / 2;
}

/* Parse a text such as "0,2,17,1" (skip 0 rows, 2 stored, skip 17, 1 stored) into
 * `ranges`; `*count` receives their number. Returns false if the text is invalid or
 * empty. */
bool mls_layer_rows_read(mls_rows *rows, mls_str text, mls_row_range *ranges,
                         size_t *count)
{
    const char *at = text.data, *end = at + text.length;
    uint64_t skip, stored;
    *count = 0;
    while (at < end) {
        if (!mls_str_next_number(&at, end, &skip) ||
            !mls_str_next_number(&at, end, &stored) ||
            !mls_rows_next(rows, skip, stored, &ranges[*count])) {
            return false;
        }
        ++*count;
    }
    return *count > 0;
}

/* Return an upper bound of the ranges that mls_layers_resolve writes. Each boundary of a
 * row range starts at most one visible range, and so does the start of the shard. */
size_t mls_layers_room(const mls_layers *layers)
{
    size_t ranges = 0;
    for (size_t i = 0; i < layers->count; i++) {
        ranges += layers->list[i].row == 0 ? 1 : layers->list[i].stored_count;
    }
    return 2 * ranges + 1;
}

/* Return the index of the first of `count` ranges in `list` that ends after `element`, by
 * binary search; `count` if there is none. `element` counts elements of the layer if
 * `by_layer`, otherwise of the shard; lists ascend in both. */
static inline size_t find_range(const mls_row_range *list, size_t count, size_t element,
                                bool by_layer)
{
    size_t i;
    MLS_FIND_FIRST(i, count,
                   (by_layer ? list[i].at : list[i].begin) + list[i].count > element);
    return i;
}

size_t mls_row_ranges_find(const mls_row_range *list, size_t count, size_t element)
{
    return find_range(list, count, element, false);
}

size_t mls_row_ranges_find_at(const mls_row_range *list, size_t count, size_t at)
{
    return find_range(list, count, at, true);
}

typedef struct layer_sweep {
    const mls_layers *layers;
    size_t elements;
    size_t at;                    /* all elements before this are done */
    size_t next[MLS_LAYERS_MOST]; /* first range of each layer that ends after `at` */
} layer_sweep;

/* Return in `*out` the next visible range, from `sweep->at` on, and in `*layer_number`
 * the layer that stores it, or the number of layers for zeros. The newest layer that
 * stores the element is visible. Returns false at the end of the shard. */
static bool next_visible(layer_sweep *sweep, size_t *layer_number, mls_row_range *out)
{
    const size_t count = sweep->layers->count;
    size_t end = sweep->elements, i = count;
    if (sweep->at == end) {
        return false;
    }
    /* zeros up to the end, unless a layer intersects */
    *layer_number = count;
    *out = (mls_row_range){.begin = sweep->at, .at = sweep->at};
    while (*layer_number == count && i-- > 0) {
        const mls_layer *layer = &sweep->layers->list[i];
        if (layer->row == 0) {
            *layer_number = i;
            break;
        }
        /* skip ranges that end before `at` */
        while (sweep->next[i] < layer->stored_count &&
               layer->stored[sweep->next[i]].begin +
                       layer->stored[sweep->next[i]].count <=
                   sweep->at) {
            sweep->next[i]++;
        }
        if (sweep->next[i] == layer->stored_count) {
            continue;
        }
        /* a range that contains `at` ends the search; a later one limits the result */
        const mls_row_range *range = &layer->stored[sweep->next[i]];
        if (range->begin <= sweep->at) {
            *layer_number = i;
            out->at = range->at + (sweep->at - range->begin);
        }
        /* the element at which the layer stops, or starts, to store elements */
        const size_t change =
            range->begin <= sweep->at ? range->begin + range->count : range->begin;
        end = change < end ? change : end;
    }
    out->count = end - sweep->at;
    sweep->at = end;
    return true;
}

/* Resolve a shard of `elements` elements with one layer that has row ranges: it is
 * completely visible, and the gaps between its ranges are zeros, which are written to
 * `ranges`. Returns the number of these. This avoids the sweep for shards that were saved
 * once and have thousands of ranges. */
static size_t resolve_single(mls_layers *layers, size_t elements, mls_row_range *ranges)
{
    mls_layer *only = &layers->list[0];
    size_t at = 0, count = 0;
    for (size_t i = 0; i < only->stored_count; i++) {
        const mls_row_range *range = &only->stored[i];
        if (range->begin > at) {
            ranges[count++] = (mls_row_range){at, range->begin - at, at};
        }
        at = range->begin + range->count;
    }
    if (at < elements) {
        ranges[count++] = (mls_row_range){at, elements - at, at};
    }
    only->visible = only->stored;
    only->visible_count = only->stored_count;
    layers->zeros = ranges;
    layers->zero_count = count;
    return count;
}

/* Write the visible ranges of each layer, and the zeros (elements that no layer stores),
 * to `ranges`, which has space for mls_layers_room ranges; returns their number. Two
 * sweeps: the first only counts, so that each layer's ranges can be stored together. */
size_t mls_layers_resolve(mls_layers *layers, size_t elements, mls_row_range *ranges)
{
    if (layers->count == 1 && layers->list[0].row != 0) {
        return resolve_single(layers, elements, ranges);
    }
    size_t starts[MLS_LAYERS_MOST + 2] = {0}, layer_number;
    mls_row_range range;
    layer_sweep sweep = {.layers = layers, .elements = elements};
    while (next_visible(&sweep, &layer_number, &range)) {
        starts[layer_number + 1]++;
    }
    /* convert counts to start positions; the zeros come last */
    for (size_t i = 0; i <= layers->count; i++) {
        starts[i + 1] += starts[i];
    }
    for (size_t i = 0; i < layers->count; i++) {
        layers->list[i].visible = ranges + starts[i];
        layers->list[i].visible_count = starts[i + 1] - starts[i];
    }
    layers->zeros = ranges + starts[layers->count];
    layers->zero_count = starts[layers->count + 1] - starts[layers->count];
    sweep = (layer_sweep){.layers = layers, .elements = elements};
    while (next_visible(&sweep, &layer_number, &range)) {
        ranges[starts[layer_number]++] = range;
    }
    /* the second sweep advanced each start to the end of its list */
    return starts[layers->count];
}
