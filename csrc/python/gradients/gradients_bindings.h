/* gradients_bindings: functions and types for gradient reductions, added by module.c. */
#ifndef MLSPY_GRADIENTS_BINDINGS_H
#define MLSPY_GRADIENTS_BINDINGS_H

#include "common/python_api.h"

/* NULL-terminated method tables. */
extern PyMethodDef mlspy_bucket_methods[];
extern PyMethodDef mlspy_wire_methods[];
extern PyMethodDef mlspy_reduce_methods[];
extern PyMethodDef mlspy_local_methods[];

/* Adds the type of py_shm_group.c. Returns -1 with an exception set. */
int mlspy_local_add(PyObject *module);

#endif
