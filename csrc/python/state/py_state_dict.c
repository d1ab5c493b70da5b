/* py_state_dict: StateDict: lookups, assignments, update, |, copy, fromkeys, attributes
 * of subclasses, nbytes, ==.
 *
 * Arrays are stored as given, neither copied nor wrapped. dict's own methods would bypass
 * the check in `__setitem__`, so every method that adds entries is reimplemented: the
 * constructor, update, setdefault, |, |=, copy and fromkeys. Each first collects its
 * arguments in a temporary dict, checks that, and merges it in one step, so that an error
 * changes nothing. An explicit call of dict.__setitem__ on a state dict cannot be
 * prevented: C code that reads a state dict must check again.
 */
#include "arguments/results.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "dictionaries/dict_items.h"
#include "state/states.h"

#include <stdatomic.h>

/* The dict, and a cached description of its names. `changes` counts operations that may
 * have changed the names. A description made at count n is valid while the count is n and
 * the length is unchanged; the length detects pop, popitem and clear of dict itself. */
typedef struct statedict_object {
    PyDictObject dict;
    PyObject *description;    /* strong, or NULL */
    uint64_t described;       /* `changes` when the description was made */
    Py_ssize_t described_len; /* the length at that time */
    _Atomic uint64_t changes;
} statedict_object;

/* Raises TensorNotFoundError, with the same text for every kind of lookup. If anything
 * fails here, that exception is set instead. */
static void raise_missing(PyObject *self, PyObject *key)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    PyObject *name = state == NULL ? NULL : PyObject_Str(key);
    if (name != NULL) {
        mlspy_raise_named(
            state->errors[MLSPY_ERROR_NOT_FOUND],
            PyUnicode_FromFormat("Tensor '%U' not found in state dict", name), name);
    }
    Py_XDECREF(name);
}

/* Returns whether an object is a StateDict or an instance of a subclass. */
static bool is_statedict(PyObject *object)
{
    if (!PyDict_Check(object) || PyDict_CheckExact(object)) {
        return false;
    }
    const bool is_state = mlspy_state_of_type(Py_TYPE(object)) != NULL;
    PyErr_Clear();
    return is_state;
}

/* ---- the cached description ---- */

/* Records that the names may have changed. Must be called after the change, so that a
 * description made before has an older count. */
static void record_change(PyObject *self)
{
    statedict_object *state = (statedict_object *)self;
#if defined(Py_GIL_DISABLED) /* a lower count would revive an old description */
    atomic_fetch_add_explicit(&state->changes, 1, memory_order_release);
#else
    const uint64_t count =
        atomic_load_explicit(&state->changes, memory_order_relaxed) + 1;
    atomic_store_explicit(&state->changes, count, memory_order_relaxed);
#endif
}

/* Like record_change, after entries were set; `before` is the number of entries before.
 * Assigning to existing names changes no names. With the GIL no other thread can
 * intervene, so the length shows whether names were added. */
static void record_entries(PyObject *self, Py_ssize_t before)
{
#if defined(Py_GIL_DISABLED)
    const bool changed = true;
    (void)before;
#else
    const bool changed = PyDict_GET_SIZE(self) != before;
#endif
    if (changed) {
        record_change(self);
    }
}

/* Returns a new reference to the description if it is still valid, or NULL without an
 * exception. Free-threaded builds need the lock, or the description could be freed before
 * the reference is taken. */
static PyObject *cached_description(statedict_object *state)
{
    PyObject *cached = NULL;
    MLSPY_BEGIN_LOCKED(state)
        if (state->description != NULL &&
            state->described_len == PyDict_GET_SIZE((PyObject *)state) &&
            state->described ==
                atomic_load_explicit(&state->changes, memory_order_relaxed)) {
            cached = Py_NewRef(state->description);
        }
    MLSPY_END_LOCKED()
    return cached;
}

/* Reads the count and the length before the names, so that a change in between
 * invalidates the new description. The replaced description is dropped outside the lock,
 * because destroying it may take time. */
PyObject *mlspy_describe_names(PyObject *dict, PyObject *(*make)(PyObject *dict))
{
    if (!is_statedict(dict)) {
        return make(dict);
    }
    statedict_object *state = (statedict_object *)dict;
    PyObject *cached = cached_description(state);
    if (cached != NULL) {
        return cached;
    }
    const uint64_t changes = atomic_load_explicit(&state->changes, memory_order_relaxed);
    const Py_ssize_t length = PyDict_GET_SIZE(dict);
    PyObject *description = make(dict);
    PyObject *old = NULL;
    if (description != NULL) {
        MLSPY_BEGIN_LOCKED(state)
            old = state->description;
            state->description = Py_NewRef(description);
            state->described = changes;
            state->described_len = length;
        MLSPY_END_LOCKED()
    }
    Py_XDECREF(old);
    return description;
}

/* ---- single entries ---- */

/* Returns the value of a name that `self` lacks: a subclass may define __missing__, as
 * with any dict. Otherwise raises TensorNotFoundError and returns NULL. */
static PyObject *missing_value(PyObject *self, PyObject *key)
{
    PyObject *method = PyObject_GetAttrString((PyObject *)Py_TYPE(self), "__missing__");
    if (method == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            raise_missing(self, key);
        }
        return NULL;
    }
    PyObject *value = PyObject_CallFunctionObjArgs(method, self, key, NULL);
    Py_DECREF(method);
    return value;
}

/* self[key]: returns the array, or what a subclass's __missing__ returns for a name that
 * `self` lacks; without that method, raises TensorNotFoundError */
static PyObject *statedict_subscript(PyObject *self, PyObject *key)
{
    PyObject *value;
    const int is_present = mlspy_dict_get(self, key, &value);
    if (is_present != 0) {
        return is_present < 0 ? NULL : value;
    }
    return missing_value(self, key);
}

/* Checks one entry and sets it. Returns -1 with an exception set: TypeError or ValueError
 * for an entry that a state dict refuses. Calls record_entries also on failure: a count
 * that is too high only costs a new description. */
static int set_entry(PyObject *self, PyObject *key, PyObject *value)
{
    PyObject *name = mlspy_check_entry(key, value);
    if (name == NULL) {
        return -1;
    }
    const Py_ssize_t before = PyDict_GET_SIZE(self);
    const int failed = PyDict_SetItem(self, name, value);
    record_entries(self, before);
    Py_DECREF(name);
    return failed;
}

/* self[key] = value, and del self[key] if `value` is NULL
 *
 * Deleting raises the same error as a lookup and does not call __missing__, like dict.
 */
static int statedict_assign(PyObject *self, PyObject *key, PyObject *value)
{
    if (value != NULL) {
        return set_entry(self, key, value);
    }
    const int failed = PyDict_DelItem(self, key);
    record_change(self);
    if (failed < 0) {
        if (PyErr_ExceptionMatches(PyExc_KeyError)) {
            PyErr_Clear();
            raise_missing(self, key);
        }
        return -1;
    }
    return 0;
}

/* setdefault(key, default): returns the array of `key`, and stores `default` there if the
 * name is missing
 *
 * Only a value that would be stored is checked: the missing default None is an error
 * unless the name exists.
 */
static PyObject *statedict_setdefault(PyObject *self, PyObject *const *args,
                                      Py_ssize_t count)
{
    if (count < 1 || count > 2) {
        return PyErr_Format(PyExc_TypeError,
                            "setdefault takes a name and an array, got %zd", count);
    }
    PyObject *value;
    const int is_present = mlspy_dict_get(self, args[0], &value);
    if (is_present != 0) {
        return is_present < 0 ? NULL : value;
    }
    PyObject *default_value = count == 2 ? args[1] : Py_None;
    PyObject *name = mlspy_check_entry(args[0], default_value);
    if (name == NULL) {
        return NULL;
    }
    /* looked up again, because another thread may have added it */
#if PY_VERSION_HEX >= 0x030D0000
    (void)PyDict_SetDefaultRef(self, name, default_value, &value);
#else
    value = Py_XNewRef(PyDict_SetDefault(self, name, default_value));
#endif
    record_change(self);
    Py_DECREF(name);
    return value;
}

/* ---- many entries ---- */

/* Returns the dict among the arguments (borrowed) if it is the only argument and has
 * dict's own iteration; otherwise NULL. */
static PyObject *only_dict(PyObject *args, PyObject *kwargs)
{
    PyObject *only = PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : NULL;
    const bool good = only != NULL && (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0) &&
                      PyDict_Check(only) && Py_TYPE(only)->tp_iter == PyDict_Type.tp_iter;
    return good ? only : NULL;
}

#if !defined(Py_GIL_DISABLED)
/* Returns whether every entry is an ASCII str and an ndarray of numbers, which needs no
 * further check. Runs no foreign code, so under the GIL the dict cannot change before the
 * merge. */
static bool all_exact_arrays(PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    /* most arrays share a few descriptors; each is checked once in a row */
    const PyArray_Descr *last_descr = NULL;
    while (PyDict_Next(dict, &at, &key, &value)) {
        const bool same = PyUnicode_CheckExact(key) && PyUnicode_IS_COMPACT_ASCII(key) &&
                          PyArray_CheckExact(value) && last_descr != NULL &&
                          PyArray_DESCR((PyArrayObject *)value) == last_descr;
        if (!same) {
            if (!mlspy_entry_needs_no_check(key, value)) {
                return false;
            }
            last_descr = PyArray_DESCR((PyArrayObject *)value);
        }
    }
    return true;
}
#endif

/* Returns a new reference to a private dict with the entries of dict(*args, **kwargs), or
 * to the given dict itself if no other code can change it before the merge; NULL with an
 * exception set. Sets `*checked` to whether all entries are known to be valid. */
static PyObject *stage_entries(PyObject *args, PyObject *kwargs, bool *checked)
{
    PyObject *only = only_dict(args, kwargs);
    *checked = false;
    if (only == NULL) {
        return PyObject_Call((PyObject *)&PyDict_Type, args, kwargs);
    }
#if !defined(Py_GIL_DISABLED)
    *checked = all_exact_arrays(only);
#endif
    return *checked ? Py_NewRef(only) : PyDict_Copy(only);
}

/* Replaces keys of str subclasses by exact str: returns a new dict with the entries of
 * `staged` in the same order, and consumes `staged`. NULL with an exception set. */
static PyObject *with_exact_names(PyObject *staged)
{
    PyObject *result = PyDict_New();
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (result != NULL && PyDict_Next(staged, &at, &key, &value)) {
        mlspy_set(&result, PyUnicode_FromObject(key), Py_NewRef(value));
    }
    Py_DECREF(staged);
    return result;
}

/* Checks all entries of a private dict, or passes NULL on. Consumes it, and returns the
 * dict to merge, whose names are exact str; NULL with an exception set. */
static PyObject *check_staged(PyObject *staged)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    bool is_exact = true;
    while (staged != NULL && PyDict_Next(staged, &at, &key, &value)) {
        PyObject *name = mlspy_check_entry(key, value);
        if (name == NULL) {
            Py_CLEAR(staged);
        } else {
            is_exact = is_exact && name == key;
            Py_DECREF(name);
        }
    }
    return staged == NULL || is_exact ? staged : with_exact_names(staged);
}

/* Undoes a failed merge into `self`, which had `old_count` entries: restores the entries
 * of `old` (may be NULL: no value was replaced), and removes all entries after the first
 * `old_count`. Allocates nothing, and keeps the exception that is set: an error here is
 * ignored. */
static void undo_merge(PyObject *self, PyObject *old, Py_ssize_t old_count)
{
    PyObject *type, *error, *trace;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    PyErr_Fetch(&type, &error, &trace);
    if (old != NULL && PyDict_Update(self, old) < 0) {
        PyErr_Clear();
    }
    for (Py_ssize_t i = 0; PyDict_Next(self, &at, &key, &value); i++) {
        if (i >= old_count) { /* deletion does not move other entries */
            Py_INCREF(key);
            if (PyDict_DelItem(self, key) < 0) {
                PyErr_Clear();
            }
            Py_DECREF(key);
        }
    }
    PyErr_Restore(type, error, trace);
}

/* Merges the few entries of `staged` into the many of `self`, all or none. Memory can run
 * out only for new names, so these are added first, while existing values are still
 * unchanged. Returns -1 with an exception set. */
static int merge_few(PyObject *self, PyObject *staged)
{
    const Py_ssize_t before = PyDict_GET_SIZE(self);
    if (PyDict_Merge(self, staged, 0) < 0) {
        undo_merge(self, NULL, before);
        return -1;
    }
    /* the update below only replaces values, so it cannot stop midway */
    const bool all_new = PyDict_GET_SIZE(self) == before + PyDict_GET_SIZE(staged);
    return all_new ? 0 : PyDict_Update(self, staged);
}

/* Merges the many entries of `staged` into `self`, all or none. Copying `self`, to undo a
 * failure, is then faster than looking all names up twice. Returns -1 with an exception
 * set. */
static int merge_many(PyObject *self, PyObject *staged)
{
    const Py_ssize_t before = PyDict_GET_SIZE(self);
    PyObject *old = before == 0 ? NULL : PyDict_Copy(self);
    if (before > 0 && old == NULL) {
        return -1;
    }
    const int failed = PyDict_Update(self, staged);
    if (failed < 0) {
        undo_merge(self, old, before);
    }
    Py_XDECREF(old);
    return failed;
}

/* Merges checked entries into `self`, all or none: dict's own merge stops midway if
 * memory runs out. Returns -1 with an exception set. */
static int merge_checked(PyObject *self, PyObject *staged)
{
    const Py_ssize_t added = PyDict_GET_SIZE(staged);
    if (added <= 1) {
        return PyDict_Update(self, staged);
    }
    /* PyDict_Copy would use a subclass's own iteration */
    const bool copies = Py_TYPE(self)->tp_iter == PyDict_Type.tp_iter;
    /* below a quarter, two lookups of each new name cost less than a copy of all */
    return !copies || added < PyDict_GET_SIZE(self) / 4 ? merge_few(self, staged)
                                                        : merge_many(self, staged);
}

/* Raises TypeError for a torch module or optimizer, with advice; returns -1, or 0 for any
 * other object. Some modules are iterable but do not hold pairs. */
static int refuse_torch_object(PyObject *object)
{
    if (PyDict_Check(object) || !PyObject_HasAttrString(object, "state_dict")) {
        return 0;
    }
    const char *remedy = PyObject_HasAttrString(object, "param_groups")
                             ? "OptimizerStateDict.from_torch(optimizer, module)"
                             : "StateDict.from_torch(module)";
    return MLSPY_REFUSE(PyExc_TypeError,
                        "'%.100s' object is not a mapping of arrays: use %s",
                        Py_TYPE(object)->tp_name, remedy);
}

/* Adds all entries of dict(*args, **kwargs) to `self`, or none. `name` is the called
 * function, for errors; `kwargs` may be NULL. Returns -1 with an exception set. */
static int merge_entries(PyObject *self, const char *name, PyObject *args,
                         PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) > 1) {
        return MLSPY_REFUSE(PyExc_TypeError, "%s expected at most 1 argument, got %zd",
                            name, PyTuple_GET_SIZE(args));
    }
    if (PyTuple_GET_SIZE(args) == 1 &&
        refuse_torch_object(PyTuple_GET_ITEM(args, 0)) < 0) {
        return -1;
    }
    bool checked;
    PyObject *staged = stage_entries(args, kwargs, &checked);
    if (!checked) {
        staged = check_staged(staged);
    }
    if (staged == NULL) {
        return -1;
    }
    const Py_ssize_t before = PyDict_GET_SIZE(self);
    const int failed = merge_checked(self, staged);
    record_entries(self, before);
    Py_DECREF(staged);
    return failed;
}

/* Adds all entries of one mapping or iterable of pairs to `self`, or none. Returns -1
 * with an exception set. */
static int merge_mapping(PyObject *self, PyObject *other)
{
    PyObject *args = PyTuple_Pack(1, other);
    const int failed = args == NULL ? -1 : merge_entries(self, "update", args, NULL);
    Py_XDECREF(args);
    return failed;
}

/* StateDict(mapping_or_pairs, **arrays) */
static int statedict_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return merge_entries(self, "StateDict", args, kwargs);
}

/* update(mapping_or_pairs, **arrays) */
static PyObject *statedict_update(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return merge_entries(self, "update", args, kwargs) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- copies ---- */

/* Copies the attributes of `self` that pickle would save to `copy`, by reference. Returns
 * -1 with an exception set. */
static int copy_attributes(PyObject *self, PyObject *copy)
{
    PyObject *state = PyObject_CallMethod(self, "__getstate__", NULL);
    if (state == NULL || state == Py_None) {
        Py_XDECREF(state);
        return state == NULL ? -1 : 0;
    }
    PyObject *done = PyObject_CallMethod(copy, "__setstate__", "(O)", state);
    Py_XDECREF(done);
    Py_DECREF(state);
    return done == NULL ? -1 : 0;
}

/* Sets every attribute of `self` that the dict `names` has; does nothing if it is not a
 * dict (None). Iterates over a copy, because setting attributes runs foreign code that
 * may change the dict. Returns -1 with an exception set. */
static int set_attributes(PyObject *self, PyObject *names)
{
    if (!PyDict_Check(names)) {
        return 0;
    }
    PyObject *name, *value;
    Py_ssize_t at = 0;
    PyObject *copy = PyDict_Copy(names);
    int failed = copy == NULL ? -1 : 0;
    while (failed == 0 && PyDict_Next(copy, &at, &name, &value)) {
        failed = PyObject_SetAttr(self, name, value);
    }
    Py_XDECREF(copy);
    return failed;
}

/* __setstate__(state): sets the attributes that __getstate__ returned, as a dict or as
 * (dict or None, dict of the slots by name)
 *
 * Entries are not part of it: pickle sets those one by one, with the check.
 */
static PyObject *statedict_setstate(PyObject *self, PyObject *state)
{
    const bool pair = PyTuple_Check(state) && PyTuple_GET_SIZE(state) == 2;
    if (set_attributes(self, pair ? PyTuple_GET_ITEM(state, 0) : state) < 0 ||
        (pair && set_attributes(self, PyTuple_GET_ITEM(state, 1)) < 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Returns a new, empty instance of the class of `self`, with the same attributes; NULL
 * with an exception set. __init__ does not run. */
static PyObject *empty_like(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject *no_arguments = PyTuple_New(0);
    PyObject *empty =
        no_arguments == NULL ? NULL : type->tp_new(type, no_arguments, NULL);
    Py_XDECREF(no_arguments);
    /* __new__ of a subclass may return any object, so its type is checked before
     * writing */
    if (empty != NULL && (!is_statedict(empty) || PyDict_GET_SIZE(empty) != 0)) {
        PyErr_Format(PyExc_TypeError,
                     "%.100s.__new__ must give an empty state dict, got %.100s",
                     type->tp_name, Py_TYPE(empty)->tp_name);
        Py_CLEAR(empty);
    }
    if (empty != NULL && copy_attributes(self, empty) < 0) {
        Py_CLEAR(empty);
    }
    return empty;
}

/* copy(), __copy__()
 *
 * Returns the same class with the same attributes and the same arrays.
 */
static PyObject *statedict_copy(PyObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *copy = empty_like(self);
    if (copy != NULL && merge_mapping(copy, self) < 0) {
        Py_CLEAR(copy);
    }
    return copy;
}

/* left | right, where either may be the state dict and the other any dict. The result has
 * the class of the leftmost state dict, and dict's order. */
static PyObject *statedict_or(PyObject *left, PyObject *right)
{
    if (!PyDict_Check(left) || !PyDict_Check(right)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    PyObject *result = empty_like(is_statedict(left) ? left : right);
    if (result != NULL &&
        (merge_mapping(result, left) < 0 || merge_mapping(result, right) < 0)) {
        Py_CLEAR(result);
    }
    return result;
}

/* self |= mapping_or_pairs */
static PyObject *statedict_ior(PyObject *self, PyObject *other)
{
    return merge_mapping(self, other) < 0 ? NULL : Py_NewRef(self);
}

/* fromkeys(names, array): one array under many names
 *
 * Builds a plain dict first, so that __init__ receives all entries at once.
 */
static PyObject *statedict_fromkeys(PyObject *class, PyObject *args)
{
    PyObject *dict_fromkeys =
        PyObject_GetAttrString((PyObject *)&PyDict_Type, "fromkeys");
    PyObject *staged =
        dict_fromkeys == NULL ? NULL : PyObject_CallObject(dict_fromkeys, args);
    PyObject *result = staged == NULL ? NULL : PyObject_CallOneArg(class, staged);
    Py_XDECREF(staged);
    Py_XDECREF(dict_fromkeys);
    return result;
}

/* ---- type ---- */

/* The property nbytes: the bytes of all arrays; an array under two names counts twice.
 * Raises CompatibilityError if the sum does not fit into 64 bits, because arrays may
 * report any size. */
static PyObject *statedict_nbytes(PyObject *self, void *unused)
{
    (void)unused;
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mlspy_items items;
    if (state == NULL || mlspy_items_of(self, "state dict", &items) < 0) {
        return NULL;
    }
    uint64_t sum = 0, bytes = 0;
    int failed = 0;
    for (size_t i = 0; failed == 0 && i < items.count; i++) {
        failed = mlspy_array_bytes(state, items.items[i].value, &bytes);
        if (failed == 0 && __builtin_add_overflow(sum, bytes, &sum)) {
            PyErr_SetString(state->errors[MLSPY_ERROR_COMPATIBILITY],
                            "the sizes of the arrays in bytes do not fit into 64 bits");
            failed = -1;
        }
    }
    mlspy_items_release(&items);
    return failed < 0 ? NULL : PyLong_FromUnsignedLongLong(sum);
}

/* self == other and self != other, for any dict: names, shapes, dtypes and elements
 * count, but not the order of entries */
static PyObject *statedict_compare(PyObject *self, PyObject *other, int op)
{
    if ((op != Py_EQ && op != Py_NE) || !PyDict_Check(other)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    const int same = state == NULL ? -1 : mlspy_states_equal(state, self, other);
    if (same < 0) {
        return NULL;
    }
    return PyBool_FromLong((same != 0) == (op == Py_EQ));
}

/* The description holds only texts, so it cannot be part of a cycle. */
static int statedict_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return PyDict_Type.tp_traverse(self, visit, arg);
}

/* dict's dealloc frees the memory but does not drop the reference to the heap type. */
static void statedict_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(((statedict_object *)self)->description);
    PyDict_Type.tp_dealloc(self);
    Py_DECREF(type);
}

static PyMethodDef statedict_methods[] = {
    {"update", (PyCFunction)(void (*)(void))statedict_update,
     METH_VARARGS | METH_KEYWORDS,
     "Add all entries of a mapping, of pairs, and of keywords; all or none."},
    {"setdefault", (PyCFunction)(void (*)(void))statedict_setdefault, METH_FASTCALL,
     "setdefault($self, name, array=None, /)\n--\n\nThe array under a name, put there if "
     "absent."},
    {"copy", statedict_copy, METH_NOARGS,
     "copy($self, /)\n--\n\nAnother one of the same class, with the same arrays."},
    {"__copy__", statedict_copy, METH_NOARGS, "__copy__($self, /)\n--\n\nAs copy()."},
    {"__setstate__", statedict_setstate, METH_O,
     "__setstate__($self, state, /)\n--\n\nSet attributes, as unpickling does."},
    {"fromkeys", statedict_fromkeys, METH_VARARGS | METH_CLASS,
     "One array under many names."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef statedict_getset[] = {
    {"nbytes", statedict_nbytes, NULL, "Bytes of all arrays.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot statedict_slots[] = {
    {Py_tp_doc, "A dict whose keys are names and whose values are arrays."},
    {Py_tp_init, statedict_init},
    {Py_tp_dealloc, statedict_dealloc},
    {Py_tp_traverse, statedict_traverse},
    {Py_tp_richcompare, statedict_compare},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {Py_tp_methods, statedict_methods},
    {Py_tp_getset, statedict_getset},
    {Py_mp_subscript, statedict_subscript},
    {Py_mp_ass_subscript, statedict_assign},
    {Py_nb_or, statedict_or},
    {Py_nb_inplace_or, statedict_ior},
    {0, NULL},
};

MLSPY_DEFINE_SPEC(statedict, "StateDict", statedict_object,
                  Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC);

/* Created from the module, so that every instance finds the module's state through its
 * type. */
int mlspy_statedict_add(PyObject *module)
{
    return mlspy_add_type(module, &statedict_spec, (PyObject *)&PyDict_Type, NULL);
}
