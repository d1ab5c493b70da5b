/* chainp: chains and schedules as Python holds them, for every planner. */
#ifndef MLSPY_CHAINP_H
#define MLSPY_CHAINP_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "activation/chain.h"

/* A checked chain, copied out of Python's arrays: what others write there meanwhile does
 * not matter to who works without the GIL. */
typedef struct mlspy_chain {
    mls_chain chain;
    void *memory; /* owned: all arrays of the chain */
} mlspy_chain;

/* From the tuple that a Chain keeps: two arrays of float64, six of int64, two floats.
 * Gives: release it.  -1 with TypeError, ValueError or CapacityError set, and `*out`
 * zeroed. */
int mlspy_take_chain(const mlspy_state *state, PyObject *tuple, mlspy_chain *out);
void mlspy_chain_release(mlspy_chain *chain); /* accepts a zeroed one; zeroes it */

/* The steps in a packed array of int32, (count, 2), which keeps them.  NULL with
 * TypeError set. */
const mls_step *mlspy_take_steps(PyObject *object, npy_intp *count);

/* New ndarray of int32, (count, 2), with the steps. */
PyObject *mlspy_steps_array(const mls_schedule *schedule);

#endif
