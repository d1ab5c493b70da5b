/* plan: which solver is asked, and what happens where one cannot answer.
 *
 * A budget that holds the plain run needs no solver.  Otherwise fronts are the first
 * choice, since they are exact; they grow with the number of different sums that sizes
 * have, which nobody knows in advance, so they have a cap.  Beyond it a table of slots is
 * made, whose size is known: it is refused where it would be too large.  Slots round
 * every size up, so that a budget near the least one may seem too small: then any
 * schedule that fits is better than none.
 *
 * Only the table of needs, in bytes, decides that nothing fits.
 */
#include "planning/plan.h"

#include "base/memory.h"

#include <inttypes.h>
#include <math.h>

/* ---- budgets ---- */

/* In bytes whatever the solver counts in: this is the figure that refusals name. */
mls_code mls_plan_least_bytes(const mls_chain *chain, bool offload, mls_poll poll,
                              int64_t *out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_needs needs;
    /* the needs do not depend on a budget: the least that is accepted will do */
    const int64_t input = chain->activation_bytes[0];
    mls_code code = mls_plan_costs_init(&costs, chain, input, 0, offload, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_plan_least(&costs, poll, &needs, st);
    if (code == MLS_OK) {
        *out = input + needs.memory[mls_plan_cell(chain->blocks, 0, chain->blocks - 1)];
        mls_plan_needs_fini(&needs);
    }
    mls_plan_costs_fini(&costs);
    return code;
}

/* The budget above which nothing changes: the peak of the plain run.  Offloading plays no
 * part in it. */
static mls_code enough_bytes(const mls_chain *chain, int64_t *out, mls_status *st)
{
    mls_plan_costs costs;
    const int64_t input = chain->activation_bytes[0];
    const mls_code code = mls_plan_costs_init(&costs, chain, input, 0, false, st);
    if (code == MLS_OK) {
        *out = input + mls_plan_enough(&costs);
        mls_plan_costs_fini(&costs);
    }
    return code;
}

/* Refuse a budget, with the least one that would do: `expected` has it for programs,
 * which may simply ask again with that. */
static mls_code refuse(const mls_chain *chain, const mls_plan_request *r, mls_status *st)
{
    int64_t least;
    const mls_code code = mls_plan_least_bytes(chain, r->offload, r->poll, &least, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_fail(st, MLS_E_CAPACITY,
             "no persistent schedule of %zu blocks fits a budget of %" PRId64
             " bytes: the least that is enough is %" PRId64 " bytes",
             chain->blocks, r->budget_bytes, least);
    mls_status_expected(st, "%" PRId64, least);
    mls_status_got(st, "%" PRId64, r->budget_bytes);
    return st->code;
}

/* ---- the ways to a schedule ---- */

/* Any schedule that fits, for budgets too tight for slots.  Its time is what it happens
 * to be: the trace prefers to keep, then the restart that repeats least. */
static mls_code make_fitting(const mls_chain *chain, const mls_plan_request *r,
                             mls_plan *out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_needs needs;
    mls_code code =
        mls_plan_costs_init(&costs, chain, r->budget_bytes, 0, r->offload, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_plan_least(&costs, r->poll, &needs, st);
    if (code == MLS_OK) {
        out->method = MLS_PLAN_THAT_FITS;
        code = mls_plan_trace(&costs, mls_plan_fits, &needs, r->poll, &out->schedule, st);
        mls_plan_needs_fini(&needs);
    }
    mls_plan_costs_fini(&costs);
    return code;
}

/* Slots that a table of allowed size has; 0 where it has not even one.  Sizes of tables
 * are no simple function of slots (lines of the cache, tiles): so they are tried. */
static size_t slots_that_fit(size_t blocks, size_t wanted)
{
    while (wanted > 0 && mls_plan_table_bytes(blocks, wanted) > MLS_PLAN_TABLE_BYTES) {
        wanted -= wanted / 16 + 1;
    }
    return wanted;
}

/* Refused before anything is allocated, with what would be possible. */
static mls_code check_table(size_t blocks, size_t slots, mls_status *st)
{
    if (slots > MLS_PLAN_MAX_SLOTS) {
        return mls_fail(st, MLS_E_VALUE, "%zu slots: choose 1 to %d", slots,
                        (int)MLS_PLAN_MAX_SLOTS);
    }
    const size_t possible = slots_that_fit(blocks, slots);
    if (possible == slots) {
        return MLS_OK;
    }
    return mls_fail(st, MLS_E_SIZE,
                    "a table of %zu blocks and %zu slots exceeds %zu MiB: choose at most "
                    "%zu slots, or take several blocks as one",
                    blocks, slots, MLS_PLAN_TABLE_BYTES >> 20, possible);
}

/* By slots; MLS_E_CAPACITY where the rounded sizes do not fit, which does not mean that
 * the true ones do not. */
static mls_code make_by_slots(const mls_chain *chain, const mls_plan_request *r,
                              size_t slots, mls_plan *out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_table table;
    mls_code code = check_table(chain->blocks, slots, st);
    if (code == MLS_OK) {
        code = mls_plan_costs_init(&costs, chain, r->budget_bytes, slots, r->offload, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    code = mls_plan_slots(&costs, r->cpu, r->pool, r->poll, &table, st);
    if (code == MLS_OK) {
        out->method = MLS_PLAN_BY_SLOTS;
        out->slots = slots;
        code = mls_plan_trace(&costs, mls_plan_slots_value, &table, r->poll,
                              &out->schedule, st);
        mls_plan_table_fini(&table);
    }
    mls_plan_costs_fini(&costs);
    return code;
}

/* The fronts of all segments; MLS_E_SIZE where they take too much, be it blocks or
 * points.  Gives both, to be freed in the other order; nothing on failure, so that memory
 * is free before anything else is tried. */
static mls_code solve_exact(const mls_chain *chain, const mls_plan_request *r,
                            mls_plan_costs *costs, mls_plan_fronts *fronts,
                            mls_status *st)
{
    const size_t most = r->most_points == 0 ? MLS_PLAN_EXACT_POINTS : r->most_points;
    if (chain->blocks > MLS_PLAN_EXACT_BLOCKS) {
        return mls_fail(st, MLS_E_SIZE, "%zu blocks are too many to plan to the byte",
                        chain->blocks);
    }
    mls_code code = mls_plan_costs_init(costs, chain, r->budget_bytes, 0, r->offload, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_plan_exact(costs, most, r->pool, r->poll, fronts, st);
    if (code != MLS_OK) {
        mls_plan_costs_fini(costs);
    }
    return code;
}

/* To the byte; MLS_E_SIZE as above. */
static mls_code make_exact(const mls_chain *chain, const mls_plan_request *r,
                           mls_plan *out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_fronts fronts;
    mls_code code = solve_exact(chain, r, &costs, &fronts, st);
    if (code != MLS_OK) {
        return code;
    }
    out->method = MLS_PLAN_BY_BYTES;
    out->slots = 0;
    code = mls_plan_trace(&costs, mls_plan_exact_value, &fronts, r->poll, &out->schedule,
                          st);
    mls_plan_fronts_fini(&fronts);
    mls_plan_costs_fini(&costs);
    return code;
}

/* A request whose budget is cut to what can be used, so that slots are as small as they
 * can be; `*plain` where that is enough to keep everything. */
static mls_code cut_budget(const mls_chain *chain, mls_plan_request *r, bool *plain,
                           mls_status *st)
{
    int64_t enough;
    const mls_code code = enough_bytes(chain, &enough, st);
    if (code == MLS_OK) {
        *plain = r->budget_bytes >= enough;
        r->budget_bytes = *plain ? enough : r->budget_bytes;
    }
    return code;
}

/* Keep everything: the best plan in any class.  No solver would find another, but slots
 * would round its sizes up and miss it. */
static mls_code make_plain(const mls_chain *chain, mls_plan *out, mls_status *st)
{
    mls_code code = MLS_OK;
    for (size_t i = 0; code == MLS_OK && i < chain->blocks; i++) {
        code = mls_schedule_push(&out->schedule, MLS_STEP_SAVE, i, st);
    }
    for (size_t i = chain->blocks; code == MLS_OK && i-- > 0;) {
        code = mls_schedule_push(&out->schedule, MLS_STEP_BACKWARD, i, st);
    }
    if (code != MLS_OK) {
        mls_schedule_fini(&out->schedule);
    }
    return code;
}

/* By slots, and where these are too coarse, anything that fits.  That may fail as well,
 * and then nothing fits at all. */
static mls_code make_coarse(const mls_chain *chain, const mls_plan_request *r,
                            size_t slots, mls_plan *out, mls_status *st)
{
    const mls_code code = make_by_slots(chain, r, slots, out, st);
    return code == MLS_E_CAPACITY ? make_fitting(chain, r, out, st) : code;
}

/* As many slots as are taken where to plan to the byte takes too much: fewer for chains
 * so long that their table would not fit.  One at least, so that there is something to
 * refuse. */
static size_t slots_instead(size_t blocks)
{
    const size_t slots = slots_that_fit(blocks, MLS_PLAN_AUTO_SLOTS);
    return slots == 0 ? 1 : slots;
}

/* Plain where that fits; else to the byte, and by slots where that is wanted or the only
 * way.  Whichever way says that nothing fits, the refusal is the same. */
mls_code mls_plan_make(const mls_chain *chain, const mls_plan_request *request,
                       mls_plan *out, mls_status *st)
{
    mls_plan_request r = *request;
    mls_plan plan = {0};
    bool plain = false;
    mls_code code = cut_budget(chain, &r, &plain, st);
    if (code != MLS_OK) {
        return code;
    }
    if (plain) {
        code = make_plain(chain, &plan, st);
    } else if (r.slots > 0) {
        code = make_coarse(chain, &r, r.slots, &plan, st);
    } else {
        code = make_exact(chain, &r, &plan, st);
        if (code == MLS_E_SIZE) {
            code = make_coarse(chain, &r, slots_instead(chain->blocks), &plan, st);
        }
    }
    if (code == MLS_E_CAPACITY) {
        return refuse(chain, request, st);
    }
    if (code == MLS_OK) {
        *out = plan;
    }
    return code;
}

/* Only the schedule is owned. */
void mls_plan_fini(mls_plan *plan)
{
    mls_schedule_fini(&plan->schedule);
    *plan = (mls_plan){0};
}

/* ---- the whole curve ---- */

/* Seconds without any recomputation, to which values of the solvers are added: they leave
 * out what is the same in all schedules. */
static double plain_seconds(const mls_chain *chain)
{
    double seconds = 0;
    for (size_t i = 0; i < chain->blocks; i++) {
        seconds += chain->forward_seconds[i] + chain->backward_seconds[i];
    }
    return seconds;
}

/* The front of the whole chain, in terms of budgets: activation 0 is above what solvers
 * count, and all plain seconds are. */
static mls_code curve_of_fronts(const mls_chain *chain, const mls_plan_fronts *fronts,
                                mls_plan_curve *out, mls_status *st)
{
    const size_t whole = mls_plan_cell(chain->blocks, 0, chain->blocks - 1);
    const mls_plan_front *front = &fronts->fronts[whole];
    const double plain = plain_seconds(chain);
    mls_plan_point *points = mls_alloc(front->count, sizeof *points);
    if (points == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu points", front->count);
    }
    for (size_t i = 0; i < front->count; i++) {
        points[i].memory = chain->activation_bytes[0] + front->points[i].memory;
        points[i].seconds = plain + front->points[i].seconds;
    }
    *out = (mls_plan_curve){points, front->count, MLS_PLAN_BY_BYTES, 0};
    return MLS_OK;
}

/* The row of the whole chain, where it changes, and the plain run.  A slot's bytes are
 * rounded up: that is a budget which has as many slots. */
static mls_code curve_of_table(const mls_chain *chain, const mls_plan_table *table,
                               int64_t bytes, mls_plan_curve *out, mls_status *st)
{
    const int64_t slots = table->costs->budget;
    const double plain = plain_seconds(chain);
    mls_plan_point *points = mls_alloc((size_t)slots + 2, sizeof *points);
    size_t count = 0;
    double last = (double)INFINITY;
    if (points == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %" PRId64 " points", slots);
    }
    for (int64_t m = 0; m <= slots; m++) {
        const double value = mls_plan_slots_value(table, 0, chain->blocks - 1, m);
        if (value < last) {
            const int64_t each = bytes / slots, rest = bytes % slots;
            const int64_t used = m * each + (m * rest + slots - 1) / slots;
            points[count++] =
                (mls_plan_point){chain->activation_bytes[0] + used, plain + value};
            last = value;
        }
    }
    if (last > 0) { /* rounded up, the plain run exceeds its own bytes */
        const mls_plan_point kept = {chain->activation_bytes[0] + bytes, plain};
        count -= count > 0 && points[count - 1].memory == kept.memory ? 1 : 0;
        points[count++] = kept;
    }
    *out = (mls_plan_curve){points, count, MLS_PLAN_BY_SLOTS, (size_t)slots};
    return MLS_OK;
}

/* To the byte; MLS_E_SIZE where that takes too much. */
static mls_code curve_exact(const mls_chain *chain, const mls_plan_request *r,
                            mls_plan_curve *out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_fronts fronts;
    mls_code code = solve_exact(chain, r, &costs, &fronts, st);
    if (code != MLS_OK) {
        return code;
    }
    code = curve_of_fronts(chain, &fronts, out, st);
    mls_plan_fronts_fini(&fronts);
    mls_plan_costs_fini(&costs);
    return code;
}

/* One table has the values of all budgets that are whole slots of the largest. */
static mls_code curve_by_slots(const mls_chain *chain, const mls_plan_request *r,
                               size_t slots, mls_plan_curve *out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_table table;
    const int64_t bytes = r->budget_bytes - chain->activation_bytes[0];
    mls_code code = check_table(chain->blocks, slots, st);
    if (code == MLS_OK) {
        code = mls_plan_costs_init(&costs, chain, r->budget_bytes, slots, r->offload, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    code = mls_plan_slots(&costs, r->cpu, r->pool, r->poll, &table, st);
    if (code == MLS_OK) {
        code = curve_of_table(chain, &table, bytes, out, st);
        mls_plan_table_fini(&table);
    }
    mls_plan_costs_fini(&costs);
    return code;
}

/* The budget is what a plain run needs: above it there is nothing to see. */
mls_code mls_plan_pareto(const mls_chain *chain, const mls_plan_request *request,
                         mls_plan_curve *out, mls_status *st)
{
    mls_plan_request r = *request;
    size_t slots = r.slots;
    bool plain;
    r.budget_bytes = INT64_MAX;
    mls_code code = cut_budget(chain, &r, &plain, st);
    if (code == MLS_OK && slots == 0) {
        code = curve_exact(chain, &r, out, st);
        if (code != MLS_E_SIZE) {
            return code;
        }
        slots = slots_instead(chain->blocks);
        code = MLS_OK;
    }
    return code == MLS_OK ? curve_by_slots(chain, &r, slots, out, st) : code;
}

/* The points are one block. */
void mls_plan_curve_fini(mls_plan_curve *curve)
{
    mls_free(curve->points);
    *curve = (mls_plan_curve){0};
}
