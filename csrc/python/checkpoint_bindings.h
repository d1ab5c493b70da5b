/* checkpoint_bindings: the functions and types for checkpoints, added by module.c. */
#ifndef MLSP_CHECKPOINT_BINDINGS_H
#define MLSP_CHECKPOINT_BINDINGS_H

#include "python_api.h"

/* Tables of functions, NULL-terminated. */
extern PyMethodDef mlsp_file_methods[];
extern PyMethodDef mlsp_layout_methods[];
extern PyMethodDef mlsp_shards_methods[];
extern PyMethodDef mlsp_staging_methods[];

/* Add the type of py_catalog.c.  -1 with an exception set. */
int mlsp_catalog_add(PyObject *module);

/* Add the type and the function of py_tiers.c.  -1 with an exception set. */
int mlsp_tiers_add(PyObject *module);

#endif
