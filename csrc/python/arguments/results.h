/* results: build Python objects for results, releasing them on the first failure. */
#ifndef MLSPY_RESULTS_H
#define MLSPY_RESULTS_H

#include "common/python_api.h"

#include "base/string_view.h"

/* Return a new str for text that is known to be UTF-8, or NULL with an exception set. */
PyObject *mlspy_str_of(mls_str text);

/* Return a new tuple of the `count` ints of an array, or NULL with MemoryError set. */
PyObject *mlspy_sizes_tuple(const size_t *sizes, Py_ssize_t count);

/* These add a new reference, `item`, to a new list, tuple or dict. If `item` is NULL or
 * memory runs out, `*out` is released and set to NULL; an exception is then set. Stop
 * the loop that adds the items if `*out` is NULL. */

/* Set entry `i` of a new list or tuple, which is empty there. */
void mlspy_put(PyObject **out, Py_ssize_t i, PyObject *item);

/* Set entries 0 .. `count` - 1 of a new list or tuple to `item`, an expression that reads
 * the number of the entry, `i`; until `out` is NULL. */
#define MLSPY_PUT_EACH(out, i, count, item)                                              \
    for (size_t i = 0, end_ = (size_t)(count); (out) != NULL && i < end_; i++) {         \
        mlspy_put(&(out), (Py_ssize_t)i, (item));                                        \
    }

/* Append to a list. */
void mlspy_append(PyObject **out, PyObject *item);

/* Set an entry of a dict. `key` is a new reference too, and may be NULL. */
void mlspy_set(PyObject **out, PyObject *key, PyObject *item);

/* Set an entry of a dict whose key comes from outside, such as a path. Takes its own
 * reference to `value`. Returns 0, or -1 with an exception set. PyDict_SetItemString
 * interns its key, which newer Pythons (seen with 3.13 and 3.14) never free. */
int mlspy_dict_set(PyObject *dict, const char *key, PyObject *value);

/* Return a new tuple of the items of a new list, which is released. NULL with an
 * exception set, also if `list` is NULL because making it failed. */
PyObject *mlspy_tuple_of(PyObject *list);

#endif
