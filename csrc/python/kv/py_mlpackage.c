/* py_mlpackage: the states of Core ML packages as plain Python data.
 *
 * Both functions return (default, [(function, [(state, dtype, shape), ...]), ...]).
 * `default` is an index or None. mlstate/coreml/__init__.py converts the result to public
 * objects.
 *
 * The core's package is converted to Python objects and released before the call returns,
 * so no Python object owns it.
 */
#include "common/errors.h"
#include "common/module_state.h"
#include "kv/kv_bindings.h"

#include "coreml/mlpackage.h"

/* Return a new str. The core has checked the UTF-8, so only a lack of memory can fail. */
static PyObject *name_object(mls_str name)
{
    return PyUnicode_DecodeUTF8(name.data, (Py_ssize_t)name.length, NULL);
}

/* Return a new tuple of int. */
static PyObject *shape_object(const mls_ml_state *state)
{
    PyObject *shape = PyTuple_New(state->rank);
    for (int i = 0; shape != NULL && i < state->rank; i++) {
        PyObject *length = PyLong_FromSize_t(state->shape[i]);
        if (length == NULL) {
            Py_CLEAR(shape);
        } else {
            PyTuple_SET_ITEM(shape, i, length);
        }
    }
    return shape;
}

/* Return (name, dtype, shape), or NULL if a part fails. */
static PyObject *state_object(const mls_ml_state *state)
{
    PyObject *name = name_object(state->name);
    PyObject *shape = name == NULL ? NULL : shape_object(state);
    PyObject *result = NULL;
    if (shape != NULL) {
        result = Py_BuildValue("(OsO)", name, mls_dtype_of(state->dtype)->name, shape);
    }
    Py_XDECREF(name);
    Py_XDECREF(shape);
    return result;
}

/* (name, [state, ...]) */
static PyObject *function_object(const mls_mlpackage *package,
                                 const mls_ml_function *function)
{
    PyObject *states = PyList_New((Py_ssize_t)function->states);
    for (size_t i = 0; states != NULL && i < function->states; i++) {
        PyObject *state = state_object(&package->states[function->first + i]);
        if (state == NULL) {
            Py_CLEAR(states);
        } else {
            PyList_SET_ITEM(states, (Py_ssize_t)i, state);
        }
    }
    PyObject *name = states == NULL ? NULL : name_object(function->name);
    PyObject *result = name == NULL ? NULL : PyTuple_Pack(2, name, states);
    Py_XDECREF(name);
    Py_XDECREF(states);
    return result;
}

/* Return the whole result, as described at the top of this file. "N" takes the reference
 * to the list. */
static PyObject *package_object(const mls_mlpackage *package)
{
    PyObject *functions = PyList_New((Py_ssize_t)package->function_count);
    for (size_t i = 0; functions != NULL && i < package->function_count; i++) {
        PyObject *function = function_object(package, &package->functions[i]);
        if (function == NULL) {
            Py_CLEAR(functions);
        } else {
            PyList_SET_ITEM(functions, (Py_ssize_t)i, function);
        }
    }
    if (functions == NULL) {
        return NULL;
    }
    if (package->default_function == package->function_count) {
        return Py_BuildValue("(ON)", Py_None, functions);
    }
    return Py_BuildValue("(nN)", (Py_ssize_t)package->default_function, functions);
}

/* Raise the status, or convert and release the package. */
static PyObject *finish_package(PyObject *module, mls_code code, const mls_status *st,
                                mls_mlpackage *package, PyObject *path)
{
    if (code != MLS_OK) {
        return mlspy_raise(mlspy_state_of(module), st, path);
    }
    PyObject *result = package_object(package);
    mls_mlpackage_fini(package);
    return result;
}

/* read_mlpackage(path): `path` is str, bytes or os.PathLike. */
static PyObject *read_mlpackage(PyObject *module, PyObject *path)
{
    PyObject *encoded = NULL;
    if (!PyUnicode_FSConverter(path, &encoded)) {
        return NULL;
    }
    const char *name = PyBytes_AS_STRING(encoded);
    mls_mlpackage package = {0};
    mls_status st;
    mls_code code;
    Py_BEGIN_ALLOW_THREADS
        ;
        code = mls_mlpackage_read(name, &package, &st);
    Py_END_ALLOW_THREADS;
    PyObject *shown = PyOS_FSPath(path); /* the exception's `path` */
    Py_DECREF(encoded);
    if (shown == NULL) {
        mls_mlpackage_fini(&package);
        return NULL;
    }
    PyObject *result = finish_package(module, code, &st, &package, shown);
    Py_DECREF(shown);
    return result;
}

/* parse_mlspec(data): `data` is a contiguous buffer of bytes. Only the model's
 * description is read, after a copy; it is short, so the GIL stays held. */
static PyObject *parse_mlspec(PyObject *module, PyObject *data)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    mls_mlpackage package = {0};
    mls_status st;
    const mls_code code =
        mls_mlpackage_parse(buffer.buf, (size_t)buffer.len, &package, &st);
    PyBuffer_Release(&buffer);
    return finish_package(module, code, &st, &package, NULL);
}

PyMethodDef mlspy_mlpackage_methods[] = {
    {"read_mlpackage", read_mlpackage, METH_O,
     "read_mlpackage(path, /)\n--\n\nThe functions and states of a .mlpackage or "
     ".mlmodel."},
    {"parse_mlspec", parse_mlspec, METH_O,
     "parse_mlspec(data, /)\n--\n\nThe same from the bytes of a specification."},
    {NULL, NULL, 0, NULL},
};
