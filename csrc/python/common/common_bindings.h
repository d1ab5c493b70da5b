/* common_bindings: functions and types that belong to no subsystem, added by module.c. */
#ifndef MLSPY_COMMON_BINDINGS_H
#define MLSPY_COMMON_BINDINGS_H

#include "common/python_api.h"

/* Tables of functions, NULL-terminated. */
extern PyMethodDef mlspy_info_methods[];
extern PyMethodDef mlspy_dtype_methods[];

/* Add the type of py_descriptor.c.  -1 with an exception set. */
int mlspy_descriptor_add(PyObject *module);

#endif
