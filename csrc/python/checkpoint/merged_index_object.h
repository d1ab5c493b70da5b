/* merged_index_object: the MergedIndex type, and functions that its methods share. */
#ifndef MLSPY_MERGED_INDEX_OBJECT_H
#define MLSPY_MERGED_INDEX_OBJECT_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "checkpoint/index/index.h"
#include "checkpoint/ranks/index_pattern.h"
#include "checkpoint/ranks/merged_index.h"

/* A MergedIndex: the indexes of a checkpoint's ranks, and all of their tensors in one
 * list. Immutable after construction and keep_whole. */
typedef struct mlspy_merged_index {
    PyObject_HEAD mls_index *indexes;
    size_t index_count;
    mls_merged_index merged;
} mlspy_merged_index;

/* Return a new str with the name of a tensor in state dicts: the parameter's name and,
 * for an optimizer state, the name of the state. NULL with an exception set. */
PyObject *mlspy_merged_index_key(const mls_tensor_id *id);

/* Convert an int to a section. Returns -1 with an exception set: ValueError for an
 * unknown number. */
int mlspy_take_section(const mlspy_state *state, PyObject *object, mls_section *out);

/* Find the index of a rank in a MergedIndex: `*out` is borrowed, NULL if there is none.
 * Returns 0, or -1 with TypeError set if `merged` is not a MergedIndex. */
int mlspy_merged_index_of_rank(const mlspy_state *state, PyObject *merged, int64_t rank,
                               const mls_index **out);

/* Return a new array with the pattern of each index, which the caller releases with
 * mls_index_patterns_free; NULL with an exception set. */
mls_index_pattern *mlspy_index_patterns(const mlspy_merged_index *self,
                                        const mlspy_state *state);

/* Return which indexes list a tensor, as a new bytes object: the memory of an array of
 * mls_index_pattern_place, one for each shard. Python unpacks it, and select_parts uses
 * it as a key. NULL with an exception set. */
PyObject *mlspy_tensor_places(const mlspy_merged_index *self,
                              const mls_index_pattern *patterns,
                              const mls_merged_index_tensor *tensor);

/* Methods, implemented in py_shard_load.c. */
PyObject *mlspy_merged_index_load(mlspy_merged_index *self, PyObject *const *args,
                                  Py_ssize_t count);
PyObject *mlspy_merged_index_load_into(mlspy_merged_index *self, PyObject *const *args,
                                       Py_ssize_t count);
PyObject *mlspy_merged_index_fits(mlspy_merged_index *self, PyObject *const *args,
                                  Py_ssize_t count);
PyObject *mlspy_merged_index_select_parts(mlspy_merged_index *self, PyObject *const *args,
                                          Py_ssize_t count);
PyObject *mlspy_merged_index_reads(mlspy_merged_index *self, PyObject *const *args,
                                   Py_ssize_t count);

/* Methods, implemented in py_index_patterns.c. */
PyObject *mlspy_merged_index_patterns(mlspy_merged_index *self, PyObject *unused);
PyObject *mlspy_merged_index_places(mlspy_merged_index *self, PyObject *unused);

#endif
