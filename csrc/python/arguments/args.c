/* args: converts positional arguments (ints, floats, bools, str, tuples), with one clear
 * TypeError for each.
 *
 * The public functions in Python name and check their parameters; these checks come
 * second. Any object with __index__ is an integer; a float is not, nor a bool.
 */
#include "arguments/args.h"

#include "common/errors.h"
#include "common/module_state.h"

/* METH_FASTCALL passes any number of arguments, so check it before `args` is read. */
int mlspy_take_count(const char *name, Py_ssize_t expected, Py_ssize_t got)
{
    if (expected == got) {
        return 0;
    }
    return MLSPY_REFUSE(PyExc_TypeError, "%s takes %zd arguments, got %zd", name,
                        expected, got);
}

int mlspy_take_positional(PyTypeObject *type, PyObject *args, PyObject *kwargs,
                          const char *format, ...)
{
    va_list addresses;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        return MLSPY_REFUSE(PyExc_TypeError, "%s takes no keywords", type->tp_name);
    }
    va_start(addresses, format);
    const int good = PyArg_VaParse(args, format, addresses);
    va_end(addresses);
    return good ? 0 : -1;
}

int mlspy_take_tuple(PyObject *object, const char *label, const char *format, ...)
{
    va_list addresses;
    if (!PyTuple_Check(object)) {
        return MLSPY_REFUSE(PyExc_TypeError, "%s must be a tuple, got %.100s", label,
                            Py_TYPE(object)->tp_name);
    }
    va_start(addresses, format);
    const int good = PyArg_VaParse(object, format, addresses);
    va_end(addresses);
    return good ? 0 : -1;
}

/* Uses __index__, because __int__ would silently truncate a float. */
int mlspy_take_int64(const mlspy_state *state, PyObject *object, const char *label,
                     int64_t *out)
{
    const bool is_flag = PyBool_Check(object) || PyArray_IsScalar(object, Bool);
    PyObject *number = is_flag ? NULL : PyNumber_Index(object);
    if (number == NULL) {
        /* __index__ itself may raise another exception, which is kept */
        if (is_flag || PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s must be an integer, got %.100s", label,
                         Py_TYPE(object)->tp_name);
        }
        return -1;
    }
    /* a Python int may be larger than 64 bits, but no size or position is */
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow != 0) {
        return MLSPY_FAIL(state, MLS_E_CAPACITY, "%s does not fit into 64 bits", label);
    }
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    *out = value;
    return 0;
}

/* The umask clears further bits of a new file. */
int mlspy_take_mode(const mlspy_state *state, PyObject *object, unsigned *out)
{
    int64_t mode;
    if (mlspy_take_int64(state, object, "mode", &mode) < 0) {
        return -1;
    }
    if (mode < 0 || mode > 0777) {
        return MLSPY_REFUSE(PyExc_ValueError,
                            "mode %lld has bits that are not permissions",
                            (long long)mode);
    }
    *out = (unsigned)mode;
    return 0;
}

/* The core decides whether a dtype has NaN and infinities. */
int mlspy_take_double(PyObject *object, const char *label, double *out)
{
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) {
        /* an int too large for a double fits no dtype, so this is a ValueError */
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "%s is beyond the range of every dtype",
                         label);
        } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s must be a number, got %.100s", label,
                         Py_TYPE(object)->tp_name);
        }
        return -1;
    }
    *out = value;
    return 0;
}

int mlspy_take_bool(PyObject *object, bool *out)
{
    const int truth = PyObject_IsTrue(object);
    *out = truth > 0;
    return truth < 0 ? -1 : 0;
}

/* No copy: a str caches its UTF-8 as long as it lives. */
int mlspy_take_text(PyObject *object, const char *label, mls_str *out)
{
    if (!PyUnicode_Check(object)) {
        return MLSPY_REFUSE(PyExc_TypeError, "%s must be a str, got %.100s: %.200R",
                            label, Py_TYPE(object)->tp_name, object);
    }
    Py_ssize_t length;
    const char *data = PyUnicode_AsUTF8AndSize(object, &length);
    if (data == NULL) {
        /* keep a MemoryError */
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            PyErr_Format(PyExc_ValueError,
                         "%s %.200R has half of a surrogate pair, which no file can hold",
                         label, object);
        }
        return -1;
    }
    *out = (mls_str){.data = data, .length = (size_t)length};
    return 0;
}

/* Uses the same message as mlspy_items_of. */
int mlspy_take_dict(PyObject *object, const char *label)
{
    if (PyDict_Check(object)) {
        return 0;
    }
    return MLSPY_REFUSE(PyExc_TypeError, "%s must be a dict of arrays, got %.100s", label,
                        Py_TYPE(object)->tp_name);
}
