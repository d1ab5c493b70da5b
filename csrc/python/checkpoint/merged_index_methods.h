/* merged_index_methods: methods of a MergedIndex that are implemented in other files. */
#ifndef MLSPY_MERGED_INDEX_METHODS_H
#define MLSPY_MERGED_INDEX_METHODS_H

#include "common/python_api.h"

/* ---- py_shard_load.c ---- */

PyObject *mlspy_merged_index_load(PyObject *object, PyObject *const *args,
                                  Py_ssize_t count);
PyObject *mlspy_merged_index_load_into(PyObject *object, PyObject *const *args,
                                       Py_ssize_t count);
PyObject *mlspy_merged_index_fits(PyObject *object, PyObject *const *args,
                                  Py_ssize_t count);

/* ---- py_shard_owners.c ---- */

PyObject *mlspy_merged_index_patterns(PyObject *object, PyObject *unused);
PyObject *mlspy_merged_index_places(PyObject *object, PyObject *unused);
PyObject *mlspy_merged_index_wanted_parts(PyObject *object, PyObject *const *args,
                                          Py_ssize_t count);
PyObject *mlspy_merged_index_reads(PyObject *object, PyObject *const *args,
                                   Py_ssize_t count);

#endif
