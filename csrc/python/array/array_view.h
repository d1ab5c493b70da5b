/* array_view: views of arrays of NumPy and other libraries, and conversions of dtypes. */
#ifndef MLSPY_ARRAY_VIEW_H
#define MLSPY_ARRAY_VIEW_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "array/dtype.h"
#include "array/tensor.h"

#include <stdbool.h>

/* A view of an array, with the owner of its memory. Set `owner` to NULL, fill the view,
 * release it. */
typedef struct mlspy_view {
    mls_tensor tensor;
    bool readonly;
    PyObject *owner; /* strong reference, or NULL */
} mlspy_view;

/* Return whether an object is a part of a tensor (a Shard), whose attributes are `array`,
 * its elements, and `_mlstate_part`, a text for its place in the tensor or None. */
bool mlspy_is_part(const mlspy_state *state, PyObject *object);

/* Return whether an ndarray has a mask, which a view of its elements lacks. */
bool mlspy_is_masked(const mlspy_state *state, PyObject *array);

int mlspy_refuse_masked(const char *label); /* Set TypeError, and return -1. */

/* Return 1 if `value` has the attribute, else 0, or -1 with an exception set that is not
 * an Exception, such as KeyboardInterrupt: the attribute may be a property in Python. */
int mlspy_has_attribute(PyObject *value, const char *name);

/* View an ndarray, or an object on the CPU with __dlpack__ (torch tensors, also bf16) or
 * __array_interface__ (NumPy's scalars too, which are copied and read-only). `label`
 * names the argument in errors. Returns -1 with TypeError or an mlstate exception set,
 * and no owner. */
int mlspy_view_of(const mlspy_state *state, PyObject *array, const char *label,
                  mlspy_view *out);

/* As mlspy_view_of, but an array that is read-only, or whose elements share memory with
 * one another (mls_tensor_overlaps_itself), raises ValueError. */
int mlspy_view_writable(const mlspy_state *state, PyObject *array, const char *label,
                        mlspy_view *out);

/* View a plain ndarray or torch tensor; the view is the same as by the functions above.
 * For any other object, and if `writable` for one that must not be written to, returns
 * false without an exception and with an undefined `*out`: use one of the other
 * functions. */
bool mlspy_view_quickly(const mlspy_state *state, PyObject *array, bool writable,
                        mlspy_view *out);

/* View an array: quickly if that is possible, else by mlspy_view_writable if `writable`,
 * or by mlspy_view_of. Returns -1 with an exception set, and no owner. */
int mlspy_view_for(const mlspy_state *state, PyObject *array, const char *label,
                   bool writable, mlspy_view *out);

/* Return the object (borrowed) as an ndarray if it is one with NumPy's type number
 * `type`, `rank` dimensions and C order, aligned and in native byte order; else NULL
 * without an exception. */
PyArrayObject *mlspy_packed_array(PyObject *object, int type, int rank);

void mlspy_view_release(mlspy_view *view); /* accepts a view without owner; clears it */

/* Release `count` views. `views` may be NULL if `count` is 0. */
void mlspy_views_release(mlspy_view *views, size_t count);

/* Return the bytes of a tensor's elements. They fit, because the array is in memory. */
size_t mlspy_bytes(const mls_tensor *tensor);

/* Get the core's dtype of a NumPy descriptor, of any byte order. Returns false
 * without an exception if the core has none; `*out` is then unchanged. */
bool mlspy_dtype_of_descr(PyArray_Descr *descr, mls_dtype *out);

/* Return whether NumPy itself, without ml_dtypes, has the dtype. */
bool mlspy_dtype_in_numpy(mls_dtype dtype);

/* Return a new reference to the NumPy descriptor of a dtype. For dtypes that NumPy
 * lacks, ml_dtypes is imported; if it is not installed, the descriptor is an unsigned
 * integer of the same size, whose metadata names the dtype. */
PyArray_Descr *mlspy_descr_of_dtype(mls_dtype dtype);

/* Get the dtype of the core whose name `object` is. Returns 1, 0 for any other object, or
 * -1 with an exception set. */
int mlspy_dtype_named(PyObject *object, mls_dtype *out);

/* Return a new reference to the descriptor for a user's dtype argument: anything that
 * NumPy accepts, or the name of any dtype of the core. Returns NULL with an exception
 * set: ImportError, naming the extra, if ml_dtypes is needed and not installed. */
PyArray_Descr *mlspy_descr_of_object(const mlspy_state *state, PyObject *object,
                                     mls_dtype *out);

#endif
