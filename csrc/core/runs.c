/* runs: schedules without their drops; and with them again, placed by looking ahead. */
#include "runs.h"

#include <string.h>

/* Two passes over the runs do all the work here.  Forwards in time, a moment follows what
 * is held; each kind of run has a function that changes the moment and says its peak.
 * Backwards in time, what later runs ask for is known when a run is looked at, so one
 * pass finds both the forwards that nobody needs and the last use of each activation. */

/* ---- moments ---- */

/* Activation 0 is there from the beginning to the end, and never a drop's. */
void mls_moment_begin(mls_moment *moment, const mls_chain *chain, unsigned char *scratch)
{
    memset(scratch, 0, mls_runs_scratch(chain));
    *moment = (mls_moment){.chain = chain,
                           .alone = scratch,
                           .saved = scratch + chain->blocks + 1,
                           .left = chain->blocks,
                           .held = chain->activation_bytes[0]};
    moment->alone[0] = 1;
}

/* The last gradient is nobody's before this step: it comes with it, and goes with it. */
int64_t mls_backward_makes(const mls_chain *chain, size_t i)
{
    const int64_t last = i + 1 == chain->blocks ? chain->gradient_bytes[i + 1] : 0;
    return chain->gradient_bytes[i] + last + chain->backward_temporary_bytes[i];
}

/* Output i + 1 as memory of its own. */
static int64_t run_forward(mls_moment *m, size_t i)
{
    m->alone[i + 1] = 1;
    m->held += m->chain->activation_bytes[i + 1];
    return m->held + m->chain->forward_temporary_bytes[i];
}

/* The output lies within what is saved, and is not counted a second time. */
static int64_t run_save(mls_moment *m, size_t i)
{
    m->saved[i] = MLS_ON_DEVICE;
    m->held += m->chain->saved_bytes[i];
    return m->held + m->chain->saving_temporary_bytes[i];
}

/* One gradient takes the other's place; the last one comes and goes within the step. */
static int64_t run_backward(mls_moment *m, size_t i)
{
    const int64_t peak = m->held + mls_backward_makes(m->chain, i);
    m->held += m->chain->gradient_bytes[i] - mls_held_gradient(m->chain, i + 1) -
               m->chain->saved_bytes[i];
    m->saved[i] = MLS_NOWHERE;
    m->left = i;
    return peak;
}

/* The output stays behind, by itself. */
static int64_t run_offload(mls_moment *m, size_t i)
{
    const int64_t peak = m->held;
    m->saved[i] = MLS_ON_HOST;
    m->alone[i + 1] = 1;
    m->held -= m->chain->saved_bytes[i] - m->chain->activation_bytes[i + 1];
    return peak;
}

/* As a save without the run: the output that stayed behind was dropped before. */
static int64_t run_load(mls_moment *m, size_t i)
{
    m->saved[i] = MLS_ON_DEVICE;
    m->held += m->chain->saved_bytes[i];
    return m->held;
}

/* The drop comes after the peak: a run's input is there as long as it runs. */
int64_t mls_moment_run(mls_moment *m, const mls_action *run)
{
    typedef int64_t (*runner)(mls_moment *, size_t);
    static const runner runners[MLS_STEP_KINDS] = {
        [MLS_STEP_FORWARD] = run_forward,   [MLS_STEP_SAVE] = run_save,
        [MLS_STEP_BACKWARD] = run_backward, [MLS_STEP_OFFLOAD] = run_offload,
        [MLS_STEP_LOAD] = run_load,
    };
    const size_t i = (size_t)run->index;
    const int64_t peak = runners[run->kind](m, i);
    if (run->drops) {
        const size_t dropped = run->kind == MLS_STEP_OFFLOAD ? i + 1 : i;
        m->alone[dropped] = 0;
        m->held -= m->chain->activation_bytes[dropped];
    }
    return peak;
}

/* ---- seconds ---- */

/* A save runs the same forward; whether time is lost over keeping more is in the chain's
 * seconds already. */
double mls_run_seconds(const mls_chain *chain, const mls_action *run)
{
    switch (run->kind) {
    case MLS_STEP_FORWARD:
    case MLS_STEP_SAVE:
        return chain->forward_seconds[run->index];
    case MLS_STEP_BACKWARD:
        return chain->backward_seconds[run->index];
    case MLS_STEP_OFFLOAD:
        return (double)chain->saved_bytes[run->index] / chain->offload_rate;
    case MLS_STEP_LOAD:
        return (double)chain->saved_bytes[run->index] / chain->load_rate;
    default:
        return 0;
    }
}

/* Each block is saved once, runs backward once, and is loaded as often as it is
 * offloaded: so a load is paid for where the offload is, and all the rest is common to
 * all schedules.
 */
double mls_run_extra(const mls_chain *chain, const mls_action *run)
{
    const mls_action load = {.kind = MLS_STEP_LOAD, .index = run->index};
    switch (run->kind) {
    case MLS_STEP_FORWARD:
        return mls_run_seconds(chain, run);
    case MLS_STEP_OFFLOAD:
        return mls_run_seconds(chain, run) + mls_run_seconds(chain, &load);
    default:
        return 0;
    }
}

/* ---- lists ---- */

/* What was dropped where is forgotten: tidying finds it again, or better. */
size_t mls_runs_of(const mls_step *steps, size_t count, mls_action *out)
{
    size_t taken = 0;
    for (size_t i = 0; i < count; i++) {
        if (steps[i].kind != MLS_STEP_DROP) {
            out[taken++] = (mls_action){.kind = steps[i].kind, .index = steps[i].index};
        }
    }
    return taken;
}

/* What the runs after a moment ask for, as one goes back in time. */
typedef struct demand {
    unsigned char *wanted; /* n + 1: activation k is needed, by itself, later */
    unsigned char *saved;  /* n: where saved i is */
} demand;

/* Whether the run makes anything that is wanted; what it makes is wanted no more before
 * it. */
static bool take_output(demand *d, mls_action *run)
{
    const size_t i = (size_t)run->index;
    switch (run->kind) {
    case MLS_STEP_FORWARD:
        if (!d->wanted[i + 1]) {
            return false;
        }
        d->wanted[i + 1] = 0;
        return true;
    case MLS_STEP_OFFLOAD:
        run->drops = !d->wanted[i + 1];
        d->wanted[i + 1] = 0;
        d->saved[i] = MLS_ON_DEVICE;
        return true;
    case MLS_STEP_LOAD:
        d->saved[i] = MLS_ON_HOST;
        return true;
    case MLS_STEP_SAVE:
        d->saved[i] = MLS_NOWHERE;
        return true;
    default:
        d->saved[i] = MLS_ON_DEVICE;
        return true;
    }
}

/* Ask for what the run reads, unless it lies inside what is saved. */
static void ask_input(demand *d, mls_action *run)
{
    const size_t i = (size_t)run->index;
    if (run->kind == MLS_STEP_OFFLOAD || run->kind == MLS_STEP_LOAD || i == 0 ||
        d->saved[i - 1] == MLS_ON_DEVICE) {
        return;
    }
    run->drops = !d->wanted[i];
    d->wanted[i] = 1;
}

/* A forward that is left out asks for nothing either, so chains of them go in one pass.
 * The runs that stay gather at the end of the array, where there is always room. */
bool mls_runs_tidy(const mls_chain *chain, mls_action *runs, size_t *count,
                   unsigned char *scratch)
{
    memset(scratch, 0, mls_runs_scratch(chain));
    demand d = {.wanted = scratch, .saved = scratch + chain->blocks + 1};
    size_t kept = *count;
    for (size_t t = *count; t-- > 0;) {
        mls_action run = runs[t];
        run.drops = false;
        if (take_output(&d, &run)) {
            ask_input(&d, &run);
            runs[--kept] = run;
        }
    }
    memmove(runs, runs + kept, (*count - kept) * sizeof *runs);
    *count -= kept;
    return memchr(d.wanted, 1, chain->blocks + 1) == NULL;
}

/* Before the first run something is held, too: activation 0. */
mls_totals mls_runs_totals(const mls_chain *chain, const mls_action *runs, size_t count,
                           unsigned char *scratch)
{
    mls_moment moment;
    mls_moment_begin(&moment, chain, scratch);
    mls_totals totals = {.seconds = 0, .peak_bytes = moment.held};
    for (size_t i = 0; i < count; i++) {
        const int64_t peak = mls_moment_run(&moment, &runs[i]);
        totals.peak_bytes = peak > totals.peak_bytes ? peak : totals.peak_bytes;
        totals.seconds += mls_run_seconds(chain, &runs[i]);
    }
    return totals;
}

/* What a run drops goes right behind it: held longer, it would count against the budget
 * of all that follows. */
mls_code mls_runs_write(const mls_action *runs, size_t count, mls_schedule *out,
                        mls_status *st)
{
    for (size_t t = 0; t < count; t++) {
        const size_t i = (size_t)runs[t].index;
        mls_code code = mls_schedule_push(out, (mls_step_kind)runs[t].kind, i, st);
        if (code == MLS_OK && runs[t].drops) {
            const size_t dropped = runs[t].kind == MLS_STEP_OFFLOAD ? i + 1 : i;
            code = mls_schedule_push(out, MLS_STEP_DROP, dropped, st);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}
