/* py_activation_memory: bytes of an activation (array, torch or meta tensor,
 * description); memory that this process uses.
 *
 * Only the shape and dtype of an activation are read: it may be on a device, on torch's
 * meta device, or a description without elements. For torch's own tensor classes its
 * `nbytes` is read instead.
 */
#include "activation/activation_bytes.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "runtime/process_memory.h"

/* Turns the AttributeError of an `activation` without a shape or dtype into TypeError;
 * keeps any other exception. Returns -1. */
static int refuse_activation(PyObject *activation)
{
    if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Format(PyExc_TypeError,
                     "activation must be a NumPy array, a torch tensor or anything with "
                     "a shape and a dtype, got %.100s",
                     Py_TYPE(activation)->tp_name);
    }
    return -1;
}

/* Multiplies `*bytes`, the bytes of an element, by each size of a tuple. Returns 0, 1 on
 * overflow without an exception, or -1 with an exception set: ValueError if a size is
 * negative or not an int, or the exception of its __index__. `*bytes` is undefined after
 * a result other than 0. */
static int multiply_sizes(PyObject *sizes, size_t *bytes)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sizes); i++) {
        PyObject *number = PyNumber_Index(PyTuple_GET_ITEM(sizes, i));
        const Py_ssize_t size = number == NULL ? -1 : PyLong_AsSsize_t(number);
        Py_XDECREF(number);
        /* a size may be negative, not a number, or an int of many digits */
        if (size < 0) {
            if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError)) {
                PyErr_Format(PyExc_ValueError, "activation has the shape %.200R", sizes);
            }
            if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
                PyErr_Clear();
                return 1;
            }
            return -1;
        }
        if (!mls_size_mul(*bytes, (size_t)size, bytes)) {
            return 1;
        }
    }
    return 0;
}

/* Sets `*out` to the bytes of one element of `dtype`: a NumPy dtype, the name of a dtype
 * of the core, an object with an int `itemsize` (torch's), or any other that NumPy
 * converts to a dtype. Returns -1 with TypeError set. */
static int item_bytes(const mlspy_state *state, PyObject *dtype, size_t *out)
{
    /* first NumPy dtypes, then names, then objects with an item size */
    if (PyArray_DescrCheck(dtype)) {
        *out = (size_t)PyDataType_ELSIZE((PyArray_Descr *)dtype);
        return 0;
    }
    mls_dtype dtype_id;
    if (mlspy_dtype_named(dtype, &dtype_id) > 0) {
        *out = mls_dtype_of(dtype_id)->item_bytes;
        return 0;
    }
    PyErr_Clear(); /* a str without a UTF-8 form is not a dtype either */
    /* torch dtypes have this attribute as an int; for NumPy's scalar types it is not an
     * int */
    PyObject *itemsize = PyObject_GetAttr(dtype, state->names[MLSPY_NAME_ITEMSIZE]);
    const Py_ssize_t bytes =
        itemsize != NULL && PyLong_Check(itemsize) ? PyLong_AsSsize_t(itemsize) : -1;
    Py_XDECREF(itemsize);
    PyErr_Clear();
    if (bytes >= 0) {
        *out = (size_t)bytes;
        return 0;
    }
    PyArray_Descr *descr = NULL;
    if (dtype == Py_None || PyArray_DescrConverter(dtype, &descr) != NPY_SUCCEED) {
        return MLSPY_REFUSE(PyExc_TypeError,
                            "activation has a dtype without a size: %.200R", dtype);
    }
    *out = (size_t)PyDataType_ELSIZE(descr);
    Py_DECREF(descr);
    return 0;
}

/* Computes the bytes of an activation of this shape (any sequence of ints) and dtype.
 * Returns 0, 1 without an exception if they exceed PTRDIFF_MAX, or -1 with an exception
 * set; then `*out` is unchanged. */
static int bytes_of(const mlspy_state *state, PyObject *shape, PyObject *dtype,
                    size_t *out)
{
    size_t bytes;
    /* torch.Size is a tuple, so it needs no copy */
    PyObject *sizes = PyTuple_Check(shape) ? Py_NewRef(shape) : PySequence_Tuple(shape);
    if (sizes == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "activation has the shape %.200R", shape);
        }
        return -1;
    }
    int failed = item_bytes(state, dtype, &bytes);
    if (failed == 0) {
        failed = multiply_sizes(sizes, &bytes);
    }
    Py_DECREF(sizes);
    if (failed == 0 && bytes > PTRDIFF_MAX) {
        failed = 1;
    }
    if (failed == 0) {
        *out = bytes;
    }
    return failed;
}

/* ---- torch tensors ---- */

/* Returns the attribute `nbytes` of a tensor whose class is in the cache
 * (keep_tensor_class), as a new reference. Returns NULL without an exception for any
 * other object, and with one if the attribute raises.
 *
 * It is the cheapest attribute of a tensor: shape and dtype cost three times as much, and
 * the DLPack exchange function raises for tensors on the meta device, which takes a
 * millisecond. Half of the cost of PyObject_GetAttr is finding the descriptor, so the C
 * function behind it is cached for the exact classes Tensor and Parameter.
 */
static PyObject *tensor_nbytes(const mlspy_state *state, PyObject *tensor)
{
    for (int i = 0; i < MLSPY_TENSOR_CLASSES; i++) {
        const mlspy_bytes_getter *getter = &state->bytes_getters[i];
        if (atomic_load_explicit(&getter->type, memory_order_acquire) ==
            Py_TYPE(tensor)) {
            return getter->get(tensor, getter->closure);
        }
    }
    return NULL;
}

/* Stores the C function of `definition` for the class `type` in the first free entry of
 * the cache. Does nothing if the cache has the class already or is full. The caller
 * holds the module's lock. */
static void keep_getter(mlspy_state *state, PyTypeObject *type,
                        const PyGetSetDef *definition)
{
    for (int i = 0; i < MLSPY_TENSOR_CLASSES; i++) {
        mlspy_bytes_getter *slot = &state->bytes_getters[i];
        PyTypeObject *slot_type = atomic_load_explicit(&slot->type, memory_order_relaxed);
        if (slot_type == type) {
            return;
        }
        if (slot_type == NULL) {
            slot->get = definition->get;
            slot->closure = definition->closure;
            Py_INCREF(type);
            atomic_store_explicit(&slot->type, type, memory_order_release);
            return;
        }
    }
}

/* Adds a class to the cache of tensor_nbytes, if reading `nbytes` only calls a C
 * function: the class has no __getattribute__, and the attribute is a C property of one
 * of its bases. Never fails, and leaves no exception. */
static void keep_tensor_class(mlspy_state *state, PyTypeObject *type)
{
    PyObject *descriptor =
        PyObject_GetAttr((PyObject *)type, state->names[MLSPY_NAME_NBYTES]);
    if (descriptor != NULL && type->tp_getattro == PyObject_GenericGetAttr &&
        Py_IS_TYPE(descriptor, &PyGetSetDescr_Type) &&
        PyType_IsSubtype(type, PyDescr_TYPE(descriptor))) {
        const PyGetSetDef *property = ((PyGetSetDescrObject *)descriptor)->d_getset;
        MLSPY_BEGIN_LOCKED(state->module)
            keep_getter(state, type, property);
        MLSPY_END_LOCKED()
    }
    PyErr_Clear();
    Py_XDECREF(descriptor);
}

/* Sets `*out` to the bytes of an activation from its attribute `nbytes`, if its class is
 * named like torch's own, Tensor or Parameter. Returns false, without an exception, if
 * shape and dtype must be read instead: subclasses may define `nbytes` differently, and
 * sparse tensors raise. */
static bool tensor_bytes(mlspy_state *state, PyObject *activation, size_t *out)
{
    PyObject *nbytes = tensor_nbytes(state, activation);
    if (nbytes == NULL && !PyErr_Occurred()) {
        const char *name = Py_TYPE(activation)->tp_name;
        if (strcmp(name, "Tensor") != 0 && strcmp(name, "Parameter") != 0) {
            return false;
        }
        keep_tensor_class(state, Py_TYPE(activation));
        nbytes = PyObject_GetAttr(activation, state->names[MLSPY_NAME_NBYTES]);
    }
    const Py_ssize_t bytes =
        nbytes != NULL && PyLong_CheckExact(nbytes) ? PyLong_AsSsize_t(nbytes) : -1;
    Py_XDECREF(nbytes);
    if (bytes < 0) {
        PyErr_Clear();
        return false;
    }
    *out = (size_t)bytes;
    return true;
}

/* Sets `*out` to the bytes of an activation from its attributes `shape` and `dtype`.
 * Returns 0, 1 without an exception if they exceed PTRDIFF_MAX, or -1 with an exception
 * set; then `*out` is unchanged. */
static int described_bytes(const mlspy_state *state, PyObject *activation, size_t *out)
{
    PyObject *shape = PyObject_GetAttr(activation, state->names[MLSPY_NAME_SHAPE]);
    PyObject *dtype = shape == NULL
                          ? NULL
                          : PyObject_GetAttr(activation, state->names[MLSPY_NAME_DTYPE]);
    const int failed = dtype == NULL ? refuse_activation(activation)
                                     : bytes_of(state, shape, dtype, out);
    /* the attributes may be temporary objects */
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return failed;
}

int mlspy_activation_bytes(mlspy_state *state, PyObject *activation, size_t *out)
{
    int failed;
    if (tensor_bytes(state, activation, out)) {
        return 0;
    }
    if (PyArray_Check(activation)) {
        failed = !mlspy_ndarray_bytes((PyArrayObject *)activation, out);
    } else {
        failed = described_bytes(state, activation, out);
    }
    /* only this failure has no exception yet */
    if (failed > 0) {
        return MLSPY_FAIL(state, MLS_E_SIZE,
                          "activation has more bytes than memory can have");
    }
    return failed;
}

/* activation_bytes(activation) -> bytes of its elements; for
 * mlstate.activation._manager */
PyObject *core_activation_bytes(mlspy_state *state, PyObject *const *args)
{
    size_t bytes;
    if (mlspy_activation_bytes(state, args[0], &bytes) < 0) {
        return NULL;
    }
    return PyLong_FromSize_t(bytes);
}

/* memory_footprint() -> (used, peak, total): bytes of memory that this process uses now,
 * that it used at most, and that it may use
 *
 * Raises StoreError if the system does not report them. Releases the GIL: the system
 * files to read are short, but the system may be slow to produce them.
 */
PyObject *core_memory_footprint(mlspy_state *state, PyObject *const *args)
{
    (void)args;
    mls_process_memory memory;
    mls_status st;
    mls_code code;
    MLSPY_WITHOUT_GIL(code = mls_process_memory_read(&memory, &st));
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return Py_BuildValue("KKK", (unsigned long long)memory.used,
                         (unsigned long long)memory.peak,
                         (unsigned long long)memory.total);
}
