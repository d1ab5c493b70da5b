/* py_bucket: buckets of gradients: which arrays are used without a copy or refused;
 * messages; sketches; squares in a tree.
 *
 * A bucket is parsed once, from tuples (array, counts, out), into a capsule that keeps
 * the arrays alive. Packing and reducing then need no Python objects.
 */
#include "gradients/bucket_capsule.h"

#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "base/address_ranges.h"
#include "base/memory.h"
#include "base/size.h"
#include "gradients/ams_sketch.h"
#include "gradients/reduce/tree.h"

/* A bucket, with references that keep its arrays alive. */
typedef struct held_bucket {
    mls_bucket bucket;
    PyObject **owners; /* strong: array and output (or tuple) of each segment */
    size_t *counts;    /* counts of all segments */
} held_bucket;

/* The name of the capsules of this file, which identifies them. */
static const char capsule_name[] = "mlstate.bucket";

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
    return MLSPY_REFUSE(PyExc_ValueError, "op must be sum, min or max, got %.100R",
                        object);
}

/* ---- construction ---- */

/* Frees a bucket; accepts NULL, and a partly constructed one: `bucket->bucket.count`
 * segments have owners. Needs the GIL, because it may drop the last reference to an
 * array. */
static void bucket_free(held_bucket *bucket)
{
    if (bucket == NULL) {
        return;
    }
    for (size_t i = 0; bucket->owners != NULL && i < 2 * bucket->bucket.count; i++) {
        Py_DECREF(bucket->owners[i]);
    }
    for (size_t i = 0; i < bucket->bucket.count; i++) {
        mls_free((void *)(uintptr_t)bucket->bucket.segments[i].sums);
    }
    mls_free(bucket->owners);
    mls_free(bucket->counts);
    mls_free(bucket->bucket.segments);
    mls_free(bucket);
}

/* The destructor of a bucket's capsule. The name always matches, because only this file
 * creates such capsules. */
static void capsule_free(PyObject *capsule)
{
    bucket_free(PyCapsule_GetPointer(capsule, capsule_name));
}

/* Also refuses objects that are not capsules. The bucket is the first member. */
mls_bucket *mlspy_bucket_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, capsule_name);
}

/* Allocates a bucket with room for `count` segments of `world` ranks, and no segments
 * yet. The arrays never grow later, because segments point into `counts`. Returns NULL
 * with MemoryError set. */
static held_bucket *bucket_new(size_t count, size_t world)
{
    size_t counts_length; /* one count for each segment and rank */
    held_bucket *bucket = mls_alloc(1, sizeof *bucket);
    if (bucket == NULL || !mls_size_mul(count, world, &counts_length)) {
        mls_free(bucket);
        PyErr_NoMemory();
        return NULL;
    }
    bucket->bucket.world = world;
    /* two owners for each segment: its array and its output */
    bucket->owners = mls_alloc(2 * count, sizeof *bucket->owners);
    bucket->counts = mls_alloc(counts_length, sizeof *bucket->counts);
    bucket->bucket.segments = mls_alloc(count, sizeof *bucket->bucket.segments);
    if (bucket->owners == NULL || bucket->counts == NULL ||
        bucket->bucket.segments == NULL) {
        bucket_free(bucket);
        PyErr_NoMemory();
        return NULL;
    }
    return bucket;
}

/* Views an array that is packed, aligned and in native byte order; any other raises
 * ValueError. `label` names it in errors, before "of a bucket". `writable`: it must
 * allow writes. Returns -1 with an exception set, without a view. */
static int view_packed(const mlspy_state *state, PyObject *array, const char *label,
                       bool writable, mlspy_view *out)
{
    if (mlspy_view_for(state, array, label, writable, out) < 0) {
        return -1;
    }
    if (!mls_bucket_takes(&out->tensor)) {
        PyErr_Format(PyExc_ValueError,
                     "%s of a bucket must be contiguous, aligned and in the byte order "
                     "of the machine",
                     label);
        mlspy_view_release(out);
        return -1;
    }
    return 0;
}

/* Views an array that a bucket can use without a copy and that has this dtype (a name)
 * and shape (a tuple): a plain ndarray, or a tensor in main memory; if `writable`, one
 * that may be written to. Returns 1 with a view for the caller to release, 0 without a
 * view for any other object, and -1 with TypeError set if `dtype` or `shape` is invalid.
 */
static int view_fitting(const mlspy_state *state, PyObject *array, PyObject *dtype,
                        PyObject *shape, bool writable, mlspy_view *out)
{
    mls_str name;
    mls_dtype expected;
    if (mlspy_take_text(dtype, "dtype", &name) < 0) {
        return -1;
    }
    if (!PyTuple_Check(shape)) {
        return MLSPY_REFUSE(PyExc_TypeError, "shape must be a tuple");
    }
    /* a subclass of ndarray may hold more than its memory */
    if ((PyArray_Check(array) && !PyArray_CheckExact(array)) ||
        !mls_dtype_from_name(name.data, name.length, &expected) ||
        !mlspy_view_quickly(state, array, writable, out)) {
        return 0;
    }
    const mls_tensor *t = &out->tensor;
    bool fits =
        t->dtype == expected && mls_bucket_takes(t) && t->rank == PyTuple_GET_SIZE(shape);
    for (int axis = 0; fits && axis < t->rank; axis++) {
        PyObject *length = PyTuple_GET_ITEM(shape, axis);
        fits = PyLong_Check(length) && PyLong_AsSize_t(length) == t->shape[axis];
    }
    if (!fits) {
        mlspy_view_release(out);
        PyErr_Clear(); /* set by lengths beyond size_t */
    }
    return fits;
}

/* can_view(array, writable) -> whether the core can view a plain ndarray or a tensor in
 * main memory as it is. Never raises. */
PyObject *core_can_view(mlspy_state *state, PyObject *const *args)
{
    mlspy_view view;
    const bool can_view = (!PyArray_Check(args[0]) || PyArray_CheckExact(args[0])) &&
                          mlspy_view_quickly(state, args[0], args[1] == Py_True, &view);
    if (can_view) {
        mlspy_view_release(&view);
    }
    return PyBool_FromLong(can_view);
}

/* bucket_fits(array, dtype, shape, writable) -> whether a bucket can use the array
 * without a copy, as view_fitting */
PyObject *core_bucket_fits(mlspy_state *state, PyObject *const *args)
{
    mlspy_view view;
    const int fits =
        view_fitting(state, args[0], args[1], args[2], args[3] == Py_True, &view);
    if (fits < 0) {
        return NULL;
    }
    if (fits) {
        mlspy_view_release(&view);
    }
    return PyBool_FromLong(fits);
}

/* Parses a tuple with the number of elements of each of `world` ranks' parts into
 * `counts`. A tuple cannot change while __index__ of an item runs. Returns -1 with an
 * exception set. */
static int take_counts(const mlspy_state *state, PyObject *tuple, size_t world,
                       size_t *counts)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != (Py_ssize_t)world) {
        return MLSPY_REFUSE(PyExc_TypeError, "counts must be a tuple of %zu ints", world);
    }
    for (size_t i = 0; i < world; i++) {
        int64_t count;
        PyObject *number = PyTuple_GET_ITEM(tuple, (Py_ssize_t)i);
        if (mlspy_take_int64(state, number, "count", &count) < 0) {
            return -1;
        }
        if (count < 0) {
            return MLSPY_REFUSE(PyExc_ValueError, "counts must not be negative");
        }
        counts[i] = (size_t)count;
    }
    return 0;
}

/* Views the output of a segment, item 2 of its tuple. A tuple of 3 allows any dtype that
 * reductions support. A tuple of 5 also has a dtype and a shape: the output must match
 * them and have the type of the array, item 0. Returns -1 with an exception set, without
 * a view. */
static int view_output(const mlspy_state *state, PyObject *tuple, mlspy_view *out)
{
    PyObject *output = PyTuple_GET_ITEM(tuple, 2);
    if (PyTuple_GET_SIZE(tuple) == 3) {
        return view_packed(state, output, "the output", true /* writable */, out);
    }
    int fits = Py_TYPE(output) == Py_TYPE(PyTuple_GET_ITEM(tuple, 0));
    if (fits) {
        fits = view_fitting(state, output, PyTuple_GET_ITEM(tuple, 3),
                            PyTuple_GET_ITEM(tuple, 4), true /* writable */, out);
    }
    if (fits == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "the output is not an array or tensor of that dtype and shape "
                        "that a bucket takes as it lies");
    }
    return fits > 0 ? 0 : -1;
}

/* Returns whether the codes of `sums` are as described in bucket.h, for `count`
 * memories. */
static bool are_sums_valid(const mls_sums *sums, const mls_segment *s, size_t world,
                           size_t count)
{
    const uint64_t *const codes = sums->codes, end = world + MLS_SUM_SCRATCH + count;
    for (size_t i = 0, next; i < sums->length; i = next) {
        const size_t left = sums->length - i;
        if (left < 3 || codes[i] < world || codes[i] >= end || codes[i + 1] == 0 ||
            codes[i + 1] > mls_size_least(MLS_SUM_ADDENDS, left - 2)) {
            return false;
        }
        next = i + 2 + (size_t)codes[i + 1];
        for (size_t k = i + 2; k < next; k++) {
            if (codes[k] >= end || (s->reduction.dtype != s->reduction.out_dtype &&
                                    (codes[k] < world) != (codes[i + 2] < world))) {
                return false;
            }
        }
    }
    return true;
}

/* Sets the sums of segment `s` of the array `data` from its tuple, which keeps the
 * memories (at least one) and the codes alive. Sets the output's dtype. Returns -1 with
 * an exception set. */
static int take_sums(const mlspy_state *state, PyObject *tuple, const mls_tensor *data,
                     const mls_bucket *b, mls_segment *s)
{
    mls_status st;
    mlspy_view view;
    PyObject *memories = PyTuple_GET_ITEM(tuple, 2);
    const size_t count = PyTuple_Check(memories) ? (size_t)PyTuple_GET_SIZE(memories) : 0;
    mls_sums *sums = mls_alloc(1, sizeof *sums + count * sizeof(void *));
    s->sums = sums; /* bucket_free frees it */
    if (sums == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (view_packed(state, PyTuple_GET_ITEM(tuple, 3), "the codes", false, &view) < 0) {
        return -1;
    }
    void **const addresses = (void **)(sums + 1);
    *sums = (mls_sums){(const void *)view.tensor.data, 0, addresses};
    (void)mls_tensor_count(&view.tensor, &sums->length);
    bool fits = count > 0 && view.tensor.dtype == MLS_U64;
    mlspy_view_release(&view);
    for (size_t i = 0; i < count; i++) {
        if (view_packed(state, PyTuple_GET_ITEM(memories, (Py_ssize_t)i), "a memory",
                        true /* writable */, &view) < 0) {
            return -1;
        }
        const mls_code code =
            mls_segment_check(data, &view.tensor, s->counts, b->world, b->rank, &st);
        fits = fits && (i == 0 || view.tensor.dtype == s->reduction.out_dtype);
        addresses[i] = view.tensor.data;
        s->reduction.out_dtype = view.tensor.dtype;
        mlspy_view_release(&view);
        if (mlspy_check(state, code, &st) < 0) {
            return -1;
        }
    }
    return fits && are_sums_valid(sums, s, b->world, count)
               ? 0
               : MLSPY_REFUSE(PyExc_ValueError,
                              "the memories or codes are not those of sums");
}

/* Fills the next segment of a bucket from its tuple, and counts it. `reduction` has the
 * operation and the divisor; each segment sets the dtypes from its own arrays. Returns -1
 * with an exception set; the caller then frees the whole bucket. */
static int bucket_add(const mlspy_state *state, PyObject *tuple, mls_reduction reduction,
                      held_bucket *bucket)
{
    mls_status st;
    mls_bucket *b = &bucket->bucket;
    mlspy_view array = {0}, output = {0};
    size_t *counts = &bucket->counts[b->world * b->count];
    const Py_ssize_t length = PyTuple_Check(tuple) ? PyTuple_GET_SIZE(tuple) : 0;
    if (length < 3 || length > 5) {
        return MLSPY_REFUSE(PyExc_TypeError,
                            "a segment is a tuple (array, counts, out), (array, counts, "
                            "memories, codes) or (array, counts, out, dtype, shape)");
    }
    const bool has_sums = length == 4;
    if (view_packed(state, PyTuple_GET_ITEM(tuple, 0), "an array", false /* read-only */,
                    &array) < 0) {
        return -1;
    }
    if (!has_sums && view_output(state, tuple, &output) < 0) {
        mlspy_view_release(&array);
        return -1;
    }
    bucket->owners[2 * b->count] = array.owner;
    bucket->owners[2 * b->count + 1] = has_sums ? Py_NewRef(tuple) : output.owner;
    mls_segment *s = &b->segments[b->count++]; /* now bucket_free drops the owners */
    if (take_counts(state, PyTuple_GET_ITEM(tuple, 1), b->world, counts) < 0) {
        return -1;
    }
    reduction.dtype = array.tensor.dtype;
    reduction.out_dtype = output.tensor.dtype;
    *s = (mls_segment){.data = array.tensor.data,
                       .counts = counts,
                       .out = output.tensor.data,
                       .reduction = reduction};
    if (has_sums && take_sums(state, tuple, &array.tensor, b, s) < 0) {
        return -1;
    }
    mls_code code = has_sums ? MLS_OK
                             : mls_segment_check(&array.tensor, &output.tensor, counts,
                                                 b->world, b->rank, &st);
    code = code == MLS_OK ? mls_reduce_check(&s->reduction, &st) : code;
    return mlspy_check(state, code, &st);
}

/* The highest end of the ranges so far, the segment that owns it, and the highest end of
 * all other segments' ranges. */
typedef struct highest_end {
    uintptr_t end, other_end;
    size_t owner;
} highest_end;

/* Include the range `r`. */
static void raise_end(highest_end *h, const mls_address_range *r)
{
    if (r->owner == h->owner) {
        h->end = r->high > h->end ? r->high : h->end;
    } else if (r->high > h->end) {
        *h = (highest_end){.end = r->high, .other_end = h->end, .owner = r->owner};
    } else if (r->high > h->other_end) {
        h->other_end = r->high;
    }
}

/* Returns whether a range starts below the highest end of another owner's range. */
static bool is_below_end(const highest_end *h, const mls_address_range *r)
{
    return r->low < (r->owner == h->owner ? h->other_end : h->end);
}

/* Refuses a bucket if the output of one segment shares memory with another segment, whose
 * array or output it would overwrite. Returns -1 with an exception set. */
static int check_segments_apart(const mls_bucket *b)
{
    size_t used = 0;
    /* two for each segment, and as many for sorting them */
    mls_address_range *ranges = mls_alloc(4 * b->count, sizeof *ranges);
    if (ranges == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < b->count; i++) {
        const mls_segment *s = &b->segments[i];
        size_t total = 0;
        for (size_t rank = 0; rank < b->world; rank++) {
            total += s->counts[rank];
        }
        const uintptr_t data = (uintptr_t)s->data, out = (uintptr_t)s->out;
        const size_t bytes = total * mls_dtype_of(s->reduction.dtype)->item_bytes;
        const size_t out_bytes = /* memories of sums are not compared */
            s->sums != NULL
                ? 0
                : s->counts[b->rank] * mls_dtype_of(s->reduction.out_dtype)->item_bytes;
        if (bytes > 0) {
            ranges[used++] = (mls_address_range){data, data + bytes, i, false /* read */};
        }
        if (out_bytes > 0) {
            ranges[used++] =
                (mls_address_range){out, out + out_bytes, i, true /* written */};
        }
    }
    const mls_address_range *sorted =
        mls_address_ranges_sort(ranges, ranges + 2 * b->count, used);
    /* in the order of their starts: an output must start after the ends of all ranges of
     * other segments, an array after those of other segments' outputs */
    highest_end all = {0, 0, SIZE_MAX}, written = {0, 0, SIZE_MAX};
    bool is_apart = true;
    for (size_t i = 0; is_apart && i < used; i++) {
        is_apart = !is_below_end(sorted[i].written ? &all : &written, &sorted[i]);
        raise_end(&all, &sorted[i]);
        if (sorted[i].written) {
            raise_end(&written, &sorted[i]);
        }
    }
    mls_free(ranges);
    return is_apart ? 0
                    : MLSPY_REFUSE(PyExc_ValueError,
                                   "an output shares memory with another gradient of the "
                                   "bucket or with its output");
}

/* bucket(segments, world, rank, op, divisor) -> capsule
 *
 * Makes the bucket of rank `rank` of `world` ranks from a list of tuples (array, counts,
 * out), (array, counts, out, dtype, shape) or (array, counts, memories, codes): `counts`
 * has the number of elements of each rank's part of the array, and `out` receives this
 * rank's part, reduced and divided: `op` is "sum", "min" or "max", and the result is
 * divided by `divisor`. With `dtype` and `shape`, `out` must have them; without, any
 * dtype that reductions support. `memories` (a tuple of arrays, which overlap no other
 * array) and `codes` (uint64) are sums in another order, as in mls_sums.
 * ValueError: an output shares memory with another segment. The capsule holds its own
 * references to the arrays.
 */
PyObject *core_bucket(mlspy_state *state, PyObject *const *args)
{
    mls_reduction reduction = {.divisor = 1};
    int64_t world, rank;
    if (mlspy_take_int64(state, args[1], "world", &world) < 0 ||
        mlspy_take_int64(state, args[2], "rank", &rank) < 0 ||
        mlspy_take_op(args[3], &reduction.op) < 0 ||
        mlspy_take_double(args[4], "divisor", &reduction.divisor) < 0) {
        return NULL;
    }
    /* a non-negative rank below `world` implies that `world` is at least 1 */
    if (!PyList_Check(args[0]) || rank < 0 || rank >= world || world > INT_MAX) {
        return PyErr_Format(PyExc_TypeError,
                            "a bucket is a list of segments, for one of its ranks");
    }
    /* a copy: the list may change while outputs are viewed */
    PyObject *segments = PyList_AsTuple(args[0]);
    held_bucket *bucket =
        segments == NULL ? NULL
                         : bucket_new((size_t)PyTuple_GET_SIZE(segments), (size_t)world);
    PyObject *capsule =
        bucket == NULL ? NULL : PyCapsule_New(bucket, capsule_name, capsule_free);
    if (capsule == NULL) {
        bucket_free(bucket);
        Py_XDECREF(segments);
        return NULL;
    }
    bucket->bucket.rank = (size_t)rank;
    for (Py_ssize_t i = 0; capsule != NULL && i < PyTuple_GET_SIZE(segments); i++) {
        if (bucket_add(state, PyTuple_GET_ITEM(segments, i), reduction, bucket) < 0) {
            Py_CLEAR(capsule); /* frees the bucket */
        }
    }
    Py_DECREF(segments);
    if (capsule != NULL && check_segments_apart(&bucket->bucket) < 0) {
        Py_CLEAR(capsule);
    }
    return capsule;
}

/* ---- messages ----
 *
 * The caller of a function holds its arguments, so the capsule, its arrays and the views
 * stay valid while the GIL is released.
 */

/* bucket_sizes(bucket) -> ([bytes of the message to each rank, 0 for this one], bytes of
 * the message from each other rank)
 *
 * Every other rank sends the same number of bytes: the size of this rank's parts.
 */
PyObject *core_bucket_sizes(mlspy_state *state, PyObject *const *args)
{
    mls_status st;
    const mls_bucket *b = mlspy_bucket_of(args[0]);
    PyObject *to = b == NULL ? NULL : PyList_New((Py_ssize_t)b->world);
    size_t own_bytes = 0;
    for (size_t rank = 0; to != NULL && rank < b->world; rank++) {
        size_t bytes;
        const bool is_local = rank == b->rank;
        const int failed =
            mlspy_check(state, mls_bucket_bytes(b, rank, &bytes, &st), &st);
        mlspy_put(&to, (Py_ssize_t)rank,
                  failed < 0 ? NULL : PyLong_FromSize_t(is_local ? 0 : bytes));
        own_bytes = is_local ? bytes : own_bytes;
    }
    return to == NULL ? NULL : Py_BuildValue("(Nn)", to, (Py_ssize_t)own_bytes);
}

/* Views a buffer of at least `byte_count` bytes for messages; `writable` as for
 * view_packed. Returns -1 with an exception set, without a view. Kernels read the parts
 * in place, at multiples of MLS_BUCKET_ALIGN, so the buffer itself must be aligned. */
static int view_messages(const mlspy_state *state, PyObject *array, size_t byte_count,
                         bool writable, mlspy_view *out)
{
    size_t available = 0;
    if (view_packed(state, array, "the messages", writable, out) < 0) {
        return -1;
    }
    if (mls_tensor_bytes(&out->tensor, &available) && available >= byte_count &&
        (uintptr_t)out->tensor.data % MLS_BUCKET_ALIGN == 0) {
        return 0;
    }
    mlspy_view_release(out);
    return MLSPY_REFUSE(
        PyExc_ValueError,
        "messages of %zu bytes do not fit %zu bytes of memory aligned to %d", byte_count,
        available, (int)MLS_BUCKET_ALIGN);
}

/* bucket_pack(bucket, send): writes the messages to all other ranks into the array
 * `send`, in rank order. */
PyObject *core_bucket_pack(mlspy_state *state, PyObject *const *args)
{
    mlspy_view send = {0};
    mls_status st;
    size_t sent_bytes;
    const mls_bucket *b = mlspy_bucket_of(args[0]);
    if (b == NULL ||
        mlspy_check(state, mls_bucket_sent_bytes(b, &sent_bytes, &st), &st) < 0 ||
        view_messages(state, args[1], sent_bytes, true /* writable */, &send) < 0) {
        return NULL;
    }
    MLSPY_WITHOUT_GIL(mls_bucket_pack(b, send.tensor.data));
    mlspy_view_release(&send);
    Py_RETURN_NONE;
}

/* Returns a new pair (squares, nonfinite). */
PyObject *mlspy_norm_pair(const mls_norm_partial *partial)
{
    return Py_BuildValue("(dK)", partial->squares,
                         (unsigned long long)partial->nonfinite);
}

PyObject *mlspy_bucket_norm_partials(const mls_bucket *b)
{
    PyObject *list = PyList_New((Py_ssize_t)b->count);
    MLSPY_PUT_EACH(list, i, b->count, mlspy_norm_pair(&b->segments[i].norm_partial));
    return list;
}

/* bucket_reduce(bucket, received) -> [(squares, nonfinite), ...]
 *
 * Reduces the messages in `received`, one from each other rank in rank order, and this
 * rank's part into the outputs of the bucket. The norm partials, one for each segment,
 * belong to the divided outputs. The bucket stores them, so only one thread at a time may
 * reduce it.
 */
PyObject *core_bucket_reduce(mlspy_state *state, PyObject *const *args)
{
    mlspy_view received = {0};
    mls_status st;
    size_t received_bytes;
    mls_bucket *b = mlspy_bucket_of(args[0]);
    if (b == NULL ||
        mlspy_check(state, mls_bucket_received_bytes(b, &received_bytes, &st), &st) < 0 ||
        view_messages(state, args[1], received_bytes, false /* read-only */, &received) <
            0) {
        return NULL;
    }
    const void **sources = mls_alloc(b->world, sizeof *sources);
    if (sources == NULL) {
        mlspy_view_release(&received);
        return PyErr_NoMemory();
    }
    MLSPY_WITHOUT_GIL(
        mls_bucket_reduce(b, state->kernels, received.tensor.data, sources));
    mls_free((void *)sources);
    mlspy_view_release(&received);
    return mlspy_bucket_norm_partials(b);
}

/* sketch(array, start, seed) -> (signed sum, sum of absolute values)
 *
 * Computes the sketch of a packed array (ams_sketch.h). In the signed sum each element
 * has a pseudo-random sign, which `seed` and the index of the element determine; the
 * first element has index `start`.
 */
PyObject *core_sketch(mlspy_state *state, PyObject *const *args)
{
    mlspy_view view = {0};
    mls_ams_sketch sum = {0};
    mls_status st;
    int64_t start, seed;
    size_t elements = 0;
    if (mlspy_take_int64(state, args[1], "start", &start) < 0 ||
        mlspy_take_int64(state, args[2], "seed", &seed) < 0 ||
        view_packed(state, args[0], "an array", false /* read-only */, &view) < 0) {
        return NULL;
    }
    (void)mls_tensor_count(&view.tensor, &elements);
    mls_code code;
    MLSPY_WITHOUT_GIL(code = mls_ams_sketch_add(&sum, view.tensor.data, view.tensor.dtype,
                                                (size_t)start, elements, (uint64_t)seed,
                                                &st));
    mlspy_view_release(&view);
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return Py_BuildValue("(dd)", sum.signed_sum, sum.magnitude);
}

/* tree_squares(array, first) -> [float]
 *
 * Sums of squares of the subtrees of a contiguous array, whose first element has index
 * `first` in the whole array.
 */
PyObject *core_tree_squares(mlspy_state *state, PyObject *const *args)
{
    mlspy_view view = {0};
    mls_status st;
    double sums[MLS_MOST_SUBTREES];
    int64_t first;
    size_t elements = 0, subtrees = 0;
    PyObject *list = NULL;
    if (mlspy_take_int64(state, args[1], "first", &first) < 0 ||
        view_packed(state, args[0], "an array", false /* read-only */, &view) < 0) {
        return NULL;
    }
    (void)mls_tensor_count(&view.tensor, &elements);
    const mls_code code = mls_tree_squares_check(view.tensor.dtype, &st);
    if (code == MLS_OK) {
        PyThreadState *saved = mlspy_leave_python(elements);
        subtrees = mls_tree_squares(state->kernels, view.tensor.dtype, view.tensor.data,
                                    (size_t)first, elements, sums);
        mlspy_resume_python(saved);
        list = PyList_New((Py_ssize_t)subtrees);
        MLSPY_PUT_EACH(list, i, subtrees, PyFloat_FromDouble(sums[i]));
    }
    mlspy_view_release(&view);
    return code == MLS_OK ? list : mlspy_raise(state, &st, NULL);
}
