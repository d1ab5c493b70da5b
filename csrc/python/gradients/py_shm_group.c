/* py_shm_group: one rank's handle of a host-local group, for
 * mlstate.collectives.LocalGroup.
 *
 * Operations wait for other ranks, so each releases the GIL and reacquires it now and
 * then to let Python check for signals. A link runs one operation at a time. Other
 * threads may abort or close it meanwhile. Closing does not wait: the handle is freed
 * when the running operation has ended.
 */
#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "gradients/bucket_capsule.h"
#include "gradients/gradients_bindings.h"

#include "base/size.h"
#include "collectives/shm_group.h"

#include <pthread.h>

/* A group handle, and whether it is in use. */
typedef struct link_object {
    PyObject_HEAD pthread_mutex_t lock; /* guards the fields below; held only briefly */
    mls_shm *place;                     /* NULL when closed */
    bool busy, closing;
    size_t rank, world;
} link_object;

/* A running operation. It is on the caller's stack; the core has a pointer to it, for its
 * callbacks, until the operation returns. */
typedef struct session {
    link_object *link;
    mls_shm *place;
    PyThreadState *saved; /* of this thread, while the GIL is released */
    mls_shm_call call;
    mls_str text;
    mls_status st;
} session;

/* Returns the module's state from a link (borrowed). */
static const mlspy_state *state_of_link(link_object *self)
{
    PyObject *module = mlspy_module_of(Py_TYPE(self));
    return module == NULL ? NULL : mlspy_state_of(module);
}

/* Returns the handle, for the caller to free, if the link was closed and no operation
 * uses it; otherwise NULL. The caller holds the lock, so only one thread gets the handle.
 * It is freed outside the lock, because that wakes other ranks and unmaps memory. */
static mls_shm *take_unused(link_object *self)
{
    mls_shm *unused = NULL;
    if (self->closing && !self->busy) {
        unused = self->place;
        self->place = NULL;
    }
    return unused;
}

/* ---- one operation ---- */

/* The core's poll, called without the GIL: whether to go on waiting. The exception of a
 * signal handler stays set in this thread; the core then returns MLS_E_STOPPED, and
 * finish_operation() keeps the exception. Handlers run only in the main thread; in other
 * threads the result is always true. */
static bool look_for_signals(void *context)
{
    session *s = context;
    PyEval_RestoreThread(s->saved);
    const bool good = PyErr_CheckSignals() == 0;
    s->saved = PyEval_SaveThread();
    return good;
}

/* Marks the link as busy. Returns -1 with RuntimeError set. Called with the GIL held; no
 * thread waits for the GIL while it holds the lock, so there is no deadlock. */
static int occupy_link(link_object *self)
{
    const char *trouble = NULL;
    pthread_mutex_lock(&self->lock);
    if (self->place == NULL || self->closing) {
        trouble = "the link is closed";
    } else if (self->busy) {
        trouble = "an operation is under way";
    } else {
        self->busy = true;
    }
    pthread_mutex_unlock(&self->lock);
    if (trouble != NULL) {
        PyErr_SetString(PyExc_RuntimeError, trouble);
        return -1;
    }
    return 0;
}

/* Begins an operation. `timeout` (seconds) and `text` (equal on all ranks) are the last
 * arguments of every operation. Returns -1 with an exception set, and the link not busy;
 * after 0, finish_operation() must follow. The text is borrowed from its str, which the
 * arguments of the call hold. */
static int begin_operation(session *s, PyObject *self, PyObject *timeout, PyObject *text)
{
    s->link = (link_object *)self;
    s->call = (mls_shm_call){.poll = look_for_signals, .context = s};
    if (mlspy_take_double(timeout, "timeout", &s->call.timeout) < 0 ||
        mlspy_take_text(text, "text", &s->text) < 0 || occupy_link(s->link) < 0) {
        return -1;
    }
    s->call.text = s->text.data; /* the UTF-8 of a str ends with a NUL */
    /* no lock needed: a busy link keeps its handle */
    s->place = s->link->place;
    return 0;
}

/* Marks the link as free; frees the handle if the link was closed meanwhile. */
static void leave_link(session *s)
{
    pthread_mutex_lock(&s->link->lock);
    s->link->busy = false;
    mls_shm *unused = take_unused(s->link);
    pthread_mutex_unlock(&s->link->lock);
    mls_shm_free(unused);
}

/* Ends an operation. Returns `result`, or NULL with an exception set; on failure it drops
 * `result`. */
static PyObject *finish_operation(session *s, mls_code code, PyObject *result)
{
    leave_link(s);
    if (code == MLS_OK) {
        return result;
    }
    Py_XDECREF(result);
    /* the exception of a signal or of a callback is set already */
    const mlspy_state *state = PyErr_Occurred() ? NULL : state_of_link(s->link);
    return state == NULL ? NULL : mlspy_raise(state, &s->st, NULL);
}

/* ---- arguments ---- */

/* Views packed elements in native byte order, each aligned to its size. Returns -1 with
 * an exception set, and no owner. An empty array may have any address: it is not read. */
static int take_packed(const mlspy_state *state, PyObject *array, const char *what,
                       bool writable, mlspy_view *view)
{
    if ((writable ? mlspy_view_writable(state, array, what, view)
                  : mlspy_view_of(state, array, what, view)) < 0) {
        return -1;
    }
    const size_t item = mls_tensor_item_bytes(&view->tensor);
    size_t count;
    if (!mls_tensor_count(&view->tensor, &count) || view->tensor.swapped ||
        !mls_tensor_is_contiguous(&view->tensor) ||
        (count > 0 && (uintptr_t)view->tensor.data % item != 0)) {
        mlspy_view_release(view);
        PyErr_Format(PyExc_ValueError, "%s is not packed, aligned and native", what);
        return -1;
    }
    return 0;
}

/* Parses a list of byte or element counts, one for each rank. Returns -1 with an
 * exception set. Accepts only ints, no other objects with __index__, whose code could
 * change the list. */
static int take_counts(PyObject *list, size_t world, size_t *out)
{
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != (Py_ssize_t)world) {
        PyErr_SetString(PyExc_TypeError, "counts must be a list, one for each rank");
        return -1;
    }
    for (size_t rank = 0; rank < world; rank++) {
        out[rank] = PyLong_AsSize_t(PyList_GET_ITEM(list, (Py_ssize_t)rank));
        if (out[rank] == (size_t)-1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

/* Adds counts; returns false on overflow, which user-supplied counts may cause. */
static bool add_counts(const size_t *counts, size_t world, size_t *out)
{
    size_t sum = 0;
    for (size_t rank = 0; rank < world; rank++) {
        if (!mls_size_add(sum, counts[rank], &sum)) {
            return false;
        }
    }
    *out = sum;
    return true;
}

/* Checks that a view has as many elements as the counts together. Returns -1 with
 * ValueError set. This keeps the core within the array: where the core counts bytes,
 * wider elements only mean spare room. */
static int check_length(const mlspy_view *view, const char *what, const size_t *counts,
                        size_t world)
{
    size_t count, wanted;
    if (!mls_tensor_count(&view->tensor, &count) || !add_counts(counts, world, &wanted) ||
        count != wanted) {
        PyErr_Format(PyExc_ValueError, "%s has not as many elements as the counts say",
                     what);
        return -1;
    }
    return 0;
}

/* ---- operations ----
 *
 * Each operation views its arrays before it begins and releases them after it has ended,
 * because both need the GIL. There is no early return between begin_operation() and
 * finish_operation(). The result is created before finish_operation(), which drops it if
 * the operation failed.
 */

/* barrier(timeout, text) */
static PyObject *link_barrier(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    session s;
    if (mlspy_take_count("barrier", 2, count) < 0 ||
        begin_operation(&s, self, args[0], args[1]) < 0) {
        return NULL;
    }
    s.saved = PyEval_SaveThread();
    const mls_code code = mls_shm_barrier(s.place, &s.call, &s.st);
    PyEval_RestoreThread(s.saved);
    return finish_operation(&s, code, Py_NewRef(Py_None));
}

/* broadcast(array, root, timeout, text): bytes; the root's array may be read-only */
static PyObject *link_broadcast(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    link_object *link = (link_object *)self;
    const mlspy_state *state = state_of_link(link);
    PyObject *result = NULL;
    int64_t root;
    mlspy_view view;
    session s;
    size_t bytes = 0;
    if (state == NULL || mlspy_take_count("broadcast", 4, count) < 0 ||
        mlspy_take_int64(state, args[1], "root", &root) < 0) {
        return NULL;
    }
    if (root < 0 || (size_t)root >= link->world) {
        PyErr_Format(PyExc_ValueError, "root %lld is not a rank of this group (0..%zu)",
                     (long long)root, link->world - 1);
        return NULL;
    }
    if (take_packed(state, args[0], "array", (size_t)root != link->rank, &view) < 0) {
        return NULL;
    }
    (void)mls_tensor_bytes(&view.tensor, &bytes);
    if (begin_operation(&s, self, args[2], args[3]) == 0) {
        s.saved = PyEval_SaveThread();
        const mls_code code = mls_shm_broadcast(s.place, &s.call, view.tensor.data, bytes,
                                                (size_t)root, &s.st);
        PyEval_RestoreThread(s.saved);
        result = finish_operation(&s, code, Py_NewRef(Py_None));
    }
    mlspy_view_release(&view);
    return result;
}

/* all_gather(array, out, sizes, timeout, text): all in bytes. The sizes fit the stack,
 * because a group has at most MLS_SHM_MAX_RANKS ranks. */
static PyObject *link_all_gather(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    link_object *link = (link_object *)self;
    const mlspy_state *state = state_of_link(link);
    size_t sizes[MLS_SHM_MAX_RANKS];
    mlspy_view data = {.owner = NULL}, out = {.owner = NULL};
    PyObject *result = NULL;
    session s;
    if (state == NULL || mlspy_take_count("all_gather", 5, count) < 0 ||
        take_counts(args[2], link->world, sizes) < 0) {
        return NULL;
    }
    if (take_packed(state, args[0], "array", false, &data) == 0 &&
        take_packed(state, args[1], "out", true, &out) == 0 &&
        check_length(&data, "array", &sizes[link->rank], 1) == 0 &&
        check_length(&out, "out", sizes, link->world) == 0 &&
        begin_operation(&s, self, args[3], args[4]) == 0) {
        s.saved = PyEval_SaveThread();
        const mls_code code = mls_shm_all_gather(s.place, &s.call, data.tensor.data,
                                                 sizes, out.tensor.data, &s.st);
        PyEval_RestoreThread(s.saved);
        result = finish_operation(&s, code, Py_NewRef(Py_None));
    }
    mlspy_view_release(&data);
    mlspy_view_release(&out);
    return result;
}

/* all_to_all(array, sent, out, wanted, timeout, text): all in bytes */
static PyObject *link_all_to_all(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    link_object *link = (link_object *)self;
    const mlspy_state *state = state_of_link(link);
    size_t sent[MLS_SHM_MAX_RANKS], wanted[MLS_SHM_MAX_RANKS];
    mlspy_view data = {.owner = NULL}, out = {.owner = NULL};
    PyObject *result = NULL;
    session s;
    if (state == NULL || mlspy_take_count("all_to_all", 6, count) < 0 ||
        take_counts(args[1], link->world, sent) < 0 ||
        take_counts(args[3], link->world, wanted) < 0) {
        return NULL;
    }
    if (take_packed(state, args[0], "array", false, &data) == 0 &&
        take_packed(state, args[2], "out", true, &out) == 0 &&
        check_length(&data, "array", sent, link->world) == 0 &&
        check_length(&out, "out", wanted, link->world) == 0 &&
        begin_operation(&s, self, args[4], args[5]) == 0) {
        s.saved = PyEval_SaveThread();
        const mls_code code = mls_shm_all_to_all(s.place, &s.call, data.tensor.data, sent,
                                                 out.tensor.data, wanted, &s.st);
        PyEval_RestoreThread(s.saved);
        result = finish_operation(&s, code, Py_NewRef(Py_None));
    }
    mlspy_view_release(&data);
    mlspy_view_release(&out);
    return result;
}

/* all_reduce(array, out, op, divisor, timeout, text). The core checks that the dtype
 * supports the op before anything is sent. */
static PyObject *link_all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = state_of_link((link_object *)self);
    mlspy_view data = {.owner = NULL}, out = {.owner = NULL};
    PyObject *result = NULL;
    mls_reduction r = {.divisor = 1};
    size_t n = 0;
    session s;
    if (state == NULL || mlspy_take_count("all_reduce", 6, count) < 0 ||
        mlspy_take_op(args[2], &r.op) < 0 ||
        mlspy_take_double(args[3], "divisor", &r.divisor) < 0) {
        return NULL;
    }
    if (take_packed(state, args[0], "array", false, &data) == 0 &&
        take_packed(state, args[1], "out", true, &out) == 0) {
        r.dtype = data.tensor.dtype;
        r.out_dtype = out.tensor.dtype;
        (void)mls_tensor_count(&data.tensor, &n);
        if (check_length(&out, "out", &n, 1) < 0) {
        } else if (r.dtype != r.out_dtype) {
            PyErr_SetString(PyExc_ValueError, "out has another dtype than the array");
        } else if (begin_operation(&s, self, args[4], args[5]) == 0) {
            s.saved = PyEval_SaveThread();
            const mls_code code = mls_shm_all_reduce(s.place, &s.call, data.tensor.data,
                                                     out.tensor.data, n, &r, &s.st);
            PyEval_RestoreThread(s.saved);
            result = finish_operation(&s, code, Py_NewRef(Py_None));
        }
    }
    mlspy_view_release(&data);
    mlspy_view_release(&out);
    return result;
}

/* ---- reduce_scatter ---- */

/* reduce_scatter(bucket, wants_norms, timeout, text) -> [(squares, nonfinite), ...];
 * empty unless wants_norms
 *
 * If the list cannot be allocated, the sums are complete nevertheless, and
 * finish_operation() passes the exception on.
 */
static PyObject *link_reduce_scatter(PyObject *self, PyObject *const *args,
                                     Py_ssize_t count)
{
    link_object *link = (link_object *)self;
    mlspy_bucket *held;
    PyObject *found = NULL;
    session s;
    if (mlspy_take_count("reduce_scatter", 4, count) < 0 ||
        (held = mlspy_bucket_of(args[0])) == NULL) {
        return NULL;
    }
    const int wants_norms = PyObject_IsTrue(args[1]);
    if (wants_norms < 0) {
        return NULL;
    }
    mls_bucket *b = &held->bucket;
    if (b->world != link->world || b->rank != link->rank) {
        PyErr_SetString(PyExc_ValueError, "the bucket is that of another rank or group");
        return NULL;
    }
    if (begin_operation(&s, self, args[2], args[3]) < 0) {
        return NULL;
    }
    s.saved = PyEval_SaveThread();
    const mls_code code = mls_shm_reduce_scatter(s.place, &s.call, b->segments, b->count,
                                                 wants_norms != 0, &s.st);
    PyEval_RestoreThread(s.saved);
    if (code == MLS_OK) {
        found = wants_norms ? mlspy_bucket_norm_partials(b) : PyList_New(0);
    }
    return finish_operation(&s, code, found);
}

/* ---- gather_bytes ---- */

/* Context of make_places. */
typedef struct parcel {
    session *session;
    PyObject *list; /* strong, or NULL */
} parcel;

/* Callback that provides the buffers; acquires the GIL briefly. Returns false with an
 * exception set in this thread. A bytes object may be written while no other code has
 * seen it. Sizes come from other ranks and may be invalid: a size beyond a bytes object's
 * limit is reported as a lack of memory. */
static bool make_places(void *context, const size_t *sizes, unsigned char **out)
{
    parcel *p = context;
    const size_t world = p->session->link->world;
    PyEval_RestoreThread(p->session->saved);
    p->list = PyList_New((Py_ssize_t)world);
    for (size_t rank = 0; p->list != NULL && rank < world; rank++) {
        PyObject *bytes = sizes[rank] > PY_SSIZE_T_MAX - 64
                              ? PyErr_NoMemory()
                              : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizes[rank]);
        if (bytes == NULL) {
            Py_CLEAR(p->list);
        } else {
            out[rank] = (unsigned char *)PyBytes_AS_STRING(bytes);
            PyList_SET_ITEM(p->list, (Py_ssize_t)rank, bytes);
        }
    }
    p->session->saved = PyEval_SaveThread();
    return p->list != NULL;
}

/* gather_bytes(data, root or -1, timeout, text) -> list of bytes, or None if this rank is
 * not the root
 *
 * On failure the list, whose bytes may be partly filled, is dropped.
 */
static PyObject *link_gather_bytes(PyObject *self, PyObject *const *args,
                                   Py_ssize_t count)
{
    session s;
    parcel p = {.session = &s};
    const mls_shm_places places = {.place = make_places, .context = &p};
    const mlspy_state *state = state_of_link((link_object *)self);
    int64_t root;
    if (state == NULL || mlspy_take_count("gather_bytes", 4, count) < 0 ||
        mlspy_take_int64(state, args[1], "root", &root) < 0) {
        return NULL;
    }
    if (!PyBytes_Check(args[0]) || root < -1 ||
        root >= (int64_t)((link_object *)self)->world) {
        PyErr_SetString(PyExc_TypeError, "gather_bytes takes bytes, and a rank or -1");
        return NULL;
    }
    if (begin_operation(&s, self, args[2], args[3]) < 0) {
        return NULL;
    }
    s.saved = PyEval_SaveThread();
    const mls_code code = mls_shm_gather_bytes(
        s.place, &s.call, PyBytes_AS_STRING(args[0]), (size_t)PyBytes_GET_SIZE(args[0]),
        (int)root, &places, &s.st);
    PyEval_RestoreThread(s.saved);
    return finish_operation(&s, code, p.list == NULL ? Py_NewRef(Py_None) : p.list);
}

/* ---- abort and close ---- */

/* abort(): from any thread, also during an operation. Holds the lock: mls_shm_abort sets
 * a word and wakes sleepers but never blocks. */
static PyObject *link_abort(PyObject *self, PyObject *unused)
{
    (void)unused;
    link_object *link = (link_object *)self;
    pthread_mutex_lock(&link->lock);
    if (link->place != NULL) {
        mls_shm_abort(link->place);
    }
    pthread_mutex_unlock(&link->lock);
    Py_RETURN_NONE;
}

/* close(): now, or when the running operation has ended. May be called repeatedly. */
static PyObject *link_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    link_object *link = (link_object *)self;
    pthread_mutex_lock(&link->lock);
    link->closing = true;
    mls_shm *place = take_unused(link);
    pthread_mutex_unlock(&link->lock);
    mls_shm_free(place);
    Py_RETURN_NONE;
}

/* ended() -> why the group is broken, or "". Holds the lock: it reads a word and formats
 * a text but never blocks. */
static PyObject *link_ended(PyObject *self, PyObject *unused)
{
    (void)unused;
    link_object *link = (link_object *)self;
    char text[MLS_TEXT_BYTES] = "";
    pthread_mutex_lock(&link->lock);
    if (link->place == NULL || link->closing) {
        snprintf(text, sizeof text, "closed");
    } else {
        (void)mls_shm_ended(link->place, text, sizeof text);
    }
    pthread_mutex_unlock(&link->lock);
    return PyUnicode_FromString(text);
}

/* No operation can be running, because each holds a reference. The type is a heap type,
 * and every link holds a reference to it. */
static void link_dealloc(link_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    mls_shm_free(self->place);
    pthread_mutex_destroy(&self->lock);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef link_methods[] = {
    {"barrier", MLSPY_FASTCALL(link_barrier),
     "barrier($self, timeout, text, /)\n--\n\nWait for all ranks."},
    {"broadcast", MLSPY_FASTCALL(link_broadcast),
     "broadcast($self, array, root, timeout, text, /)\n--\n\nBytes of one rank for all."},
    {"all_gather", MLSPY_FASTCALL(link_all_gather),
     "all_gather($self, array, out, sizes, timeout, text, /)\n--\n\nBytes of all ranks."},
    {"all_to_all", MLSPY_FASTCALL(link_all_to_all),
     "all_to_all($self, array, sent, out, wanted, timeout, text, /)\n--\n\nBytes for "
     "each rank."},
    {"all_reduce", MLSPY_FASTCALL(link_all_reduce),
     "all_reduce($self, array, out, op, divisor, timeout, text, /)\n--\n\nThe same sum "
     "on all ranks."},
    {"reduce_scatter", MLSPY_FASTCALL(link_reduce_scatter),
     "reduce_scatter($self, bucket, wants_norms, timeout, text, /)\n--\n\nSums of "
     "which each rank gets a part."},
    {"gather_bytes", MLSPY_FASTCALL(link_gather_bytes),
     "gather_bytes($self, data, root, timeout, text, /)\n--\n\nBytes of any lengths."},
    {"abort", link_abort, METH_NOARGS,
     "abort($self, /)\n--\n\nEnd the group for all ranks."},
    {"close", link_close, METH_NOARGS,
     "close($self, /)\n--\n\nLeave, when no operation is under way any more."},
    {"ended", link_ended, METH_NOARGS,
     "ended($self, /)\n--\n\nWhy the group is unusable, or nothing."},
    {NULL, NULL, 0, NULL},
};

/* References no Python objects, so it cannot be part of a cycle. */
static PyType_Slot link_slots[] = {
    {Py_tp_dealloc, (void *)link_dealloc},
    {Py_tp_methods, link_methods},
    {Py_tp_doc, (void *)"A rank's place in a group of one host."},
    {0, NULL},
};

/* Instances are created only by the functions below. */
static PyType_Spec link_spec = {
    .name = "mlstate._core.LocalLink",
    .basicsize = sizeof(link_object),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = link_slots,
};

/* ---- construction ---- */

/* Returns a new link that owns the handle; NULL with MemoryError set, and the handle
 * freed. */
static PyObject *link_of(const mlspy_state *state, mls_shm *place, size_t rank,
                         size_t world)
{
    link_object *link =
        (link_object *)state->local_link_type->tp_alloc(state->local_link_type, 0);
    if (link == NULL) {
        mls_shm_free(place);
        return NULL;
    }
    pthread_mutex_init(&link->lock, NULL);
    link->place = place;
    link->rank = rank;
    link->world = world;
    return (PyObject *)link;
}

/* Parses a shape from three arguments: ranks, bytes of a slot, slots. Returns -1 with an
 * exception set. */
static int take_shape(const mlspy_state *state, PyObject *const *args, mls_shm_shape *out,
                      size_t *bytes)
{
    int64_t numbers[3];
    mls_status st;
    for (int i = 0; i < 3; i++) {
        if (mlspy_take_int64(state, args[i], "ranks and slots", &numbers[i]) < 0) {
            return -1;
        }
        if (numbers[i] < 0) {
            PyErr_SetString(PyExc_ValueError, "ranks and slots are not negative");
            return -1;
        }
    }
    *out = (mls_shm_shape){.world = (size_t)numbers[0],
                           .slot_bytes = (size_t)numbers[1],
                           .depth = (size_t)numbers[2]};
    if (mls_shm_measure(out, bytes, &st) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    return 0;
}

/* local_measure(world, slot_bytes, depth) -> bytes of memory */
static PyObject *local_measure(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    mls_shm_shape shape;
    size_t bytes;
    if (mlspy_take_count("local_measure", 3, count) < 0 ||
        take_shape(mlspy_state_of(module), args, &shape, &bytes) < 0) {
        return NULL;
    }
    return PyLong_FromSize_t(bytes);
}

/* local_join(world, slot_bytes, depth, rank, fd) -> LocalLink, which owns the descriptor
 *
 * From mls_shm_join on the core owns the descriptor and closes it also on failure. An
 * argument error before that leaves it to the caller.
 */
static PyObject *local_join(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_shm_shape shape;
    mls_shm *place = NULL;
    mls_status st;
    int64_t rank, fd;
    size_t bytes;
    if (mlspy_take_count("local_join", 5, count) < 0 ||
        take_shape(state, args, &shape, &bytes) < 0 ||
        mlspy_take_int64(state, args[3], "rank", &rank) < 0 ||
        mlspy_take_int64(state, args[4], "descriptor", &fd) < 0) {
        return NULL;
    }
    if (fd < 0 || fd > INT_MAX || rank < 0) {
        PyErr_SetString(PyExc_ValueError, "a rank or a descriptor that cannot be");
        return NULL;
    }
    const mls_code code =
        mls_shm_join(&shape, (size_t)rank, (int)fd, state->kernels, &place, &st);
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return link_of(state, place, (size_t)rank, shape.world);
}

/* local_threads(world, slot_bytes, depth) -> a LocalLink for each rank
 *
 * Every handle is owned by a link or freed. After a failure the list frees the links that
 * it has, link_of has freed its own handle, and the loop frees the rest.
 */
static PyObject *local_threads(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_shm_shape shape;
    mls_shm *places[MLS_SHM_MAX_RANKS];
    mls_status st;
    size_t bytes;
    if (mlspy_take_count("local_threads", 3, count) < 0 ||
        take_shape(state, args, &shape, &bytes) < 0) {
        return NULL;
    }
    if (mls_shm_threads(&shape, state->kernels, places, &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    PyObject *list = PyList_New((Py_ssize_t)shape.world);
    for (size_t rank = 0; rank < shape.world; rank++) {
        PyObject *link =
            list == NULL ? NULL : link_of(state, places[rank], rank, shape.world);
        if (link != NULL) {
            PyList_SET_ITEM(list, (Py_ssize_t)rank, link);
        } else if (list == NULL) {
            mls_shm_free(places[rank]);
        } else {
            Py_CLEAR(list);
        }
    }
    return list;
}

PyMethodDef mlspy_local_methods[] = {
    {"local_measure", MLSPY_FASTCALL(local_measure),
     "local_measure(world, slot_bytes, depth, /)\n--\n\nBytes of a group's memory."},
    {"local_join", MLSPY_FASTCALL(local_join),
     "local_join(world, slot_bytes, depth, rank, fd, /)\n--\n\nA place in the memory "
     "behind a file."},
    {"local_threads", MLSPY_FASTCALL(local_threads),
     "local_threads(world, slot_bytes, depth, /)\n--\n\nPlaces for threads."},
    {NULL, NULL, 0, NULL},
};

/* The type is added only for isinstance checks. */
int mlspy_local_add(PyObject *module)
{
    mlspy_state *state = mlspy_state_of(module);
    state->local_link_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &link_spec, NULL);
    return state->local_link_type == NULL
               ? -1
               : PyModule_AddType(module, state->local_link_type);
}
