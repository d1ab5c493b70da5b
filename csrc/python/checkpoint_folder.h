/* checkpoint_folder: the folder of a checkpoint, and errors about files in it. */
#ifndef MLSP_CHECKPOINT_FOLDER_H
#define MLSP_CHECKPOINT_FOLDER_H

#include "python_api.h"

#include "module_state.h"

/* Open a folder for work under it; the caller closes it.  -1 with an exception set. */
int mlsp_open_folder(const mlsp_state *state, PyObject *path, int *out);

/* Raise `st`, about the file `relative` (or NULL) under the folder `path`.  Returns NULL.
 */
PyObject *mlsp_raise_under(const mlsp_state *state, const mls_status *st, PyObject *path,
                           const char *relative);

#endif
