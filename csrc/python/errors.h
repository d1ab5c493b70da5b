/* errors: the exception classes, and how a status becomes an exception. */
#ifndef MLSP_ERRORS_H
#define MLSP_ERRORS_H

#include "python_api.h"

#include "status.h"

/* The exception classes, in the order of the table in errors.c. */
typedef enum mlsp_error {
    MLSP_ERROR_BASE,
    MLSP_ERROR_NOT_FOUND,
    MLSP_ERROR_COMPATIBILITY,
    MLSP_ERROR_FORMAT,
    MLSP_ERROR_CHECKSUM,
    MLSP_ERROR_CAPACITY,
    MLSP_ERROR_STORE,
    MLSP_ERROR_STORE_MISSING,
    MLSP_ERROR_STORE_DENIED,
    MLSP_ERROR_COLLECTIVE,
    MLSP_ERROR_COUNT
} mlsp_error;

typedef struct mlsp_state mlsp_state; /* module_state.h */

/* Create the exception classes and add them to the module.  -1 with an exception set. */
int mlsp_errors_add(PyObject *module);

/* Append ": hint" to the text of a failure: what a user of Python should do. */
void mlsp_status_hint(mls_status *st, const char *hint);

/* Raise the exception for `st`; `path` (borrowed, may be NULL) becomes its attribute
 * `path`.  Returns NULL, always. */
PyObject *mlsp_raise(const mlsp_state *state, const mls_status *st, PyObject *path);

#endif
