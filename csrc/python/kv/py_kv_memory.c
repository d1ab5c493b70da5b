/* py_kv_memory: KVBuffer and RollingBuffer, the memory of KVState and RollingKVState;
 * refuses to grow while a view exists.
 *
 * A view is an ndarray whose base keeps the memory alive. The memory of a RollingBuffer
 * never moves, so the base is the object itself. A KVBuffer may move its memory when it
 * reserves more, so the base is a lease: leases are counted, and reserving is refused
 * while one exists. Changing the length moves nothing and is always allowed.
 *
 * One lock guards each object. A thread releases the GIL before it waits for the lock, so
 * the thread that holds the lock can always continue, even if it needs the GIL.
 */
#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_alloc.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "kv/kv_args.h"

#include "kv/kv_buffer.h"
#include "kv/kv_ring.h"

#include <pthread.h>
#include <structmember.h>

/* Both types begin with these members. They refer only to a descriptor, so they cannot be
 * part of a cycle and need no garbage collection. */
typedef struct memory_object {
    PyObject_HEAD pthread_mutex_t lock; /* guards the memory; acquired without the GIL */
    PyArray_Descr *descr;               /* dtype of the views */
} memory_object;

typedef struct buffer_object {
    memory_object base;
    mls_kv_buffer buffer;
    size_t leases; /* number of arrays that view it */
} buffer_object;

typedef struct ring_object {
    memory_object base;
    mls_kv_ring ring;
} ring_object;

/* The base of every view of a KVBuffer. */
typedef struct lease_object {
    PyObject_HEAD buffer_object *owner;
} lease_object;

/* Execute statements with the lock of a memory_object. */
#define WHILE_LOCKED(object, ...)                                                        \
    MLSPY_WITHOUT_GIL(pthread_mutex_lock(&(object)->base.lock); __VA_ARGS__;             \
                      pthread_mutex_unlock(&(object)->base.lock))

/* ---- construction ---- */

/* Arguments of both constructors. */
typedef struct memory_args {
    mls_tensor view; /* dtype and shape; no memory */
    int axis;        /* of the sequence */
    size_t capacity, /* positions of a KVBuffer, slots of a RollingBuffer */
        sinks;       /* first tokens, which a RollingBuffer never evicts */
} memory_args;

/* Create an object of `type` without memory. Consumes `descr`, which may be NULL with an
 * exception set. NULL with an exception set. */
static memory_object *alloc_memory(PyTypeObject *type, PyArray_Descr *descr)
{
    memory_object *self = descr == NULL ? NULL : (memory_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(descr);
        return NULL;
    }
    /* the lock first: deallocation may run from here on, and it destroys the lock */
    pthread_mutex_init(&self->lock, NULL);
    self->descr = descr;
    return self;
}

/* Create an object from (shape, capacity or None, dtype, seq_axis) and, if `format` has a
 * fifth argument, a number of sinks. Without a capacity it is the shape's length along
 * the sequence axis. The caller then reserves the memory that `out` describes. NULL with
 * an exception set. */
static memory_object *new_memory(PyTypeObject *type, PyObject *args, PyObject *kwargs,
                                 const char *format, memory_args *out)
{
    const mlspy_state *state = mlspy_state_of_type(type);
    PyObject *shape, *capacity, *dtype, *seq_axis, *sinks = NULL;
    mls_tensor *view = &out->view;
    *out = (memory_args){0};
    if (mlspy_take_positional(type, args, kwargs, format, &shape, &capacity, &dtype,
                              &seq_axis, &sinks) < 0 ||
        mlspy_take_kv_shape(state, shape, seq_axis, "shape", &view->rank, view->shape,
                            &out->axis) < 0) {
        return NULL;
    }
    out->capacity = view->shape[out->axis];
    if ((capacity != Py_None &&
         mlspy_take_kv_length(state, capacity, "capacity", &out->capacity) < 0) ||
        (sinks != NULL && mlspy_take_kv_length(state, sinks, "sinks", &out->sinks) < 0)) {
        return NULL;
    }
    return alloc_memory(type, mlspy_descr_of_object(state, dtype, &view->dtype));
}

/* KVBuffer(shape, capacity | None, dtype, seq_axis): zeroed memory for a cache of `shape`
 * that can grow to `capacity` positions */
static PyObject *buffer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    memory_args a;
    mls_status st;
    buffer_object *self = (buffer_object *)new_memory(type, args, kwargs, "OOOO", &a);
    if (self != NULL &&
        mlspy_check(mlspy_state_of_type(type),
                    mls_kv_buffer_init(&self->buffer, a.view.rank, a.view.shape, a.axis,
                                       a.capacity, a.view.dtype, &st),
                    &st) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* RollingBuffer(shape, capacity | None, dtype, seq_axis, sinks): an empty ring of
 * `capacity` slots; the shape's length along the sequence axis is used only without a
 * capacity */
static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    memory_args a;
    mls_status st;
    ring_object *self = (ring_object *)new_memory(type, args, kwargs, "OOOOO", &a);
    if (self != NULL) {
        a.view.shape[a.axis] = a.capacity;
        a.view.swapped = PyDataType_ISBYTESWAPPED(self->base.descr);
        if (mlspy_check(mlspy_state_of_type(type),
                        mls_kv_ring_init(&self->ring, &a.view, a.axis, a.sinks, &st),
                        &st) < 0) {
            Py_CLEAR(self);
        }
    }
    return (PyObject *)self;
}

/* Free the members that both types have, and the object. No lock is needed: each view
 * holds a reference, so no view exists any more. */
static void free_memory(memory_object *self)
{
    pthread_mutex_destroy(&self->lock);
    Py_XDECREF(self->descr);
    mlspy_free(self);
}

static void buffer_dealloc(buffer_object *self)
{
    mls_kv_buffer_fini(&self->buffer);
    free_memory(&self->base);
}

static void ring_dealloc(ring_object *self)
{
    mls_kv_ring_fini(&self->ring);
    free_memory(&self->base);
}

/* Return a new reference to the dtype, for functions that consume it. */
static PyArray_Descr *descr_of(const memory_object *self)
{
    Py_INCREF(self->descr);
    return self->descr;
}

/* ---- KVBuffer ---- */

/* Uncount the lease, then release the buffer, which may be deallocated. */
static void lease_dealloc(lease_object *self)
{
    if (self->owner != NULL) {
        WHILE_LOCKED(self->owner, self->owner->leases--);
        Py_DECREF(self->owner);
    }
    mlspy_free(self);
}

/* view() -> a writable ndarray of the current length over the buffer's own memory; while
 * it exists, reserve() is refused */
static PyObject *buffer_view(buffer_object *self, PyObject *unused)
{
    (void)unused;
    PyTypeObject *type = mlspy_state_of_type(Py_TYPE(self))->kv_lease_type;
    lease_object *lease = (lease_object *)type->tp_alloc(type, 0);
    mls_tensor view;
    if (lease == NULL) {
        return NULL;
    }
    WHILE_LOCKED(self, self->leases++, view = mls_kv_buffer_view(&self->buffer));
    lease->owner = (buffer_object *)Py_NewRef((PyObject *)self);
    /* rows are `capacity` positions apart, not `length` */
    return mlspy_array_in(descr_of(&self->base), view.rank, view.shape, view.strides,
                          view.data, NPY_ARRAY_WRITEABLE, (PyObject *)lease);
}

/* Fill the buffer from `source`, with the lock held. MLS_E_SHAPE, MLS_E_DTYPE: the source
 * has another shape or dtype; nothing was written. */
static mls_code fill_locked(buffer_object *self, const mlspy_state *state,
                            const mls_tensor *source, mls_status *st)
{
    const mls_tensor target = mls_kv_buffer_view(&self->buffer);
    const mls_code code = mls_copy_check(&target, source, "array", st);
    if (code == MLS_OK) {
        mls_kv_buffer_fill(&self->buffer, state->kernels, state->pool, source);
    }
    return code;
}

/* fill(array): copy an array into the buffer; shape, dtype and byte order must be the
 * buffer's. CompatibilityError for another shape or dtype; the byte order is not
 * checked. */
static PyObject *buffer_fill(buffer_object *self, PyObject *array)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mlspy_view source = {0};
    mls_status st;
    mls_code code;
    if (mlspy_view_of(state, array, "array", &source) < 0) {
        return NULL;
    }
    /* both have the same byte order, so the bytes are copied unchanged */
    source.tensor.swapped = false;
    WHILE_LOCKED(self, code = fill_locked(self, state, &source.tensor, &st));
    mlspy_view_release(&source);
    return mlspy_none(state, code, &st);
}

/* resize(length, position | None): sets the length to `length` positions, keeps the first
 * `position` of them (None: all that both lengths have) and zeroes the rest.
 * CapacityError beyond the capacity, or if `position` exceeds the old or the new length.
 */
static PyObject *buffer_resize(buffer_object *self, PyObject *args)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    PyObject *numbers[2];
    size_t length, position = SIZE_MAX;
    mls_status st;
    mls_code code;
    if (!PyArg_ParseTuple(args, "OO", &numbers[0], &numbers[1]) ||
        mlspy_take_kv_length(state, numbers[0], "seq_length", &length) < 0 ||
        (numbers[1] != Py_None &&
         mlspy_take_kv_length(state, numbers[1], "current_position", &position) < 0)) {
        return NULL;
    }
    WHILE_LOCKED(
        self,
        /* computed under the lock, because another thread may change the length */
        const size_t before = mls_kv_buffer_length(&self->buffer);
        position = position == SIZE_MAX ? (length < before ? length : before) : position;
        code = mls_kv_buffer_resize(&self->buffer, state->kernels, length, position,
                                    "current_position", &st));
    return mlspy_none(state, code, &st);
}

/* reserve(capacity): raises the capacity to `capacity` positions, which may move the
 * memory; BufferError while a view exists, CapacityError for less than the current
 * capacity */
static PyObject *buffer_reserve(buffer_object *self, PyObject *number)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    size_t capacity;
    mls_status st;
    mls_code code;
    if (mlspy_take_kv_length(state, number, "capacity", &capacity) < 0) {
        return NULL;
    }
    /* checked under the lock, so no lease can be made between the check and the move */
    WHILE_LOCKED(
        self,
        code =
            self->leases > 0
                ? mls_fail(&st, MLS_E_BUSY,
                           "%zu arrays still view this cache, and reserve may move its "
                           "memory: delete them first",
                           self->leases)
                : mls_kv_buffer_reserve(&self->buffer, capacity, &st));
    return mlspy_none(state, code, &st);
}

/* extent() -> (shape, capacity in positions), of one moment */
static PyObject *buffer_extent(buffer_object *self, PyObject *unused)
{
    (void)unused;
    mls_kv_buffer snapshot;
    WHILE_LOCKED(self, snapshot = self->buffer);
    return Py_BuildValue("Nn", mlspy_sizes_tuple(snapshot.shape, snapshot.rank),
                         (Py_ssize_t)snapshot.capacity);
}

/* ---- RollingBuffer ---- */

/* view() -> a writable ndarray of all slots over the ring's own memory */
static PyObject *ring_view(ring_object *self, PyObject *unused)
{
    (void)unused;
    const mls_tensor *slots = &self->ring.slots; /* constant, so no lock is needed */
    return mlspy_array_in(descr_of(&self->base), slots->rank, slots->shape, NULL,
                          slots->data, NPY_ARRAY_WRITEABLE, Py_NewRef((PyObject *)self));
}

/* append(tokens): appends an array of any number of tokens along the sequence axis, which
 * may evict the oldest ones */
static PyObject *ring_append(ring_object *self, PyObject *tokens)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mlspy_view source = {0};
    mls_status st;
    mls_code code;
    if (mlspy_view_for(state, tokens, "tokens", false /* read-only */, &source) < 0) {
        return NULL;
    }
    WHILE_LOCKED(self, code = mls_kv_ring_append(&self->ring, state->kernels,
                                                 &source.tensor, &st));
    mlspy_view_release(&source);
    return mlspy_none(state, code, &st);
}

/* trim(count): drops the last `count` tokens; CapacityError if the ring holds fewer */
static PyObject *ring_trim(ring_object *self, PyObject *number)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    size_t count;
    mls_status st;
    mls_code code;
    if (mlspy_take_kv_length(state, number, "n", &count) < 0) {
        return NULL;
    }
    WHILE_LOCKED(self, code = mls_kv_ring_trim(&self->ring, state->kernels, count, &st));
    return mlspy_none(state, code, &st);
}

/* fill(slots, oldest, next, evicted): replaces all slots, and the counters that counts()
 * returns: the first position after the sinks that is held, the position of the next
 * token, and the number of evicted tokens. On an error, as of mls_kv_ring_fill, the ring
 * is unchanged. */
static PyObject *ring_fill(ring_object *self, PyObject *args)
{
    static const char *const names[] = {"oldest", "next", "evicted"};
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    PyObject *array, *objects[3];
    size_t numbers[3];
    mlspy_view source = {0};
    mls_status st;
    mls_code code;
    if (!PyArg_ParseTuple(args, "OOOO", &array, &objects[0], &objects[1], &objects[2])) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        if (mlspy_take_kv_length(state, objects[i], names[i], &numbers[i]) < 0) {
            return NULL;
        }
    }
    if (mlspy_view_for(state, array, "slots", false /* read-only */, &source) < 0) {
        return NULL;
    }
    WHILE_LOCKED(self,
                 code = mls_kv_ring_fill(&self->ring, state->kernels, &source.tensor,
                                         numbers[0], numbers[1], numbers[2], &st));
    mlspy_view_release(&source);
    return mlspy_none(state, code, &st);
}

/* copy() -> a new RollingBuffer with the slots and counters of one moment */
static PyObject *ring_copy(ring_object *self, PyObject *unused)
{
    (void)unused;
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mls_status st;
    ring_object *copy = (ring_object *)alloc_memory(Py_TYPE(self), descr_of(&self->base));
    if (copy == NULL) {
        return NULL;
    }
    mls_code code;
    /* no other thread knows the copy, so its lock is not needed */
    WHILE_LOCKED(
        self, const mls_kv_ring *ring = &self->ring;
        code = mls_kv_ring_init(&copy->ring, &ring->slots, ring->axis, ring->sinks, &st);
        if (code == MLS_OK) {
            code = mls_kv_ring_fill(&copy->ring, state->kernels, &ring->slots,
                                    ring->oldest, ring->next, ring->evicted, &st);
        });
    if (mlspy_check(state, code, &st) < 0) {
        Py_CLEAR(copy);
    }
    return (PyObject *)copy;
}

/* Copy the tokens of `ring` in the order of their positions to `data`, packed memory for
 * `length` positions, with the lock held. Returns false, and copies nothing, if the ring
 * has another length now. */
static bool copy_locked(const mls_kv_ring *ring, const mlspy_state *state, size_t length,
                        void *data)
{
    mls_status st;
    mls_tensor dst = ring->slots;
    if (mls_kv_ring_length(ring) != length) {
        return false;
    }
    dst.shape[ring->axis] = length;
    (void)mls_tensor_init(&dst, data, dst.dtype, dst.rank, dst.shape,
                          &st); /* smaller than the ring */
    dst.swapped = ring->slots.swapped;
    mls_kv_ring_copy_ordered(ring, state->kernels, &dst);
    return true;
}

/* ordered() -> a new ndarray of the tokens: the sinks, then from oldest to newest */
static PyObject *ring_ordered(ring_object *self, PyObject *unused)
{
    (void)unused;
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    /* repeats if another thread changed the length while the array was allocated */
    for (;;) {
        mls_kv_ring snapshot;
        bool is_copied;
        WHILE_LOCKED(self, snapshot = self->ring);
        const size_t length = mls_kv_ring_length(&snapshot);
        snapshot.slots.shape[snapshot.axis] = length;
        PyObject *array = mlspy_array_of(descr_of(&self->base), snapshot.slots.rank,
                                         snapshot.slots.shape, false);
        if (array == NULL) {
            return NULL;
        }
        void *data = PyArray_DATA((PyArrayObject *)array);
        WHILE_LOCKED(self, is_copied = copy_locked(&self->ring, state, length, data));
        if (is_copied) {
            return array;
        }
        Py_DECREF(array);
    }
}

/* positions() -> a new int64 ndarray with the position of each slot's token, or -1 */
static PyObject *ring_positions(ring_object *self, PyObject *unused)
{
    (void)unused;
    mls_kv_ring snapshot;
    WHILE_LOCKED(self, snapshot = self->ring);
    return mlspy_ring_positions(&snapshot);
}

/* counts() -> (length, evicted, next position, oldest), read under one lock: `oldest` is
 * the first position after the sinks that is held, or would be */
static PyObject *ring_counts(ring_object *self, PyObject *unused)
{
    (void)unused;
    mls_kv_ring snapshot;
    WHILE_LOCKED(self, snapshot = self->ring);
    return Py_BuildValue("nnnn", (Py_ssize_t)mls_kv_ring_length(&snapshot),
                         (Py_ssize_t)snapshot.evicted, (Py_ssize_t)snapshot.next,
                         (Py_ssize_t)snapshot.oldest);
}

/* extent() -> (capacity, sinks, seq_axis), which never change */
static PyObject *ring_extent(ring_object *self, PyObject *unused)
{
    (void)unused;
    const mls_kv_ring *ring = &self->ring;
    return Py_BuildValue("nni", (Py_ssize_t)ring->slots.shape[ring->axis],
                         (Py_ssize_t)ring->sinks, ring->axis);
}

/* ---- the types ---- */

static PyMethodDef buffer_methods[] = {
    MLSPY_METHOD(buffer, view, METH_NOARGS, "/"),
    MLSPY_METHOD(buffer, fill, METH_O, "array, /"),
    MLSPY_METHOD(buffer, resize, METH_VARARGS, "length, position, /"),
    MLSPY_METHOD(buffer, reserve, METH_O, "capacity, /"),
    MLSPY_METHOD(buffer, extent, METH_NOARGS, "/"),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef ring_methods[] = {
    MLSPY_METHOD(ring, view, METH_NOARGS, "/"),
    MLSPY_METHOD(ring, append, METH_O, "tokens, /"),
    MLSPY_METHOD(ring, trim, METH_O, "count, /"),
    MLSPY_METHOD(ring, fill, METH_VARARGS, "slots, oldest, next, evicted, /"),
    MLSPY_METHOD(ring, copy, METH_NOARGS, "/"),
    MLSPY_METHOD(ring, ordered, METH_NOARGS, "/"),
    MLSPY_METHOD(ring, positions, METH_NOARGS, "/"),
    MLSPY_METHOD(ring, counts, METH_NOARGS, "/"),
    MLSPY_METHOD(ring, extent, METH_NOARGS, "/"),
    {NULL, NULL, 0, NULL},
};

/* These never change. RollingBuffer has only the first. */
static PyMemberDef buffer_members[] = {
    {"dtype", T_OBJECT_EX, offsetof(memory_object, descr), READONLY, NULL},
    {"seq_axis", T_INT, offsetof(buffer_object, buffer.axis), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMemberDef ring_members[] = {
    {"dtype", T_OBJECT_EX, offsetof(memory_object, descr), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot buffer_slots[] = {
    {Py_tp_new, (void *)buffer_new},
    {Py_tp_dealloc, (void *)buffer_dealloc},
    {Py_tp_methods, buffer_methods},
    {Py_tp_members, buffer_members},
    {Py_tp_doc, (void *)"KVBuffer(shape, capacity, dtype, seq_axis, /)\n--\n\n"},
    {0, NULL},
};
static PyType_Slot ring_slots[] = {
    {Py_tp_new, (void *)ring_new},
    {Py_tp_dealloc, (void *)ring_dealloc},
    {Py_tp_methods, ring_methods},
    {Py_tp_members, ring_members},
    {Py_tp_doc,
     (void *)"RollingBuffer(shape, capacity, dtype, seq_axis, sinks, /)\n--\n\n"},
    {0, NULL},
};
static PyType_Slot lease_slots[] = {
    {Py_tp_dealloc, (void *)lease_dealloc},
    {0, NULL},
};

MLSPY_DEFINE_SPEC(buffer, "KVBuffer", buffer_object, Py_TPFLAGS_IMMUTABLETYPE);
MLSPY_DEFINE_SPEC(ring, "RollingBuffer", ring_object, Py_TPFLAGS_IMMUTABLETYPE);
/* Only buffer_view makes leases. */
MLSPY_DEFINE_SPEC(lease, "KVLease", lease_object,
                  Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION);

/* The lease's type is not added to the module, because users need no name for it. */
int mlspy_kv_memory_add(PyObject *module)
{
    mlspy_state *state = mlspy_state_of(module);
    state->kv_lease_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &lease_spec, NULL);
    return state->kv_lease_type == NULL ||
                   mlspy_add_type(module, &buffer_spec, NULL, NULL) < 0 ||
                   mlspy_add_type(module, &ring_spec, NULL, NULL) < 0
               ? -1
               : 0;
}
