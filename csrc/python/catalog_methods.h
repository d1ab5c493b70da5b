/* catalog_methods: the methods of a Catalog that have files of their own. */
#ifndef MLSP_CATALOG_METHODS_H
#define MLSP_CATALOG_METHODS_H

#include "python_api.h"

/* ---- py_catalog_load.c ---- */

PyObject *mlsp_catalog_load(PyObject *object, PyObject *const *args, Py_ssize_t count);
PyObject *mlsp_catalog_load_into(PyObject *object, PyObject *const *args,
                                 Py_ssize_t count);
PyObject *mlsp_catalog_fits(PyObject *object, PyObject *const *args, Py_ssize_t count);

/* ---- py_owners.c ---- */

PyObject *mlsp_catalog_patterns(PyObject *object, PyObject *unused);
PyObject *mlsp_catalog_places(PyObject *object, PyObject *unused);
PyObject *mlsp_catalog_wanted_parts(PyObject *object, PyObject *const *args,
                                    Py_ssize_t count);
PyObject *mlsp_catalog_reads(PyObject *object, PyObject *const *args, Py_ssize_t count);

#endif
