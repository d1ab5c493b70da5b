/* py_kv_transition: kv_move and kv_mask: source, `out=`, `dtype=`, padding, new arrays;
 * the case that returns the source.
 *
 * The public functions and their docstrings are in mlstate/kv/_transition.py and
 * _mask.py.
 *
 * The steps of a transition are: view the source, read and check the numbers, find or
 * allocate the target, encode the padding, move. Nothing is allocated before the request
 * was checked, and nothing can fail after the first write to the target, so that a
 * caller's `out` is untouched on every error.
 */
#include "arguments/args.h"
#include "array/array_alloc.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "kv/kv_args.h"

#include "base/memory.h"
#include "kv/attention_mask.h"
#include "kv/kv_transition.h"

#include <inttypes.h>

/* Zeroed memory of at least this size consists of untouched pages, so zero padding needs
 * no write. Below this size the allocator may have to clear the memory. */
enum { UNTOUCHED_BYTES = 32 << 20 };

/* ---- transitions ---- */

/* State of one transition; released by transition_fini. */
typedef struct transition {
    mls_kv_request request;
    mlspy_view source, target;
    double pad_value; /* value of the positions after the tokens */
    PyObject *pad;    /* the caller's object for it; borrowed */
    PyObject *dtype;  /* of the result, or None; borrowed */
    bool low_memory;  /* keep pages without tokens of a large new target untouched */
    bool is_zeroed;   /* the target reads as zeros already */
    PyObject *result; /* the array of the target; strong */
} transition;

/* Release a transition at any step. It starts zeroed, so members of later steps are
 * empty. */
static void transition_fini(transition *t)
{
    mlspy_view_release(&t->source);
    mlspy_view_release(&t->target);
    Py_CLEAR(t->result);
}

/* The public parameter names, for the core's messages. */
static const mls_kv_names parameter_names = {
    .source = "source_state",
    .target = "out",
    .target_length = "target_seq_length",
    .position = "current_position",
    .seq_axis = "seq_axis",
    .if_shorter = "use compact_kv_state to move to a shorter cache",
    .if_shared = "pass another buffer, or use KVState to change a cache in place"};
static const mls_mask_names mask_parameter_names = {.seq_length = "seq_length",
                                                    .attention_size = "attention_size",
                                                    .sinks = "sinks",
                                                    .position = "current_position",
                                                    .rows = "rows"};

/* Read a sequence axis, which may be negative. A bool is not one, although it has
 * __index__. Returns -1 with TypeError or CapacityError set. */
static int take_seq_axis(const mlspy_state *state, PyObject *object, int64_t *out)
{
    if (PyBool_Check(object)) {
        return MLSPY_REFUSE(PyExc_TypeError, "seq_axis must be an integer, got bool");
    }
    return mlspy_take_int64(state, object, "seq_axis", out);
}

/* The items of a KVMove of mlstate/kv/_move.py. */
enum { TARGET_LENGTH, POSITION, SEQ_AXIS, COMPACT, PAD_VALUE, DTYPE, LOW_MEMORY, ITEMS };

/* Read the numbers of a KVMove, and check them against `shape`, the source's, with `rank`
 * axes. Without a position the source is full. Sets all of `request` but `pad` and
 * `memory`. Returns -1 with an exception set. */
static int take_request(const mlspy_state *state, PyObject *move, int rank,
                        const size_t *shape, mls_kv_request *request)
{
    mls_status st;
    int64_t seq_axis;
    if (!PyTuple_Check(move) || PyTuple_GET_SIZE(move) != ITEMS) {
        return MLSPY_REFUSE(PyExc_TypeError, "move must be a KVMove");
    }
    request->names = &parameter_names;
    request->kind =
        PyTuple_GET_ITEM(move, COMPACT) == Py_True ? MLS_KV_COMPACT : MLS_KV_EXPAND;
    PyObject *position = PyTuple_GET_ITEM(move, POSITION);
    if (take_seq_axis(state, PyTuple_GET_ITEM(move, SEQ_AXIS), &seq_axis) < 0 ||
        mlspy_take_int64(state, PyTuple_GET_ITEM(move, TARGET_LENGTH),
                         "target_seq_length", &request->target_length) < 0 ||
        (position != Py_None &&
         mlspy_take_int64(state, position, "current_position", &request->position) < 0)) {
        return -1;
    }
    if (mls_kv_find_axis(parameter_names.source, rank, shape, parameter_names.seq_axis,
                         seq_axis, &request->axis, &st) != MLS_OK) {
        return mlspy_check(state, st.code, &st);
    }
    if (position == Py_None) {
        request->position = (int64_t)shape[request->axis];
    }
    return mlspy_check(state, mls_kv_check(rank, shape, *request, &st), &st);
}

/* View the source, and read and check all items of a KVMove. Returns -1 with an exception
 * set; the caller calls transition_fini. */
static int take_move(const mlspy_state *state, PyObject *source, PyObject *move,
                     transition *t)
{
    const mls_tensor *tensor = &t->source.tensor;
    if (mlspy_view_for(state, source, "source_state", false /* read-only */, &t->source) <
            0 ||
        take_request(state, move, tensor->rank, tensor->shape, &t->request) < 0) {
        return -1;
    }
    t->dtype = PyTuple_GET_ITEM(move, DTYPE);
    t->pad = PyTuple_GET_ITEM(move, PAD_VALUE);
    const int low_memory = PyObject_IsTrue(PyTuple_GET_ITEM(move, LOW_MEMORY));
    t->low_memory = low_memory > 0;
    return low_memory < 0 ? -1 : mlspy_take_double(t->pad, "pad_value", &t->pad_value);
}

/* The dtype of a result and the descriptor to allocate it with. If the source is not an
 * ndarray, NumPy may have no dtype for it: the result is then unsigned integers with the
 * same bits, and the integration converts them. */
typedef struct result_kind {
    mls_dtype dtype;
    PyArray_Descr *descr; /* strong reference */
} result_kind;

/* Allocate an ndarray of the target's shape, and view it. If the padding is 0, one of at
 * least UNTOUCHED_BYTES is zeroed, and stays untouched except where tokens are written;
 * with low_memory the system is advised to use small pages for it. Returns -1 with an
 * exception set. */
static int allocate_target(const mlspy_state *state, const result_kind *kind,
                           transition *t)
{
    mls_tensor shape_view = t->source.tensor;
    const int rank = shape_view.rank;
    mls_status st;
    shape_view.shape[t->request.axis] = (size_t)t->request.target_length;
    /* NumPy would refuse too large a shape with a less helpful message */
    if (mlspy_check(
            state,
            mls_tensor_init(&shape_view, NULL, kind->dtype, rank, shape_view.shape, &st),
            &st) < 0) {
        return -1;
    }
    const size_t bytes = mlspy_bytes(&shape_view);
    t->request.memory = MLS_KV_FRESH;
    /* +0.0 is all zero bits in every dtype; -0.0 is not */
    t->is_zeroed =
        t->pad_value == 0.0 && !signbit(t->pad_value) && bytes >= UNTOUCHED_BYTES;
    Py_INCREF(kind->descr); /* consumed */
    t->result = mlspy_array_of(kind->descr, rank, shape_view.shape, t->is_zeroed);
    if (t->result == NULL) {
        return -1;
    }
    if (t->is_zeroed && t->low_memory) {
        t->request.memory = MLS_KV_SPARSE;
        mls_advise_pages(PyArray_DATA((PyArrayObject *)t->result), bytes,
                         false /* no huge pages */);
    }
    return mlspy_view_writable(state, t->result, "the new state", &t->target);
}

/* Complete `out` for a source that is not an ndarray. `out->dtype` is the source's;
 * `dtype`, a name or None, replaces it. It is a name because NumPy may have no descriptor
 * for it. Sets `out->descr` to unsigned integers of the same size. Returns -1 with an
 * exception set. */
static int foreign_kind(const mlspy_state *state, PyObject *dtype, result_kind *out)
{
    /* by item size; covers every dtype of the core */
    static const int unsigned_of[] = {
        [1] = NPY_UINT8, [2] = NPY_UINT16, [4] = NPY_UINT32, [8] = NPY_UINT64};
    mls_str name;
    if (dtype != Py_None && mlspy_take_text(dtype, "dtype", &name) < 0) {
        return -1;
    }
    if (dtype != Py_None && !mls_dtype_from_name(name.data, name.length, &out->dtype)) {
        return MLSPY_FAIL(state, MLS_E_DTYPE, "dtype %.60s is not supported", name.data);
    }
    out->descr = PyArray_DescrFromType(unsigned_of[mls_dtype_of(out->dtype)->item_bytes]);
    return out->descr == NULL ? -1 : 0;
}

/* Set `out` to the dtype of a new result: the caller's `t->dtype`, or the source's if
 * that is None. Returns -1 with an exception set, CompatibilityError if the source does
 * not convert; then `out` holds no reference. */
static int take_kind(const mlspy_state *state, PyObject *source, const transition *t,
                     result_kind *out)
{
    mls_status st;
    *out = (result_kind){.dtype = t->source.tensor.dtype};
    if (!PyArray_Check(source)) {
        if (foreign_kind(state, t->dtype, out) < 0) {
            return -1;
        }
    } else if (t->dtype == Py_None) {
        out->descr = PyArray_DESCR((PyArrayObject *)source);
        Py_INCREF(out->descr);
    } else {
        out->descr = mlspy_descr_of_object(state, t->dtype, &out->dtype);
        if (out->descr == NULL) {
            return -1;
        }
    }
    /* the shapes are equal, so only the dtypes are checked */
    mls_tensor target = t->source.tensor;
    target.dtype = out->dtype;
    const int failed =
        mlspy_check(state, mls_copy_check(&target, &t->source.tensor, "dtype", &st), &st);
    if (failed < 0) {
        Py_CLEAR(out->descr);
    }
    return failed;
}

/* Convert the caller's dtype, a name or an object that NumPy accepts, to a dtype of the
 * core. The core's own names need no descriptor, which NumPy may not have. Returns -1
 * with an exception set. */
static int take_dtype(const mlspy_state *state, PyObject *object, mls_dtype *out)
{
    const int is_named = mlspy_dtype_named(object, out);
    if (is_named != 0) {
        return is_named < 0 ? -1 : 0;
    }
    PyArray_Descr *descr = mlspy_descr_of_object(state, object, out);
    Py_XDECREF(descr);
    return descr == NULL ? -1 : 0;
}

/* Set the target of a transition to the caller's `out`, or to a new array if that is
 * None; the view of one of unsigned integers (foreign_kind) has the dtype of its bits.
 * All errors in `out` are found here, before it is written to. Returns -1 with an
 * exception set. */
static int take_target(const mlspy_state *state, PyObject *source, PyObject *out,
                       transition *t)
{
    if (out == Py_None) {
        result_kind kind;
        if (take_kind(state, source, t, &kind) < 0) {
            return -1;
        }
        const int failed = allocate_target(state, &kind, t);
        Py_DECREF(kind.descr);
        t->target.tensor.dtype = kind.dtype;
        return failed;
    }
    if (mlspy_view_for(state, out, "out", true /* writable */, &t->target) < 0) {
        return -1;
    }
    t->result = Py_NewRef(out);
    mls_status st;
    mls_dtype target_dtype = t->target.tensor.dtype;
    if (t->dtype != Py_None && take_dtype(state, t->dtype, &target_dtype) < 0) {
        return -1;
    }
    if (target_dtype != t->target.tensor.dtype) {
        return MLSPY_FAIL(
            state, MLS_E_DTYPE, "out is %s, but dtype asks for %s: pass one of them",
            mls_dtype_of(t->target.tensor.dtype)->name, mls_dtype_of(target_dtype)->name);
    }
    return mlspy_check(
        state, mls_kv_check_target(&t->target.tensor, &t->source.tensor, t->request, &st),
        &st);
}

/* Check that a double has the value of the padding, which has been encoded, if it is an
 * integer and the target has integers. Returns -1 with ValueError or MemoryError set. */
static int check_pad(const transition *t)
{
    const mls_dtype_kind kind = mls_dtype_of(t->target.tensor.dtype)->kind;
    if ((kind != MLS_KIND_INT && kind != MLS_KIND_UINT) || !PyIndex_Check(t->pad)) {
        return 0;
    }
    PyObject *number = PyNumber_Index(t->pad);
    if (number == NULL) {
        /* an array of a float, which the conversion has read */
        const bool is_float = PyErr_ExceptionMatches(PyExc_TypeError);
        if (is_float) {
            PyErr_Clear();
        }
        return is_float ? 0 : -1;
    }
    PyObject *rounded = PyLong_FromDouble(t->pad_value);
    const int same =
        rounded == NULL ? -1 : PyObject_RichCompareBool(number, rounded, Py_EQ);
    if (same == 0) {
        PyErr_Format(PyExc_ValueError,
                     "pad_value %S is not exactly a float: pass another one, or fill "
                     "the positions after the tokens",
                     number);
    }
    Py_XDECREF(rounded);
    Py_DECREF(number);
    return same == 1 ? 0 : -1;
}

/* Encode the padding and move the tokens. The views hold references, so the memory stays
 * valid while other threads run. Returns -1 with an exception set, and nothing
 * written. */
static int run_transition(const mlspy_state *state, transition *t)
{
    mls_status st;
    mls_element pad;
    if (mlspy_check(state, mls_element_encode(t->pad_value, &t->target.tensor, &pad, &st),
                    &st) < 0 ||
        check_pad(t) < 0) {
        return -1;
    }
    /* NULL: the target is padded already */
    t->request.pad = t->is_zeroed ? NULL : &pad;
    PyThreadState *released = mlspy_leave_python(mlspy_bytes(&t->target.tensor));
    mls_kv_move(state->kernels, state->pool, &t->target.tensor, &t->source.tensor,
                &t->request);
    mlspy_resume_python(released);
    return 0;
}

/* Return whether nothing has to be done: same length, every position in use, no `dtype`,
 * no `out`. The result is then the source itself; a caller that wants a copy passes
 * `out`. */
static bool is_identity(const transition *t, PyObject *out)
{
    /* compacting never returns the source itself */
    const int64_t length = (int64_t)t->source.tensor.shape[t->request.axis];
    return t->request.kind == MLS_KV_EXPAND && t->dtype == Py_None && out == Py_None &&
           t->request.target_length == length && t->request.position == length;
}

/* kv_move(source, move, out | None) -> ndarray, `out`, or the source itself
 *
 * Moves a cache as a KVMove describes: copies its tokens to the start of the result, and
 * pads the rest. If the source is not an ndarray, the move's dtype is a name and the
 * result is unsigned integers.
 */
PyObject *core_kv_move(mlspy_state *state, PyObject *const *args)
{
    PyObject *source = args[0], *out = args[2];
    transition t = {.low_memory = false};
    PyObject *result = NULL;
    if (take_move(state, source, args[1], &t) == 0) {
        if (is_identity(&t, out)) {
            result = Py_NewRef(source);
        } else if (take_target(state, source, out, &t) == 0 &&
                   run_transition(state, &t) == 0) {
            result = Py_NewRef(t.result);
        }
    }
    transition_fini(&t);
    return result;
}

/* Read `*rank` dimensions from a sequence of non-negative ints; `label` names it in
 * messages. `shape` has MLS_MAX_RANK entries; more dimensions are refused. Returns -1
 * with an exception set: CompatibilityError for them or a negative number. */
static int take_shape(const mlspy_state *state, PyObject *object, const char *label,
                      int *rank, size_t *shape)
{
    mls_status st;
    /* a copy, because an item's __index__ may change the caller's list */
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s must be a sequence of integers, got %.100s",
                         label, Py_TYPE(object)->tp_name);
        }
        return -1;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(items);
    mls_code code = MLS_OK;
    int failed = 0;
    if (count > MLS_MAX_RANK) {
        code = mls_fail(&st, MLS_E_SHAPE, "%s has %zd dimensions, not %d to %d", label,
                        count, MLS_KV_MIN_RANK, MLS_KV_MAX_RANK);
    }
    for (Py_ssize_t i = 0; i < count && code == MLS_OK && !failed; i++) {
        int64_t length = 0;
        failed = mlspy_take_int64(state, PyTuple_GET_ITEM(items, i), label, &length);
        if (length < 0) {
            code = mls_fail(&st, MLS_E_SHAPE, "%s has the negative dimension %" PRId64,
                            label, length);
        }
        shape[i] = (size_t)length;
    }
    Py_DECREF(items);
    *rank = (int)count;
    return failed < 0 ? -1 : mlspy_check(state, code, &st);
}

int mlspy_take_kv_axis(const mlspy_state *state, PyObject *seq_axis, const char *label,
                       int rank, const size_t *shape, int *axis)
{
    int64_t requested;
    mls_status st;
    if (take_seq_axis(state, seq_axis, &requested) < 0) {
        return -1;
    }
    return mlspy_check(state,
                       mls_kv_find_axis(label, rank, shape, parameter_names.seq_axis,
                                        requested, axis, &st),
                       &st);
}

int mlspy_take_kv_shape(const mlspy_state *state, PyObject *object, PyObject *seq_axis,
                        const char *label, int *rank, size_t *shape, int *axis)
{
    size_t dims[MLS_MAX_RANK];
    if (take_shape(state, object, label, rank, dims) < 0 ||
        mlspy_take_kv_axis(state, seq_axis, label, *rank, dims, axis) < 0) {
        return -1;
    }
    /* mls_kv_find_axis refuses more than MLS_KV_MAX_RANK dimensions */
    memcpy(shape, dims, (size_t)*rank * sizeof shape[0]);
    return 0;
}

int mlspy_take_kv_length(const mlspy_state *state, PyObject *object, const char *label,
                         size_t *out)
{
    int64_t length;
    if (mlspy_take_int64(state, object, label, &length) < 0) {
        return -1;
    }
    /* the core's sizes are unsigned, so negative lengths are refused here */
    if (length < 0) {
        return MLSPY_FAIL(state, MLS_E_CAPACITY, "%s %" PRId64 " is negative", label,
                          length);
    }
    *out = (size_t)length;
    return 0;
}

/* kv_axis(shape, seq_axis, label) -> the sequence axis of a cache of `shape`, counted
 * from 0; the text `label` names the cache in errors */
PyObject *core_kv_axis(mlspy_state *state, PyObject *const *args)
{
    size_t shape[MLS_KV_MAX_RANK];
    mls_str label;
    int rank, axis;
    if (mlspy_take_text(args[2], "label", &label) < 0 ||
        mlspy_take_kv_shape(state, args[0], args[1], label.data, &rank, shape, &axis) <
            0) {
        return NULL;
    }
    return PyLong_FromLong(axis);
}

/* kv_check(shape, move) -> None, or the error of kv_move
 *
 * For callers that check before they have an array, or whose array is elsewhere. */
PyObject *core_kv_check(mlspy_state *state, PyObject *const *args)
{
    mls_kv_request request = {.kind = MLS_KV_EXPAND};
    int rank;
    size_t shape[MLS_MAX_RANK];
    if (take_shape(state, args[0], parameter_names.source, &rank, shape) < 0 ||
        take_request(state, args[1], rank, shape, &request) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* kv_check_shapes(source, target, seq_axis): raises the error of a move from one shape to
 * another; checks only the shapes, without a position */
PyObject *core_kv_check_shapes(mlspy_state *state, PyObject *const *args)
{
    mls_status st;
    int source_rank, target_rank;
    size_t source[MLS_MAX_RANK], target[MLS_MAX_RANK];
    int64_t seq_axis;
    if (take_shape(state, args[0], "the source state's shape", &source_rank, source) <
            0 ||
        take_shape(state, args[1], "the target state's shape", &target_rank, target) <
            0 ||
        take_seq_axis(state, args[2], &seq_axis) < 0) {
        return NULL;
    }
    return mlspy_none(state,
                      mls_kv_check_shapes(source_rank, source, target_rank, target,
                                          parameter_names.seq_axis, seq_axis, &st),
                      &st);
}

/* ---- masks ---- */

/* Read the rows of a mask: a pair (start, stop), None for all, or True for the row of the
 * position, which the request already has. Returns -1 with an exception set. */
static int take_mask_rows(const mlspy_state *state, PyObject *rows, mls_mask_request *m)
{
    m->end_row = m->seq_length;
    if (rows == Py_None) {
        return 0;
    }
    if (rows == Py_True) {
        m->first_row = m->position;
        /* without overflow for any position: it is checked later */
        m->end_row = m->position < INT64_MAX ? m->position + 1 : m->position;
        return 0;
    }
    if (!PyTuple_Check(rows) || PyTuple_GET_SIZE(rows) != 2) {
        return MLSPY_REFUSE(PyExc_TypeError, "rows must be a pair (start, stop)");
    }
    PyObject *start = PyTuple_GET_ITEM(rows, 0), *stop = PyTuple_GET_ITEM(rows, 1);
    if (mlspy_take_int64(state, start, "rows[0]", &m->first_row) < 0) {
        return -1;
    }
    return mlspy_take_int64(state, stop, "rows[1]", &m->end_row);
}

/* Read and check the numbers of a mask, the first five arguments of kv_mask. Returns -1
 * with an exception set. */
static int take_mask(const mlspy_state *state, PyObject *const *args, mls_mask_request *m)
{
    mls_status st;
    if (mlspy_take_int64(state, args[0], "seq_length", &m->seq_length) < 0 ||
        mlspy_take_int64(state, args[1], "attention_size", &m->attention_size) < 0 ||
        mlspy_take_int64(state, args[2], "current_position", &m->position) < 0 ||
        mlspy_take_int64(state, args[3], "sinks", &m->sinks) < 0 ||
        take_mask_rows(state, args[4], m) < 0) {
        return -1;
    }
    return mlspy_check(state, mls_mask_check(m, &mask_parameter_names, &st), &st);
}

/* Return a new array of four dimensions for a mask, with undefined elements. NULL with an
 * exception set: CapacityError if it exceeds the address space. */
static PyObject *new_mask(const mlspy_state *state, PyObject *dtype, const size_t *shape)
{
    mls_dtype mask_dtype;
    mls_tensor mask_view;
    mls_status st;
    PyArray_Descr *descr = mlspy_descr_of_object(state, dtype, &mask_dtype);
    if (descr == NULL) {
        return NULL;
    }
    if (mls_tensor_init(&mask_view, NULL, mask_dtype, 4, shape, &st) != MLS_OK) {
        Py_DECREF(descr);
        return mlspy_raise(state, &st, NULL);
    }
    return mlspy_array_of(descr, 4, shape, false);
}

/* Return a new reference to the mask to write, with its view in `view`: `out` after a
 * check, or a new array of `dtype` if it is None. The two leading dimensions are 1. NULL
 * with an exception set, and `view` released. */
static PyObject *mask_target(const mlspy_state *state, PyObject *dtype, PyObject *out,
                             const mls_mask_request *m, mlspy_view *view)
{
    const size_t shape[4] = {1, 1, (size_t)(m->end_row - m->first_row),
                             (size_t)m->seq_length};
    PyObject *result = out == Py_None ? new_mask(state, dtype, shape) : Py_NewRef(out);
    if (result == NULL || mlspy_view_writable(state, result, "out", view) < 0) {
        Py_XDECREF(result);
        return NULL;
    }
    mls_status st;
    /* `out` must have exactly this shape; a new array always has it */
    mls_tensor expected = view->tensor;
    expected.rank = 4;
    memcpy(expected.shape, shape, sizeof shape);
    mls_code code = mls_copy_check(&view->tensor, &expected, "out", &st);
    if (code == MLS_OK && (int)view->tensor.dtype >= MLS_CONVERTIBLE) {
        code = mls_fail(&st, MLS_E_DTYPE, "a mask is made of floats, not of dtype %s",
                        mls_dtype_of(view->tensor.dtype)->name);
    }
    if (mlspy_check(state, code, &st) < 0) {
        mlspy_view_release(view);
        Py_CLEAR(result);
    }
    return result;
}

/* kv_mask(seq_length, attention_size, position, sinks, (start, stop) | None | True,
 * dtype, fill, out | None) -> the rows of an attention mask
 *
 * Row `i` is 0 where token `i` attends to a token: itself, `attention_size` earlier ones,
 * and the first `sinks` tokens; elsewhere it is `fill`. The rows are start .. stop - 1;
 * None: all; True: the row of `position`. The result is `out`, or a new array of `dtype`.
 * The fill is encoded before the first element is written, so `out` is unchanged if the
 * dtype cannot hold it.
 */
PyObject *core_kv_mask(mlspy_state *state, PyObject *const *args)
{
    mls_mask_request m = {0};
    double number;
    mlspy_view view = {0};
    mls_element fill;
    mls_status st;
    if (take_mask(state, args, &m) < 0 ||
        mlspy_take_double(args[6], "fill", &number) < 0) {
        return NULL;
    }
    PyObject *result = mask_target(state, args[5], args[7], &m, &view);
    if (result == NULL) {
        return NULL;
    }
    if (mlspy_check(state, mls_element_encode(number, &view.tensor, &fill, &st), &st) <
        0) {
        Py_CLEAR(result);
    } else {
        MLSPY_WITHOUT_GIL(mls_mask_rows(state->kernels, &view.tensor, (size_t)m.first_row,
                                        (size_t)m.attention_size, (size_t)m.sinks, fill));
    }
    mlspy_view_release(&view);
    return result;
}
