/* py_safetensors: capsules of mapped files, which arrays over a mapping have as base. */
#ifndef MLSPY_PY_SAFETENSORS_H
#define MLSPY_PY_SAFETENSORS_H

#include "common/python_api.h"

#include "io/file.h"

/* Return a new capsule that owns `*mapping`, as the base of arrays over it. A capsule has
 * no buffer, so NumPy refuses to make these arrays writeable. On failure returns NULL
 * with an exception set, and ends the mapping. */
PyObject *mlspy_mapping_capsule(mls_mapping *mapping);

/* Return the first byte of a capsule's mapping. */
const unsigned char *mlspy_mapping_data(PyObject *capsule);

#endif
