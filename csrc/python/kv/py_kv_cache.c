/* py_kv_cache: quantizes, dequantizes and rotates keys in callers' arrays; positions and
 * order of rings of other libraries. */
#include "arguments/args.h"
#include "array/array_alloc.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "kv/kv_args.h"

#include "kv/kv_quantize.h"
#include "kv/kv_ring.h"
#include "kv/rotate_keys.h"

/* ---- quantized caches ---- */

/* Read the bits of a code and the elements of a group. Returns -1 with an exception set;
 * the core checks the values. */
static int take_quantization(const mlspy_state *state, PyObject *bits, PyObject *group,
                             mls_quantized *out)
{
    size_t number;
    if (mlspy_take_kv_length(state, bits, "bits", &number) < 0 ||
        mlspy_take_kv_length(state, group, "group", &out->group) < 0) {
        return -1;
    }
    /* the core refuses 0; larger numbers must not wrap around to a valid one */
    out->bits = number <= 64 ? (unsigned)number : 0;
    return 0;
}

/* kv_quantized_lengths(length, bits, group) -> (32-bit words of codes, groups): the last
 * axis of the codes, and of scales and biases, for values whose last axis has `length`
 * elements */
PyObject *core_kv_quantized_lengths(mlspy_state *state, PyObject *const *args)
{
    mls_quantized q = {0};
    size_t length, words, groups;
    mls_status st;
    if (mlspy_take_kv_length(state, args[0], "length", &length) < 0 ||
        take_quantization(state, args[1], args[2], &q) < 0) {
        return NULL;
    }
    if (mls_quantized_lengths(length, q.bits, q.group, &words, &groups, &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return Py_BuildValue("nn", (Py_ssize_t)words, (Py_ssize_t)groups);
}

/* Operations of the same six arguments. */
typedef enum quantized_operation { QUANTIZE, DEQUANTIZE, LOSS } quantized_operation;

/* Run an operation without the GIL on (values, codes, scales, biases, bits, group).
 * Returns None, or for LOSS the tuple of its numbers; NULL with an exception set. */
static PyObject *run_quantization(mlspy_state *state, PyObject *const *args,
                                  quantized_operation operation)
{
    static const char *const names[] = {"values", "codes", "scales", "biases"};
    mlspy_view views[4] = {{.owner = NULL}};
    const mls_tensor *values = &views[0].tensor;
    mls_quantization_loss loss = {0};
    mls_quantized q;
    mls_status st;
    mls_code code = MLS_OK;
    PyObject *result = NULL;
    for (int i = 0; i < 4; i++) {
        /* quantizing writes all arrays but the values, dequantizing only the values */
        const bool is_written = operation == (i == 0 ? DEQUANTIZE : QUANTIZE);
        if (mlspy_view_for(state, args[i], names[i], is_written, &views[i]) < 0) {
            goto done;
        }
    }
    if (take_quantization(state, args[4], args[5], &q) < 0) {
        goto done;
    }
    q.codes = views[1].tensor;
    q.scales = views[2].tensor;
    q.biases = views[3].tensor;
    if (mlspy_check(state, mls_quantize_check(values, &q, &st), &st) < 0) {
        goto done;
    }
    PyThreadState *released = mlspy_leave_python(mlspy_bytes(values));
    switch (operation) {
    case QUANTIZE:
        code = mls_quantize(state->kernels, state->pool, &q, values, &st);
        break;
    case DEQUANTIZE:
        mls_dequantize(state->kernels, state->pool, values, &q);
        break;
    case LOSS:
        loss = mls_quantize_loss(state->kernels, values, &q);
        break;
    }
    mlspy_resume_python(released);
    result = operation == LOSS
                 ? Py_BuildValue("ddd", loss.largest, loss.squares, loss.value_squares)
                 : mlspy_none(state, code, &st);
done:
    mlspy_views_release(views, 4);
    return result;
}

/* kv_quantize(values, codes, scales, biases, bits, group): writes the three arrays, which
 * must not share memory with the values. ValueError: a value is not finite; the arrays
 * are then undefined. */
PyObject *core_kv_quantize(mlspy_state *state, PyObject *const *args)
{
    return run_quantization(state, args, QUANTIZE);
}

/* kv_dequantize(values, codes, scales, biases, bits, group): writes the values */
PyObject *core_kv_dequantize(mlspy_state *state, PyObject *const *args)
{
    return run_quantization(state, args, DEQUANTIZE);
}

/* kv_quantization_loss(values, codes, scales, biases, bits, group) -> largest difference,
 * sum of squared differences, sum of squared values; writes nothing */
PyObject *core_kv_quantization_loss(mlspy_state *state, PyObject *const *args)
{
    return run_quantization(state, args, LOSS);
}

/* ---- rings ---- */

PyObject *mlspy_ring_positions(const mls_kv_ring *ring)
{
    npy_intp capacity = (npy_intp)ring->slots.shape[ring->axis];
    PyObject *array = PyArray_SimpleNew(1, &capacity, NPY_INT64);
    if (array != NULL) {
        mls_kv_ring_positions(ring, PyArray_DATA((PyArrayObject *)array));
    }
    return array;
}

/* Read the three `numbers` of a ring: its `sinks` (the first tokens, which are never
 * evicted), the `length` in tokens appended so far, and the `shift` by which the slots
 * after the sinks are rotated (see mls_kv_ring_borrow). Returns -1 with an exception
 * set. */
static int take_ring(const mlspy_state *state, PyObject *const *numbers, size_t *sinks,
                     size_t *length, size_t *shift)
{
    return mlspy_take_kv_length(state, numbers[0], "sinks", sinks) < 0 ||
                   mlspy_take_kv_length(state, numbers[1], "length", length) < 0 ||
                   mlspy_take_kv_length(state, numbers[2], "shift", shift) < 0
               ? -1
               : 0;
}

/* kv_ring_positions(capacity, sinks, length, shift) -> int64 ndarray with the position of
 * each slot's token, or -1, after `length` tokens were appended; the slots after the
 * sinks are rotated by `shift` */
PyObject *core_kv_ring_positions(mlspy_state *state, PyObject *const *args)
{
    mls_tensor slots = {.rank = 2, .shape = {0, 1}};
    size_t sinks, length, shift;
    mls_kv_ring ring;
    mls_status st;
    if (mlspy_take_kv_length(state, args[0], "capacity", &slots.shape[0]) < 0 ||
        take_ring(state, args + 1, &sinks, &length, &shift) < 0) {
        return NULL;
    }
    if (mls_kv_ring_borrow(&ring, &slots, 0, sinks, length, shift, &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return mlspy_ring_positions(&ring);
}

/* Return a new array of the tokens of a ring, in the order of their positions; NULL with
 * an exception set. */
static PyObject *copy_ordered(const mlspy_state *state, const mls_kv_ring *ring)
{
    mls_tensor ordered_view = ring->slots;
    mlspy_view target;
    ordered_view.shape[ring->axis] = mls_kv_ring_length(ring);
    PyArray_Descr *descr = mlspy_descr_of_dtype(ordered_view.dtype);
    PyObject *array = descr == NULL ? NULL
                                    : mlspy_array_of(descr, ordered_view.rank,
                                                     ordered_view.shape, false);
    if (array == NULL || mlspy_view_of(state, array, "tokens", &target) < 0) {
        Py_XDECREF(array);
        return NULL;
    }
    PyThreadState *released = mlspy_leave_python(mlspy_bytes(&target.tensor));
    mls_kv_ring_copy_ordered(ring, state->kernels, &target.tensor);
    mlspy_resume_python(released);
    mlspy_view_release(&target);
    return array;
}

/* kv_ring_ordered(array, seq_axis, sinks, length, shift) -> new ndarray of the tokens in
 * the order of their positions, from the slots in `array` after `length` tokens were
 * appended */
PyObject *core_kv_ring_ordered(mlspy_state *state, PyObject *const *args)
{
    mlspy_view slots;
    size_t sinks, length, shift;
    int axis;
    mls_kv_ring ring;
    mls_status st;
    PyObject *array = NULL;
    if (mlspy_view_of(state, args[0], "array", &slots) < 0) {
        return NULL;
    }
    const mls_tensor *t = &slots.tensor;
    if (mlspy_take_kv_axis(state, args[1], "array", t->rank, t->shape, &axis) == 0 &&
        take_ring(state, args + 2, &sinks, &length, &shift) == 0 &&
        mlspy_check(state, mls_kv_ring_borrow(&ring, t, axis, sinks, length, shift, &st),
                    &st) == 0) {
        array = copy_ordered(state, &ring);
    }
    mlspy_view_release(&slots);
    return array;
}

/* ---- rotating keys ---- */

/* Read all arguments of rotate_keys but the arrays. `keys` is already viewed, because the
 * axis and the default of rotary_dim depend on its shape. Returns -1 with an exception
 * set. */
static int take_rotation(const mlspy_state *state, PyObject *const *args,
                         const mls_tensor *keys, mls_rotation *out)
{
    if (mlspy_take_double(args[2], "base", &out->base) < 0 ||
        mlspy_take_double(args[3], "scaling", &out->scaling) < 0 ||
        mlspy_take_kv_axis(state, args[6], "keys", keys->rank, keys->shape, &out->axis) <
            0) {
        return -1;
    }
    out->interleaved = args[4] == Py_True;
    if (args[5] == Py_None) {
        out->rotary_dim = keys->rank > 0 ? keys->shape[keys->rank - 1] : 0;
        return 0;
    }
    return mlspy_take_kv_length(state, args[5], "rotary_dim", &out->rotary_dim);
}

/* rotate_keys(keys, shifts, base, scaling, interleaved, rotary_dim | None, seq_axis, out)
 * -> out
 *
 * Moves keys with rotary position embedding by `shifts` positions, a contiguous ndarray
 * of int64 with one for each position or one for all. Writes to `out`, a writable array
 * or `keys` itself. `rotary_dim`: elements of the last axis that are rotated; None: all.
 * Pair i is turned by the angle shift * base**(-2 * i / rotary_dim) / scaling, in
 * radians. It is elements 2i and 2i + 1 if `interleaved` is True, else i and i +
 * rotary_dim / 2. */
PyObject *core_rotate_keys(mlspy_state *state, PyObject *const *args)
{
    mlspy_view views[3] = {{.owner = NULL}}; /* keys, shifts, out */
    const mls_tensor *keys = &views[0].tensor, *shifts = &views[1].tensor;
    const mls_tensor *out = &views[2].tensor;
    mls_rotation rotation = {0};
    mls_status st;
    PyObject *result = NULL;
    if (mlspy_view_of(state, args[0], "keys", &views[0]) < 0 ||
        take_rotation(state, args, keys, &rotation) < 0 ||
        mlspy_view_of(state, args[1], "shift", &views[1]) < 0 ||
        mlspy_view_writable(state, args[7], "out", &views[2]) < 0) {
        goto done;
    }
    if (shifts->dtype != MLS_I64 || shifts->rank != 1 || shifts->swapped ||
        !mls_tensor_is_contiguous(shifts)) {
        PyErr_SetString(PyExc_TypeError,
                        "shift must be contiguous int64 in one dimension");
        goto done;
    }
    rotation.shifts = (const int64_t *)(const void *)shifts->data;
    rotation.shift_count = shifts->shape[0];
    if (mlspy_check(state, mls_rotate_keys_check(out, keys, &rotation, &st), &st) == 0) {
        PyThreadState *released = mlspy_leave_python(mlspy_bytes(keys));
        mls_rotate_keys(state->kernels, state->pool, out, keys, &rotation);
        mlspy_resume_python(released);
        result = Py_NewRef(args[7]);
    }
done:
    mlspy_views_release(views, 3);
    return result;
}
