/* py_layout: layouts and shapes as tuples. */
#ifndef MLSPY_PY_LAYOUT_H
#define MLSPY_PY_LAYOUT_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "sharding/layout.h"

/* A layout from a tuple of pairs (axis or name of a step, parts).  -1 with an exception
 * set. */
int mlspy_take_layout(const mlspy_state *state, PyObject *object, mls_layout *out);

/* New reference to such a tuple. */
PyObject *mlspy_layout_tuple(const mls_layout *layout);

/* A shape from a tuple of ints, at most MLS_LAYOUT_RANK of them; its rank, or -1 with an
 * exception set. */
int mlspy_take_shape(const mlspy_state *state, PyObject *object, size_t *shape);

#endif
