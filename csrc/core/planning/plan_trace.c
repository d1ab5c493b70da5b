/* plan_trace: which blocks a plan keeps, offloads or recomputes, and its drops, from a
 * solver's values.
 *
 * plan_costs.h defines segments s .. t and restarts at k.
 *
 * Solvers do not store their choices. The trace evaluates all choices of a segment again
 * with the solver's values and takes the best one. That is cheap, since a schedule has
 * few segments compared with the table, and it saves a second table of the same size.
 */
#include "planning/plan_trace.h"

#include "base/memory.h"

#include <math.h>

/* A pending item: a step, or a segment to schedule with the memory that it may use above
 * its input. */
typedef struct item {
    int32_t kind;  /* of a step; MLS_STEP_KINDS: a segment */
    uint32_t s, t; /* first and last block; of a step: its index, and 0 */
    int64_t memory;
} item;

typedef struct tracer {
    const mls_plan_costs *costs;
    mls_plan_value value;
    const void *context; /* of `value` */
    mls_schedule *out;
    item *items; /* a stack: the last one is next */
    size_t count, room;
} tracer;

enum {
    KEEP,
    OFFLOAD
}; /* what to do with block s; larger values encode the restart point k */

/* Returns the best choice for s .. t within `memory` units above activation s: KEEP,
 * OFFLOAD, or OFFLOAD + k - s for a restart at k. `*best` is its extra seconds
 * (transfers, and forward passes that run again), INFINITY if nothing fits. Of equal
 * choices it returns the first, which prefers no recomputation. */
static size_t choose_option(const tracer *trace, size_t s, size_t t, int64_t memory,
                            double *best)
{
    const mls_plan_costs *c = trace->costs;
    size_t choice = KEEP;
    *best = (double)INFINITY;
    if (mls_plan_save_need(c, s, t) <= memory) {
        *best = s == t ? 0 : trace->value(trace->context, s + 1, t, memory - c->saved[s]);
        if (s < t && isfinite(c->offload_seconds[s])) {
            const double offload_seconds =
                c->offload_seconds[s] +
                trace->value(trace->context, s + 1, t, memory - c->activation[s + 1]);
            choice = offload_seconds < *best ? OFFLOAD : KEEP;
            *best = offload_seconds < *best ? offload_seconds : *best;
        }
    }
    int64_t sweep = 0;
    for (size_t k = s + 1; k <= t; k++) {
        sweep = mls_plan_sweep(c, s, k, sweep);
        if (sweep + c->hold[t] > memory) {
            break;
        }
        const double restart_seconds = c->before[k] - c->before[s];
        if (restart_seconds >= *best) {
            break; /* later restarts recompute even more */
        }
        const double seconds =
            restart_seconds + trace->value(trace->context, s, k - 1, memory) +
            trace->value(trace->context, k, t, memory - c->activation[k]);
        if (seconds < *best) {
            *best = seconds;
            choice = OFFLOAD + k - s;
        }
    }
    return choice;
}

/* Pushes one item on the stack of the trace. MLS_E_MEMORY. */
static mls_code push_item(tracer *trace, item added, mls_status *st)
{
    item *items = mls_grow(trace->items, trace->count, &trace->room, sizeof *items);
    if (items == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a schedule");
    }
    trace->items = items;
    trace->items[trace->count++] = added;
    return MLS_OK;
}

/* Pushes several items that are given in order, the last one first. */
static mls_code push_items(tracer *trace, const item *items, size_t count, mls_status *st)
{
    mls_code code = MLS_OK;
    while (code == MLS_OK && count-- > 0) {
        code = push_item(trace, items[count], st);
    }
    return code;
}

/* Writes the steps "forward s .. k - 1" of a segment, which keep only activations s and
 * k, and pushes the two segments that follow and the drop between them. MLS_E_MEMORY. */
static mls_code push_restart(tracer *trace, item seg, size_t k, mls_status *st)
{
    mls_code code = mls_schedule_push(trace->out, MLS_STEP_FORWARD, seg.s, st);
    for (size_t j = seg.s + 1; code == MLS_OK && j < k; j++) {
        code = mls_schedule_push(trace->out, MLS_STEP_FORWARD, j, st);
        if (code == MLS_OK) {
            code = mls_schedule_push(trace->out, MLS_STEP_DROP, j, st);
        }
    }
    const uint32_t at = (uint32_t)k;
    const item rest[] = {
        {MLS_STEP_KINDS, at, seg.t, seg.memory - trace->costs->activation[k]},
        {MLS_STEP_DROP, at, 0, 0},
        {MLS_STEP_KINDS, seg.s, at - 1, seg.memory},
    };
    return code == MLS_OK ? push_items(trace, rest, 3, st) : code;
}

/* Replaces a segment by its best choice: pushes steps and smaller segments (kind
 * MLS_STEP_KINDS: first and last block, memory). If nothing fits although the whole chain
 * did, the solver's values are inconsistent; this fails like a small budget. */
static mls_code expand_segment(tracer *trace, item seg, mls_status *st)
{
    const mls_plan_costs *c = trace->costs;
    const uint32_t s = seg.s;
    double best;
    const size_t choice = choose_option(trace, s, seg.t, seg.memory, &best);
    if (!isfinite(best)) {
        return mls_fail(st, MLS_E_CAPACITY, "blocks %u to %u do not fit into the budget",
                        (unsigned)s, (unsigned)seg.t);
    }
    if (choice > OFFLOAD) {
        return push_restart(trace, seg, s + (choice - OFFLOAD), st);
    }
    const item saved[] = {{MLS_STEP_SAVE, s, 0, 0},
                          {MLS_STEP_KINDS, s + 1, seg.t, seg.memory - c->saved[s]},
                          {MLS_STEP_BACKWARD, s, 0, 0}};
    const item alone[] = {saved[0], saved[2]};
    const item moved[] = {
        saved[0],
        {MLS_STEP_OFFLOAD, s, 0, 0},
        {MLS_STEP_KINDS, s + 1, seg.t, seg.memory - c->activation[s + 1]},
        {MLS_STEP_DROP, s + 1, 0, 0},
        {MLS_STEP_LOAD, s, 0, 0},
        saved[2]};
    if (s == seg.t) {
        return push_items(trace, alone, 2, st);
    }
    return choice == KEEP ? push_items(trace, saved, 3, st)
                          : push_items(trace, moved, 6, st);
}

/* Writes the schedule whose time the solver found. Uses an explicit stack, because
 * segments nest as deep as there are blocks. */
mls_code mls_plan_trace(const mls_plan_costs *costs, mls_plan_value value,
                        const void *context, mls_poll poll, mls_schedule *out,
                        mls_status *st)
{
    mls_schedule schedule = {0};
    tracer trace = {.costs = costs, .value = value, .context = context, .out = &schedule};
    const uint32_t last = (uint32_t)(costs->blocks - 1);
    mls_code code = push_item(&trace, (item){MLS_STEP_KINDS, 0, last, costs->budget}, st);
    while (code == MLS_OK && trace.count > 0) {
        const item next = trace.items[--trace.count];
        if (next.kind != MLS_STEP_KINDS) {
            code = mls_schedule_push(&schedule, (mls_step_kind)next.kind, next.s, st);
        } else if (poll.go_on != NULL && !poll.go_on(poll.context)) {
            code = mls_fail(st, MLS_E_STOPPED, "planning was stopped");
        } else {
            code = expand_segment(&trace, next, st);
        }
    }
    mls_free(trace.items);
    if (code != MLS_OK) {
        mls_schedule_fini(&schedule);
        return code;
    }
    *out = schedule;
    return MLS_OK;
}
