/* python_api: the headers of Python and NumPy, configured for all binding files.
 *
 * NumPy's API is one static pointer. module.c defines and fills it: it defines
 * MLSPY_IMPORT_NUMPY before this include.
 */
#ifndef MLSPY_PYTHON_API_H
#define MLSPY_PYTHON_API_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifndef MLSPY_IMPORT_NUMPY
#    define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

/* A METH_FASTCALL function for a PyMethodDef entry. */
#define MLSPY_FASTCALL(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

#endif
