/* checkpoint_folder: open the folder of a checkpoint, and raise errors about its files.
 */
#ifndef MLSPY_CHECKPOINT_FOLDER_H
#define MLSPY_CHECKPOINT_FOLDER_H

#include "common/python_api.h"

#include "common/module_state.h"

/* Open a folder; the caller closes the descriptor. */
int mlspy_open_folder(const mlspy_state *state, PyObject *path, int *out);

/* Raise `st`. It concerns the file `relative`, which may be NULL, in the folder `path`.
 * Returns NULL. */
PyObject *mlspy_raise_under(const mlspy_state *state, const mls_status *st,
                            PyObject *path, const char *relative);

#endif
