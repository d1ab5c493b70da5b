/* py_layout: convert layouts and shapes from and to tuples. */
#ifndef MLSPY_PY_LAYOUT_H
#define MLSPY_PY_LAYOUT_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "sharding/layout.h"

/* Convert a tuple of pairs (axis, or name of a step without one; parts) to a layout.
 * Returns -1 with an exception set, and `*out` unchanged. */
int mlspy_take_layout(const mlspy_state *state, PyObject *object, mls_layout *out);

/* Return a layout as a new tuple of such pairs, or NULL with an exception set. */
PyObject *mlspy_layout_tuple(const mls_layout *layout);

/* Convert a tuple of at most MLS_LAYOUT_RANK ints, 0 or more, to `shape`, which has room
 * for MLS_LAYOUT_RANK of them. Returns the number of dimensions, or -1 with an exception
 * set and `shape` undefined. */
int mlspy_take_shape(const mlspy_state *state, PyObject *object, size_t *shape);

#endif
