/* runs: schedules without their drops; and with them again, placed by looking ahead. */
#include "activation/compute_steps.h"

#include <string.h>

/* The last gradient is nobody's before this step: it comes with it, and goes with it. */
int64_t mls_backward_makes(const mls_chain *chain, size_t i)
{
    const int64_t last = i + 1 == chain->blocks ? chain->gradient_bytes[i + 1] : 0;
    return chain->gradient_bytes[i] + last + chain->backward_temporary_bytes[i];
}

/* Each block is saved once, runs backward once, and is loaded as often as it is
 * offloaded: so a load is paid for where the offload is, and all the rest is common to
 * all schedules.
 */
double mls_run_extra(const mls_chain *chain, const mls_action *run)
{
    const double bytes = (double)chain->saved_bytes[run->index];
    switch (run->kind) {
    case MLS_STEP_FORWARD:
        return chain->forward_seconds[run->index];
    case MLS_STEP_OFFLOAD:
        return bytes / chain->offload_rate + bytes / chain->load_rate;
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

/* Where saved i is. */
enum { NOWHERE, ON_DEVICE, ON_HOST };

/* What later runs ask for.  One pass backwards in time finds both the forwards that
 * nobody needs and the last use of each activation. */
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
        d->saved[i] = ON_DEVICE;
        return true;
    case MLS_STEP_LOAD:
        d->saved[i] = ON_HOST;
        return true;
    case MLS_STEP_SAVE:
        d->saved[i] = NOWHERE;
        return true;
    default:
        d->saved[i] = ON_DEVICE;
        return true;
    }
}

/* Ask for what the run reads, unless it lies inside what is saved. */
static void ask_input(demand *d, mls_action *run)
{
    const size_t i = (size_t)run->index;
    if (run->kind == MLS_STEP_OFFLOAD || run->kind == MLS_STEP_LOAD || i == 0 ||
        d->saved[i - 1] == ON_DEVICE) {
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
