/* strategyp: what the bindings of strategies share.
 *
 * A decision is asked for once for each layer of each step, so the way in is short and
 * inline: three positional arguments, a str whose hash Python keeps, a small int, an
 * ndarray.  All else takes a second look, in question.c and py_activation.c.
 */
#ifndef STRATEGYP_H
#define STRATEGYP_H

#include "mlsp.h"

#include "layer_table.h"
#include "size.h"

/* ---- py_activation.c ---- */

/* Bytes of an activation's elements by its shape and dtype, whatever memory it is in: an
 * ndarray, a torch tensor (of the meta device too), anything with both attributes.  -1
 * with TypeError, ValueError or CapacityError set. */
int mlsp_activation_bytes(const mlsp_state *state, PyObject *activation, size_t *out);

/* ---- question.c ---- */

/* The arguments of should_checkpoint; the objects are borrowed. */
typedef struct mlsp_question {
    PyObject *layer_id, *activation;
    int64_t index; /* 0 or more */
} mlsp_question;

/* Any arguments: keywords, wrong counts and types, large numbers.  -1 with TypeError,
 * ValueError or CapacityError set. */
int mlsp_question_slowly(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *names, mlsp_question *q);

/* The module's state by one of its types (borrowed); NULL with TypeError set. */
const mlsp_state *mlsp_strategy_state(PyTypeObject *type);

/* Raise what the core says.  Returns NULL, always. */
PyObject *mlsp_strategy_fail(PyObject *self, const mls_status *st);

/* An int of a setting or state, called `what`.  -1 with an exception set. */
int mlsp_strategy_number(PyObject *self, PyObject *object, const char *what,
                         int64_t *out);

/* The state of one that only counts: a tuple of one int.  -1 with an exception set. */
int mlsp_strategy_count(PyObject *self, PyObject *state, int64_t *out);

/* Check that a state is a tuple, as PyArg_ParseTuple wants it.  -1 with TypeError set. */
int mlsp_check_strategy_state(PyObject *state);

/* Mark all names of a tuple.  -1 with TypeError or ValueError set. */
int mlsp_mark_layers(PyObject *self, PyObject *names, mls_layer_mark mark,
                     mls_layer_table *table);

/* New reference to a tuple of the names that have a mark, in their order. */
PyObject *mlsp_marked_layers(const mls_layer_table *table, mls_layer_mark mark);

/* The last act of a tp_dealloc. */
void mlsp_strategy_free(PyObject *self);

/* ---- the short way in ---- */

/* What help() and inspect.signature show of every should_checkpoint, which is called with
 * positional arguments or keywords. */
#define MLSP_SHOULD_CHECKPOINT(function)                                                 \
    {"should_checkpoint", (PyCFunction)(void (*)(void))(function),                       \
     METH_FASTCALL | METH_KEYWORDS,                                                      \
     "should_checkpoint($self, /, layer_id, activation, layer_index)\n--\n\n"            \
     "Decide whether to drop the activation of a layer and compute it again.\n\n"        \
     "Parameters\n----------\n"                                                          \
     "layer_id : str\n    Name of the layer.\n"                                          \
     "activation : ndarray, torch.Tensor or anything with a shape and a dtype\n"         \
     "    Its elements are not read. Strategies that know no sizes take None "           \
     "too.\n"                                                                            \
     "layer_index : int\n    Place of the layer in the network, from 0.\n\n"             \
     "Returns\n-------\n"                                                                \
     "bool\n    True: the layer is to be checkpointed.\n\n"                              \
     "Raises\n------\n"                                                                  \
     "TypeError\n    A wrong type; the text names what was given.\n"                     \
     "ValueError\n    A negative index, or a shape that is none.\n"                      \
     "CapacityError\n    A number beyond 64 bits."}

/* What every strategy has besides: reset, and the state for copies and pickles. */
#define MLSP_STATE_METHODS(reset, state, restore)                                        \
    {"reset", (PyCFunction)(void (*)(void))(reset), METH_NOARGS,                         \
     "reset($self, /)\n--\n\nForget what was counted; settings stay."},                  \
        {"_state", (PyCFunction)(void (*)(void))(state), METH_NOARGS,                    \
         "_state($self, /)\n--\n\nWhat changed since the constructor, as a tuple."},     \
        {"_restore", (PyCFunction)(void (*)(void))(restore), METH_O,                     \
         "_restore($self, state, /)\n--\n\nPut back what _state returned."}

/* As mlsp_activation_bytes for an ndarray, which needs no state; false where the product
 * of its sizes is beyond a size. */
static inline bool mlsp_ndarray_bytes(PyArrayObject *array, size_t *out)
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
static inline bool mlsp_small_index(PyObject *object, int64_t *out)
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
static inline int mlsp_take_question(PyObject *self, PyObject *const *args,
                                     Py_ssize_t nargs, PyObject *names, mlsp_question *q)
{
    if (nargs == 3 && names == NULL && PyUnicode_Check(args[0]) &&
        mlsp_small_index(args[2], &q->index)) {
        q->layer_id = args[0];
        q->activation = args[1];
        return 0;
    }
    return mlsp_question_slowly(self, args, nargs, names, q);
}

/* A str as the core's tables want it.  The hash is the one of plain str, whatever a
 * subclass thinks of itself: equal names have to have equal hashes. */
static inline int mlsp_take_key(PyObject *layer_id, mls_layer_key *out)
{
    if (PyUnicode_IS_COMPACT_ASCII(layer_id)) {
        out->name.data = (const char *)PyUnicode_1BYTE_DATA(layer_id);
        out->name.length = (size_t)PyUnicode_GET_LENGTH(layer_id);
    } else if (mlsp_take_text(layer_id, "layer_id", &out->name) < 0) {
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

/* The size of an activation; NumPy's arrays without asking for the module's state. */
static inline int mlsp_take_bytes(PyObject *self, PyObject *activation, size_t *out)
{
    if (PyArray_Check(activation) &&
        mlsp_ndarray_bytes((PyArrayObject *)activation, out)) {
        return 0;
    }
    const mlsp_state *state = mlsp_strategy_state(Py_TYPE(self));
    return state == NULL ? -1 : mlsp_activation_bytes(state, activation, out);
}

/* ---- py_memory_aware.c ---- */

/* Add its type to the module.  -1 with an exception set. */
int mlsp_memory_aware_add(PyObject *module);

#endif
