/* py_file: mapped files as the base of arrays. */
#ifndef MLSPY_PY_FILE_H
#define MLSPY_PY_FILE_H

#include "common/python_api.h"

#include "io/file.h"

/* New reference to a capsule that owns `mapping`, the base of arrays over it.  A capsule
 * has no buffer, so NumPy never lets these arrays be made writeable.  NULL with an
 * exception set, and the mapping ended. */
PyObject *mlspy_mapping_capsule(mls_mapping *mapping);

/* The first byte of the mapping that such a capsule owns. */
const unsigned char *mlspy_mapping_data(PyObject *capsule);

#endif
