/* py_state_compare: compares two state dicts: names, shapes, dtypes, elements (diff, ==);
 * lists the metadata of one.
 *
 * The public functions are in mlstate/state.
 *
 * Cheap checks come first: names before shapes, shapes before elements. The most
 * frequent result (no difference) is found before any list is created.
 */
#include "state/states.h"

#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "dictionaries/dict_items.h"
#include "dictionaries/dict_pairs.h"

#include "base/memory.h"
#include "state/diff/diff.h"

/* ---- quick answers ----
 *
 * These iterate over the first dict directly, with a reference to the current entry,
 * instead of taking a snapshot. If a dict changes meanwhile, the result refers to either
 * version.
 */

/* A check of one entry of the first dict, with `other` to look names up in the second.
 * Returns 1 yes, 0 no, -1 with an exception set. */
typedef int (*entry_check)(const mlspy_state *state, PyObject *key, PyObject *value,
                           mlspy_finder *other);

/* Returns 1 if `ask` answers yes for all entries of `dict`, compared with the dict
 * `other`; 0 after the first no; -1 with an exception set. */
static int check_all_entries(const mlspy_state *state, PyObject *dict, PyObject *other,
                             entry_check ask)
{
    mlspy_finder finder = {.dict = other, .in_step = true};
    int answer = 1;
    MLSPY_BEGIN_LOCKED(dict)
        PyObject *key, *value;
        Py_ssize_t at = 0;
        while (answer == 1 && PyDict_Next(dict, &at, &key, &value)) {
            /* the lookup may run code that removes the entry */
            Py_INCREF(key);
            Py_INCREF(value);
            answer = ask(state, key, value, &finder);
            Py_DECREF(key);
            Py_DECREF(value);
        }
    MLSPY_END_LOCKED()
    return answer;
}

/* Returns True if `ask` answers yes for all entries of args[0], compared with args[1],
 * else False; NULL with an exception set: TypeError unless both are dicts. `same_length`:
 * both must have the same names; then lengths are compared first, and it is enough to
 * find all names of one in the other. */
static PyObject *check_two_dicts(const mlspy_state *state, PyObject *const *args,
                                 bool same_length, entry_check ask)
{
    if (mlspy_take_dict(args[0], "state1") < 0 ||
        mlspy_take_dict(args[1], "state2") < 0) {
        return NULL;
    }
    if (same_length && PyDict_GET_SIZE(args[0]) != PyDict_GET_SIZE(args[1])) {
        Py_RETURN_FALSE;
    }
    const int answer = check_all_entries(state, args[0], args[1], ask);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

/* Looks up a name in the second dict. Returns 1 with a new reference in `*value`, 0 if it
 * is missing, or -1 with an exception set: TypeError for a key that is not a str. */
static int find_name(mlspy_finder *other, PyObject *key, PyObject **value)
{
    if (!PyUnicode_Check(key)) {
        return MLSPY_REFUSE(PyExc_TypeError,
                            "tensor name must be a str, got %.100s: %.200R",
                            Py_TYPE(key)->tp_name, key);
    }
    return mlspy_find(other, key, value);
}

/* An entry_check: whether the other dict has the name `key`. */
static int has_name(const mlspy_state *state, PyObject *key, PyObject *value,
                    mlspy_finder *other)
{
    (void)state, (void)value;
    PyObject *other_value;
    const int is_present = find_name(other, key, &other_value);
    if (is_present == 1) {
        Py_DECREF(other_value);
    }
    return is_present;
}

/* state_keys_match(state1, state2) -> whether both dicts have the same names */
PyObject *core_state_keys_match(mlspy_state *state, PyObject *const *args)
{
    return check_two_dicts(state, args, true /* same_length */, has_name);
}

/* Returns whether two attributes are equal tuples of plain ints. Runs no foreign code and
 * raises nothing; for other objects it returns false, and the caller compares in full. */
static bool same_sizes(PyObject *a, PyObject *b)
{
    if (!PyTuple_Check(a) || !PyTuple_Check(b) ||
        PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); i++) {
        PyObject *x = PyTuple_GET_ITEM(a, i), *y = PyTuple_GET_ITEM(b, i);
        if (!PyLong_CheckExact(x) || !PyLong_CheckExact(y) ||
            (x != y && PyObject_RichCompareBool(x, y, Py_EQ) != 1)) {
            return false;
        }
    }
    return true;
}

/* Returns whether two tensors (of torch, for example) certainly have the same shape and,
 * if `dtypes`, the identical dtype object. False, without an exception, means that a full
 * comparison is needed. Most of the time is spent in the tensors' creation of the
 * shapes. */
static bool surely_same(const mlspy_state *state, PyObject *a, PyObject *b, bool dtypes)
{
    PyObject *const names[] = {state->names[MLSPY_NAME_SHAPE],
                               state->names[MLSPY_NAME_DTYPE]};
    bool same = Py_TYPE(a) == Py_TYPE(b) && !mlspy_is_part(state, a);
    for (int i = 0; same && i < (dtypes ? 2 : 1); i++) {
        PyObject *x = PyObject_GetAttr(a, names[i]);
        PyObject *y = x == NULL ? NULL : PyObject_GetAttr(b, names[i]);
        same = y != NULL && (i == 0 ? same_sizes(x, y) : x == y);
        Py_XDECREF(x);
        Py_XDECREF(y);
        PyErr_Clear();
    }
    return same;
}

/* Compares the shapes of two arrays in full, by their attributes or by views of their
 * memory. Returns 1 if they are equal, 0 if not, -1 with an exception set; `key` is their
 * name, for errors. */
static int same_viewed_shapes(const mlspy_state *state, PyObject *key, PyObject *a,
                              PyObject *b)
{
    /* no keys: metadata needs only the value, and the name for errors */
    mlspy_item first = {.value = a}, second = {.value = b};
    int same = -1;
    if (mlspy_take_text(key, "tensor name", &first.name) == 0) {
        second.name = first.name;
        if (mlspy_item_fill_meta(state, &first) == 0 &&
            mlspy_item_fill_meta(state, &second) == 0) {
            same = mls_tensor_meta_same_shape(&first.meta, &second.meta) ? 1 : 0;
        }
    }
    mlspy_item_forget(&first);
    mlspy_item_forget(&second);
    return same;
}

/* An entry_check: whether the other dict has an array with the name `key` and the shape
 * of `value`. */
static int has_shape(const mlspy_state *state, PyObject *key, PyObject *value,
                     mlspy_finder *other)
{
    PyObject *other_value;
    const int is_present = find_name(other, key, &other_value);
    if (is_present != 1) {
        return is_present;
    }
    int same;
    /* for ndarrays both shapes are directly accessible */
    if (PyArray_Check(value) && PyArray_Check(other_value)) {
        same = PyArray_SAMESHAPE((PyArrayObject *)value, (PyArrayObject *)other_value)
                   ? 1
                   : 0;
    } else {
        same = surely_same(state, value, other_value, false /* shapes only */)
                   ? 1
                   : same_viewed_shapes(state, key, value, other_value);
    }
    Py_DECREF(other_value);
    return same;
}

/* state_shapes_match(state1, state2) -> whether state2 has all tensors of state1 with the
 * same shapes */
PyObject *core_state_shapes_match(mlspy_state *state, PyObject *const *args)
{
    return check_two_dicts(state, args, false /* any length */, has_shape);
}

/* Returns whether the dtypes of two ndarrays certainly have the same name; byte orders
 * are ignored. False if the core does not know them. */
static bool same_descr(PyArrayObject *a, PyArrayObject *b)
{
    mls_dtype first, second;
    return PyArray_DESCR(a) == PyArray_DESCR(b) ||
           (mlspy_dtype_of_descr(PyArray_DESCR(a), &first) &&
            mlspy_dtype_of_descr(PyArray_DESCR(b), &second) && first == second);
}

/* An entry_check: whether the other dict certainly has an array with the name `key` and
 * the shape and dtype of `value`. 0 means "not certain": the caller then compares in
 * full. */
static int has_same(const mlspy_state *state, PyObject *key, PyObject *value,
                    mlspy_finder *other)
{
    PyObject *other_value;
    /* the full comparison refuses a key that cannot be a name */
    if (!PyUnicode_CheckExact(key) || !PyUnicode_IS_COMPACT_ASCII(key)) {
        return 0;
    }
    const int is_present = mlspy_find(other, key, &other_value);
    if (is_present != 1) {
        return is_present;
    }
    bool same;
    if (PyArray_Check(value) && PyArray_Check(other_value)) {
        PyArrayObject *a = (PyArrayObject *)value, *b = (PyArrayObject *)other_value;
        same = PyArray_SAMESHAPE(a, b) && same_descr(a, b);
    } else {
        same = surely_same(state, value, other_value, true /* dtypes */);
    }
    Py_DECREF(other_value);
    return same ? 1 : 0;
}

/* state_compare(source, target) -> (missing, unexpected, shapes, dtypes), lists as by
 * mlspy_pairs_report: the names that only the source has, those that only the target has,
 * and tuples (name, of the source, of the target) of different shapes and dtypes. These
 * differences are known without reading elements. */
PyObject *core_state_compare(mlspy_state *state, PyObject *const *args)
{
    mlspy_pairs p;
    if (mlspy_take_dict(args[0], "source") < 0 ||
        mlspy_take_dict(args[1], "target") < 0) {
        return NULL;
    }
    /* usually nothing differs; storing all pairs first would take four times as long */
    const int same = PyDict_GET_SIZE(args[0]) == PyDict_GET_SIZE(args[1])
                         ? check_all_entries(state, args[0], args[1], has_same)
                         : 0;
    if (same != 0) {
        return same < 0 ? NULL : Py_BuildValue("([][][][])");
    }
    if (mlspy_pairs_init(state, args[0], args[1], &p) < 0) {
        return NULL;
    }
    PyObject *report = mlspy_pairs_report(&p, false /* missing in the target */);
    mlspy_pairs_fini(&p);
    return report;
}

/* state_missing(state1, state2) -> the names in state1 but not in state2, as a set
 *
 * Takes a snapshot of state1, because a lookup may run code that changes it.
 */
PyObject *core_state_missing(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    mlspy_items items = {0};
    if (mlspy_items_of(args[0], "state", &items) < 0) {
        return NULL;
    }
    PyObject *missing = mlspy_take_dict(args[1], "state") < 0 ? NULL : PySet_New(NULL);
    for (size_t i = 0; missing != NULL && i < items.count; i++) {
        PyObject *key = items.items[i].key;
        const int is_present = PyDict_Contains(args[1], key);
        if (is_present < 0 || (is_present == 0 && PySet_Add(missing, key) < 0)) {
            Py_CLEAR(missing);
        }
    }
    mlspy_items_release(&items);
    return missing;
}

/* ---- views of many arrays ----
 *
 * A view takes a kilobyte, mostly for unused dimensions. So views are created in batches
 * that fit the cache.
 */

enum { BATCH = 128 }; /* pairs */

/* Views of both sides of some pairs, and the core's pairs over them. */
typedef struct view_batch {
    size_t count;
    uint64_t bytes;          /* of one side */
    size_t positions[BATCH]; /* of each pair in the mlspy_pairs */
    mls_diff_pair pairs[BATCH];
    mls_diff_result results[BATCH];
    mlspy_view views[2 * BATCH];
} view_batch;

/* Releases the views and empties the batch. */
static void batch_clear(view_batch *batch)
{
    mlspy_views_release(batch->views, 2 * batch->count);
    batch->count = 0;
    batch->bytes = 0;
}

/* Views both arrays of pair `i` of `p`, and adds them to the batch, which has room.
 * Returns -1 with an exception set; the batch is then unchanged, and the views of this
 * pair are released. */
static int batch_add(const mlspy_state *state, const mlspy_pairs *p, size_t i,
                     view_batch *batch)
{
    mlspy_view *views = &batch->views[2 * batch->count];
    mls_status st;
    if (mlspy_view_item(state, &p->source.items[i], "", false /* read-only */,
                        &views[0]) < 0) {
        return -1;
    }
    if (mlspy_view_item(state, &p->target.items[i], "", false /* read-only */,
                        &views[1]) < 0) {
        mlspy_view_release(&views[0]);
        return -1;
    }
    /* an object's attributes may disagree with its memory */
    if (mls_diff_check(&views[0].tensor, &views[1].tensor, &st) != MLS_OK) {
        mlspy_views_release(views, 2);
        mls_fail(&st, st.code, "'%.140s': its memory does not match its shape and dtype",
                 p->pairs[i].name.data);
        mls_status_name(&st, p->pairs[i].name.data, p->pairs[i].name.length);
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    batch->pairs[batch->count] =
        (mls_diff_pair){.a = &views[0].tensor, .b = &views[1].tensor};
    batch->positions[batch->count++] = i;
    batch->bytes += mlspy_bytes(&views[0].tensor);
    return 0;
}

/* Fills an empty batch with pairs from `*at` on whose elements must be compared: equal
 * shape and dtype, but not the same object. Pairs of a dtype that only NumPy knows are
 * skipped if `needs_core_dtype`; otherwise they are an error. Sets `*at` to the start of
 * the next batch. Returns -1 with an exception set, and the batch empty. */
static int batch_fill(const mlspy_state *state, const mlspy_pairs *p,
                      bool needs_core_dtype, size_t *at, view_batch *batch)
{
    for (; *at < p->source.count && batch->count < BATCH; (*at)++) {
        const mlspy_item *a = &p->source.items[*at], *b = &p->target.items[*at];
        if (p->bits[*at] != MLS_SAME || a->value == b->value ||
            (needs_core_dtype && !mlspy_has_core_dtype(a))) {
            continue;
        }
        if (batch_add(state, p, *at, batch) < 0) {
            batch_clear(batch);
            return -1;
        }
    }
    return 0;
}

/* ---- differences ---- */

/* Appends (name, changed, size, nan, max_abs, max_rel) to `*list` for each tensor of a
 * measured batch that changed: `changed` of its `size` elements differ, `nan` of them
 * because only one side is NaN, and the others have these largest distances, absolute and
 * relative (see diff.h). On failure the list is released and set to NULL; a NULL list
 * stays NULL. */
static void append_changes(const mlspy_pairs *p, const view_batch *batch, PyObject **list)
{
    for (size_t i = 0; *list != NULL && i < batch->count; i++) {
        const mls_diff_result *d = &batch->results[i];
        size_t size = 0;
        if (d->changed > 0) {
            (void)mls_tensor_count(batch->pairs[i].a, &size);
            mlspy_append(
                list, Py_BuildValue("(OKnKdd)", mlspy_pair_key(p, batch->positions[i]),
                                    (unsigned long long)d->changed, (Py_ssize_t)size,
                                    (unsigned long long)d->nan, d->max_abs, d->max_rel));
        }
    }
}

/* Compares the pairs of a batch, and stores the differences in its results. The views
 * hold their arrays while the GIL is released. Writes by other threads meanwhile only
 * affect the numbers. Returns -1 with MemoryError set. */
static int measure_batch(const mlspy_state *state, view_batch *batch)
{
    mls_status st;
    PyThreadState *saved = mlspy_leave_python(batch->bytes);
    const mls_code code = mls_diff(mls_diff_of(state->kernels->cpu), state->pool,
                                   batch->pairs, batch->count, batch->results, &st);
    mlspy_resume_python(saved);
    return mlspy_check(state, code, &st);
}

/* Returns a new list of the tuples of append_changes for all pairs of equal shape and
 * dtype whose elements differ; NULL with an exception set. The batch is on the heap
 * because of its size. */
static PyObject *changes_of(const mlspy_state *state, const mlspy_pairs *p)
{
    view_batch *batch = mls_alloc(1, sizeof *batch);
    PyObject *list = batch == NULL ? PyErr_NoMemory() : PyList_New(0);
    /* threads share large tensors within a batch, so processing batches in sequence costs
     * nothing */
    for (size_t at = 0; list != NULL && at < p->source.count;) {
        if (batch_fill(state, p, false /* any dtype */, &at, batch) < 0 ||
            measure_batch(state, batch) < 0) {
            Py_CLEAR(list);
        }
        append_changes(p, batch, &list);
        batch_clear(batch);
    }
    mls_free(batch);
    return list;
}

/* Counts each tensor that is whole on one side, and a part on the other, as one of
 * another shape: its elements cannot be compared. */
static void mark_whole_and_part(mlspy_pairs *p)
{
    for (size_t i = 0; i < p->count; i++) {
        const mls_meta_pair *pair = &p->pairs[i];
        if (pair->has_source && pair->has_target &&
            (pair->source.part == NULL) != (pair->target.part == NULL) &&
            (p->bits[i] & MLS_SHAPE_DIFFERS) == 0) {
            p->counts.same -= p->bits[i] == MLS_SAME;
            p->bits[i] |= MLS_SHAPE_DIFFERS;
            p->counts.shapes++;
        }
    }
}

/* state_diff(a, b) -> (missing, unexpected, shapes, dtypes, changes, unchanged)
 *
 * The first four as by state_compare; `changes` as by append_changes; `unchanged`: the
 * number of tensors with equal elements.
 */
PyObject *core_state_diff(mlspy_state *state, PyObject *const *args)
{
    mlspy_pairs p;
    PyObject *result = NULL;
    if (mlspy_pairs_init(state, args[0], args[1], &p) < 0) {
        return NULL;
    }
    mark_whole_and_part(&p);
    PyObject *changes = changes_of(state, &p);
    PyObject *report = changes == NULL
                           ? NULL
                           : mlspy_pairs_report(&p, false /* missing in the target */);
    if (report != NULL) {
        /* unchanged: pairs of equal shape and dtype, minus those with changed elements */
        result = Py_BuildValue("(OOOOOn)", PyTuple_GET_ITEM(report, 0),
                               PyTuple_GET_ITEM(report, 1), PyTuple_GET_ITEM(report, 2),
                               PyTuple_GET_ITEM(report, 3), changes,
                               (Py_ssize_t)p.counts.same - PyList_GET_SIZE(changes));
    }
    Py_XDECREF(report);
    Py_XDECREF(changes);
    mlspy_pairs_fini(&p);
    return result;
}

/* ---- equality ---- */

/* Returns 1 if two arrays of a dtype that only NumPy knows have equal bytes, 0 if not, -1
 * with an exception set. */
static int same_bytes(const mlspy_state *state, const mlspy_item *a, const mlspy_item *b)
{
    PyObject *first = mlspy_raw_bytes(state, a);
    PyObject *second = first == NULL ? NULL : mlspy_raw_bytes(state, b);
    const int same = second == NULL ? -1 : PyObject_RichCompareBool(first, second, Py_EQ);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return same;
}

/* Returns whether a tensor is whole on one side, and a part of it on the other. Both have
 * the same shape, so the comparison of metadata does not see it. */
static bool has_whole_and_part(const mlspy_pairs *p)
{
    bool has_both = false;
    for (size_t i = 0; i < p->count && !has_both; i++) {
        has_both = (p->pairs[i].source.part == NULL) != (p->pairs[i].target.part == NULL);
    }
    return has_both;
}

/* Returns 1 if all pairs of dtypes that only NumPy knows have equal bytes, 0 if not, -1
 * with an exception set. Bytes, because it is unknown whether different ones could mean
 * equal values. */
static int same_unknown(const mlspy_state *state, const mlspy_pairs *p)
{
    int same = 1;
    for (size_t i = 0; same == 1 && i < p->count; i++) {
        const mlspy_item *a = &p->source.items[i], *b = &p->target.items[i];
        if (a->value != b->value && !mlspy_has_core_dtype(a)) {
            same = same_bytes(state, a, b);
        }
    }
    return same;
}

/* Returns 1 if all pairs of dtypes that the core knows have equal elements, 0 if not, -1
 * with an exception set. Compares them batch by batch, and stops at the first
 * difference. */
static int same_elements(const mlspy_state *state, const mlspy_pairs *p)
{
    view_batch *batch = mls_alloc(1, sizeof *batch);
    int same = 1;
    if (batch == NULL) {
        return mlspy_no_memory();
    }
    for (size_t at = 0; same == 1 && at < p->source.count;) {
        same = batch_fill(state, p, true /* needs_core_dtype */, &at, batch) < 0 ? -1 : 1;
        if (same == 1) {
            PyThreadState *saved = mlspy_leave_python(batch->bytes);
            same = mls_diff_same(mls_diff_of(state->kernels->cpu), state->pool,
                                 batch->pairs, batch->count);
            mlspy_resume_python(saved);
        }
        batch_clear(batch);
    }
    mls_free(batch);
    return same;
}

/* An entry_check: whether `key` is a name and `value` an array; if not, returns -1 with
 * TypeError or ValueError set, never 0. */
static int is_array_entry(const mlspy_state *state, PyObject *key, PyObject *value,
                          mlspy_finder *other)
{
    (void)state, (void)other;
    PyObject *name = mlspy_check_entry(key, value);
    Py_XDECREF(name);
    return name == NULL ? -1 : 1;
}

/* Returns 1 if an arbitrary dict holds only names and arrays, 0 if not (TypeError and
 * ValueError mean "no"), -1 with any other exception set, such as MemoryError. */
static int holds_arrays(const mlspy_state *state, PyObject *dict)
{
    const int good = check_all_entries(state, dict, dict, is_array_entry);
    if (good < 0 && (PyErr_ExceptionMatches(PyExc_TypeError) ||
                     PyErr_ExceptionMatches(PyExc_ValueError))) {
        PyErr_Clear();
        return 0;
    }
    return good;
}

/* Compares everything except the elements first, because that is cheap. */
int mlspy_states_equal(const mlspy_state *state, PyObject *a, PyObject *b)
{
    mlspy_pairs p;
    /* different lengths decide without looking at names */
    if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) {
        return 0;
    }
    const int good = holds_arrays(state, b);
    if (good != 1) {
        return good;
    }
    if (mlspy_pairs_init(state, a, b, &p) < 0) {
        return -1;
    }
    int same = 0;
    if (p.counts.missing + p.counts.unexpected + p.counts.shapes + p.counts.dtypes == 0 &&
        !has_whole_and_part(&p)) {
        same = same_unknown(state, &p);
        same = same == 1 ? same_elements(state, &p) : same;
    }
    mlspy_pairs_fini(&p);
    return same;
}

/* ---- metadata ---- */

/* Returns a new tuple (name, dtype, shape, nbytes) of an item that has its metadata; NULL
 * with an exception set. */
static PyObject *meta_tuple(const mlspy_state *state, const mlspy_item *item)
{
    uint64_t bytes;
    if (mlspy_array_bytes(state, item->value, &bytes) < 0) {
        return NULL;
    }
    /* each N consumes its reference, or passes a NULL on as the exception that is set */
    return Py_BuildValue("(NsNK)", mlspy_str_of(item->name), item->meta.dtype,
                         mlspy_sizes_tuple(item->meta.shape, item->meta.rank),
                         (unsigned long long)bytes);
}

/* state_metadata(state) -> a list of (name, dtype, shape, nbytes), one for each tensor */
PyObject *core_state_metadata(mlspy_state *state, PyObject *const *args)
{
    mlspy_items items;
    if (mlspy_items_of(args[0], "state", &items) < 0) {
        return NULL;
    }
    PyObject *list = mlspy_items_fill_meta(state, &items) < 0 ? NULL : PyList_New(0);
    for (size_t i = 0; list != NULL && i < items.count; i++) {
        mlspy_append(&list, meta_tuple(state, &items.items[i]));
    }
    mlspy_items_release(&items);
    return list;
}
