/* chain: checks a chain's numbers, and simulates a schedule: its seconds, its peak
 * memory, its invalid steps.
 *
 * Activation i is the input of block i, so activation i + 1 is its output. Saved i is
 * everything that block i keeps for its backward pass, its output included.
 *
 * The simulator is independent of the planners. It keeps one byte for each activation and
 * for each saved block, and checks every rule at every step.
 */
#include "activation/chain.h"

#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const char *const names[MLS_STEP_KINDS] = {
    [MLS_STEP_FORWARD] = "forward",   [MLS_STEP_SAVE] = "save",
    [MLS_STEP_BACKWARD] = "backward", [MLS_STEP_DROP] = "drop",
    [MLS_STEP_OFFLOAD] = "offload",   [MLS_STEP_LOAD] = "load",
};

/* Kinds come from unchecked arrays, so invalid ones have a name too. */
const char *mls_step_name(int kind)
{
    return kind >= 0 && kind < MLS_STEP_KINDS ? names[kind] : "?";
}

/* ---- checks ---- */

/* Refuses negative and non-finite seconds (MLS_E_VALUE), and adds all `count` of them to
 * `*sum`. `name` is the array's name for the message. The comparison is negated so that
 * NaN fails. */
static mls_code check_seconds(const char *name, const double *seconds, size_t count,
                              double *sum, mls_status *st)
{
    for (size_t i = 0; i < count; i++) {
        if (!(seconds[i] >= 0) || !isfinite(seconds[i])) {
            mls_fail(st, MLS_E_VALUE, "%s[%zu] is %g: choose a finite number, at least 0",
                     name, i, seconds[i]);
            mls_status_name(st, name, strlen(name));
            return mls_status_got(st, "%g", seconds[i]);
        }
        *sum += seconds[i];
    }
    return MLS_OK;
}

/* Refuses bytes below -allowances[i] (`allowances` NULL: below 0) with MLS_E_VALUE, and
 * adds all `count` of them to `*sum`; MLS_E_SIZE beyond 62 bits. `name` is the array's
 * name for messages. The limit is one bit less than possible, because planners add a
 * little to the sum. */
static mls_code check_bytes(const char *name, const int64_t *bytes, size_t count,
                            const int64_t *allowances, int64_t *sum, mls_status *st)
{
    for (size_t i = 0; i < count; i++) {
        const int64_t least = allowances == NULL ? 0 : -allowances[i];
        if (bytes[i] < least) {
            mls_fail(st, MLS_E_VALUE,
                     "%s[%zu] is %" PRId64 ": expected %" PRId64 " or more", name, i,
                     bytes[i], least);
            mls_status_name(st, name, strlen(name));
            return mls_status_got(st, "%" PRId64, bytes[i]);
        }
        if (__builtin_add_overflow(*sum, bytes[i], sum) || *sum > INT64_MAX / 2) {
            return mls_fail(st, MLS_E_SIZE,
                            "all bytes together exceed 62 bits at %s[%zu]", name, i);
        }
    }
    return MLS_OK;
}

/* Checks all arrays of bytes (with their Python names for messages), and the relations
 * between them. MLS_E_VALUE: an entry is below its limit; MLS_E_SIZE: all bytes together
 * exceed 62 bits. */
static mls_code check_all_bytes(const mls_chain *c, mls_status *st)
{
    const size_t n = c->blocks;
    const struct {
        const char *name;
        const int64_t *bytes;
        size_t count;
        const int64_t *allowances; /* see check_bytes */
    } arrays[] = {
        {"activation_bytes", c->activation_bytes, n + 1, NULL},
        {"gradient_bytes", c->gradient_bytes, n + 1, NULL},
        {"saved_bytes", c->saved_bytes, n, NULL},
        {"forward_temporary_bytes", c->forward_temporary_bytes, n, NULL},
        {"saving_temporary_bytes", c->saving_temporary_bytes, n, NULL},
        {"backward_temporary_bytes", c->backward_temporary_bytes, n, c->gradient_bytes},
    };
    int64_t sum = 0;
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        const mls_code code =
            check_bytes(arrays[i].name, arrays[i].bytes, arrays[i].count,
                        arrays[i].allowances, &sum, st);
        if (code != MLS_OK) {
            return code;
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (c->saved_bytes[i] < c->activation_bytes[i + 1]) {
            return mls_fail(st, MLS_E_VALUE,
                            "saved_bytes[%zu] is %" PRId64
                            ", less than activation_bytes[%zu], %" PRId64
                            ": what a block saves contains its output",
                            i, c->saved_bytes[i], i + 1, c->activation_bytes[i + 1]);
        }
        /* otherwise the step would end with more memory than its peak */
        const int64_t freed = c->saved_bytes[i] + c->gradient_bytes[i + 1];
        if (c->backward_temporary_bytes[i] < -freed) {
            return mls_fail(
                st, MLS_E_VALUE,
                "backward_temporary_bytes[%zu] is %" PRId64 ": the step frees %" PRId64
                " bytes (saved_bytes[%zu] and gradient_bytes[%zu]), so its "
                "peak would be below the memory held after it; give %" PRId64 " or more",
                i, c->backward_temporary_bytes[i], freed, i, i + 1, -freed);
        }
    }
    return MLS_OK;
}

/* Checks the transfer rates, bytes per second: both or none (0), since every offload
 * needs a load. MLS_E_VALUE. */
static mls_code check_rates(const mls_chain *c, mls_status *st)
{
    const bool has_none = c->offload_rate == 0 && c->load_rate == 0;
    const bool has_both = c->offload_rate > 0 && c->load_rate > 0 &&
                          isfinite(c->offload_rate) && isfinite(c->load_rate);
    if (has_none || has_both) {
        return MLS_OK;
    }
    return mls_fail(st, MLS_E_VALUE,
                    "the offload rate is %g and the load rate %g bytes per second: give "
                    "both, finite and above 0, or neither",
                    c->offload_rate, c->load_rate);
}

/* Checks all numbers of a chain. No planner's schedule runs a block more often than there
 * are blocks, so with the last check, which allows for one run more, no schedule's time
 * overflows. */
mls_code mls_chain_check(const mls_chain *c, mls_status *st)
{
    if (c->blocks == 0 || c->blocks > MLS_CHAIN_MAX_BLOCKS) {
        return mls_fail(st, MLS_E_VALUE, "a chain of %zu blocks: choose 1 to %d",
                        c->blocks, (int)MLS_CHAIN_MAX_BLOCKS);
    }
    double seconds = 0;
    if (check_seconds("forward_seconds", c->forward_seconds, c->blocks, &seconds, st) !=
            MLS_OK ||
        check_seconds("backward_seconds", c->backward_seconds, c->blocks, &seconds, st) !=
            MLS_OK ||
        check_all_bytes(c, st) != MLS_OK || check_rates(c, st) != MLS_OK) {
        return st->code;
    }
    if (!isfinite(seconds * ((double)c->blocks + 1))) {
        return mls_fail(st, MLS_E_SIZE,
                        "the seconds of the chain exceed the range of a double");
    }
    return MLS_OK;
}

/* ---- schedules ---- */

/* Appends one step. Grows by doubling: a schedule may have as many steps as blocks
 * squared. */
mls_code mls_schedule_push(mls_schedule *s, mls_step_kind kind, size_t index,
                           mls_status *st)
{
    mls_step *steps = mls_grow(s->steps, s->count, &s->room, sizeof *steps);
    if (steps == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu steps", s->count + 1);
    }
    s->steps = steps;
    s->steps[s->count++] = (mls_step){.kind = (int32_t)kind, .index = (int32_t)index};
    return MLS_OK;
}

void mls_schedule_fini(mls_schedule *s)
{
    mls_free(s->steps);
    *s = (mls_schedule){0};
}

/* ---- simulation ---- */

/* Location of saved i. Host memory is not counted. */
enum { NOWHERE, ON_DEVICE, ON_HOST };

/* State of the simulated device. Gradients need no flags: only one exists at a time. */
typedef struct machine {
    const mls_chain *chain;
    unsigned char *alone; /* n + 1: activation k has its own memory */
    unsigned char *saved; /* n: NOWHERE, ON_DEVICE or ON_HOST */
    size_t left;          /* remaining backward passes; gradient `left` is held, but none
                             before the first of them */
    int64_t live_bytes;
    double seconds;
} machine;

/* Effect of a step on memory. Memory is freed at the end of the step, so the peak
 * contains everything. */
typedef struct effect {
    int64_t makes, temporary, frees;
    double seconds;
} effect;

/* Why a step is invalid; `index` belongs to `object`. */
typedef struct refusal {
    const char *object, *reason;
    size_t index;
} refusal;

/* Puts the reason why a step is invalid into `*why`; returns false. */
static bool refuse_step(refusal *why, const char *object, const char *reason,
                        size_t index)
{
    *why = (refusal){object, reason, index};
    return false;
}

/* Returns whether activation k is held on the device: in its own memory, or inside the
 * saved tensors of the block before it. */
static bool activation_is_stored(const machine *m, size_t k)
{
    return m->alone[k] != 0 || (k > 0 && m->saved[k - 1] == ON_DEVICE);
}

/* Returns whether block i may run forward or be saved: its backward pass is still to
 * come, its input is held, and its output is not, in any form. If not, `*why` receives
 * the reason. */
static bool can_run(const machine *m, size_t i, refusal *why)
{
    if (i >= m->left) {
        return refuse_step(why, "backward", "has run already", i);
    }
    if (!activation_is_stored(m, i)) {
        return refuse_step(why, "activation", "does not exist", i);
    }
    if (activation_is_stored(m, i + 1)) {
        return refuse_step(why, "activation", "already exists", i + 1);
    }
    return true;
}

/* Runs block i: only its output, activation i + 1, is kept, in its own memory. Like the
 * functions below, changes the machine and sets `*e` to the step's effect; returns false,
 * with the reason in `*why`, if the rules forbid the step. */
static bool run_forward(machine *m, size_t i, effect *e, refusal *why)
{
    if (!can_run(m, i, why)) {
        return false;
    }
    m->alone[i + 1] = 1;
    *e = (effect){.makes = m->chain->activation_bytes[i + 1],
                  .temporary = m->chain->forward_temporary_bytes[i],
                  .seconds = m->chain->forward_seconds[i]};
    return true;
}

/* Runs block i and keeps its saved tensors, which contain the output. Forbidden if they
 * exist already, on the device or on the host. `e`, `why`: as for run_forward. */
static bool run_save(machine *m, size_t i, effect *e, refusal *why)
{
    if (m->saved[i] != NOWHERE) {
        return refuse_step(why, "saved", "already exists", i);
    }
    if (!can_run(m, i, why)) {
        return false;
    }
    m->saved[i] = ON_DEVICE;
    *e = (effect){.makes = m->chain->saved_bytes[i],
                  .temporary = m->chain->saving_temporary_bytes[i],
                  .seconds = m->chain->forward_seconds[i]};
    return true;
}

/* Runs the backward pass of block i, which frees its saved tensors. Only one gradient is
 * held at a time, which fixes the order. `e`, `why`: as for run_forward. */
static bool run_backward(machine *m, size_t i, effect *e, refusal *why)
{
    const mls_chain *c = m->chain;
    const bool is_first = i + 1 == c->blocks;
    if (m->left != i + 1) {
        return refuse_step(why, "gradient", "does not exist", i + 1);
    }
    if (m->saved[i] != ON_DEVICE) {
        const char *reason = m->saved[i] == ON_HOST ? "is on the host" : "does not exist";
        return refuse_step(why, "saved", reason, i);
    }
    if (!activation_is_stored(m, i)) {
        return refuse_step(why, "activation", "does not exist", i);
    }
    m->left = i;
    m->saved[i] = NOWHERE;
    /* the first backward step, of the last block, also makes the gradient of the
     * output */
    *e = (effect){.makes =
                      c->gradient_bytes[i] + (is_first ? c->gradient_bytes[i + 1] : 0),
                  .temporary = c->backward_temporary_bytes[i],
                  .frees = c->saved_bytes[i] + c->gradient_bytes[i + 1],
                  .seconds = c->backward_seconds[i]};
    return true;
}

/* Frees activation k. An activation inside saved tensors is freed with them, not by a
 * drop. `e`, `why`: as for run_forward. */
static bool run_drop(machine *m, size_t k, effect *e, refusal *why)
{
    if (k == 0) {
        return refuse_step(why, "activation", "is the input and stays", k);
    }
    if (m->alone[k] == 0) {
        return refuse_step(why, "activation", "is not a separate tensor", k);
    }
    m->alone[k] = 0;
    *e = (effect){.frees = m->chain->activation_bytes[k]};
    return true;
}

/* Moves saved i to host memory. Saved i contains activation i + 1, which stays in its own
 * memory: the step makes nothing and frees less. `e`, `why`: as for run_forward. */
static bool run_offload(machine *m, size_t i, effect *e, refusal *why)
{
    const mls_chain *c = m->chain;
    if (c->offload_rate <= 0) {
        return refuse_step(why, "saved", "cannot be offloaded: the chain has no rates",
                           i);
    }
    if (m->saved[i] != ON_DEVICE) {
        return refuse_step(why, "saved", "is not on the device", i);
    }
    m->saved[i] = ON_HOST;
    m->alone[i + 1] = 1;
    *e = (effect){.frees = c->saved_bytes[i] - c->activation_bytes[i + 1],
                  .seconds = (double)c->saved_bytes[i] / c->offload_rate};
    return true;
}

/* Moves saved i back from host memory. The activation that stayed must be dropped first,
 * because it returns inside saved i. `e`, `why`: as for run_forward. */
static bool run_load(machine *m, size_t i, effect *e, refusal *why)
{
    const mls_chain *c = m->chain;
    if (m->saved[i] != ON_HOST) {
        return refuse_step(why, "saved", "is not on the host", i);
    }
    if (activation_is_stored(m, i + 1)) {
        return refuse_step(why, "activation", "already exists", i + 1);
    }
    m->saved[i] = ON_DEVICE;
    *e = (effect){.makes = c->saved_bytes[i],
                  .seconds = (double)c->saved_bytes[i] / c->load_rate};
    return true;
}

/* Runs a step: changes the state and returns its effect, or returns false with the
 * reason. */
typedef bool (*runner)(machine *m, size_t index, effect *e, refusal *why);

static const runner runners[MLS_STEP_KINDS] = {
    [MLS_STEP_FORWARD] = run_forward,   [MLS_STEP_SAVE] = run_save,
    [MLS_STEP_BACKWARD] = run_backward, [MLS_STEP_DROP] = run_drop,
    [MLS_STEP_OFFLOAD] = run_offload,   [MLS_STEP_LOAD] = run_load,
};

/* Runs a step with all checks, and updates the machine's totals; `*record` receives its
 * bytes and seconds. `number` is its position, for messages. Kind and index are checked
 * first, because they select a function and array entries. MLS_E_VALUE: the step is
 * invalid. */
static mls_code run_step(machine *m, size_t number, mls_step step,
                         mls_step_record *record, mls_status *st)
{
    const size_t most = m->chain->blocks - (step.kind == MLS_STEP_DROP ? 0 : 1);
    if (step.kind < 0 || step.kind >= MLS_STEP_KINDS || step.index < 0 ||
        (size_t)step.index > most) {
        return mls_fail(st, MLS_E_VALUE,
                        "step %zu, %s %" PRId32 ": there is no such step "
                        "in a chain of %zu blocks",
                        number, mls_step_name(step.kind), step.index, m->chain->blocks);
    }
    effect e = {0};
    refusal why = {"", "", 0};
    if (!runners[step.kind](m, (size_t)step.index, &e, &why)) {
        return mls_fail(st, MLS_E_VALUE, "step %zu, %s %" PRId32 ": %s %zu %s", number,
                        mls_step_name(step.kind), step.index, why.object, why.index,
                        why.reason);
    }
    record->before = m->live_bytes;
    record->peak = m->live_bytes + e.makes + e.temporary;
    m->live_bytes += e.makes - e.frees;
    m->seconds += e.seconds;
    record->after = m->live_bytes;
    record->seconds = e.seconds;
    return MLS_OK;
}

/* Runs all `count` steps, and writes the totals; `records`, unless NULL, receives a
 * record for each. MLS_E_VALUE: a step is invalid, or backward passes are left at the
 * end. All bytes together fit 62 bits and nothing is held twice, so no sum overflows. */
static mls_code run_all(machine *m, const mls_step *steps, size_t count,
                        mls_step_record *records, mls_totals *out, mls_status *st)
{
    int64_t peak = m->live_bytes;
    for (size_t i = 0; i < count; i++) {
        mls_step_record record;
        const mls_code code = run_step(m, i, steps[i], &record, st);
        if (code != MLS_OK) {
            return code;
        }
        peak = record.peak > peak ? record.peak : peak;
        if (records != NULL) {
            records[i] = record;
        }
    }
    if (m->left != 0) {
        return mls_fail(
            st, MLS_E_VALUE,
            "the schedule ends after %zu steps with %zu backward passes to go", count,
            m->left);
    }
    *out = (mls_totals){.seconds = m->seconds, .peak_bytes = peak};
    return MLS_OK;
}

/* At the beginning only activation 0, the input, is held. */
mls_code mls_chain_simulate(const mls_chain *chain, const mls_step *steps, size_t count,
                            mls_step_record *records, mls_totals *out, mls_status *st)
{
    const size_t n = chain->blocks;
    unsigned char *flags = mls_alloc(n + 1, 2);
    if (flags == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to simulate %zu blocks", n);
    }
    machine m = {.chain = chain,
                 .alone = flags,
                 .saved = flags + (n + 1),
                 .left = n,
                 .live_bytes = chain->activation_bytes[0]};
    m.alone[0] = 1;
    const mls_code code = run_all(&m, steps, count, records, out, st);
    mls_free(flags);
    return code;
}
