/* py_state: two state dicts compared: names, shapes, dtypes, elements.  The public names
 * and their docstrings are in mlstate/state/__init__.py; these take positional arguments only.
 *
 * Cheap questions come first everywhere: names before shapes, shapes before elements, and
 * the answer that nearly all callers get (nothing differs) before any list is made.
 */
#include "state/py_state_compare.h"

#include "common/args.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/gil.h"
#include "common/dict_items.h"
#include "common/module_state.h"
#include "common/dict_pairs.h"
#include "state/state_bindings.h"

#include "state/diff/diff.h"
#include "base/memory.h"

/* ---- quick answers ----
 *
 * No items are taken here: the first dict is walked as it is, with a reference to what is
 * being looked at.  A dict that changes meanwhile gives an answer about either state.
 */

/* What is asked of each entry of the first dict: 1 yes, 0 no, -1 with an exception set.
 */
typedef int (*entry_question)(const mlspy_state *state, PyObject *key, PyObject *value,
                              mlspy_finder *other);

/* Whether the answer is yes for all entries of `dict`. */
static int ask_all(const mlspy_state *state, PyObject *dict, PyObject *other,
                   entry_question ask)
{
    mlspy_finder finder = {.dict = other, .in_step = true};
    int answer = 1;
    MLSPY_BEGIN_LOCKED(dict)
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (answer == 1 && PyDict_Next(dict, &at, &key, &value)) {
        /* the lookup may run code that drops the entry */
        Py_INCREF(key);
        Py_INCREF(value);
        answer = ask(state, key, value, &finder);
        Py_DECREF(key);
        Py_DECREF(value);
    }
    MLSPY_END_LOCKED()
    return answer;
}

/* Ask about two dicts, after a look at the arguments.  Where both must have the same
 * names, lengths decide first: then it is enough to find all of the one in the other. */
static PyObject *ask_two(PyObject *module, const char *name, PyObject *const *args,
                         Py_ssize_t count, bool same_length, entry_question ask)
{
    if (mlspy_take_count(name, 2, count) < 0 || mlspy_take_dict(args[0], "state1") < 0 ||
        mlspy_take_dict(args[1], "state2") < 0) {
        return NULL;
    }
    if (same_length && PyDict_GET_SIZE(args[0]) != PyDict_GET_SIZE(args[1])) {
        Py_RETURN_FALSE;
    }
    const int answer = ask_all(mlspy_state_of(module), args[0], args[1], ask);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

/* Look a name up; one that is no str is refused.  1 and a new reference, 0, or -1 with an
 * exception set. */
static int find_name(mlspy_finder *other, PyObject *key, PyObject **found)
{
    if (!PyUnicode_Check(key)) {
        PyErr_Format(PyExc_TypeError, "tensor name must be a str, got %.100s: %.200R",
                     Py_TYPE(key)->tp_name, key);
        return -1;
    }
    return mlspy_find(other, key, found);
}

/* Is there an entry of that name? */
static int has_name(const mlspy_state *state, PyObject *key, PyObject *value,
                    mlspy_finder *other)
{
    (void)state, (void)value;
    PyObject *found;
    const int there = find_name(other, key, &found);
    if (there == 1) {
        Py_DECREF(found);
    }
    return there;
}

/* state_keys_match(a, b) -> bool */
static PyObject *state_keys_match(PyObject *module, PyObject *const *args,
                                  Py_ssize_t count)
{
    return ask_two(module, "state_keys_match", args, count, true, has_name);
}

/* Whether two attributes are the same tuple of plain ints.  Running no code of others,
 * and raising nothing, is the point: what is anything else is looked at in full. */
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

/* Whether two tensors, of torch for one, have the same shape and, where `dtypes`, the
 * very same object as dtype: false where that takes a second look.  Most of the time goes
 * into the tensors' making of the two shapes. */
static bool same_attributes(const mlspy_state *state, PyObject *a, PyObject *b,
                            bool dtypes)
{
    PyObject *const names[] = {state->shape_name, state->dtype_name};
    bool same = Py_TYPE(a) == Py_TYPE(b);
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

/* The shapes of two arrays that can only be asked for them.  Items without keys do: facts
 * need the value, and the name for errors. */
static int same_facts(const mlspy_state *state, PyObject *key, PyObject *a, PyObject *b)
{
    mlspy_item one = {.value = a}, other = {.value = b};
    int same = -1;
    if (mlspy_take_text(key, "tensor name", &one.name) == 0) {
        other.name = one.name;
        if (mlspy_item_facts(state, &one) == 0 && mlspy_item_facts(state, &other) == 0) {
            same = mls_facts_same_shape(&one.facts, &other.facts) ? 1 : 0;
        }
    }
    mlspy_item_forget(&one);
    mlspy_item_forget(&other);
    return same;
}

/* Is there an array of that name and shape? */
static int has_shape(const mlspy_state *state, PyObject *key, PyObject *value,
                     mlspy_finder *other)
{
    PyObject *found;
    const int there = find_name(other, key, &found);
    if (there != 1) {
        return there;
    }
    int same;
    /* no facts are taken where NumPy has both shapes at hand */
    if (PyArray_Check(value) && PyArray_Check(found)) {
        same = PyArray_SAMESHAPE((PyArrayObject *)value, (PyArrayObject *)found) ? 1 : 0;
    } else {
        same = same_attributes(state, value, found, false)
                   ? 1
                   : same_facts(state, key, value, found);
    }
    Py_DECREF(found);
    return same;
}

/* state_shapes_match(a, b) -> whether b has all tensors of a in the same shapes */
static PyObject *state_shapes_match(PyObject *module, PyObject *const *args,
                                    Py_ssize_t count)
{
    return ask_two(module, "state_shapes_match", args, count, false, has_shape);
}

/* Whether two dtypes of NumPy are sure to have one name: byte orders do not count. */
static bool same_descr(PyArrayObject *a, PyArrayObject *b)
{
    mls_dtype one, other;
    return PyArray_DESCR(a) == PyArray_DESCR(b) ||
           (mlspy_dtype_of_descr(PyArray_DESCR(a), &one) &&
            mlspy_dtype_of_descr(PyArray_DESCR(b), &other) && one == other);
}

/* Is there, without a second look, an array of that name, shape and dtype?  0 is "perhaps
 * not": it sends the caller the long way, which finds the same or says what differs. */
static int has_same(const mlspy_state *state, PyObject *key, PyObject *value,
                    mlspy_finder *other)
{
    PyObject *found;
    if (!PyUnicode_CheckExact(key) || !PyUnicode_IS_COMPACT_ASCII(key)) {
        return 0;
    }
    const int there = mlspy_find(other, key, &found);
    if (there != 1) {
        return there;
    }
    bool same;
    if (PyArray_Check(value) && PyArray_Check(found)) {
        PyArrayObject *a = (PyArrayObject *)value, *b = (PyArrayObject *)found;
        same = PyArray_SAMESHAPE(a, b) && same_descr(a, b);
    } else {
        same = same_attributes(state, value, found, true);
    }
    Py_DECREF(found);
    return same ? 1 : 0;
}

/* state_compare(source, target) -> (missing, unexpected, shapes, dtypes) */
static PyObject *state_compare(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mlspy_pairs p;
    if (mlspy_take_count("state_compare", 2, count) < 0 ||
        mlspy_take_dict(args[0], "source") < 0 ||
        mlspy_take_dict(args[1], "target") < 0) {
        return NULL;
    }
    /* mostly nothing differs, and then nothing needs to be remembered of any pair, which
     * would take four times as long */
    const int same = PyDict_GET_SIZE(args[0]) == PyDict_GET_SIZE(args[1])
                         ? ask_all(state, args[0], args[1], has_same)
                         : 0;
    if (same != 0) {
        return same < 0 ? NULL : Py_BuildValue("([][][][])");
    }
    if (mlspy_pairs_init(state, args[0], args[1], &p) < 0) {
        return NULL;
    }
    PyObject *report = mlspy_pairs_report(&p, false);
    mlspy_pairs_fini(&p);
    return report;
}

/* state_missing(a, b) -> the names that a has and b lacks, as a set
 *
 * `a` is taken at one moment, since looking a key up may run code that changes it. */
static PyObject *state_missing(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    mlspy_items items = {0};
    if (mlspy_take_count("state_missing", 2, count) < 0 ||
        mlspy_items_of(args[0], "state", &items) < 0) {
        return NULL;
    }
    PyObject *missing = mlspy_take_dict(args[1], "state") < 0 ? NULL : PySet_New(NULL);
    for (size_t i = 0; missing != NULL && i < items.count; i++) {
        PyObject *key = items.items[i].key;
        const int there = PyDict_Contains(args[1], key);
        if (there < 0 || (there == 0 && PySet_Add(missing, key) < 0)) {
            Py_CLEAR(missing);
        }
    }
    mlspy_items_release(&items);
    return missing;
}

/* ---- views of many arrays ----
 *
 * A view takes a kilobyte, most of it room for dimensions that nobody has: so they are
 * made for a batch of pairs at a time, which stays in the cache.
 */

enum { BATCH = 128 };

/* Views of both sides of some pairs, and the core's pairs over them. */
typedef struct view_batch {
    size_t count;
    uint64_t bytes;      /* of one side */
    size_t where[BATCH]; /* position of each in the mlspy_pairs */
    mls_differ_pair pairs[BATCH];
    mls_difference found[BATCH];
    mlspy_view views[2 * BATCH];
} view_batch;

/* Give the views back; the batch is empty then. */
static void batch_clear(view_batch *batch)
{
    for (size_t i = 0; i < 2 * batch->count; i++) {
        mlspy_view_release(&batch->views[i]);
    }
    batch->count = 0;
    batch->bytes = 0;
}

/* View both arrays of pair `i` of `p`.  On failure the batch is as it was, and the views
 * of this pair are given back. */
static int batch_add(const mlspy_state *state, const mlspy_pairs *p, size_t i,
                     view_batch *batch)
{
    mlspy_view *views = &batch->views[2 * batch->count];
    mls_status st;
    size_t bytes = 0;
    if (mlspy_view_item(state, &p->source.items[i], "", false, &views[0]) < 0) {
        return -1;
    }
    if (mlspy_view_item(state, &p->target.items[i], "", false, &views[1]) < 0) {
        mlspy_view_release(&views[0]);
        return -1;
    }
    /* what an object said of its shape and dtype need not be what its memory is */
    if (mls_differ_check(&views[0].tensor, &views[1].tensor, &st) != MLS_OK) {
        mlspy_view_release(&views[0]);
        mlspy_view_release(&views[1]);
        mls_fail(&st, st.code, "'%.140s': its memory is not what its shape and dtype say",
                 p->pairs[i].name.data);
        mls_status_name(&st, p->pairs[i].name.data, p->pairs[i].name.length);
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    (void)mls_tensor_bytes(&views[0].tensor, &bytes); /* it lies in memory, so it fits */
    batch->pairs[batch->count] =
        (mls_differ_pair){.a = &views[0].tensor, .b = &views[1].tensor};
    batch->where[batch->count++] = i;
    batch->bytes += bytes;
    return 0;
}

/* Fill an empty batch with the pairs from `*at` on whose elements are to be compared:
 * those of one shape and dtype that are not the same object.  Those of a dtype that only
 * NumPy knows are left out where `known`, else they are an error.  `*at` is where the
 * next batch goes on; a failure empties the batch. */
static int batch_fill(const mlspy_state *state, const mlspy_pairs *p, bool known,
                      size_t *at, view_batch *batch)
{
    for (; *at < p->source.count && batch->count < BATCH; (*at)++) {
        const mlspy_item *a = &p->source.items[*at], *b = &p->target.items[*at];
        if (p->bits[*at] != MLS_SAME || a->value == b->value ||
            (known && !mlspy_is_known(a))) {
            continue;
        }
        if (batch_add(state, p, *at, batch) < 0) {
            batch_clear(batch);
            return -1;
        }
    }
    return 0;
}

/* Kernels follow the instruction set that the module chose. */
static const mls_differ_kernels *differ_of(const mlspy_state *state)
{
    return mls_differ_of(state->kernels->cpu);
}

/* ---- differences ---- */

/* Append (name, changed, size, nan, max_abs, max_rel) for each tensor that changed. */
static int append_changes(const mlspy_pairs *p, const view_batch *batch, PyObject *list)
{
    for (size_t i = 0; i < batch->count; i++) {
        const mls_difference *d = &batch->found[i];
        size_t size = 0;
        if (d->changed == 0) {
            continue;
        }
        (void)mls_tensor_count(batch->pairs[i].a, &size);
        PyObject *entry =
            Py_BuildValue("(OKnKdd)", mlspy_pair_key(p, batch->where[i]),
                          (unsigned long long)d->changed, (Py_ssize_t)size,
                          (unsigned long long)d->nan, d->max_abs, d->max_rel);
        const int failed = entry == NULL ? -1 : PyList_Append(list, entry);
        Py_XDECREF(entry);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

/* Measure the pairs of a batch and note what changed.  The views hold their arrays while
 * the GIL is let go; others may write to them, which changes numbers and nothing else. */
static int measure_batch(const mlspy_state *state, const mlspy_pairs *p,
                         view_batch *batch, PyObject *list)
{
    mls_status st;
    PyThreadState *saved = mlspy_leave_python(batch->bytes);
    const mls_code code = mls_differ(differ_of(state), state->pool, batch->pairs,
                                     batch->count, batch->found, &st);
    mlspy_resume_python(saved);
    if (code != MLS_OK) {
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    return append_changes(p, batch, list);
}

/* New list of all changes.  The batch is on the heap: its views would take a large part
 * of a thread's stack. */
static PyObject *changes_of(const mlspy_state *state, const mlspy_pairs *p)
{
    view_batch *batch = mls_alloc(1, sizeof *batch);
    PyObject *list = batch == NULL ? PyErr_NoMemory() : PyList_New(0);
    /* large tensors are shared out over threads within a batch, so nothing is lost by
     * taking one batch after the other */
    for (size_t at = 0; list != NULL && at < p->source.count;) {
        if (batch_fill(state, p, false, &at, batch) < 0 ||
            measure_batch(state, p, batch, list) < 0) {
            Py_CLEAR(list);
        }
        batch_clear(batch);
    }
    mls_free(batch);
    return list;
}

/* state_diff(a, b) -> (missing, unexpected, shapes, dtypes, changes, unchanged) */
static PyObject *state_diff(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mlspy_pairs p;
    PyObject *result = NULL;
    if (mlspy_take_count("state_diff", 2, count) < 0 ||
        mlspy_pairs_init(state, args[0], args[1], &p) < 0) {
        return NULL;
    }
    PyObject *changes = changes_of(state, &p);
    PyObject *report = changes == NULL ? NULL : mlspy_pairs_report(&p, false);
    if (report != NULL) {
        /* of the pairs of one shape and dtype, those whose elements changed are not the
         * same */
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

/* Whether two arrays of a dtype that only NumPy knows are the same bytes. */
static int same_bytes(const mlspy_state *state, const mlspy_item *a, const mlspy_item *b)
{
    PyObject *first = mlspy_raw_bytes(state, a);
    PyObject *second = first == NULL ? NULL : mlspy_raw_bytes(state, b);
    const int same = second == NULL ? -1 : PyObject_RichCompareBool(first, second, Py_EQ);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return same;
}

/* Those pairs that NumPy alone knows.  Their bytes are compared: what they mean, and so
 * whether other bytes could be equal, is not known here. */
static int same_unknown(const mlspy_state *state, const mlspy_pairs *p)
{
    int same = 1;
    for (size_t i = 0; same == 1 && i < p->count; i++) {
        const mlspy_item *a = &p->source.items[i], *b = &p->target.items[i];
        if (a->value != b->value && !mlspy_is_known(a)) {
            same = same_bytes(state, a, b);
        }
    }
    return same;
}

/* All other pairs, batch after batch, and no more of them than it takes to say no. */
static int same_elements(const mlspy_state *state, const mlspy_pairs *p)
{
    view_batch *batch = mls_alloc(1, sizeof *batch);
    int same = 1;
    if (batch == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t at = 0; same == 1 && at < p->source.count;) {
        same = batch_fill(state, p, true, &at, batch) < 0 ? -1 : 1;
        if (same == 1) {
            PyThreadState *saved = mlspy_leave_python(batch->bytes);
            same = mls_differ_same(differ_of(state), state->pool, batch->pairs,
                                   batch->count);
            mlspy_resume_python(saved);
        }
        batch_clear(batch);
    }
    mls_free(batch);
    return same;
}

/* Whether any dict at all holds names and arrays, and nothing else.  Errors that mean
 * "no" are swallowed; all others, such as a lack of memory, are passed on. */
static int holds_arrays(PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    bool good = true;
    MLSPY_BEGIN_LOCKED(dict)
    while (good && PyDict_Next(dict, &at, &key, &value)) {
        PyObject *held[] = {Py_NewRef(key), Py_NewRef(value)};
        PyObject *name = mlspy_check_entry(held[0], held[1]);
        good = name != NULL;
        Py_XDECREF(name);
        Py_DECREF(held[0]);
        Py_DECREF(held[1]);
    }
    MLSPY_END_LOCKED()
    if (!good && (PyErr_ExceptionMatches(PyExc_TypeError) ||
                  PyErr_ExceptionMatches(PyExc_ValueError))) {
        PyErr_Clear();
        return 0;
    }
    return good ? 1 : -1;
}

/* Everything but the elements first: that is cheap.  A dict of something else is not
 * equal, which is no error. */
int mlspy_states_equal(const mlspy_state *state, PyObject *a, PyObject *b)
{
    mlspy_pairs p;
    /* different lengths need no look at any name */
    if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) {
        return 0;
    }
    const int good = holds_arrays(b);
    if (good != 1) {
        return good;
    }
    if (mlspy_pairs_init(state, a, b, &p) < 0) {
        return -1;
    }
    int same = 0;
    if (p.counts.missing + p.counts.unexpected + p.counts.shapes + p.counts.dtypes == 0) {
        same = same_unknown(state, &p);
        same = same == 1 ? same_elements(state, &p) : same;
    }
    mlspy_pairs_fini(&p);
    return same;
}

PyMethodDef mlspy_state_methods[] = {
    {"state_keys_match", MLSPY_FASTCALL(state_keys_match),
     "state_keys_match(state1, state2, /)\n--\n\nWhether the names are the same."},
    {"state_shapes_match", MLSPY_FASTCALL(state_shapes_match),
     "state_shapes_match(state1, state2, /)\n--\n\nWhether state2 has all the shapes."},
    {"state_missing", MLSPY_FASTCALL(state_missing),
     "state_missing(state1, state2, /)\n--\n\nNames that only state1 has."},
    {"state_compare", MLSPY_FASTCALL(state_compare),
     "state_compare(source, target, /)\n--\n\nNames, shapes and dtypes that differ."},
    {"state_diff", MLSPY_FASTCALL(state_diff),
     "state_diff(a, b, /)\n--\n\nWhat differs, elements too."},
    {NULL, NULL, 0, NULL},
};
