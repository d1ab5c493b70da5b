/* py_kv_rolling: the memory behind mlstate.kv.RollingKVState, and the rotation of keys.
 *
 * A view is an ndarray whose base is the ring object: the memory never moves, so the base
 * only keeps it alive. One lock guards each ring. A thread releases the GIL before it
 * waits for the lock, so the thread that holds the lock can always continue.
 */
#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "kv/kv_bindings.h"

#include "kv/kv_rolling.h"
#include "kv/kv_transition.h"
#include "kv/rotate_keys.h"

#include <inttypes.h>
#include <pthread.h>

/* The ring and the dtype of its arrays. */
typedef struct ring_object {
    PyObject_HEAD pthread_mutex_t lock; /* guards `ring`; acquired without the GIL */
    mls_kv_ring ring;
    PyArray_Descr *descr;
} ring_object;

/* Return a copy of the ring's numbers, taken under the lock. */
static mls_kv_ring snapshot_ring(ring_object *self)
{
    mls_kv_ring now;
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        now = self->ring;
        pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    return now;
}

/* RollingBuffer(shape, capacity | None, dtype, sinks, seq_axis) */
static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const mlspy_state *state = mlspy_state_of_type(type);
    PyObject *shape, *capacity, *dtype, *sinks_number, *axis_number;
    mls_tensor slots = {0};
    size_t sinks = 0;
    int axis = 0;
    mls_status st;
    if (state == NULL ||
        (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0 &&
         (PyErr_SetString(PyExc_TypeError, "RollingBuffer takes no keywords"), true)) ||
        !PyArg_ParseTuple(args, "OOOOO", &shape, &capacity, &dtype, &sinks_number,
                          &axis_number) ||
        mlspy_take_kv_shape(state, shape, axis_number, "shape", &slots.rank, slots.shape,
                            &axis) < 0 ||
        (capacity != Py_None &&
         mlspy_take_kv_length(state, capacity, "capacity", &slots.shape[axis]) < 0) ||
        mlspy_take_kv_length(state, sinks_number, "sinks", &sinks) < 0) {
        return NULL;
    }
    PyArray_Descr *descr = mlspy_descr_of_object(state, dtype, &slots.dtype);
    if (descr == NULL) {
        return NULL;
    }
    slots.swapped = PyDataType_ISBYTESWAPPED(descr);
    ring_object *self = (ring_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(descr);
        return NULL;
    }
    /* the lock first: ring_dealloc may run from here on, and it destroys the lock */
    pthread_mutex_init(&self->lock, NULL);
    self->descr = descr;
    if (mls_kv_ring_init(&self->ring, &slots, axis, sinks, &st) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* No lock is needed: each view holds a reference, so no view exists any more. */
static void ring_dealloc(ring_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    mls_kv_ring_fini(&self->ring);
    pthread_mutex_destroy(&self->lock);
    Py_XDECREF(self->descr);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Copy the ring's shape, with `length` positions. */
static void shape_of(const mls_kv_ring *ring, size_t length, npy_intp *out)
{
    for (int axis = 0; axis < ring->slots.rank; axis++) {
        out[axis] = (npy_intp)(axis == ring->axis ? length : ring->slots.shape[axis]);
    }
}

/* view() -> a writable ndarray of all slots over the ring's own memory */
static PyObject *ring_view(ring_object *self, PyObject *unused)
{
    (void)unused;
    const mls_tensor *slots = &self->ring.slots; /* constant, so no lock is needed */
    npy_intp shape[MLS_KV_MAX_RANK];
    shape_of(&self->ring, slots->shape[self->ring.axis], shape);
    Py_INCREF(self->descr); /* stolen */
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, self->descr, slots->rank, shape,
                                           NULL, slots->data, NPY_ARRAY_WRITEABLE, NULL);
    /* SetBaseObject steals the reference */
    if (array != NULL &&
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef((PyObject *)self)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* append(tokens) */
static PyObject *ring_append(ring_object *self, PyObject *tokens)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mlspy_view source = {0};
    mls_status st;
    mls_code code;
    if (state == NULL || (!mlspy_view_quickly(state, tokens, false, &source) &&
                          mlspy_view_of(state, tokens, "tokens", &source) < 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        code = mls_kv_ring_append(&self->ring, state->kernels, &source.tensor, &st);
        pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    mlspy_view_release(&source);
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    Py_RETURN_NONE;
}

/* trim(count): drop the last `count` tokens */
static PyObject *ring_trim(ring_object *self, PyObject *number)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    size_t count;
    mls_status st;
    mls_code code;
    if (state == NULL || mlspy_take_kv_length(state, number, "n", &count) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        code = mls_kv_ring_trim(&self->ring, state->kernels, count, &st);
        pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    Py_RETURN_NONE;
}

/* Copy the tokens in order to packed memory for `length` positions. Returns false if the
 * ring has another length now. */
static bool copy_ordered(ring_object *self, const mlspy_state *state, size_t length,
                         void *data)
{
    bool same;
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        same = mls_kv_ring_length(&self->ring) == length;
        if (same) {
            mls_status st;
            mls_tensor dst = self->ring.slots;
            dst.shape[self->ring.axis] = length;
            (void)mls_tensor_init(&dst, data, dst.dtype, dst.rank, dst.shape,
                                  &st); /* smaller than the ring */
            dst.swapped = self->ring.slots.swapped;
            mls_kv_ring_copy_ordered(&self->ring, state->kernels, &dst);
        }
        pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    return same;
}

/* ordered() -> a new ndarray of the tokens: the sinks, then from oldest to newest */
static PyObject *ring_ordered(ring_object *self, PyObject *unused)
{
    (void)unused;
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    npy_intp shape[MLS_KV_MAX_RANK];
    if (state == NULL) {
        return NULL;
    }
    /* repeats if another thread changed the length while the array was allocated */
    for (;;) {
        const mls_kv_ring now = snapshot_ring(self);
        const size_t length = mls_kv_ring_length(&now);
        shape_of(&now, length, shape);
        Py_INCREF(self->descr); /* stolen */
        PyObject *array = PyArray_Empty(now.slots.rank, shape, self->descr, 0);
        if (array == NULL ||
            copy_ordered(self, state, length, PyArray_DATA((PyArrayObject *)array))) {
            return array;
        }
        Py_DECREF(array);
    }
}

/* positions() -> a new int64 ndarray with the position of each slot's token, or -1 */
static PyObject *ring_positions(ring_object *self, PyObject *unused)
{
    (void)unused;
    npy_intp capacity = (npy_intp)self->ring.slots.shape[self->ring.axis];
    PyObject *array = PyArray_SimpleNew(1, &capacity, NPY_INT64);
    if (array == NULL) {
        return NULL;
    }
    int64_t *out = PyArray_DATA((PyArrayObject *)array);
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        mls_kv_ring_positions(&self->ring, out);
        pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    return array;
}

/* counts() -> (length, evicted, next position), read under one lock */
static PyObject *ring_counts(ring_object *self, PyObject *unused)
{
    (void)unused;
    const mls_kv_ring now = snapshot_ring(self);
    return Py_BuildValue("nnn", (Py_ssize_t)mls_kv_ring_length(&now),
                         (Py_ssize_t)now.evicted, (Py_ssize_t)now.next);
}

/* extent() -> (capacity, sinks, seq_axis), which never change */
static PyObject *ring_extent(ring_object *self, PyObject *unused)
{
    (void)unused;
    const mls_kv_ring *ring = &self->ring;
    return Py_BuildValue("nni", (Py_ssize_t)ring->slots.shape[ring->axis],
                         (Py_ssize_t)ring->sinks, ring->axis);
}

/* Return the descriptor of the ring and its views. */
static PyObject *ring_dtype(ring_object *self, void *unused)
{
    (void)unused;
    return Py_NewRef((PyObject *)self->descr);
}

/* Called by mlstate/kv/_rolling.py only, which has the public names. */
static PyMethodDef ring_methods[] = {
    {"view", (PyCFunction)(void (*)(void))ring_view, METH_NOARGS,
     "view($self, /)\n--\n\nAll slots, as an ndarray."},
    {"append", (PyCFunction)(void (*)(void))ring_append, METH_O,
     "append($self, tokens, /)\n--\n\nAppend tokens along the sequence axis."},
    {"trim", (PyCFunction)(void (*)(void))ring_trim, METH_O,
     "trim($self, count, /)\n--\n\nDrop the last tokens and zero their slots."},
    {"ordered", (PyCFunction)(void (*)(void))ring_ordered, METH_NOARGS,
     "ordered($self, /)\n--\n\nA copy of the tokens in order."},
    {"positions", (PyCFunction)(void (*)(void))ring_positions, METH_NOARGS,
     "positions($self, /)\n--\n\nThe position of each slot's token, or -1."},
    {"counts", (PyCFunction)(void (*)(void))ring_counts, METH_NOARGS,
     "counts($self, /)\n--\n\n(length, evicted, next position)"},
    {"extent", (PyCFunction)(void (*)(void))ring_extent, METH_NOARGS,
     "extent($self, /)\n--\n\n(capacity, sinks, seq_axis)"},
    {NULL, NULL, 0, NULL},
};

/* Read-only, because a ring's dtype never changes. */
static PyGetSetDef ring_properties[] = {
    {"dtype", (getter)(void (*)(void))ring_dtype, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* No traverse and no clear: see ring_spec. */
static PyType_Slot ring_slots[] = {
    {Py_tp_new, (void *)ring_new},
    {Py_tp_dealloc, (void *)ring_dealloc},
    {Py_tp_methods, ring_methods},
    {Py_tp_getset, ring_properties},
    {Py_tp_doc,
     (void *)"RollingBuffer(shape, capacity, dtype, sinks, seq_axis, /)\n--\n\n"
             "The memory behind a RollingKVState."},
    {0, NULL},
};

/* No subclasses and no garbage collection: a ring refers only to a descriptor, so it
 * cannot be part of a cycle. */
static PyType_Spec ring_spec = {
    .name = "mlstate._core.RollingBuffer",
    .basicsize = sizeof(ring_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = ring_slots,
};

/* ---- rotating keys ---- */

/* The arrays of a rotation; released by arrays_fini. */
typedef struct rotation_arrays {
    mlspy_view keys, shifts, out;
} rotation_arrays;

/* Release the views; views that were not taken are empty. */
static void arrays_fini(rotation_arrays *a)
{
    mlspy_view_release(&a->keys);
    mlspy_view_release(&a->shifts);
    mlspy_view_release(&a->out);
}

/* Read everything but the arrays of rotate_keys. `keys` is already viewed, because the
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
 *
 * `shifts` is a contiguous ndarray of int64, `out` a writable array or `keys` itself. */
static PyObject *rotate_keys(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    rotation_arrays a = {0};
    mls_rotation rotation = {0};
    mls_status st;
    if (mlspy_take_count("rotate_keys", 8, count) < 0) {
        return NULL;
    }
    if (mlspy_view_of(state, args[0], "keys", &a.keys) < 0 ||
        take_rotation(state, args, &a.keys.tensor, &rotation) < 0 ||
        mlspy_view_of(state, args[1], "shift", &a.shifts) < 0 ||
        mlspy_view_writable(state, args[7], "out", &a.out) < 0) {
        arrays_fini(&a);
        return NULL;
    }
    const mls_tensor *shifts = &a.shifts.tensor;
    if (shifts->dtype != MLS_I64 || shifts->rank != 1 || shifts->swapped ||
        !mls_tensor_is_contiguous(shifts)) {
        PyErr_SetString(PyExc_TypeError,
                        "shift must be contiguous int64 in one dimension");
        arrays_fini(&a);
        return NULL;
    }
    rotation.shifts = (const int64_t *)(const void *)shifts->data;
    rotation.shift_count = shifts->shape[0];
    const mls_tensor *keys = &a.keys.tensor, *out = &a.out.tensor;
    const mls_code code = mls_rotate_keys_check(out, keys, &rotation, &st);
    if (code == MLS_OK) {
        size_t bytes = 0;
        (void)mls_tensor_bytes(keys, &bytes);
        PyThreadState *released = mlspy_leave_python(bytes);
        mls_rotate_keys(state->kernels, state->pool, out, keys, &rotation);
        mlspy_resume_python(released);
    }
    arrays_fini(&a);
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return Py_NewRef(args[7]);
}

/* Called by mlstate/kv/_rotate_keys.py only. */
static PyMethodDef rotation_methods[] = {
    {"rotate_keys", (PyCFunction)(void (*)(void))rotate_keys, METH_FASTCALL,
     "rotate_keys($module, keys, shifts, base, scaling, interleaved, rotary_dim, "
     "seq_axis, "
     "out, /)\n--\n\nRotate keys by RoPE to other positions."},
    {NULL, NULL, 0, NULL},
};

int mlspy_kv_rolling_add(PyObject *module)
{
    PyTypeObject *type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &ring_spec, NULL);
    const int failed = type == NULL ? -1 : PyModule_AddType(module, type);
    Py_XDECREF(type);
    return failed < 0 ? failed : PyModule_AddFunctions(module, rotation_methods);
}
