/* errors: the exception classes, and the only place where a status becomes an exception.
 *
 * Each class derives from MLStateError and, if users would expect it, from a builtin
 * class: a missing tensor is a KeyError, a missing file a FileNotFoundError. Every
 * instance has the attributes name, expected, got, path, offset and rank; they are None
 * if they do not apply.
 *
 * An invalid argument that concerns no state or file raises a plain ValueError, as usual
 * in Python.
 */
#include "common/errors.h"

#include "common/module_state.h"

#include <errno.h>

/* Definition of a class. */
typedef struct error_spec {
    const char *name; /* dotted, as in pickles */
    const char *doc;  /* the class docstring */
    mlspy_error base; /* another class of this table; its own index for the root */
    PyObject **mixin; /* a builtin class that existing code catches, or NULL */
} error_spec;

static const char *const base_doc =
    "Base class of every mlstate error.\n\n"
    "Attributes\n----------\n"
    "name : str or None\n    Tensor, state or key concerned.\n"
    "expected, got : str or None\n    What was wanted there and what was found.\n"
    "path : str, bytes or None\n    File concerned.\n"
    "offset : int or None\n    Byte offset in that file.\n"
    "rank : int or None\n    Rank of the process concerned.";

/* Attributes of the root class, so that every instance has them. */
static const char *const field_names[] = {"name", "expected", "got",
                                          "path", "offset",   "rank"};

/* A function instead of a table, because PyExc_* are not constant expressions. */
static error_spec spec_of(mlspy_error which)
{
    switch (which) {
    case MLSPY_ERROR_NOT_FOUND:
        return (error_spec){"mlstate.errors.TensorNotFoundError",
                            "A state dict has no tensor of that name.", MLSPY_ERROR_BASE,
                            &PyExc_KeyError};
    case MLSPY_ERROR_COMPATIBILITY:
        return (error_spec){"mlstate.errors.CompatibilityError",
                            "Shapes, dtypes or keys that do not go together.\n\n"
                            "``differences`` lists all that stood in the way of "
                            "`mlstate.state.load_into`; it is empty elsewhere.",
                            MLSPY_ERROR_BASE, &PyExc_ValueError};
    case MLSPY_ERROR_FORMAT:
        return (error_spec){"mlstate.errors.FormatError",
                            "A file is not what it claims to be.", MLSPY_ERROR_BASE,
                            &PyExc_ValueError};
    case MLSPY_ERROR_CHECKSUM:
        return (error_spec){"mlstate.errors.ChecksumError",
                            "A file's bytes changed since they were written.",
                            MLSPY_ERROR_FORMAT, NULL};
    case MLSPY_ERROR_CAPACITY:
        return (error_spec){"mlstate.errors.CapacityError",
                            "A position, length or buffer that does not fit.",
                            MLSPY_ERROR_BASE, &PyExc_ValueError};
    case MLSPY_ERROR_STORE:
        return (error_spec){"mlstate.errors.StoreError",
                            "The operating system refused a file operation.",
                            MLSPY_ERROR_BASE, &PyExc_OSError};
    case MLSPY_ERROR_STORE_MISSING:
        return (error_spec){"mlstate.errors.StoreNotFoundError", "A file does not exist.",
                            MLSPY_ERROR_STORE, &PyExc_FileNotFoundError};
    case MLSPY_ERROR_STORE_DENIED:
        return (error_spec){"mlstate.errors.StorePermissionError",
                            "A file may not be read or written.", MLSPY_ERROR_STORE,
                            &PyExc_PermissionError};
    case MLSPY_ERROR_COLLECTIVE:
        return (error_spec){"mlstate.errors.CollectiveError",
                            "An operation across ranks failed.", MLSPY_ERROR_BASE,
                            &PyExc_RuntimeError};
    case MLSPY_ERROR_BASE:
    case MLSPY_ERROR_COUNT:
        break;
    }
    return (error_spec){"mlstate.errors.MLStateError", base_doc, MLSPY_ERROR_BASE,
                        &PyExc_Exception};
}

/* Return a new tuple of the bases of `which`. */
static PyObject *bases_of(const mlspy_state *state, mlspy_error which)
{
    const error_spec spec = spec_of(which);
    if (which == MLSPY_ERROR_BASE) {
        return PyTuple_Pack(1, *spec.mixin);
    }
    if (spec.mixin == NULL) {
        return PyTuple_Pack(1, state->errors[spec.base]);
    }
    return PyTuple_Pack(2, state->errors[spec.base], *spec.mixin);
}

/* KeyError prints the repr of its argument; its subclass restores the plain text. The
 * root class must not do so, because OSError has its own __str__, which prints number,
 * text and path. */
static int restore_plain_text(PyObject *class)
{
    PyObject *plain = PyObject_GetAttrString(PyExc_Exception, "__str__");
    if (plain == NULL) {
        return -1;
    }
    const int failed = PyObject_SetAttrString(class, "__str__", plain);
    Py_DECREF(plain);
    return failed;
}

/* Add the attributes to the root class. */
static int add_fields(PyObject *root)
{
    for (size_t i = 0; i < sizeof field_names / sizeof field_names[0]; i++) {
        if (PyObject_SetAttrString(root, field_names[i], Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Add the attribute `differences`: the reasons of a failed load, empty for other errors.
 */
static int add_differences(PyObject *class)
{
    PyObject *none = PyTuple_New(0);
    const int failed =
        none == NULL ? -1 : PyObject_SetAttrString(class, "differences", none);
    Py_XDECREF(none);
    return failed;
}

/* In the order of the enum: a class comes after its base. */
int mlspy_errors_add(PyObject *module)
{
    mlspy_state *state = mlspy_state_of(module);
    for (int i = 0; i < MLSPY_ERROR_COUNT; i++) {
        const error_spec spec = spec_of((mlspy_error)i);
        PyObject *bases = bases_of(state, (mlspy_error)i);
        if (bases == NULL) {
            return -1;
        }
        state->errors[i] = PyErr_NewExceptionWithDoc(spec.name, spec.doc, bases, NULL);
        Py_DECREF(bases);
        if (state->errors[i] == NULL ||
            (i == MLSPY_ERROR_BASE && add_fields(state->errors[i]) < 0) ||
            (i == MLSPY_ERROR_COMPATIBILITY && add_differences(state->errors[i]) < 0) ||
            (i == MLSPY_ERROR_NOT_FOUND && restore_plain_text(state->errors[i]) < 0) ||
            PyModule_AddObjectRef(module, strrchr(spec.name, '.') + 1, state->errors[i]) <
                0) {
            return -1;
        }
    }
    return 0;
}

/* Return the class (borrowed) for a status. */
static PyObject *class_of(const mlspy_state *state, const mls_status *st)
{
    switch (st->code) {
    case MLS_E_MEMORY:
        return PyExc_MemoryError;
    case MLS_E_SHAPE:
    case MLS_E_DTYPE:
        return state->errors[MLSPY_ERROR_COMPATIBILITY];
    case MLS_E_CAPACITY:
    case MLS_E_SIZE:
        return state->errors[MLSPY_ERROR_CAPACITY];
    case MLS_E_FORMAT:
        return state->errors[MLSPY_ERROR_FORMAT];
    case MLS_E_CHECKSUM:
        return state->errors[MLSPY_ERROR_CHECKSUM];
    case MLS_E_BUSY:
        return PyExc_BufferError;
    case MLS_E_PEER:
        return state->errors[MLSPY_ERROR_COLLECTIVE];
    case MLS_E_IO:
        return state->errors[st->os_error == ENOENT ? MLSPY_ERROR_STORE_MISSING
                             : st->os_error == EACCES || st->os_error == EPERM
                                 ? MLSPY_ERROR_STORE_DENIED
                                 : MLSPY_ERROR_STORE];
    case MLS_OK:
    case MLS_E_STOPPED: /* the code that stopped the work raises its own exception */
    case MLS_E_VALUE:
    case MLS_E_OVERLAP:
    case MLS_E_COUNT:
        break;
    }
    return PyExc_ValueError;
}

/* Set `field` to `value`, whose reference is consumed; NULL means an exception is set. */
static int set_field(PyObject *error, const char *field, PyObject *value)
{
    if (value == NULL) {
        return -1;
    }
    const int failed = PyObject_SetAttrString(error, field, value);
    Py_DECREF(value);
    return failed;
}

/* Return a new str. Bytes that are not UTF-8 are escaped, so this fails only without
 * memory. */
static PyObject *text_object(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
}

/* As set_field for a text. An empty text leaves the class's None. */
static int set_text(PyObject *error, const char *field, const char *text)
{
    return text[0] == '\0' ? 0 : set_field(error, field, text_object(text));
}

/* Copy the fields of a status to the exception. Returns -1 with an exception set. */
static int set_fields(PyObject *error, const mls_status *st, PyObject *path)
{
    if (set_text(error, "name", st->name) < 0 ||
        set_text(error, "expected", st->expected) < 0 ||
        set_text(error, "got", st->got) < 0) {
        return -1;
    }
    if (st->has_offset &&
        set_field(error, "offset", PyLong_FromUnsignedLongLong(st->offset)) < 0) {
        return -1;
    }
    return path == NULL ? 0 : PyObject_SetAttrString(error, "path", path);
}

/* Return a new exception. An OSError gets errno as the first argument. */
static PyObject *make_error(PyObject *type, const mls_status *st, PyObject *path)
{
    PyObject *text = text_object(st->text);
    if (text == NULL) {
        return NULL;
    }
    /* an OSError made from (errno, text, path) shows all three */
    PyObject *error = NULL;
    if (st->code != MLS_E_IO) {
        error = PyObject_CallOneArg(type, text);
    } else {
        error = PyObject_CallFunction(type, "iOO", st->os_error, text,
                                      path == NULL ? Py_None : path);
    }
    Py_DECREF(text);
    return error;
}

/* If the text is full, the hint is truncated. */
void mlspy_status_hint(mls_status *st, const char *hint)
{
    const size_t length = strlen(st->text);
    PyOS_snprintf(st->text + length, sizeof st->text - length, ": %s", hint);
}

/* If making the exception fails, that failure is raised instead. */
PyObject *mlspy_raise(const mlspy_state *state, const mls_status *st, PyObject *path)
{
    PyObject *type = class_of(state, st);
    PyObject *error = make_error(type, st, path);
    const bool ours =
        error != NULL && PyObject_IsInstance(error, state->errors[MLSPY_ERROR_BASE]) == 1;
    if (error != NULL && (!ours || set_fields(error, st, path) == 0)) {
        PyErr_SetObject(type, error);
    }
    Py_XDECREF(error);
    return NULL;
}
