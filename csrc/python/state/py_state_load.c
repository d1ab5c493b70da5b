/* py_state_load: load_into of a whole state dict; targets that share memory (tied
 * weights); digests.
 *
 * The public functions are in mlstate/state.
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

#include "array/overlap.h"
#include "base/address_ranges.h"
#include "base/memory.h"
#include "state/load_into.h"

/* ---- loading ---- */

/* The arrays of a load, held while the GIL is released. */
typedef struct load_job {
    mlspy_view *views; /* destination and source of each pair */
    mls_load_into_pair *pairs;
    size_t count; /* pairs */
    mls_load_into *load;
} load_job;

/* Accepts a job that job_init left incomplete. */
static void job_fini(load_job *job)
{
    mlspy_views_release(job->views, 2 * job->count);
    mls_load_into_free(job->load);
    mls_free(job->views);
    mls_free(job->pairs);
}

/* Views both arrays of pair `i` of `p`, the items of source and target matched by name,
 * and adds them to the job; the target must be writable. Returns -1 with an exception
 * set, and the job unchanged. */
static int job_add(const mlspy_state *state, const mlspy_pairs *p, size_t i,
                   load_job *job)
{
    mlspy_view *views = &job->views[2 * job->count];
    if (mlspy_view_item(state, &p->target.items[i], "target ", true /* writable */,
                        &views[0]) < 0) {
        return -1;
    }
    if (mlspy_view_item(state, &p->source.items[i], "source ", false /* read-only */,
                        &views[1]) < 0) {
        mlspy_view_release(&views[0]);
        return -1;
    }
    job->pairs[job->count++] = (mls_load_into_pair){
        .name = p->pairs[i].name, .dst = &views[0].tensor, .src = &views[1].tensor};
    return 0;
}

/* Adds all pairs that both sides have to the job, in the order of the target: it decides
 * which of two targets in the same memory is written last. Returns -1 with an exception
 * set. */
static int job_add_all(const mlspy_state *state, const mlspy_pairs *p, load_job *job)
{
    /* for each entry of the target: the number of its pair plus 1, or 0 */
    size_t *numbers = mls_alloc(p->count, sizeof *numbers);
    int failed = numbers == NULL ? mlspy_no_memory() : 0;
    for (size_t i = 0; failed == 0 && i < p->source.count; i++) {
        if (p->pairs[i].has_target) {
            numbers[p->target.items[i].position] = i + 1;
        }
    }
    for (size_t i = 0; failed == 0 && i < p->count; i++) {
        failed = numbers[i] == 0 ? 0 : job_add(state, p, numbers[i] - 1, job);
    }
    mls_free(numbers);
    return failed;
}

/* Views all pairs that both sides have, and runs the core's checks; `cast`: dtypes may
 * differ. Returns -1 with an exception set. The caller zeroes the job before, and calls
 * job_fini in any case. */
static int job_init(const mlspy_state *state, const mlspy_pairs *p, bool cast,
                    load_job *job)
{
    mls_status st;
    job->views = mls_alloc(p->source.count, 2 * sizeof *job->views);
    job->pairs = mls_alloc(p->source.count, sizeof *job->pairs);
    if (job->views == NULL || job->pairs == NULL) {
        return mlspy_no_memory();
    }
    if (job_add_all(state, p, job) < 0) {
        return -1;
    }
    if (mls_load_into_new(job->pairs, job->count, cast, mls_pool_threads(state->pool),
                          &job->load, &st) != MLS_OK) {
        if (st.code == MLS_E_DTYPE && !cast) {
            mlspy_status_hint(&st, "pass cast=True to convert");
        }
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    return 0;
}

/* Copies the elements of all pairs that both sides have, converted if `cast` and the
 * dtypes differ. With `dry_run`, only checks. Returns -1 with an exception set, and
 * nothing written. */
static int load_pairs(const mlspy_state *state, const mlspy_pairs *p, bool cast,
                      bool dry_run)
{
    load_job job = {0};
    const int failed = job_init(state, p, cast, &job);
    if (failed == 0 && !dry_run) {
        PyThreadState *saved = mlspy_leave_python(mls_load_into_bytes(job.load));
        mls_load_into_run(job.load, state->kernels, state->pool);
        mlspy_resume_python(saved);
    }
    job_fini(&job);
    return failed;
}

/* Returns a new list of the targets that a load writes and that are not ndarrays, so that
 * the caller can note the writes for autograd; NULL with an exception set. */
static PyObject *written_tensors(const mlspy_pairs *p)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < p->source.count; i++) {
        PyObject *target = p->pairs[i].has_target ? p->target.items[i].value : NULL;
        if (target != NULL && !PyArray_Check(target)) {
            mlspy_append(&list, Py_NewRef(target));
        }
    }
    return list;
}

/* state_load(target, source, strict, cast, dry_run) -> the list of written_tensors on
 * success; otherwise a tuple of four lists of differences: names that only the target
 * has, names that only the source has, names whose shapes differ, with both shapes, and
 * names whose dtypes differ, with both dtypes
 *
 * Copies the arrays of `source` into the arrays of the same names of `target`: all or
 * none. `strict`: both must have the same names; `cast`: dtypes may differ; `dry_run`:
 * only checks, and nothing is written.
 */
PyObject *core_state_load(mlspy_state *state, PyObject *const *args)
{
    mlspy_pairs p;
    bool strict, cast, dry_run;
    if (mlspy_take_bool(args[2], &strict) < 0 || mlspy_take_bool(args[3], &cast) < 0 ||
        mlspy_take_bool(args[4], &dry_run) < 0 ||
        mlspy_pairs_init(state, args[1], args[0], &p) < 0) {
        return NULL;
    }
    PyObject *result;
    const bool refused = p.counts.shapes > 0 || (p.counts.dtypes > 0 && !cast) ||
                         (strict && p.counts.missing + p.counts.unexpected > 0);
    if (refused) {
        result = mlspy_pairs_report(&p, true /* missing in the source */);
    } else {
        /* created first, because nothing may fail after the copy */
        result = written_tensors(&p);
        if (result != NULL && load_pairs(state, &p, cast, dry_run) < 0) {
            Py_CLEAR(result);
        }
    }
    mlspy_pairs_fini(&p);
    return result;
}

/* ---- targets that share memory ---- */

/* One array to fill. */
typedef struct tied_target {
    PyObject *key;      /* borrowed from the list of keys */
    Py_ssize_t section; /* position in the argument */
} tied_target;

/* All targets of all sections, and the address ranges of those with elements. */
typedef struct tied_job {
    Py_ssize_t joint; /* the first `joint` sections count as one */
    tied_target *targets;
    size_t *kinds;             /* for each target: section and dtype, as one number */
    mls_tensor **views;        /* for each target: the view if it has gaps, else NULL */
    bool *tied;                /* for each target: a later target is the same array */
    mls_address_range *ranges; /* for each target; zeros without elements */
    mls_address_range *spans,  /* the `filled` ranges of those with elements */
        *spare;                /* room for sorting them */
    size_t count, filled;
} tied_job;

/* Adds the target targets[key] of a section to the job, which has room. Returns -1 with
 * an exception set. The view is not kept: the caller's dict holds the array. */
static int tied_add(const mlspy_state *state, tied_job *job, Py_ssize_t section,
                    PyObject *key, PyObject *targets)
{
    PyObject *array = NULL;
    mlspy_view view = {0};
    mls_address_range span = {.owner = job->count, .written = true};
    size_t bytes;
    if (mlspy_dict_need(targets, key, &array) < 0) {
        return -1;
    }
    const int failed = mlspy_view_of(state, array, "target", &view);
    Py_DECREF(array);
    if (failed < 0) {
        return -1;
    }
    job->kinds[job->count] =
        (size_t)(section < job->joint ? 0 : section) * MLS_DTYPE_COUNT +
        (size_t)view.tensor.dtype;
    job->targets[job->count++] = (tied_target){.key = key, .section = section};
    bool has_memory = true;
    if (mls_tensor_range(&view.tensor, &span.low, &span.high)) {
        job->spans[job->filled++] = job->ranges[span.owner] = span;
        /* fewer bytes than its range: the view has gaps, so addresses alone do not
         * identify it */
        if (!mls_tensor_bytes(&view.tensor, &bytes) || bytes != span.high - span.low) {
            mls_tensor *copy = mls_alloc(1, sizeof *copy);
            has_memory = copy != NULL;
            if (has_memory) {
                *copy = view.tensor;
            }
            job->views[span.owner] = copy;
        }
    }
    mlspy_view_release(&view);
    return has_memory ? 0 : mlspy_no_memory();
}

/* Returns the memory of target number `target` as a view: its own view if it has gaps,
 * else all bytes of its range. */
static mls_tensor tied_bytes(const tied_job *job, size_t target)
{
    if (job->views[target] != NULL) {
        return *job->views[target];
    }
    const mls_address_range *range = &job->ranges[target];
    return (mls_tensor){.data = (unsigned char *)range->low,
                        .dtype = MLS_U8,
                        .rank = 1,
                        .shape = {range->high - range->low},
                        .strides = {1}};
}

/* Returns how the targets `a` and `b` of the job `data` share memory. Packed targets with
 * one range and kind (section and dtype) are tied, which means the same array, in any
 * shape and order of axes; views with gaps must be equal. MLS_MIXED: some bytes are
 * shared; MLS_APART: none. */
static mls_sharing tied_compare(const void *data, size_t a, size_t b)
{
    const tied_job *job = data;
    const mls_address_range *range = &job->ranges[a], *other = &job->ranges[b];
    const mls_tensor left = tied_bytes(job, a), right = tied_bytes(job, b);
    if (range->low == other->low && range->high == other->high &&
        job->kinds[a] == job->kinds[b] &&
        mls_shape_equal(left.rank, left.shape, right.rank, right.shape) &&
        mls_tensor_same_view(&left, &right)) {
        return MLS_TIED;
    }
    return mls_tensor_overlap(&left, &right) ? MLS_MIXED : MLS_APART;
}

/* Checks the sections, a list of (label, keys, targets), and allocates room for all
 * targets. Returns -1 with an exception set. The caller zeroes the job before, and frees
 * its memory in any case. */
static int tied_init(PyObject *sections, tied_job *job)
{
    size_t count = 0;
    if (!PyList_Check(sections)) {
        return MLSPY_REFUSE(PyExc_TypeError, "sections must be a list");
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sections); i++) {
        PyObject *label, *keys, *targets;
        if (mlspy_take_tuple(PyList_GET_ITEM(sections, i), "a section", "UO!O!", &label,
                             &PyList_Type, &keys, &PyDict_Type, &targets) < 0) {
            return -1;
        }
        count += (size_t)PyList_GET_SIZE(keys);
    }
    job->targets = mls_alloc(count, sizeof *job->targets);
    job->kinds = mls_alloc(count, sizeof *job->kinds);
    job->views = mls_alloc(count, sizeof *job->views);
    job->ranges = mls_alloc(count, sizeof *job->ranges);
    job->tied = mls_alloc(count, sizeof *job->tied);
    job->spans = mls_alloc(count, sizeof *job->spans);
    job->spare = mls_alloc(count, sizeof *job->spare);
    if (job->targets == NULL || job->kinds == NULL || job->views == NULL ||
        job->ranges == NULL || job->tied == NULL || job->spans == NULL ||
        job->spare == NULL) {
        return mlspy_no_memory();
    }
    return 0;
}

/* Adds every target of all sections to the job. Returns -1 with an exception set:
 * KeyError for a key without a target. */
static int tied_view(const mlspy_state *state, PyObject *sections, tied_job *job)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sections); i++) {
        PyObject *keys = PyTuple_GET_ITEM(PyList_GET_ITEM(sections, i), 1);
        PyObject *targets = PyTuple_GET_ITEM(PyList_GET_ITEM(sections, i), 2);
        for (Py_ssize_t j = 0; j < PyList_GET_SIZE(keys); j++) {
            if (tied_add(state, job, i, PyList_GET_ITEM(keys, j), targets) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Sets `job->tied` for each target that has the memory of a later target of the same
 * kind. Returns -1 with ValueError set if targets overlap in any other way. `sections`:
 * their labels are named. */
static int tied_find(PyObject *sections, tied_job *job)
{
    size_t pair[2];
    const mls_address_range *sorted =
        mls_address_ranges_sort(job->spans, job->spare, job->filled);
    if (mls_address_ranges_tied(sorted, job->filled, tied_compare, job, job->tied,
                                pair)) {
        return 0;
    }
    const tied_target *a = &job->targets[pair[0]], *b = &job->targets[pair[1]];
    return MLSPY_REFUSE(
        PyExc_ValueError,
        "the targets %U[%R] and %U[%R] share memory, but are not one tensor: load into "
        "a copy of one of them",
        PyTuple_GET_ITEM(PyList_GET_ITEM(sections, a->section), 0), a->key,
        PyTuple_GET_ITEM(PyList_GET_ITEM(sections, b->section), 0), b->key);
}

/* Returns a new list [[key, ...], ...] of the keys to skip, for each of the sections. */
static PyObject *tied_result(const tied_job *job, Py_ssize_t sections)
{
    PyObject *result = PyList_New(sections);
    MLSPY_PUT_EACH(result, i, sections, PyList_New(0));
    for (size_t i = 0; result != NULL && i < job->count; i++) {
        const tied_target *t = &job->targets[i];
        if (job->tied[i] &&
            PyList_Append(PyList_GET_ITEM(result, t->section), t->key) < 0) {
            Py_CLEAR(result);
        }
    }
    return result;
}

/* targets_tied([(label, keys, targets), ...], joint) -> [[key, ...], ...], one list for
 * each section
 *
 * A section is its name for errors, a list of keys to load, and a dict of the arrays to
 * fill by key. Returns the keys whose array also belongs to a later key of the same
 * section; the first `joint` sections count as one. Raises ValueError if arrays share
 * memory in any other way: they are filled at the same time, and each would contain a
 * part of the other.
 */
PyObject *core_targets_tied(mlspy_state *state, PyObject *const *args)
{
    tied_job job = {0};
    PyObject *result = NULL;
    int64_t joint = 0;
    if (mlspy_take_int64(state, args[1], "joint", &joint) < 0) {
        return NULL;
    }
    job.joint = (Py_ssize_t)joint;
    if (tied_init(args[0], &job) == 0 && tied_view(state, args[0], &job) == 0 &&
        tied_find(args[0], &job) == 0) {
        result = tied_result(&job, PyList_GET_SIZE(args[0]));
    }
    mls_free(job.targets);
    mls_free(job.kinds);
    for (size_t i = 0; job.views != NULL && i < job.count; i++) {
        mls_free(job.views[i]);
    }
    mls_free(job.views);
    mls_free(job.ranges);
    mls_free(job.tied);
    mls_free(job.spans);
    mls_free(job.spare);
    return result;
}

/* ---- digest ----
 *
 * The hashed stream has for each tensor, in the order of the names' bytes: the length of
 * the name, the length of the dtype's name, the rank and the dimensions as 64-bit
 * little-endian numbers; then the name, the dtype's name, and the elements in C order.
 * For a part of a tensor, a space and the part's text follow the dtype's name, and count
 * as part of it.
 * `update` is the caller's function that receives this stream, such as a hash's method.
 */

/* Compares two items by the bytes of their names, which is the order of their code
 * points; for qsort. */
static int compare_names(const void *a, const void *b)
{
    return mls_str_compare(((const mlspy_item *)a)->name, ((const mlspy_item *)b)->name);
}

/* Calls update(memory), and consumes the reference to `memory`. Returns -1 with an
 * exception set, also if `memory` is NULL because making it failed. */
static int pass_memory(PyObject *update, PyObject *memory)
{
    PyObject *done = memory == NULL ? NULL : PyObject_CallOneArg(update, memory);
    Py_XDECREF(done);
    Py_XDECREF(memory);
    return done == NULL ? -1 : 0;
}

/* Calls update() with a read-only view of `bytes` bytes, which do not change during the
 * call; not at all for 0 bytes. PyBUF_READ makes the view read-only, although its
 * parameter is not const. Returns -1 with an exception set. */
static int feed_bytes(PyObject *update, const void *data, size_t bytes)
{
    return bytes == 0
               ? 0
               : pass_memory(update,
                             PyMemoryView_FromMemory((char *)(uintptr_t)data,
                                                     (Py_ssize_t)bytes, PyBUF_READ));
}

/* Feeds the part of an item's stream before its elements. Returns -1 with an exception
 * set. */
static int pass_meta(PyObject *update, const mlspy_item *item)
{
    unsigned char head[MLS_META_HEAD_MOST];
    const char *dtype = item->meta.dtype, *part = item->meta.part;
    const size_t head_bytes = mls_tensor_meta_head(item->name, &item->meta, head);
    return feed_bytes(update, head, head_bytes) < 0 ||
                   feed_bytes(update, item->name.data, item->name.length) < 0 ||
                   feed_bytes(update, dtype, strlen(dtype)) < 0 ||
                   (part != NULL && (feed_bytes(update, " ", 1) < 0 ||
                                     feed_bytes(update, part, strlen(part)) < 0))
               ? -1
               : 0;
}

/* Feeds the elements of a strided or byte-swapped tensor, `bytes` in all, from a packed
 * copy in native byte order. Returns -1 with an exception set: only memory can be short,
 * because `t` has a valid shape. */
static int feed_packed(const mlspy_state *state, PyObject *update, const mls_tensor *t,
                       size_t bytes)
{
    mls_status st;
    mls_tensor packed;
    void *data = mls_alloc(bytes, 1);
    if (data == NULL ||
        mls_tensor_init(&packed, data, t->dtype, t->rank, t->shape, &st) != MLS_OK) {
        mls_free(data);
        return mlspy_no_memory();
    }
    MLSPY_WITHOUT_GIL(mls_copy(state->kernels, &packed, t, mls_cached()));
    const int failed = feed_bytes(update, data, bytes);
    mls_free(data);
    return failed;
}

/* Feeds the elements of an item's array, in C order and native byte order. Returns -1
 * with an exception set. */
static int feed_elements(const mlspy_state *state, PyObject *update,
                         const mlspy_item *item)
{
    mlspy_view view;
    if (!mlspy_has_core_dtype(item)) { /* only NumPy knows the layout of its elements */
        return pass_memory(update, mlspy_raw_bytes(state, item));
    }
    if (mlspy_view_item(state, item, "", false /* read-only */, &view) < 0) {
        return -1;
    }
    const size_t bytes = mlspy_bytes(&view.tensor);
    const bool is_packed = mls_tensor_is_contiguous(&view.tensor) && !view.tensor.swapped;
    const int failed = is_packed ? feed_bytes(update, view.tensor.data, bytes)
                                 : feed_packed(state, update, &view.tensor, bytes);
    mlspy_view_release(&view);
    return failed;
}

/* state_digest(state, update): feeds the stream of all tensors to update(), a hash's
 * method, in parts */
PyObject *core_state_digest(mlspy_state *state, PyObject *const *args)
{
    mlspy_items items;
    if (mlspy_items_of(args[0], "state", &items) < 0) {
        return NULL;
    }
    /* sorted first: metadata contains pointers into the items */
    qsort(items.items, items.count, sizeof *items.items, compare_names);
    int failed = mlspy_items_fill_meta(state, &items);
    for (size_t i = 0; failed == 0 && i < items.count; i++) {
        failed = pass_meta(args[1], &items.items[i]) < 0 ||
                         feed_elements(state, args[1], &items.items[i]) < 0
                     ? -1
                     : 0;
    }
    mlspy_items_release(&items);
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}
