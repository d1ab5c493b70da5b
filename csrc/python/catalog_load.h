/* catalog_load: what is wanted of a Catalog, shared by loading and by looking ahead. */
#ifndef MLSP_CATALOG_LOAD_H
#define MLSP_CATALOG_LOAD_H

#include "python_api.h"

#include "catalog_object.h"
#include "module_state.h"

#include "load_plan.h"

/* What Python has of one part that is wanted. */
typedef struct mlsp_wanted {
    PyObject *key;   /* strong: as it was asked for */
    PyObject *array; /* strong: the result, or what owns the target's memory */
} mlsp_wanted;

typedef struct load_job {
    PyObject *object; /* the Catalog, borrowed */
    const catalog_object *catalog;
    const mlsp_state *state;
    PyObject *path; /* borrowed */
    int folder;     /* owned; -1: none */
    mls_load_plan plan;
    mlsp_wanted *wanted;      /* one for each part of the plan */
    mls_load_target *targets; /* likewise, of arrays that exist; NULL: new arrays */
} load_job;

/* Choose tensors and parts; no file is looked at.  `path` is for errors.  `cuts` is
 * (layout or None, index, world) for all tensors, or a list with a place for each key.
 * -1 with an exception set; end with mlsp_load_fini either way. */
int mlsp_load_begin(load_job *job, PyObject *object, PyObject *path, PyObject *section,
                    PyObject *keys, PyObject *cuts);

/* Needs the GIL: arrays may die here.  Accepts a job that was left half done at any
 * point. */
void mlsp_load_fini(load_job *job);

#endif
