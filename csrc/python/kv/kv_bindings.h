/* kv_bindings: functions and types for key-value caches and model packages, added by
 * module.c. */
#ifndef MLSPY_KV_BINDINGS_H
#define MLSPY_KV_BINDINGS_H

#include "common/python_api.h"

#include "common/module_state.h"

/* Read the dimensions of a cache from a sequence of non-negative integers, and its
 * sequence axis, converted to 0 .. rank-1. `what` names the sequence in messages. `shape`
 * has MLS_KV_MAX_RANK entries. Returns -1 with TypeError, CapacityError or
 * CompatibilityError set. */
int mlspy_take_kv_shape(const mlspy_state *state, PyObject *object, PyObject *seq_axis,
                        const char *what, int *rank, size_t *shape, int *axis);

/* Read the sequence axis of a cache whose dimensions are known. Otherwise as above. */
int mlspy_take_kv_axis(const mlspy_state *state, PyObject *seq_axis, const char *what,
                       int rank, const size_t *shape, int *axis);

/* Read a number of positions, named `what`, that is not negative. Returns -1 with
 * TypeError or CapacityError set. */
int mlspy_take_kv_length(const mlspy_state *state, PyObject *object, const char *what,
                         size_t *out);

/* Method tables, NULL-terminated. */
extern PyMethodDef mlspy_kv_methods[];
extern PyMethodDef mlspy_kv_cache_methods[];
extern PyMethodDef mlspy_mlpackage_methods[];

/* Add the types of py_kv_buffer.c, and the type and the functions of py_kv_rolling.c.
 * Return -1 with an exception set on failure. */
int mlspy_kv_buffer_add(PyObject *module);
int mlspy_kv_rolling_add(PyObject *module);

#endif
