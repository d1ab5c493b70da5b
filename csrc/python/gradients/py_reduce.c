/* py_reduce: reduces, accumulates, scales and clears named arrays, all or none; norms;
 * for mlstate/fsdp.
 *
 * Work on many arrays is all or nothing: every array is viewed and checked before the
 * first one changes, and the views hold the arrays while the GIL is released. Writes by
 * other threads meanwhile only affect the numbers.
 */
#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "dictionaries/dict_items.h"
#include "dictionaries/dict_pairs.h"
#include "gradients/bucket_capsule.h"

#include "base/address_ranges.h"
#include "base/memory.h"

/* ---- many named arrays ---- */

/* Views of the arrays of one argument. Initialise with zeros; release with
 * named_views_release. The tuples are copies, so later changes of the caller's lists have
 * no effect. */
typedef struct named_views {
    PyObject *names, *arrays; /* strong: tuples of equal length */
    mlspy_view *views;        /* one for each array */
    Py_ssize_t count;
    uint64_t bytes; /* of all arrays, to decide whether to release the GIL */
} named_views;

/* Releases the views and zeroes `*v`. Accepts views that named_views_of left
 * incomplete. */
static void named_views_release(named_views *v)
{
    mlspy_views_release(v->views, (size_t)v->count);
    mls_free(v->views);
    Py_CLEAR(v->arrays);
    Py_CLEAR(v->names);
    *v = (named_views){0};
}

/* Gets the name of array `i`, borrowed from its str, for errors. Returns -1 with
 * TypeError or ValueError set. */
static int name_at(const named_views *v, Py_ssize_t i, mls_str *out)
{
    return mlspy_take_text(PyTuple_GET_ITEM(v->names, i), "parameter name", out);
}

/* Views array `v->count`, and counts it; `writable` as for named_views_of. Returns -1
 * with an exception set, without a view. */
static int view_next(const mlspy_state *state, named_views *v, bool writable)
{
    size_t bytes = 0;
    /* borrows its references and has no metadata; only this call uses it */
    mlspy_item item = {.key = PyTuple_GET_ITEM(v->names, v->count),
                       .value = PyTuple_GET_ITEM(v->arrays, v->count)};
    mlspy_view *view = &v->views[v->count];
    if (name_at(v, v->count, &item.name) < 0 ||
        mlspy_view_item(state, &item, "", writable, view) < 0) {
        return -1;
    }
    v->count++;
    /* strides of 0 may overflow the byte count; such an array counts as large */
    v->bytes += mls_tensor_bytes(&view->tensor, &bytes) ? bytes : MLSPY_RELEASE_BYTES;
    return 0;
}

/* Views every array of a sequence; `names` has their names, for errors. `writable`: an
 * array that must not be written to is an error. Returns -1 with an exception set, and
 * `*v` zeroed: ValueError if the lengths differ. */
static int named_views_of(const mlspy_state *state, PyObject *names, PyObject *arrays,
                          bool writable, named_views *v)
{
    *v = (named_views){0};
    v->names = PySequence_Tuple(names);
    v->arrays = v->names == NULL ? NULL : PySequence_Tuple(arrays);
    if (v->arrays == NULL) {
        goto failed;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(v->names);
    if (PyTuple_GET_SIZE(v->arrays) != count) {
        PyErr_Format(PyExc_ValueError, "%zd names for %zd arrays", count,
                     PyTuple_GET_SIZE(v->arrays));
        goto failed;
    }
    v->views = mls_alloc((size_t)count, sizeof *v->views);
    if (v->views == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    while (v->count < count) {
        if (view_next(state, v, writable) < 0) {
            goto failed;
        }
    }
    return 0;
failed:
    named_views_release(v);
    return -1;
}

/* Raises the error of `st` for array `i`. Puts the array's name before the text and into
 * the exception's attribute, because the core does not know names. If the name cannot be
 * read, raises that error instead. */
static void raise_for_array(const mlspy_state *state, const named_views *v, Py_ssize_t i,
                            const mls_status *st)
{
    mls_status named;
    mls_str name;
    if (name_at(v, i, &name) < 0) {
        return;
    }
    mls_fail(&named, st->code, "'%.140s': %s", name.data, st->text);
    mls_status_name(&named, name.data, name.length);
    mls_status_expected(&named, "%s", st->expected);
    mls_status_got(&named, "%s", st->got);
    mlspy_raise(state, &named, NULL);
}

/* Returns `count` norm partials as a new list of pairs (squares, nonfinite): the sum of
 * an array's squares, and the number of its elements that are NaN or infinite. */
static PyObject *list_partials(const mls_norm_partial *partials, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    MLSPY_PUT_EACH(list, i, count, mlspy_norm_pair(&partials[i]));
    return list;
}

/* Allocates `count` zeroed norm partials; returns NULL with MemoryError set. */
static mls_norm_partial *new_partials(Py_ssize_t count)
{
    mls_norm_partial *partials = mls_alloc((size_t)count, sizeof *partials);
    if (partials == NULL) {
        PyErr_NoMemory();
    }
    return partials;
}

/* Checks, before the first array changes, that every array can be multiplied by `factor`
 * and, unless `targets` is NULL, added to its target. Pairs are independent: a repeated
 * target is allowed and receives both sums. Returns -1 with an exception set. */
static int check_arrays(const mlspy_state *state, const named_views *targets,
                        const named_views *arrays, double factor)
{
    mls_status st;
    for (Py_ssize_t i = 0; i < arrays->count; i++) {
        const mls_tensor *t = &arrays->views[i].tensor;
        if ((targets == NULL ? mls_scale_check(t, factor, &st)
                             : mls_accumulate_check(&targets->views[i].tensor, t, factor,
                                                    &st)) != MLS_OK) {
            raise_for_array(state, arrays, i, &st);
            return -1;
        }
    }
    return 0;
}

/* ---- targets += scale * sources ---- */

/* Adds `scale` times each source to its target. Returns None, or with `wants_norms` the
 * norm partials of the targets; NULL with an exception set, and no array changed. The
 * norm partials are allocated before the first array changes. The pool works on one array
 * at a time. */
static PyObject *accumulate_views(const mlspy_state *state, const named_views *targets,
                                  const named_views *sources, double scale,
                                  bool wants_norms)
{
    mls_status st;
    mls_norm_partial *partials = NULL;
    if (check_arrays(state, targets, sources, scale) < 0 ||
        (wants_norms && (partials = new_partials(targets->count)) == NULL)) {
        return NULL;
    }
    PyThreadState *saved = mlspy_leave_python(targets->bytes);
    for (Py_ssize_t i = 0; i < targets->count; i++) {
        (void)mls_accumulate(state->kernels->cpu, state->pool, &targets->views[i].tensor,
                             &sources->views[i].tensor, scale,
                             wants_norms ? &partials[i] : NULL, &st);
    }
    mlspy_resume_python(saved);
    PyObject *result =
        wants_norms ? list_partials(partials, targets->count) : Py_NewRef(Py_None);
    mls_free(partials);
    return result;
}

/* accumulate(names, targets, sources, scale, wants_norms) -> [(squares, nonfinite)] or
 * None
 *
 * Adds `scale` times each source to its target: all or none. The names are read once for
 * each side, because viewing an array may run code that changes the list in between.
 */
PyObject *core_accumulate(mlspy_state *state, PyObject *const *args)
{
    named_views targets = {0}, sources = {0};
    PyObject *result = NULL;
    double scale;
    bool wants_norms;
    if (mlspy_take_double(args[3], "scale", &scale) == 0 &&
        mlspy_take_bool(args[4], &wants_norms) == 0 &&
        named_views_of(state, args[0], args[1], true /* writable */, &targets) == 0 &&
        named_views_of(state, args[0], args[2], false /* read-only */, &sources) == 0) {
        /* differ only if `names` changed between its two reads */
        if (targets.count == sources.count) {
            result = accumulate_views(state, &targets, &sources, scale, wants_norms);
        } else {
            PyErr_SetString(PyExc_RuntimeError, "the names changed while they were read");
        }
    }
    named_views_release(&sources);
    named_views_release(&targets);
    return result;
}

/* ---- single arrays ---- */

/* For mls_address_ranges_tied: ends the search at the first two ranges that overlap. */
static mls_sharing compare_ranges(const void *data, size_t a, size_t b)
{
    (void)data, (void)a, (void)b;
    return MLS_MIXED;
}

/* Returns 1 if the ranges of addresses of two arrays overlap, else 0, or -1 with
 * MemoryError set. Arrays with gaps may still share no element. */
static int ranges_overlap(const named_views *v)
{
    size_t pair[2], used = 0;
    mls_address_range *ranges = mls_alloc(2 * (size_t)v->count, sizeof *ranges);
    if (ranges == NULL) {
        return mlspy_no_memory();
    }
    for (Py_ssize_t i = 0; i < v->count; i++) {
        mls_address_range *next = &ranges[used];
        used += mls_tensor_range(&v->views[i].tensor, &next->low, &next->high);
    }
    const mls_address_range *sorted =
        mls_address_ranges_sort(ranges, ranges + v->count, used);
    const bool apart =
        mls_address_ranges_tied(sorted, used, compare_ranges, NULL, NULL, pair);
    mls_free(ranges);
    return !apart;
}

/* scale(names, arrays, factor) -> bool: multiplies all arrays by `factor`, or none; a
 * factor of 1 only checks them. Returns whether arrays may share memory: whether the
 * ranges of addresses of two overlap. */
PyObject *core_scale(mlspy_state *state, PyObject *const *args)
{
    named_views v;
    mls_status st;
    double factor;
    if (mlspy_take_double(args[2], "factor", &factor) < 0 ||
        named_views_of(state, args[0], args[1], true /* writable */, &v) < 0) {
        return NULL;
    }
    const int overlap =
        check_arrays(state, NULL, &v, factor) < 0 ? -1 : ranges_overlap(&v);
    if (overlap >= 0 && factor != 1.0) {
        PyThreadState *saved = mlspy_leave_python(v.bytes);
        for (Py_ssize_t i = 0; i < v.count; i++) {
            (void)mls_scale(state->kernels->cpu, state->pool, &v.views[i].tensor, factor,
                            &st);
        }
        mlspy_resume_python(saved);
    }
    named_views_release(&v);
    return overlap < 0 ? NULL : PyBool_FromLong(overlap);
}

/* norm_partials(names, arrays) -> [(squares, nonfinite)], one for each array
 *
 * Supports every dtype but packed ones.
 */
PyObject *core_norm_partials(mlspy_state *state, PyObject *const *args)
{
    named_views v;
    mls_status st;
    PyObject *list = NULL;
    if (named_views_of(state, args[0], args[1], false /* read-only */, &v) < 0) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < v.count; i++) {
        if (mls_norm_partial_check(&v.views[i].tensor, &st) != MLS_OK) {
            raise_for_array(state, &v, i, &st);
            named_views_release(&v);
            return NULL;
        }
    }
    mls_norm_partial *partials = new_partials(v.count);
    if (partials != NULL) {
        PyThreadState *saved = mlspy_leave_python(v.bytes);
        for (Py_ssize_t i = 0; i < v.count; i++) {
            mls_norm_partial_of(state->kernels->cpu, state->pool, &v.views[i].tensor,
                                &partials[i]);
        }
        mlspy_resume_python(saved);
        list = list_partials(partials, v.count);
    }
    mls_free(partials);
    named_views_release(&v);
    return list;
}

/* clear(names, arrays): fills all arrays with zeros */
PyObject *core_clear(mlspy_state *state, PyObject *const *args)
{
    named_views v;
    if (named_views_of(state, args[0], args[1], true /* writable */, &v) < 0) {
        return NULL;
    }
    PyThreadState *saved = mlspy_leave_python(v.bytes);
    for (Py_ssize_t i = 0; i < v.count; i++) {
        const mls_tensor *t = &v.views[i].tensor;
        /* in all dtypes, zero has only zero bytes */
        const mls_element zero = {.size = mls_tensor_item_bytes(t)};
        mls_fill(state->kernels, t, zero, (mls_destination){.bytes = mlspy_bytes(t)});
    }
    mlspy_resume_python(saved);
    named_views_release(&v);
    Py_RETURN_NONE;
}

/* ---- one reduction ---- */

/* One call of reduce: views of the sources, followed by that of the output. */
typedef struct reduction {
    PyObject *sources; /* strong: a tuple */
    mlspy_view *views;
    const mls_tensor **tensors; /* of the sources */
    const void **data;          /* of the tensors */
    size_t count;               /* number of views */
    mls_reduction operation;
    size_t elements; /* of each array */
} reduction;

/* Releases what a reduction holds; accepts one that reduction_init left incomplete. */
static void reduction_fini(reduction *r)
{
    mlspy_views_release(r->views, r->count);
    mls_free(r->views);
    mls_free((void *)r->tensors);
    mls_free(r->data);
    Py_CLEAR(r->sources);
}

/* Views a sequence of sources and the output, and runs the core's checks. The caller has
 * set `op` and `divisor` of `r->operation` and zeroed the rest, and calls reduction_fini
 * in any case. Returns -1 with an exception set. */
static int reduction_init(const mlspy_state *state, PyObject *sources, PyObject *out,
                          reduction *r)
{
    mls_status st;
    r->sources = PySequence_Tuple(sources);
    if (r->sources == NULL) {
        return -1;
    }
    const size_t count = (size_t)PyTuple_GET_SIZE(r->sources);
    if (count == 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "reduce needs at least one source");
    }
    r->views = mls_alloc(count + 1, sizeof *r->views);
    r->tensors = mls_alloc(count, sizeof *r->tensors);
    r->data = mls_alloc(count, sizeof *r->data);
    if (r->views == NULL || r->tensors == NULL || r->data == NULL) {
        return mlspy_no_memory();
    }
    for (size_t i = 0; i < count; i++) {
        char label[32];
        PyOS_snprintf(label, sizeof label, "sources[%zu]", i);
        if (mlspy_view_for(state, PyTuple_GET_ITEM(r->sources, (Py_ssize_t)i), label,
                           false /* read-only */, &r->views[i]) < 0) {
            return -1;
        }
        r->count++;
        r->tensors[i] = &r->views[i].tensor;
        r->data[i] = r->views[i].tensor.data;
    }
    if (mlspy_view_for(state, out, "out", true /* writable */, &r->views[count]) < 0) {
        return -1;
    }
    r->count++;
    return mlspy_check(state,
                       mls_reduce_check_arrays(r->tensors, count, &r->views[count].tensor,
                                               &r->operation, &r->elements, &st),
                       &st);
}

/* reduce(sources, out, op, divisor) -> (squares, nonfinite) of out
 *
 * Writes the sum, minimum or maximum of all sources, divided by `divisor`, to `out`. The
 * number of elements decides whether to release the GIL; there are at least as many
 * bytes.
 */
PyObject *core_reduce(mlspy_state *state, PyObject *const *args)
{
    reduction r = {0};
    mls_norm_partial partial = {0};
    PyObject *result = NULL;
    if (mlspy_take_op(args[2], &r.operation.op) < 0 ||
        mlspy_take_double(args[3], "divisor", &r.operation.divisor) < 0) {
        return NULL;
    }
    if (reduction_init(state, args[0], args[1], &r) == 0) {
        PyThreadState *saved = mlspy_leave_python(r.elements * r.count);
        const mls_tensor *out = &r.views[r.count - 1].tensor;
        const mls_destination destination = {.bytes =
                                                 r.elements * mls_tensor_item_bytes(out)};
        mls_reduce_run(state->kernels, &r.operation, r.data, r.count - 1, out->data,
                       r.elements, destination, &partial);
        mlspy_resume_python(saved);
        result = mlspy_norm_pair(&partial);
    }
    reduction_fini(&r);
    return result;
}
