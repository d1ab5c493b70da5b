/* py_overlap: the memory of arrays, and whether strided memory overlaps, also for arrays
 * that the core does not view: on devices, and of dtypes that it lacks. */
#include "arguments/args.h"
#include "common/errors.h"
#include "common/functions.h"

#include "array/overlap.h"

/* Read a tuple (address, item bytes, shape, strides in bytes) as a view of bytes. The
 * bytes of an item become a last axis, so that any item size fits. Returns -1 with
 * TypeError, ValueError or OverflowError set. */
static int take_memory(PyObject *object, mls_tensor *out)
{
    unsigned long long address;
    Py_ssize_t item_bytes;
    PyObject *shape, *strides;
    if (!PyTuple_Check(object) ||
        !PyArg_ParseTuple(object, "KnO!O!", &address, &item_bytes, &PyTuple_Type, &shape,
                          &PyTuple_Type, &strides)) {
        return PyErr_Occurred() ? -1 : MLSPY_REFUSE(PyExc_TypeError, "not a tuple");
    }
    const Py_ssize_t rank = PyTuple_GET_SIZE(shape);
    if (rank >= MLS_MAX_RANK || PyTuple_GET_SIZE(strides) != rank || item_bytes < 1) {
        return MLSPY_REFUSE(PyExc_ValueError, "a memory's axes do not fit");
    }
    *out = (mls_tensor){.data = (unsigned char *)(uintptr_t)address, .dtype = MLS_U8};
    out->rank = (int)rank + 1;
    out->shape[rank] = (size_t)item_bytes;
    out->strides[rank] = 1;
    for (Py_ssize_t axis = 0; axis < rank; axis++) {
        out->shape[axis] = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, axis));
        out->strides[axis] = PyLong_AsSsize_t(PyTuple_GET_ITEM(strides, axis));
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* memory_overlap(memory, other | None) -> bool: whether two views share a byte, or two
 * elements of the same view, if `other` is None; True also for strides too irregular to
 * decide (overlap.h). Each memory is (address, item bytes, shape, strides in bytes). */
PyObject *core_memory_overlap(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    mls_tensor memory, other;
    if (take_memory(args[0], &memory) < 0 ||
        (args[1] != Py_None && take_memory(args[1], &other) < 0)) {
        return NULL;
    }
    return PyBool_FromLong(args[1] == Py_None ? mls_tensor_overlaps_itself(&memory)
                                              : mls_tensor_overlap(&memory, &other));
}

/* array_memory(array) -> (address, item bytes, shape, strides in bytes) of an ndarray of
 * any dtype, as memory_overlap takes it. Items without bytes count as 1 byte. */
PyObject *core_array_memory(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    if (!PyArray_Check(args[0])) {
        return PyErr_Format(PyExc_TypeError, "not an ndarray");
    }
    PyArrayObject *array = (PyArrayObject *)args[0];
    const int rank = PyArray_NDIM(array);
    const Py_ssize_t item_bytes = (Py_ssize_t)PyArray_ITEMSIZE(array);
    PyObject *shape = PyArray_IntTupleFromIntp(rank, PyArray_DIMS(array));
    PyObject *strides = PyArray_IntTupleFromIntp(rank, PyArray_STRIDES(array));
    if (shape == NULL || strides == NULL) {
        Py_XDECREF(shape);
        Py_XDECREF(strides);
        return NULL;
    }
    return Py_BuildValue("(KnNN)", (unsigned long long)(uintptr_t)PyArray_DATA(array),
                         item_bytes > 0 ? item_bytes : 1, shape, strides);
}
