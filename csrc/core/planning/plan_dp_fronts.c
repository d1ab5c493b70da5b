/* plan_dp_fronts: the exact solver: computes the fronts (memory, seconds) of all
 * segments, diagonal by diagonal.
 *
 * A segment s .. t is the range of blocks from s to t, both included. A restart at k,
 * with s < k <= t, runs s .. k - 1 forward, solves k .. t above activation k, and then
 * solves s .. k - 1 again (see plan_costs.h).
 *
 * Segments depend only on shorter ones, so threads share the segments of one length. The
 * value of a choice for some memory is a constant, plus the value of one front at that
 * memory minus a shift, plus the value of a second front for a restart.
 *
 * On the grid, entry g is the value at memory g * step. Within interval g (from g * step
 * to the next entry), the value of a choice is at least the one computed from the upper
 * entries. The best value at the interval's beginning is an upper bound for the whole
 * interval. So a choice is considered only if its lower bound is below that upper bound.
 */
#include "planning/plan_dp_fronts.h"

#include "base/memory.h"
#include "base/search.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { GRID = MLS_PLAN_GRID, ROW = GRID + 1 };

/* One way to solve a segment. Its value at some memory is `seconds`, plus the value of
 * `right` at memory - shift, plus the value of `left` at that memory. */
typedef struct option {
    const mls_plan_front *right, *left; /* `left` is NULL if there is only one front */
    const double *right_grid, *left_grid;
    int64_t shift, start; /* added to the memory of `right`; least memory of the choice */
    size_t low, high;     /* the shift in grid steps, rounded down and up */
    double seconds;
} option;

typedef struct points {
    mls_plan_point *items;
    size_t count, room;
} points;

typedef struct scratch {
    atomic_bool in_use;
    option *options;
    size_t option_count;
    uint16_t *lists; /* for each interval, blocks + 2 entries: the options that matter */
    size_t counts[GRID];
    double upper[GRID]; /* value of `best` at the interval's beginning */
    size_t best[GRID];  /* the option that is fastest there; SIZE_MAX: none fits */
    /* of the current segment; in one interval the envelope of the choices tried so far,
     * the points of one choice, and the envelope of both */
    points front, segment, added, merged;
} scratch;

typedef struct solver {
    const mls_plan_costs *costs;
    mls_plan_fronts *out;
    mls_poll poll;
    size_t most_points, length; /* length: of the current segments, minus 1 */
    double noise;               /* differences of seconds up to this are rounding */
    scratch *scratches;
    size_t tasks; /* scratches, one for each thread */
    atomic_size_t points;
    atomic_int failed; /* an mls_code */
} solver;

static const double zeros[ROW]; /* the grid of a missing front */

/* ---- points ---- */

/* Ensures that a list has room for `room` points; a list that grows gets twice as much.
 * Returns false if memory runs out; the list is then unchanged. */
static bool reserve_points(points *p, size_t room)
{
    if (room <= p->room) {
        return true;
    }
    mls_plan_point *items = mls_realloc(p->items, 2 * room, sizeof *items);
    if (items == NULL) {
        return false;
    }
    p->items = items;
    p->room = 2 * room;
    return true;
}

/* Returns the index of the last point of a front that needs at most `memory`. The front
 * is not empty, and its first point needs no more than that. */
static size_t find_point(const mls_plan_front *f, int64_t memory)
{
    size_t after;
    MLS_FIND_FIRST(after, f->count, f->points[after].memory > memory);
    return after - 1;
}

/* Returns the extra seconds of s .. t within `memory`; infinity if it does not fit. Less
 * memory than the first point's is not enough. */
double mls_plan_dp_fronts_value(const void *context, size_t s, size_t t, int64_t memory)
{
    const mls_plan_fronts *f = context;
    const mls_plan_front *front = &f->fronts[mls_plan_cell(f->blocks, s, t)];
    if (front->count == 0 || memory < front->points[0].memory) {
        return (double)INFINITY;
    }
    return front->points[find_point(front, memory)].seconds;
}

/* ---- options of a segment ---- */

/* Completes the choice `o` and adds it to the list, unless one of its fronts is empty or
 * it needs more memory than `limit`. `threshold` is the least memory that it needs
 * without its fronts. */
static void add_option(solver *dp, scratch *work, option o, int64_t threshold,
                       int64_t limit)
{
    if (o.right->count == 0 || (o.left != NULL && o.left->count == 0)) {
        return;
    }
    const int64_t right = o.right->points[0].memory + o.shift;
    const int64_t left = o.left == NULL ? 0 : o.left->points[0].memory;
    o.start = right > left ? right : left;
    o.start = threshold > o.start ? threshold : o.start;
    if (o.start > limit) {
        return;
    }
    const int64_t step = dp->out->step;
    o.low = (size_t)(o.shift / step);
    o.high = o.low + (o.shift % step != 0 ? 1 : 0);
    work->options[work->option_count++] = o;
}

/* Lists all choices of s .. t, s < t, that fit within `limit` bytes above activation s:
 * save, offload, and every restart. */
static void list_options(solver *dp, scratch *work, size_t s, size_t t, int64_t limit)
{
    const mls_plan_costs *c = dp->costs;
    const mls_plan_fronts *f = dp->out;
    const size_t n = c->blocks, below = mls_plan_cell(n, s + 1, t);
    const int64_t save = mls_plan_save_need(c, s, t);
    option kept_option = {.right = &f->fronts[below],
                          .right_grid = f->grid + below * ROW,
                          .left_grid = zeros,
                          .shift = c->saved[s]};
    work->option_count = 0;
    add_option(dp, work, kept_option, save, limit);
    if (isfinite(c->offload_seconds[s])) {
        kept_option.shift = c->activation[s + 1];
        kept_option.seconds = c->offload_seconds[s];
        add_option(dp, work, kept_option, save, limit);
    }
    int64_t sweep = 0;
    for (size_t k = s + 1; k <= t; k++) {
        const size_t right = mls_plan_cell(n, k, t), left = mls_plan_cell(n, s, k - 1);
        sweep = mls_plan_sweep(c, s, k, sweep);
        const option restart = {.right = &f->fronts[right],
                                .left = &f->fronts[left],
                                .right_grid = f->grid + right * ROW,
                                .left_grid = f->grid + left * ROW,
                                .shift = c->activation[k],
                                .seconds = c->before[k] - c->before[s]};
        add_option(dp, work, restart, sweep + c->hold[t], limit);
    }
}

/* ---- the grid ---- */

/* Finds the best choice at the beginning of each interval (`work->best`) and its value
 * (`work->upper`). Shifted fronts are read at less memory than they have, so errors only
 * make values too large. */
static void bound_above(const solver *dp, scratch *work)
{
    const int64_t step = dp->out->step;
    for (size_t g = 0; g < GRID; g++) {
        work->upper[g] = (double)INFINITY;
        work->best[g] = SIZE_MAX;
        work->counts[g] = 0;
    }
    for (size_t i = 0; i < work->option_count; i++) {
        const option *o = &work->options[i];
        const size_t begin = (size_t)((o->start + step - 1) / step);
        for (size_t g = begin > o->high ? begin : o->high; g < GRID; g++) {
            const double value =
                o->seconds + o->right_grid[g - o->high] + o->left_grid[g];
            if (value < work->upper[g]) {
                work->upper[g] = value;
                work->best[g] = i;
            }
        }
    }
}

/* Lists the choices that may matter in each interval (`work->lists`). Here fronts are
 * read at more memory, so errors only make values too small. The best choice of
 * bound_above always matters. */
static void list_by_interval(const solver *dp, scratch *work)
{
    const size_t stride = dp->costs->blocks + 2;
    for (size_t i = 0; i < work->option_count; i++) {
        const option *o = &work->options[i];
        for (size_t g = (size_t)(o->start / dp->out->step); g < GRID; g++) {
            const double value =
                o->seconds + o->right_grid[g + 1 - o->low] + o->left_grid[g + 1];
            if (value < work->upper[g] - dp->noise || work->best[g] == i) {
                work->lists[g * stride + work->counts[g]++] = (uint16_t)i;
            }
        }
    }
}

/* Fills the front's row of the grid: the value at each entry's memory, which is `step`
 * more than the memory of the entry before, or infinity. */
static void fill_grid(const mls_plan_front *f, int64_t step, double *row)
{
    size_t i = 0;
    for (size_t g = 0; g < ROW; g++) {
        const int64_t memory = (int64_t)g * step;
        while (i < f->count && f->points[i].memory <= memory) {
            i++;
        }
        row[g] = i == 0 ? (double)INFINITY : f->points[i - 1].seconds;
    }
}

/* ---- envelopes ---- */

/* Returns the memory, plus `shift`, from which on the front has its next value after
 * point i; INT64_MAX after the last point. */
static int64_t next_memory(const mls_plan_front *f, size_t i, int64_t shift)
{
    return i + 1 < f->count ? f->points[i + 1].memory + shift : INT64_MAX;
}

/* Writes the points of a choice with memory `from` to below `to`: traverses both fronts
 * together, with a point at each memory at which one of them changes. Returns false if
 * memory runs out. */
static bool unroll_option(const option *o, int64_t from, int64_t to, points *out)
{
    const mls_plan_front *r = o->right, *l = o->left;
    out->count = 0;
    if (!reserve_points(out, r->count + (l == NULL ? 0 : l->count) + 1)) {
        return false;
    }
    int64_t memory = from > o->start ? from : o->start;
    size_t i = find_point(r, memory - o->shift);
    size_t j = l == NULL ? 0 : find_point(l, memory);
    while (memory < to) {
        const double left = l == NULL ? 0 : l->points[j].seconds;
        out->items[out->count++] =
            (mls_plan_point){memory, o->seconds + r->points[i].seconds + left};
        const int64_t right_at = next_memory(r, i, o->shift);
        const int64_t left_at = l == NULL ? INT64_MAX : next_memory(l, j, 0);
        memory = right_at < left_at ? right_at : left_at;
        i += right_at == memory ? 1 : 0;
        j += left_at == memory ? 1 : 0;
        if (memory == INT64_MAX) {
            break;
        }
    }
    return true;
}

/* Computes the lower envelope of two lists: ordered by memory, keeping only points that
 * are faster than all before. Returns false if memory runs out. */
static bool merge_points(const points *a, const points *b, points *out)
{
    size_t i = 0, j = 0;
    double best = (double)INFINITY;
    out->count = 0;
    if (!reserve_points(out, a->count + b->count)) {
        return false;
    }
    while (i < a->count || j < b->count) {
        const bool first =
            j == b->count || (i < a->count && a->items[i].memory <= b->items[j].memory);
        const mls_plan_point p = first ? a->items[i++] : b->items[j++];
        if (p.seconds < best) {
            best = p.seconds;
            out->items[out->count++] = p;
        }
    }
    return true;
}

/* Appends the points of `added`, ordered by memory, that are better than the front's last
 * one by more than rounding. Of points with equal memory, the last one is the best.
 * Returns false if memory runs out. */
static bool append_points(const solver *dp, points *front, const points *added)
{
    if (!reserve_points(front, front->count + added->count)) {
        return false;
    }
    for (size_t i = 0; i < added->count; i++) {
        const mls_plan_point p = added->items[i];
        mls_plan_point *last = front->count > 0 ? &front->items[front->count - 1] : NULL;
        if (last != NULL && p.seconds >= last->seconds - dp->noise) {
            continue;
        }
        if (last != NULL && p.memory == last->memory) {
            *last = p;
        } else {
            front->items[front->count++] = p;
        }
    }
    return true;
}

/* Computes the front of a segment up to `limit` bytes in `work->front`, interval by
 * interval: the lower envelope of the choices listed for each. Lists are swapped instead
 * of copied. Returns false if memory runs out. */
static bool sweep_intervals(const solver *dp, scratch *work, int64_t limit)
{
    const size_t stride = dp->costs->blocks + 2;
    work->front.count = 0;
    for (size_t g = 0; g < GRID; g++) {
        const int64_t from = (int64_t)g * dp->out->step;
        const int64_t end = from + dp->out->step;
        const int64_t to = end > limit ? limit + 1 : end;
        work->segment.count = 0;
        for (size_t i = 0; i < work->counts[g]; i++) {
            const option *o = &work->options[work->lists[g * stride + i]];
            if (!unroll_option(o, from, to, &work->added) ||
                !merge_points(&work->segment, &work->added, &work->merged)) {
                return false;
            }
            const points swapped = work->segment;
            work->segment = work->merged;
            work->merged = swapped;
        }
        if (!append_points(dp, &work->front, &work->segment)) {
            return false;
        }
    }
    return true;
}

/* ---- segments ---- */

/* Stores a copy of a segment's front in entry `cell` of the table, and its row of the
 * grid. All threads share the count of points: MLS_E_SIZE beyond the limit, which stops
 * all of them; MLS_E_MEMORY. */
static mls_code store_front(solver *dp, const points *front, size_t cell)
{
    mls_plan_front *f = &dp->out->fronts[cell];
    const size_t before = atomic_fetch_add(&dp->points, front->count);
    if (front->count >
        dp->most_points - (before < dp->most_points ? before : dp->most_points)) {
        return MLS_E_SIZE;
    }
    if (front->count > 0) {
        f->points = mls_alloc(front->count, sizeof *f->points);
        if (f->points == NULL) {
            return MLS_E_MEMORY;
        }
        memcpy(f->points, front->items, front->count * sizeof *f->points);
        f->count = front->count;
    }
    fill_grid(f, dp->out->step, dp->out->grid + cell * ROW);
    return MLS_OK;
}

/* Computes the front of the blocks s to t from those of shorter segments, and stores it.
 * The limit is the budget without activation s, which is held meanwhile: no schedule of a
 * longer segment leaves more memory to this one. MLS_E_MEMORY, MLS_E_SIZE, without a
 * status. */
static mls_code solve_segment(solver *dp, scratch *work, size_t s, size_t t)
{
    const mls_plan_costs *c = dp->costs;
    const int64_t limit = c->budget - (s == 0 ? 0 : c->activation[s]);
    if (s == t) {
        const mls_plan_point only = {mls_plan_save_need(c, s, t), 0};
        work->front.count = 0;
        if (only.memory <= limit) {
            if (!reserve_points(&work->front, 1)) {
                return MLS_E_MEMORY;
            }
            work->front.items[work->front.count++] = only;
        }
    } else {
        list_options(dp, work, s, t, limit);
        bound_above(dp, work);
        list_by_interval(dp, work);
        if (!sweep_intervals(dp, work, limit)) {
            return MLS_E_MEMORY;
        }
    }
    return store_front(dp, &work->front, mls_plan_cell(c->blocks, s, t));
}

/* Takes a free scratch, for the caller to mark as free again; there is one for each
 * thread. If more threads have appeared since, the last of them spins here until another
 * segment is finished. */
static scratch *take_scratch(solver *dp)
{
    for (size_t i = 0;; i = (i + 1) % dp->tasks) {
        if (!atomic_exchange(&dp->scratches[i].in_use, true)) {
            return &dp->scratches[i];
        }
    }
}

/* Thread function: solves the segment of dp->length + 1 blocks that starts at s. A
 * segment takes little time, so polling between segments is enough. */
static void solve_task(void *context, size_t s)
{
    solver *dp = context;
    if (atomic_load(&dp->failed) != MLS_OK) {
        return;
    }
    if (dp->poll.go_on != NULL && !dp->poll.go_on(dp->poll.context)) {
        atomic_store(&dp->failed, MLS_E_STOPPED);
        return;
    }
    scratch *work = take_scratch(dp);
    const mls_code code = solve_segment(dp, work, s, s + dp->length);
    atomic_store(&work->in_use, false);
    if (code != MLS_OK) {
        atomic_store(&dp->failed, (int)code);
    }
}

/* Solves all segments, shorter ones first: segments of one length (`dp->length`) do not
 * depend on each other, so threads share them. Stops at the first failure. */
static void run_diagonals(solver *dp, mls_pool *pool)
{
    enum { WORTH = 24 }; /* blocks for which waking helper threads pays off */
    const size_t n = dp->costs->blocks;
    for (dp->length = 0; dp->length < n; dp->length++) {
        const bool is_single_thread = n < WORTH || dp->length == 0;
        mls_pool_run(is_single_thread ? NULL : pool, solve_task, dp, n - dp->length);
        if (atomic_load(&dp->failed) != MLS_OK) {
            return;
        }
    }
}

/* ---- the solver ---- */

/* Frees the scratch space of all threads; accepts NULL. */
static void free_scratches(scratch *scratches, size_t count)
{
    for (size_t i = 0; scratches != NULL && i < count; i++) {
        mls_free(scratches[i].options);
        mls_free(scratches[i].lists);
        mls_free(scratches[i].front.items);
        mls_free(scratches[i].segment.items);
        mls_free(scratches[i].added.items);
        mls_free(scratches[i].merged.items);
    }
    mls_free(scratches);
}

/* Creates `count` scratches, one for each thread, for a chain of `blocks` blocks; lists
 * of points grow on use. NULL if memory runs out. */
static scratch *new_scratches(size_t count, size_t blocks)
{
    scratch *all = mls_alloc(count, sizeof *all);
    for (size_t i = 0; all != NULL && i < count; i++) {
        all[i].options = mls_alloc(blocks + 2, sizeof *all[i].options);
        all[i].lists = mls_alloc(blocks + 2, GRID * sizeof *all[i].lists);
        if (all[i].options == NULL || all[i].lists == NULL) {
            free_scratches(all, count);
            return NULL;
        }
    }
    return all;
}

/* Allocates the tables, with one entry and one grid row for each segment. The step is
 * chosen so that the last grid entry is above the budget. Returns false if memory runs
 * out. */
static bool make_fronts(const mls_plan_costs *c, mls_plan_fronts *out)
{
    const size_t cells = c->blocks * (c->blocks + 1) / 2;
    *out = (mls_plan_fronts){.blocks = c->blocks, .step = c->budget / GRID + 1};
    out->fronts = mls_alloc(cells, sizeof *out->fronts);
    out->grid = mls_alloc(cells, ROW * sizeof *out->grid);
    if (out->fronts == NULL || out->grid == NULL) {
        mls_plan_fronts_fini(out);
        return false;
    }
    return true;
}

/* Frees all fronts, and zeroes the struct. Each front has its own allocation, because the
 * lengths become known one by one. */
void mls_plan_fronts_fini(mls_plan_fronts *f)
{
    const size_t cells = f->fronts == NULL ? 0 : f->blocks * (f->blocks + 1) / 2;
    for (size_t i = 0; i < cells; i++) {
        mls_free(f->fronts[i].points);
    }
    mls_free(f->fronts);
    mls_free(f->grid);
    *f = (mls_plan_fronts){0};
}

/* Fills the status for a code that solving ended with, and returns the code; `most` is
 * the limit of points, for the message. Threads only set a code, because a status has a
 * single writer. */
static mls_code fail_planning(mls_code code, const mls_plan_costs *c, size_t most,
                              mls_status *st)
{
    switch (code) {
    case MLS_E_STOPPED:
        return mls_fail(st, code, "planning was stopped");
    case MLS_E_SIZE:
        return mls_fail(st, code,
                        "a plan of %zu blocks to the byte needs more than %zu points: "
                        "choose a number of slots",
                        c->blocks, most);
    default:
        return mls_fail(st, MLS_E_MEMORY, "no memory for a plan of %zu blocks",
                        c->blocks);
    }
}

/* Solves every segment to the byte. Times that differ by less than the rounding of the
 * sums count as equal. */
mls_code mls_plan_dp_fronts(const mls_plan_costs *costs, size_t most_points,
                            mls_pool *pool, mls_poll poll, mls_plan_fronts *out,
                            mls_status *st)
{
    const size_t tasks = pool == NULL ? 1 : mls_pool_threads(pool);
    solver dp = {.costs = costs,
                 .out = out,
                 .poll = poll,
                 .most_points = most_points,
                 .noise = 1e-13 * costs->before[costs->blocks],
                 .tasks = tasks};
    *out = (mls_plan_fronts){0};
    dp.scratches = new_scratches(tasks, costs->blocks);
    if (dp.scratches == NULL || !make_fronts(costs, out)) {
        free_scratches(dp.scratches, tasks);
        return fail_planning(MLS_E_MEMORY, costs, most_points, st);
    }
    run_diagonals(&dp, pool);
    free_scratches(dp.scratches, tasks);
    const mls_code code = (mls_code)atomic_load(&dp.failed);
    if (code != MLS_OK) {
        mls_plan_fronts_fini(out);
        return fail_planning(code, costs, most_points, st);
    }
    out->points = atomic_load(&dp.points);
    return MLS_OK;
}
