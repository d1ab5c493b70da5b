/* plan: chooses the solver (exact or slots) of a plan, and words the error for a budget
 * that is too small.
 *
 * The unplanned run saves every block and recomputes nothing. A budget that holds it
 * needs no solver. Otherwise fronts are tried first, because they are exact. Their size
 * grows with the number of different sums of sizes, which is not known in advance, so it
 * is capped. Beyond the cap a table of slots is used, whose size is known; it is refused
 * if it would be too large. Slots round every size up, so a budget near the least one may
 * seem too small; then any schedule that fits is used.
 *
 * Only the table of needs, which counts bytes, can prove that no schedule fits.
 */
#include "planning/plan.h"

#include "base/memory.h"
#include "planning/plan_trace.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* ---- budgets ---- */

/* Computes the least budget that suffices, in bytes. Counts bytes, independent of the
 * solver's units: messages report this number. */
mls_code mls_plan_least_bytes(const mls_chain *chain, bool offload, mls_poll poll,
                              int64_t *out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_needs needs;
    /* the needs do not depend on the budget, so the smallest valid one is used */
    const int64_t input = chain->activation_bytes[0];
    mls_code code = mls_plan_costs_init(&costs, chain, input, 0, offload, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_plan_compute_needs(&costs, poll, &needs, st);
    if (code == MLS_OK) {
        *out = input + needs.memory[mls_plan_cell(chain->blocks, 0, chain->blocks - 1)];
        mls_plan_needs_fini(&needs);
    }
    mls_plan_costs_fini(&costs);
    return code;
}

/* Sets `*out` to the peak, in bytes with activation 0, of the unplanned run; a larger
 * budget changes nothing. Offloading does not matter. MLS_E_MEMORY. */
static mls_code compute_unplanned_peak(const mls_chain *chain, int64_t *out,
                                       mls_status *st)
{
    mls_plan_costs costs;
    const int64_t input = chain->activation_bytes[0];
    const mls_code code =
        mls_plan_costs_init(&costs, chain, input, 0, false /* no offload */, st);
    if (code == MLS_OK) {
        *out = input + mls_plan_memory_without_recomputation(&costs);
        mls_plan_costs_fini(&costs);
    }
    return code;
}

/* Fails for a budget that is too small. The status's "expected" is the least sufficient
 * budget, so that programs can retry with it. Returns MLS_E_CAPACITY, or the error of
 * computing that budget. */
static mls_code fail_budget(const mls_chain *chain, const mls_plan_request *r,
                            mls_status *st)
{
    int64_t least;
    const mls_code code = mls_plan_least_bytes(chain, r->offload, r->poll, &least, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_fail(st, MLS_E_CAPACITY,
             "no persistent schedule of %zu blocks fits a budget of %" PRId64
             " bytes: the smallest sufficient budget is %" PRId64 " bytes",
             chain->blocks, r->budget_bytes, least);
    mls_status_expected(st, "%" PRId64, least);
    return mls_status_got(st, "%" PRId64, r->budget_bytes);
}

/* ---- points of the Pareto curve ---- */

/* Returns the seconds of the unplanned run: each block once forward and once backward.
 * Solver values are relative to this sum. */
static double unplanned_seconds(const mls_chain *chain)
{
    double seconds = 0;
    for (size_t i = 0; i < chain->blocks; i++) {
        seconds += chain->forward_seconds[i] + chain->backward_seconds[i];
    }
    return seconds;
}

/* Converts the front of the whole chain to budgets: adds activation 0 and the seconds
 * without recomputation, which solvers do not count. The caller frees the points. */
static mls_code curve_of_fronts(const mls_chain *chain, const mls_plan_fronts *fronts,
                                mls_plan_curve *out, mls_status *st)
{
    const size_t cell = mls_plan_cell(chain->blocks, 0, chain->blocks - 1);
    const mls_plan_front *front = &fronts->fronts[cell];
    const double base_seconds = unplanned_seconds(chain);
    mls_plan_point *points = mls_alloc(front->count, sizeof *points);
    if (points == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu points", front->count);
    }
    for (size_t i = 0; i < front->count; i++) {
        points[i].memory = chain->activation_bytes[0] + front->points[i].memory;
        points[i].seconds = base_seconds + front->points[i].seconds;
    }
    *out = (mls_plan_curve){points, front->count, MLS_PLAN_BY_BYTES, 0};
    return MLS_OK;
}

/* Converts the table's row of the whole chain to points where its value changes, and adds
 * the unplanned run. `bytes` is the budget above activation 0. `memory` counts slots; its
 * bytes, `memory_bytes`, are rounded up, to a budget that has that many slots. */
static mls_code curve_of_table(const mls_chain *chain, const mls_plan_table *table,
                               int64_t bytes, mls_plan_curve *out, mls_status *st)
{
    const int64_t slots = table->costs->budget;
    const double base_seconds = unplanned_seconds(chain);
    mls_plan_point *points = mls_alloc((size_t)slots + 3, sizeof *points);
    size_t count = 0;
    double last_value = (double)INFINITY;
    if (points == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %" PRId64 " points", slots);
    }
    for (int64_t memory = 0; memory <= slots; memory++) {
        const double value = mls_plan_dp_slots_value(table, 0, chain->blocks - 1, memory);
        if (value < last_value) {
            /* memory * bytes / slots, in two parts because the product may overflow */
            const int64_t slot_bytes = bytes / slots, rest = bytes % slots;
            const int64_t memory_bytes =
                memory * slot_bytes + (memory * rest + slots - 1) / slots;
            points[count++] = (mls_plan_point){chain->activation_bytes[0] + memory_bytes,
                                               base_seconds + value};
            last_value = value;
        }
    }
    if (last_value > 0) { /* with rounded sizes the unplanned run exceeds its own bytes */
        const mls_plan_point last_point = {chain->activation_bytes[0] + bytes,
                                           base_seconds};
        count -= count > 0 && points[count - 1].memory == last_point.memory ? 1 : 0;
        points[count++] = last_point;
    }
    *out = (mls_plan_curve){points, count, MLS_PLAN_BY_SLOTS, (size_t)slots};
    return MLS_OK;
}

/* ---- recomputing every block ---- */

/* Writes the schedule that keeps the last block and recomputes every other one from its
 * own input, and its totals. It is persistent, so planning to the byte finds one as good.
 * Slots may miss it, because they round sizes up. MLS_E_MEMORY. */
static mls_code make_recomputing_plan(const mls_chain *chain, mls_schedule *out,
                                      mls_totals *totals, mls_status *st)
{
    const size_t last = chain->blocks - 1;
    mls_code code = MLS_OK;
    for (size_t i = 0; code == MLS_OK && i < last; i++) {
        code = mls_schedule_push(out, MLS_STEP_FORWARD, i, st);
    }
    for (size_t i = chain->blocks; code == MLS_OK && i-- > 0;) {
        if (i < last) {
            code = mls_schedule_push(out, MLS_STEP_DROP, i + 1, st);
        }
        code = code == MLS_OK ? mls_schedule_push(out, MLS_STEP_SAVE, i, st) : code;
        code = code == MLS_OK ? mls_schedule_push(out, MLS_STEP_BACKWARD, i, st) : code;
    }
    return code == MLS_OK
               ? mls_chain_simulate(chain, out->steps, out->count, NULL, totals, st)
               : code;
}

/* Replaces a plan that slots found by recomputing every block, if that fits the budget
 * and is faster. MLS_E_MEMORY: frees the plan. */
static mls_code prefer_recomputing(const mls_chain *chain, int64_t budget, mls_plan *plan,
                                   mls_status *st)
{
    mls_schedule other = {0};
    mls_totals found, recomputing;
    mls_code code = mls_chain_simulate(chain, plan->schedule.steps, plan->schedule.count,
                                       NULL, &found, st);
    if (code == MLS_OK) {
        code = make_recomputing_plan(chain, &other, &recomputing, st);
    }
    if (code == MLS_OK && recomputing.peak_bytes <= budget &&
        recomputing.seconds < found.seconds) {
        const mls_schedule slower = plan->schedule;
        plan->schedule = other;
        other = slower;
    }
    mls_schedule_fini(&other);
    if (code != MLS_OK) {
        mls_schedule_fini(&plan->schedule);
    }
    return code;
}

/* Adds recomputing every block to a curve by slots, which has room for one point more,
 * and removes the points that are not faster. MLS_E_MEMORY. */
static mls_code add_recomputing_point(const mls_chain *chain, mls_plan_curve *curve,
                                      mls_status *st)
{
    mls_schedule schedule = {0};
    mls_totals t;
    const mls_code code = make_recomputing_plan(chain, &schedule, &t, st);
    mls_schedule_fini(&schedule);
    if (code != MLS_OK) {
        return code;
    }
    mls_plan_point *points = curve->points;
    size_t begin = 0, end;
    while (begin < curve->count && points[begin].memory < t.peak_bytes) {
        begin++;
    }
    if (begin > 0 && points[begin - 1].seconds <= t.seconds) {
        return MLS_OK;
    }
    for (end = begin; end < curve->count && points[end].seconds >= t.seconds;) {
        end++;
    }
    memmove(points + begin + 1, points + end, (curve->count - end) * sizeof *points);
    points[begin] = (mls_plan_point){t.peak_bytes, t.seconds};
    curve->count += begin + 1 - end;
    return MLS_OK;
}

/* ---- solvers ---- */

/* What to make of a solution: a plan, or the curve of all budgets. */
typedef struct result {
    mls_plan *plan; /* NULL: the curve */
    mls_plan_curve *curve;
} result;

/* Finds any schedule that fits, for budgets too tight for slots. Its time is not
 * optimised: the trace prefers to keep, then the restart with the least recomputation.
 * MLS_E_CAPACITY: no schedule fits; MLS_E_MEMORY, MLS_E_STOPPED. */
static mls_code make_fitting_plan(const mls_chain *chain, const mls_plan_request *r,
                                  mls_plan *out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_needs needs;
    mls_code code =
        mls_plan_costs_init(&costs, chain, r->budget_bytes, 0, r->offload, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_plan_compute_needs(&costs, r->poll, &needs, st);
    if (code == MLS_OK) {
        out->method = MLS_PLAN_THAT_FITS;
        code = mls_plan_trace(&costs, mls_plan_needs_value, &needs, r->poll,
                              &out->schedule, st);
        mls_plan_needs_fini(&needs);
    }
    mls_plan_costs_fini(&costs);
    return code;
}

/* Returns the largest number of slots, at most `slots`, whose table for a chain of
 * `blocks` has an allowed size; 0 if there is none. Searches, because padding makes the
 * size irregular. */
static size_t slots_that_fit(size_t blocks, size_t slots)
{
    while (slots > 0 && mls_plan_table_bytes(blocks, slots) > MLS_PLAN_TABLE_BYTES) {
        slots -= slots / 16 + 1;
    }
    return slots;
}

/* Checks the number of slots and the table's size before any allocation. MLS_E_VALUE:
 * more than MLS_PLAN_MAX_SLOTS. MLS_E_SIZE: the table is too large; the text has the
 * possible number of slots. */
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

/* Solves by slots, for a plan or (`out.plan` NULL) for a curve. MLS_E_CAPACITY: the
 * rounded sizes of a plan do not fit; the true sizes may. One table has the values of all
 * budgets that are whole slots of the largest one. */
static mls_code solve_by_slots(const mls_chain *chain, const mls_plan_request *r,
                               size_t slots, result out, mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_table table;
    if (check_table(chain->blocks, slots, st) != MLS_OK ||
        mls_plan_costs_init(&costs, chain, r->budget_bytes, slots, r->offload, st) !=
            MLS_OK) {
        return st->code;
    }
    mls_code code = mls_plan_dp_slots(&costs, r->cpu, r->pool, r->poll, &table, st);
    if (code == MLS_OK && out.plan != NULL) {
        out.plan->method = MLS_PLAN_BY_SLOTS;
        out.plan->slots = slots;
        code = mls_plan_trace(&costs, mls_plan_dp_slots_value, &table, r->poll,
                              &out.plan->schedule, st);
    } else if (code == MLS_OK) {
        const int64_t bytes = r->budget_bytes - chain->activation_bytes[0];
        code = curve_of_table(chain, &table, bytes, out.curve, st);
        if (code == MLS_OK &&
            (code = add_recomputing_point(chain, out.curve, st)) != MLS_OK) {
            mls_plan_curve_fini(out.curve);
        }
    }
    mls_plan_table_fini(&table);
    mls_plan_costs_fini(&costs);
    return code;
}

/* Solves to the byte, for a plan or (`out.plan` NULL) for a curve. MLS_E_SIZE: too many
 * blocks or points, and `st` may be unset; all memory is freed, so that it is available
 * for the next attempt. */
static mls_code solve_exact(const mls_chain *chain, const mls_plan_request *r, result out,
                            mls_status *st)
{
    mls_plan_costs costs;
    mls_plan_fronts fronts;
    const size_t most = r->most_points == 0 ? MLS_PLAN_EXACT_POINTS : r->most_points;
    if (chain->blocks > MLS_PLAN_EXACT_BLOCKS) {
        return MLS_E_SIZE;
    }
    mls_code code =
        mls_plan_costs_init(&costs, chain, r->budget_bytes, 0, r->offload, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_plan_dp_fronts(&costs, most, r->pool, r->poll, &fronts, st);
    if (code == MLS_OK && out.plan != NULL) {
        out.plan->method = MLS_PLAN_BY_BYTES;
        out.plan->slots = 0;
        code = mls_plan_trace(&costs, mls_plan_dp_fronts_value, &fronts, r->poll,
                              &out.plan->schedule, st);
    } else if (code == MLS_OK) {
        code = curve_of_fronts(chain, &fronts, out.curve, st);
    }
    mls_plan_fronts_fini(&fronts);
    mls_plan_costs_fini(&costs);
    return code;
}

/* Limits r->budget_bytes to the useful maximum, so that slots are as small as possible.
 * Sets `*holds_unplanned_run` to whether it is large enough for the unplanned run. */
static mls_code limit_budget(const mls_chain *chain, mls_plan_request *r,
                             bool *holds_unplanned_run, mls_status *st)
{
    int64_t unplanned_peak;
    const mls_code code = compute_unplanned_peak(chain, &unplanned_peak, st);
    if (code == MLS_OK) {
        *holds_unplanned_run = r->budget_bytes >= unplanned_peak;
        r->budget_bytes = *holds_unplanned_run ? unplanned_peak : r->budget_bytes;
    }
    return code;
}

/* Writes the schedule of the unplanned run, which is the best one: saves all blocks, then
 * runs them backward. Slots might miss it, because they round sizes up. The plan's method
 * stays MLS_PLAN_BY_BYTES. MLS_E_MEMORY. */
static mls_code make_unplanned_plan(const mls_chain *chain, mls_plan *out, mls_status *st)
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

/* Plans by slots; if these are too coarse, uses any schedule that fits. Recomputing every
 * block is always a candidate. MLS_E_CAPACITY: no schedule fits. Other errors as for
 * mls_plan_make. */
static mls_code make_plan_by_slots(const mls_chain *chain, const mls_plan_request *r,
                                   size_t slots, mls_plan *out, mls_status *st)
{
    mls_code code = solve_by_slots(chain, r, slots, (result){.plan = out}, st);
    if (code == MLS_E_CAPACITY) {
        code = make_fitting_plan(chain, r, out, st);
    }
    return code == MLS_OK ? prefer_recomputing(chain, r->budget_bytes, out, st) : code;
}

/* Returns the number of slots to use if planning to the byte is too expensive: fewer if
 * the table would be too large. At least 1, so that check_table can fail with a
 * message. */
static size_t fallback_slots(size_t blocks)
{
    const size_t slots = slots_that_fit(blocks, MLS_PLAN_AUTO_SLOTS);
    return slots == 0 ? 1 : slots;
}

/* Keeps everything if that fits; otherwise plans to the byte, or by slots if requested or
 * if nothing else fits. If no schedule fits, the error is the same for all solvers.
 */
mls_code mls_plan_make(const mls_chain *chain, const mls_plan_request *request,
                       mls_plan *out, mls_status *st)
{
    mls_plan_request r = *request;
    mls_plan plan = {0};
    bool holds_unplanned_run = false;
    mls_code code = limit_budget(chain, &r, &holds_unplanned_run, st);
    if (code != MLS_OK) {
        return code;
    }
    if (holds_unplanned_run) {
        code = make_unplanned_plan(chain, &plan, st);
    } else if (r.slots > 0) {
        code = make_plan_by_slots(chain, &r, r.slots, &plan, st);
    } else {
        code = solve_exact(chain, &r, (result){.plan = &plan}, st);
        if (code == MLS_E_SIZE) {
            code =
                make_plan_by_slots(chain, &r, fallback_slots(chain->blocks), &plan, st);
        }
    }
    if (code == MLS_E_CAPACITY) {
        return fail_budget(chain, request, st);
    }
    if (code == MLS_OK) {
        *out = plan;
    }
    return code;
}

void mls_plan_fini(mls_plan *plan)
{
    mls_schedule_fini(&plan->schedule);
    *plan = (mls_plan){0};
}

/* ---- the Pareto curve ---- */

/* Computes the times of all budgets. The budget is the peak of the unplanned run: the
 * curve ends there. */
mls_code mls_plan_pareto(const mls_chain *chain, const mls_plan_request *request,
                         mls_plan_curve *out, mls_status *st)
{
    mls_plan_request r = *request;
    size_t slots = r.slots;
    bool holds_unplanned_run;
    r.budget_bytes = INT64_MAX;
    mls_code code = limit_budget(chain, &r, &holds_unplanned_run, st);
    if (code == MLS_OK && slots == 0) {
        code = solve_exact(chain, &r, (result){.curve = out}, st);
        if (code != MLS_E_SIZE) {
            return code;
        }
        slots = fallback_slots(chain->blocks);
        code = MLS_OK;
    }
    return code == MLS_OK ? solve_by_slots(chain, &r, slots, (result){.curve = out}, st)
                          : code;
}

void mls_plan_curve_fini(mls_plan_curve *curve)
{
    mls_free(curve->points);
    *curve = (mls_plan_curve){0};
}
