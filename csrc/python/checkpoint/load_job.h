/* catalog_load: what is wanted of a Catalog, shared by loading and by looking ahead. */
#ifndef MLSPY_CATALOG_LOAD_H
#define MLSPY_CATALOG_LOAD_H

#include "common/python_api.h"

#include "checkpoint/merged_index_object.h"
#include "common/module_state.h"

#include "checkpoint/ranks/load_plan.h"

/* What Python has of one part that is wanted. */
typedef struct mlspy_wanted {
    PyObject *key;   /* strong: as it was asked for */
    PyObject *array; /* strong: the result, or what owns the target's memory */
} mlspy_wanted;

typedef struct mlspy_load_job {
    PyObject *object; /* the Catalog, borrowed */
    const mlspy_catalog *catalog;
    const mlspy_state *state;
    PyObject *path; /* borrowed */
    int folder;     /* owned; -1: none */
    mls_load_plan plan;
    mlspy_wanted *wanted;     /* one for each part of the plan */
    mls_load_target *targets; /* likewise, of arrays that exist; NULL: new arrays */
} mlspy_load_job;

/* Choose tensors and parts; no file is looked at.  `path` is for errors.  `cuts` is
 * (layout or None, index, world) for all tensors, or a list with a place for each key.
 * -1 with an exception set; end with mlspy_load_fini either way. */
int mlspy_load_begin(mlspy_load_job *job, PyObject *object, PyObject *path,
                     PyObject *section, PyObject *keys, PyObject *cuts);

/* Needs the GIL: arrays may die here.  Accepts a job that was left half done at any
 * point. */
void mlspy_load_fini(mlspy_load_job *job);

#endif
