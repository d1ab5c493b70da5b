/* activation_bindings: functions and types for activation checkpointing, added by
 * module.c. */
#ifndef MLSPY_ACTIVATION_BINDINGS_H
#define MLSPY_ACTIVATION_BINDINGS_H

#include "common/python_api.h"

/* NULL-terminated method tables. */
extern PyMethodDef mlspy_activation_methods[];
extern PyMethodDef mlspy_chain_methods[];
extern PyMethodDef mlspy_plan_methods[];
extern PyMethodDef mlspy_search_methods[];

/* Adds the types of py_strategy.c. Returns -1 with an exception set. */
int mlspy_strategy_add(PyObject *module);

#endif
