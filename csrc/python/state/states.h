/* states: equality of two state dicts, and cached descriptions of their names. */
#ifndef MLSPY_STATES_H
#define MLSPY_STATES_H

#include "common/python_api.h"

#include "common/module_state.h"

/* Returns 1 if two dicts have the same names, shapes, dtypes and elements in any order, 0
 * if not, and -1 with an exception set (py_state_compare.c). If `b` has keys or values
 * that a state refuses, the result is 0. */
int mlspy_states_equal(const mlspy_state *state, PyObject *a, PyObject *b);

/* Returns a new reference to make(dict), an object that describes the current names of a
 * dict. A state dict caches one such object until its names change, so all callers must
 * pass the same `make`; for other dicts it is always made anew (py_state_dict.c). NULL
 * with an exception set. */
PyObject *mlspy_describe_names(PyObject *dict, PyObject *(*make)(PyObject *dict));

#endif
