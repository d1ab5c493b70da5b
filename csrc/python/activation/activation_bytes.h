/* activation_bytes: the bytes of an activation, for the strategies (py_strategy.c). */
#ifndef MLSPY_ACTIVATION_BYTES_H
#define MLSPY_ACTIVATION_BYTES_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "base/size.h"

/* Computes the bytes of the elements of `activation` from its shape and dtype: of an
 * ndarray, a torch tensor (also on a device or the meta device), or any object with both
 * attributes. Elements are not read. Returns 0, or -1 with an exception set: TypeError
 * without a shape or dtype, ValueError for a shape that is none, CapacityError for more
 * bytes than memory can have. */
int mlspy_activation_bytes(mlspy_state *state, PyObject *activation, size_t *out);

/* As mlspy_activation_bytes for an ndarray, which needs no module state. Returns false on
 * overflow, without an exception; `*out` is then unchanged. */
static inline bool mlspy_ndarray_bytes(PyArrayObject *array, size_t *out)
{
    size_t bytes = (size_t)PyDataType_ELSIZE(PyArray_DESCR(array));
    const npy_intp *shape = PyArray_DIMS(array);
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        if (!mls_size_mul(bytes, (size_t)shape[axis], &bytes)) {
            return false;
        }
    }
    *out = bytes;
    return true;
}

#endif
