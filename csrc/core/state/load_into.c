/* load_into: refuses pairs of tensors that differ or overlap, then copies all pairs with
 * threads.
 *
 * Planning has three steps. First, each pair is read once and summarised in a short item,
 * because a view takes a kilobyte and ten thousand views exceed the cache. Second, the
 * address ranges of all reads and writes are sorted and swept, in O(n log n). This finds
 * a destination that shares memory with a source, and destinations that share memory with
 * each other. Third, the copies are listed as chunks, and the chunks are grouped into
 * tasks; a thread takes one task at a time.
 *
 * A task has about PART bytes: many small tensors, or one chunk of a large one. For one
 * thread, plain copies are not divided.
 * Destinations that share memory form one task of any size, with their chunks in the
 * order of the pairs.
 */
#include "state/load_into.h"

#include "array/overlap.h"
#include "array/strided_iter.h"
#include "base/address_ranges.h"
#include "base/memory.h"
#include "base/size.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum {
    PART = 256 << 10, /* bytes of a task: 8 us of copying */
    AHEAD = 4,        /* pairs to prefetch ahead */
    SHOWN_NAME = 72   /* bytes of a name that a message shows */
};

/* One copy by one thread. */
typedef struct chunk {
    const mls_load_into_pair *pair; /* NULL: a plain copy of bytes */
    unsigned char *to;
    const unsigned char *from;
    size_t size; /* plain: bytes; else: rows along the axis that is divided, or 0 for the
                    whole pair */
} chunk;

struct mls_load_into {
    size_t bytes; /* total bytes to write */
    chunk *chunks;
    size_t *starts; /* first chunk of each task, and the end of the last task */
    size_t tasks;
};

/* ---- dividing a pair ---- */

/* Describe both views of a pair with as few axes as possible, outermost first, in `dst`
 * and `src`. Negative strides stay negative. Returns false if the views have no
 * elements. */
static bool simplify_axes(const mls_load_into_pair *pair, mls_tensor *dst,
                          mls_tensor *src)
{
    mls_strided_iter iter;
    if (!mls_strided_iter_init(&iter, pair->dst, pair->src)) {
        return false;
    }
    *dst = *pair->dst;
    *src = *pair->src;
    dst->rank = src->rank = iter.rank + 1;
    for (int axis = 0; axis <= iter.rank; axis++) {
        const bool is_innermost = axis == iter.rank; /* the run of the iterator */
        dst->shape[axis] = src->shape[axis] =
            is_innermost ? iter.length : iter.shape[axis];
        dst->strides[axis] = is_innermost ? iter.a_step : iter.a_strides[axis];
        src->strides[axis] = is_innermost ? iter.b_step : iter.b_strides[axis];
    }
    return true;
}

/* Return the outermost axis of `reduced` (from simplify_axes) that has at most PART bytes
 * for one index, and in `*rows` the number of its indices in a chunk. `bytes` is the size
 * of the whole view. The innermost axis always qualifies: its indices are single
 * elements. */
static int choose_split_axis(const mls_tensor *reduced, size_t bytes, size_t *rows)
{
    int axis = 0;
    size_t inner = bytes / reduced->shape[0];
    while (inner > PART) {
        axis++;
        inner /= reduced->shape[axis];
    }
    *rows = PART / inner;
    return axis;
}

/* Return the byte offset of an element from the view's first one. `number` counts its
 * position over the first `axes` axes in C order; its other indices are 0. */
static ptrdiff_t offset_of(const mls_tensor *t, int axes, size_t number)
{
    ptrdiff_t offset = 0;
    for (int axis = axes - 1; axis >= 0; axis--) {
        offset += t->strides[axis] * (ptrdiff_t)(number % t->shape[axis]);
        number /= t->shape[axis];
    }
    return offset;
}

/* ---- data of the planner ---- */

/* Summary of a pair. Zero bytes: nothing to copy. */
typedef struct item {
    size_t bytes;
    unsigned char *to;
    const unsigned char *from;
    bool plain;     /* packed on both sides, with equal dtype and byte order */
    size_t cluster; /* group of destinations that share memory, from 1; 0: none */
    size_t next;    /* next pair of the cluster, or `count` */
} item;

/* State during planning; only `load` survives it. */
typedef struct planner {
    const mls_load_into_pair *pairs;
    size_t count;
    bool cast;                         /* dtypes may be converted */
    size_t threads;                    /* that will run the plan */
    item *items;                       /* one for each pair */
    mls_address_range *ranges, *spare; /* two per pair; at first, the reads are in
                                          `ranges` and the writes in `spare` */
    size_t reads, writes;              /* numbers of ranges */
    size_t clusters;
    size_t *heads; /* first pair of each cluster, or `count` */
    mls_load_into *load;
    size_t room, chunks; /* capacity and number of chunks */
    size_t filled;       /* bytes in the current task */
    mls_status *st;
} planner;

/* ---- checks ---- */

typedef struct quoted {
    char text[SHOWN_NAME + 8];
} quoted;

/* Return the name in quotes for a message, cut off after SHOWN_NAME bytes with "...".
 * Continuation bytes of UTF-8 begin with the bits 10, so a character is never split. */
static quoted quote_name(mls_str name)
{
    size_t length = name.length;
    if (length > SHOWN_NAME) {
        length = SHOWN_NAME;
        while (length > 0 && ((unsigned char)name.data[length] & 0xC0U) == 0x80U) {
            length--;
        }
    }
    quoted q;
    snprintf(q.text, sizeof q.text, "'%.*s%s'", (int)length, length == 0 ? "" : name.data,
             length < name.length ? "..." : "");
    return q;
}

/* Add the pair's name to the error in `st`, and return the error's code. The data of an
 * empty name may be NULL. */
static mls_code add_pair_name(mls_status *st, const mls_load_into_pair *pair)
{
    if (pair->name.length > 0) {
        mls_status_name(st, pair->name.data, pair->name.length);
    }
    return st->code;
}

/* Check shapes and dtypes of a pair: MLS_E_SHAPE; MLS_E_DTYPE, also for any two different
 * dtypes unless `cast`. In errors, "expected" is the source and "got" the target. The
 * name is quoted only on failure, because that is slow. */
static mls_code check_kind(const mls_load_into_pair *pair, bool cast, mls_status *st)
{
    const mls_dtype to = pair->dst->dtype, from = pair->src->dtype;
    const bool is_copyable = mls_copy_check(pair->dst, pair->src, "", st) == MLS_OK;
    if (is_copyable && (to == from || cast)) {
        return MLS_OK;
    }
    const quoted name = quote_name(pair->name);
    if (!is_copyable) {
        /* once more, for a message with the name */
        (void)mls_copy_check(pair->dst, pair->src, name.text, st);
        return add_pair_name(st, pair);
    }
    mls_fail(st, MLS_E_DTYPE,
             "%s: the target has dtype %s, the source %s, and nothing is converted",
             name.text, mls_dtype_of(to)->name, mls_dtype_of(from)->name);
    mls_status_expected(st, "%s", mls_dtype_of(from)->name);
    mls_status_got(st, "%s", mls_dtype_of(to)->name);
    return add_pair_name(st, pair);
}

/* Return whether two views of equal shapes are the same elements. The byte order of
 * single bytes does not matter. */
static bool is_same(const mls_tensor *a, const mls_tensor *b)
{
    return a->dtype == b->dtype &&
           (a->swapped == b->swapped || mls_tensor_item_bytes(a) == 1) &&
           mls_tensor_same_view(a, b);
}

/* Return whether a pair is one copy of consecutive bytes: both sides packed in the same
 * order, with equal dtype and byte order. */
static bool is_single_copy(const mls_load_into_pair *pair)
{
    const mls_tensor *dst = pair->dst, *src = pair->src;
    const size_t bytes = mls_tensor_item_bytes(dst);
    if (dst->dtype != src->dtype || (dst->swapped != src->swapped && bytes > 1)) {
        return false;
    }
    if (mls_tensor_is_contiguous(dst) && mls_tensor_is_contiguous(src)) {
        return true;
    }
    mls_strided_iter iter; /* packed in the same other order on both sides */
    return mls_strided_iter_init(&iter, dst, src) && iter.rank == 0 &&
           iter.a_step == (ptrdiff_t)bytes && iter.b_step == (ptrdiff_t)bytes;
}

/* Append the address range of a view to `ranges`, and count it in `*count`, if the view
 * has elements. `pair` is the number of its pair; `written` tells a target from a
 * source. */
static void add_range(mls_address_range *ranges, size_t *count, const mls_tensor *t,
                      size_t pair, bool written)
{
    mls_address_range range = {.owner = pair, .written = written};
    if (mls_tensor_range(t, &range.low, &range.high)) {
        ranges[(*count)++] = range;
    }
}

/* Prefetch the views of pair `index`, if it exists: two cache lines of each, too far
 * apart for the hardware prefetcher. Without it, waiting for them took a third of the
 * time (measured with ten thousand pairs outside the cache). */
static void prefetch_pair(const planner *p, size_t index)
{
    if (index < p->count) {
        const mls_load_into_pair *pair = &p->pairs[index];
        __builtin_prefetch(pair->dst);
        __builtin_prefetch(pair->dst->strides);
        __builtin_prefetch(pair->src);
        __builtin_prefetch(pair->src->strides);
    }
}

/* Check pair `index` alone, fill its item, and list the address ranges that it reads
 * and writes. A pair of two identical views is only read: its item stays zeroed, with 0
 * bytes to copy. MLS_E_SHAPE, MLS_E_DTYPE. MLS_E_OVERLAP: elements of the target share
 * memory; that is certain too if its bytes exceed size_t, since memory has fewer. */
static mls_code check_pair(planner *p, size_t index)
{
    const mls_load_into_pair *pair = &p->pairs[index];
    item *entry = &p->items[index];
    const mls_code code = check_kind(pair, p->cast, p->st);
    if (code != MLS_OK) {
        return code;
    }
    add_range(p->ranges, &p->reads, pair->src, index, false /* a source */);
    if (is_same(pair->dst, pair->src)) {
        return MLS_OK;
    }
    if (mls_tensor_overlaps_itself(pair->dst) ||
        !mls_tensor_bytes(pair->dst, &entry->bytes)) {
        mls_fail(p->st, MLS_E_OVERLAP,
                 "%s: elements of the target share memory with one another, as in a "
                 "broadcast view: load into a copy of it",
                 quote_name(pair->name).text);
        return add_pair_name(p->st, pair);
    }
    entry->to = pair->dst->data;
    entry->from = pair->src->data;
    entry->plain = is_single_copy(pair);
    add_range(p->spare, &p->writes, pair->dst, index, true /* a target */);
    if (!mls_size_add(p->load->bytes, entry->bytes, &p->load->bytes)) {
        p->load->bytes =
            SIZE_MAX; /* saturates; needed only to tell whether the load is large */
    }
    return MLS_OK;
}

/* ---- destinations that share memory ---- */

/* Fail because the target of pair number `written` shares memory with the source of pair
 * number `read`, which may be the same pair. Returns MLS_E_OVERLAP. */
static mls_code fail_overlap(planner *p, size_t written, size_t read)
{
    const mls_load_into_pair *pair = &p->pairs[written];
    const quoted name = quote_name(pair->name);
    if (written == read) {
        mls_fail(p->st, MLS_E_OVERLAP,
                 "%s: the target shares memory with its own source but is another view "
                 "of it: load from a copy",
                 name.text);
    } else {
        mls_fail(p->st, MLS_E_OVERLAP,
                 "%s: the target shares memory with the source of %s: load from a copy",
                 name.text, quote_name(p->pairs[read].name).text);
    }
    return add_pair_name(p->st, pair);
}

/* Put the target of pair number `pair` into the cluster of pair number `other`, which
 * gets a new one if it has none: an earlier range of the sweep, whose memory it shares.
 */
static void join_cluster(planner *p, size_t pair, size_t other)
{
    if (p->items[other].cluster == 0) {
        p->items[other].cluster = ++p->clusters;
    }
    p->items[pair].cluster = p->items[other].cluster;
}

/* Compare each read with each write whose ranges overlap, exactly: views may interleave
 * without sharing an element. `sorted` has `count` ranges by ascending start.
 * MLS_E_OVERLAP. */
static mls_code compare_views(planner *p, const mls_address_range *sorted, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t j = i + 1; j < count && sorted[j].low < sorted[i].high; j++) {
            if (sorted[i].written == sorted[j].written) {
                continue;
            }
            const bool is_write_first = sorted[i].written;
            const size_t written = sorted[is_write_first ? i : j].owner;
            const size_t read = sorted[is_write_first ? j : i].owner;
            if (mls_tensor_overlap(p->pairs[written].dst, p->pairs[read].src)) {
                return fail_overlap(p, written, read);
            }
        }
    }
    return MLS_OK;
}

/* Find targets that share memory: with each other, they become a cluster; with a source,
 * that is MLS_E_OVERLAP. Sweeps the sorted ranges of all reads and writes, and keeps only
 * the range with the highest end among the reads and among the writes. The views
 * themselves are compared only if a read and a write overlap. */
static mls_code find_overlaps(planner *p)
{
    const mls_address_range *top[2] = {NULL, NULL}; /* index 0: reads, 1: writes */
    bool has_read_in_write = false;
    const size_t count = p->reads + p->writes;
    memcpy(p->ranges + p->reads, p->spare, p->writes * sizeof *p->ranges);
    const mls_address_range *sorted = mls_address_ranges_sort(p->ranges, p->spare, count);
    for (size_t i = 0; i < count; i++) {
        const mls_address_range *range = &sorted[i];
        const mls_address_range *other = top[!range->written]; /* of the other kind */
        const mls_address_range *same = top[range->written];   /* of the same kind */
        has_read_in_write =
            has_read_in_write || (other != NULL && range->low < other->high);
        if (range->written && same != NULL && range->low < same->high) {
            join_cluster(p, range->owner, same->owner);
        }
        if (same == NULL || range->high > same->high) {
            top[range->written] = range;
        }
    }
    return has_read_in_write ? compare_views(p, sorted, count) : MLS_OK;
}

/* Link the pairs of each cluster in ascending order, from `heads`. Iterates backwards, so
 * that each pair is prepended. */
static void link_clusters(planner *p)
{
    for (size_t cluster = 0; cluster < p->clusters; cluster++) {
        p->heads[cluster] = p->count;
    }
    for (size_t pair = p->count; pair-- > 0;) {
        item *entry = &p->items[pair];
        if (entry->cluster > 0) {
            entry->next = p->heads[entry->cluster - 1];
            p->heads[entry->cluster - 1] = pair;
        }
    }
}

/* ---- chunks and tasks ---- */

/* Report MLS_E_MEMORY for a plan of `count` pairs. */
static mls_code no_memory(mls_status *st, size_t count)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory to plan the loading of %zu tensors",
                    count);
}

/* Ensure room for one more chunk, and for the start and the end of the task that it may
 * begin. Returns false if memory runs out. */
static bool reserve_chunk(planner *p)
{
    if (p->chunks < p->room) {
        return true;
    }
    size_t room;
    if (!mls_size_mul(p->room == 0 ? p->count : p->room, 2, &room)) {
        return false;
    }
    chunk *chunks = mls_realloc(p->load->chunks, room, sizeof *chunks);
    if (chunks == NULL) {
        return false;
    }
    p->load->chunks = chunks;
    /* at most one task for each chunk, and the end of the last one */
    size_t *starts = mls_realloc(p->load->starts, room + 1, sizeof *starts);
    if (starts == NULL) {
        return false;
    }
    p->load->starts = starts;
    starts[0] = 0;
    p->room = room;
    return true;
}

/* End the current task, unless it is empty: the chunks since the previous end belong to
 * it. */
static void end_task(planner *p)
{
    mls_load_into *load = p->load;
    if (p->filled > 0) {
        load->starts[++load->tasks] = p->chunks;
        p->filled = 0;
    }
}

/* Append the chunk `part`, of `bytes` bytes, to the current task, or to a new one if the
 * current one would exceed PART bytes. With `together` it always joins the current one.
 * Returns false if memory runs out. */
static bool add_chunk(planner *p, chunk part, size_t bytes, bool together)
{
    if (!reserve_chunk(p)) {
        return false;
    }
    if (!together && bytes > PART - (p->filled < PART ? p->filled : PART)) {
        end_task(p);
    }
    p->load->chunks[p->chunks++] = part;
    p->filled += bytes;
    return true;
}

/* Append pair `index` as one chunk. A chunk without a pair is a plain copy of `size`
 * bytes; with a pair and size 0 it is the whole pair. `together`: as in add_chunk.
 * Returns false if memory runs out. */
static bool add_unsplit(planner *p, size_t index, bool together)
{
    const mls_load_into_pair *pair = &p->pairs[index];
    const item *entry = &p->items[index];
    const chunk unsplit = {.pair = entry->plain ? NULL : pair,
                           .to = entry->to,
                           .from = entry->from,
                           .size = entry->plain ? entry->bytes : 0};
    return add_chunk(p, unsplit, entry->bytes, together);
}

/* Divide a plain pair into chunks; the last one may be shorter and may share a task. If
 * one thread copies all, it is one chunk, for one memcpy as in NumPy: glibc stores many
 * MiB past the cache, but not PART bytes. Returns false if memory runs out. */
static bool split_copy(planner *p, const item *entry)
{
    const bool is_shared = p->threads > 1 && p->load->bytes >= MLS_POOL_COPY_BYTES;
    bool fits = true;
    for (size_t at = 0, size; at < entry->bytes && fits; at += size) {
        const size_t rest = entry->bytes - at;
        size = is_shared ? mls_size_least(rest, PART) : rest;
        fits = add_chunk(
            p, (chunk){.to = entry->to + at, .from = entry->from + at, .size = size},
            size, false);
    }
    return fits;
}

/* Divide a strided pair of `bytes` bytes into chunks of some rows of one axis, separately
 * for every index of the outer axes. One such index exceeds PART bytes, so there are few
 * of them. Returns false if memory runs out. */
static bool split_strided(planner *p, const mls_load_into_pair *pair, size_t bytes)
{
    mls_tensor dst, src;
    size_t rows;
    if (!simplify_axes(pair, &dst, &src)) {
        return true;
    }
    const int axis = choose_split_axis(&dst, bytes, &rows);
    const size_t length = dst.shape[axis];
    size_t row_bytes = mls_tensor_item_bytes(&dst), outer = 1;
    for (int i = 0; i < dst.rank; i++) {
        row_bytes *= i > axis ? dst.shape[i] : 1;
        outer *= i < axis ? dst.shape[i] : 1;
    }
    bool fits = true;
    for (size_t number = 0; number < outer && fits; number++) {
        const ptrdiff_t to = offset_of(&dst, axis, number);
        const ptrdiff_t from = offset_of(&src, axis, number);
        for (size_t row = 0; row < length && fits; row += rows) {
            const size_t size = length - row < rows ? length - row : rows;
            const chunk part = {pair, dst.data + to + dst.strides[axis] * (ptrdiff_t)row,
                                src.data + from + src.strides[axis] * (ptrdiff_t)row,
                                size};
            fits = add_chunk(p, part, size * row_bytes, false);
        }
    }
    return fits;
}

/* Append the clusters: pairs whose targets overlap, so that one task writes them in
 * order. They come first, because they may be long and other threads must find work
 * meanwhile. Returns false if memory runs out. */
static bool add_clusters(planner *p)
{
    bool fits = true;
    for (size_t cluster = 0; cluster < p->clusters; cluster++) {
        size_t pair = p->heads[cluster];
        for (; pair < p->count && fits; pair = p->items[pair].next) {
            fits = add_unsplit(p, pair, true /* in one task */);
        }
        end_task(p);
    }
    return fits;
}

/* Append the pairs outside clusters that have bytes to copy, large ones in several
 * chunks. Returns false if memory runs out. */
static bool add_others(planner *p)
{
    bool fits = true;
    for (size_t i = 0; i < p->count && fits; i++) {
        const item *entry = &p->items[i];
        if (entry->bytes == 0 || entry->cluster > 0) {
            continue;
        }
        if (entry->bytes <= PART) {
            fits = add_unsplit(p, i, false /* in any task */);
        } else if (entry->plain) {
            fits = split_copy(p, entry);
        } else {
            fits = split_strided(p, &p->pairs[i], entry->bytes);
        }
    }
    end_task(p);
    return fits;
}

/* ---- the plan ---- */

/* Check all pairs, then divide them into chunks and tasks. MLS_E_SHAPE, MLS_E_DTYPE,
 * MLS_E_OVERLAP, MLS_E_MEMORY: the caller frees the plan. */
static mls_code make_plan(planner *p)
{
    mls_code code = MLS_OK;
    for (size_t i = 0; i < p->count && code == MLS_OK; i++) {
        prefetch_pair(p, i + AHEAD);
        code = check_pair(p, i);
    }
    if (code == MLS_OK) {
        code = find_overlaps(p);
    }
    if (code != MLS_OK) {
        return code;
    }
    p->heads = mls_alloc(p->clusters, sizeof *p->heads);
    if (p->heads == NULL) {
        return no_memory(p->st, p->count);
    }
    link_clusters(p);
    if (!add_clusters(p) || !add_others(p)) {
        return no_memory(p->st, p->count);
    }
    return MLS_OK;
}

/* Check and plan a load. The arrays of the planner are freed at the end; the plan keeps
 * only chunks and tasks. */
mls_code mls_load_into_new(const mls_load_into_pair *pairs, size_t count, bool cast,
                           size_t threads, mls_load_into **out, mls_status *st)
{
    planner p = {
        .pairs = pairs, .count = count, .cast = cast, .threads = threads, .st = st};
    mls_code code;
    p.load = mls_alloc(1, sizeof *p.load);
    p.items = mls_alloc(count, sizeof *p.items);
    p.ranges = mls_alloc(count, 2 * sizeof *p.ranges);
    p.spare = mls_alloc(count, 2 * sizeof *p.spare);
    if (p.load == NULL || p.items == NULL || p.ranges == NULL || p.spare == NULL) {
        code = no_memory(st, count);
        goto done;
    }
    code = make_plan(&p);
    if (code == MLS_OK) {
        *out = p.load;
        p.load = NULL;
    }
done:
    mls_load_into_free(p.load);
    mls_free(p.items);
    mls_free(p.ranges);
    mls_free(p.spare);
    mls_free(p.heads);
    return code;
}

size_t mls_load_into_bytes(const mls_load_into *load)
{
    return load->bytes;
}

/* ---- running ---- */

typedef struct job {
    const mls_load_into *load;
    const mls_kernels *kernels;
    mls_destination destination;
} job;

/* Copy the chunk `part` of some rows of one axis, as smaller views: the outer axes have
 * length 1. The axis is chosen again as in split_strided. */
static void copy_rows(const job *j, const chunk *part)
{
    mls_tensor dst, src;
    size_t bytes = 0, rows;
    if (!simplify_axes(part->pair, &dst, &src)) {
        return;
    }
    (void)mls_tensor_bytes(&dst, &bytes); /* cannot overflow: checked while planning */
    const int axis = choose_split_axis(&dst, bytes, &rows);
    for (int outer = 0; outer < axis; outer++) {
        dst.shape[outer] = src.shape[outer] = 1;
    }
    dst.shape[axis] = src.shape[axis] = part->size;
    dst.data = part->to;
    /* only read, although the view is not const */
    src.data += part->from - src.data;
    mls_copy(j->kernels, &dst, &src, j->destination);
}

/* Thread function: copy the chunks of task `task` in order; see add_unsplit for the kinds
 * of chunks. */
static void run_task(void *context, size_t task)
{
    const job *j = context;
    const mls_load_into *load = j->load;
    for (size_t i = load->starts[task]; i < load->starts[task + 1]; i++) {
        const chunk *part = &load->chunks[i];
        if (part->pair == NULL) { /* bytes */
            mls_copy_bytes(j->kernels, part->to, part->from, part->size, j->destination);
        } else if (part->size == 0) { /* a whole pair */
            mls_copy(j->kernels, part->pair->dst, part->pair->src, j->destination);
        } else {
            copy_rows(j, part);
        }
    }
}

/* Run all tasks. All tensors count as one destination: together they may exceed the cache
 * although each of them fits. */
void mls_load_into_run(const mls_load_into *load, const mls_kernels *kernels,
                       mls_pool *pool)
{
    job j = {.load = load, .kernels = kernels, .destination.bytes = load->bytes};
    mls_pool *shared = load->bytes >= MLS_POOL_COPY_BYTES ? pool : NULL;
    mls_pool_run(shared, run_task, &j, load->tasks);
}

/* Free a plan, but no tensor; accepts NULL. */
void mls_load_into_free(mls_load_into *load)
{
    if (load != NULL) {
        mls_free(load->chunks);
        mls_free(load->starts);
        mls_free(load);
    }
}
