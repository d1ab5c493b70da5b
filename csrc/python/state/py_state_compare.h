/* py_state: equality of state dicts. */
#ifndef MLSPY_PY_STATE_H
#define MLSPY_PY_STATE_H

#include "common/python_api.h"

#include "common/module_state.h"

/* Whether two dicts have the same names, shapes, dtypes and elements: 1 or 0, -1 with an
 * exception set. */
int mlspy_states_equal(const mlspy_state *state, PyObject *a, PyObject *b);

#endif
