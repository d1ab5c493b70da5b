/* py_state_dict: the cached description of a state dict's names. */
#ifndef MLSPY_PY_STATE_DICT_H
#define MLSPY_PY_STATE_DICT_H

#include "common/python_api.h"

/* Returns a new reference to make(dict), which describes the current names of a dict. A
 * state dict caches the result until its names change; for other dicts it is always made
 * anew. */
PyObject *mlspy_describe_names(PyObject *dict, PyObject *(*make)(PyObject *dict));

#endif
