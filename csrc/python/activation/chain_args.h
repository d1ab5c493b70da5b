/* chain_args: parses chains and schedules, for every planner. */
#ifndef MLSPY_CHAIN_ARGS_H
#define MLSPY_CHAIN_ARGS_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "activation/chain.h"

/* A checked chain, copied from Python's arrays, so that later writes to these do not
 * affect code without the GIL. */
typedef struct mlspy_chain {
    mls_chain chain;
    void *memory; /* owned: all arrays of the chain */
} mlspy_chain;

/* Parses the tuple that a Chain keeps: two float64 arrays, six int64 arrays, two floats.
 * Release with mlspy_chain_release. Returns -1 with TypeError, ValueError or
 * CapacityError set, and `*out` zeroed. */
int mlspy_take_chain(const mlspy_state *state, PyObject *tuple, mlspy_chain *out);
void mlspy_chain_release(mlspy_chain *chain); /* accepts a zeroed one; zeroes it */

/* Returns the steps in a packed int32 array of shape (count, 2), which owns them; NULL
 * with TypeError set. */
const mls_step *mlspy_take_steps(PyObject *object, npy_intp *count);

/* Returns a new int32 ndarray of shape (count, 2) with the steps. */
PyObject *mlspy_steps_array(const mls_schedule *schedule);

#endif
