/* gradients_bindings: the functions and types for reductions of gradients, added by
 * module.c. */
#ifndef MLSPY_GRADIENTS_BINDINGS_H
#define MLSPY_GRADIENTS_BINDINGS_H

#include "common/python_api.h"

/* Tables of functions, NULL-terminated. */
extern PyMethodDef mlspy_bucket_methods[];
extern PyMethodDef mlspy_wire_methods[];
extern PyMethodDef mlspy_reduce_methods[];
extern PyMethodDef mlspy_local_methods[];

/* Add the type of py_shm_group.c.  -1 with an exception set. */
int mlspy_local_add(PyObject *module);

#endif
