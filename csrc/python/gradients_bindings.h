/* gradients_bindings: the functions and types for reductions of gradients, added by
 * module.c. */
#ifndef MLSP_GRADIENTS_BINDINGS_H
#define MLSP_GRADIENTS_BINDINGS_H

#include "python_api.h"

/* Tables of functions, NULL-terminated. */
extern PyMethodDef mlsp_bucket_methods[];
extern PyMethodDef mlsp_wire_methods[];
extern PyMethodDef mlsp_reduce_methods[];
extern PyMethodDef mlsp_local_methods[];

/* Add the type of py_local.c.  -1 with an exception set. */
int mlsp_local_add(PyObject *module);

#endif
