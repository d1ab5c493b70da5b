/* py_kv_cache: quantized caches and rings in the arrays of a mlstate.kv.CacheState. */
#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "kv/kv_bindings.h"

#include "kv/kv_quantize.h"
#include "kv/kv_rolling.h"
#include "kv/kv_transition.h"

/* ---- quantized caches ---- */

/* Read bits and group. Returns -1 with an exception set. */
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

/* kv_quantized_lengths(length, bits, group) -> last axis of (codes, scales and biases) */
static PyObject *kv_quantized_lengths(PyObject *module, PyObject *const *args,
                                      Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_quantized q = {0};
    size_t length, words, groups;
    mls_status st;
    if (mlspy_take_count("kv_quantized_lengths", 3, count) < 0 ||
        mlspy_take_kv_length(state, args[0], "length", &length) < 0 ||
        take_quantization(state, args[1], args[2], &q) < 0) {
        return NULL;
    }
    if (mls_quantized_lengths(length, q.bits, q.group, &words, &groups, &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return Py_BuildValue("nn", (Py_ssize_t)words, (Py_ssize_t)groups);
}

/* The four arrays of a call; released by arrays_fini. */
typedef struct quantized_arrays {
    mlspy_view values, codes, scales, biases;
    mls_quantized quantized; /* borrows the views */
} quantized_arrays;

/* Release the views; views that were not taken are empty. */
static void arrays_fini(quantized_arrays *a)
{
    mlspy_view_release(&a->values);
    mlspy_view_release(&a->codes);
    mlspy_view_release(&a->scales);
    mlspy_view_release(&a->biases);
}

typedef int take_view(const mlspy_state *state, PyObject *array, const char *what,
                      mlspy_view *out);

/* Read the arguments of the two functions below and check them. On failure returns -1
 * with an exception set; the caller calls arrays_fini in any case. */
static int take_arrays(const mlspy_state *state, PyObject *const *args, bool quantizes,
                       quantized_arrays *a)
{
    take_view *const source = quantizes ? mlspy_view_of : mlspy_view_writable;
    take_view *const target = quantizes ? mlspy_view_writable : mlspy_view_of;
    mls_status st;
    if (source(state, args[0], "values", &a->values) < 0 ||
        target(state, args[1], "codes", &a->codes) < 0 ||
        target(state, args[2], "scales", &a->scales) < 0 ||
        target(state, args[3], "biases", &a->biases) < 0 ||
        take_quantization(state, args[4], args[5], &a->quantized) < 0) {
        return -1;
    }
    a->quantized.codes = a->codes.tensor;
    a->quantized.scales = a->scales.tensor;
    a->quantized.biases = a->biases.tensor;
    if (mls_quantize_check(&a->values.tensor, &a->quantized, &st) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    return 0;
}

/* Quantize or dequantize without the GIL. Returns None, or NULL with an exception set. */
static PyObject *run_quantization(PyObject *module, PyObject *const *args, bool quantizes)
{
    const mlspy_state *state = mlspy_state_of(module);
    quantized_arrays a = {0};
    mls_code code = MLS_OK;
    mls_status st;
    if (take_arrays(state, args, quantizes, &a) < 0) {
        arrays_fini(&a);
        return NULL;
    }
    const mls_tensor *values = &a.values.tensor;
    size_t bytes = 0;
    (void)mls_tensor_bytes(values, &bytes); /* the array exists: no overflow */
    PyThreadState *released = mlspy_leave_python(bytes);
    if (quantizes) {
        code = mls_quantize(state->kernels, state->pool, &a.quantized, values, &st);
    } else {
        mls_dequantize(state->kernels, state->pool, values, &a.quantized);
    }
    mlspy_resume_python(released);
    arrays_fini(&a);
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    Py_RETURN_NONE;
}

/* kv_quantize(values, codes, scales, biases, bits, group): writes the three arrays, which
 * must not share memory with the values */
static PyObject *kv_quantize(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (mlspy_take_count("kv_quantize", 6, count) < 0) {
        return NULL;
    }
    return run_quantization(module, args, true);
}

/* kv_dequantize(values, codes, scales, biases, bits, group): writes the values */
static PyObject *kv_dequantize(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (mlspy_take_count("kv_dequantize", 6, count) < 0) {
        return NULL;
    }
    return run_quantization(module, args, false);
}

/* ---- rings ---- */

/* kv_ring_positions(capacity, sinks, length) -> int64 ndarray, as RollingBuffer's */
static PyObject *kv_ring_positions(PyObject *module, PyObject *const *args,
                                   Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_tensor slots = {.rank = 2, .shape = {0, 1}};
    size_t sinks, length;
    mls_kv_ring ring;
    mls_status st;
    if (mlspy_take_count("kv_ring_positions", 3, count) < 0 ||
        mlspy_take_kv_length(state, args[0], "capacity", &slots.shape[0]) < 0 ||
        mlspy_take_kv_length(state, args[1], "sinks", &sinks) < 0 ||
        mlspy_take_kv_length(state, args[2], "length", &length) < 0) {
        return NULL;
    }
    if (mls_kv_ring_borrow(&ring, &slots, 0, sinks, length, &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    npy_intp capacity = (npy_intp)slots.shape[0];
    PyObject *array = PyArray_SimpleNew(1, &capacity, NPY_INT64);
    if (array != NULL) {
        mls_kv_ring_positions(&ring, PyArray_DATA((PyArrayObject *)array));
    }
    return array;
}

/* Return a new array for the tokens of a ring, and view it. */
static PyObject *new_ordered(const mlspy_state *state, const mls_kv_ring *ring,
                             mlspy_view *view)
{
    npy_intp shape[MLS_KV_MAX_RANK];
    for (int axis = 0; axis < ring->slots.rank; axis++) {
        shape[axis] = (npy_intp)ring->slots.shape[axis];
    }
    shape[ring->axis] = (npy_intp)mls_kv_ring_length(ring);
    PyArray_Descr *descr = mlspy_descr_of_dtype(ring->slots.dtype);
    if (descr == NULL) {
        return NULL;
    }
    PyObject *array = PyArray_Empty(ring->slots.rank, shape, descr, 0); /* steals descr */
    if (array != NULL && mlspy_view_of(state, array, "tokens", view) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* kv_ring_ordered(array, seq_axis, sinks, length) -> new ndarray of the tokens in order
 */
static PyObject *kv_ring_ordered(PyObject *module, PyObject *const *args,
                                 Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mlspy_view slots = {0}, target = {0};
    size_t sinks, length;
    int axis;
    mls_kv_ring ring;
    mls_status st;
    PyObject *array = NULL;
    if (mlspy_take_count("kv_ring_ordered", 4, count) < 0 ||
        mlspy_view_of(state, args[0], "array", &slots) < 0) {
        return NULL;
    }
    const mls_tensor *t = &slots.tensor;
    if (mlspy_take_kv_axis(state, args[1], "array", t->rank, t->shape, &axis) == 0 &&
        mlspy_take_kv_length(state, args[2], "sinks", &sinks) == 0 &&
        mlspy_take_kv_length(state, args[3], "length", &length) == 0) {
        if (mls_kv_ring_borrow(&ring, t, axis, sinks, length, &st) != MLS_OK) {
            mlspy_raise(state, &st, NULL);
        } else {
            array = new_ordered(state, &ring, &target);
        }
    }
    if (array != NULL) {
        size_t bytes = 0;
        (void)mls_tensor_bytes(&target.tensor, &bytes);
        PyThreadState *released = mlspy_leave_python(bytes);
        mls_kv_ring_copy_ordered(&ring, state->kernels, &target.tensor);
        mlspy_resume_python(released);
    }
    mlspy_view_release(&target);
    mlspy_view_release(&slots);
    return array;
}

/* Called by mlstate/kv/_cache_state.py and _cache_spec.py only. */
PyMethodDef mlspy_kv_cache_methods[] = {
    {"kv_quantized_lengths", MLSPY_FASTCALL(kv_quantized_lengths),
     "kv_quantized_lengths(length, bits, group, /)\n--\n\nLengths of the last axis of "
     "codes, and of scales and biases."},
    {"kv_quantize", MLSPY_FASTCALL(kv_quantize),
     "kv_quantize(values, codes, scales, biases, bits, group, /)\n--\n\nQuantize "
     "values."},
    {"kv_dequantize", MLSPY_FASTCALL(kv_dequantize),
     "kv_dequantize(values, codes, scales, biases, bits, group, /)\n--\n\nCompute values "
     "from codes."},
    {"kv_ring_positions", MLSPY_FASTCALL(kv_ring_positions),
     "kv_ring_positions(capacity, sinks, length, /)\n--\n\nThe position in each slot, or "
     "-1."},
    {"kv_ring_ordered", MLSPY_FASTCALL(kv_ring_ordered),
     "kv_ring_ordered(array, seq_axis, sinks, length, /)\n--\n\nA copy of the tokens in "
     "order."},
    {NULL, NULL, 0, NULL},
};
