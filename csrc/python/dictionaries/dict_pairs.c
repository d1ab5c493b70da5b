/* dict_pairs: pairs two dicts' entries by name; lists missing, unexpected and different
 * ones; bytes of other dtypes.
 *
 * Source and target are each copied at one moment, and then paired by name. The pairs
 * hold references to all arrays, so later changes of the dicts do not matter.
 */
#include "dictionaries/dict_pairs.h"

#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "dictionaries/dict_items.h"

#include "base/memory.h"

#include <float.h>

/* Accepts pairs that mlspy_pairs_init left incomplete. */
void mlspy_pairs_fini(mlspy_pairs *p)
{
    mlspy_items_release(&p->source);
    mlspy_items_release(&p->target);
    mls_free(p->pairs);
    mls_free(p->bits);
    *p = (mlspy_pairs){0};
}

/* Return a new dict {name: position} of the items from position `first` on, or NULL with
 * an exception set. The names become plain str: a subclass may run code when it is
 * compared. */
static PyObject *positions_by_name(const mlspy_items *items, size_t first)
{
    PyObject *positions = PyDict_New();
    for (size_t i = first; positions != NULL && i < items->count; i++) {
        mlspy_set(&positions, PyUnicode_FromObject(items->items[i].key),
                  PyLong_FromSize_t(i));
    }
    return positions;
}

/* Move the item with the key of `item` from `all` to `*out`; `positions` has the
 * positions in `all` by name. Returns 1, or 0 if there is none, or -1 with an exception
 * set. */
static int take_partner(mlspy_items *all, PyObject *positions, const mlspy_item *item,
                        mlspy_item *out)
{
    PyObject *name = PyUnicode_FromObject(item->key);
    PyObject *position =
        name == NULL ? NULL : PyDict_GetItemWithError(positions, name); /* borrowed */
    Py_XDECREF(name);
    if (position == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    mlspy_item *partner = &all->items[PyLong_AsSize_t(position)];
    *out = *partner;
    *partner = (mlspy_item){0};
    return 1;
}

/* Put the target's items in the order of the pairs: the partner of each source item, or
 * an item without key, then the rest. Moves items out of `all`; the caller releases what
 * is left. Returns -1 with an exception set. */
static int arrange_targets(mlspy_pairs *p, mlspy_items *all)
{
    const mlspy_items *source = &p->source;
    size_t first = 0; /* of the names that differ */
    while (first < source->count && first < all->count &&
           mls_str_equal(source->items[first].name, all->items[first].name)) {
        first++;
    }
    if (first == source->count) { /* already in order */
        p->target = *all;
        *all = (mlspy_items){0};
        p->count = p->target.count;
        return 0;
    }
    /* cannot overflow: both dicts are in memory */
    p->target.items = mls_alloc(source->count + all->count, sizeof *p->target.items);
    if (p->target.items == NULL) {
        return mlspy_no_memory();
    }
    p->target.count = source->count;
    PyObject *positions = positions_by_name(all, first);
    int result = positions == NULL ? -1 : 0;
    memcpy(p->target.items, all->items, first * sizeof *all->items);
    memset(all->items, 0, first * sizeof *all->items);
    for (size_t i = first; result >= 0 && i < source->count; i++) {
        result = take_partner(all, positions, &source->items[i], &p->target.items[i]);
    }
    Py_XDECREF(positions);
    for (size_t i = 0; result >= 0 && i < all->count; i++) {
        if (all->items[i].key != NULL) {
            p->target.items[p->target.count++] = all->items[i];
            all->items[i] = (mlspy_item){0};
        }
    }
    p->count = p->target.count;
    return result < 0 ? -1 : 0;
}

/* Make a pair for each position of the arranged items, and compare them. No item may move
 * afterwards: short shapes are stored in the item itself. Returns -1 with an exception
 * set. */
static int make_pairs(const mlspy_state *state, mlspy_pairs *p)
{
    p->pairs = mls_alloc(p->count, sizeof *p->pairs);
    p->bits = mls_alloc(p->count, sizeof *p->bits);
    if (p->pairs == NULL || p->bits == NULL) {
        return mlspy_no_memory();
    }
    for (size_t i = 0; i < p->count; i++) {
        mlspy_item *from = i < p->source.count ? &p->source.items[i] : NULL;
        mlspy_item *to = &p->target.items[i];
        mls_meta_pair *pair = &p->pairs[i];
        pair->has_source = from != NULL;
        pair->has_target = to->key != NULL;
        pair->name = from != NULL ? from->name : to->name;
        /* shapes and dtypes are read only if both sides exist */
        if (from == NULL || to->key == NULL) {
            continue;
        }
        if (mlspy_item_fill_meta(state, from) < 0 ||
            mlspy_item_fill_meta(state, to) < 0) {
            return -1;
        }
        pair->source = from->meta;
        pair->target = to->meta;
    }
    p->counts = mls_metadata_compare(p->pairs, p->count, p->bits);
    return 0;
}

/* The target's type is checked before the source's entries are taken. */
int mlspy_pairs_init(const mlspy_state *state, PyObject *source, PyObject *target,
                     mlspy_pairs *p)
{
    mlspy_items all = {0};
    *p = (mlspy_pairs){0};
    const bool good = mlspy_take_dict(target, "target") == 0 &&
                      mlspy_items_of(source, "source", &p->source) == 0 &&
                      mlspy_items_of(target, "target", &all) == 0 &&
                      arrange_targets(p, &all) == 0 && make_pairs(state, p) == 0;
    mlspy_items_release(&all);
    if (!good) {
        mlspy_pairs_fini(p);
    }
    return good ? 0 : -1;
}

/* ---- differences as lists ---- */

PyObject *mlspy_pair_key(const mlspy_pairs *p, size_t i)
{
    return i < p->source.count ? p->source.items[i].key : p->target.items[i].key;
}

/* An entry of a report about pair `i`. */
typedef PyObject *make_entry(const mlspy_pairs *p, size_t i);

static PyObject *name_entry(const mlspy_pairs *p, size_t i)
{
    return Py_NewRef(mlspy_pair_key(p, i));
}

/* The shape as a tuple, or the text of the part. */
static PyObject *shape_of(const mls_tensor_meta *meta)
{
    return meta->part != NULL ? PyUnicode_FromString(meta->part)
                              : mlspy_sizes_tuple(meta->shape, meta->rank);
}

/* (name, shape of the source, shape of the target) */
static PyObject *shape_entry(const mlspy_pairs *p, size_t i)
{
    return Py_BuildValue("(ONN)", mlspy_pair_key(p, i), shape_of(&p->pairs[i].source),
                         shape_of(&p->pairs[i].target));
}

/* (name, dtype of the source, dtype of the target) */
static PyObject *dtype_entry(const mlspy_pairs *p, size_t i)
{
    return Py_BuildValue("(Oss)", mlspy_pair_key(p, i), p->pairs[i].source.dtype,
                         p->pairs[i].target.dtype);
}

/* Return a new list of entry(p, i) for each pair `i` whose flags contain `bit`. */
static PyObject *entries_with(const mlspy_pairs *p, unsigned bit, make_entry *entry)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < p->count; i++) {
        if ((p->bits[i] & bit) != 0) {
            mlspy_append(&list, entry(p, i));
        }
    }
    return list;
}

PyObject *mlspy_pairs_report(const mlspy_pairs *p, bool from_target)
{
    const unsigned missing = from_target ? MLS_UNEXPECTED : MLS_MISSING;
    const unsigned unexpected = from_target ? MLS_MISSING : MLS_UNEXPECTED;
    /* Py_BuildValue treats NULL as an error and releases the others */
    return Py_BuildValue("(NNNN)", entries_with(p, missing, name_entry),
                         entries_with(p, unexpected, name_entry),
                         entries_with(p, MLS_SHAPE_DIFFERS, shape_entry),
                         entries_with(p, MLS_DTYPE_DIFFERS, dtype_entry));
}

/* ---- views and bytes ---- */

/* Replace the BufferError that is set, of a tensor without accessible memory, by
 * CompatibilityError with the array's name `label`. */
static void name_buffer_error(const mlspy_state *state, const char *label)
{
    PyObject *reason;
#if PY_VERSION_HEX >= 0x030C0000
    reason = PyErr_GetRaisedException();
#else
    PyObject *type, *trace;
    PyErr_Fetch(&type, &reason, &trace);
    PyErr_NormalizeException(&type, &reason, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
#endif
    PyErr_Format(state->errors[MLSPY_ERROR_COMPATIBILITY],
                 "%s: its memory cannot be read: %S", label, reason);
    Py_XDECREF(reason);
}

int mlspy_view_item(const mlspy_state *state, const mlspy_item *item, const char *side,
                    bool writable, mlspy_view *out)
{
    if (mlspy_view_quickly(state, item->value, writable, out)) {
        return 0;
    }
    char label[MLS_NAME_BYTES];
    PyOS_snprintf(label, sizeof label, "%s'%.140s'", side, item->name.data);
    const int failed = mlspy_view_for(state, item->value, label, writable, out);
    if (failed < 0 && PyErr_ExceptionMatches(PyExc_BufferError)) {
        name_buffer_error(state, label);
    }
    return failed;
}

/* Return the item's array.tobytes(); NULL with an exception set, CompatibilityError if it
 * has no such method: some arrays lack it, among them torch's. */
static PyObject *bytes_of(const mlspy_state *state, const mlspy_item *item)
{
    PyObject *raw = PyObject_CallMethod(item->value, "tobytes", NULL);
    if (raw == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Format(state->errors[MLSPY_ERROR_COMPATIBILITY],
                     "%.200R: the elements of dtype %.60s of a %.100s cannot be read",
                     item->key, item->meta.dtype, Py_TYPE(item->value)->tp_name);
    }
    return raw;
}

/* Set the bytes of `mask` to 1 that hold a value in an item of dtype `descr`; the others
 * are padding: between the fields of a record, and in x87's long double. */
static void mark_value_bytes(PyArray_Descr *descr, unsigned char *mask)
{
    const npy_intp bytes = PyDataType_ELSIZE(descr);
    const int number = descr->type_num;
    if (PyDataType_HASSUBARRAY(descr)) {
        PyArray_Descr *base = PyDataType_SUBARRAY(descr)->base;
        const npy_intp step = PyDataType_ELSIZE(base);
        for (npy_intp at = 0; step > 0 && at < bytes; at += step) {
            mark_value_bytes(base, mask + at);
        }
    } else if (PyDataType_HASFIELDS(descr)) {
        PyObject *names = PyDataType_NAMES(descr);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
            /* (dtype, offset), borrowed; cannot fail: the names are those of the dict */
            PyObject *field =
                PyDict_GetItem(PyDataType_FIELDS(descr), PyTuple_GET_ITEM(names, i));
            mark_value_bytes((PyArray_Descr *)PyTuple_GET_ITEM(field, 0),
                             mask + PyLong_AsLong(PyTuple_GET_ITEM(field, 1)));
        }
    } else if (LDBL_MANT_DIG == 64 &&
               (number == NPY_LONGDOUBLE || number == NPY_CLONGDOUBLE)) {
        for (npy_intp at = 0; at < bytes; at += (npy_intp)sizeof(long double)) {
            memset(mask + at, 1, 10); /* the bytes of an x87 number */
        }
    } else {
        memset(mask, 1, (size_t)bytes);
    }
}

/* Set the padding in `raw`, a new bytes object of items of dtype `descr`, to zero.
 * Returns `raw`, or NULL with MemoryError set. */
static PyObject *clear_padding(PyArray_Descr *descr, PyObject *raw)
{
    const size_t bytes = (size_t)PyDataType_ELSIZE(descr);
    unsigned char *mask = raw == NULL ? NULL : mls_alloc(bytes, 1);
    if (mask == NULL) {
        Py_XDECREF(raw);
        return raw == NULL ? NULL : PyErr_NoMemory();
    }
    mark_value_bytes(descr, mask);
    char *data = PyBytes_AS_STRING(raw);
    const size_t total = (size_t)PyBytes_GET_SIZE(raw);
    /* each run of padding, in all items; Python shares the bytes objects of length 1 */
    for (size_t begin = 0; bytes > 1 && begin < bytes; begin++) {
        size_t end = begin;
        while (end < bytes && mask[end] == 0) {
            end++;
        }
        for (size_t at = begin; end > begin && at < total; at += bytes) {
            memset(data + at, 0, end - begin);
        }
        begin = end; /* a byte of a value, or the end of the item */
    }
    mls_free(mask);
    return raw;
}

/* Return the bytes of an array of NumPy in native byte order, with zeros as
 * padding: neither makes a difference. */
static PyObject *native_bytes(PyObject *array)
{
    PyArray_Descr *native =
        PyArray_DescrNewByteorder(PyArray_DESCR((PyArrayObject *)array), NPY_NATIVE);
    PyObject *native_array =
        native == NULL ? NULL : PyArray_FromAny(array, native, 0, 0, 0, NULL);
    if (native_array == NULL) {
        return NULL;
    }
    PyObject *raw =
        clear_padding(PyArray_DESCR((PyArrayObject *)native_array),
                      PyArray_ToString((PyArrayObject *)native_array, NPY_CORDER));
    Py_DECREF(native_array);
    return raw;
}

PyObject *mlspy_raw_bytes(const mlspy_state *state, const mlspy_item *item)
{
    PyObject *array = item->value;
    if (!PyArray_Check(array) && !PyArray_IsScalar(array, Generic)) {
        return bytes_of(state, item);
    }
    if (mlspy_is_masked(state, array)) {
        char label[MLS_NAME_BYTES];
        PyOS_snprintf(label, sizeof label, "'%.140s'", item->name.data);
        (void)mlspy_refuse_masked(label);
        return NULL;
    }
    if (PyArray_Check(array)) {
        return native_bytes(array);
    }
    PyObject *scalar_array = PyArray_FromAny(array, NULL, 0, 0, 0, NULL);
    PyObject *raw = scalar_array == NULL ? NULL : native_bytes(scalar_array);
    Py_XDECREF(scalar_array);
    return raw;
}

/* Arrays of other dtypes are compared as bytes. */
bool mlspy_has_core_dtype(const mlspy_item *item)
{
    mls_dtype dtype;
    /* without `dtype_text`, the name is a constant of the core */
    return item->dtype_text == NULL ||
           mls_dtype_from_name(item->meta.dtype, strlen(item->meta.dtype), &dtype);
}
