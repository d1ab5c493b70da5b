/* load_job: the parts to load from a MergedIndex. Loading and dry runs share it. */
#ifndef MLSPY_LOAD_JOB_H
#define MLSPY_LOAD_JOB_H

#include "common/python_api.h"

#include "checkpoint/merged_index_object.h"
#include "common/module_state.h"

#include "checkpoint/ranks/load_plan.h"

/* Python objects of one part to load. */
typedef struct mlspy_wanted {
    PyObject *key;   /* strong: the requested key */
    PyObject *array; /* strong: the result, or the owner of the target's memory */
} mlspy_wanted;

typedef struct mlspy_load_job {
    PyObject *object; /* the MergedIndex, borrowed */
    const mlspy_merged_index *merged;
    const mlspy_state *state;
    PyObject *path; /* borrowed */
    int folder;     /* owned; -1: none */
    mls_load_plan plan;
    mlspy_wanted *wanted;     /* one for each part of the plan */
    mls_load_target *targets; /* one for each part, when loading into existing arrays;
                                 NULL: new arrays */
} mlspy_load_job;

/* Choose tensors and parts, without accessing files. `path` is used in errors. `cuts` is
 * (layout or None, index, world) for all tensors, or a list with a place for each key.
 * Returns -1 with an exception set on failure. Call mlspy_load_fini in both cases. */
int mlspy_load_begin(mlspy_load_job *job, PyObject *object, PyObject *path,
                     PyObject *section, PyObject *keys, PyObject *cuts);

/* Needs the GIL, since it releases arrays. Accepts a partly initialized job. */
void mlspy_load_fini(mlspy_load_job *job);

#endif
