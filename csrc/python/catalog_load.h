/* catalog_load: what is wanted of a Catalog, shared by loading and by looking ahead. */
#ifndef MLSP_CATALOG_LOAD_H
#define MLSP_CATALOG_LOAD_H

#include "python_api.h"

#include "catalog_object.h"
#include "module_state.h"

#include "catalog.h"
#include "shard_read.h"
#include "stored.h"
#include "tensor.h"

/* A tensor, the part of it that is wanted, and where it goes. */
typedef struct wanted {
    const mls_catalog_tensor *tensor;
    PyObject *key;       /* strong: as it was asked for */
    PyObject *array;     /* strong: the result, or what owns the target's memory */
    unsigned char *data; /* of a target that is packed */
    mls_tensor *strided; /* of one that is not; owned */
    size_t first, count; /* of the job's pieces */
    bool long_zeros;     /* a new array pays that is zero to begin with */
    mls_part part;       /* last: most of it is room that is never touched */
} wanted;

typedef struct load_job {
    PyObject *object; /* the Catalog, borrowed */
    const catalog_object *catalog;
    const mlsp_state *state;
    PyObject *path;
    int folder;
    wanted *wanted;
    size_t count;
    mls_stored_shard *stored;
    mls_part *parts; /* that they are of */
    mls_piece *pieces;
    size_t piece_count;
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
