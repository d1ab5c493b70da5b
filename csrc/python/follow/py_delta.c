/* py_delta: deltas as arrays of gaps and values for mlstate/follow: encode, apply, undo
 * log, compose, filter; checks.
 *
 * Values are the changed elements, gaps the numbers of unchanged elements before each of
 * them (delta.h). */
#include "arguments/args.h"
#include "array/array_alloc.h"
#include "array/array_view.h"
#include "checkpoint/py_layout.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "array/overlap.h"
#include "base/memory.h"
#include "follow/delta.h"

static const char capsule_name[] = "mlstate stream of a delta";

static void free_stream(PyObject *capsule)
{
    mls_free(PyCapsule_GetPointer(capsule, capsule_name));
}

/* Return an array of `count` elements over the memory at `*stream`, which is freed with
 * the array; `*stream` is then NULL. NULL with an exception set; the memory is freed
 * if `*stream` is NULL. */
static PyObject *stream_array(unsigned char **stream, mls_dtype dtype, size_t count)
{
    PyArray_Descr *descr = mlspy_descr_of_dtype(dtype);
    unsigned char *data = *stream;
    PyObject *owner =
        descr == NULL ? NULL : PyCapsule_New(data, capsule_name, free_stream);
    if (owner == NULL) {
        Py_XDECREF(descr);
        return NULL;
    }
    *stream = NULL; /* from here on the capsule frees the memory */
    return mlspy_array_in(descr, 1, &count, NULL, data, NPY_ARRAY_CARRAY, owner);
}

/* Return (gaps, values), arrays that take the streams of the delta; `dtype` is the dtype
 * of the values. The delta is released, also on failure: NULL with an exception set. */
static PyObject *streams_of(mls_delta *delta, mls_dtype dtype)
{
    const size_t units = delta->gaps_bytes / delta->gap_bytes;
    PyObject *gaps =
        stream_array(&delta->gaps, delta->gap_bytes == 1 ? MLS_U8 : MLS_U16, units);
    PyObject *values =
        gaps == NULL ? NULL : stream_array(&delta->values, dtype, delta->changed);
    mls_delta_fini(delta);
    if (values == NULL) {
        Py_XDECREF(gaps);
        return NULL;
    }
    return Py_BuildValue("(NN)", gaps, values);
}

enum { GAPS, VALUES, STREAMS }; /* the streams of a delta, and their number */

/* A delta, and the views of its streams. Zero it, fill it, release it. */
typedef struct delta_view {
    mlspy_view streams[STREAMS];
    mls_delta delta; /* borrows them */
} delta_view;

static void release_delta(delta_view *view)
{
    mlspy_views_release(view->streams, STREAMS);
}

/* View `array`, a vector in C order and native byte order; `label` names it in messages.
 * `writable`: it must allow writes. The caller releases `out`, also on failure. Returns
 * -1 with an exception set. */
static int take_vector(const mlspy_state *state, PyObject *array, const char *label,
                       bool writable, mlspy_view *out)
{
    if (mlspy_view_for(state, array, label, writable, out) < 0) {
        return -1;
    }
    if (out->tensor.rank != 1 || !mls_tensor_is_contiguous(&out->tensor) ||
        out->tensor.swapped) {
        return MLSPY_REFUSE(PyExc_ValueError,
                            "%s must be a vector without gaps, in native byte order",
                            label);
    }
    return 0;
}

/* View gaps and values of a delta of an array of `elements` elements, and check them. The
 * caller releases `out`, also on failure. Returns -1 with an exception set: ValueError
 * for arrays of another kind, FormatError for a delta that is invalid. */
static int take_delta(const mlspy_state *state, PyObject *elements, PyObject *gaps,
                      PyObject *values, delta_view *out)
{
    int64_t count;
    mls_status st;
    if (mlspy_take_int64(state, elements, "elements", &count) < 0 ||
        take_vector(state, gaps, "gaps", false /* read-only */, &out->streams[GAPS]) <
            0 ||
        take_vector(state, values, "values", false /* read-only */,
                    &out->streams[VALUES]) < 0) {
        return -1;
    }
    const mls_tensor *gap_stream = &out->streams[GAPS].tensor,
                     *value_stream = &out->streams[VALUES].tensor;
    if (count < 0 || (gap_stream->dtype != MLS_U8 && gap_stream->dtype != MLS_U16)) {
        return MLSPY_REFUSE(
            PyExc_ValueError,
            "a delta has gaps of uint8 or uint16 and at least 0 elements");
    }
    out->delta = (mls_delta){.elements = (size_t)count,
                             .item_bytes = mls_tensor_item_bytes(value_stream),
                             .changed = value_stream->shape[0],
                             .gap_bytes = mls_tensor_item_bytes(gap_stream),
                             .gaps = gap_stream->data,
                             .gaps_bytes = mlspy_bytes(gap_stream),
                             .values = value_stream->data,
                             .values_bytes = mlspy_bytes(value_stream)};
    PyThreadState *released = mlspy_leave_python(out->delta.gaps_bytes);
    const mls_code code = mls_delta_check(&out->delta, &st);
    mlspy_resume_python(released);
    return mlspy_check(state, code, &st);
}

/* delta_encode(base, new, wants_crc) -> (gaps, values, CRC32C of `new` | None): the
 * elements of `new` that differ from `base`. `wants_crc` is a bool: whether to compute
 * the CRC32C. CompatibilityError if shape or dtype differ, or an array is byte-swapped.
 */
PyObject *core_delta_encode(mlspy_state *state, PyObject *const *args)
{
    mlspy_view views[2] = {{.owner = NULL}};
    mls_delta delta = {0};
    mls_status st;
    uint32_t crc = 0;
    bool wants_crc;
    PyObject *streams = NULL;
    if (mlspy_view_for(state, args[0], "base", false /* read-only */, &views[0]) == 0 &&
        mlspy_view_for(state, args[1], "new", false /* read-only */, &views[1]) == 0 &&
        mlspy_take_bool(args[2], &wants_crc) == 0) {
        const mls_dtype dtype = views[0].tensor.dtype;
        PyThreadState *released = mlspy_leave_python(mlspy_bytes(&views[0].tensor));
        const mls_code code = mls_delta_encode(
            mls_delta_kernels_of(state->kernels->cpu), mlspy_crc(state), &views[0].tensor,
            &views[1].tensor, &delta, wants_crc ? &crc : NULL, &st);
        mlspy_resume_python(released);
        streams = mlspy_check(state, code, &st) < 0 ? NULL : streams_of(&delta, dtype);
    }
    mlspy_views_release(views, 2);
    if (streams == NULL) {
        return NULL;
    }
    PyObject *crc_object = wants_crc ? PyLong_FromUnsignedLong(crc) : Py_NewRef(Py_None);
    PyObject *result = crc_object == NULL
                           ? NULL
                           : Py_BuildValue("(OON)", PyTuple_GET_ITEM(streams, 0),
                                           PyTuple_GET_ITEM(streams, 1), crc_object);
    Py_DECREF(streams);
    return result;
}

/* Check that a delta belongs to an array, `target`, and shares no memory with it. Returns
 * -1 with an exception set. */
static int check_application(const mlspy_state *state, const delta_view *view,
                             const mls_tensor *target)
{
    const mls_tensor *values = &view->streams[VALUES].tensor;
    mls_status st;
    if (mlspy_check(state, mls_delta_check_target(&view->delta, target, &st), &st) < 0) {
        return -1;
    }
    if (values->dtype != target->dtype) {
        return MLSPY_FAIL(
            state, MLS_E_DTYPE, "a delta of %s does not belong to an array of %s",
            mls_dtype_of(values->dtype)->name, mls_dtype_of(target->dtype)->name);
    }
    if (mls_tensor_overlap(target, &view->streams[GAPS].tensor) ||
        mls_tensor_overlap(target, values)) {
        return MLSPY_REFUSE(PyExc_ValueError, "target and delta must not share memory");
    }
    return 0;
}

/* Append (target, gaps, array for the overwritten elements) to `log`, a list. The array
 * has the dtype and length of `values`. Returns its memory, which the log keeps alive;
 * NULL with an exception set. */
static unsigned char *log_application(PyObject *log, PyObject *target, PyObject *gaps,
                                      const mls_tensor *values)
{
    PyArray_Descr *descr = mlspy_descr_of_dtype(values->dtype);
    PyObject *old = descr == NULL
                        ? NULL
                        : mlspy_array_of(descr, 1, values->shape, false /* no zeros */);
    PyObject *entry = old == NULL ? NULL : PyTuple_Pack(3, target, gaps, old);
    unsigned char *memory = NULL;
    if (entry != NULL && PyList_Append(log, entry) == 0) {
        memory = (unsigned char *)PyArray_DATA((PyArrayObject *)old);
    }
    Py_XDECREF(entry);
    Py_XDECREF(old);
    return memory;
}

/* delta_apply(target, gaps, values, elements, log | None, wants_crc)
 *     -> CRC32C of the target | None
 *
 * Write the values of a delta of `elements` elements to `target`, which has as many;
 * `wants_crc` is a bool. Nothing is written and logged if an exception is raised. `log`
 * is a list; the call appends (target, gaps, overwritten elements): the delta that
 * restores the target. Python's signal handlers cannot run between the entry and the
 * change. */
PyObject *core_delta_apply(mlspy_state *state, PyObject *const *args)
{
    delta_view view = {.delta = {.gaps = NULL}};
    mlspy_view target = {.owner = NULL};
    PyObject *log = args[4] == Py_None ? NULL : args[4];
    unsigned char *overwritten = NULL;
    uint32_t crc = 0;
    bool wants_crc;
    PyObject *result = NULL;
    if (log != NULL && !PyList_Check(log)) {
        return PyErr_Format(PyExc_TypeError, "the log must be a list or None");
    }
    if (mlspy_view_for(state, args[0], "target", true /* writable */, &target) == 0 &&
        take_delta(state, args[3], args[1], args[2], &view) == 0 &&
        mlspy_take_bool(args[5], &wants_crc) == 0 &&
        check_application(state, &view, &target.tensor) == 0 &&
        (log == NULL ||
         (overwritten = log_application(log, args[0], args[1],
                                        &view.streams[VALUES].tensor)) != NULL)) {
        PyThreadState *released = mlspy_leave_python(
            wants_crc ? mlspy_bytes(&target.tensor) : view.delta.values_bytes);
        mls_delta_apply(&view.delta, mlspy_crc(state), &target.tensor, overwritten,
                        wants_crc ? &crc : NULL);
        mlspy_resume_python(released);
        result = wants_crc ? PyLong_FromUnsignedLong(crc) : Py_NewRef(Py_None);
    }
    mlspy_view_release(&target);
    release_delta(&view);
    return result;
}

/* delta_compose(elements, gaps, values, later gaps, later values) -> (gaps, values): one
 * delta that has the effect of both. `elements` is the length of the array. */
PyObject *core_delta_compose(mlspy_state *state, PyObject *const *args)
{
    delta_view views[2] = {{.delta = {.gaps = NULL}}};
    mls_delta delta = {0};
    mls_status st;
    PyObject *result = NULL;
    if (take_delta(state, args[0], args[1], args[2], &views[0]) == 0 &&
        take_delta(state, args[0], args[3], args[4], &views[1]) == 0) {
        const mls_dtype dtype = views[0].streams[VALUES].tensor.dtype;
        if (views[1].streams[VALUES].tensor.dtype != dtype) {
            mlspy_raise_text(state, MLS_E_DTYPE, "deltas of %s and of %s do not compose",
                             mls_dtype_of(dtype)->name,
                             mls_dtype_of(views[1].streams[VALUES].tensor.dtype)->name);
        } else {
            PyThreadState *released = mlspy_leave_python(views[0].delta.values_bytes +
                                                         views[1].delta.values_bytes);
            const mls_code code =
                mls_delta_compose(&views[0].delta, &views[1].delta, &delta, &st);
            mlspy_resume_python(released);
            result = mlspy_check(state, code, &st) < 0 ? NULL : streams_of(&delta, dtype);
        }
    }
    release_delta(&views[0]);
    release_delta(&views[1]);
    return result;
}

/* Convert a layout and the index of a part, of a tensor of `rank` axes with the lengths
 * `shape`, to `*out`. Returns -1 with an exception set. */
static int take_part(const mlspy_state *state, PyObject *layout, PyObject *index,
                     int rank, const size_t *shape, mls_part *out)
{
    mls_layout steps;
    int64_t number;
    mls_status st;
    if (mlspy_take_layout(state, layout, &steps) < 0 ||
        mlspy_take_int64(state, index, "index", &number) < 0) {
        return -1;
    }
    /* a negative index is invalid too; the core's message contains the number of parts */
    const size_t part = number < 0 ? SIZE_MAX : (size_t)number;
    return mlspy_check(state, mls_layout_part(&steps, rank, shape, part, out, &st), &st);
}

/* delta_filter(elements, gaps, values, shape, layout, index, other layout, other index)
 *     -> (gaps, values) of the other part
 *
 * The changes of part `index` of a tensor of `shape`, as far as part `other index` has
 * the same elements. `elements` is the number of elements of the first part. */
PyObject *core_delta_filter(mlspy_state *state, PyObject *const *args)
{
    delta_view view = {.delta = {.gaps = NULL}};
    mls_delta delta = {0};
    size_t shape[MLS_LAYOUT_RANK];
    mls_part from, to;
    mls_status st;
    PyObject *result = NULL;
    const int rank = mlspy_take_shape(state, args[3], shape);
    if (rank >= 0 && take_part(state, args[4], args[5], rank, shape, &from) == 0 &&
        take_part(state, args[6], args[7], rank, shape, &to) == 0 &&
        take_delta(state, args[0], args[1], args[2], &view) == 0) {
        PyThreadState *released = mlspy_leave_python(view.delta.values_bytes);
        const mls_code code = mls_delta_filter(&view.delta, &from, &to, &delta, &st);
        mlspy_resume_python(released);
        result = mlspy_check(state, code, &st) < 0
                     ? NULL
                     : streams_of(&delta, view.streams[VALUES].tensor.dtype);
    }
    release_delta(&view);
    return result;
}

/* array_crc32c(array, start) -> CRC32C of the bytes that gave `start`, followed by the
 * elements in C order; `start` is 0 for no bytes before */
PyObject *core_array_crc32c(mlspy_state *state, PyObject *const *args)
{
    mlspy_view view = {.owner = NULL};
    int64_t start;
    if (mlspy_take_int64(state, args[1], "start", &start) < 0 ||
        mlspy_view_for(state, args[0], "array", false /* read-only */, &view) < 0) {
        return NULL;
    }
    PyThreadState *released = mlspy_leave_python(mlspy_bytes(&view.tensor));
    const uint32_t crc = mls_tensor_crc(mlspy_crc(state), &view.tensor, (uint32_t)start);
    mlspy_resume_python(released);
    mlspy_view_release(&view);
    return PyLong_FromUnsignedLong(crc);
}
