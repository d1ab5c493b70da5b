/* py_kv_buffer: the memory behind mlstate.kv.KVState.
 *
 * A view is an ndarray whose base is a lease. A lease keeps the buffer alive and is
 * counted, so that memory never moves under an existing array. Changing the length moves
 * nothing and is always allowed. Reserving more may move everything and is refused while
 * a lease exists.
 *
 * One lock guards each buffer. A thread releases the GIL before it waits for the lock, so
 * the thread that holds the lock can always continue, even if it needs the GIL.
 */
#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "kv/kv_bindings.h"

#include "kv/kv_buffer.h"
#include "kv/kv_transition.h"

#include <inttypes.h>
#include <pthread.h>

/* The memory, its dtype, and the number of arrays that view it. */
typedef struct buffer_object {
    PyObject_HEAD pthread_mutex_t
        lock; /* guards `buffer` and `leases`; acquired without the GIL */
    mls_kv_buffer buffer;
    PyArray_Descr *descr;
    size_t leases;
} buffer_object;

/* The base of every view. */
typedef struct lease_object {
    PyObject_HEAD buffer_object *owner;
} lease_object;

/* Acquire the lock with the GIL released: another thread may hold it for a while. */
static void lock_buffer(buffer_object *self)
{
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
    Py_END_ALLOW_THREADS
}

/* Release the lock; never waits, so the GIL stays held. */
static void unlock_buffer(buffer_object *self)
{
    pthread_mutex_unlock(&self->lock);
}

/* KVBuffer(shape, capacity | None, dtype, seq_axis) */
static PyObject *buffer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const mlspy_state *state = mlspy_state_of_type(type);
    size_t shape[MLS_KV_MAX_RANK], capacity;
    PyObject *dimensions, *positions, *dtype, *seq_axis;
    int rank, axis;
    mls_dtype wanted;
    mls_status st;
    if (state == NULL ||
        (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0 &&
         (PyErr_SetString(PyExc_TypeError, "KVBuffer takes no keywords"), true)) ||
        !PyArg_ParseTuple(args, "OOOO", &dimensions, &positions, &dtype, &seq_axis) ||
        mlspy_take_kv_shape(state, dimensions, seq_axis, "shape", &rank, shape, &axis) <
            0) {
        return NULL;
    }
    capacity = shape[axis];
    if (positions != Py_None &&
        mlspy_take_kv_length(state, positions, "capacity", &capacity) < 0) {
        return NULL;
    }
    PyArray_Descr *descr = mlspy_descr_of_object(state, dtype, &wanted);
    if (descr == NULL) {
        return NULL;
    }
    buffer_object *self = (buffer_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(descr);
        return NULL;
    }
    /* the lock first: buffer_dealloc may run from here on, and it destroys the lock */
    pthread_mutex_init(&self->lock, NULL);
    self->descr = descr;
    if (mls_kv_buffer_init(&self->buffer, rank, shape, axis, capacity, wanted, &st) !=
        MLS_OK) {
        mlspy_raise(state, &st, NULL);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* No lock is needed: each lease holds a reference, so no lease exists any more. */
static void buffer_dealloc(buffer_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    mls_kv_buffer_fini(&self->buffer);
    pthread_mutex_destroy(&self->lock);
    Py_XDECREF(self->descr);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Uncount the lease, then release the buffer, which may be deallocated. */
static void lease_dealloc(lease_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->owner != NULL) {
        lock_buffer(self->owner);
        self->owner->leases--;
        unlock_buffer(self->owner);
        Py_DECREF(self->owner);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

/* Return a new, counted lease on `self`; `*now` is the view at that moment. */
static PyObject *take_lease(const mlspy_state *state, buffer_object *self,
                            mls_tensor *now)
{
    lease_object *lease =
        (lease_object *)state->kv_lease_type->tp_alloc(state->kv_lease_type, 0);
    if (lease == NULL) {
        return NULL;
    }
    lock_buffer(self);
    self->leases++;
    *now = mls_kv_buffer_view(&self->buffer);
    unlock_buffer(self);
    lease->owner = (buffer_object *)Py_NewRef((PyObject *)self);
    return (PyObject *)lease;
}

/* view() -> a writable ndarray of the current length over the buffer's own memory */
static PyObject *buffer_view(buffer_object *self, PyObject *unused)
{
    (void)unused;
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mls_tensor now;
    PyObject *lease = state == NULL ? NULL : take_lease(state, self, &now);
    if (lease == NULL) {
        return NULL;
    }
    npy_intp shape[MLS_KV_MAX_RANK], strides[MLS_KV_MAX_RANK];
    for (int axis = 0; axis < now.rank; axis++) {
        shape[axis] = (npy_intp)now.shape[axis];
        strides[axis] = (npy_intp)now.strides[axis];
    }
    Py_INCREF(self->descr); /* stolen */
    /* rows are `capacity` positions apart, not `length` */
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, self->descr, now.rank, shape,
                                           strides, now.data, NPY_ARRAY_WRITEABLE, NULL);
    if (array == NULL) {
        Py_DECREF(lease);
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)array, lease) < 0) { /* steals the lease */
        Py_CLEAR(array);
    }
    return array;
}

/* fill(array): copy an array into the buffer; shape and dtype must be the buffer's */
static PyObject *buffer_fill(buffer_object *self, PyObject *array)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mlspy_view source = {0};
    mls_status st;
    if (state == NULL || mlspy_view_of(state, array, "array", &source) < 0) {
        return NULL;
    }
    source.tensor.swapped =
        false; /* both have the same byte order, so the bytes are copied unchanged */
    mls_code code;
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        const mls_tensor now = mls_kv_buffer_view(&self->buffer);
        code = mls_copy_check(&now, &source.tensor, "array", &st);
        if (code == MLS_OK) {
            mls_kv_buffer_fill(&self->buffer, state->kernels, state->pool,
                               &source.tensor);
        }
        pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    mlspy_view_release(&source);
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    Py_RETURN_NONE;
}

/* resize(length, position | None): keep `position` positions (default: all that both
 * lengths have) and zero the rest */
static PyObject *buffer_resize(buffer_object *self, PyObject *args)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    PyObject *numbers[2];
    size_t length, position = 0;
    mls_status st;
    mls_code code;
    if (state == NULL || !PyArg_ParseTuple(args, "OO", &numbers[0], &numbers[1]) ||
        mlspy_take_kv_length(state, numbers[0], "seq_length", &length) < 0) {
        return NULL;
    }
    const bool keeps_all = numbers[1] == Py_None;
    if (!keeps_all &&
        mlspy_take_kv_length(state, numbers[1], "current_position", &position) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        /* computed under the lock, because another thread may change the length */
        if (keeps_all) {
            const size_t before = mls_kv_buffer_length(&self->buffer);
            position = length < before ? length : before;
        }
        code = mls_kv_buffer_resize(&self->buffer, state->kernels, length, position,
                                    "current_position", &st);
        pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    Py_RETURN_NONE;
}

/* reserve(capacity): raise the capacity; refused while a view exists */
static PyObject *buffer_reserve(buffer_object *self, PyObject *args)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    PyObject *number;
    size_t capacity;
    mls_status st;
    mls_code code;
    if (state == NULL || !PyArg_ParseTuple(args, "O", &number) ||
        mlspy_take_kv_length(state, number, "capacity", &capacity) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        /* checked under the lock, so no lease can be made between the check and the move
         */
        if (self->leases > 0) {
            code = mls_fail(&st, MLS_E_BUSY,
                            "%zu arrays still view this cache, and reserve may move its "
                            "memory: delete them first",
                            self->leases);
        } else {
            code = mls_kv_buffer_reserve(&self->buffer, capacity, &st);
        }
        pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    Py_RETURN_NONE;
}

/* (shape, capacity), read under one lock */
static PyObject *buffer_extent(buffer_object *self, PyObject *unused)
{
    (void)unused;
    lock_buffer(self);
    const mls_kv_buffer now = self->buffer;
    unlock_buffer(self);
    PyObject *shape = PyTuple_New(now.rank);
    for (int axis = 0; shape != NULL && axis < now.rank; axis++) {
        PyObject *length = PyLong_FromSize_t(now.shape[axis]);
        if (length == NULL) {
            Py_CLEAR(shape);
        } else {
            PyTuple_SET_ITEM(shape, axis, length);
        }
    }
    return shape == NULL ? NULL : Py_BuildValue("Nn", shape, (Py_ssize_t)now.capacity);
}

/* Return the descriptor of the buffer and its views. */
static PyObject *buffer_dtype(buffer_object *self, void *unused)
{
    (void)unused;
    return Py_NewRef((PyObject *)self->descr);
}

/* The sequence axis, counted from 0; it never changes. */
static PyObject *buffer_axis(buffer_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(self->buffer.axis);
}

/* Called by mlstate/kv/__init__.py only, which has the public names and their checks. */
static PyMethodDef buffer_methods[] = {
    {"view", (PyCFunction)(void (*)(void))buffer_view, METH_NOARGS,
     "view($self, /)\n--\n\nThe cache as it is now, as an ndarray."},
    {"fill", (PyCFunction)(void (*)(void))buffer_fill, METH_O,
     "fill($self, array, /)\n--\n\nCopy an array of the view's shape."},
    {"resize", (PyCFunction)(void (*)(void))buffer_resize, METH_VARARGS,
     "resize($self, length, position, /)\n--\n\nKeep `position` positions and zero the "
     "others in view."},
    {"reserve", (PyCFunction)(void (*)(void))buffer_reserve, METH_VARARGS,
     "reserve($self, capacity, /)\n--\n\nRaise the capacity."},
    {"extent", (PyCFunction)(void (*)(void))buffer_extent, METH_NOARGS,
     "extent($self, /)\n--\n\n(shape, capacity)"},
    {NULL, NULL, 0, NULL},
};

/* Read-only, because they never change. */
static PyGetSetDef buffer_properties[] = {
    {"dtype", (getter)(void (*)(void))buffer_dtype, NULL, NULL, NULL},
    {"seq_axis", (getter)(void (*)(void))buffer_axis, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* No traverse and no clear: see buffer_spec. */
static PyType_Slot buffer_slots[] = {
    {Py_tp_new, (void *)buffer_new},
    {Py_tp_dealloc, (void *)buffer_dealloc},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_properties},
    {Py_tp_doc, (void *)"KVBuffer(shape, capacity, dtype, seq_axis, /)\n--\n\n"
                        "The memory behind a KVState."},
    {0, NULL},
};

/* No subclasses and no garbage collection: a buffer refers only to a descriptor, so it
 * cannot be part of a cycle. */
static PyType_Spec buffer_spec = {
    .name = "mlstate._core.KVBuffer",
    .basicsize = sizeof(buffer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = buffer_slots,
};

/* A lease has no methods and no constructor. */
static PyType_Slot lease_slots[] = {
    {Py_tp_dealloc, (void *)lease_dealloc},
    {0, NULL},
};

/* Only take_lease makes leases. A lease refers only to a buffer, so it cannot be part of
 * a cycle. */
static PyType_Spec lease_spec = {
    .name = "mlstate._core.KVLease",
    .basicsize = sizeof(lease_object),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = lease_slots,
};

/* The lease's type is not added to the module, because users need no name for it. */
int mlspy_kv_buffer_add(PyObject *module)
{
    mlspy_state *state = mlspy_state_of(module);
    state->kv_buffer_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &buffer_spec, NULL);
    state->kv_lease_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &lease_spec, NULL);
    if (state->kv_buffer_type == NULL || state->kv_lease_type == NULL) {
        return -1;
    }
    return PyModule_AddType(module, state->kv_buffer_type);
}
