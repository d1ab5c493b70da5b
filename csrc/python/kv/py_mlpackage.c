/* py_mlpackage: the states of Core ML packages as plain Python data.
 *
 * Both functions return (default, [(function, [(state, dtype, shape), ...]), ...]).
 * `default` is an index or None. mlstate/coreml/__init__.py converts the result to public
 * objects.
 *
 * The core's package is converted to Python objects and released before the call returns,
 * so no Python object owns it.
 */
#include "arguments/results.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "coreml/mlpackage.h"

/* (name, [(state, dtype, shape), ...]) */
static PyObject *function_object(const mls_mlpackage *package,
                                 const mls_ml_function *function)
{
    PyObject *states = PyList_New((Py_ssize_t)function->states);
    for (size_t i = 0; states != NULL && i < function->states; i++) {
        const mls_ml_state *state = &package->states[function->first + i];
        mlspy_put(&states, (Py_ssize_t)i,
                  Py_BuildValue("(NsN)", mlspy_str_of(state->name),
                                mls_dtype_of(state->dtype)->name,
                                mlspy_sizes_tuple(state->shape, state->rank)));
    }
    return states == NULL ? NULL
                          : Py_BuildValue("(NN)", mlspy_str_of(function->name), states);
}

/* Return the whole result, as described at the top of this file. "N" takes the reference
 * to the list. */
static PyObject *package_object(const mls_mlpackage *package)
{
    PyObject *functions = PyList_New((Py_ssize_t)package->function_count);
    for (size_t i = 0; functions != NULL && i < package->function_count; i++) {
        mlspy_put(&functions, (Py_ssize_t)i,
                  function_object(package, &package->functions[i]));
    }
    const bool has_default = package->default_function != package->function_count;
    PyObject *index =
        has_default ? PyLong_FromSize_t(package->default_function) : Py_NewRef(Py_None);
    return Py_BuildValue("(NN)", index, functions);
}

/* Raise the status, or convert and release the package. */
static PyObject *finish_package(const mlspy_state *state, mls_code code,
                                const mls_status *st, mls_mlpackage *package,
                                PyObject *path)
{
    if (code != MLS_OK) {
        return mlspy_raise(state, st, path);
    }
    PyObject *result = package_object(package);
    mls_mlpackage_fini(package);
    return result;
}

/* read_mlpackage(path): `path` is str, bytes or os.PathLike. */
PyObject *core_read_mlpackage(mlspy_state *state, PyObject *const *args)
{
    PyObject *encoded = NULL;
    if (!PyUnicode_FSConverter(args[0], &encoded)) {
        return NULL;
    }
    const char *name = PyBytes_AS_STRING(encoded);
    mls_mlpackage package = {0};
    mls_status st;
    mls_code code;
    MLSPY_WITHOUT_GIL(code = mls_mlpackage_read(name, &package, &st));
    PyObject *path_object = PyOS_FSPath(args[0]); /* the exception's `path` */
    Py_DECREF(encoded);
    if (path_object == NULL) {
        mls_mlpackage_fini(&package);
        return NULL;
    }
    PyObject *result = finish_package(state, code, &st, &package, path_object);
    Py_DECREF(path_object);
    return result;
}

/* parse_mlspec(data): `data` is a contiguous buffer of bytes. Only the model's
 * description is read, after a copy; it is short, so the GIL stays held. */
PyObject *core_parse_mlspec(mlspy_state *state, PyObject *const *args)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    mls_mlpackage package = {0};
    mls_status st;
    const mls_code code =
        mls_mlpackage_parse(buffer.buf, (size_t)buffer.len, &package, &st);
    PyBuffer_Release(&buffer);
    return finish_package(state, code, &st, &package, NULL);
}
