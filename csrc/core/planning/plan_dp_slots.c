/* plan_dp_slots: the solver by slots: fills its table by diagonals of large tiles, shared
 * by threads.
 *
 * A segment s .. t is the range of blocks from s to t, both included. A restart at k,
 * with s < k <= t, runs s .. k - 1 forward, solves k .. t above activation k, and then
 * solves s .. k - 1 again (see plan_costs.h). In loops over a tile of segments, i is the
 * first block of a segment and l the last one; m counts slots of memory.
 *
 * A segment s .. t needs the segments to its left in the row (s .. k - 1) and below it in
 * the column (k .. t). A large tile first uses complete tiles, in blocks of k. Then its
 * small tiles follow, from the diagonal outwards: each computes a product for the
 * complete k, and its last few k segment by segment.
 *
 * Entries are seconds of recomputation. Kernels add the seconds of blocks s .. k - 1 to
 * each restart in two parts, so that inner loops only add and compare.
 */
#include "planning/plan_dp_slots.h"

#include "base/memory.h"
#include "base/search.h"
#include "base/size.h"
#include "planning/plan_dp_slots_kernels.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum {
    SMALL = MLS_PLAN_TILE,
    LARGE = 32, /* segments along each side of a large tile, and restarts in a block */
    WORTH = 64, /* blocks for which helper threads pay off, ... */
    MANY = 256, /* ... and below which only smaller tiles give them enough work */
    TILES = (LARGE / SMALL) * (LARGE / SMALL),
    STRIP = MLS_PLAN_STRIP,
    LANES = MLS_PLAN_LANES,
    NEVER = INT32_MAX / 4 /* more slots than any budget has */
};

typedef struct solver {
    const mls_plan_costs *costs;
    const mls_plan_kernels *kernels;
    mls_plan_table *table;
    mls_poll poll;
    size_t n, entries; /* blocks; values of a segment, one for each number of slots */
    size_t large;    /* segments along each side of a large tile: LARGE, or half of it */
    uint32_t *shift; /* activations, in slots */
    int32_t *need;   /* by mls_plan_cell: first finite entry */
    int32_t *full;   /* by mls_plan_cell: first entry without recomputation */
    int32_t *sweep;  /* by mls_plan_cell: largest forward peak of s .. t */
    float *blank;    /* infinity for each entry of a segment, with padding */
    size_t distance; /* of the current large tiles from the diagonal */
    atomic_bool stopped;
} solver;

/* Returns the smallest multiple of `unit` that is at least `value`. */
static size_t round_up(size_t value, size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Returns the entries to reserve for a segment of `slots` + 1 values: an odd number of
 * cache lines. With an even number, the entries of one step would map to few cache sets
 * and evict each other. */
static size_t stride_of(size_t slots)
{
    const size_t stride = round_up(slots + 1, LANES);
    return stride / LANES % 2 == 0 ? stride + LANES : stride;
}

/* Computes the bytes of the values that make_tables allocates for a chain of `blocks`,
 * without the small arrays; SIZE_MAX if they exceed the address space. */
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

/* Returns the entries of segment s .. t, s <= t: its extra seconds by slots of memory. */
static float *values_of(const mls_plan_table *table, size_t s, size_t t)
{
    return table->values + table->rows[s] + t * table->stride;
}

/* Returns the extra seconds of s .. t within `memory` slots; infinity if it does not fit.
 * A trace asks for negative memory if a size exceeds the remaining memory. */
double mls_plan_dp_slots_value(const void *context, size_t s, size_t t, int64_t memory)
{
    const mls_plan_table *table = context;
    if (memory < 0) {
        return (double)INFINITY;
    }
    return (double)values_of(table, s, t)[memory];
}

/* ---- restarts of a small tile ---- */

/* Returns the seconds of blocks s .. k - 1, which a restart runs once more. */
static float repeated_seconds(const solver *dp, size_t s, size_t k)
{
    return (float)(dp->costs->before[k] - dp->costs->before[s]);
}

/* Tries restarts at k = `from` to before `to` for the segment s .. t, for entries (memory
 * in slots) below `end` only. Each begins at the first entry at which its forward passes
 * and activation k fit (`bound`) and both of its parts are finite. The cells of a row are
 * adjacent; in a column, the distance between cells shrinks by one each time. */
static void try_restarts(const solver *dp, size_t s, size_t t, size_t from, size_t to,
                         size_t end)
{
    if (from >= to) { /* `from` may be beyond the last block */
        return;
    }
    const size_t row = mls_plan_cell(dp->n, s, 0), hold = (size_t)dp->costs->hold[t];
    const int32_t *below = dp->need + mls_plan_cell(dp->n, from, t);
    float *values = values_of(dp->table, s, t);
    end = mls_size_least(end, dp->entries);
    for (size_t k = from; k < to; k++) {
        const size_t shift = dp->shift[k], left = row + k - 1;
        const size_t bound = mls_size_most((size_t)dp->sweep[left] + hold, shift);
        const size_t finite =
            mls_size_most((size_t)dp->need[left], shift + (size_t)*below);
        const size_t first = mls_size_most(bound, finite);
        if (first < end) {
            dp->kernels->restart_row(values + first,
                                     values_of(dp->table, s, k - 1) + first,
                                     values_of(dp->table, k, t) + first - shift,
                                     repeated_seconds(dp, s, k), end - first);
        }
        below += dp->n - k - 1;
    }
}

/* Returns the first entry at which a kernel may try a restart at k for the small tile at
 * s, t: valid for every segment of the tile, and a multiple of LANES. Before `finite`,
 * both parts are finite for no segment; from `bound` on, its forward passes and
 * activation k fit for all. Kernels do not check this and process whole registers, so the
 * entries before the result are computed here. */
static uint32_t first_kernel_entry(const solver *dp, size_t s, size_t t, size_t k)
{
    const size_t s_end = mls_size_least(s + SMALL, dp->n),
                 t_end = mls_size_least(t + SMALL, dp->n);
    size_t sweep = 0, hold = 0, right_need = NEVER, left_need = NEVER;
    for (size_t i = s; i < s_end; i++) {
        const size_t cell = mls_plan_cell(dp->n, i, k - 1);
        left_need = mls_size_least(left_need, (size_t)dp->need[cell]);
        sweep = mls_size_most(sweep, (size_t)dp->sweep[cell]);
    }
    for (size_t l = t; l < t_end; l++) {
        right_need =
            mls_size_least(right_need, (size_t)dp->need[mls_plan_cell(dp->n, k, l)]);
        hold = mls_size_most(hold, (size_t)dp->costs->hold[l]);
    }
    const size_t bound =
        mls_size_most(sweep + hold, dp->shift[k]); /* the largest of the tile */
    const size_t finite =
        mls_size_most(right_need + dp->shift[k], left_need) / LANES * LANES;
    if (finite >= bound) {
        return (uint32_t)finite;
    }
    const size_t begin = round_up(bound, LANES);
    for (size_t i = s; i < s_end; i++) {
        for (size_t l = t; l < t_end; l++) {
            try_restarts(dp, i, l, k, k + 1, begin);
        }
    }
    return (uint32_t)begin;
}

/* Returns the end of the entries of a small tile that are neither infinite nor free of
 * recomputation. */
static size_t end_of_entries(const solver *dp, size_t s, size_t t)
{
    size_t full = 0;
    for (size_t i = s; i < mls_size_least(s + SMALL, dp->n); i++) {
        for (size_t l = t; l < mls_size_least(t + SMALL, dp->n); l++) {
            full = mls_size_most(full, (size_t)dp->full[mls_plan_cell(dp->n, i, l)]);
        }
    }
    return round_up(mls_size_least(full, dp->entries), LANES);
}

/* A kernel's arguments for a block of restarts. */
typedef struct block {
    uint32_t begin[LARGE]; /* as in mls_plan_tile */
    float plus[LARGE];
} block;

/* Returns the kernel's arguments for restarts `first` to before `last` of the small tile
 * at s, t. The arrays of `b`, which the result borrows, receive the first entry and the
 * extra seconds of each restart, for the tile's last row; `rest` has the seconds that
 * other rows need in addition. */
static mls_plan_tile prepare_tile(const solver *dp, block *b, size_t s, size_t t,
                                  size_t first, size_t last)
{
    const size_t s_last = mls_size_least(s + SMALL, dp->n) - 1;
    mls_plan_tile job = {.values = dp->table->values,
                         .rows = dp->table->rows,
                         .stride = dp->table->stride,
                         .shift = dp->shift,
                         .begin = b->begin,
                         .plus = b->plus,
                         .s = s,
                         .t = t,
                         .first = first,
                         .last = last,
                         .from = NEVER,
                         .to = end_of_entries(dp, s, t)};
    for (size_t i = 0; i < SMALL; i++) {
        job.rest[i] = s + i < s_last ? repeated_seconds(dp, s + i, s_last) : 0;
    }
    for (size_t k = first; k < last; k++) {
        b->begin[k - first] = first_kernel_entry(dp, s, t, k);
        b->plus[k - first] = repeated_seconds(dp, s_last, k);
        job.from = mls_size_least(job.from, b->begin[k - first]);
    }
    return job;
}

/* Tries restarts `first` to before `last` for all segments of the small tile at s, t, up
 * to LARGE of them at a time. */
static void multiply_tile(const solver *dp, size_t s, size_t t, size_t first, size_t last)
{
    block b;
    for (size_t k = first; k < last; k += LARGE) {
        const mls_plan_tile job =
            prepare_tile(dp, &b, s, t, k, mls_size_least(k + LARGE, last));
        dp->kernels->restart_tile(&job);
    }
}

/* Tries restarts `first` to before `last`, at most LARGE, for a large tile above the
 * diagonal, rows s to before s_end and columns t to before t_end, strip by strip: the
 * entries of one strip stay in the cache for all small tiles. */
static void multiply_large(const solver *dp, size_t s, size_t t, size_t s_end,
                           size_t t_end, size_t first, size_t last)
{
    block blocks[TILES];
    mls_plan_tile jobs[TILES];
    size_t count = 0, from = NEVER, to = 0;
    for (size_t i = s; i < s_end; i += SMALL) {
        for (size_t l = t; l < t_end; l += SMALL) {
            jobs[count] = prepare_tile(dp, &blocks[count], i, l, first, last);
            from = mls_size_least(from, jobs[count].from);
            to = mls_size_most(to, jobs[count].to);
            count++;
        }
    }
    for (size_t strip = from; strip < to; strip += STRIP) {
        for (size_t i = 0; i < count; i++) {
            mls_plan_tile job = jobs[i];
            job.from = mls_size_most(job.from, strip);
            job.to = mls_size_least(job.to, strip + STRIP);
            dp->kernels->restart_tile(&job);
        }
    }
}

/* ---- single segments ---- */

/* Tries to save s at the start of s .. t, s < t, with `occupied` slots used by s during
 * the segment s + 1 .. t, at a cost of `seconds`: its saved tensors, or after an offload
 * only its output. */
static void try_save(const solver *dp, size_t s, size_t t, int64_t occupied,
                     double seconds)
{
    const mls_plan_costs *c = dp->costs;
    const size_t shift = (size_t)occupied;
    const size_t rest = shift + (size_t)dp->need[mls_plan_cell(dp->n, s + 1, t)];
    const size_t first = mls_size_most((size_t)mls_plan_save_need(c, s, t), rest);
    if (first < dp->entries) {
        dp->kernels->save_row(values_of(dp->table, s, t) + first,
                              values_of(dp->table, s + 1, t) + first - shift,
                              (float)seconds, dp->entries - first);
    }
}

/* Returns the first of `count` entries that is finite, or `count`. A segment that fits
 * some memory fits more, so all later entries are finite too. */
static size_t first_finite(const float *values, size_t count)
{
    size_t at;
    MLS_FIND_FIRST(at, count, isfinite(values[at]));
    return at;
}

/* Completes segment s .. t, for which all restarts outside its own small tiles have been
 * tried: tries the others, and both kinds of saves. `dp->need` receives its first finite
 * entry, or NEVER. */
static void finish_segment(const solver *dp, size_t s, size_t t)
{
    const mls_plan_costs *c = dp->costs;
    float *values = values_of(dp->table, s, t);
    const size_t cell = mls_plan_cell(dp->n, s, t);
    const size_t s_end = s / SMALL * SMALL + SMALL, t_begin = t / SMALL * SMALL;
    /* restarts k in the small tile of the first block s, then in that of the last block
     * t; from `full` on nothing is recomputed, so a restart gains nothing */
    try_restarts(dp, s, t, s + 1, mls_size_least(s_end, t + 1), (size_t)dp->full[cell]);
    try_restarts(dp, s, t, mls_size_most(s_end, t_begin + 1), t + 1,
                 (size_t)dp->full[cell]);
    if (s == t) {
        for (size_t m = (size_t)mls_plan_save_need(c, s, t); m < dp->entries; m++) {
            values[m] = 0;
        }
    } else {
        try_save(dp, s, t, c->saved[s], 0);
        if (isfinite(c->offload_seconds[s])) {
            try_save(dp, s, t, c->activation[s + 1], c->offload_seconds[s]);
        }
    }
    const size_t first = first_finite(values, dp->entries);
    dp->need[cell] = first == dp->entries ? NEVER : (int32_t)first;
}

/* ---- large tiles ---- */

/* Sets all entries of the segments i .. l of a tile to infinity, for i from s to before
 * s_end and l from t (or i, if larger) to before t_end. Includes padding: kernels read
 * and write whole tiles, whose segments may be beyond the last block. */
static void clear_tile(const solver *dp, size_t s, size_t t, size_t s_end, size_t t_end)
{
    for (size_t i = s; i < s_end; i++) {
        for (size_t l = mls_size_most(i, t); l < t_end; l++) {
            memcpy(values_of(dp->table, i, l), dp->blank,
                   dp->table->stride * sizeof *dp->blank);
        }
    }
}

/* Fetches the entries of segment s .. t into the cache; does nothing if s > t. */
static void prefetch_segment(const solver *dp, size_t s, size_t t)
{
    const float *values = values_of(dp->table, s, t);
    for (size_t m = 0; s <= t && m < dp->table->stride; m += LANES) {
        __builtin_prefetch(values + m, 1, 3);
    }
}

/* Completes the small tile at s, t, after the tiles to its left and below it. Restarts
 * before `early` and after `late` are still missing. Prefetches the tile at next_s,
 * next_t meanwhile, segment by segment; next_s NEVER: no prefetch. */
static void finish_small(const solver *dp, size_t s, size_t t, size_t early, size_t late,
                         size_t next_s, size_t next_t)
{
    if (s < t) {
        multiply_tile(dp, s, t, s + SMALL, mls_size_least(early, t + 1));
        multiply_tile(dp, s, t, mls_size_most(late + 1, s + SMALL), t + 1);
    }
    for (size_t i = mls_size_least(s + SMALL, dp->n); i-- > s;) {
        for (size_t l = mls_size_most(i, t); l < mls_size_least(t + SMALL, dp->n); l++) {
            if (next_s < NEVER) {
                prefetch_segment(dp, next_s + i - s, next_t + l - t);
            }
            finish_segment(dp, i, l);
        }
    }
}

/* Fills the large tile on the diagonal that has blocks `begin` to before `end`. Small
 * tiles are cleared one by one, right before use. Short chains have only this tile;
 * clearing all of its memory at once, outside the cache, would take a quarter of their
 * time. */
static void fill_diagonal(const solver *dp, size_t begin, size_t end)
{
    const size_t padded = dp->table->padded;
    for (size_t s = end; s > begin;) {
        s -= SMALL;
        for (size_t t = s; t < end; t += SMALL) {
            const bool is_last_in_row = t + SMALL == end; /* next: the row above */
            const size_t above = s > begin ? s - SMALL : NEVER;
            clear_tile(dp, s, t, s + SMALL, t + SMALL);
            finish_small(dp, s, t, padded, padded, is_last_in_row ? above : s,
                         is_last_in_row ? above : t + SMALL);
        }
    }
}

/* Polls, and returns whether to go on; called often enough for an interactive user. */
static bool go_on(solver *dp)
{
    if (dp->poll.go_on != NULL && !dp->poll.go_on(dp->poll.context)) {
        atomic_store(&dp->stopped, true);
    }
    return !atomic_load(&dp->stopped);
}

/* Fills the large tile at s, t, after those to its left and below it, unless stopped.
 * Clearing it takes time too: its pages are new. */
static void fill_large(solver *dp, size_t s, size_t t)
{
    const size_t padded = dp->table->padded;
    const size_t s_end = mls_size_least(s + dp->large, padded);
    const size_t t_end = mls_size_least(t + dp->large, padded);
    if (!go_on(dp)) {
        return;
    }
    if (s == t) {
        fill_diagonal(dp, s, s_end);
        return;
    }
    clear_tile(dp, s, t, s_end, t_end);
    for (size_t k = s_end; k <= t; k += dp->large) {
        if (!go_on(dp)) {
            return;
        }
        multiply_large(dp, s, t, s_end, t_end, k, mls_size_least(k + dp->large, t + 1));
    }
    for (size_t i = s_end; i > s; i -= SMALL) { /* restarts s_end .. t are done */
        for (size_t l = t; l < t_end; l += SMALL) {
            finish_small(dp, i - SMALL, l, s_end, t, NEVER, NEVER);
        }
    }
}

/* Thread function: fills large tile `index` of the diagonal at dp->distance. */
static void fill_task(void *context, size_t index)
{
    solver *dp = context;
    fill_large(dp, index * dp->large, (index + dp->distance) * dp->large);
}

/* ---- the solver ---- */

/* Computes for each segment the largest forward peak (`sweep`) and the entry from which
 * on nothing is recomputed (`full`), where values are 0 and no restart is tried; and
 * `shift`. */
static void fill_bounds(solver *dp)
{
    const mls_plan_costs *c = dp->costs;
    const size_t n = dp->n;
    for (size_t s = n; s-- > 0;) {
        int64_t sweep = 0;
        for (size_t t = s; t < n; t++) {
            const size_t cell = mls_plan_cell(n, s, t);
            sweep = mls_plan_sweep(c, s, t + 1, sweep);
            dp->sweep[cell] = (int32_t)sweep;
            const int64_t need = mls_plan_save_need(c, s, t);
            const int64_t below =
                s == t ? 0 : c->saved[s] + dp->full[mls_plan_cell(n, s + 1, t)];
            const int64_t full = need > below ? need : below;
            dp->full[cell] = (int32_t)(full > NEVER ? NEVER : full);
        }
        dp->shift[s] = (uint32_t)c->activation[s];
    }
}

/* Frees the solver's arrays, but not the table, which is the result. */
static void free_solver(solver *dp)
{
    mls_free(dp->shift);
    mls_free(dp->need);
    mls_free(dp->full);
    mls_free(dp->sweep);
    mls_free(dp->blank);
}

/* Allocates the memory of the table and of the solver; false: memory runs out, and the
 * caller frees both. The values are not initialised: the thread that fills a tile clears
 * it first. Segments that are read together are far apart, so huge pages are
 * requested. */
static bool make_tables(solver *dp, mls_plan_table *out)
{
    const size_t n = dp->n, padded = round_up(n, SMALL), cells = n * (n + 1) / 2;
    *out = (mls_plan_table){
        .costs = dp->costs, .padded = padded, .stride = stride_of(dp->entries - 1)};
    dp->shift = mls_alloc(n, sizeof *dp->shift);
    dp->need = mls_alloc(cells, sizeof *dp->need);
    dp->full = mls_alloc(cells, sizeof *dp->full);
    dp->sweep = mls_alloc(cells, sizeof *dp->sweep);
    dp->blank = mls_alloc(out->stride, sizeof *dp->blank);
    out->rows = mls_alloc(padded, sizeof *out->rows);
    out->values =
        mls_realloc(NULL, padded * (padded + 1) / 2, out->stride * sizeof(float));
    if (out->values != NULL) { /* adjacent segments are a small page apart */
        mls_advise_pages(out->values, mls_plan_table_bytes(n, dp->entries - 1),
                         true /* huge pages */);
    }
    for (size_t s = 0; out->rows != NULL && s < padded; s++) {
        out->rows[s] = mls_plan_cell(padded, s, 0) * out->stride;
    }
    for (size_t m = 0; dp->blank != NULL && m < out->stride; m++) {
        dp->blank[m] = INFINITY;
    }
    return dp->shift != NULL && dp->need != NULL && dp->full != NULL &&
           dp->sweep != NULL && dp->blank != NULL && out->rows != NULL &&
           out->values != NULL;
}

void mls_plan_table_fini(mls_plan_table *table)
{
    mls_free(table->rows);
    mls_free(table->values);
    *table = (mls_plan_table){0};
}

/* Fills the diagonals one after the other, with helper threads if there is enough work.
 * Tiles are dispatched one by one, so the calling thread polls between its own. */
static void run_diagonals(solver *dp, mls_pool *pool)
{
    const size_t larges = (dp->table->padded + dp->large - 1) / dp->large;
    for (dp->distance = 0; dp->distance < larges; dp->distance++) {
        mls_pool_run(dp->n < (size_t)WORTH ? NULL : pool, fill_task, dp,
                     larges - dp->distance);
        if (atomic_load(&dp->stopped)) {
            return;
        }
    }
}

/* Solves every segment by slots. Allocates first: nothing is computed that could not be
 * stored. */
mls_code mls_plan_dp_slots(const mls_plan_costs *costs, mls_cpu cpu, mls_pool *pool,
                           mls_poll poll, mls_plan_table *out, mls_status *st)
{
    solver dp = {.costs = costs,
                 .kernels = MLS_CPU_TABLE(cpu, mls_plan),
                 .table = out,
                 .poll = poll,
                 .n = costs->blocks,
                 .entries = (size_t)costs->budget + 1};
    dp.large = dp.n < (size_t)WORTH || dp.n >= (size_t)MANY ? LARGE : LARGE / 2;
    mls_code code = MLS_OK;
    if (!make_tables(&dp, out)) {
        code = mls_fail(st, MLS_E_MEMORY,
                        "no memory for a table of %zu blocks and %zu slots", dp.n,
                        dp.entries - 1);
    } else {
        fill_bounds(&dp);
        run_diagonals(&dp, pool);
        if (atomic_load(&dp.stopped)) {
            code = mls_fail(st, MLS_E_STOPPED, "planning was stopped");
        }
    }
    free_solver(&dp);
    if (code != MLS_OK) {
        mls_plan_table_fini(out);
    }
    return code;
}
