/* dict_items: which keys and values a state dict accepts; a snapshot of its entries, with
 * shape, dtype and bytes.
 *
 * A dict may change during an iteration: another thread assigns to it, or an array's own
 * code runs. So its entries are copied at once, with their own references, and all other
 * functions use the copy.
 */
#include "dictionaries/dict_items.h"

#include "arguments/args.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "base/memory.h"

/* ---- keys and values ---- */

/* Return 1 if a value that is not an ndarray can be used as one, else 0, or -1 with an
 * exception set. Classes are refused although NumPy's scalar classes have the attribute;
 * text is refused although NumPy's text is a scalar. */
static int is_array_like(PyObject *value)
{
    if (PyType_Check(value) || PyUnicode_Check(value) || PyBytes_Check(value)) {
        return 0;
    }
    const int has_dlpack = mlspy_has_attribute(value, "__dlpack__");
    return has_dlpack != 0 ? has_dlpack
                           : mlspy_has_attribute(value, "__array_interface__");
}

/* Raise TypeError with the reason why `value`, under the name `key`, cannot be a tensor
 * of a state: it is a nested dict, an array of objects, or no array. */
static void refuse_value(PyObject *key, PyObject *value)
{
    if (PyDict_Check(value)) {
        PyErr_Format(
            PyExc_TypeError,
            "%.200R is a %.100s: a state dict is flat; join the names with dots, "
            "as in 'layer.weight'",
            key, Py_TYPE(value)->tp_name);
    } else if (PyArray_Check(value)) {
        PyErr_Format(PyExc_TypeError,
                     "%.200R is an array of Python objects: a state dict holds arrays of "
                     "numbers",
                     key);
    } else {
        PyErr_Format(PyExc_TypeError,
                     "%.200R is a %.100s: a state dict holds arrays; wrap it in "
                     "numpy.asarray with a dtype",
                     key, Py_TYPE(value)->tp_name);
    }
}

/* Other entries need mlspy_check_entry. */
bool mlspy_entry_needs_no_check(PyObject *key, PyObject *value)
{
    return PyUnicode_CheckExact(key) && PyUnicode_IS_COMPACT_ASCII(key) &&
           PyArray_CheckExact(value) &&
           !PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)value));
}

/* An ndarray must have numbers, any other value be array-like. A subclass of str is
 * converted to an exact str by PyUnicode_FromObject. */
PyObject *mlspy_check_entry(PyObject *key, PyObject *value)
{
    mls_str name;
    if (mlspy_entry_needs_no_check(key, value)) {
        return Py_NewRef(key);
    }
    if (!PyUnicode_CheckExact(key) || !PyUnicode_IS_COMPACT_ASCII(key)) {
        if (mlspy_take_text(key, "tensor name", &name) < 0) {
            return NULL;
        }
    }
    const int good = PyArray_Check(value)
                         ? !PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)value))
                         : is_array_like(value);
    if (good < 1) {
        if (good == 0) {
            refuse_value(key, value);
        }
        return NULL;
    }
    return PyUnicode_FromObject(key);
}

/* ---- taking the entries ---- */

/* Take new references to all keys and values of `dict`, as items without names. No other
 * Python code runs meanwhile. Returns -1 with MemoryError set. */
static int take_all(PyObject *dict, mlspy_items *out)
{
    bool failed = false;
    MLSPY_BEGIN_LOCKED(dict)
        PyObject *key, *value;
        Py_ssize_t at = 0;
        out->items = mls_alloc((size_t)PyDict_GET_SIZE(dict), sizeof *out->items);
        failed = out->items == NULL;
        while (!failed && PyDict_Next(dict, &at, &key, &value)) {
            out->items[out->count] = (mlspy_item){
                .key = Py_NewRef(key), .value = Py_NewRef(value), .position = out->count};
            out->count++;
        }
    MLSPY_END_LOCKED()
    if (failed) {
        return mlspy_no_memory();
    }
    return 0;
}

/* Later changes of the dict do not matter. */
int mlspy_items_of(PyObject *dict, const char *label, mlspy_items *out)
{
    *out = (mlspy_items){0};
    if (mlspy_take_dict(dict, label) < 0 || take_all(dict, out) < 0) {
        return -1;
    }
    /* after all entries are taken, because encoding a name allocates and may run the
     * garbage collector */
    for (size_t i = 0; i < out->count; i++) {
        mlspy_item *item = &out->items[i];
        if (PyUnicode_CheckExact(item->key) && PyUnicode_IS_COMPACT_ASCII(item->key)) {
            item->name.data = (const char *)PyUnicode_1BYTE_DATA(item->key);
            item->name.length = (size_t)PyUnicode_GET_LENGTH(item->key);
        } else if (mlspy_take_text(item->key, "tensor name", &item->name) < 0) {
            mlspy_items_release(out);
            return -1;
        }
    }
    return 0;
}

/* Keeps key and value, so that metadata can be filled in again. */
void mlspy_item_forget(mlspy_item *item)
{
    Py_CLEAR(item->dtype_text);
    Py_CLEAR(item->part);
    mls_free(item->owned_shape);
    item->owned_shape = NULL;
}

/* Needs the GIL: arrays may be deallocated. */
void mlspy_items_release(mlspy_items *items)
{
    for (size_t i = 0; i < items->count; i++) {
        Py_XDECREF(items->items[i].key);
        Py_XDECREF(items->items[i].value);
        mlspy_item_forget(&items->items[i]);
    }
    mls_free(items->items);
    *items = (mlspy_items){0};
}

/* Returns a strong reference, because a borrowed one may be freed in a free-threaded
 * Python. */
int mlspy_dict_get(PyObject *dict, PyObject *key, PyObject **out)
{
#if PY_VERSION_HEX >= 0x030D0000
    return PyDict_GetItemRef(dict, key, out);
#else
    PyObject *value = PyDict_GetItemWithError(dict, key); /* borrowed */
    *out = Py_XNewRef(value);
    return value != NULL ? 1 : PyErr_Occurred() ? -1 : 0;
#endif
}

int mlspy_dict_need(PyObject *dict, PyObject *key, PyObject **out)
{
    const int is_present = mlspy_dict_get(dict, key, out);
    if (is_present == 0) {
        PyErr_SetObject(PyExc_KeyError, key);
    }
    return is_present == 1 ? 0 : -1;
}

#if !defined(Py_GIL_DISABLED)
/* Return whether two keys are equal strs. Keys of other types count as different; the
 * caller looks them up. */
static bool same_key(PyObject *a, PyObject *b)
{
    return a == b || (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) &&
                      PyUnicode_GET_LENGTH(a) == PyUnicode_GET_LENGTH(b) &&
                      PyUnicode_Compare(a, b) == 0);
}
#endif

/* Return whether the next entry of the finder's dict has the key; if so, `*out` is a new
 * reference to its value. After the first mismatch always returns false, and the caller
 * looks up all keys by hash; so does a free-threaded Python, whose dicts may change
 * during PyDict_Next. */
static bool next_is(mlspy_finder *finder, PyObject *key, PyObject **out)
{
#if defined(Py_GIL_DISABLED)
    (void)finder, (void)key, (void)out;
    return false;
#else
    PyObject *next, *value;
    if (!finder->in_step || !PyDict_Next(finder->dict, &finder->at, &next, &value) ||
        !same_key(next, key)) {
        finder->in_step = false;
        return false;
    }
    *out = Py_NewRef(value);
    return true;
#endif
}

/* Equal state dicts usually have equal order, so most names are found without a hash. */
int mlspy_find(mlspy_finder *finder, PyObject *key, PyObject **out)
{
    return next_is(finder, key, out) ? 1 : mlspy_dict_get(finder->dict, key, out);
}

/* ---- shapes and dtypes ---- */

/* Set the name of an item's dtype: the core's name, or the text of `dtype` without
 * "torch.", which the item keeps in `dtype_text`. Returns -1 with an exception set. */
static int take_dtype_text(PyObject *dtype, mlspy_item *item)
{
    mls_dtype dtype_id;
    if (PyArray_DescrCheck(dtype) &&
        mlspy_dtype_of_descr((PyArray_Descr *)dtype, &dtype_id)) {
        item->meta.dtype = mls_dtype_of(dtype_id)->name;
        return 0;
    }
    PyObject *text = PyObject_Str(dtype);
    const char *name = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    if (name == NULL) {
        Py_XDECREF(text);
        return -1;
    }
    /* torch.float32 is called float32 in NumPy and in the core */
    const size_t skipped = strncmp(name, "torch.", 6) == 0 ? 6 : 0;
    item->dtype_text = text;
    item->meta.dtype = name + skipped;
    return 0;
}

/* Make room in the item for a shape of `rank` dimensions, and return it; the caller fills
 * it. Returns NULL with MemoryError set. */
static size_t *make_shape(mlspy_item *item, int rank)
{
    size_t *sizes = item->short_shape;
    if (rank > MLSPY_FEW_AXES) {
        sizes = item->owned_shape = mls_alloc((size_t)rank, sizeof *sizes);
    }
    if (sizes == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    item->meta.shape = sizes;
    item->meta.rank = rank;
    return sizes;
}

/* Fill in the metadata of an item whose value is an ndarray. Copies the shape, because
 * NumPy frees it if other code assigns to the array's .shape: another item's code or
 * another thread. Returns -1 with an exception set. */
static int fill_meta_of_ndarray(mlspy_item *item)
{
    PyArrayObject *array = (PyArrayObject *)item->value;
    mls_dtype dtype;
    const int rank = PyArray_NDIM(array);
    size_t *sizes = make_shape(item, rank);
    if (sizes == NULL) {
        return -1;
    }
    for (int axis = 0; axis < rank; axis++) {
        sizes[axis] = (size_t)PyArray_DIM(array, axis);
    }
    if (mlspy_dtype_of_descr(PyArray_DESCR(array), &dtype)) {
        item->meta.dtype = mls_dtype_of(dtype)->name;
        return 0;
    }
    /* names of dtypes exclude the byte order */
    PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(array), NPY_NATIVE);
    const int failed = native == NULL ? -1 : take_dtype_text((PyObject *)native, item);
    Py_XDECREF(native);
    return failed;
}

/* Convert a dimension, an object of any integer type, to `*out`. Returns false with an
 * exception set: OverflowError if it is negative or too large. */
static bool take_size(PyObject *object, size_t *out)
{
    PyObject *number = PyNumber_Index(object);
    const Py_ssize_t size = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    if (size < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_OverflowError, "negative");
        }
        return false;
    }
    *out = (size_t)size;
    return true;
}

/* Set the shape of an item from any object's tuple, which may be too long or contain
 * other objects. Returns false, with an exception or (too long) without one. */
static bool take_sizes(PyObject *tuple, mlspy_item *item)
{
    const Py_ssize_t rank = PyTuple_GET_SIZE(tuple);
    size_t *sizes = rank > MLS_MAX_RANK ? NULL : make_shape(item, (int)rank);
    bool good = sizes != NULL;
    for (Py_ssize_t i = 0; good && i < rank; i++) {
        good = take_size(PyTuple_GET_ITEM(tuple, i), &sizes[i]);
    }
    return good;
}

/* Set the shape of an item from the attribute `shape` of its array. Returns -1 with an
 * exception set: CompatibilityError if that is not a shape. */
static int take_shape(const mlspy_state *state, PyObject *shape, mlspy_item *item)
{
    mls_status st;
    PyObject *tuple = PySequence_Tuple(shape);
    const bool good = tuple != NULL && take_sizes(tuple, item);
    Py_XDECREF(tuple);
    if (good) {
        return 0;
    }
    /* keep other exceptions of the object */
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError) ||
        PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        mls_fail(&st, MLS_E_SHAPE,
                 "'%.140s': its shape is not a tuple of at most %d sizes",
                 item->name.data, (int)MLS_MAX_RANK);
        mls_status_name(&st, item->name.data, item->name.length);
        mlspy_raise(state, &st, NULL);
    }
    return -1;
}

/* Set the part of an item whose array may be a part of a tensor. Returns -1 with an
 * exception set. */
static int take_part(const mlspy_state *state, mlspy_item *item)
{
    if (!mlspy_is_part(state, item->value)) {
        return 0;
    }
    PyObject *part = PyObject_GetAttr(item->value, state->names[MLSPY_NAME_PART]);
    if (part == Py_None) {
        Py_CLEAR(part);
        return 0;
    }
    item->part = part;
    item->meta.part = part == NULL ? NULL : PyUnicode_AsUTF8(part);
    return item->meta.part == NULL ? -1 : 0;
}

/* Fill in the metadata of an item from the attributes `shape` and `dtype` of its array,
 * regardless of the memory: a tensor on a device, or on torch's meta device, has them
 * too. Returns -1 with an exception set. */
static int fill_meta_of_attributes(const mlspy_state *state, PyObject *shape,
                                   PyObject *dtype, mlspy_item *item)
{
    return take_shape(state, shape, item) < 0 || take_dtype_text(dtype, item) < 0 ||
                   take_part(state, item) < 0
               ? -1
               : 0;
}

/* Fill in the metadata of an item whose array lacks the attribute `shape` or `dtype`,
 * from a view of its memory. Returns -1 with an exception set. */
static int fill_meta_of_view(const mlspy_state *state, mlspy_item *item)
{
    char label[MLS_NAME_BYTES];
    PyOS_snprintf(label, sizeof label, "'%.140s'", item->name.data);
    mlspy_view view;
    if (mlspy_view_of(state, item->value, label, &view) < 0) {
        return -1;
    }
    /* the view is released, so its shape is copied */
    size_t *sizes = make_shape(item, view.tensor.rank);
    if (sizes != NULL) {
        memcpy(sizes, view.tensor.shape, (size_t)view.tensor.rank * sizeof *sizes);
        item->meta.dtype = mls_dtype_of(view.tensor.dtype)->name;
    }
    mlspy_view_release(&view);
    return sizes == NULL ? -1 : 0;
}

/* Called for arrays to be compared only, since a property may be slow. */
int mlspy_item_fill_meta(const mlspy_state *state, mlspy_item *item)
{
    /* the fast path first: nearly all arrays are NumPy's */
    if (PyArray_Check(item->value)) {
        return fill_meta_of_ndarray(item);
    }
    /* both may be properties that run Python code, so references are held meanwhile */
    PyObject *shape = PyObject_GetAttr(item->value, state->names[MLSPY_NAME_SHAPE]);
    PyObject *dtype = shape == NULL
                          ? NULL
                          : PyObject_GetAttr(item->value, state->names[MLSPY_NAME_DTYPE]);
    int failed = -1;
    if (dtype != NULL) {
        failed = fill_meta_of_attributes(state, shape, dtype, item);
    } else if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        failed = fill_meta_of_view(state, item);
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return failed;
}

/* Stops at the first failure; mlspy_items_release frees the metadata. */
int mlspy_items_fill_meta(const mlspy_state *state, mlspy_items *items)
{
    for (size_t i = 0; i < items->count; i++) {
        if (mlspy_item_fill_meta(state, &items->items[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Read the attribute `nbytes` of an array into `*out`. Returns 1, or 0 without an
 * exception if it is missing or not a size, or -1 with any other exception set. */
static int read_nbytes(PyObject *array, uint64_t *out)
{
    PyObject *nbytes = PyObject_GetAttrString(array, "nbytes");
    PyObject *number = nbytes == NULL ? NULL : PyNumber_Index(nbytes);
    const unsigned long long bytes =
        number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(number);
    Py_XDECREF(nbytes);
    if (!PyErr_Occurred()) {
        *out = bytes;
        return 1;
    }
    if (!PyErr_ExceptionMatches(nbytes == NULL ? PyExc_AttributeError
                                               : PyExc_TypeError) &&
        !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* The attribute `nbytes` is trusted; arrays without it are viewed. */
int mlspy_array_bytes(const mlspy_state *state, PyObject *array, uint64_t *out)
{
    if (PyArray_Check(array)) {
        *out = (uint64_t)PyArray_NBYTES((PyArrayObject *)array);
        return 0;
    }
    const int has_nbytes = read_nbytes(array, out);
    if (has_nbytes != 0) {
        return has_nbytes < 0 ? -1 : 0;
    }
    mlspy_view view;
    if (mlspy_view_of(state, array, "tensor", &view) < 0) {
        return -1;
    }
    *out = mlspy_bytes(&view.tensor);
    mlspy_view_release(&view);
    return 0;
}
