/* state_bindings: the functions and types for state dicts, added by module.c. */
#ifndef MLSP_STATE_BINDINGS_H
#define MLSP_STATE_BINDINGS_H

#include "python_api.h"

/* Tables of functions, NULL-terminated. */
extern PyMethodDef mlsp_names_methods[];
extern PyMethodDef mlsp_state_methods[];
extern PyMethodDef mlsp_load_methods[];

/* Add the type of py_statedict.c.  -1 with an exception set. */
int mlsp_statedict_add(PyObject *module);

#endif
