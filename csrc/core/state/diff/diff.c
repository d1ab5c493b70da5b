/* differ: pairs of tensors cut into parts, and each part into runs for a kernel.
 *
 * A pair is walked in the order of its first tensor's memory (strided_iter.h).  A run that is
 * packed on both sides, in this machine's byte order, goes to the kernel as it lies; else
 * it goes through the stack in chunks.  A part is a stretch of the walk, of a fixed
 * number of elements: it may start and end inside runs, so that one long run is shared
 * out as well as many short ones.
 *
 * Sums and maxima do not depend on the order, so neither does the result on the threads.
 */
#include "state/diff/diff_kernels.h"

#include "base/memory.h"
#include "base/size.h"
#include "array/strided_iter.h"

#include <stdatomic.h>

enum {
    CHUNK = 256,            /* elements that pass through the stack at a time */
    PART_BYTES = 256 << 10, /* of each side; handing a part out costs nothing beside it */
    SHARED_BYTES = 512 << 10 /* below this, waking a thread costs more than it brings */
};

/* Sets of another architecture get the scalar table, which works everywhere. */
const mls_differ_kernels *mls_differ_of(mls_cpu cpu)
{
    switch (cpu) {
#if defined(__x86_64__)
    case MLS_CPU_AVX2:
        return &mls_differ_avx2;
    case MLS_CPU_AVX512:
        return &mls_differ_avx512;
#endif
#if defined(__aarch64__)
    case MLS_CPU_NEON:
        return &mls_differ_neon;
#endif
    default:
        return &mls_differ_scalar;
    }
}

/* ---- checks ---- */

/* Whether two views have the same rank and lengths. */
static bool same_shape(const mls_tensor *a, const mls_tensor *b)
{
    bool same = a->rank == b->rank;
    for (int axis = 0; same && axis < a->rank; axis++) {
        same = a->shape[axis] == b->shape[axis];
    }
    return same;
}

/* The first tensor is taken for what was expected, the second for what was found. */
mls_code mls_differ_check(const mls_tensor *a, const mls_tensor *b, mls_status *st)
{
    char wanted[MLS_FACT_BYTES], found[MLS_FACT_BYTES];
    size_t bytes;
    if (!same_shape(a, b)) {
        mls_shape_text(wanted, sizeof wanted, a->rank, a->shape);
        mls_shape_text(found, sizeof found, b->rank, b->shape);
        mls_fail(st, MLS_E_SHAPE,
                 "shapes %s and %s cannot be compared: only tensors of one shape can",
                 wanted, found);
        mls_status_expected(st, "%s", wanted);
        mls_status_got(st, "%s", found);
        return MLS_E_SHAPE;
    }
    if (a->dtype != b->dtype) {
        mls_fail(st, MLS_E_DTYPE,
                 "%s and %s cannot be compared: convert one of them first",
                 mls_dtype_of(a->dtype)->name, mls_dtype_of(b->dtype)->name);
        mls_status_expected(st, "%s", mls_dtype_of(a->dtype)->name);
        mls_status_got(st, "%s", mls_dtype_of(b->dtype)->name);
        return MLS_E_DTYPE;
    }
    if (!mls_tensor_bytes(a, &bytes)) {
        return mls_fail(st, MLS_E_SIZE, "shape %s has more elements than can be counted",
                        mls_shape_text(wanted, sizeof wanted, a->rank, a->shape));
    }
    return MLS_OK;
}

/* ---- runs ---- */

/* One side of a run: where it is, and what must be done to it. */
typedef struct side {
    const unsigned char *at;
    ptrdiff_t step;
    bool swapped;
} side;

/* What all runs of one pair have in common. */
typedef struct measurer {
    mls_differ_run run;
    size_t item, unit; /* bytes of an element, and of what is turned as one */
    bool packed;       /* both sides are as the kernel wants them */
} measurer;

/* `count` elements, at most CHUNK, packed and in this machine's order: where they lie, if
 * they are, else in `room`. */
static const unsigned char *make_ready(const measurer *m, side from, size_t count,
                                       unsigned char *room)
{
    if (from.step == (ptrdiff_t)m->item && !from.swapped) {
        return from.at;
    }
    mls_gather(room, from.at, from.step, m->item, count);
    if (from.swapped) {
        mls_swap_items(room, count * m->item, m->unit);
    }
    return room;
}

/* A run of any length and any steps. */
static void measure_run(const measurer *m, side a, side b, size_t count,
                        mls_difference *into)
{
    unsigned char a_room[CHUNK * 8], b_room[CHUNK * 8];
    if (m->packed) {
        m->run(a.at, b.at, count, into);
        return;
    }
    while (count > 0) {
        const size_t part = count < CHUNK ? count : CHUNK;
        m->run(make_ready(m, a, part, a_room), make_ready(m, b, part, b_room), part,
               into);
        a.at += a.step * (ptrdiff_t)part;
        b.at += b.step * (ptrdiff_t)part;
        count -= part;
    }
}

/* `count` elements of a pair's walk, from number `start` on; there are so many.  Items of
 * one byte have no order to turn. */
static void measure_part(const mls_differ_kernels *kernels, mls_differ_pair pair,
                         size_t start, size_t count, mls_difference *into)
{
    mls_walk w;
    ptrdiff_t a_at, b_at;
    if (count == 0 || !mls_walk_init(&w, pair.a, pair.b)) {
        return;
    }
    const size_t item = mls_tensor_item_bytes(pair.a);
    side a = {.step = w.a_step, .swapped = pair.a->swapped && item > 1};
    side b = {.step = w.b_step, .swapped = pair.b->swapped && item > 1};
    const measurer m = {.run = kernels->run[pair.a->dtype],
                        .item = item,
                        .unit = mls_swap_unit(pair.a->dtype),
                        .packed = a.step == (ptrdiff_t)item && !a.swapped &&
                                  b.step == (ptrdiff_t)item && !b.swapped};
    size_t skipped = start % w.length; /* of the first run */
    mls_walk_seek(&w, start / w.length, &a_at, &b_at);
    do {
        const size_t rest = w.length - skipped;
        const size_t length = count < rest ? count : rest;
        a.at = pair.a->data + a_at + a.step * (ptrdiff_t)skipped;
        b.at = pair.b->data + b_at + b.step * (ptrdiff_t)skipped;
        measure_run(&m, a, b, length, into);
        count -= length;
        skipped = 0;
    } while (count > 0 && mls_walk_next(&w, &a_at, &b_at));
}

/* ---- pairs ---- */

/* Elements to compare: none where both views are one and the same. */
static size_t elements_of(mls_differ_pair pair)
{
    size_t count = 0;
    bool same = pair.a->data == pair.b->data && pair.a->swapped == pair.b->swapped;
    for (int axis = 0; axis < pair.a->rank; axis++) {
        same = same && (pair.a->shape[axis] <= 1 ||
                        pair.a->strides[axis] == pair.b->strides[axis]);
    }
    (void)mls_tensor_count(pair.a, &count); /* checked to fit */
    return same ? 0 : count;
}

/* Elements of a part. */
static size_t part_length(mls_differ_pair pair)
{
    return PART_BYTES / mls_tensor_item_bytes(pair.a);
}

/* How many parts a pair of `count` elements is cut into. */
static size_t part_count(mls_differ_pair pair, size_t count)
{
    const size_t length = part_length(pair);
    return count / length + (count % length != 0);
}

/* The elements of part `index` of `count` elements. */
static size_t part_rest(mls_differ_pair pair, size_t count, size_t index)
{
    const size_t length = part_length(pair), rest = count - index * length;
    return rest < length ? rest : length;
}

/* One part and what was found in it. */
typedef struct part {
    size_t pair, start, count;
    mls_difference found;
} part;

/* All parts of all pairs; tasks share it, each writing to its own part. */
typedef struct job {
    const mls_differ_kernels *kernels;
    const mls_differ_pair *pairs;
    part *parts;
} job;

/* One part, as a task for the pool. */
static void measure_task(void *context, size_t index)
{
    const job *j = context;
    part *p = &j->parts[index];
    mls_difference found = {0}; /* local: parts are neighbours in the cache */
    measure_part(j->kernels, j->pairs[p->pair], p->start, p->count, &found);
    p->found = found;
}

/* Sums and maxima; the bytes decide whether threads are worth waking.  Cannot wrap where
 * memory could hold a part for each. */
static bool count_parts(const mls_differ_pair *pairs, size_t count, size_t *parts,
                        size_t *bytes)
{
    size_t sum = 0, total = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t elements = elements_of(pairs[i]);
        const size_t item = mls_tensor_item_bytes(pairs[i].a);
        if (!mls_size_add(sum, part_count(pairs[i], elements), &sum) ||
            !mls_size_add(total, elements * item, &total)) {
            return false;
        }
    }
    *parts = sum;
    *bytes = total;
    return true;
}

/* Cut the pairs, in order. */
static void cut_parts(const mls_differ_pair *pairs, size_t count, part *parts)
{
    size_t next = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t elements = elements_of(pairs[i]);
        for (size_t p = 0; p < part_count(pairs[i], elements); p++) {
            parts[next++] = (part){.pair = i,
                                   .start = p * part_length(pairs[i]),
                                   .count = part_rest(pairs[i], elements, p)};
        }
    }
}

/* Add what was found elsewhere. */
static void add(mls_difference *into, mls_difference found)
{
    into->changed += found.changed;
    into->nan += found.nan;
    into->max_abs = found.max_abs > into->max_abs ? found.max_abs : into->max_abs;
    into->max_rel = found.max_rel > into->max_rel ? found.max_rel : into->max_rel;
}

/* The parts are kept until all are done: threads need no lock, and nothing is written to
 * `out` before nothing can fail. */
mls_code mls_differ(const mls_differ_kernels *kernels, mls_pool *pool,
                    const mls_differ_pair *pairs, size_t count, mls_difference *out,
                    mls_status *st)
{
    size_t parts = 0, bytes = 0;
    job j = {.kernels = kernels, .pairs = pairs, .parts = NULL};
    if (count_parts(pairs, count, &parts, &bytes)) {
        j.parts = mls_alloc(parts, sizeof *j.parts);
    }
    if (j.parts == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to compare %zu tensors", count);
    }
    cut_parts(pairs, count, j.parts);
    mls_pool_run(bytes >= SHARED_BYTES ? pool : NULL, measure_task, &j, parts);
    for (size_t i = 0; i < count; i++) {
        out[i] = (mls_difference){0};
    }
    for (size_t i = 0; i < parts; i++) {
        add(&out[j.parts[i].pair], j.parts[i].found);
    }
    mls_free(j.parts);
    return MLS_OK;
}

/* ---- whether all is the same ---- */

/* What the tasks of mls_differ_same share. */
typedef struct search {
    const mls_differ_kernels *kernels;
    const mls_differ_pair *pairs; /* all of them, or the one that is cut */
    size_t elements;              /* of the one that is cut */
    atomic_bool differs;
} search;

/* Look at `count` elements unless a difference is known. */
static void search_part(search *s, mls_differ_pair pair, size_t start, size_t count)
{
    mls_difference found = {0};
    if (atomic_load_explicit(&s->differs, memory_order_relaxed)) {
        return;
    }
    measure_part(s->kernels, pair, start, count, &found);
    if (found.changed > 0) {
        atomic_store_explicit(&s->differs, true, memory_order_relaxed);
    }
}

/* A pair of one part at most, as a task; the others have tasks of their own. */
static void search_small(void *context, size_t index)
{
    search *s = context;
    const size_t elements = elements_of(s->pairs[index]);
    if (elements <= part_length(s->pairs[index])) {
        search_part(s, s->pairs[index], 0, elements);
    }
}

/* A part of the pair that is cut, as a task. */
static void search_large(void *context, size_t index)
{
    search *s = context;
    const mls_differ_pair pair = s->pairs[0];
    search_part(s, pair, index * part_length(pair), part_rest(pair, s->elements, index));
}

/* Nothing is allocated, so it cannot fail: the small pairs are one run of the pool, and
 * each large one is another. */
bool mls_differ_same(const mls_differ_kernels *kernels, mls_pool *pool,
                     const mls_differ_pair *pairs, size_t count)
{
    search s = {.kernels = kernels, .pairs = pairs};
    size_t parts, bytes = SHARED_BYTES;
    atomic_init(&s.differs, false);
    (void)count_parts(pairs, count, &parts, &bytes);
    mls_pool *shared = bytes >= SHARED_BYTES ? pool : NULL;
    mls_pool_run(shared, search_small, &s, count);
    for (size_t i = 0; i < count && !atomic_load(&s.differs); i++) {
        s.pairs = &pairs[i];
        s.elements = elements_of(pairs[i]);
        if (s.elements > part_length(pairs[i])) {
            mls_pool_run(shared, search_large, &s, part_count(pairs[i], s.elements));
        }
    }
    return !atomic_load(&s.differs);
}
