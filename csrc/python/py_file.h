/* py_file: mapped files as the base of arrays. */
#ifndef MLSP_PY_FILE_H
#define MLSP_PY_FILE_H

#include "python_api.h"

#include "fsio.h"

/* New reference to a capsule that owns `mapping`, the base of arrays over it.  A capsule
 * has no buffer, so NumPy never lets these arrays be made writeable.  NULL with an
 * exception set, and the mapping ended. */
PyObject *mlsp_mapping_capsule(mls_mapping *mapping);

/* The first byte of the mapping that such a capsule owns. */
const unsigned char *mlsp_mapping_data(PyObject *capsule);

#endif
