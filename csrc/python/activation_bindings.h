/* activation_bindings: the functions and types for activation checkpointing, added by
 * module.c. */
#ifndef MLSP_ACTIVATION_BINDINGS_H
#define MLSP_ACTIVATION_BINDINGS_H

#include "python_api.h"

/* Tables of functions, NULL-terminated. */
extern PyMethodDef mlsp_activation_methods[];
extern PyMethodDef mlsp_chain_methods[];
extern PyMethodDef mlsp_plan_methods[];
extern PyMethodDef mlsp_search_methods[];

/* Add the types of py_strategy.c.  -1 with an exception set. */
int mlsp_strategy_add(PyObject *module);

#endif
