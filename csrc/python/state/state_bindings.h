/* state_bindings: functions and types for state dicts, added by module.c. */
#ifndef MLSPY_STATE_BINDINGS_H
#define MLSPY_STATE_BINDINGS_H

#include "common/python_api.h"

/* NULL-terminated method tables. */
extern PyMethodDef mlspy_names_methods[];
extern PyMethodDef mlspy_state_methods[];
extern PyMethodDef mlspy_load_methods[];

/* Adds the type of py_state_dict.c. Returns -1 with an exception set. */
int mlspy_statedict_add(PyObject *module);

#endif
