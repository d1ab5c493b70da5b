/* checkpoint_bindings: the functions and types for checkpoints, which module.c registers.
 */
#ifndef MLSPY_CHECKPOINT_BINDINGS_H
#define MLSPY_CHECKPOINT_BINDINGS_H

#include "common/python_api.h"

/* Tables of functions, NULL-terminated. */
extern PyMethodDef mlspy_file_methods[];
extern PyMethodDef mlspy_layout_methods[];
extern PyMethodDef mlspy_part_methods[];
extern PyMethodDef mlspy_shards_methods[];
extern PyMethodDef mlspy_staging_methods[];

/* Add the type of py_merged_index.c. Returns -1 with an exception set on failure. */
int mlspy_merged_index_add(PyObject *module);

/* Add the type and the function of py_tier_policy.c. Returns -1 with an exception set on
 * failure. */
int mlspy_tiers_add(PyObject *module);

#endif
