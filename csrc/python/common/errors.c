/* errors: exception classes, their builtin bases and attributes, and which of them a
 * status of the core raises.
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

static const char base_doc[] =
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

/* The definitions of the classes. */
static const struct {
    const char *name; /* dotted, as in pickles */
    const char *doc;  /* the class docstring */
    mlspy_error base; /* another class of this table; its own index for the root */
} specs[MLSPY_ERROR_COUNT] = {
    [MLSPY_ERROR_BASE] = {"mlstate.errors.MLStateError", base_doc, MLSPY_ERROR_BASE},
    [MLSPY_ERROR_NOT_FOUND] = {"mlstate.errors.TensorNotFoundError",
                               "A state dict has no tensor of that name.",
                               MLSPY_ERROR_BASE},
    [MLSPY_ERROR_COMPATIBILITY] = {"mlstate.errors.CompatibilityError",
                                   "Shapes, dtypes or keys that do not go together.\n\n"
                                   "``differences`` lists all that stood in the way of "
                                   "`mlstate.state.load_into`; it is empty elsewhere.",
                                   MLSPY_ERROR_BASE},
    [MLSPY_ERROR_FORMAT] = {"mlstate.errors.FormatError",
                            "A file is not what it claims to be.", MLSPY_ERROR_BASE},
    [MLSPY_ERROR_CHECKSUM] = {"mlstate.errors.ChecksumError",
                              "A file's bytes changed since they were written.",
                              MLSPY_ERROR_FORMAT},
    [MLSPY_ERROR_CAPACITY] = {"mlstate.errors.CapacityError",
                              "A position, length or buffer that does not fit.",
                              MLSPY_ERROR_BASE},
    [MLSPY_ERROR_STORE] = {"mlstate.errors.StoreError",
                           "The operating system refused a file operation.",
                           MLSPY_ERROR_BASE},
    [MLSPY_ERROR_STORE_MISSING] = {"mlstate.errors.StoreNotFoundError",
                                   "A file does not exist.", MLSPY_ERROR_STORE},
    [MLSPY_ERROR_STORE_DENIED] = {"mlstate.errors.StorePermissionError",
                                  "A file may not be read or written.",
                                  MLSPY_ERROR_STORE},
    [MLSPY_ERROR_COLLECTIVE] = {"mlstate.errors.CollectiveError",
                                "An operation across ranks failed.", MLSPY_ERROR_BASE},
};

/* Return a new tuple of the bases of the class `error`: another class of mlstate, and a
 * builtin class that existing code catches. */
static PyObject *bases_of(const mlspy_state *state, mlspy_error error)
{
    PyObject *const builtins[MLSPY_ERROR_COUNT] = {
        [MLSPY_ERROR_NOT_FOUND] = PyExc_KeyError,
        [MLSPY_ERROR_COMPATIBILITY] = PyExc_ValueError,
        [MLSPY_ERROR_FORMAT] = PyExc_ValueError,
        [MLSPY_ERROR_CAPACITY] = PyExc_ValueError,
        [MLSPY_ERROR_STORE] = PyExc_OSError,
        [MLSPY_ERROR_STORE_MISSING] = PyExc_FileNotFoundError,
        [MLSPY_ERROR_STORE_DENIED] = PyExc_PermissionError,
        [MLSPY_ERROR_COLLECTIVE] = PyExc_RuntimeError,
    };
    if (error == MLSPY_ERROR_BASE) {
        return PyTuple_Pack(1, PyExc_Exception);
    }
    PyObject *base = state->errors[specs[error].base], *builtin = builtins[error];
    return builtin == NULL ? PyTuple_Pack(1, base) : PyTuple_Pack(2, base, builtin);
}

/* Give `class`, a subclass of KeyError, the __str__ of Exception: KeyError's prints the
 * repr of its argument instead of the text. Returns -1 with an exception set. The root
 * class must not do so, because OSError has its own __str__, which prints number, text
 * and path. */
static int restore_exception_str(PyObject *class)
{
    PyObject *exception_str = PyObject_GetAttrString(PyExc_Exception, "__str__");
    if (exception_str == NULL) {
        return -1;
    }
    const int failed = PyObject_SetAttrString(class, "__str__", exception_str);
    Py_DECREF(exception_str);
    return failed;
}

/* Add the attributes of field_names, all None, to the root class, so that every instance
 * has them. Returns -1 with an exception set. */
static int add_fields(PyObject *root)
{
    for (size_t i = 0; i < sizeof field_names / sizeof field_names[0]; i++) {
        if (PyObject_SetAttrString(root, field_names[i], Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Add the attribute `differences` to CompatibilityError: the reasons of a failed load, an
 * empty tuple for other errors. Returns -1 with an exception set. */
static int add_differences(PyObject *class)
{
    PyObject *no_differences = PyTuple_New(0);
    const int failed = no_differences == NULL
                           ? -1
                           : PyObject_SetAttrString(class, "differences", no_differences);
    Py_XDECREF(no_differences);
    return failed;
}

/* In the order of the enum: a class comes after its base. */
int mlspy_errors_add(PyObject *module)
{
    mlspy_state *state = mlspy_state_of(module);
    for (int i = 0; i < MLSPY_ERROR_COUNT; i++) {
        PyObject *bases = bases_of(state, (mlspy_error)i);
        if (bases == NULL) {
            return -1;
        }
        state->errors[i] =
            PyErr_NewExceptionWithDoc(specs[i].name, specs[i].doc, bases, NULL);
        Py_DECREF(bases);
        if (state->errors[i] == NULL ||
            (i == MLSPY_ERROR_BASE && add_fields(state->errors[i]) < 0) ||
            (i == MLSPY_ERROR_COMPATIBILITY && add_differences(state->errors[i]) < 0) ||
            (i == MLSPY_ERROR_NOT_FOUND && restore_exception_str(state->errors[i]) < 0) ||
            PyModule_AddObjectRef(module, strrchr(specs[i].name, '.') + 1,
                                  state->errors[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Return the exception class (borrowed) for the code of a status; for MLS_E_IO it also
 * depends on the error of the system. */
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

/* Set the attribute `field` of an exception to `value`, whose reference is consumed.
 * Returns -1 with an exception set, also if `value` is NULL because making it failed. */
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

/* As set_field, for a text. An empty text leaves the class's None. */
static int set_text(PyObject *error, const char *field, const char *text)
{
    return text[0] == '\0' ? 0 : set_field(error, field, text_object(text));
}

/* Copy the details of a status (name, expected, got, offset) and `path` (borrowed; NULL:
 * none) to the attributes of the exception. Returns -1 with an exception set. */
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

/* Return a new exception of class `type` with the text of a status. One for MLS_E_IO is
 * an OSError, made from (errno, text, path), and shows all three. NULL with an exception
 * set. */
static PyObject *make_error(PyObject *type, const mls_status *st, PyObject *path)
{
    PyObject *text = text_object(st->text);
    if (text == NULL) {
        return NULL;
    }
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
    const bool is_own_class =
        error != NULL && PyObject_IsInstance(error, state->errors[MLSPY_ERROR_BASE]) == 1;
    if (error != NULL && (!is_own_class || set_fields(error, st, path) == 0)) {
        PyErr_SetObject(type, error);
    }
    Py_XDECREF(error);
    return NULL;
}

void mlspy_raise_named(PyObject *class, PyObject *text, PyObject *name)
{
    PyObject *error = text == NULL ? NULL : PyObject_CallOneArg(class, text);
    if (error != NULL && PyObject_SetAttrString(error, "name", name) == 0) {
        PyErr_SetObject(class, error);
    }
    Py_XDECREF(error);
    Py_XDECREF(text);
}

int mlspy_check(const mlspy_state *state, mls_code code, const mls_status *st)
{
    if (code != MLS_OK) {
        mlspy_raise(state, st, NULL);
        return -1;
    }
    return 0;
}

PyObject *mlspy_none(const mlspy_state *state, mls_code code, const mls_status *st)
{
    return mlspy_check(state, code, st) < 0 ? NULL : Py_NewRef(Py_None);
}

/* mls_fail truncates the text at a character. */
void mlspy_raise_text(const mlspy_state *state, mls_code code, const char *format, ...)
{
    char text[2 * MLS_TEXT_BYTES];
    mls_status st;
    va_list args;
    va_start(args, format);
    PyOS_vsnprintf(text, sizeof text, format, args);
    va_end(args);
    mls_fail(&st, code, "%s", text);
    mlspy_raise(state, &st, NULL);
}
