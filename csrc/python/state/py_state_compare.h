/* py_state_compare: equality of state dicts. */
#ifndef MLSPY_PY_STATE_COMPARE_H
#define MLSPY_PY_STATE_COMPARE_H

#include "common/python_api.h"

#include "common/module_state.h"

/* Returns 1 if two dicts have the same names, shapes, dtypes and elements, 0 if not, and
 * -1 with an exception set. */
int mlspy_states_equal(const mlspy_state *state, PyObject *a, PyObject *b);

#endif
