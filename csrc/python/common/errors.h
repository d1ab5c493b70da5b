/* errors: the exception classes, and how a binding raises the error of a status. */
#ifndef MLSPY_ERRORS_H
#define MLSPY_ERRORS_H

#include "common/python_api.h"

#include "base/status.h"

/* The exception classes, in the order of the table in errors.c. */
typedef enum mlspy_error {
    MLSPY_ERROR_BASE,
    MLSPY_ERROR_NOT_FOUND,
    MLSPY_ERROR_COMPATIBILITY,
    MLSPY_ERROR_FORMAT,
    MLSPY_ERROR_CHECKSUM,
    MLSPY_ERROR_CAPACITY,
    MLSPY_ERROR_STORE,
    MLSPY_ERROR_STORE_MISSING,
    MLSPY_ERROR_STORE_DENIED,
    MLSPY_ERROR_COLLECTIVE,
    MLSPY_ERROR_COUNT
} mlspy_error;

typedef struct mlspy_state mlspy_state; /* module_state.h */

/* Create the exception classes, and add them to the module and its state. Returns -1 with
 * an exception set. */
int mlspy_errors_add(PyObject *module);

/* Append ": hint" to the text of a failure: advice for users of the Python API. */
void mlspy_status_hint(mls_status *st, const char *hint);

/* Raise the exception for `st`. `path` (borrowed, may be NULL) becomes its attribute
 * `path`. Always returns NULL. */
PyObject *mlspy_raise(const mlspy_state *state, const mls_status *st, PyObject *path);

/* Raise an exception of `class` with the text, and with `name` as its attribute of that
 * name. Consumes the text, which is NULL if an exception is set already; `name` is
 * borrowed. */
void mlspy_raise_named(PyObject *class, PyObject *text, PyObject *name);

/* Raise the exception for `st` unless `code` is MLS_OK; then `st` is not read. Returns 0,
 * or -1 if it raised. */
int mlspy_check(const mlspy_state *state, mls_code code, const mls_status *st);

/* As mlspy_check, but returns None, or NULL if it raised: the result of a function. */
PyObject *mlspy_none(const mlspy_state *state, mls_code code, const mls_status *st);

/* Raise the exception for a code with a printf-style text: (state, code, format, ...).
 * Returns -1, as do the others. These are macros, so that the compiler knows the
 * result. */
#define MLSPY_FAIL(...) (mlspy_raise_text(__VA_ARGS__), -1)
void mlspy_raise_text(const mlspy_state *state, mls_code code, const char *format, ...)
    MLS_PRINTF(3, 4);

/* Raise an exception with a text: the arguments of PyErr_Format. */
#define MLSPY_REFUSE(...) (PyErr_Format(__VA_ARGS__), -1)

static inline int mlspy_no_memory(void)
{
    PyErr_NoMemory();
    return -1;
}

#endif
