/* py_mlpackage: the states of Core ML packages as plain Python data.
 *
 * Both functions give (default, [(function, [(state, dtype, shape), ...]), ...]), where
 * `default` is an index or None.  mlstate/coreml/__init__.py makes the public objects of it.
 *
 * The core's package is turned into Python objects at once and released: nothing of it
 * outlives the call, so no object has to own it.
 */
#include "common/errors.h"
#include "kv/kv_bindings.h"
#include "common/module_state.h"

#include "coreml/mlpackage.h"

/* New reference to a str.  The core checked the UTF-8, so only memory can be missing. */
static PyObject *name_object(mls_text name)
{
    return PyUnicode_DecodeUTF8(name.data, (Py_ssize_t)name.length, NULL);
}

/* New reference to a tuple of int. */
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

/* (name, dtype, shape); a NULL from a part makes the whole NULL. */
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

/* The whole, as the head of this file shows it.  The format "N" takes the list over. */
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

/* A status or a package, whichever the core gave; consumes the package. */
static PyObject *finish(PyObject *module, mls_code code, const mls_status *st,
                        mls_mlpackage *package, PyObject *path)
{
    if (code != MLS_OK) {
        return mlspy_raise(mlspy_state_of(module), st, path);
    }
    PyObject *result = package_object(package);
    mls_mlpackage_fini(package);
    return result;
}

/* read_mlpackage(path): str, bytes or os.PathLike. */
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
    PyObject *shown = PyOS_FSPath(path); /* what the exception's `path` says */
    Py_DECREF(encoded);
    if (shown == NULL) {
        mls_mlpackage_fini(&package);
        return NULL;
    }
    PyObject *result = finish(module, code, &st, &package, shown);
    Py_DECREF(shown);
    return result;
}

/* parse_mlspec(data): anything with a contiguous buffer of bytes.  Only the model's
 * description is looked at, and copied first: short enough to keep the GIL. */
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
    return finish(module, code, &st, &package, NULL);
}

PyMethodDef mlspy_mlpackage_methods[] = {
    {"read_mlpackage", read_mlpackage, METH_O,
     "read_mlpackage(path, /)\n--\n\nThe functions and states of a .mlpackage or "
     ".mlmodel."},
    {"parse_mlspec", parse_mlspec, METH_O,
     "parse_mlspec(data, /)\n--\n\nThe same from the bytes of a specification."},
    {NULL, NULL, 0, NULL},
};
