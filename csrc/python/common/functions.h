/* functions: declares the functions and types of mlstate._core; functions.def lists the
 * functions. */
#ifndef MLSPY_FUNCTIONS_H
#define MLSPY_FUNCTIONS_H

#include "common/python_api.h"

#include "common/functions.def"
#include "common/module_state.h"

/* core_<name>: implements a function for the number of arguments in the table. Returns a
 * new reference, or NULL with an exception set. */
#define MLSPY_DECLARE(name, count, parameters)                                           \
    PyObject *core_##name(mlspy_state *state, PyObject *const *args);
MLSPY_FUNCTIONS(MLSPY_DECLARE)

/* Add the types of a file. */
int mlspy_descriptor_add(PyObject *module);
int mlspy_deferred_interrupts_add(PyObject *module);
int mlspy_kv_memory_add(PyObject *module);
int mlspy_local_add(PyObject *module);
int mlspy_merged_index_add(PyObject *module);
int mlspy_prompt_log_add(PyObject *module);
int mlspy_prompt_match_add(PyObject *module);
int mlspy_statedict_add(PyObject *module);
int mlspy_strategy_add(PyObject *module);

#endif
