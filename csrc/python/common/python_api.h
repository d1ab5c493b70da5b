/* python_api: the headers of Python and NumPy, set up as every binding file needs them.
 *
 * NumPy's API is one static pointer, which module.c defines and fills: it defines
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

/* A METH_FASTCALL function as PyMethodDef holds it: one pointer type for all. */
#define MLSPY_FASTCALL(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

#endif
