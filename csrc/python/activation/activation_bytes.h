/* activation_bytes: the size of an activation, by its shape and dtype. */
#ifndef MLSPY_ACTIVATION_BYTES_H
#define MLSPY_ACTIVATION_BYTES_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "base/size.h"

/* Computes the bytes of an activation's elements from its shape and dtype, in any memory:
 * an ndarray, a torch tensor (also on the meta device), or any object with both
 * attributes. Returns -1 with TypeError, ValueError or CapacityError set. */
int mlspy_activation_bytes(mlspy_state *state, PyObject *activation, size_t *out);

/* As mlspy_activation_bytes for an ndarray, without module state; returns false on
 * overflow. */
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
