/* results: builds lists, tuples and dicts of results, and releases them after a failure.
 *
 * A partly filled list or tuple can be released: its empty entries are NULL. */
#include "arguments/results.h"

/* Strict, because text that is not UTF-8 is a bug and must not become another name. */
PyObject *mlspy_str_of(mls_str text)
{
    return PyUnicode_DecodeUTF8(text.data, (Py_ssize_t)text.length, "strict");
}

PyObject *mlspy_sizes_tuple(const size_t *sizes, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    MLSPY_PUT_EACH(tuple, i, count, PyLong_FromSize_t(sizes[i]));
    return tuple;
}

void mlspy_put(PyObject **out, Py_ssize_t i, PyObject *item)
{
    if (item == NULL) {
        Py_CLEAR(*out);
    } else if (PyList_Check(*out)) {
        PyList_SET_ITEM(*out, i, item);
    } else {
        PyTuple_SET_ITEM(*out, i, item);
    }
}

void mlspy_append(PyObject **out, PyObject *item)
{
    if (item == NULL || PyList_Append(*out, item) < 0) {
        Py_CLEAR(*out);
    }
    Py_XDECREF(item);
}

void mlspy_set(PyObject **out, PyObject *key, PyObject *item)
{
    if (key == NULL || item == NULL || PyDict_SetItem(*out, key, item) < 0) {
        Py_CLEAR(*out);
    }
    Py_XDECREF(key);
    Py_XDECREF(item);
}

/* Only the dict keeps the key. */
int mlspy_dict_set(PyObject *dict, const char *key, PyObject *value)
{
    PyObject *text = PyUnicode_FromString(key);
    const int failed = text == NULL ? -1 : PyDict_SetItem(dict, text, value);
    Py_XDECREF(text);
    return failed;
}

PyObject *mlspy_tuple_of(PyObject *list)
{
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}
