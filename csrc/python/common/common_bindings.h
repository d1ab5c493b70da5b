/* common_bindings: functions and types without a subsystem, added by module.c. */
#ifndef MLSPY_COMMON_BINDINGS_H
#define MLSPY_COMMON_BINDINGS_H

#include "common/python_api.h"

/* Method tables, NULL-terminated. */
extern PyMethodDef mlspy_info_methods[];
extern PyMethodDef mlspy_dtype_methods[];

/* Add the type of py_descriptor.c. Returns -1 with an exception set on failure. */
int mlspy_descriptor_add(PyObject *module);

#endif
