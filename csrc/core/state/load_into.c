/* load: a plan first, then the copies.
 *
 * The plan is made in three steps.  Each pair is looked at once, since a view takes a
 * kilobyte and ten thousand of them no longer fit a cache: what is needed later goes into
 * short items.  Then the address ranges of everything written and read are sorted and
 * swept, which finds a destination that shares memory with a source, and destinations
 * that share memory with each other, in n log n.  At last the copies are listed as pieces
 * and the pieces grouped into tasks, one of which a thread takes at a time.
 *
 * A task is about PART bytes: many small tensors, or one piece of a large one.
 * Destinations that share memory form one task, whatever its size, and their pieces are
 * in the order of the pairs.
 */
#include "state/load_into.h"

#include "base/memory.h"
#include "base/size.h"
#include "base/address_ranges.h"
#include "array/strided_iter.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum {
    PART = 256 << 10, /* bytes of a task: 8 us of copying */
    AHEAD = 4,        /* pairs */
    SHOWN_NAME = 72   /* bytes of a name that go into a message */
};

/* One copy that a thread makes at a stretch. */
typedef struct piece {
    const mls_load_pair *pair; /* NULL: plain bytes on both sides */
    unsigned char *to;
    const unsigned char *from;
    size_t size; /* plain: bytes; else rows along the axis that is cut, 0 for all of the
                    pair */
} piece;

struct mls_load {
    size_t bytes; /* in all */
    piece *pieces;
    size_t *starts; /* of each task's pieces, and the end of the last */
    size_t tasks;
};

/* ---- how a pair is cut ---- */

/* Both views with as few axes as they need, the outermost first.  Strides that go the
 * other way keep doing so.  False where there are no elements. */
static bool reduce(const mls_load_pair *pair, mls_tensor *dst, mls_tensor *src)
{
    mls_walk w;
    if (!mls_walk_init(&w, pair->dst, pair->src)) {
        return false;
    }
    *dst = *pair->dst;
    *src = *pair->src;
    dst->rank = src->rank = w.rank + 1;
    for (int axis = 0; axis <= w.rank; axis++) {
        const bool run = axis == w.rank;
        dst->shape[axis] = src->shape[axis] = run ? w.length : w.shape[axis];
        dst->strides[axis] = run ? w.a_step : w.a_strides[axis];
        src->strides[axis] = run ? w.b_step : w.b_strides[axis];
    }
    return true;
}

/* The outermost axis one index of which is at most PART, and the indices of it that make
 * a piece.  One of the innermost axis is an element, so there always is such an axis. */
static int cut_axis(const mls_tensor *reduced, size_t bytes, size_t *rows)
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

/* Where the element at index `number` of the first `axes` axes, counted like the digits
 * of a number, lies behind the view's first one. */
static ptrdiff_t offset_of(const mls_tensor *t, int axes, size_t number)
{
    ptrdiff_t offset = 0;
    for (int axis = axes - 1; axis >= 0; axis--) {
        offset += t->strides[axis] * (ptrdiff_t)(number % t->shape[axis]);
        number /= t->shape[axis];
    }
    return offset;
}

/* ---- what a plan is made from ---- */

/* What later steps need of a pair.  Zero bytes: nothing to do. */
typedef struct item {
    size_t bytes;
    unsigned char *to;
    const unsigned char *from;
    bool plain;     /* packed on both sides and the same bytes */
    size_t cluster; /* of destinations that share memory, from 1; 0: it shares none */
    size_t next;    /* the pair after it in the cluster, or `count` */
} item;

/* Everything that is gone when the plan stands. */
typedef struct planner {
    const mls_load_pair *pairs;
    size_t count;
    bool cast;
    item *items;
    mls_span *spans, *spare; /* room for two per pair each; first, what is read is in the
                                one and what is written in the other */
    size_t reads, writes;
    size_t clusters;
    size_t *heads; /* the first pair of each cluster, or `count` */
    mls_load *load;
    size_t room, pieces; /* how many there may be, and are */
    size_t filled;       /* bytes of the task that is being filled */
    mls_status *st;
} planner;

/* ---- checks ---- */

/* A name in quotes, as far as messages have room, cut between characters. */
typedef struct quoted {
    char text[SHOWN_NAME + 8];
} quoted;

/* Continuation bytes of UTF-8 begin with 10: a cut never leaves half a character. */
static quoted quote(mls_text name)
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

/* Add the pair's name to the failure that was just filled in; an empty one may have no
 * bytes to point at. */
static mls_code named(mls_status *st, const mls_load_pair *pair)
{
    if (pair->name.length > 0) {
        mls_status_name(st, pair->name.data, pair->name.length);
    }
    return st->code;
}

/* MLS_E_SHAPE, MLS_E_DTYPE.  Without `cast`, dtypes that would convert are refused too.
 * The name is made ready only for a failure. */
static mls_code check_kind(const mls_load_pair *pair, bool cast, mls_status *st)
{
    const mls_dtype to = pair->dst->dtype, from = pair->src->dtype;
    const bool copies = mls_copy_check(pair->dst, pair->src, "", st) == MLS_OK;
    if (copies && (to == from || cast)) {
        return MLS_OK;
    }
    const quoted name = quote(pair->name);
    if (!copies) {
        (void)mls_copy_check(pair->dst, pair->src, name.text, st);
        return named(st, pair);
    }
    mls_fail(st, MLS_E_DTYPE,
             "%s: the target has dtype %s, the source %s, and nothing is converted",
             name.text, mls_dtype_of(to)->name, mls_dtype_of(from)->name);
    mls_status_expected(st, "%s", mls_dtype_of(from)->name);
    mls_status_got(st, "%s", mls_dtype_of(to)->name);
    return named(st, pair);
}

/* Whether two views of equal shapes are one and the same.  Strides along an axis of one
 * index say nothing, and a byte has no order. */
static bool same_view(const mls_tensor *a, const mls_tensor *b)
{
    if (a->data != b->data || a->dtype != b->dtype ||
        (a->swapped != b->swapped && mls_tensor_item_bytes(a) > 1)) {
        return false;
    }
    for (int axis = 0; axis < a->rank; axis++) {
        if (a->shape[axis] > 1 && a->strides[axis] != b->strides[axis]) {
            return false;
        }
    }
    return true;
}

/* Whether no two elements of a view share memory, as far as it is easy to tell: from the
 * inside out, each step must pass over all that lies inside it.  Two axes that dodge each
 * other in another way are not recognised; nobody makes such views on purpose. */
static bool elements_apart(const mls_tensor *t)
{
    mls_walk w;
    size_t reach = mls_tensor_item_bytes(t); /* from the lowest byte to the highest */
    bool apart = true;
    if (mls_tensor_is_contiguous(t) || !mls_walk_init(&w, t, NULL)) {
        return true;
    }
    for (int axis = w.rank; axis >= 0 && apart; axis--) {
        const size_t length = axis == w.rank ? w.length : w.shape[axis];
        const ptrdiff_t stride = axis == w.rank ? w.a_step : w.a_strides[axis];
        const size_t step = stride < 0 ? (size_t)0 - (size_t)stride : (size_t)stride;
        size_t all;
        apart = step >= reach && mls_size_mul(step, length - 1, &all) &&
                mls_size_add(reach, all, &reach);
    }
    return apart;
}

/* Whether a pair is a copy of bytes, all of which lie together on either side. */
static bool is_plain(const mls_load_pair *pair)
{
    const mls_tensor *dst = pair->dst, *src = pair->src;
    const size_t bytes = mls_tensor_item_bytes(dst);
    if (dst->dtype != src->dtype || (dst->swapped != src->swapped && bytes > 1)) {
        return false;
    }
    if (mls_tensor_is_contiguous(dst) && mls_tensor_is_contiguous(src)) {
        return true;
    }
    mls_walk w; /* packed in another order, the same on both sides */
    return mls_walk_init(&w, dst, src) && w.rank == 0 && w.a_step == (ptrdiff_t)bytes &&
           w.b_step == (ptrdiff_t)bytes;
}

/* Remember the memory of a view, if it has any. */
static void add_span(mls_span *spans, size_t *count, const mls_tensor *t, size_t pair,
                     bool written)
{
    mls_span s = {.owner = pair, .written = written};
    if (mls_tensor_range(t, &s.low, &s.high)) {
        spans[(*count)++] = s;
    }
}

/* Ask for the views of a pair some turns later.  Two lines of each are read, too far
 * apart for the processor to guess the second: measured with ten thousand pairs that were
 * not in the cache, waiting for them took a third of the time. */
static void prefetch_pair(const planner *p, size_t index)
{
    if (index < p->count) {
        const mls_load_pair *pair = &p->pairs[index];
        __builtin_prefetch(pair->dst);
        __builtin_prefetch(pair->dst->strides);
        __builtin_prefetch(pair->src);
        __builtin_prefetch(pair->src->strides);
    }
}

/* All that is asked of a pair alone, and its item and spans. */
static mls_code take_pair(planner *p, size_t index)
{
    const mls_load_pair *pair = &p->pairs[index];
    item *it = &p->items[index];
    const mls_code code = check_kind(pair, p->cast, p->st);
    if (code != MLS_OK) {
        return code;
    }
    add_span(p->spans, &p->reads, pair->src, index, false);
    if (same_view(pair->dst, pair->src)) {
        return MLS_OK;
    }
    if (!elements_apart(pair->dst) || !mls_tensor_bytes(pair->dst, &it->bytes)) {
        mls_fail(p->st, MLS_E_OVERLAP,
                 "%s: elements of the target share memory with one another, as in a "
                 "broadcast view: load into a copy of it",
                 quote(pair->name).text);
        return named(p->st, pair);
    }
    it->to = pair->dst->data;
    it->from = pair->src->data;
    it->plain = is_plain(pair);
    add_span(p->spare, &p->writes, pair->dst, index, true);
    if (!mls_size_add(p->load->bytes, it->bytes, &p->load->bytes)) {
        p->load->bytes = SIZE_MAX; /* tied many times over; only asked whether large */
    }
    return MLS_OK;
}

/* ---- who shares memory with whom ---- */

/* Destination `written` meets the source of `read`. */
static mls_code overlap(planner *p, size_t written, size_t read)
{
    const mls_load_pair *pair = &p->pairs[written];
    const quoted name = quote(pair->name);
    if (written == read) {
        mls_fail(p->st, MLS_E_OVERLAP,
                 "%s: the target shares memory with its own source but is another view "
                 "of it: load from a copy",
                 name.text);
    } else {
        mls_fail(p->st, MLS_E_OVERLAP,
                 "%s: the target shares memory with the source of %s: load from a copy",
                 name.text, quote(p->pairs[read].name).text);
    }
    return named(p->st, pair);
}

/* Put a destination into the cluster of another one, which may have to be opened. */
static void join_cluster(planner *p, size_t pair, size_t other)
{
    if (p->items[other].cluster == 0) {
        p->items[other].cluster = ++p->clusters;
    }
    p->items[pair].cluster = p->items[other].cluster;
}

/* Sweep the sorted spans of all that is read and written.  It is enough to keep the span
 * that reaches highest, among those written and among those read. */
static mls_code find_overlaps(planner *p)
{
    const mls_span *top[2] = {NULL, NULL}; /* read, written */
    const size_t count = p->reads + p->writes;
    memcpy(p->spans + p->reads, p->spare, p->writes * sizeof *p->spans);
    const mls_span *sorted = mls_spans_sort(p->spans, p->spare, count);
    for (size_t i = 0; i < count; i++) {
        const mls_span *s = &sorted[i];
        const mls_span *other = top[!s->written];
        const mls_span *like = top[s->written];
        if (other != NULL && s->low < other->high) {
            return s->written ? overlap(p, s->owner, other->owner)
                              : overlap(p, other->owner, s->owner);
        }
        if (s->written && like != NULL && s->low < like->high) {
            join_cluster(p, s->owner, like->owner);
        }
        if (like == NULL || s->high > like->high) {
            top[s->written] = s;
        }
    }
    return MLS_OK;
}

/* Chain the pairs of each cluster in their order: from the last to the first, each is put
 * in front. */
static void link_clusters(planner *p)
{
    for (size_t cluster = 0; cluster < p->clusters; cluster++) {
        p->heads[cluster] = p->count;
    }
    for (size_t pair = p->count; pair-- > 0;) {
        item *it = &p->items[pair];
        if (it->cluster > 0) {
            it->next = p->heads[it->cluster - 1];
            p->heads[it->cluster - 1] = pair;
        }
    }
}

/* ---- pieces and tasks ---- */

/* Nothing of the plan remains where this is returned. */
static mls_code no_memory(mls_status *st, size_t count)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory to plan the loading of %zu tensors",
                    count);
}

/* Room for one piece more, and for the task that it may start and the end of that. */
static bool grow(planner *p)
{
    if (p->pieces < p->room) {
        return true;
    }
    size_t room;
    if (!mls_size_mul(p->room == 0 ? p->count : p->room, 2, &room)) {
        return false;
    }
    piece *pieces = mls_realloc(p->load->pieces, room, sizeof *pieces);
    if (pieces == NULL) {
        return false;
    }
    p->load->pieces = pieces;
    size_t *starts = mls_realloc(p->load->starts, room + 1, sizeof *starts);
    if (starts == NULL) {
        return false;
    }
    p->load->starts = starts;
    starts[0] = 0;
    p->room = room;
    return true;
}

/* End the task that is being filled, if there is something in it. */
static void end_task(planner *p)
{
    mls_load *load = p->load;
    if (p->filled > 0) {
        load->starts[++load->tasks] = p->pieces;
        p->filled = 0;
    }
}

/* Add a piece of `bytes` bytes; it starts a task where the one that is being filled is
 * full enough, unless `together`. */
static bool add_piece(planner *p, piece part, size_t bytes, bool together)
{
    if (!grow(p)) {
        return false;
    }
    if (!together && bytes > PART - (p->filled < PART ? p->filled : PART)) {
        end_task(p);
    }
    p->load->pieces[p->pieces++] = part;
    p->filled += bytes;
    return true;
}

/* All of a pair as one piece. */
static bool add_whole(planner *p, size_t index, bool together)
{
    const mls_load_pair *pair = &p->pairs[index];
    const item *it = &p->items[index];
    const piece whole = {.pair = it->plain ? NULL : pair,
                         .to = it->to,
                         .from = it->from,
                         .size = it->plain ? it->bytes : 0};
    return add_piece(p, whole, it->bytes, together);
}

/* A plain pair in pieces of PART bytes and a rest, which may share its task. */
static bool cut_plain(planner *p, const item *it)
{
    bool fits = true;
    for (size_t at = 0; at < it->bytes && fits; at += PART) {
        const size_t rest = it->bytes - at;
        const size_t size = rest < PART ? rest : PART;
        fits = add_piece(p, (piece){NULL, it->to + at, it->from + at, size}, size, false);
    }
    return fits;
}

/* Any other pair in pieces of some rows of one axis: every index of the axes outside it
 * has pieces of its own.  A large view has few of them, as each is over PART. */
static bool cut_strided(planner *p, const mls_load_pair *pair, size_t bytes)
{
    mls_tensor dst, src;
    size_t rows;
    if (!reduce(pair, &dst, &src)) {
        return true;
    }
    const int axis = cut_axis(&dst, bytes, &rows);
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
            const piece part = {pair, dst.data + to + dst.strides[axis] * (ptrdiff_t)row,
                                src.data + from + src.strides[axis] * (ptrdiff_t)row,
                                size};
            fits = add_piece(p, part, size * row_bytes, false);
        }
    }
    return fits;
}

/* Clusters first: they cannot be shared out, so the other threads must find work beside
 * them. */
static bool add_clusters(planner *p)
{
    bool fits = true;
    for (size_t cluster = 0; cluster < p->clusters; cluster++) {
        size_t pair = p->heads[cluster];
        for (; pair < p->count && fits; pair = p->items[pair].next) {
            fits = add_whole(p, pair, true);
        }
        end_task(p);
    }
    return fits;
}

/* The pairs that share nothing, in their order. */
static bool add_others(planner *p)
{
    bool fits = true;
    for (size_t i = 0; i < p->count && fits; i++) {
        const item *it = &p->items[i];
        if (it->bytes == 0 || it->cluster > 0) {
            continue;
        }
        if (it->bytes <= PART) {
            fits = add_whole(p, i, false);
        } else if (it->plain) {
            fits = cut_plain(p, it);
        } else {
            fits = cut_strided(p, &p->pairs[i], it->bytes);
        }
    }
    end_task(p);
    return fits;
}

/* ---- the plan ---- */

/* Check all pairs, then how they lie to each other, then list the work. */
static mls_code make_plan(planner *p)
{
    mls_code code = MLS_OK;
    for (size_t i = 0; i < p->count && code == MLS_OK; i++) {
        prefetch_pair(p, i + AHEAD);
        code = take_pair(p, i);
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

/* The tables are for the planning only; what stays is the plan. */
mls_code mls_load_new(const mls_load_pair *pairs, size_t count, bool cast, mls_load **out,
                      mls_status *st)
{
    planner p = {.pairs = pairs, .count = count, .cast = cast, .st = st};
    mls_code code;
    p.load = mls_alloc(1, sizeof *p.load);
    p.items = mls_alloc(count, sizeof *p.items);
    p.spans = mls_alloc(count, 2 * sizeof *p.spans);
    p.spare = mls_alloc(count, 2 * sizeof *p.spare);
    if (p.load == NULL || p.items == NULL || p.spans == NULL || p.spare == NULL) {
        code = no_memory(st, count);
        goto done;
    }
    code = make_plan(&p);
    if (code == MLS_OK) {
        *out = p.load;
        p.load = NULL;
    }
done:
    mls_load_free(p.load);
    mls_free(p.items);
    mls_free(p.spans);
    mls_free(p.spare);
    mls_free(p.heads);
    return code;
}

size_t mls_load_bytes(const mls_load *load)
{
    return load->bytes;
}

/* ---- running it ---- */

/* What every thread reads. */
typedef struct job {
    const mls_load *load;
    const mls_kernels *kernels;
    mls_destination destination;
} job;

/* The rows of a piece as views of their own: the axes outside have one index here. */
static void copy_rows(const job *j, const piece *part)
{
    mls_tensor dst, src;
    size_t bytes = 0, rows;
    if (!reduce(part->pair, &dst, &src)) {
        return;
    }
    (void)mls_tensor_bytes(&dst, &bytes); /* it fitted when the plan was made */
    const int axis = cut_axis(&dst, bytes, &rows);
    for (int outer = 0; outer < axis; outer++) {
        dst.shape[outer] = src.shape[outer] = 1;
    }
    dst.shape[axis] = src.shape[axis] = part->size;
    dst.data = part->to;
    /* the source is only read, but a view does not say so */
    src.data += part->from - src.data;
    mls_copy(j->kernels, &dst, &src, j->destination);
}

/* One task, for the pool. */
static void run_task(void *context, size_t task)
{
    const job *j = context;
    const mls_load *load = j->load;
    for (size_t i = load->starts[task]; i < load->starts[task + 1]; i++) {
        const piece *part = &load->pieces[i];
        if (part->pair == NULL) {
            mls_copy_bytes(j->kernels, part->to, part->from, part->size, j->destination);
        } else if (part->size == 0) {
            mls_copy(j->kernels, part->pair->dst, part->pair->src, j->destination);
        } else {
            copy_rows(j, part);
        }
    }
}

/* All tensors together count as one destination: they may exceed the cache although each
 * of them would fit. */
void mls_load_run(const mls_load *load, const mls_kernels *kernels, mls_pool *pool)
{
    job j = {.load = load, .kernels = kernels, .destination.bytes = load->bytes};
    mls_pool *shared = load->bytes >= MLS_POOL_COPY_BYTES ? pool : NULL;
    mls_pool_run(shared, run_task, &j, load->tasks);
}

/* Sources and targets are borrowed and stay. */
void mls_load_free(mls_load *load)
{
    if (load != NULL) {
        mls_free(load->pieces);
        mls_free(load->starts);
        mls_free(load);
    }
}
