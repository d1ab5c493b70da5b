/* errors: the exception classes, and the conversion of a status to an exception. */
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

/* Create the exception classes and add them to the module. Returns -1 with an exception
 * set. */
int mlspy_errors_add(PyObject *module);

/* Append ": hint" to the text of a failure: advice for users of the Python API. */
void mlspy_status_hint(mls_status *st, const char *hint);

/* Raise the exception for `st`. `path` (borrowed, may be NULL) becomes its attribute
 * `path`. Always returns NULL. */
PyObject *mlspy_raise(const mlspy_state *state, const mls_status *st, PyObject *path);

#endif
