/* py_state: equality of state dicts. */
#ifndef MLSP_PY_STATE_H
#define MLSP_PY_STATE_H

#include "python_api.h"

#include "module_state.h"

/* Whether two dicts have the same names, shapes, dtypes and elements: 1 or 0, -1 with an
 * exception set. */
int mlsp_states_equal(const mlsp_state *state, PyObject *a, PyObject *b);

#endif
