/* array_view: arrays of NumPy and other libraries as the core's tensors. */
#ifndef MLSPY_ARRAY_VIEW_H
#define MLSPY_ARRAY_VIEW_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "array/dtype.h"
#include "array/tensor.h"

#include <stdbool.h>

/* A view of an array and what keeps its memory alive.  Clear `owner`, fill the view,
 * release it. */
typedef struct mlspy_view {
    mls_tensor tensor;
    bool readonly;
    PyObject *owner; /* strong reference, or NULL */
} mlspy_view;

/* View an ndarray, or anything with __dlpack__ on the CPU (torch tensors, bf16 included)
 * or with __array_interface__ (NumPy's scalars too, which are copied and read-only).
 * `what` names the argument in errors.  Returns -1 with TypeError or a mlstate exception
 * set, and no owner. */
int mlspy_view_of(const mlspy_state *state, PyObject *array, const char *what,
                  mlspy_view *out);

/* As above, and refuse a read-only array with ValueError. */
int mlspy_view_writable(const mlspy_state *state, PyObject *array, const char *what,
                        mlspy_view *out);

/* The same for a plain ndarray or torch tensor.  False for everything else, without an
 * exception and with an undefined `*out`: use one of the functions above. */
bool mlspy_view_quickly(const mlspy_state *state, PyObject *array, bool writable,
                        mlspy_view *out);

void mlspy_view_release(mlspy_view *view); /* accepts a view without owner; leaves none */

/* The core's dtype of a NumPy descriptor; false if the core has none. */
bool mlspy_dtype_of_descr(PyArray_Descr *descr, mls_dtype *out);

/* Whether NumPy has the dtype without ml_dtypes. */
bool mlspy_dtype_in_numpy(mls_dtype dtype);

/* New reference to the NumPy descriptor of a dtype; ml_dtypes is imported for those that
 * NumPy lacks.  If it is not installed, a descriptor of unsigned integers of the same
 * size, whose metadata name the dtype.  NULL with an exception set. */
PyArray_Descr *mlspy_descr_of_dtype(mls_dtype dtype);

/* New reference to the descriptor that a user's dtype argument means: whatever NumPy
 * accepts, or the name of any dtype of the core.  NULL with an exception set: ImportError
 * naming the extra for one of ml_dtypes that is not installed. */
PyArray_Descr *mlspy_descr_of_object(const mlspy_state *state, PyObject *object,
                                     mls_dtype *out);

#endif
