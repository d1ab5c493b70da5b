/* diff: compares tensors with threads, in parts; gathers strided elements; checks of
 * shape and dtype.
 *
 * A pair is divided into parts, and a part into runs for a kernel.
 *
 * A pair is traversed in the memory order of its first tensor (strided_iter.h). A run
 * that is packed on both sides, in native byte order, is passed to the kernel directly;
 * other runs are gathered on the stack in chunks. A part is a fixed number of consecutive
 * elements of that traversal. It may start and end inside runs, so one long run is
 * divided among threads as well as many short ones.
 *
 * Sums and maxima do not depend on the order, so the result does not depend on threads.
 */
#include "state/diff/diff_kernels.h"

#include "array/strided_iter.h"
#include "base/memory.h"
#include "base/size.h"

#include <stdatomic.h>

enum {
    CHUNK = 256,    /* elements gathered on the stack at a time */
    ITEM_BYTES = 8, /* of the largest element */
    PART_BYTES =
        256 << 10, /* of each side; dispatching a part costs little in comparison */
    SHARED_BYTES = 512 << 10 /* below this, waking a thread costs more than it saves */
};

/* Choose a table: the scalar one, or the one for all vector instruction sets of the
 * architecture. */
const mls_diff_kernels *mls_diff_of(mls_cpu cpu)
{
#if defined(__x86_64__) || defined(__aarch64__)
    return cpu == MLS_CPU_SCALAR ? &mls_diff_scalar : &mls_diff_vector;
#else
    (void)cpu;
    return &mls_diff_scalar;
#endif
}

/* ---- checks ---- */

/* Check shape, dtype and size. In errors, "expected" is the first tensor and "got" the
 * second. */
mls_code mls_diff_check(const mls_tensor *a, const mls_tensor *b, mls_status *st)
{
    char a_shape[MLS_FACT_BYTES], b_shape[MLS_FACT_BYTES];
    size_t bytes;
    if (!mls_shape_equal(a->rank, a->shape, b->rank, b->shape)) {
        mls_shape_text(a_shape, sizeof a_shape, a->rank, a->shape);
        mls_shape_text(b_shape, sizeof b_shape, b->rank, b->shape);
        mls_fail(st, MLS_E_SHAPE,
                 "shapes %s and %s cannot be compared: only tensors of one shape can",
                 a_shape, b_shape);
        return mls_status_differ(st, a_shape, b_shape);
    }
    if (a->dtype != b->dtype) {
        mls_fail(st, MLS_E_DTYPE,
                 "%s and %s cannot be compared: convert one of them first",
                 mls_dtype_of(a->dtype)->name, mls_dtype_of(b->dtype)->name);
        return mls_status_differ(st, mls_dtype_of(a->dtype)->name,
                                 mls_dtype_of(b->dtype)->name);
    }
    if (!mls_tensor_bytes(a, &bytes)) {
        return mls_fail(st, MLS_E_SIZE, "shape %s has more elements than can be counted",
                        mls_shape_text(a_shape, sizeof a_shape, a->rank, a->shape));
    }
    return MLS_OK;
}

/* ---- runs ---- */

/* One of the two tensors, at an element of a run. */
typedef struct side {
    const unsigned char *at; /* the element */
    ptrdiff_t step;          /* bytes from one element of the run to the next */
    bool swapped;            /* not in native byte order */
} side;

typedef struct measurer {
    mls_diff_run run;
    size_t item, unit; /* bytes of an element, and of the unit whose bytes are swapped */
    bool packed;       /* both sides are packed, in native byte order */
} measurer;

/* Return `count` elements (at most CHUNK) of one side, packed and in native byte order:
 * in their own memory if they already are, otherwise gathered in `buffer`. */
static const unsigned char *gather_native(const measurer *m, side from, size_t count,
                                          unsigned char *buffer)
{
    if (from.step == (ptrdiff_t)m->item && !from.swapped) {
        return from.at;
    }
    mls_gather(buffer, from.at, from.step, m->item, count);
    if (from.swapped) {
        mls_swap_items(buffer, count * m->item, m->unit);
    }
    return buffer;
}

/* Compare `count` elements of a run on both sides, and add the result to `into`. Sides
 * that are not packed and native are gathered CHUNK elements at a time. */
static void measure_run(const measurer *m, side a, side b, size_t count,
                        mls_diff_result *into)
{
    unsigned char a_buffer[CHUNK * ITEM_BYTES], b_buffer[CHUNK * ITEM_BYTES];
    if (m->packed) {
        m->run(a.at, b.at, count, into);
        return;
    }
    while (count > 0) {
        const size_t part = count < CHUNK ? count : CHUNK;
        m->run(gather_native(m, a, part, a_buffer), gather_native(m, b, part, b_buffer),
               part, into);
        a.at += a.step * (ptrdiff_t)part;
        b.at += b.step * (ptrdiff_t)part;
        count -= part;
    }
}

/* Compare `count` elements of a pair, from element `start` of its traversal on, and add
 * the result to `into`. The elements must exist. Single bytes have no byte order. */
static void measure_part(const mls_diff_kernels *kernels, mls_diff_pair pair,
                         size_t start, size_t count, mls_diff_result *into)
{
    mls_strided_iter iter;
    ptrdiff_t a_at, b_at;
    if (count == 0 || !mls_strided_iter_init(&iter, pair.a, pair.b)) {
        return;
    }
    const size_t item = mls_tensor_item_bytes(pair.a);
    side a = {.step = iter.a_step, .swapped = pair.a->swapped && item > 1};
    side b = {.step = iter.b_step, .swapped = pair.b->swapped && item > 1};
    const measurer m = {.run = kernels->run[pair.a->dtype],
                        .item = item,
                        .unit = mls_swap_unit(pair.a->dtype),
                        .packed = a.step == (ptrdiff_t)item && !a.swapped &&
                                  b.step == (ptrdiff_t)item && !b.swapped};
    size_t skipped = start % iter.length; /* elements of the first run before `start` */
    mls_strided_iter_seek(&iter, start / iter.length, &a_at, &b_at);
    do {
        const size_t rest = iter.length - skipped;
        const size_t length = count < rest ? count : rest;
        a.at = pair.a->data + a_at + a.step * (ptrdiff_t)skipped;
        b.at = pair.b->data + b_at + b.step * (ptrdiff_t)skipped;
        measure_run(&m, a, b, length, into);
        count -= length;
        skipped = 0;
    } while (count > 0 && mls_strided_iter_next(&iter, &a_at, &b_at));
}

/* ---- pairs ---- */

/* Return the number of elements to compare: 0 if both views are identical, since nothing
 * can differ. */
static size_t elements_of(mls_diff_pair pair)
{
    size_t count = 0;
    if (pair.a->swapped != pair.b->swapped || !mls_tensor_same_view(pair.a, pair.b)) {
        (void)mls_tensor_count(pair.a, &count); /* cannot overflow: checked */
    }
    return count;
}

/* Return the elements of a full part of a pair. */
static size_t part_length(mls_diff_pair pair)
{
    return PART_BYTES / mls_tensor_item_bytes(pair.a);
}

/* Return the number of parts of a pair with `count` elements to compare. */
static size_t part_count(mls_diff_pair pair, size_t count)
{
    const size_t length = part_length(pair);
    return count / length + (count % length != 0);
}

/* Return the elements of part `index` of a pair with `count` elements; the last part may
 * be shorter. */
static size_t part_elements(mls_diff_pair pair, size_t count, size_t index)
{
    const size_t length = part_length(pair), rest = count - index * length;
    return rest < length ? rest : length;
}

/* `count` elements of pair number `pair`, from element `start` of its traversal on, and
 * the result of comparing them. */
typedef struct part {
    size_t pair, start, count;
    mls_diff_result differences;
} part;

/* All parts of all pairs, shared by the tasks; each task writes only its own part. */
typedef struct job {
    const mls_diff_kernels *kernels;
    const mls_diff_pair *pairs;
    part *parts;
} job;

/* Thread function: compare part `index` of the job `context`, and store its result in the
 * part. */
static void measure_task(void *context, size_t index)
{
    const job *j = context;
    part *p = &j->parts[index];
    mls_diff_result differences = {
        0}; /* on the stack, because neighbouring parts share cache lines */
    measure_part(j->kernels, j->pairs[p->pair], p->start, p->count, &differences);
    p->differences = differences;
}

/* Count the parts and the bytes of all pairs; the bytes decide whether other threads
 * help. Returns false on overflow, when no memory could hold the parts either; `*parts`
 * and `*bytes` are then unchanged. */
static bool count_parts(const mls_diff_pair *pairs, size_t count, size_t *parts,
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

/* List the parts of all pairs, in order; `parts` has room for the number that count_parts
 * computed. */
static void divide_parts(const mls_diff_pair *pairs, size_t count, part *parts)
{
    size_t next = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t elements = elements_of(pairs[i]);
        for (size_t p = 0; p < part_count(pairs[i], elements); p++) {
            parts[next++] = (part){.pair = i,
                                   .start = p * part_length(pairs[i]),
                                   .count = part_elements(pairs[i], elements, p)};
        }
    }
}

/* Add the counts of `added` to `into`, and take the larger maxima. */
static void add_result(mls_diff_result *into, mls_diff_result added)
{
    into->changed += added.changed;
    into->nan += added.nan;
    into->max_abs = added.max_abs > into->max_abs ? added.max_abs : into->max_abs;
    into->max_rel = added.max_rel > into->max_rel ? added.max_rel : into->max_rel;
}

/* Compare the parts of all pairs in parallel. Each part keeps its result until all are
 * done, so threads need no lock, and `out` is written only when no failure is possible
 * any more. */
mls_code mls_diff(const mls_diff_kernels *kernels, mls_pool *pool,
                  const mls_diff_pair *pairs, size_t count, mls_diff_result *out,
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
    divide_parts(pairs, count, j.parts);
    mls_pool_run(bytes >= SHARED_BYTES ? pool : NULL, measure_task, &j, parts);
    for (size_t i = 0; i < count; i++) {
        out[i] = (mls_diff_result){0};
    }
    for (size_t i = 0; i < parts; i++) {
        add_result(&out[j.parts[i].pair], j.parts[i].differences);
    }
    mls_free(j.parts);
    return MLS_OK;
}

/* ---- mls_diff_same ---- */

typedef struct search {
    const mls_diff_kernels *kernels;
    const mls_diff_pair *pairs; /* all pairs, or the large pair that is divided */
    size_t elements;            /* of the divided pair */
    atomic_bool differs;
} search;

/* Compare `count` elements of a pair from element `start` on, unless a difference is
 * known already, and record a difference. */
static void search_part(search *s, mls_diff_pair pair, size_t start, size_t count)
{
    mls_diff_result differences = {0};
    if (atomic_load_explicit(&s->differs, memory_order_relaxed)) {
        return;
    }
    measure_part(s->kernels, pair, start, count, &differences);
    if (differences.changed > 0) {
        atomic_store_explicit(&s->differs, true, memory_order_relaxed);
    }
}

/* Thread function: compare pair `index` if it has at most one part; larger pairs are
 * skipped here. */
static void search_small(void *context, size_t index)
{
    search *s = context;
    const size_t elements = elements_of(s->pairs[index]);
    if (elements <= part_length(s->pairs[index])) {
        search_part(s, s->pairs[index], 0, elements);
    }
}

/* Thread function: compare part `index` of the large pair. */
static void search_large(void *context, size_t index)
{
    search *s = context;
    const mls_diff_pair pair = s->pairs[0];
    search_part(s, pair, index * part_length(pair),
                part_elements(pair, s->elements, index));
}

/* Compare without allocating anything, so that it cannot fail: one run of the pool for
 * all pairs of at most one part, and one for each larger pair. If the bytes cannot be
 * counted, they are enough for other threads to help. */
bool mls_diff_same(const mls_diff_kernels *kernels, mls_pool *pool,
                   const mls_diff_pair *pairs, size_t count)
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
