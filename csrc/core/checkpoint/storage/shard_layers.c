/* layers: what is visible of each.
 *
 * One walk along the shard with a cursor in each layer: at every place the newest layer
 * that has it counts, up to where it ends or a newer one begins.  So each step ends at an
 * end of some run, and there are no more steps than twice as many as there are runs.
 */
#include "checkpoint/storage/shard_layers.h"

/* A full layer has no runs to add up. */
size_t mls_layer_held(const mls_layer *layer, size_t elements)
{
    if (layer->row == 0) {
        return elements;
    }
    if (layer->run_count == 0) {
        return 0;
    }
    /* the last run knows how many elements were in front of it */
    const mls_extent *last = &layer->runs[layer->run_count - 1];
    return last->at + last->count;
}

/* The last row may be short. */
mls_rows mls_layer_rows(size_t row, size_t elements)
{
    return (mls_rows){.row = row,
                      .elements = elements,
                      .all = elements / row + (elements % row != 0 ? 1 : 0)};
}

/* Rows are counted before they are multiplied: so many fit the shard, whose elements fit
 * a size. */
bool mls_rows_next(mls_rows *rows, uint64_t skip, uint64_t count, mls_extent *out)
{
    const size_t row = rows->row, left = rows->all - rows->at;
    if ((skip == 0 && rows->at > 0) || count == 0 || skip > left || count > left - skip) {
        return false;
    }
    const size_t first = rows->at + (size_t)skip;
    rows->at = first + (size_t)count;
    const size_t end = rows->at == rows->all ? rows->elements : rows->at * row;
    *out = (mls_extent){first * row, end - first * row, rows->held};
    rows->held += out->count;
    return true;
}

/* One comma less than numbers. */
size_t mls_layer_rows_count(mls_text text)
{
    size_t commas = 0;
    for (size_t i = 0; i < text.length; i++) {
        commas += text.data[i] == ',';
    }
    return (commas + 1) / 2;
}

/* Numbers come in pairs, and each pair is a run. */
bool mls_layer_rows_read(mls_rows *rows, mls_text text, mls_extent *runs, size_t *count)
{
    const char *at = text.data, *end = at + text.length;
    uint64_t skip, held;
    *count = 0;
    while (at < end) {
        if (!mls_text_next_number(&at, end, &skip) ||
            !mls_text_next_number(&at, end, &held) ||
            !mls_rows_next(rows, skip, held, &runs[*count])) {
            return false;
        }
        ++*count;
    }
    return *count > 0;
}

/* Each end of a run begins at most one visible extent, and so does the shard. */
size_t mls_layers_room(const mls_layers *layers)
{
    size_t runs = 0;
    for (size_t i = 0; i < layers->count; i++) {
        runs += layers->list[i].row == 0 ? 1 : layers->list[i].run_count;
    }
    return 2 * runs + 1;
}

/* By halves: lists are ascending. */
size_t mls_extents_find(const mls_extent *list, size_t count, size_t element)
{
    size_t low = 0, high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (list[middle].begin + list[middle].count <= element) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* A walk along a shard. */
typedef struct walk {
    const mls_layers *layers;
    size_t elements;
    size_t at;                    /* all before this is done */
    size_t next[MLS_LAYERS_MOST]; /* of each layer the first run that ends behind `at` */
} walk;

/* What is visible from the present place on, and of which layer: its number, or the
 * number of layers for zeros.  False at the end. */
static bool step(walk *w, size_t *which, mls_extent *out)
{
    const size_t count = w->layers->count;
    size_t end = w->elements, i = count;
    if (w->at == end) {
        return false;
    }
    /* zeros up to the end, unless some layer has something to say */
    *which = count;
    *out = (mls_extent){.begin = w->at, .at = w->at};
    while (*which == count && i-- > 0) {
        const mls_layer *layer = &w->layers->list[i];
        if (layer->row == 0) {
            *which = i;
            break;
        }
        while (w->next[i] < layer->run_count &&
               layer->runs[w->next[i]].begin + layer->runs[w->next[i]].count <= w->at) {
            w->next[i]++;
        }
        if (w->next[i] == layer->run_count) {
            continue;
        }
        /* it is here, and ends the search, or it begins later, and ends what is found */
        const mls_extent *run = &layer->runs[w->next[i]];
        if (run->begin <= w->at) {
            *which = i;
            out->at = run->at + (w->at - run->begin);
        }
        const size_t change = run->begin <= w->at ? run->begin + run->count : run->begin;
        end = change < end ? change : end;
    }
    out->count = end - w->at;
    w->at = end;
    return true;
}

/* A single layer shows all that it holds, and between its runs there are zeros: no walk
 * is needed, of shards that were saved once and have thousands of runs. */
static size_t resolve_one(mls_layers *layers, size_t elements, mls_extent *room)
{
    mls_layer *only = &layers->list[0];
    size_t at = 0, count = 0;
    for (size_t i = 0; i < only->run_count; i++) {
        const mls_extent *run = &only->runs[i];
        if (run->begin > at) {
            room[count++] = (mls_extent){at, run->begin - at, at};
        }
        at = run->begin + run->count;
    }
    if (at < elements) {
        room[count++] = (mls_extent){at, elements - at, at};
    }
    only->visible = only->runs;
    only->visible_count = only->run_count;
    layers->zeros = room;
    layers->zero_count = count;
    return count;
}

/* Twice along: the first time to count, so that each layer's extents lie together. */
size_t mls_layers_resolve(mls_layers *layers, size_t elements, mls_extent *room)
{
    if (layers->count == 1 && layers->list[0].row != 0) {
        return resolve_one(layers, elements, room);
    }
    size_t starts[MLS_LAYERS_MOST + 2] = {0}, which;
    mls_extent extent;
    walk w = {.layers = layers, .elements = elements};
    while (step(&w, &which, &extent)) {
        starts[which + 1]++;
    }
    /* counts become places; the zeros come last */
    for (size_t i = 0; i <= layers->count; i++) {
        starts[i + 1] += starts[i];
    }
    for (size_t i = 0; i < layers->count; i++) {
        layers->list[i].visible = room + starts[i];
        layers->list[i].visible_count = starts[i + 1] - starts[i];
    }
    layers->zeros = room + starts[layers->count];
    layers->zero_count = starts[layers->count + 1] - starts[layers->count];
    w = (walk){.layers = layers, .elements = elements};
    while (step(&w, &which, &extent)) {
        room[starts[which]++] = extent;
    }
    /* the end of the last list, to which filling it moved its start */
    return starts[layers->count];
}
