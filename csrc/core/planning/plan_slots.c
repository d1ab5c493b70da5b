/* plan_slots: the table, filled diagonal by diagonal of large tiles.
 *
 * A segment s .. t needs what lies to the left of it in its row (s .. k - 1) and below it
 * in its column (k .. t).  A large tile takes first, block of k by block of k, what lies
 * in tiles that are complete; then its small tiles follow, from the diagonal outwards,
 * each with a product for what is complete by now and its last few k segment by segment.
 *
 * Entries are seconds of recomputation plus the seconds of all blocks before s.  With
 * that a restart from k costs (k, t) + (s, k - 1) - seconds before s: inner loops add two
 * numbers and nothing else.
 */
#include "planning/plan_slots.h"

#include "base/memory.h"
#include "base/size.h"
#include "planning/slots/plan_slots_kernels.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum {
    SMALL = MLS_PLAN_TILE,
    LARGE = 32, /* segments along each side of a large tile, and restarts in a block */
    WORTH = 64, /* blocks from which on helpers are worth waking, ... */
    MANY = 256, /* ... and up to here they have enough to do with smaller tiles only */
    TILES = (LARGE / SMALL) * (LARGE / SMALL),
    STRIP = MLS_PLAN_STRIP,
    LANES = MLS_PLAN_LANES,
    NEVER = INT32_MAX / 4 /* slots that no budget has */
};

/* The table in the making. */
typedef struct solver {
    const mls_plan_costs *costs;
    const mls_plan_kernels *kernels;
    mls_plan_table *table;
    mls_poll poll;
    size_t n, entries;
    size_t large;    /* segments along each side of a large tile: LARGE or half of it */
    uint32_t *shift; /* activations, in slots */
    int32_t *need;   /* by mls_plan_cell: first entry that is finite */
    int32_t *full;   /* by mls_plan_cell: first entry without recomputation */
    int32_t *sweep;  /* by mls_plan_cell: largest forward peak of s .. t */
    float *blank;    /* infinity for each entry of a segment, padding included */
    size_t distance; /* of the large tiles at hand from the diagonal */
    atomic_bool stopped;
} solver;

/* The one place that chooses. */
static const mls_plan_kernels *kernels_of(mls_cpu cpu)
{
    switch (cpu) {
#if defined(__x86_64__)
    case MLS_CPU_AVX2:
        return &mls_plan_avx2;
    case MLS_CPU_AVX512:
        return &mls_plan_avx512;
#endif
#if defined(__aarch64__)
    case MLS_CPU_NEON:
        return &mls_plan_neon;
#endif
    default:
        return &mls_plan_scalar;
    }
}

/* To the next multiple of `unit`. */
static size_t round_up(size_t value, size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* The larger one of two numbers, */
static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* and the smaller one. */
static size_t fewest(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* An odd number of cache lines: with an even one, what is worked on at a time would lie
 * in a few places of the caches, and push itself out of there. */
static size_t stride_of(size_t slots)
{
    const size_t stride = round_up(slots + 1, LANES);
    return stride / LANES % 2 == 0 ? stride + LANES : stride;
}

/* What make_tables asks for, but for small arrays. */
size_t mls_plan_table_bytes(size_t blocks, size_t slots)
{
    const size_t padded = round_up(blocks, SMALL);
    size_t cells, bytes;
    if (!mls_size_mul(padded, padded + 1, &cells) ||
        !mls_size_mul(cells / 2, stride_of(slots), &bytes) ||
        !mls_size_mul(bytes, sizeof(float), &bytes)) {
        return SIZE_MAX;
    }
    return bytes;
}

/* Entry 0 of a segment. */
static float *values_of(const mls_plan_table *table, size_t s, size_t t)
{
    return table->values + table->rows[s] + t * table->stride;
}

/* Traces ask for less than nothing where a size exceeds what is left. */
double mls_plan_slots_value(const void *context, size_t s, size_t t, int64_t memory)
{
    const mls_plan_table *table = context;
    if (memory < 0) {
        return (double)INFINITY;
    }
    return (double)values_of(table, s, t)[memory];
}

/* ---- restarts of a small tile ---- */

/* Seconds of the blocks s .. k - 1, which a restart runs once more. */
static float again_of(const solver *v, size_t s, size_t k)
{
    return (float)(v->costs->before[k] - v->costs->before[s]);
}

/* Restarts `from` to before `to` for one segment, entries below `end` alone.  Each begins
 * where the rules allow it and both of its parts are finite.  Cells of a row lie side by
 * side, those of a column each a cell closer to the next than the ones before. */
static void restart(const solver *v, size_t s, size_t t, size_t from, size_t to,
                    size_t end)
{
    if (from >= to) { /* may lie beyond the last block */
        return;
    }
    const size_t row = mls_plan_cell(v->n, s, 0), hold = (size_t)v->costs->hold[t];
    const int32_t *below = v->need + mls_plan_cell(v->n, from, t);
    float *values = values_of(v->table, s, t);
    end = fewest(end, v->entries);
    for (size_t k = from; k < to; k++) {
        const size_t shift = v->shift[k], left = row + k - 1;
        const size_t bound = most((size_t)v->sweep[left] + hold, shift);
        const size_t finite = most((size_t)v->need[left], shift + (size_t)*below);
        const size_t first = most(bound, finite);
        if (first < end) {
            v->kernels->row(values + first, values_of(v->table, s, k - 1) + first,
                            values_of(v->table, k, t) + first - shift, again_of(v, s, k),
                            end - first);
        }
        below += v->n - k - 1;
    }
}

/* Kernels know no rules, only where to start, and look at whole registers.  Where a
 * kernel may start with restart k: where the rules allow it for every segment of
 * the tile, and not before some segment has finite parts.  The rest is done here. */
static uint32_t begin_of(const solver *v, size_t s, size_t t, size_t k)
{
    const size_t s_end = fewest(s + SMALL, v->n), t_end = fewest(t + SMALL, v->n);
    size_t sweep = 0, hold = 0, natural = NEVER, lowest = NEVER;
    for (size_t i = s; i < s_end; i++) {
        const size_t cell = mls_plan_cell(v->n, i, k - 1);
        lowest = fewest(lowest, (size_t)v->need[cell]);
        sweep = most(sweep, (size_t)v->sweep[cell]);
    }
    for (size_t l = t; l < t_end; l++) {
        natural = fewest(natural, (size_t)v->need[mls_plan_cell(v->n, k, l)]);
        hold = most(hold, (size_t)v->costs->hold[l]);
    }
    const size_t bound = most(sweep + hold, v->shift[k]); /* the largest of all */
    natural = most(natural + v->shift[k], lowest) / LANES * LANES;
    if (natural >= bound) {
        return (uint32_t)natural;
    }
    const size_t begin = round_up(bound, LANES);
    for (size_t i = s; i < s_end; i++) {
        for (size_t l = t; l < t_end; l++) {
            restart(v, i, l, k, k + 1, begin);
        }
    }
    return (uint32_t)begin;
}

/* The entries of a small tile that can be anything but infinite or without recomputation.
 */
static size_t last_of(const solver *v, size_t s, size_t t)
{
    size_t full = 0;
    for (size_t i = s; i < fewest(s + SMALL, v->n); i++) {
        for (size_t l = t; l < fewest(t + SMALL, v->n); l++) {
            full = most(full, (size_t)v->full[mls_plan_cell(v->n, i, l)]);
        }
    }
    return round_up(fewest(full, v->entries), LANES);
}

/* What a kernel is told of a block of restarts. */
typedef struct block {
    uint32_t begin[LARGE];
    float plus[LARGE];
} block;

/* Make ready a small tile above the diagonal for restarts `first` to before `last`. */
static mls_plan_tile prepare(const solver *v, block *b, size_t s, size_t t, size_t first,
                             size_t last)
{
    const size_t s_last = fewest(s + SMALL, v->n) - 1;
    mls_plan_tile job = {.values = v->table->values,
                         .rows = v->table->rows,
                         .stride = v->table->stride,
                         .shift = v->shift,
                         .begin = b->begin,
                         .plus = b->plus,
                         .s = s,
                         .t = t,
                         .first = first,
                         .last = last,
                         .from = NEVER,
                         .to = last_of(v, s, t)};
    for (size_t i = 0; i < SMALL; i++) {
        job.rest[i] = s + i < s_last ? again_of(v, s + i, s_last) : 0;
    }
    for (size_t k = first; k < last; k++) {
        b->begin[k - first] = begin_of(v, s, t, k);
        b->plus[k - first] = again_of(v, s_last, k);
        job.from = fewest(job.from, b->begin[k - first]);
    }
    return job;
}

/* Restarts for one small tile. */
static void multiply(const solver *v, size_t s, size_t t, size_t first, size_t last)
{
    block b;
    for (size_t k = first; k < last; k += LARGE) {
        const mls_plan_tile job = prepare(v, &b, s, t, k, fewest(k + LARGE, last));
        v->kernels->tile(&job);
    }
}

/* A block of restarts for a large tile above the diagonal, strip by strip: what is read
 * for one strip stays in the cache for all small tiles. */
static void multiply_large(const solver *v, size_t s, size_t t, size_t s_end,
                           size_t t_end, size_t first, size_t last)
{
    block blocks[TILES];
    mls_plan_tile jobs[TILES];
    size_t count = 0, from = NEVER, to = 0;
    for (size_t i = s; i < s_end; i += SMALL) {
        for (size_t l = t; l < t_end; l += SMALL) {
            jobs[count] = prepare(v, &blocks[count], i, l, first, last);
            from = fewest(from, jobs[count].from);
            to = most(to, jobs[count].to);
            count++;
        }
    }
    for (size_t strip = from; strip < to; strip += STRIP) {
        for (size_t i = 0; i < count; i++) {
            mls_plan_tile job = jobs[i];
            job.from = most(job.from, strip);
            job.to = fewest(job.to, strip + STRIP);
            v->kernels->tile(&job);
        }
    }
}

/* ---- single segments ---- */

/* Saving s, with `moved` slots held beside what follows and `seconds` more. */
static void save(const solver *v, size_t s, size_t t, int64_t moved, double seconds)
{
    const mls_plan_costs *c = v->costs;
    const size_t shift = (size_t)moved;
    const size_t rest = shift + (size_t)v->need[mls_plan_cell(v->n, s + 1, t)];
    const size_t first = most((size_t)mls_plan_save_need(c, s, t), rest);
    if (first < v->entries) {
        v->kernels->keep(values_of(v->table, s, t) + first,
                         values_of(v->table, s + 1, t) + first - shift, (float)seconds,
                         v->entries - first);
    }
}

/* The first entry that is finite, or `count`: whatever fits some memory fits more of it,
 * so that the finite ones are those behind a place. */
static size_t first_finite(const float *values, size_t count)
{
    size_t low = 0, high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (isfinite(values[middle])) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* The rest of a segment, once all restarts but those of its own small tile are in. */
static void finish(const solver *v, size_t s, size_t t)
{
    const mls_plan_costs *c = v->costs;
    float *values = values_of(v->table, s, t);
    const size_t cell = mls_plan_cell(v->n, s, t);
    const size_t s_end = s / SMALL * SMALL + SMALL, t_begin = t / SMALL * SMALL;
    /* beyond `full` nothing is recomputed, and a restart wins nothing */
    restart(v, s, t, s + 1, fewest(s_end, t + 1), (size_t)v->full[cell]);
    restart(v, s, t, most(s_end, t_begin + 1), t + 1, (size_t)v->full[cell]);
    if (s == t) {
        for (size_t m = (size_t)mls_plan_save_need(c, s, t); m < v->entries; m++) {
            values[m] = 0;
        }
    } else {
        save(v, s, t, c->saved[s], 0);
        if (isfinite(c->away[s])) {
            save(v, s, t, c->activation[s + 1], c->away[s]);
        }
    }
    const size_t first = first_finite(values, v->entries);
    v->need[cell] = first == v->entries ? NEVER : (int32_t)first;
}

/* ---- large tiles ---- */

/* Infinity everywhere, in what only pads the tile too: kernels read and write all of a
 * tile, whose segments may go beyond the last block. */
static void clear_tile(const solver *v, size_t s, size_t t, size_t s_end, size_t t_end)
{
    for (size_t i = s; i < s_end; i++) {
        for (size_t l = most(i, t); l < t_end; l++) {
            memcpy(values_of(v->table, i, l), v->blank,
                   v->table->stride * sizeof *v->blank);
        }
    }
}

/* A segment's memory into the cache, soon to be written. */
static void ask_for(const solver *v, size_t s, size_t t)
{
    const float *values = values_of(v->table, s, t);
    for (size_t m = 0; s <= t && m < v->table->stride; m += LANES) {
        __builtin_prefetch(values + m, 1, 3);
    }
}

/* One small tile, once the tiles to the left and below are complete.  Restarts before
 * `early` and after `late` are still to come.  What the tile at `next` will be written to
 * is asked for meanwhile, segment by segment; NEVER: nothing is. */
static void finish_small(const solver *v, size_t s, size_t t, size_t early, size_t late,
                         size_t next_s, size_t next_t)
{
    if (s < t) {
        multiply(v, s, t, s + SMALL, fewest(early, t + 1));
        multiply(v, s, t, most(late + 1, s + SMALL), t + 1);
    }
    for (size_t i = fewest(s + SMALL, v->n); i-- > s;) {
        for (size_t l = most(i, t); l < fewest(t + SMALL, v->n); l++) {
            if (next_s < NEVER) {
                ask_for(v, next_s + i - s, next_t + l - t);
            }
            finish(v, i, l);
        }
    }
}

/* A large tile on the diagonal: small tiles are cleared one by one, each right before it
 * is worked on.  Short chains have no other, and to clear memory that is out of the
 * cache all at once takes them a quarter of their time. */
static void fill_diagonal(const solver *v, size_t begin, size_t end)
{
    const size_t padded = v->table->padded;
    for (size_t s = end; s > begin;) {
        s -= SMALL;
        for (size_t t = s; t < end; t += SMALL) {
            const bool down = t + SMALL == end; /* then comes the row above */
            const size_t above = s > begin ? s - SMALL : NEVER;
            clear_tile(v, s, t, s + SMALL, t + SMALL);
            finish_small(v, s, t, padded, padded, down ? above : s,
                         down ? above : t + SMALL);
        }
    }
}

/* Whether to go on; asked often enough for a person who waits. */
static bool go_on(solver *v)
{
    if (v->poll.go_on != NULL && !v->poll.go_on(v->poll.context)) {
        atomic_store(&v->stopped, true);
    }
    return !atomic_load(&v->stopped);
}

/* A large tile, unless it is stopped.  To clear it is work too: its pages are new. */
static void fill_large(solver *v, size_t s, size_t t)
{
    const size_t padded = v->table->padded;
    const size_t s_end = fewest(s + v->large, padded);
    const size_t t_end = fewest(t + v->large, padded);
    if (!go_on(v)) {
        return;
    }
    if (s == t) {
        fill_diagonal(v, s, s_end);
        return;
    }
    clear_tile(v, s, t, s_end, t_end);
    for (size_t k = s_end; k <= t; k += v->large) {
        if (!go_on(v)) {
            return;
        }
        multiply_large(v, s, t, s_end, t_end, k, fewest(k + v->large, t + 1));
    }
    for (size_t i = s_end; i > s; i -= SMALL) { /* the restarts s_end .. t are in */
        for (size_t l = t; l < t_end; l += SMALL) {
            finish_small(v, i - SMALL, l, s_end, t, NEVER, NEVER);
        }
    }
}

/* One large tile of a diagonal. */
static void work(void *context, size_t index)
{
    solver *v = context;
    fill_large(v, index * v->large, (index + v->distance) * v->large);
}

/* ---- all of it ---- */

/* Forward peaks, and where nothing is recomputed any more: from there on a segment's
 * values are 0, and no restart is tried. */
static void fill_bounds(solver *v)
{
    const mls_plan_costs *c = v->costs;
    const size_t n = v->n;
    for (size_t s = n; s-- > 0;) {
        int64_t sweep = 0;
        for (size_t t = s; t < n; t++) {
            const size_t cell = mls_plan_cell(n, s, t);
            sweep = mls_plan_sweep(c, s, t + 1, sweep);
            v->sweep[cell] = (int32_t)sweep;
            const int64_t need = mls_plan_save_need(c, s, t);
            const int64_t below =
                s == t ? 0 : c->saved[s] + v->full[mls_plan_cell(n, s + 1, t)];
            const int64_t full = need > below ? need : below;
            v->full[cell] = (int32_t)(full > NEVER ? NEVER : full);
        }
        v->shift[s] = (uint32_t)c->activation[s];
    }
}

/* Accepts one that make_tables left half done. */
static void free_solver(solver *v)
{
    mls_free(v->shift);
    mls_free(v->need);
    mls_free(v->full);
    mls_free(v->sweep);
    mls_free(v->blank);
}

/* The table's memory and the solver's.  Values are anything to begin with: each tile is
 * cleared by the thread that fills it.  Segments that are read together lie far apart, a
 * small page each, so that large pages are asked for. */
static bool make_tables(solver *v, mls_plan_table *out)
{
    const size_t n = v->n, padded = round_up(n, SMALL), cells = n * (n + 1) / 2;
    *out = (mls_plan_table){
        .costs = v->costs, .padded = padded, .stride = stride_of(v->entries - 1)};
    v->shift = mls_alloc(n, sizeof *v->shift);
    v->need = mls_alloc(cells, sizeof *v->need);
    v->full = mls_alloc(cells, sizeof *v->full);
    v->sweep = mls_alloc(cells, sizeof *v->sweep);
    v->blank = mls_alloc(out->stride, sizeof *v->blank);
    out->rows = mls_alloc(padded, sizeof *out->rows);
    out->values =
        mls_realloc(NULL, padded * (padded + 1) / 2, out->stride * sizeof(float));
    if (out->values != NULL) { /* neighbours of a segment lie a small page away each */
        mls_advise_pages(out->values, mls_plan_table_bytes(n, v->entries - 1), true);
    }
    for (size_t s = 0; out->rows != NULL && s < padded; s++) {
        out->rows[s] = mls_plan_cell(padded, s, 0) * out->stride;
    }
    for (size_t m = 0; v->blank != NULL && m < out->stride; m++) {
        v->blank[m] = INFINITY;
    }
    return v->shift != NULL && v->need != NULL && v->full != NULL && v->sweep != NULL &&
           v->blank != NULL && out->rows != NULL && out->values != NULL;
}

/* The costs are borrowed and stay. */
void mls_plan_table_fini(mls_plan_table *table)
{
    mls_free(table->rows);
    mls_free(table->values);
    *table = (mls_plan_table){0};
}

/* Diagonals one after the other; helpers where there is enough for them to do.  Tiles are
 * handed out one by one: whoever began the work comes back to poll between its own. */
static void run_diagonals(solver *v, mls_pool *pool)
{
    const size_t larges = (v->table->padded + v->large - 1) / v->large;
    for (v->distance = 0; v->distance < larges; v->distance++) {
        mls_pool_run(v->n < (size_t)WORTH ? NULL : pool, work, v, larges - v->distance);
        if (atomic_load(&v->stopped)) {
            return;
        }
    }
}

/* Memory first: nothing is computed that could not be kept. */
mls_code mls_plan_slots(const mls_plan_costs *costs, mls_cpu cpu, mls_pool *pool,
                        mls_poll poll, mls_plan_table *out, mls_status *st)
{
    solver v = {.costs = costs,
                .kernels = kernels_of(cpu),
                .table = out,
                .poll = poll,
                .n = costs->blocks,
                .entries = (size_t)costs->budget + 1};
    v.large = v.n < (size_t)WORTH || v.n >= (size_t)MANY ? LARGE : LARGE / 2;
    mls_code code = MLS_OK;
    if (!make_tables(&v, out)) {
        code = mls_fail(st, MLS_E_MEMORY,
                        "no memory for a table of %zu blocks and %zu slots", v.n,
                        v.entries - 1);
    } else {
        fill_bounds(&v);
        run_diagonals(&v, pool);
        if (atomic_load(&v.stopped)) {
            code = mls_fail(st, MLS_E_STOPPED, "planning was stopped");
        }
    }
    free_solver(&v);
    if (code != MLS_OK) {
        mls_plan_table_fini(out);
    }
    return code;
}
