/* strategyp: what py_strategy.c, py_activation_memory.c and strategy_args.c share.
 *
 * A decision is asked for once for each layer of each step, so the way in is short and
 * inline: three positional arguments, a str whose hash Python keeps, a small int, an
 * ndarray.  All else takes a second look, in strategy_args.c and py_activation_memory.c.
 */
#ifndef MLSPY_STRATEGYP_H
#define MLSPY_STRATEGYP_H

#include "common/python_api.h"

#include "common/args.h"
#include "common/module_state.h"

#include "activation/layer_map.h"
#include "base/size.h"

/* ---- py_activation_memory.c ---- */

/* Bytes of an activation's elements by its shape and dtype, whatever memory it is in: an
 * ndarray, a torch tensor (of the meta device too), anything with both attributes.  -1
 * with TypeError, ValueError or CapacityError set. */
int mlspy_activation_bytes(PyObject *module, PyObject *activation, size_t *out);

/* ---- strategy_args.c ---- */

/* The arguments of should_checkpoint; the objects are borrowed. */
typedef struct mlspy_question {
    PyObject *layer_id, *activation;
    int64_t index; /* 0 or more */
} mlspy_question;

/* Any arguments: keywords, wrong counts and types, large numbers.  -1 with TypeError,
 * ValueError or CapacityError set. */
int mlspy_question_slowly(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *names, mlspy_question *q);

/* Raise what the core says.  Returns NULL, always. */
PyObject *mlspy_strategy_fail(PyObject *self, const mls_status *st);

/* An int of a setting or state, called `what`.  -1 with an exception set. */
int mlspy_strategy_number(PyObject *self, PyObject *object, const char *what,
                          int64_t *out);

/* Mark all names of a tuple; NULL: none.  -1 with TypeError or ValueError set. */
int mlspy_mark_layers(PyObject *self, PyObject *names, mls_layer_mark mark,
                      mls_layer_table *table);

/* New reference to a tuple of the names that have a mark, in their order. */
PyObject *mlspy_marked_layers(const mls_layer_table *table, mls_layer_mark mark);

/* ---- the short way in ---- */

/* As mlspy_activation_bytes for an ndarray, which needs no state; false where the product
 * of its sizes is beyond a size. */
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

/* An int of Python's that fits one digit and is not negative. */
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

/* -1 with an exception set. */
static inline int mlspy_take_question(PyObject *self, PyObject *const *args,
                                      Py_ssize_t nargs, PyObject *names,
                                      mlspy_question *q)
{
    if (nargs == 3 && names == NULL && PyUnicode_Check(args[0]) &&
        mlspy_small_index(args[2], &q->index)) {
        q->layer_id = args[0];
        q->activation = args[1];
        return 0;
    }
    return mlspy_question_slowly(self, args, nargs, names, q);
}

/* A str as the core's tables want it.  The hash is the one of plain str, whatever a
 * subclass thinks of itself: equal names have to have equal hashes. */
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

/* Bytes of the elements of `activation`.  An exact ndarray needs no module state; every
 * other object does.  -1 with an exception set. */
static inline int mlspy_take_bytes(PyObject *self, PyObject *activation, size_t *out)
{
    if (PyArray_CheckExact(activation) &&
        mlspy_ndarray_bytes((PyArrayObject *)activation, out)) {
        return 0;
    }
    PyObject *module = mlspy_module_of(Py_TYPE(self));
    return module == NULL ? -1 : mlspy_activation_bytes(module, activation, out);
}

#endif
