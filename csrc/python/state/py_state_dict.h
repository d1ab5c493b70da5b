/* py_statedict: what a state dict remembers of its names. */
#ifndef MLSPY_PY_STATEDICT_H
#define MLSPY_PY_STATEDICT_H

#include "common/python_api.h"

/* New reference to make(dict), which describes the names that a dict has now.  A state
 * dict keeps the result until its names change; for any other dict it is made anew. */
PyObject *mlspy_describe_names(PyObject *dict, PyObject *(*make)(PyObject *dict));

#endif
