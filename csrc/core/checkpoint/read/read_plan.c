/* read_plan: divides a load's reads into spans, tasks and queues for threads, by their
 * cost, in the order of the files.
 *
 * A place is a byte range of a file that stores a shard or one of its layers, or zeros
 * that are not stored. A piece is what a requested part of the tensor needs of one place.
 * It is read in spans, byte ranges of the place, and threads take tasks of some spans.
 *
 * Costs are measured in bytes that could be read in the same time, so that small tensors
 * and compressed data get realistic weights. */
#include "checkpoint/read/read_plan.h"

#include "base/memory.h"
#include "safetensors/safetensors.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUEUE_COST = 16 * MLS_READ_SPAN, /* long enough for the system's read-ahead */
    SPAN_COST = 16 << 10,            /* fixed cost of a span */
    CODED_COST = 8 /* cost of a compressed byte, relative to an uncompressed one */
};

/* Return whether a piece is zeros that are already in memory. */
static bool is_zero_already(const mls_read_piece *piece)
{
    return piece->data == NULL && piece->shard->file == NULL;
}

/* Return the cost of a span in bytes: a fixed part, and the larger of the bytes read and
 * the bytes written. Compressed bytes count CODED_COST times. */
static uint64_t span_cost(const mls_read_span *s)
{
    const uint64_t bytes = is_zero_already(s->piece) ? 0 : s->end - s->from;
    const uint64_t all = s->zeros_end - s->zeros_from; /* zeros and read data */
    return SPAN_COST + (s->piece->shard->frames != NULL ? CODED_COST * bytes
                        : all > bytes                   ? all
                                                        : bytes);
}

/* Append a copy of span `s` with its cost, and add the cost to the plan's. MLS_E_MEMORY:
 * the plan is unchanged. */
static mls_code add_span(mls_read_plan *plan, mls_read_span s, mls_status *st)
{
    mls_read_span *spans = mls_grow(plan->spans, plan->count, &plan->room, sizeof *spans);
    if (spans == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a plan of %zu parts",
                        plan->count + 1);
    }
    plan->spans = spans;
    s.cost = span_cost(&s);
    plan->spans[plan->count++] = s;
    plan->cost += s.cost;
    return MLS_OK;
}

/* Return where byte `from` (uncompressed) of a place is among its stored bytes; for
 * compressed data, where its frame starts. Cannot exceed the file. */
static size_t stored_offset(const mls_stored_shard *shard, size_t from)
{
    return shard->frames == NULL
               ? from
               : mls_compressed_frame_begin(shard->frames, from / MLS_FRAME_BYTES);
}

/* Destination range of a piece whose gaps are filled with zeros while it is read. */
typedef struct zero_fill {
    size_t from, end; /* equal: no zeros to fill */
    size_t first;     /* element of the shard at byte `from` */
} zero_fill;

/* Return the number of elements in the visible ranges of `shard`, a stored place; 0 if it
 * has no such ranges, since all its elements are visible then. */
static size_t count_visible(const mls_stored_shard *shard)
{
    size_t count = 0;
    for (size_t i = 0; i < shard->visible_count; i++) {
        count += shard->visible[i].count;
    }
    return count;
}

/* Return the destination range of `piece` if `next` is the zeros between its runs, and
 * both have the same contiguous destination; otherwise an empty range. Then data and
 * zeros are written in one pass, while the memory is in the cache. */
static zero_fill find_zero_fill(const mls_read_piece *piece, const mls_read_piece *next)
{
    const zero_fill none = {0};
    const mls_stored_shard *shard = piece->shard;
    const size_t item = shard->item_bytes;
    mls_overlap overlap;
    mls_run first, more;
    mls_stored_range range;
    if (shard->visible == NULL || shard->file == NULL || next->shard->file != NULL ||
        piece->data == NULL || next->data != piece->data || next->to != piece->to ||
        shard->name.data != next->shard->name.data ||
        !mls_part_equal(shard->part, next->shard->part) ||
        count_visible(shard) + count_visible(next->shard) !=
            mls_part_count(shard->part)) {
        return none;
    }
    mls_overlap_init(&overlap, shard->part, piece->to);
    /* exactly one run: the destination is contiguous */
    if (!mls_overlap_next(&overlap, &first) || mls_overlap_next(&overlap, &more) ||
        !mls_stored_range_of(shard, piece->to, &range)) {
        return none;
    }
    return (zero_fill){first.b * item, (first.b + first.count) * item, first.a};
}

/* Return the destination offset of byte `at` of the place, or the end of the range
 * `zeros` if `at` is behind all requested bytes. */
static size_t destination_of(const mls_stored_shard *shard, const zero_fill *zeros,
                             size_t at)
{
    const size_t element = mls_stored_element(shard, at / shard->item_bytes);
    const size_t to = zeros->from + (element - zeros->first) * shard->item_bytes;
    return to < zeros->end ? to : zeros->end;
}

/* Divide a piece into spans, at multiples of the span size from the start of the place,
 * so that no block belongs to two spans. Zeros that are already in memory are not
 * divided. `zeros`, if not empty, is the range of the destination to fill: each span
 * fills the zeros up to the next span. MLS_E_FORMAT: the place exceeds its file;
 * MLS_E_MEMORY. */
static mls_code plan_spans(mls_read_plan *plan, const mls_read_piece *piece,
                           const zero_fill *zeros, mls_status *st)
{
    const mls_stored_shard *shard = piece->shard;
    size_t bytes;
    mls_stored_range range;
    if (!mls_stored_bytes(shard, &bytes)) {
        mls_fail_at(st, shard->offset, "its records exceed the length of the file");
        mls_status_expected(st, "at most %llu bytes",
                            (unsigned long long)shard->file_bytes);
        return mls_stored_blame(shard, st);
    }
    if (!mls_stored_range_of(shard, piece->to, &range)) {
        return MLS_OK;
    }
    size_t from = range.from;
    for (size_t zeros_from = zeros->from; from < range.end;) {
        const bool fills = zeros->end > 0;
        /* a span also writes the zeros between its elements, perhaps far more bytes */
        const size_t most = fills ? MLS_SAFETENSORS_BLOCK : MLS_READ_SPAN;
        const size_t left = range.end - from, room = most - from % most;
        const size_t length = left < room || is_zero_already(piece) ? left : room;
        const size_t zeros_end = !fills ? 0
                                 : length == left
                                     ? zeros->end
                                     : destination_of(shard, zeros, from + length);
        const mls_read_span next = {.piece = piece,
                                    .from = from,
                                    .end = from + length,
                                    .to = range.together ? range.to + (from - range.from)
                                                         : SIZE_MAX,
                                    .zeros_from = zeros_from,
                                    .zeros_end = zeros_end,
                                    .file = shard->file == NULL ? "" : shard->file,
                                    .at = shard->offset + stored_offset(shard, from)};
        const mls_code code = add_span(plan, next, st);
        if (code != MLS_OK) {
            return mls_stored_blame(shard, st);
        }
        from += length;
        zeros_from = zeros_end;
    }
    return MLS_OK;
}

/* Order by file only; equal names usually have the same address. */
static int compare_names(const mls_read_span *x, const mls_read_span *y)
{
    return x->file == y->file ? 0 : strcmp(x->file, y->file);
}

/* Order for qsort of pointers to spans: by file, then offset. The address breaks ties, so
 * that the order does not depend on qsort. */
static int compare_places(const void *a, const void *b)
{
    const mls_read_span *x = *(const mls_read_span *const *)a;
    const mls_read_span *y = *(const mls_read_span *const *)b;
    const int names = compare_names(x, y);
    if (names != 0) {
        return names;
    }
    if (x->at != y->at) {
        return x->at < y->at ? -1 : 1;
    }
    return x < y ? -1 : x > y;
}

/* Order for qsort of pointers to spans: by file only. */
static int compare_files(const void *a, const void *b)
{
    return compare_names(*(const mls_read_span *const *)a,
                         *(const mls_read_span *const *)b);
}

/* Return whether the spans of each file are consecutive and ascending. Then the order of
 * the pieces is kept, which is the best order: destinations are allocated in it.
 * Overwrites `plan->order`, with the first span of each file. */
static bool are_spans_sorted(mls_read_plan *plan)
{
    size_t files = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const mls_read_span *s = &plan->spans[i];
        if (i == 0 || compare_names(s - 1, s) != 0) {
            plan->order[files++] = s;
        } else if (s[-1].at > s->at) {
            return false;
        }
    }
    qsort(plan->order, files, sizeof *plan->order, compare_files);
    for (size_t i = 1; i < files; i++) {
        if (compare_names(plan->order[i - 1], plan->order[i]) == 0) {
            return false;
        }
    }
    return true;
}

/* Set `plan->order` to all spans: in the order of the pieces if the spans of each file
 * are consecutive and ascending there, as is usual; otherwise by file and offset. */
static void sort_spans(mls_read_plan *plan)
{
    const bool sorted = are_spans_sorted(plan);
    for (size_t i = 0; i < plan->count; i++) {
        plan->order[i] = &plan->spans[i];
    }
    if (!sorted) {
        qsort(plan->order, plan->count, sizeof *plan->order, compare_places);
    }
}

/* Group neighbours in `order` into tasks that cost at most one full span, or have a
 * single span. `tasks[i]` is the first span of task i; one further entry marks the
 * end. */
static void group_tasks(mls_read_plan *plan)
{
    uint64_t cost = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const mls_read_span *s = plan->order[i];
        if (i == 0 || cost + s->cost > MLS_READ_SPAN + SPAN_COST) {
            plan->tasks[plan->task_count++] = i;
            cost = 0;
        }
        cost += s->cost;
    }
    plan->tasks[plan->task_count] = plan->count;
}

/* Group consecutive tasks of one file into work queues, each ended when it costs
 * QUEUE_COST or more: short enough that threads do not wait for destinations or for each
 * other. `queues[i]` is the first task of queue i; one further entry marks the end. */
static void divide_into_queues(mls_read_plan *plan)
{
    uint64_t cost = 0;
    for (size_t i = 0; i < plan->task_count; i++) {
        const size_t first = plan->tasks[i];
        if (i == 0 || cost >= QUEUE_COST ||
            compare_names(plan->order[first - 1], plan->order[first]) != 0) {
            plan->queues[plan->queue_count++] = i;
            cost = 0;
        }
        for (size_t j = first; j < plan->tasks[i + 1]; j++) {
            cost += plan->order[j]->cost;
        }
    }
    plan->queues[plan->queue_count] = plan->task_count;
}

/* Divide the pieces into spans, sort the spans, and group them into tasks and work
 * queues. After MLS_E_FORMAT the pieces before the invalid one are still planned; after
 * MLS_E_MEMORY the list is empty. */
mls_code mls_read_plan_make(mls_read_plan *plan, const mls_read_piece *pieces,
                            size_t count, size_t *planned, mls_status *st)
{
    mls_code code = MLS_OK;
    *planned = 0;
    while (*planned < count) {
        const mls_read_piece *piece = &pieces[*planned];
        zero_fill zeros = {0};
        if (*planned + 1 < count) {
            zeros = find_zero_fill(piece, piece + 1);
        }
        code = plan_spans(plan, piece, &zeros, st);
        if (code != MLS_OK) {
            break;
        }
        /* the next piece is these zeros: its spans are planned too */
        *planned += zeros.end > 0 ? 2 : 1;
    }
    if (code == MLS_E_MEMORY) {
        return code;
    }
    plan->order = mls_alloc(plan->count, sizeof *plan->order);
    plan->tasks = mls_alloc(plan->count + 1, sizeof *plan->tasks);
    plan->queues = mls_alloc(plan->count + 1, sizeof *plan->queues);
    if (plan->order == NULL || plan->tasks == NULL || plan->queues == NULL) {
        *planned = 0;
        return mls_fail(st, MLS_E_MEMORY, "no memory to read %zu parts", plan->count);
    }
    sort_spans(plan);
    group_tasks(plan);
    divide_into_queues(plan);
    return code;
}

/* Free the arrays of a plan, but not the pieces. */
void mls_read_plan_fini(mls_read_plan *plan)
{
    mls_free(plan->spans);
    mls_free(plan->order);
    mls_free(plan->tasks);
    mls_free(plan->queues);
    *plan = (mls_read_plan){0};
}
