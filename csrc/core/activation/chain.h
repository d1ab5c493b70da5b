/* chain: a chain of blocks (seconds, bytes, transfer rates), the kinds of steps of its
 * schedules, and their rules.
 *
 * A chain has `blocks` blocks, 0 .. n - 1, which run one after the other. Activation k, 0
 * .. n, is the input of block k; activation 0 is the chain's input, activation n its
 * result. A schedule is a list of steps that runs every block's backward pass once, from
 * the last to the first:
 *
 *     forward i   needs activation i; makes activation i + 1 in its own memory.
 *     save i      needs activation i; makes saved i, which contains activation i + 1.
 *     backward i  needs activation i, saved i and gradient i + 1; makes gradient i, then
 *                 frees saved i and gradient i + 1.
 *     drop k      frees activation k, which has its own memory; never activation 0.
 *     offload i   moves saved i to the host; activation i + 1 stays in its own memory.
 *     load i      moves saved i back, with activation i + 1 in it.
 *
 * After backward i, forward i and save i are invalid: nothing could use their result.
 * An activation is held either in its own memory or inside saved i - 1 on the device,
 * never twice: a forward, save or load that would make it a second time is invalid.
 * Activation 0 is held from the beginning to the end. Gradient n is made by the step
 * backward n - 1. Gradient 0 is never freed.
 *
 * The peak of a step is the memory held before it, plus the memory that it makes, plus
 * its temporary memory. The peak of a schedule is the largest peak of its steps. The time
 * of a schedule is the sum over its steps: forward and save take forward_seconds, offload
 * and load take saved_bytes divided by the rate.
 */
#ifndef MLS_CHAIN_H
#define MLS_CHAIN_H

#include "base/status.h"

/* A chain; all arrays are borrowed, with n entries each unless noted. The bytes of saved
 * i are everything that exists after block i ran in saving mode and did not exist before.
 * So they include activation i + 1 but not the block's input. */
typedef struct mls_chain {
    size_t blocks;
    const double *forward_seconds, *backward_seconds;
    const int64_t *activation_bytes,
        *gradient_bytes; /* n + 1 entries; gradients may be 0 */
    const int64_t *saved_bytes;
    const int64_t *forward_temporary_bytes; /* in addition to input and output */
    const int64_t *saving_temporary_bytes;  /* in addition to input and saved */
    /* In addition to input, saved and both gradients. May be negative, down to
     * -gradient_bytes[i], if much of the saved memory is freed before gradient i is made;
     * but not below -(saved_bytes[i] + gradient_bytes[i + 1]), the memory that the step
     * frees. */
    const int64_t *backward_temporary_bytes;
    double offload_rate, load_rate; /* bytes per second; both 0: no offloading */
} mls_chain;

enum { MLS_CHAIN_MAX_BLOCKS = 1 << 20 };

/* Checks a chain. The status names the entry.
 * - MLS_E_VALUE: no block, or more than MLS_CHAIN_MAX_BLOCKS; negative or non-finite
 *   seconds; negative bytes (for backward_temporary_bytes[i]: less than the limits
 *   above); saved_bytes[i] < activation_bytes[i + 1]; only one rate, or a rate that is
 *   not above 0.
 * - MLS_E_SIZE: all bytes together exceed 62 bits, or the seconds overflow a double.
 */
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

/* Returns "forward", "save", ...; "?" for an invalid kind. */
const char *mls_step_name(int kind);

/* `kind` should be an mls_step_kind; steps from callers are unchecked. */
typedef struct mls_step {
    int32_t kind, index;
} mls_step;

/* A list of steps that grows. Initialise with zeros. */
typedef struct mls_schedule {
    mls_step *steps; /* owned */
    size_t count, room;
} mls_schedule;

/* Appends a step. MLS_E_MEMORY: the schedule is unchanged. */
mls_code mls_schedule_push(mls_schedule *schedule, mls_step_kind kind, size_t index,
                           mls_status *st);
void mls_schedule_fini(mls_schedule *schedule); /* accepts a zeroed one; zeroes it */

/* Result of one step. `before` and `after` are the bytes held. */
typedef struct mls_step_record {
    int64_t before, peak, after;
    double seconds;
} mls_step_record;

typedef struct mls_totals {
    double seconds;
    int64_t peak_bytes;
} mls_totals;

/* Simulates a schedule of a checked chain. `records`, one for each step, may be NULL.
 * - MLS_E_VALUE: the schedule is invalid. The text has the number of the step, counted
 *   from 0, and the reason. `*out` is unchanged, and `records` is undefined.
 * - MLS_E_MEMORY.
 */
mls_code mls_chain_simulate(const mls_chain *chain, const mls_step *steps, size_t count,
                            mls_step_record *records, mls_totals *out, mls_status *st);

#endif
