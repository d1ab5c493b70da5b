/* catalog_object: a Catalog as Python holds it, and what its methods share. */
#ifndef MLSP_CATALOG_OBJECT_H
#define MLSP_CATALOG_OBJECT_H

#include "python_api.h"

#include "module_state.h"

#include "catalog.h"
#include "index.h"

/* A Catalog: immutable once it exists. */
typedef struct catalog_object {
    PyObject_HEAD mls_index *indexes;
    size_t index_count;
    mls_catalog catalog;
} catalog_object;

/* The module's state, from a Catalog. */
const mlsp_state *mlsp_catalog_state(PyObject *self);

/* New reference to the key under which a state dict has a tensor. */
PyObject *mlsp_catalog_key(const mls_tensor_id *id);

/* A section's number as an argument.  -1 with an exception set. */
int mlsp_take_section(const mlsp_state *state, PyObject *object, mls_section *out);

/* The index of a rank in a Catalog, NULL if it has none; borrowed.  -1 with TypeError
 * set. */
int mlsp_catalog_index(const mlsp_state *state, PyObject *catalog, int64_t rank,
                       const mls_index **out);

#endif
