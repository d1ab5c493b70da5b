/* kv_args: shape, sequence axis and lengths of caches as arguments of py_kv_*.c; most are
 * in py_kv_transition.c. */
#ifndef MLSPY_KV_ARGS_H
#define MLSPY_KV_ARGS_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "kv/kv_ring.h"

/* Read the dimensions of a cache from a sequence of non-negative ints, and its sequence
 * axis `seq_axis`, converted to 0 .. rank-1. `label` names the shape in messages. `shape`
 * has MLS_KV_MAX_RANK entries. Returns -1 with TypeError, CapacityError or
 * CompatibilityError set. */
int mlspy_take_kv_shape(const mlspy_state *state, PyObject *object, PyObject *seq_axis,
                        const char *label, int *rank, size_t *shape, int *axis);

/* Read the sequence axis of a cache whose `rank` dimensions `shape` are known; `*axis` is
 * 0 .. rank-1. `label` names the shape in messages. Errors as for mlspy_take_kv_shape. */
int mlspy_take_kv_axis(const mlspy_state *state, PyObject *seq_axis, const char *label,
                       int rank, const size_t *shape, int *axis);

/* Read a number of positions that is not negative; `label` names it in messages. Returns
 * -1 with TypeError or CapacityError set. */
int mlspy_take_kv_length(const mlspy_state *state, PyObject *object, const char *label,
                         size_t *out);

/* Return a new int64 ndarray with the position of each slot's token, or -1 for a slot
 * without one; NULL with MemoryError set (py_kv_cache.c). */
PyObject *mlspy_ring_positions(const mls_kv_ring *ring);

#endif
