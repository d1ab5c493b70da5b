/* strategy_args: shared by py_strategy.c, py_activation_memory.c and strategy_args.c.
 *
 * A decision runs once for each layer of each step, so the usual call is short and
 * inline: three positional arguments, a str with a cached hash, a small int, an ndarray.
 * Other arguments take a slower path, in strategy_args.c and py_activation_memory.c.
 */
#ifndef MLSPY_STRATEGY_ARGS_H
#define MLSPY_STRATEGY_ARGS_H

#include "common/python_api.h"

#include "common/args.h"
#include "common/module_state.h"

#include "activation/layer_map.h"
#include "base/size.h"

/* ---- py_activation_memory.c ---- */

/* Computes the bytes of an activation's elements from its shape and dtype, in any memory:
 * an ndarray, a torch tensor (also on the meta device), or any object with both
 * attributes. Returns -1 with TypeError, ValueError or CapacityError set. */
int mlspy_activation_bytes(mlspy_state *state, PyObject *activation, size_t *out);

/* ---- strategy_args.c ---- */

/* The arguments of should_checkpoint; the objects are borrowed. */
typedef struct mlspy_strategy_args {
    PyObject *layer_id, *activation;
    int64_t index; /* 0 or more */
} mlspy_strategy_args;

/* Parses any arguments: keywords, wrong counts and types, large numbers. Returns -1 with
 * TypeError, ValueError or CapacityError set. */
int mlspy_parse_strategy_args(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *names, mlspy_strategy_args *q);

/* Raises the core's error. Always returns NULL. */
PyObject *mlspy_strategy_fail(PyObject *self, const mls_status *st);

/* Parses an int of a setting or state; messages call it `what`. Returns -1 with an
 * exception set. */
int mlspy_strategy_number(PyObject *self, PyObject *object, const char *what,
                          int64_t *out);

/* Marks all names of a tuple, or none for NULL. Returns -1 with TypeError or ValueError
 * set. */
int mlspy_mark_layers(PyObject *self, PyObject *names, mls_layer_choice mark,
                      mls_layer_map *table);

/* Returns a new tuple of the names that have a mark, in order. */
PyObject *mlspy_marked_layers(const mls_layer_map *table, mls_layer_choice mark);

/* ---- the fast path ---- */

/* As mlspy_activation_bytes for an ndarray, without module state; returns false on
 * overflow. */
static inline bool mlspy_ndarray_bytes(PyArrayObject *array, size_t *out)
{
    size_t bytes = (size_t)PyDataType_ELSIZE(PyArray_DESCR(array));
    const npy_intp *shape = PyArray_DIMS(array);
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        if (!mls_size_mul(bytes, (size_t)shape[axis], &bytes)) {
            return false;
        }
    }
    *out = bytes;
    return true;
}

/* Parses a non-negative int of one digit; returns false for any other object. */
static inline bool mlspy_small_index(PyObject *object, int64_t *out)
{
    if (!PyLong_CheckExact(object)) {
        return false;
    }
#if PY_VERSION_HEX >= 0x030C0000
    const PyLongObject *number = (const PyLongObject *)object;
    *out = PyUnstable_Long_IsCompact(number) ? PyUnstable_Long_CompactValue(number) : -1;
    return *out >= 0;
#else
    *out = Py_SIZE(object) == 0 ? 0 : ((PyLongObject *)object)->ob_digit[0];
    return (size_t)Py_SIZE(object) <= 1;
#endif
}

/* Parses the usual arguments here, all others in mlspy_parse_strategy_args. Returns -1
 * with an exception set. */
static inline int mlspy_take_strategy_args(PyObject *self, PyObject *const *args,
                                           Py_ssize_t nargs, PyObject *names,
                                           mlspy_strategy_args *q)
{
    if (nargs == 3 && names == NULL && PyUnicode_Check(args[0]) &&
        mlspy_small_index(args[2], &q->index)) {
        q->layer_id = args[0];
        q->activation = args[1];
        return 0;
    }
    return mlspy_parse_strategy_args(self, args, nargs, names, q);
}

/* Converts a str to a key of the core's tables. Uses the hash of plain str, even for
 * subclasses, because equal names must have equal hashes. */
static inline int mlspy_take_key(PyObject *layer_id, mls_layer_key *out)
{
    if (PyUnicode_IS_COMPACT_ASCII(layer_id)) {
        out->name.data = (const char *)PyUnicode_1BYTE_DATA(layer_id);
        out->name.length = (size_t)PyUnicode_GET_LENGTH(layer_id);
    } else if (mlspy_take_text(layer_id, "layer_id", &out->name) < 0) {
        return -1;
    }
#if defined(Py_GIL_DISABLED)
    const Py_hash_t kept = -1;
#else
    const Py_hash_t kept = ((PyASCIIObject *)layer_id)->hash; /* -1: not computed yet */
#endif
    out->hash = (uint64_t)(kept != -1 ? kept : PyUnicode_Type.tp_hash(layer_id));
    return 0;
}

/* Computes the bytes of the elements of `activation`. An exact ndarray needs no module
 * state; other objects do. Returns -1 with an exception set. */
static inline int mlspy_take_bytes(PyObject *self, PyObject *activation, size_t *out)
{
    if (PyArray_CheckExact(activation) &&
        mlspy_ndarray_bytes((PyArrayObject *)activation, out)) {
        return 0;
    }
    mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    return state == NULL ? -1 : mlspy_activation_bytes(state, activation, out);
}

#endif
