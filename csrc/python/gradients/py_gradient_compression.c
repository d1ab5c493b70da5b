/* py_gradient_compression: buckets with compressed messages.
 *
 * The bucket is the capsule of py_bucket; only the messages differ. Messages are encoded
 * and decoded without the GIL: the caller's arguments hold the capsule, and the views
 * hold the buffers.
 */
#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "gradients/bucket_capsule.h"
#include "gradients/gradients_bindings.h"

#include "base/memory.h"
#include "gradients/gradient_compression.h"

#include <string.h>

/* Parses "float16", "bfloat16" or "int8". Returns -1 with an exception set. The core has
 * the only list of names. */
static int take_wire(PyObject *object, mls_gradient_compression *out)
{
    mls_str text;
    if (mlspy_take_text(object, "compression", &text) < 0) {
        return -1;
    }
    if (mls_gradient_compression_from_name(text, out)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "compression must be 'float16', 'bfloat16' or 'int8', not %R", object);
    return -1;
}

/* Parses the first two arguments: a bucket of float32 sums (borrowed from its capsule),
 * and a format. Returns NULL with an exception set. Every call checks the bucket, because
 * the core casts its arrays to float without a check. */
static mls_bucket *take_bucket(const mlspy_state *state, PyObject *const *args,
                               mls_gradient_compression *wire)
{
    mls_status st;
    mlspy_bucket *held = mlspy_bucket_of(args[0]);
    if (held == NULL || take_wire(args[1], wire) < 0) {
        return NULL;
    }
    if (mls_gradient_compression_check(&held->bucket, &st) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
        return NULL;
    }
    return &held->bucket;
}

/* bucket_wire_sizes(bucket, compression) -> (bytes to each rank with 0 for this one, own)
 *
 * "Own" is also the size of each message from another rank. "N" consumes the list.
 */
static PyObject *bucket_wire_sizes(PyObject *module, PyObject *const *args,
                                   Py_ssize_t count)
{
    mls_gradient_compression wire;
    if (mlspy_take_count("bucket_wire_sizes", 2, count) < 0) {
        return NULL;
    }
    const mls_bucket *b = take_bucket(mlspy_state_of(module), args, &wire);
    PyObject *to = b == NULL ? NULL : PyList_New((Py_ssize_t)b->world);
    for (size_t rank = 0; to != NULL && rank < b->world; rank++) {
        PyObject *number = PyLong_FromSize_t(
            rank == b->rank ? 0 : mls_gradient_compression_bucket_bytes(b, wire, rank));
        if (number == NULL) {
            Py_CLEAR(to);
        } else {
            PyList_SET_ITEM(to, (Py_ssize_t)rank, number);
        }
    }
    return to == NULL ? NULL
                      : Py_BuildValue("(Nn)", to,
                                      (Py_ssize_t)mls_gradient_compression_bucket_bytes(
                                          b, wire, b->rank));
}

/* Views a buffer of at least `wanted` bytes for messages. Returns -1 with an exception
 * set, without a view. Parts are aligned relative to the buffer's start, so the buffer
 * itself must be aligned. */
static int view_buffer(const mlspy_state *state, PyObject *array, size_t wanted,
                       bool writable, mlspy_view *out)
{
    size_t have = 0;
    if (mlspy_view_packed(state, array, "the messages", writable, out) < 0) {
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

/* Views that are held while the GIL is released. */
typedef struct pack_job {
    mlspy_view send, own;
    mlspy_view *views; /* of the residuals; NULL for none */
    float **residuals; /* data of `views`; NULL for none */
    size_t count;
} pack_job;

/* Accepts a partly filled or zeroed job; `count` is the number of views. */
static void pack_fini(pack_job *job)
{
    for (size_t i = 0; i < job->count; i++) {
        mlspy_view_release(&job->views[i]);
    }
    mlspy_view_release(&job->send);
    mlspy_view_release(&job->own);
    mls_free(job->views);
    mls_free(job->residuals);
}

/* Views the residuals: float32, with as many elements as their segments; None means no
 * residuals. Returns -1 with an exception set; pack_fini releases the views.
 *
 * A residual covers the whole array, not only this rank's part, because the messages to
 * all ranks lose precision.
 */
static int take_residuals(const mlspy_state *state, const mls_bucket *b, PyObject *list,
                          pack_job *job)
{
    if (list == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(list) || PyTuple_GET_SIZE(list) != (Py_ssize_t)b->count) {
        PyErr_SetString(PyExc_TypeError,
                        "residuals must be a tuple, one for each segment");
        return -1;
    }
    job->views = mls_alloc(b->count, sizeof *job->views);
    job->residuals = mls_alloc(b->count, sizeof *job->residuals);
    if (job->views == NULL || job->residuals == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < b->count; i++) {
        size_t elements = 0;
        mlspy_view *view = &job->views[i];
        if (mlspy_view_packed(state, PyTuple_GET_ITEM(list, (Py_ssize_t)i), "a residual",
                              true, view) < 0) {
            return -1;
        }
        job->count++; /* from here on pack_fini releases the view */
        if (view->tensor.dtype != MLS_F32 ||
            !mls_tensor_count(&view->tensor, &elements) ||
            elements != mls_segment_elements(&b->segments[i], b->world)) {
            PyErr_SetString(PyExc_ValueError,
                            "a residual is float32, and has the gradient's elements");
            return -1;
        }
        job->residuals[i] = (float *)(void *)view->tensor.data;
    }
    return 0;
}

/* bucket_wire_pack(bucket, compression, residuals, send, own)
 *
 * Updates the residuals, so a bucket must be packed once in each step. Everything is
 * checked before the first residual changes.
 */
static PyObject *bucket_wire_pack(PyObject *module, PyObject *const *args,
                                  Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_gradient_compression wire;
    pack_job job = {0};
    PyObject *result = NULL;
    if (mlspy_take_count("bucket_wire_pack", 5, count) < 0) {
        return NULL;
    }
    const mls_bucket *b = take_bucket(state, args, &wire);
    if (b == NULL || take_residuals(state, b, args[2], &job) < 0 ||
        view_buffer(state, args[3], mls_gradient_compression_sent_bytes(b, wire), true,
                    &job.send) < 0 ||
        view_buffer(state, args[4],
                    mls_gradient_compression_bucket_bytes(b, wire, b->rank), true,
                    &job.own) < 0) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
        mls_gradient_compression_pack(b, state->kernels, wire, job.residuals,
                                      job.send.tensor.data, job.own.tensor.data);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    pack_fini(&job);
    return result;
}

/* bucket_wire_reduce(bucket, compression, own, received) -> [(squares, nonfinite), ...]
 *
 * `own` was filled by bucket_wire_pack. The norm partials are those of the divided
 * outputs. The bucket stores them, so only one thread at a time may reduce it.
 */
static PyObject *bucket_wire_reduce(PyObject *module, PyObject *const *args,
                                    Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_gradient_compression wire;
    mlspy_view own = {0}, received = {0};
    PyObject *result = NULL;
    if (mlspy_take_count("bucket_wire_reduce", 4, count) < 0) {
        return NULL;
    }
    const mls_bucket *b = take_bucket(state, args, &wire);
    if (b == NULL) {
        return NULL;
    }
    const size_t mine = mls_gradient_compression_bucket_bytes(b, wire, b->rank);
    if (view_buffer(state, args[2], mine, false, &own) < 0 ||
        view_buffer(state, args[3], mine * (b->world - 1), false, &received) < 0) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
        mls_gradient_compression_reduce(b, state->kernels, wire, own.tensor.data,
                                        received.tensor.data);
    Py_END_ALLOW_THREADS
    result = mlspy_bucket_norm_partials(b);
done:
    mlspy_view_release(&own);
    mlspy_view_release(&received);
    return result;
}

PyMethodDef mlspy_wire_methods[] = {
    {"bucket_wire_sizes", MLSPY_FASTCALL(bucket_wire_sizes),
     "bucket_wire_sizes(bucket, compression, /)\n--\n\nBytes to each other rank, and "
     "own."},
    {"bucket_wire_pack", MLSPY_FASTCALL(bucket_wire_pack),
     "bucket_wire_pack(bucket, compression, residuals, send, own, /)\n--\n\nEncode all "
     "parts."},
    {"bucket_wire_reduce", MLSPY_FASTCALL(bucket_wire_reduce),
     "bucket_wire_reduce(bucket, compression, own, received, /)\n--\n\nReduce what was "
     "encoded."},
    {NULL, NULL, 0, NULL},
};
