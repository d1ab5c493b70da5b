/* compute_steps: the steps of a schedule that compute or transfer, without the drops of
 * activations.
 *
 * A drop takes no time, and dropping earlier never costs memory. So the other steps, the
 * compute steps, determine a schedule: each activation is dropped right after the last
 * step that needs it, and a forward whose output is not used is omitted.
 */
#ifndef MLS_COMPUTE_STEPS_H
#define MLS_COMPUTE_STEPS_H

#include "activation/chain.h"

#include <stdbool.h>
#include <stddef.h>

/* A step that is not a drop. `drops`: an activation is dropped right after it: the step's
 * input, or after an offload the activation that stayed. */
typedef struct mls_compute_step {
    int32_t kind, index;
    bool drops;
} mls_compute_step;

/* Returns the scratch bytes that mls_compute_steps_tidy needs for a chain. */
static inline size_t mls_compute_steps_scratch(const mls_chain *chain)
{
    return 2 * (chain->blocks + 1);
}

/* Returns the gradient bytes held while `left` backward passes remain. The last gradient
 * is made by its own backward pass. */
static inline int64_t mls_live_gradient(const mls_chain *chain, size_t left)
{
    return left < chain->blocks ? chain->gradient_bytes[left] : 0;
}

/* Returns the bytes that the backward pass of block i makes, including temporary
 * memory. */
int64_t mls_backward_makes(const mls_chain *chain, size_t i);

/* Returns the seconds of a step that not all schedules have in common: the time of a
 * forward, or of an offload with its load. All other seconds are the same for every
 * schedule. */
double mls_step_extra(const mls_chain *chain, const mls_compute_step *step);

/* Copies the steps of a schedule without its drops; not yet tidy. `out` has room for
 * `count`. Returns their number. */
size_t mls_compute_steps_of(const mls_step *steps, size_t count, mls_compute_step *out);

/* Removes unused forwards from `steps` and places the drops, in place; lowers
 * `*count`. `scratch` has mls_compute_steps_scratch bytes. Returns false if a step needs
 * an activation that no step makes; the steps are then undefined. */
bool mls_compute_steps_tidy(const mls_chain *chain, mls_compute_step *steps,
                            size_t *count, unsigned char *scratch);

/* Appends compute steps and their drops to a schedule. MLS_E_MEMORY. */
mls_code mls_compute_steps_write(const mls_compute_step *steps, size_t count,
                                 mls_schedule *out, mls_status *st);

#endif
