/* checkpoint_folder: the folder of a checkpoint, and errors about files in it. */
#ifndef MLSPY_CHECKPOINT_FOLDER_H
#define MLSPY_CHECKPOINT_FOLDER_H

#include "common/python_api.h"

#include "common/module_state.h"

/* Open a folder for work under it; the caller closes it.  -1 with an exception set. */
int mlspy_open_folder(const mlspy_state *state, PyObject *path, int *out);

/* Raise `st`, about the file `relative` (or NULL) under the folder `path`.  Returns NULL.
 */
PyObject *mlspy_raise_under(const mlspy_state *state, const mls_status *st,
                            PyObject *path, const char *relative);

#endif
