/* catalog_object: a Catalog as Python holds it, and what its methods share. */
#ifndef MLSPY_CATALOG_OBJECT_H
#define MLSPY_CATALOG_OBJECT_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "checkpoint/ranks/merged_index.h"
#include "checkpoint/index/index.h"

/* A Catalog: immutable once it exists. */
typedef struct mlspy_catalog {
    PyObject_HEAD mls_index *indexes;
    size_t index_count;
    mls_catalog catalog;
} mlspy_catalog;

/* The module's state, from a Catalog. */
const mlspy_state *mlspy_catalog_state(PyObject *self);

/* New reference to the key under which a state dict has a tensor. */
PyObject *mlspy_catalog_key(const mls_tensor_id *id);

/* A section's number as an argument.  -1 with an exception set. */
int mlspy_take_section(const mlspy_state *state, PyObject *object, mls_section *out);

/* The index of a rank in a Catalog, NULL if it has none; borrowed.  -1 with TypeError
 * set. */
int mlspy_catalog_index(const mlspy_state *state, PyObject *catalog, int64_t rank,
                        const mls_index **out);

#endif
