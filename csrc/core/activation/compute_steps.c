/* compute_steps: places the drops of a schedule that a search found (schedule_search.c),
 * right after each last use; omits unused forwards.
 *
 * Activation i is the input of block i, so activation i + 1 is its output. Saved i is
 * everything that block i keeps for its backward pass, its output included. A drop frees
 * an activation that has its own memory.
 */
#include "activation/compute_steps.h"

#include <string.h>

/* The last block's pass also makes the last gradient. */
int64_t mls_backward_makes(const mls_chain *chain, size_t i)
{
    const int64_t last = i + 1 == chain->blocks ? chain->gradient_bytes[i + 1] : 0;
    return chain->gradient_bytes[i] + last + chain->backward_temporary_bytes[i];
}

/* Returns the seconds of a step that other schedules may not need. Every schedule saves
 * each block once, runs its backward pass once, and loads it as often as it offloads it.
 * So a load is charged to its offload, and only forwards and offloads differ between
 * schedules. */
double mls_step_extra(const mls_chain *chain, const mls_compute_step *step)
{
    const double bytes = (double)chain->saved_bytes[step->index];
    switch (step->kind) {
    case MLS_STEP_FORWARD:
        return chain->forward_seconds[step->index];
    case MLS_STEP_OFFLOAD:
        return bytes / chain->offload_rate + bytes / chain->load_rate;
    default:
        return 0;
    }
}

/* ---- lists ---- */

/* Copies all steps but drops, and returns their number. Drops are omitted:
 * mls_compute_steps_tidy places them again, possibly better. */
size_t mls_compute_steps_of(const mls_step *steps, size_t count, mls_compute_step *out)
{
    size_t step_count = 0;
    for (size_t i = 0; i < count; i++) {
        if (steps[i].kind != MLS_STEP_DROP) {
            out[step_count++] =
                (mls_compute_step){.kind = steps[i].kind, .index = steps[i].index};
        }
    }
    return step_count;
}

/* Location of saved i. */
enum { NOWHERE, ON_DEVICE, ON_HOST };

/* The needs of the steps visited so far, which are later in the schedule. A single pass
 * over the steps, from the last to the first, finds the unused forwards and the last use
 * of each activation. */
typedef struct demand {
    unsigned char *needed; /* n + 1: a later step needs activation k in its own memory */
    unsigned char *saved;  /* n: location of saved i before the step visited last */
} demand;

/* Undoes a step's effect on the demand, since steps are visited backwards: its output is
 * not needed before it, and saved i is where the step requires it (`default`: a backward
 * pass). Sets `step->drops` for an offload whose activation no later step needs. Returns
 * false for a forward whose output no later step needs. */
static bool consume_output(demand *d, mls_compute_step *step)
{
    const size_t i = (size_t)step->index;
    switch (step->kind) {
    case MLS_STEP_FORWARD:
        if (!d->needed[i + 1]) {
            return false;
        }
        d->needed[i + 1] = 0;
        return true;
    case MLS_STEP_OFFLOAD:
        step->drops = !d->needed[i + 1];
        d->needed[i + 1] = 0;
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

/* Marks the input of a step of block i, activation i, as needed before the step, unless
 * it is activation 0 or inside saved tensors. Sets `step->drops` if no later step needs
 * it. */
static void require_input(demand *d, mls_compute_step *step)
{
    const size_t i = (size_t)step->index;
    if (step->kind == MLS_STEP_OFFLOAD || step->kind == MLS_STEP_LOAD || i == 0 ||
        d->saved[i - 1] == ON_DEVICE) {
        return;
    }
    step->drops = !d->needed[i];
    d->needed[i] = 1;
}

/* Visits the steps from the last to the first. An omitted forward needs no input, so a
 * single pass removes chains of unused forwards. The kept steps collect at the end of the
 * array, which always has room. */
bool mls_compute_steps_tidy(const mls_chain *chain, mls_compute_step *steps,
                            size_t *count, unsigned char *scratch)
{
    memset(scratch, 0, mls_compute_steps_scratch(chain));
    demand d = {.needed = scratch, .saved = scratch + chain->blocks + 1};
    size_t first = *count;
    for (size_t t = *count; t-- > 0;) {
        mls_compute_step step = steps[t];
        step.drops = false;
        if (consume_output(&d, &step)) {
            require_input(&d, &step);
            steps[--first] = step;
        }
    }
    memmove(steps, steps + first, (*count - first) * sizeof *steps);
    *count -= first;
    return memchr(d.needed, 1, chain->blocks + 1) == NULL;
}

/* Appends all steps with their drops. Drops follow directly after the step: memory held
 * longer would count against the budget of all later steps. */
mls_code mls_compute_steps_write(const mls_compute_step *steps, size_t count,
                                 mls_schedule *out, mls_status *st)
{
    for (size_t t = 0; t < count; t++) {
        const size_t i = (size_t)steps[t].index;
        mls_code code = mls_schedule_push(out, (mls_step_kind)steps[t].kind, i, st);
        if (code == MLS_OK && steps[t].drops) {
            const size_t dropped = steps[t].kind == MLS_STEP_OFFLOAD ? i + 1 : i;
            code = mls_schedule_push(out, MLS_STEP_DROP, dropped, st);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}
