/* checkpoint_folder: open the folder of a checkpoint, and raise errors about its files.
 */
#ifndef MLSPY_CHECKPOINT_FOLDER_H
#define MLSPY_CHECKPOINT_FOLDER_H

#include "common/python_api.h"

#include "common/module_state.h"

/* Open the folder `path` (str, bytes or os.PathLike) for reading. The caller closes the
 * descriptor `*out`. Returns -1 with an exception set: StoreError with the path. */
int mlspy_open_folder(const mlspy_state *state, PyObject *path, int *out);

/* Raise `st`, about the file `relative` (NULL: unknown) in the folder `path`. After
 * MLS_E_STOPPED, keeps the exception of the callback that stopped the work. Returns
 * NULL. */
PyObject *mlspy_raise_under(const mlspy_state *state, const mls_status *st,
                            PyObject *path, const char *relative);

#endif
