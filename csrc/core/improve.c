/* improve: a search through everything, or small changes for the better. */
#include "improve.h"

#include "mem.h"
#include "plan.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Every change is tried on a copy: runs are moved, tidied, and followed once with their
 * peak and time.  That costs as much as the schedule is long, so all changes together
 * have a budget, counted in runs and in states and not in seconds: the same chain gives
 * the same schedule on any machine. */

/* A schedule that gets better. */
typedef struct course {
    const mls_chain *chain;
    const mls_best_options *options;
    mls_action *runs, *trial; /* owned; room for the same number each */
    size_t count, room;
    mls_totals totals;
    unsigned char *scratch; /* owned: two pieces */
    size_t states;          /* looked at, in all */
    size_t looked;          /* runs looked at by changes by hand */
    bool changed;           /* in this round */
} course;

/* Less by more than what rounding does to the sum of so many. */
static bool is_faster(double a, double b)
{
    return a < b - 1e-12 * b;
}

/* Asked between changes; a search within a part asks by itself. */
static mls_code stopped(const course *c, mls_status *st)
{
    const mls_poll *poll = &c->options->poll;
    if (poll->go_on != NULL && !poll->go_on(poll->context)) {
        return mls_fail(st, MLS_E_STOPPED, "planning was stopped");
    }
    return MLS_OK;
}

/* Take the trial of `count` runs if it is valid, fits and is faster. */
static bool take_trial(course *c, size_t count)
{
    c->looked += 2 * count;
    if (!mls_runs_tidy(c->chain, c->trial, &count, c->scratch)) {
        return false;
    }
    const mls_totals totals = mls_runs_totals(c->chain, c->trial, count, c->scratch);
    if (totals.peak_bytes > c->options->budget_bytes ||
        !is_faster(totals.seconds, c->totals.seconds)) {
        return false;
    }
    /* the copy becomes the schedule, and its memory the next copy's */
    mls_action *old = c->runs;
    c->runs = c->trial;
    c->trial = old;
    c->count = count;
    c->totals = totals;
    c->changed = true;
    return true;
}

/* ---- changes by hand ---- */

/* Whether a run is of this kind and block. */
static bool is_run(const mls_action *run, mls_step_kind kind, int32_t index)
{
    return run->kind == (int32_t)kind && run->index == index;
}

/* Leave run t out. */
/* Somebody read what the run made: now what was made earlier has to last until then, and
 * if nothing was, the runs are not valid and the trial is refused. */
static bool try_without(course *c, size_t t)
{
    memcpy(c->trial, c->runs, t * sizeof *c->runs);
    memcpy(c->trial + t, c->runs + t + 1, (c->count - t - 1) * sizeof *c->runs);
    return take_trial(c, c->count - 1);
}

/* Save where forward t is, and not at the next save of that block. */
/* The block's own backward pass is what it was to be saved for.  Between the two places
 * everything saved is held, and the forward in between is saved. */
static bool try_save_now(course *c, size_t t)
{
    const int32_t index = c->runs[t].index;
    size_t later = t + 1;
    while (later < c->count && !is_run(&c->runs[later], MLS_STEP_SAVE, index)) {
        later++;
    }
    if (later == c->count) {
        return false;
    }
    /* everything but the later save, and the forward turned into one */
    memcpy(c->trial, c->runs, later * sizeof *c->runs);
    memcpy(c->trial + later, c->runs + later + 1,
           (c->count - later - 1) * sizeof *c->runs);
    c->trial[t].kind = MLS_STEP_SAVE;
    return take_trial(c, c->count - 1);
}

/* From the end on: what is near its use is kept more cheaply. */
static mls_code change_by_hand(course *c, mls_status *st)
{
    for (size_t t = c->count; t-- > 0 && c->looked < MLS_IMPROVE_ALL_RUNS;) {
        /* a change may have made the schedule shorter than where this was */
        if (t >= c->count || c->runs[t].kind != MLS_STEP_FORWARD) {
            continue;
        }
        /* sixteen trials of the longest schedules take some milliseconds */
        if ((t & 15) == 0) {
            const mls_code code = stopped(c, st);
            if (code != MLS_OK) {
                return code;
            }
        }
        if (!try_without(c, t)) {
            try_save_now(c, t);
        }
    }
    return MLS_OK;
}

/* A part is a piece of the schedule, not of the chain: runs that follow each other and
 * happen to stay within a few blocks.  What is held of other blocks meanwhile does not
 * change, so it is so many bytes and nothing else.  The moments before and after it are
 * given; in between there is a best way, and search.h finds it. */

/* ---- parts ---- */

/* Runs from .. to - 1, which touch the blocks first .. last only. */
typedef struct part {
    size_t from, to;
    size_t first, last;
} part;

/* As many runs from `from` on as stay within MLS_IMPROVE_BLOCKS blocks. */
static part part_from(const course *c, size_t from)
{
    const size_t block = (size_t)c->runs[from].index;
    part p = {.from = from, .to = from + 1, .first = block, .last = block};
    for (; p.to < c->count; p.to++) {
        const size_t next = (size_t)c->runs[p.to].index;
        /* whether one more run keeps the part narrow enough */
        const size_t first = next < p.first ? next : p.first;
        const size_t last = next > p.last ? next : p.last;
        if (last - first >= MLS_IMPROVE_BLOCKS) {
            break;
        }
        p.first = first;
        p.last = last;
    }
    return p;
}

/* What is held of a part's blocks at a moment. */
static mls_stretch_state state_of(const mls_moment *m, const part *p, bool input_stays)
{
    mls_stretch_state state = {.left = m->left};
    for (size_t i = p->first; i <= p->last; i++) {
        const uint64_t bit = (uint64_t)1 << (i - p->first);
        state.saved |= m->saved[i] == MLS_ON_DEVICE ? bit : 0;
        state.host |= m->saved[i] == MLS_ON_HOST ? bit : 0;
        state.alone |= m->alone[i + 1] ? bit << 1 : 0;
    }
    /* the part's input can be dropped in it, but not made again */
    state.alone |= !input_stays && m->alone[p->first] ? 1 : 0;
    return state;
}

/* Bytes held outside the part, without the gradient. */
static int64_t base_of(const mls_moment *m, const part *p, bool input_stays)
{
    const mls_chain *c = m->chain;
    int64_t bytes = m->held - mls_held_gradient(c, m->left);
    for (size_t i = p->first; i <= p->last; i++) {
        bytes -= m->saved[i] == MLS_ON_DEVICE ? c->saved_bytes[i] : 0;
        bytes -= m->alone[i + 1] ? c->activation_bytes[i + 1] : 0;
    }
    /* an input that stays, in what is saved before the part or as activation 0, is base
     */
    const bool input_alone = !input_stays && m->alone[p->first];
    return bytes - (input_alone ? c->activation_bytes[p->first] : 0);
}

/* The stretch of a part, from the moment before it on; the moment goes to its end. */
static mls_stretch stretch_of(const course *c, const part *p, mls_moment *m)
{
    const bool input_stays = p->first == 0 || m->saved[p->first - 1] == MLS_ON_DEVICE;
    mls_stretch s = {.chain = c->chain,
                     .first = p->first,
                     .count = p->last - p->first + 1,
                     .input_stays = input_stays,
                     .offload = c->options->offload,
                     .base = base_of(m, p, input_stays),
                     .from = state_of(m, p, input_stays)};
    for (size_t t = p->from; t < p->to; t++) {
        mls_moment_run(m, &c->runs[t]);
    }
    s.to = state_of(m, p, input_stays);
    return s;
}

/* Put other runs in the place of a part's, and take what comes of it. */
static mls_code replace(course *c, const part *p, const mls_schedule *runs,
                        mls_status *st)
{
    /* too many to fit is next to impossible: each costs time, and less time is the aim */
    const size_t tail = c->count - p->to, count = p->from + runs->count + tail;
    if (count > c->room) {
        return mls_fail(st, MLS_E_SIZE, "a faster part of a schedule has more steps");
    }
    memcpy(c->trial, c->runs, p->from * sizeof *c->runs);
    mls_runs_of(runs->steps, runs->count, c->trial + p->from);
    memcpy(c->trial + p->from + runs->count, c->runs + p->to, tail * sizeof *c->runs);
    take_trial(c, count);
    return MLS_OK;
}

/* Search through a part for something faster.  `m` is the moment before it. */
/* Forwards and transfers are all that can be won: where a part has none it is as good as
 * it can be. */
static mls_code change_part(course *c, const part *p, mls_moment *m, mls_status *st)
{
    double below = 0;
    for (size_t t = p->from; t < p->to; t++) {
        below += mls_run_extra(c->chain, &c->runs[t]);
    }
    if (!(below > 0)) {
        return MLS_OK;
    }
    const mls_stretch s = stretch_of(c, p, m);
    const mls_search_limits limits = {.budget_bytes = c->options->budget_bytes,
                                      .below = below,
                                      .states = MLS_IMPROVE_STATES,
                                      .poll = c->options->poll};
    mls_found found;
    mls_code code = mls_search(&s, &limits, &found, st);
    if (code != MLS_OK) {
        return code;
    }
    c->states += found.states;
    if (found.found) {
        code = replace(c, p, &found.runs, st);
    }
    mls_schedule_fini(&found.runs);
    return code;
}

/* Every part that is not within the one before it. */
/* From the beginning on, each part as long as it can be; a part that lies within the one
 * before it would find nothing new. */
static mls_code change_parts(course *c, mls_status *st)
{
    size_t reached = 0;
    for (size_t from = 0; from < c->count && c->states < MLS_IMPROVE_ALL_STATES; from++) {
        const part p = part_from(c, from);
        if (p.to <= reached) {
            continue;
        }
        reached = p.to;
        mls_code code = stopped(c, st);
        if (code != MLS_OK) {
            return code;
        }
        /* follow the schedule up to the part: short, next to the search that comes */
        mls_moment m;
        mls_moment_begin(&m, c->chain, c->scratch + mls_runs_scratch(c->chain));
        for (size_t t = 0; t < from; t++) {
            mls_moment_run(&m, &c->runs[t]);
        }
        code = change_part(c, &p, &m, st);
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* What one kind of change makes possible, the other may use. */
static mls_code change_until_nothing_helps(course *c, mls_status *st)
{
    mls_code code = MLS_OK;
    do {
        c->changed = false;
        code = change_by_hand(c, st);
        if (code == MLS_OK) {
            code = change_parts(c, st);
        }
    } while (code == MLS_OK && c->changed && c->states < MLS_IMPROVE_ALL_STATES);
    return code;
}

/* ---- all of it ---- */

/* Everything that a course owns. */
static void release(course *c)
{
    mls_free(c->runs);
    mls_free(c->trial);
    mls_free(c->scratch);
}

/* Room for the runs, and for parts that have more of them. */
static mls_code begin(course *c, mls_status *st)
{
    const mls_best_options *o = c->options;
    /* a part may be replaced by more runs than it had, if they are quicker ones */
    c->room = o->start_count + (size_t)1024;
    c->runs = mls_alloc(c->room, sizeof *c->runs);
    c->trial = mls_alloc(c->room, sizeof *c->trial);
    c->scratch = mls_alloc(mls_runs_scratch(c->chain), 2);
    if (c->runs == NULL || c->trial == NULL || c->scratch == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu steps", c->room);
    }
    c->count = mls_runs_of(o->start, o->start_count, c->runs);
    if (!mls_runs_tidy(c->chain, c->runs, &c->count, c->scratch)) {
        return mls_fail(st, MLS_E_VALUE, "the schedule to start from is not valid");
    }
    c->totals = mls_runs_totals(c->chain, c->runs, c->count, c->scratch);
    return MLS_OK;
}

/* The schedule of runs, simulated: nothing leaves that was not looked at once more. */
static mls_code give(const mls_chain *chain, const mls_action *runs, size_t count,
                     mls_best *out, mls_status *st)
{
    mls_best best = {0};
    mls_code code = mls_runs_write(runs, count, &best.schedule, st);
    if (code == MLS_OK) {
        code = mls_chain_simulate(chain, best.schedule.steps, best.schedule.count, NULL,
                                  &best.totals, st);
    }
    if (code != MLS_OK) {
        mls_schedule_fini(&best.schedule);
        return code;
    }
    *out = best;
    return MLS_OK;
}

/* From the start to where no change helps, or the budgets of work are used up. */
static mls_code improve(const mls_chain *chain, const mls_best_options *options,
                        mls_best *out, mls_status *st)
{
    course c = {.chain = chain, .options = options};
    mls_code code = begin(&c, st);
    if (code == MLS_OK) {
        code = change_until_nothing_helps(&c, st);
    }
    if (code == MLS_OK) {
        code = give(chain, c.runs, c.count, out, st);
    }
    if (code == MLS_OK) {
        out->states = c.states;
    }
    release(&c);
    return code;
}

/* The least budget goes into `expected`, where programs find it. */
static mls_code refuse(const mls_chain *chain, int64_t budget, const char *which,
                       int64_t least, mls_status *st)
{
    mls_fail(st, MLS_E_CAPACITY,
             "no schedule of %zu blocks was found that fits a budget of %" PRId64
             " bytes: the least that %s fits is %" PRId64,
             chain->blocks, budget, which, least);
    mls_status_expected(st, "at least %" PRId64, least);
    mls_status_got(st, "%" PRId64, budget);
    return st->code;
}

/* Nothing was found, and not all was looked at: what is enough for a persistent schedule
 * is enough. */
static mls_code refuse_some(const mls_chain *chain, const mls_best_options *o,
                            mls_status *st)
{
    int64_t least;
    const mls_code code = mls_plan_least_bytes(chain, o->offload, o->poll, &least, st);
    return code == MLS_OK ? refuse(chain, o->budget_bytes, "a persistent one", least, st)
                          : code;
}

/* Nothing fits: say what would. */
static mls_code refuse_all(const mls_stretch *whole, const mls_search_limits *limits,
                           const mls_best_options *o, mls_status *st)
{
    mls_found found;
    const mls_code code = mls_search_least(whole, limits, &found, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_schedule_fini(&found.runs);
    return found.found ? refuse(whole->chain, o->budget_bytes, "any one", found.least, st)
                       : refuse_some(whole->chain, o, st);
}

/* Steps, tidied and given: none is faster. */
static mls_code give_best(const mls_chain *chain, const mls_step *steps, size_t count,
                          mls_best *out, mls_status *st)
{
    mls_action *runs = mls_alloc(count, sizeof *runs);
    unsigned char *scratch = mls_alloc(mls_runs_scratch(chain), 1);
    mls_code code = MLS_OK;
    if (runs == NULL || scratch == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for %zu steps", count);
    } else {
        count = mls_runs_of(steps, count, runs);
        mls_runs_tidy(chain, runs, &count, scratch);
        code = give(chain, runs, count, out, st);
    }
    mls_free(runs);
    mls_free(scratch);
    if (code == MLS_OK) {
        out->optimal = true;
    }
    return code;
}

/* The seconds that the start could do without, at most. */
static mls_code extra_of_start(const mls_chain *chain, const mls_best_options *o,
                               double *extra, mls_status *st)
{
    mls_totals totals;
    *extra = INFINITY;
    if (o->start == NULL) {
        return MLS_OK;
    }
    const mls_code code =
        mls_chain_simulate(chain, o->start, o->start_count, NULL, &totals, st);
    if (code != MLS_OK) {
        return code;
    }
    if (totals.peak_bytes > o->budget_bytes) {
        return mls_fail(st, MLS_E_VALUE,
                        "the schedule to start from has a peak of %" PRId64
                        " bytes, above the budget of %" PRId64,
                        totals.peak_bytes, o->budget_bytes);
    }
    /* only less than this is of interest, so the search need not go further */
    *extra = 0;
    for (size_t i = 0; i < o->start_count; i++) {
        const mls_action run = {.kind = o->start[i].kind, .index = o->start[i].index};
        *extra += mls_run_extra(chain, &run);
    }
    return MLS_OK;
}

/* Through all schedules; `*through` says whether that was possible. */
static mls_code search_all(const mls_chain *chain, const mls_best_options *options,
                           double below, bool *through, mls_best *out, mls_status *st)
{
    const mls_stretch whole = mls_stretch_whole(chain, options->offload);
    const mls_search_limits limits = {.budget_bytes = options->budget_bytes,
                                      .below = below,
                                      .states = options->states,
                                      .poll = options->poll};
    mls_found found;
    mls_code code = mls_search(&whole, &limits, &found, st);
    if (code != MLS_OK) {
        return code;
    }
    /* with a start, to find nothing faster means that the start is the fastest */
    *through = !found.ran_out;
    if (found.found) {
        code = give_best(chain, found.runs.steps, found.runs.count, out, st);
    } else if (!found.ran_out && options->start != NULL) {
        code = give_best(chain, options->start, options->start_count, out, st);
    } else if (!found.ran_out) {
        code = refuse_all(&whole, &limits, options, st);
    }
    if (code == MLS_OK && *through) {
        out->states = found.states;
    }
    mls_schedule_fini(&found.runs);
    return code;
}

/* First through all, where the chain is short enough for that: it costs little where it
 * ends, and a bounded time where it does not. */
mls_code mls_best_schedule(const mls_chain *chain, const mls_best_options *options,
                           mls_best *out, mls_status *st)
{
    double below;
    mls_code code = extra_of_start(chain, options, &below, st);
    if (code != MLS_OK) {
        return code;
    }
    if (chain->blocks <= MLS_SEARCH_BLOCKS) {
        bool through = false;
        code = search_all(chain, options, below, &through, out, st);
        if (code != MLS_OK || through) {
            return code;
        }
    }
    if (options->start == NULL) {
        return refuse_some(chain, options, st);
    }
    return improve(chain, options, out, st);
}
