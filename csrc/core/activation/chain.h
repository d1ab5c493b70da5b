/* chain: what a chain of blocks costs, the steps of a schedule, and what they take.
 *
 * A chain has `blocks` blocks, 0 .. n - 1, which run one after the other.  Activation k,
 * 0 .. n, enters block k; activation 0 is the input, activation n the result.  A schedule
 * is a list of steps that runs every block's backward pass once, from the last to the
 * first:
 *
 *   forward i   needs activation i; makes activation i + 1 as memory of its own.
 *   save i      needs activation i; makes saved i, in which activation i + 1 lies.
 *   backward i  needs activation i, saved i and gradient i + 1; makes gradient i, then
 *               frees saved i and gradient i + 1.
 *   drop k      frees activation k, which lies by itself; activation 0 is never dropped.
 *   offload i   moves saved i to the host; activation i + 1 stays, by itself.
 *   load i      brings saved i back, and activation i + 1 in it.
 *
 * An activation is there by itself or inside saved i - 1 on the device, never twice: what
 * would make it a second time is refused, be it forward, save or load.  Activation 0 is
 * there from the beginning to the end.  Gradient n comes into being with the step
 * backward n - 1.  Gradient 0 stays.
 *
 * The peak of a step is what is held before it, and what it makes, and its temporary; the
 * peak of a schedule is that of its worst step.  Time is the sum over the steps: forward
 * and save take forward_seconds, offload and load saved_bytes over the rate.
 */
#ifndef MLS_CHAIN_H
#define MLS_CHAIN_H

#include "base/status.h"

/* A chain, borrowed from whoever has the arrays: n entries each, or n + 1 as said.  The
 * bytes of saved i are all that exists after block i ran in saving mode and did not
 * before: activation i + 1 is in them, the block's input is not. */
typedef struct mls_chain {
    size_t blocks;
    const double *forward_seconds, *backward_seconds;
    const int64_t *activation_bytes, *gradient_bytes; /* n + 1; gradients may be 0 */
    const int64_t *saved_bytes;
    const int64_t *forward_temporary_bytes; /* beyond input and output */
    const int64_t *saving_temporary_bytes;  /* beyond input and saved */
    /* Beyond input, saved and both gradients; down to -gradient_bytes[i], if much of what
     * was saved is free again before gradient i is there, and never below what the step
     * frees, -(saved_bytes[i] + gradient_bytes[i + 1]). */
    const int64_t *backward_temporary_bytes;
    double offload_rate, load_rate; /* bytes per second; both 0: no host */
} mls_chain;

enum { MLS_CHAIN_MAX_BLOCKS = 1 << 20 };

/* MLS_E_VALUE, naming the entry: no block or more than MLS_CHAIN_MAX_BLOCKS, seconds that
 * are negative or no number, negative bytes (backward_temporary_bytes[i]: below
 * -gradient_bytes[i] or what the step frees), saved_bytes[i] < activation_bytes[i + 1],
 * one rate without the other, or a rate that is not above 0. MLS_E_SIZE: all bytes
 * together exceed 63 bits, or the seconds a double's range. */
mls_code mls_chain_check(const mls_chain *chain, mls_status *st);

typedef enum mls_step_kind {
    MLS_STEP_FORWARD,
    MLS_STEP_SAVE,
    MLS_STEP_BACKWARD,
    MLS_STEP_DROP,
    MLS_STEP_OFFLOAD,
    MLS_STEP_LOAD,
    MLS_STEP_KINDS
} mls_step_kind;

/* "forward", "save", ...; "?" for what is no kind. */
const char *mls_step_name(int kind);

/* `kind` is an mls_step_kind, but arrays of steps come from anywhere. */
typedef struct mls_step {
    int32_t kind, index;
} mls_step;

/* Steps that are still being collected.  Start zeroed. */
typedef struct mls_schedule {
    mls_step *steps; /* owned */
    size_t count, room;
} mls_schedule;

/* MLS_E_MEMORY: the schedule stays as it was. */
mls_code mls_schedule_push(mls_schedule *schedule, mls_step_kind kind, size_t index,
                           mls_status *st);
void mls_schedule_fini(mls_schedule *schedule); /* accepts a zeroed one; zeroes it */

/* What one step does.  `before` and `after` are the bytes held. */
typedef struct mls_step_record {
    int64_t before, peak, after;
    double seconds;
} mls_step_record;

typedef struct mls_totals {
    double seconds;
    int64_t peak_bytes;
} mls_totals;

/* Run a schedule on paper.  The chain was checked.  `records`, one for each step, may be
 * NULL.
 * MLS_E_VALUE: the schedule is not valid; the text has the number of the step, counted
 * from 0, and what it lacks.  `*out` is untouched then, `records` means nothing.
 * MLS_E_MEMORY. */
mls_code mls_chain_simulate(const mls_chain *chain, const mls_step *steps, size_t count,
                            mls_step_record *records, mls_totals *out, mls_status *st);

#endif
