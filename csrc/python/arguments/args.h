/* args: convert arguments and attributes from Python, with one clear error for each. */
#ifndef MLSPY_ARGS_H
#define MLSPY_ARGS_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "base/string_view.h"

#include <stdbool.h>

/* Check that a function called `name` got the expected number of arguments. Returns 0, or
 * -1 with TypeError set. */
int mlspy_take_count(const char *name, Py_ssize_t expected, Py_ssize_t got);

/* Parse the arguments of the constructor of `type`, all positional, with the format codes
 * of PyArg_ParseTuple; `...` has the addresses to fill. Returns -1 with an exception set:
 * TypeError if there are keywords. */
int mlspy_take_positional(PyTypeObject *type, PyObject *args, PyObject *kwargs,
                          const char *format, ...);

/* Parse a tuple inside an argument with the format codes of PyArg_ParseTuple; `...` has
 * the addresses to fill. Objects are borrowed from the tuple. Returns -1 with an
 * exception set: TypeError, which names `label`, if `object` is not a tuple. */
int mlspy_take_tuple(PyObject *object, const char *label, const char *format, ...);

/* Convert an int, or another object with __index__ that is not a bool. `label` names
 * the argument in errors. Returns -1 with `*out` untouched and an exception set:
 * TypeError for another object, CapacityError beyond 64 bits, or the exception of
 * __index__. */
int mlspy_take_int64(const mlspy_state *state, PyObject *object, const char *label,
                     int64_t *out);

/* Convert the permission bits of new files, an int. Returns -1 with an exception set:
 * ValueError for any other bit. */
int mlspy_take_mode(const mlspy_state *state, PyObject *object, unsigned *out);

/* Convert a float, or any object with __float__ or __index__; NaN and infinities too.
 * `label` names the argument in errors. Returns -1 with `*out` untouched and an exception
 * set: TypeError for another object, ValueError for an int beyond a double, or the
 * exception of __float__. */
int mlspy_take_double(PyObject *object, const char *label, double *out);

/* Convert any object to its truth value. Returns -1 with the exception of its __bool__
 * set, and `*out` false. */
int mlspy_take_bool(PyObject *object, bool *out);

/* Get the UTF-8 of a str, with a NUL after it; the str owns it. `label` names the
 * argument in errors. Returns -1 with `*out` untouched and an exception set: TypeError
 * for another object, ValueError for half of a surrogate pair, or MemoryError. */
int mlspy_take_text(PyObject *object, const char *label, mls_str *out);

/* Raise TypeError unless `object` is a dict; `label` names it in errors. Returns 0 or
 * -1. */
int mlspy_take_dict(PyObject *object, const char *label);

#endif
