/* args: arguments and attributes taken from Python, each with one clear error. */
#ifndef MLSPY_ARGS_H
#define MLSPY_ARGS_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "base/string_view.h"

/* TypeError unless a function called `name` got as many arguments as it wants. */
int mlspy_take_count(const char *name, Py_ssize_t wanted, Py_ssize_t got);

/* Parse a tuple inside an argument with the codes of PyArg_ParseTuple, which raises
 * SystemError if `object` is not a tuple.  -1 with an exception set; TypeError names
 * `what`. */
int mlspy_take_tuple(PyObject *object, const char *what, const char *format, ...);

/* An int, or anything with __index__, NumPy's integers too; `what` names it in errors.
 * -1 with TypeError or CapacityError set, and `*out` untouched. */
int mlspy_take_int64(const mlspy_state *state, PyObject *object, const char *what,
                     int64_t *out);

/* A float, or anything with __float__.  -1 with TypeError or ValueError set, and `*out`
 * untouched. */
int mlspy_take_double(PyObject *object, const char *what, double *out);

/* The UTF-8 of a str, which owns it.  -1 with TypeError, or with ValueError for half of a
 * surrogate pair, and `*out` untouched. */
int mlspy_take_text(PyObject *object, const char *what, mls_text *out);

/* TypeError unless an object is a dict; `what` names it. */
int mlspy_take_dict(PyObject *object, const char *what);

/* New reference to a str of text that is known to be UTF-8. */
PyObject *mlspy_str_of(mls_text text);

#endif
