/* py_bucket: buckets of gradients, and sketches of arrays.
 *
 * A bucket is parsed once, from tuples (array, counts, out), into a capsule that keeps
 * the arrays alive. Packing and reducing then need no Python objects.
 */
#include "gradients/bucket_capsule.h"

#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "gradients/gradients_bindings.h"

#include "base/memory.h"
#include "base/size.h"
#include "gradients/ams_sketch.h"

#include <string.h>

/* The capsule's name, which identifies capsules of this file. */
static const char BUCKET[] = "mlstate.bucket";

/* Lengths are compared too: a str may contain a NUL. */
int mlspy_take_op(PyObject *object, mls_reduce_op *out)
{
    static const char *const names[] = {
        [MLS_REDUCE_SUM] = "sum", [MLS_REDUCE_MIN] = "min", [MLS_REDUCE_MAX] = "max"};
    mls_str text;
    if (mlspy_take_text(object, "op", &text) < 0) {
        return -1;
    }
    for (int op = 0; op <= MLS_REDUCE_MAX; op++) {
        if (mls_str_is(text, names[op])) {
            *out = (mls_reduce_op)op;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "op must be sum, min or max, got %.100R", object);
    return -1;
}

/* ---- construction ---- */

/* Frees a bucket; accepts a partly constructed one, in which `count` segments have
 * owners. Needs the GIL, because it may drop the last reference to an array. */
static void bucket_free(mlspy_bucket *held)
{
    if (held == NULL) {
        return;
    }
    for (size_t i = 0; held->owners != NULL && i < 2 * held->bucket.count; i++) {
        Py_DECREF(held->owners[i]);
    }
    mls_free(held->owners);
    mls_free(held->counts);
    mls_free(held->bucket.segments);
    mls_free(held);
}

/* The name always matches, because only this file creates such capsules. */
static void capsule_free(PyObject *capsule)
{
    bucket_free(PyCapsule_GetPointer(capsule, BUCKET));
}

/* Also refuses objects that are not capsules. */
mlspy_bucket *mlspy_bucket_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, BUCKET);
}

/* Allocates a bucket with room for `count` segments of `world` ranks, and no segments
 * yet. Returns NULL with an exception set. The arrays never grow later, because segments
 * point into `counts`. */
static mlspy_bucket *bucket_new(size_t count, size_t world)
{
    size_t numbers;
    mlspy_bucket *held = mls_alloc(1, sizeof *held);
    if (held == NULL || !mls_size_mul(count, world, &numbers)) {
        mls_free(held);
        PyErr_NoMemory();
        return NULL;
    }
    held->bucket.world = world;
    held->owners = mls_alloc(2 * count + 1, sizeof *held->owners);
    held->counts = mls_alloc(numbers + 1, sizeof *held->counts);
    held->bucket.segments = mls_alloc(count + 1, sizeof *held->bucket.segments);
    if (held->owners == NULL || held->counts == NULL || held->bucket.segments == NULL) {
        bucket_free(held);
        PyErr_NoMemory();
        return NULL;
    }
    return held;
}

/* The quick path is for plain arrays; a bucket may have thousands. If it declines, the
 * slow path handles the object or raises the right error. */
int mlspy_view_packed(const mlspy_state *state, PyObject *array, const char *what,
                      bool writable, mlspy_view *out)
{
    if (!mlspy_view_quickly(state, array, writable, out) &&
        (writable ? mlspy_view_writable(state, array, what, out)
                  : mlspy_view_of(state, array, what, out)) < 0) {
        return -1;
    }
    if (!mls_bucket_takes(&out->tensor)) {
        PyErr_Format(PyExc_ValueError,
                     "%s of a bucket must be contiguous, aligned and in the byte order "
                     "of the machine",
                     what);
        mlspy_view_release(out);
        return -1;
    }
    return 0;
}

/* Views an array that a bucket can use without a copy and that has this dtype and shape:
 * a plain ndarray, or a tensor in main memory. Returns 1 with a view for the caller to
 * release, 0 without a view for any other object, and -1 with TypeError set if `dtype` or
 * `shape` is invalid. */
static int view_fitting(const mlspy_state *state, PyObject *array, PyObject *dtype,
                        PyObject *shape, bool writable, mlspy_view *out)
{
    mls_str name;
    mls_dtype wanted;
    if (mlspy_take_text(dtype, "dtype", &name) < 0) {
        return -1;
    }
    if (!PyTuple_Check(shape)) {
        PyErr_SetString(PyExc_TypeError, "shape must be a tuple");
        return -1;
    }
    /* a subclass of ndarray may hold more than its memory */
    if ((PyArray_Check(array) && !PyArray_CheckExact(array)) ||
        !mls_dtype_from_name(name.data, name.length, &wanted) ||
        !mlspy_view_quickly(state, array, writable, out)) {
        return 0;
    }
    const mls_tensor *t = &out->tensor;
    bool same =
        t->dtype == wanted && mls_bucket_takes(t) && t->rank == PyTuple_GET_SIZE(shape);
    for (int axis = 0; same && axis < t->rank; axis++) {
        PyObject *length = PyTuple_GET_ITEM(shape, axis);
        same = PyLong_Check(length) && PyLong_AsSize_t(length) == t->shape[axis];
    }
    if (!same) {
        mlspy_view_release(out);
        PyErr_Clear(); /* set by lengths beyond size_t */
    }
    return same;
}

/* is_plain(array, writable) -> bool */
static PyObject *is_plain(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    mlspy_view view;
    if (mlspy_take_count("is_plain", 2, count) < 0) {
        return NULL;
    }
    const bool plain =
        (!PyArray_Check(args[0]) || PyArray_CheckExact(args[0])) &&
        mlspy_view_quickly(mlspy_state_of(module), args[0], args[1] == Py_True, &view);
    if (plain) {
        mlspy_view_release(&view);
    }
    return PyBool_FromLong(plain);
}

/* bucket_fits(array, dtype, shape, writable) -> bool */
static PyObject *bucket_fits(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    mlspy_view view;
    if (mlspy_take_count("bucket_fits", 4, count) < 0) {
        return NULL;
    }
    const int fits = view_fitting(mlspy_state_of(module), args[0], args[1], args[2],
                                  args[3] == Py_True, &view);
    if (fits < 0) {
        return NULL;
    }
    if (fits) {
        mlspy_view_release(&view);
    }
    return PyBool_FromLong(fits);
}

/* Parses a tuple of the elements of each rank's part. Returns -1 with an exception set. A
 * tuple cannot change while __index__ of an item runs. */
static int take_counts(const mlspy_state *state, PyObject *tuple, size_t world,
                       size_t *counts)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != (Py_ssize_t)world) {
        PyErr_Format(PyExc_TypeError, "counts must be a tuple of %zu ints", world);
        return -1;
    }
    for (size_t i = 0; i < world; i++) {
        int64_t count;
        PyObject *number = PyTuple_GET_ITEM(tuple, (Py_ssize_t)i);
        if (mlspy_take_int64(state, number, "count", &count) < 0) {
            return -1;
        }
        if (count < 0) {
            PyErr_SetString(PyExc_ValueError, "counts must not be negative");
            return -1;
        }
        counts[i] = (size_t)count;
    }
    return 0;
}

/* Views the output of a segment. A tuple of 3 allows any dtype that reductions support. A
 * tuple of 5 also has a dtype and a shape: the output must match them and have the
 * array's type. Returns -1 with an exception set. */
static int view_output(const mlspy_state *state, PyObject *tuple, mlspy_view *out)
{
    PyObject *output = PyTuple_GET_ITEM(tuple, 2);
    if (PyTuple_GET_SIZE(tuple) == 3) {
        return mlspy_view_packed(state, output, "the output", true, out);
    }
    int fits = Py_TYPE(output) == Py_TYPE(PyTuple_GET_ITEM(tuple, 0));
    if (fits) {
        fits = view_fitting(state, output, PyTuple_GET_ITEM(tuple, 3),
                            PyTuple_GET_ITEM(tuple, 4), true, out);
    }
    if (fits == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "the output is not an array or tensor of that dtype and shape "
                        "that a bucket takes as it lies");
    }
    return fits > 0 ? 0 : -1;
}

/* Fills segment `held->bucket.count` from a tuple, and counts it. Returns -1 with an
 * exception set; the caller then frees the whole bucket. Each segment sets the dtypes of
 * `reduction` from its own arrays. */
static int bucket_add(const mlspy_state *state, PyObject *tuple, mls_reduction reduction,
                      mlspy_bucket *held)
{
    mls_status st;
    mls_bucket *b = &held->bucket;
    mlspy_view views[2];
    size_t *counts = &held->counts[b->world * b->count];
    if (!PyTuple_Check(tuple) ||
        (PyTuple_GET_SIZE(tuple) != 3 && PyTuple_GET_SIZE(tuple) != 5)) {
        PyErr_SetString(PyExc_TypeError, "a segment is a tuple (array, counts, out) or "
                                         "(array, counts, out, dtype, shape)");
        return -1;
    }
    if (mlspy_view_packed(state, PyTuple_GET_ITEM(tuple, 0), "an array", false,
                          &views[0]) < 0) {
        return -1;
    }
    if (view_output(state, tuple, &views[1]) < 0) {
        mlspy_view_release(&views[0]);
        return -1;
    }
    held->owners[2 * b->count] = views[0].owner;
    held->owners[2 * b->count + 1] = views[1].owner;
    b->count++; /* from here on bucket_free drops the owners */
    if (take_counts(state, PyTuple_GET_ITEM(tuple, 1), b->world, counts) < 0) {
        return -1;
    }
    reduction.dtype = views[0].tensor.dtype;
    reduction.out_dtype = views[1].tensor.dtype;
    if (mls_segment_check(&views[0].tensor, &views[1].tensor, counts, b->world, b->rank,
                          &st) != MLS_OK ||
        mls_reduce_check(&reduction, &st) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    b->segments[b->count - 1] = (mls_segment){.data = views[0].tensor.data,
                                              .counts = counts,
                                              .out = views[1].tensor.data,
                                              .reduction = reduction};
    return 0;
}

/* bucket(segments, world, rank, op, divisor) -> capsule
 *
 * The capsule holds its own references to the arrays. Before the capsule exists, errors
 * free the bucket here; afterwards its destructor does.
 */
static PyObject *bucket(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_reduction reduction = {.divisor = 1};
    int64_t world, rank;
    if (mlspy_take_count("bucket", 5, count) < 0 ||
        mlspy_take_int64(state, args[1], "world", &world) < 0 ||
        mlspy_take_int64(state, args[2], "rank", &rank) < 0 ||
        mlspy_take_op(args[3], &reduction.op) < 0 ||
        mlspy_take_double(args[4], "divisor", &reduction.divisor) < 0) {
        return NULL;
    }
    /* a non-negative rank below `world` implies that `world` is at least 1 */
    if (!PyList_Check(args[0]) || rank < 0 || rank >= world || world > INT_MAX) {
        PyErr_SetString(PyExc_TypeError,
                        "a bucket is a list of segments, for one of its ranks");
        return NULL;
    }
    /* a copy: the list may change while outputs are viewed */
    PyObject *segments = PyList_AsTuple(args[0]);
    mlspy_bucket *held = NULL;
    if (segments == NULL ||
        (held = bucket_new((size_t)PyTuple_GET_SIZE(segments), (size_t)world)) == NULL) {
        goto done;
    }
    held->bucket.rank = (size_t)rank;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(segments); i++) {
        if (bucket_add(state, PyTuple_GET_ITEM(segments, i), reduction, held) < 0) {
            bucket_free(held);
            held = NULL;
            goto done;
        }
    }
done:
    Py_XDECREF(segments);
    PyObject *capsule = held == NULL ? NULL : PyCapsule_New(held, BUCKET, capsule_free);
    if (held != NULL && capsule == NULL) {
        bucket_free(held);
    }
    return capsule;
}

/* ---- use ---- */

/* bucket_sizes(bucket) -> (bytes to each rank with 0 for this one, bytes from each)
 *
 * Every other rank sends the same number of bytes: the size of this rank's parts. "N"
 * consumes the list, also on failure.
 */
static PyObject *bucket_sizes(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_status st;
    if (mlspy_take_count("bucket_sizes", 1, count) < 0) {
        return NULL;
    }
    const mlspy_bucket *held = mlspy_bucket_of(args[0]);
    PyObject *to = held == NULL ? NULL : PyList_New((Py_ssize_t)held->bucket.world);
    size_t mine = 0;
    for (size_t rank = 0; to != NULL && rank < held->bucket.world; rank++) {
        size_t bytes;
        if (mls_bucket_bytes(&held->bucket, rank, &bytes, &st) != MLS_OK) {
            Py_CLEAR(to);
            return mlspy_raise(state, &st, NULL);
        }
        const bool own = rank == held->bucket.rank;
        mine = own ? bytes : mine;
        PyObject *number = PyLong_FromSize_t(own ? 0 : bytes);
        if (number == NULL) {
            Py_CLEAR(to);
        } else {
            PyList_SET_ITEM(to, (Py_ssize_t)rank, number);
        }
    }
    return to == NULL ? NULL : Py_BuildValue("(Nn)", to, (Py_ssize_t)mine);
}

/* Views a buffer with room for all messages. Returns -1 with an exception set, without a
 * view. Kernels read the parts in place, at multiples of MLS_BUCKET_ALIGN, so the buffer
 * itself must be aligned. A send buffer must be writable. */
static int view_messages(const mlspy_state *state, const mls_bucket *b, PyObject *array,
                         bool sent, mlspy_view *out)
{
    size_t wanted, have;
    mls_status st;
    if ((sent ? mls_bucket_sent_bytes(b, &wanted, &st)
              : mls_bucket_received_bytes(b, &wanted, &st)) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    if (mlspy_view_packed(state, array, "the messages", sent, out) < 0) {
        return -1;
    }
    if (!mls_tensor_bytes(&out->tensor, &have) || have < wanted ||
        (uintptr_t)out->tensor.data % MLS_BUCKET_ALIGN != 0) {
        PyErr_Format(PyExc_ValueError,
                     "messages of %zu bytes do not fit %zu bytes of memory aligned to %d",
                     wanted, have, (int)MLS_BUCKET_ALIGN);
        mlspy_view_release(out);
        return -1;
    }
    return 0;
}

/* bucket_pack(bucket, send)
 *
 * The caller holds the arguments of the call, so the capsule and its arrays stay alive
 * while the GIL is released.
 */
static PyObject *bucket_pack(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mlspy_view send = {0};
    if (mlspy_take_count("bucket_pack", 2, count) < 0) {
        return NULL;
    }
    const mlspy_bucket *held = mlspy_bucket_of(args[0]);
    if (held == NULL || view_messages(state, &held->bucket, args[1], true, &send) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        mls_bucket_pack(&held->bucket, send.tensor.data);
    Py_END_ALLOW_THREADS
    mlspy_view_release(&send);
    Py_RETURN_NONE;
}

/* A partly filled list can be dropped: its empty entries are NULL. */
PyObject *mlspy_bucket_norm_partials(const mls_bucket *b)
{
    PyObject *list = PyList_New((Py_ssize_t)b->count);
    for (size_t i = 0; list != NULL && i < b->count; i++) {
        const mls_norm_partial *partial = &b->segments[i].norm_partial;
        PyObject *pair = Py_BuildValue("(dK)", partial->squares,
                                       (unsigned long long)partial->nonfinite);
        if (pair == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, pair);
        }
    }
    return list;
}

/* bucket_reduce(bucket, received) -> [(squares, nonfinite), ...]
 *
 * The bucket stores the norm partials, so only one thread at a time may reduce it.
 */
static PyObject *bucket_reduce(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mlspy_view received = {0};
    if (mlspy_take_count("bucket_reduce", 2, count) < 0) {
        return NULL;
    }
    mlspy_bucket *held = mlspy_bucket_of(args[0]);
    if (held == NULL ||
        view_messages(state, &held->bucket, args[1], false, &received) < 0) {
        return NULL;
    }
    const void **sources = mls_alloc(held->bucket.world, sizeof *sources);
    if (sources == NULL) {
        mlspy_view_release(&received);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
        mls_bucket_reduce(&held->bucket, state->kernels, received.tensor.data, sources);
    Py_END_ALLOW_THREADS
    mls_free(sources);
    mlspy_view_release(&received);
    return mlspy_bucket_norm_partials(&held->bucket);
}

/* sketch(array, start, seed) -> (signed sum, sum of absolute values)
 *
 * `array` is packed; its first element has index `start`.
 */
static PyObject *sketch(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mlspy_view view = {0};
    mls_ams_sketch sum = {0};
    mls_status st;
    int64_t start, seed;
    size_t elements = 0;
    if (mlspy_take_count("sketch", 3, count) < 0 ||
        mlspy_take_int64(state, args[1], "start", &start) < 0 ||
        mlspy_take_int64(state, args[2], "seed", &seed) < 0 ||
        mlspy_view_packed(state, args[0], "an array", false, &view) < 0) {
        return NULL;
    }
    (void)mls_tensor_count(&view.tensor, &elements);
    mls_code code;
    Py_BEGIN_ALLOW_THREADS
        code = mls_ams_sketch_add(&sum, view.tensor.data, view.tensor.dtype,
                                  (size_t)start, elements, (uint64_t)seed, &st);
    Py_END_ALLOW_THREADS
    mlspy_view_release(&view);
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return Py_BuildValue("(dd)", sum.signed_sum, sum.magnitude);
}

PyMethodDef mlspy_bucket_methods[] = {
    {"is_plain", MLSPY_FASTCALL(is_plain),
     "is_plain(array, writable, /)\n--\n\nWhether an array is an ndarray, or a torch "
     "tensor\nin main memory, that the core reads or writes as it is."},
    {"bucket_fits", MLSPY_FASTCALL(bucket_fits),
     "bucket_fits(array, dtype, shape, writable, /)\n--\n\nWhether a bucket takes an "
     "array as it "
     "lies."},
    {"bucket", MLSPY_FASTCALL(bucket),
     "bucket(segments, world, rank, op, divisor, /)\n--\n\nArrays to be reduced as one."},
    {"bucket_sizes", MLSPY_FASTCALL(bucket_sizes),
     "bucket_sizes(bucket, /)\n--\n\nBytes to each other rank, and from each."},
    {"bucket_pack", MLSPY_FASTCALL(bucket_pack),
     "bucket_pack(bucket, send, /)\n--\n\nFill the messages to the other ranks."},
    {"bucket_reduce", MLSPY_FASTCALL(bucket_reduce),
     "bucket_reduce(bucket, received, /)\n--\n\nReduce what the other ranks sent."},
    {"sketch", MLSPY_FASTCALL(sketch),
     "sketch(array, start, seed, /)\n--\n\nSigned and absolute sum of the elements."},
    {NULL, NULL, 0, NULL},
};
