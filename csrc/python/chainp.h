/* chainp: chains and schedules as Python holds them, for every planner. */
#ifndef MLSP_CHAINP_H
#define MLSP_CHAINP_H

#include "python_api.h"

#include "module_state.h"

#include "chain.h"

/* A checked chain, copied out of Python's arrays: what others write there meanwhile does
 * not matter to who works without the GIL. */
typedef struct mlsp_chain {
    mls_chain chain;
    void *memory; /* owned: all arrays of the chain */
} mlsp_chain;

/* From the tuple that a Chain keeps: two arrays of float64, six of int64, two floats.
 * Gives: release it.  -1 with TypeError, ValueError or CapacityError set, and `*out`
 * zeroed. */
int mlsp_take_chain(const mlsp_state *state, PyObject *tuple, mlsp_chain *out);
void mlsp_chain_release(mlsp_chain *chain); /* accepts a zeroed one; zeroes it */

/* The steps in a packed array of int32, (count, 2), which keeps them.  NULL with
 * TypeError set. */
const mls_step *mlsp_take_steps(PyObject *object, npy_intp *count);

/* New ndarray of int32, (count, 2), with the steps. */
PyObject *mlsp_steps_array(const mls_schedule *schedule);

#endif
