/* py_shm_group: LocalLink: a rank's operations of mlstate.collectives.LocalGroup; their
 * timeout, Ctrl-C, abort, close.
 *
 * Operations wait for other ranks, so each releases the GIL and reacquires it now and
 * then to let Python check for signals. A link runs one operation at a time. Other
 * threads may abort or close it meanwhile. Closing does not wait: the handle is freed
 * when the running operation has ended.
 */
#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/module_state.h"
#include "gradients/bucket_capsule.h"

#include "base/size.h"
#include "collectives/shm_group.h"

#include <pthread.h>

/* A LocalLink: one rank's handle of a group, and whether it is in use. */
typedef struct link_object {
    PyObject_HEAD pthread_mutex_t lock; /* guards the fields below; held only briefly */
    mls_shm *handle;                    /* NULL when closed */
    bool busy, closing; /* an operation is running; the handle is freed when none is */
    size_t rank, world; /* constant */
} link_object;

/* An operation that runs. It is on the caller's stack; the core has a pointer to it, for
 * its callbacks, until the operation returns. */
typedef struct session {
    link_object *link;
    mlspy_view data, out; /* released when the operation has ended */
    mls_shm *handle;      /* the link's */
    PyThreadState *saved; /* of this thread, while the GIL is released */
    mls_shm_call call;
    mls_str text;  /* describes the call; must be equal on all ranks */
    mls_code code; /* of the core's function */
    mls_status st;
} session;

/* Takes the handle out of a link that was closed and that no operation uses, and returns
 * it for the caller to free; otherwise returns NULL. The caller holds the lock, so only
 * one thread gets the handle, and frees it outside the lock, because that wakes other
 * ranks and unmaps memory. */
static mls_shm *take_unused(link_object *self)
{
    mls_shm *unused = NULL;
    if (self->closing && !self->busy) {
        unused = self->handle;
        self->handle = NULL;
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
    const bool goes_on = PyErr_CheckSignals() == 0;
    s->saved = PyEval_SaveThread();
    return goes_on;
}

/* Marks the link as busy. Returns -1 with RuntimeError set if it is closed or busy.
 * Called with the GIL held; no thread waits for the GIL while it holds the lock, which
 * excludes deadlocks. */
static int occupy_link(link_object *self)
{
    const char *reason = NULL;
    pthread_mutex_lock(&self->lock);
    if (self->handle == NULL || self->closing) {
        reason = "the link is closed";
    } else if (self->busy) {
        reason = "an operation is under way";
    } else {
        self->busy = true;
    }
    pthread_mutex_unlock(&self->lock);
    if (reason != NULL) {
        return MLSPY_REFUSE(PyExc_RuntimeError, "%s", reason);
    }
    return 0;
}

/* Begins an operation on `s->link`: parses the last two arguments of every operation,
 * `timeout` (seconds) and `call_text` (equal on all ranks), and marks the link as busy.
 * Returns -1 with an exception set, and the link not busy. The text is borrowed from its
 * str, which the arguments of the call hold. */
static int begin_operation(session *s, PyObject *timeout, PyObject *call_text)
{
    s->call = (mls_shm_call){.poll = look_for_signals, .context = s};
    if (mlspy_take_double(timeout, "timeout", &s->call.timeout) < 0 ||
        mlspy_take_text(call_text, "text", &s->text) < 0 || occupy_link(s->link) < 0) {
        return -1;
    }
    s->call.text = s->text.data; /* the UTF-8 of a str ends with a NUL */
    /* no lock needed: a busy link keeps its handle */
    s->handle = s->link->handle;
    return 0;
}

/* Runs a function of the core, which returns a code, without the GIL. */
#define RUN_OPERATION(s, call)                                                           \
    do {                                                                                 \
        (s).saved = PyEval_SaveThread();                                                 \
        (s).code = (call);                                                               \
        PyEval_RestoreThread((s).saved);                                                 \
    } while (0)

/* Releases the views of a session that has no operation under way. Returns NULL. */
static PyObject *release_views(session *s)
{
    mlspy_view_release(&s->data);
    mlspy_view_release(&s->out);
    return NULL;
}

/* Ends an operation: marks the link as free, releases the views, and frees the handle if
 * the link was closed meanwhile. Returns `result`, or NULL with an exception set; on
 * failure it drops `result`. */
static PyObject *finish_operation(session *s, PyObject *result)
{
    pthread_mutex_lock(&s->link->lock);
    s->link->busy = false;
    mls_shm *unused = take_unused(s->link);
    pthread_mutex_unlock(&s->link->lock);
    mls_shm_free(unused);
    release_views(s);
    if (s->code == MLS_OK) {
        return result;
    }
    Py_XDECREF(result);
    /* the exception of a signal or of a callback is set already */
    return PyErr_Occurred()
               ? NULL
               : mlspy_raise(mlspy_state_of_type(Py_TYPE(s->link)), &s->st, NULL);
}

/* ---- arguments ---- */

/* Views packed elements in native byte order, each aligned to its size; any other array
 * raises ValueError. `writable`: the array must allow writes. Returns -1 with an
 * exception set, and no owner. An empty array may have any address: it is not read. */
static int take_packed(link_object *self, PyObject *array, const char *label,
                       bool writable, mlspy_view *view)
{
    size_t count;
    if (mlspy_view_for(mlspy_state_of_type(Py_TYPE(self)), array, label, writable, view) <
        0) {
        return -1;
    }
    if (mls_bucket_takes(&view->tensor) || (mls_tensor_count(&view->tensor, &count) &&
                                            count == 0 && !view->tensor.swapped)) {
        return 0;
    }
    mlspy_view_release(view);
    return MLSPY_REFUSE(PyExc_ValueError, "%s is not packed, aligned and native", label);
}

/* Parses a list of `world` byte or element counts, one for each rank, into `out`. Accepts
 * only ints, no other objects with __index__, whose code could change the list. Returns
 * -1 with an exception set. */
static int take_counts(PyObject *list, size_t world, size_t *out)
{
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != (Py_ssize_t)world) {
        return MLSPY_REFUSE(PyExc_TypeError, "counts must be a list, one for each rank");
    }
    for (size_t rank = 0; rank < world; rank++) {
        out[rank] = PyLong_AsSize_t(PyList_GET_ITEM(list, (Py_ssize_t)rank));
        if (out[rank] == (size_t)-1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

/* Checks that a view has as many elements as the `world` counts together. Returns -1 with
 * ValueError set; `label` names the array. User-supplied counts may overflow. This keeps
 * the core within the array: where the core counts bytes, wider elements only mean spare
 * room. */
static int check_length(const mlspy_view *view, const char *label, const size_t *counts,
                        size_t world)
{
    size_t count, expected;
    if (!mls_tensor_count(&view->tensor, &count) ||
        !mls_size_sum(counts, world, &expected) || count != expected) {
        return MLSPY_REFUSE(PyExc_ValueError,
                            "%s has not as many elements as the counts say", label);
    }
    return 0;
}

/* ---- operations ----
 *
 * Each operation views its arrays before it begins and releases them after it has ended,
 * because both need the GIL. There is no early return between begin_operation() and
 * finish_operation(). The result is created before finish_operation(), which drops it if
 * the operation failed.
 *
 * Every operation raises CollectiveError if the calls of the ranks do not match or the
 * group is broken (by a timeout, an abort, or a rank that died, left or was interrupted),
 * RuntimeError if the link is closed or busy, and the exception of a signal handler.
 * Outputs may then be partly filled.
 */

/* barrier(timeout, call_text): returns when every rank has called it */
static PyObject *link_barrier(link_object *self, PyObject *const *args, Py_ssize_t count)
{
    session s = {.link = self};
    if (mlspy_take_count("barrier", 2, count) < 0 ||
        begin_operation(&s, args[0], args[1]) < 0) {
        return NULL;
    }
    RUN_OPERATION(s, mls_shm_barrier(s.handle, &s.call, &s.st));
    return finish_operation(&s, Py_NewRef(Py_None));
}

/* broadcast(array, root, timeout, call_text): copies the bytes of rank `root`'s array
 * into the arrays of all others; the root's array may be read-only */
static PyObject *link_broadcast(link_object *self, PyObject *const *args,
                                Py_ssize_t count)
{
    int64_t root;
    session s = {.link = self};
    if (mlspy_take_count("broadcast", 4, count) < 0 ||
        mlspy_take_int64(mlspy_state_of_type(Py_TYPE(self)), args[1], "root", &root) <
            0) {
        return NULL;
    }
    if (root < 0 || (size_t)root >= self->world) {
        return PyErr_Format(PyExc_ValueError,
                            "root %lld is not a rank of this group (0..%zu)",
                            (long long)root, self->world - 1);
    }
    if (take_packed(self, args[0], "array", (size_t)root != self->rank, &s.data) < 0 ||
        begin_operation(&s, args[2], args[3]) < 0) {
        return release_views(&s);
    }
    RUN_OPERATION(s, mls_shm_broadcast(s.handle, &s.call, s.data.tensor.data,
                                       mlspy_bytes(&s.data.tensor), (size_t)root, &s.st));
    return finish_operation(&s, Py_NewRef(Py_None));
}

/* all_gather(array, out, sizes, timeout, call_text): copies the arrays of all ranks, in
 * rank order, into `out` of each rank
 *
 * Both are arrays of bytes, and `sizes` has the bytes of each rank's array. The sizes fit
 * the stack, because a group has at most MLS_SHM_MAX_RANKS ranks.
 */
static PyObject *link_all_gather(link_object *self, PyObject *const *args,
                                 Py_ssize_t count)
{
    size_t sizes[MLS_SHM_MAX_RANKS];
    session s = {.link = self};
    if (mlspy_take_count("all_gather", 5, count) < 0 ||
        take_counts(args[2], self->world, sizes) < 0 ||
        take_packed(self, args[0], "array", false /* read-only */, &s.data) < 0 ||
        take_packed(self, args[1], "out", true /* writable */, &s.out) < 0 ||
        check_length(&s.data, "array", &sizes[self->rank], 1) < 0 ||
        check_length(&s.out, "out", sizes, self->world) < 0 ||
        begin_operation(&s, args[3], args[4]) < 0) {
        return release_views(&s);
    }
    RUN_OPERATION(s, mls_shm_all_gather(s.handle, &s.call, s.data.tensor.data, sizes,
                                        s.out.tensor.data, &s.st));
    return finish_operation(&s, Py_NewRef(Py_None));
}

/* all_to_all(array, sent, out, received, timeout, call_text): sends a part of `array` to
 * each rank, and receives a part from each into `out`
 *
 * Both are arrays of bytes, with the parts in rank order; `sent` and `received` are lists
 * of the bytes of each part.
 */
static PyObject *link_all_to_all(link_object *self, PyObject *const *args,
                                 Py_ssize_t count)
{
    size_t sent[MLS_SHM_MAX_RANKS], received[MLS_SHM_MAX_RANKS];
    session s = {.link = self};
    if (mlspy_take_count("all_to_all", 6, count) < 0 ||
        take_counts(args[1], self->world, sent) < 0 ||
        take_counts(args[3], self->world, received) < 0 ||
        take_packed(self, args[0], "array", false /* read-only */, &s.data) < 0 ||
        take_packed(self, args[2], "out", true /* writable */, &s.out) < 0 ||
        check_length(&s.data, "array", sent, self->world) < 0 ||
        check_length(&s.out, "out", received, self->world) < 0 ||
        begin_operation(&s, args[4], args[5]) < 0) {
        return release_views(&s);
    }
    RUN_OPERATION(s, mls_shm_all_to_all(s.handle, &s.call, s.data.tensor.data, sent,
                                        s.out.tensor.data, received, &s.st));
    return finish_operation(&s, Py_NewRef(Py_None));
}

/* all_reduce(array, out, op, divisor, timeout, call_text): writes the sum, minimum or
 * maximum of all ranks' arrays, divided by `divisor`, to `out` of each rank, which has
 * the same dtype
 *
 * The core checks that the dtype supports the op before anything is sent.
 */
static PyObject *link_all_reduce(link_object *self, PyObject *const *args,
                                 Py_ssize_t count)
{
    mls_reduction r = {.divisor = 1};
    size_t n = 0;
    session s = {.link = self};
    if (mlspy_take_count("all_reduce", 6, count) < 0 ||
        mlspy_take_op(args[2], &r.op) < 0 ||
        mlspy_take_double(args[3], "divisor", &r.divisor) < 0 ||
        take_packed(self, args[0], "array", false /* read-only */, &s.data) < 0 ||
        take_packed(self, args[1], "out", true /* writable */, &s.out) < 0) {
        return release_views(&s);
    }
    r.dtype = s.data.tensor.dtype;
    r.out_dtype = s.out.tensor.dtype;
    (void)mls_tensor_count(&s.data.tensor, &n);
    if (check_length(&s.out, "out", &n, 1) < 0) {
        return release_views(&s);
    }
    if (r.dtype != r.out_dtype) {
        PyErr_SetString(PyExc_ValueError, "out has another dtype than the array");
        return release_views(&s);
    }
    if (begin_operation(&s, args[4], args[5]) < 0) {
        return release_views(&s);
    }
    RUN_OPERATION(s, mls_shm_all_reduce(s.handle, &s.call, s.data.tensor.data,
                                        s.out.tensor.data, n, &r, &s.st));
    return finish_operation(&s, Py_NewRef(Py_None));
}

/* reduce_scatter(bucket, wants_norms, timeout, call_text) -> [(squares, nonfinite), ...];
 * empty unless wants_norms
 *
 * Reduces the buckets of all ranks into the outputs of each. If the list cannot be
 * allocated, the sums are complete nevertheless, and finish_operation() passes the
 * exception on.
 */
static PyObject *link_reduce_scatter(link_object *self, PyObject *const *args,
                                     Py_ssize_t count)
{
    mls_bucket *b;
    bool wants_norms;
    PyObject *partials = NULL;
    session s = {.link = self};
    if (mlspy_take_count("reduce_scatter", 4, count) < 0 ||
        (b = mlspy_bucket_of(args[0])) == NULL ||
        mlspy_take_bool(args[1], &wants_norms) < 0) {
        return NULL;
    }
    if (b->world != self->world || b->rank != self->rank) {
        return PyErr_Format(PyExc_ValueError,
                            "the bucket is that of another rank or group");
    }
    if (begin_operation(&s, args[2], args[3]) < 0) {
        return NULL;
    }
    RUN_OPERATION(s, mls_shm_reduce_scatter(s.handle, &s.call, b->segments, b->count,
                                            wants_norms, &s.st));
    if (s.code == MLS_OK) {
        partials = wants_norms ? mlspy_bucket_norm_partials(b) : PyList_New(0);
    }
    return finish_operation(&s, partials);
}

/* ---- gather_bytes ---- */

/* Context of make_places. */
typedef struct gather_context {
    session *session;
    PyObject *list; /* strong: the bytes objects that a gather_bytes fills; or NULL */
} gather_context;

/* Callback of the core that provides the memory of gather_bytes: makes a bytes object of
 * sizes[rank] bytes for each rank, and stores the address of its memory in out[rank].
 * Acquires the GIL briefly. Returns false with an exception set in this thread. A bytes
 * object may be written while no other code has seen it. Sizes come from other ranks and
 * may be invalid: a size beyond a bytes object's limit is reported as a lack of
 * memory. */
static bool make_places(void *context, const size_t *sizes, unsigned char **out)
{
    gather_context *p = context;
    const size_t world = p->session->link->world;
    PyEval_RestoreThread(p->session->saved);
    p->list = PyList_New((Py_ssize_t)world);
    for (size_t rank = 0; p->list != NULL && rank < world; rank++) {
        /* 64: more than the header of a bytes object has */
        PyObject *bytes = sizes[rank] > PY_SSIZE_T_MAX - 64
                              ? PyErr_NoMemory()
                              : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizes[rank]);
        out[rank] = bytes == NULL ? NULL : (unsigned char *)PyBytes_AS_STRING(bytes);
        mlspy_put(&p->list, (Py_ssize_t)rank, bytes);
    }
    p->session->saved = PyEval_SaveThread();
    return p->list != NULL;
}

/* gather_bytes(data, root, timeout, call_text) -> list of the bytes of all ranks, or None
 * if this rank is not the root
 *
 * With `root` -1 every rank gets the list. On failure the list, whose bytes may be partly
 * filled, is dropped.
 */
static PyObject *link_gather_bytes(link_object *self, PyObject *const *args,
                                   Py_ssize_t count)
{
    session s = {.link = self};
    gather_context p = {.session = &s};
    const mls_shm_buffer_provider provider = {.provide = make_places, .context = &p};
    int64_t root;
    if (mlspy_take_count("gather_bytes", 4, count) < 0 ||
        mlspy_take_int64(mlspy_state_of_type(Py_TYPE(self)), args[1], "root", &root) <
            0) {
        return NULL;
    }
    if (!PyBytes_Check(args[0]) || root < -1 || root >= (int64_t)self->world) {
        return PyErr_Format(PyExc_TypeError,
                            "gather_bytes takes bytes, and a rank or -1");
    }
    if (begin_operation(&s, args[2], args[3]) < 0) {
        return NULL;
    }
    const char *data = PyBytes_AS_STRING(args[0]);
    const size_t bytes = (size_t)PyBytes_GET_SIZE(args[0]);
    RUN_OPERATION(s, mls_shm_gather_bytes(s.handle, &s.call, data, bytes, (int)root,
                                          &provider, &s.st));
    return finish_operation(&s, p.list == NULL ? Py_NewRef(Py_None) : p.list);
}

/* ---- abort and close ---- */

/* abort(): breaks the group, so that its operations fail on all ranks; does nothing on a
 * closed link
 *
 * May be called from any thread, also during an operation. Holds the lock: mls_shm_abort
 * sets a word and wakes sleepers but never blocks.
 */
static PyObject *link_abort(link_object *self, PyObject *unused)
{
    (void)unused;
    pthread_mutex_lock(&self->lock);
    if (self->handle != NULL) {
        mls_shm_abort(self->handle);
    }
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

/* close(): frees the handle now, or when the running operation has ended. May be called
 * repeatedly. */
static PyObject *link_close(link_object *self, PyObject *unused)
{
    (void)unused;
    pthread_mutex_lock(&self->lock);
    self->closing = true;
    mls_shm *handle = take_unused(self);
    pthread_mutex_unlock(&self->lock);
    mls_shm_free(handle);
    Py_RETURN_NONE;
}

/* ended() -> why the group is broken, "closed" if this rank closed it, or "". Holds the
 * lock: it reads a word and formats a text but never blocks. */
static PyObject *link_ended(link_object *self, PyObject *unused)
{
    (void)unused;
    char text[MLS_TEXT_BYTES] = "";
    pthread_mutex_lock(&self->lock);
    if (self->handle == NULL || self->closing) {
        snprintf(text, sizeof text, "closed");
    } else {
        (void)mls_shm_is_broken(self->handle, text, sizeof text);
    }
    pthread_mutex_unlock(&self->lock);
    return PyUnicode_FromString(text);
}

/* No operation can be running, because each holds a reference. The type is a heap type,
 * and every link holds a reference to it. */
static void link_dealloc(link_object *self)
{
    mls_shm_free(self->handle);
    pthread_mutex_destroy(&self->lock);
    mlspy_free(self);
}

static PyMethodDef link_methods[] = {
    MLSPY_METHOD(link, barrier, METH_FASTCALL, "timeout, call_text, /"),
    MLSPY_METHOD(link, broadcast, METH_FASTCALL, "array, root, timeout, call_text, /"),
    MLSPY_METHOD(link, all_gather, METH_FASTCALL,
                 "array, out, sizes, timeout, call_text, /"),
    MLSPY_METHOD(link, all_to_all, METH_FASTCALL,
                 "array, sent, out, received, timeout, call_text, /"),
    MLSPY_METHOD(link, all_reduce, METH_FASTCALL,
                 "array, out, op, divisor, timeout, call_text, /"),
    MLSPY_METHOD(link, reduce_scatter, METH_FASTCALL,
                 "bucket, wants_norms, timeout, call_text, /"),
    MLSPY_METHOD(link, gather_bytes, METH_FASTCALL, "data, root, timeout, call_text, /"),
    MLSPY_METHOD(link, abort, METH_NOARGS, "/"),
    MLSPY_METHOD(link, close, METH_NOARGS, "/"),
    MLSPY_METHOD(link, ended, METH_NOARGS, "/"),
    {NULL, NULL, 0, NULL},
};

/* References no Python objects, so it cannot be part of a cycle. */
static PyType_Slot link_slots[] = {
    {Py_tp_dealloc, (void *)link_dealloc},
    {Py_tp_methods, link_methods},
    {0, NULL},
};

/* Instances are created only by the functions below. */
MLSPY_DEFINE_SPEC(link, "LocalLink", link_object,
                  Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION);

/* ---- construction ---- */

/* Returns a new link that owns `handle`, that of `rank` in a group of `world` ranks.
 * After a failure returns NULL with MemoryError set, and the handle is freed. */
static PyObject *link_of(const mlspy_state *state, mls_shm *handle, size_t rank,
                         size_t world)
{
    link_object *link =
        (link_object *)state->local_link_type->tp_alloc(state->local_link_type, 0);
    if (link == NULL) {
        mls_shm_free(handle);
        return NULL;
    }
    pthread_mutex_init(&link->lock, NULL);
    link->handle = handle;
    link->rank = rank;
    link->world = world;
    return (PyObject *)link;
}

/* Parses a number of ranks, chooses the slots of a group's memory, and computes its
 * bytes. Returns -1 with an exception set. */
static int take_shape(const mlspy_state *state, PyObject *world, mls_shm_shape *out,
                      size_t *bytes)
{
    int64_t ranks;
    mls_status st;
    if (mlspy_take_int64(state, world, "ranks", &ranks) < 0) {
        return -1;
    }
    if (ranks < 0) {
        return MLSPY_REFUSE(PyExc_ValueError,
                            "%lld ranks: a group on one host has 1 to %d",
                            (long long)ranks, (int)MLS_SHM_MAX_RANKS);
    }
    *out = (mls_shm_shape){.world = (size_t)ranks};
    return mlspy_check(state, mls_shm_measure(out, bytes, &st), &st);
}

/* local_measure(world) -> bytes of memory that a group of `world` ranks needs */
PyObject *core_local_measure(mlspy_state *state, PyObject *const *args)
{
    mls_shm_shape shape;
    size_t bytes;
    if (take_shape(state, args[0], &shape, &bytes) < 0) {
        return NULL;
    }
    return PyLong_FromSize_t(bytes);
}

/* local_join(world, rank, fd) -> LocalLink of a rank, in the memory of a file
 *
 * `fd` is a descriptor of the file, of the size that local_measure returned; the link
 * owns it. From mls_shm_join on the core owns the descriptor and closes it also on
 * failure. An argument error before that leaves it to the caller.
 */
PyObject *core_local_join(mlspy_state *state, PyObject *const *args)
{
    mls_shm_shape shape;
    mls_shm *handle = NULL;
    mls_status st;
    int64_t rank, fd;
    size_t bytes;
    if (take_shape(state, args[0], &shape, &bytes) < 0 ||
        mlspy_take_int64(state, args[1], "rank", &rank) < 0 ||
        mlspy_take_int64(state, args[2], "descriptor", &fd) < 0) {
        return NULL;
    }
    if (fd < 0 || fd > INT_MAX || rank < 0) {
        return PyErr_Format(PyExc_ValueError, "a rank or a descriptor that cannot be");
    }
    if (mlspy_check(
            state,
            mls_shm_join(&shape, (size_t)rank, (int)fd, state->kernels, &handle, &st),
            &st) < 0) {
        return NULL;
    }
    return link_of(state, handle, (size_t)rank, shape.world);
}

/* local_threads(world) -> a LocalLink for each rank, whose ranks are threads of this
 * process
 *
 * Every handle is owned by a link or freed. After a failure the list frees the links that
 * it has, link_of has freed its own handle, and the loop frees the rest.
 */
PyObject *core_local_threads(mlspy_state *state, PyObject *const *args)
{
    mls_shm_shape shape;
    mls_shm *handles[MLS_SHM_MAX_RANKS];
    mls_status st;
    size_t bytes;
    if (take_shape(state, args[0], &shape, &bytes) < 0) {
        return NULL;
    }
    if (mls_shm_threads(&shape, state->kernels, handles, &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    PyObject *list = PyList_New((Py_ssize_t)shape.world);
    for (size_t rank = 0; rank < shape.world; rank++) {
        if (list == NULL) {
            mls_shm_free(handles[rank]);
        } else {
            mlspy_put(&list, (Py_ssize_t)rank,
                      link_of(state, handles[rank], rank, shape.world));
        }
    }
    return list;
}

/* The type is added only for isinstance checks. */
int mlspy_local_add(PyObject *module)
{
    return mlspy_add_type(module, &link_spec, NULL,
                          &mlspy_state_of(module)->local_link_type);
}
