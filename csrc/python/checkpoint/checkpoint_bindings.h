/* checkpoint_bindings: the functions and types for checkpoints, added by module.c. */
#ifndef MLSPY_CHECKPOINT_BINDINGS_H
#define MLSPY_CHECKPOINT_BINDINGS_H

#include "common/python_api.h"

/* Tables of functions, NULL-terminated. */
extern PyMethodDef mlspy_file_methods[];
extern PyMethodDef mlspy_layout_methods[];
extern PyMethodDef mlspy_shards_methods[];
extern PyMethodDef mlspy_staging_methods[];

/* Add the type of py_merged_index.c.  -1 with an exception set. */
int mlspy_catalog_add(PyObject *module);

/* Add the type and the function of py_tier_policy.c.  -1 with an exception set. */
int mlspy_tiers_add(PyObject *module);

#endif
