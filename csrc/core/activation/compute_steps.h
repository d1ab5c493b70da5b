/* runs: schedules without their drops.
 *
 * Dropping takes no time, and to drop early never costs memory.  So a schedule is known
 * by its other steps, its runs: each activation is dropped right after the run that needs
 * it last, and a forward whose output nobody needs is left out.
 */
#ifndef MLS_RUNS_H
#define MLS_RUNS_H

#include "activation/chain.h"

#include <stdbool.h>
#include <stddef.h>

/* A step that is no drop; `drops` says that its activation is dropped right after it:
 * that which it reads, or after an offload that which stays. */
typedef struct mls_action {
    int32_t kind, index;
    bool drops;
} mls_action;

/* Bytes of scratch that a chain needs here. */
static inline size_t mls_runs_scratch(const mls_chain *chain)
{
    return 2 * (chain->blocks + 1);
}

/* Gradient bytes that are held while `left` backward passes are to come: the last
 * gradient comes with its backward pass. */
static inline int64_t mls_held_gradient(const mls_chain *chain, size_t left)
{
    return left < chain->blocks ? chain->gradient_bytes[left] : 0;
}

/* What the backward pass of block i makes beyond what is held, temporary included. */
int64_t mls_backward_makes(const mls_chain *chain, size_t i);

/* Seconds of a run that a schedule could do without: those of a forward, and of an
 * offload with the load that follows from it.  All other seconds are the same whatever
 * the schedule. */
double mls_run_extra(const mls_chain *chain, const mls_action *run);

/* The runs of a schedule, not tidy; returns how many.  `out` has room for `count`. */
size_t mls_runs_of(const mls_step *steps, size_t count, mls_action *out);

/* Leave out forwards that nobody needs, and place the drops: in place, and `*count`
 * falls. False: an activation is needed that no run makes; the runs are of no use then.
 */
bool mls_runs_tidy(const mls_chain *chain, mls_action *runs, size_t *count,
                   unsigned char *scratch);

/* Append runs and their drops to a schedule.  MLS_E_MEMORY. */
mls_code mls_runs_write(const mls_action *runs, size_t count, mls_schedule *out,
                        mls_status *st);

#endif
