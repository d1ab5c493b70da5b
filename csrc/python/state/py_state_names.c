/* py_state_names: layers of a state dict and their names; rename, also names that collide
 * or get empty parts.
 *
 * The public functions are in mlstate/state.
 *
 * A layer is a start of dotted names: "blocks.0" is the layer of "blocks.0.w" and
 * "blocks.0.b", and has them as "w" and "b".
 *
 * The name tree is built once and cached by the state dict. Arrays are always looked up
 * again, so an outdated index may miss a name but never returns a wrong array.
 */
#include "arguments/args.h"
#include "arguments/results.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/module_state.h"
#include "dictionaries/dict_items.h"
#include "state/states.h"

#include "base/memory.h"
#include "state/name_tree.h"
#include "state/rename_rules.h"

/* ---- the index ----
 *
 * A capsule, because both the state dict and a running call may hold it. It is read-only
 * after construction: threads share it, and a change of the dict creates a new one.
 */

/* The names of a state dict at one moment, as a tree. */
typedef struct name_index {
    PyObject *keys; /* a tuple of str, in the dict's order */
    mls_str *texts; /* UTF-8 of the keys, borrowed from them */
    mls_name_tree *names;
} name_index;

static const char index_name[] = "mlstate.names";

/* Frees an index; accepts one that make_index left incomplete. */
static void free_index(name_index *index)
{
    mls_name_tree_free(index->names);
    mls_free(index->texts);
    Py_XDECREF(index->keys);
    mls_free(index);
}

/* Capsule destructor. The keys are plain str, so it runs no foreign code. */
static void free_capsule(PyObject *capsule)
{
    free_index(PyCapsule_GetPointer(capsule, index_name));
}

/* Fills an index from the items of a dict. Returns -1 with an exception set; the caller
 * then frees the index. */
static int fill_index(name_index *index, const mlspy_items *items)
{
    mls_status st;
    /* the tuple keeps the str alive, and thus the texts that the tree borrows */
    index->texts = mls_alloc(items->count, sizeof *index->texts);
    index->keys = PyTuple_New((Py_ssize_t)items->count);
    if (index->texts == NULL || index->keys == NULL) {
        return mlspy_no_memory();
    }
    for (size_t i = 0; i < items->count; i++) {
        /* plain str only: a subclass instance may refer to the dict, and the garbage
         * collector does not look into capsules */
        PyObject *key = PyUnicode_FromObject(items->items[i].key);
        if (key == NULL) {
            return -1;
        }
        PyTuple_SET_ITEM(index->keys, (Py_ssize_t)i, key);
        if (mlspy_take_text(key, "tensor name", &index->texts[i]) < 0) {
            return -1;
        }
    }
    /* the names of a dict are unique, so only memory can be short */
    if (mls_name_tree_new(index->texts, items->count, &index->names, &st) != MLS_OK) {
        return MLSPY_REFUSE(st.code == MLS_E_MEMORY ? PyExc_MemoryError
                                                    : PyExc_ValueError,
                            "%s", st.text);
    }
    return 0;
}

/* Returns a new capsule with the index of the current names of `dict`; NULL with an
 * exception set. The index holds no arrays: a cached one must not keep deleted arrays
 * alive. */
static PyObject *make_index(PyObject *dict)
{
    mlspy_items items;
    if (mlspy_items_of(dict, "state", &items) < 0) {
        return NULL;
    }
    PyObject *capsule = NULL;
    name_index *index = mls_alloc(1, sizeof *index);
    if (index == NULL) {
        PyErr_NoMemory();
    } else if (fill_index(index, &items) == 0) {
        capsule = PyCapsule_New(index, index_name, free_capsule);
    }
    if (capsule == NULL && index != NULL) {
        free_index(index);
    }
    mlspy_items_release(&items);
    return capsule;
}

/* Returns the index in a capsule (borrowed). */
static const name_index *index_in(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, index_name);
}

/* ---- layers ---- */

/* Parses the name of a layer, a str that is not empty and has no trailing dot; the text
 * is borrowed from it. Returns -1 with TypeError or ValueError set. */
static int take_layer_name(PyObject *object, mls_str *out)
{
    if (mlspy_take_text(object, "layer name", out) < 0) {
        return -1;
    }
    if (out->length == 0) {
        return MLSPY_REFUSE(
            PyExc_ValueError,
            "the layer name is empty: the whole state is the state itself");
    }
    if (out->data[out->length - 1] == '.') {
        return MLSPY_REFUSE(PyExc_ValueError,
                            "layer name %.200R ends with a dot: remove the dot", object);
    }
    return 0;
}

/* Adds the array of `key` in `dict` to the dict `layer`, under the name without its first
 * `skipped` characters. Returns 0, 1 if `dict` does not have the name any more, or -1
 * with an exception set. */
static int add_part(PyObject *layer, PyObject *dict, PyObject *key, Py_ssize_t skipped)
{
    PyObject *array;
    const int is_present = mlspy_dict_get(dict, key, &array);
    if (is_present <= 0) {
        return is_present < 0 ? -1 : 1;
    }
    PyObject *part = PyUnicode_Substring(key, skipped, PyUnicode_GET_LENGTH(key));
    PyObject *name = part == NULL ? NULL : mlspy_check_entry(part, array);
    const int failed = name == NULL ? -1 : PyDict_SetItem(layer, name, array);
    Py_XDECREF(name);
    Py_XDECREF(part);
    Py_DECREF(array);
    return failed;
}

/* Fills the empty dict `layer` with the tensors of `dict` below the layer `name`, as
 * `index` lists them. Returns 0, 1 if the index is outdated (`layer` is then partly
 * filled, and the caller starts again), or -1 with an exception set. */
static int fill_layer(PyObject *layer, PyObject *dict, PyObject *name,
                      const name_index *index)
{
    mls_str path;
    if (take_layer_name(name, &path) < 0) {
        return -1;
    }
    const uint32_t node = mls_name_tree_find(index->names, path);
    /* by specification, an unknown layer is a layer without tensors */
    if (node == MLS_NAME_NONE) {
        return 0;
    }
    uint32_t *positions =
        mls_alloc(mls_name_tree_nodes(index->names)[node].count, sizeof *positions);
    if (positions == NULL) {
        return mlspy_no_memory();
    }
    const size_t count = mls_name_tree_under(index->names, node, positions);
    /* in characters, not bytes: the layer's name and its dot */
    const Py_ssize_t skipped = PyUnicode_GET_LENGTH(name) + 1;
    int result = 0;
    for (size_t i = 0; result == 0 && i < count; i++) {
        PyObject *key = PyTuple_GET_ITEM(index->keys, (Py_ssize_t)positions[i]);
        result = add_part(layer, dict, key, skipped);
    }
    mls_free(positions);
    return result;
}

/* Returns a new, empty instance of a subclass of dict; NULL with TypeError or another
 * exception set. __init__ does not run, because it may require unknown arguments. */
static PyObject *new_empty(PyObject *class)
{
    if (!PyType_Check(class) || !PyType_IsSubtype((PyTypeObject *)class, &PyDict_Type)) {
        return PyErr_Format(PyExc_TypeError, "state_layer wants a class of dicts");
    }
    PyObject *no_arguments = PyTuple_New(0);
    PyTypeObject *type = (PyTypeObject *)class;
    PyObject *instance =
        no_arguments == NULL ? NULL : type->tp_new(type, no_arguments, NULL);
    Py_XDECREF(no_arguments);
    return instance;
}

/* state_layer(state, name, cls) -> the tensors below layer `name`, without its name, in a
 * new instance of the class `cls`
 *
 * An unknown layer is empty. Tries at most twice: if a name disappears again, another
 * thread keeps changing the dict, and no consistent result is possible (RuntimeError).
 */
PyObject *core_state_layer(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    /* the index may be old; the arrays are current */
    PyObject *capsule = mlspy_describe_names(args[0], make_index);
    PyObject *layer = capsule == NULL ? NULL : new_empty(args[2]);
    int result =
        layer == NULL ? -1 : fill_layer(layer, args[0], args[1], index_in(capsule));
    if (result == 1) { /* dict's own methods bypassed the cache: read the names again */
        Py_DECREF(capsule);
        PyDict_Clear(layer);
        capsule = make_index(args[0]);
        result =
            capsule == NULL ? -1 : fill_layer(layer, args[0], args[1], index_in(capsule));
    }
    Py_XDECREF(capsule);
    if (result != 0) {
        if (result == 1) {
            PyErr_SetString(PyExc_RuntimeError, "another thread keeps changing the state "
                                                "dict");
        }
        Py_CLEAR(layer);
    }
    return layer;
}

/* Returns whether a path can name a layer: the node "a." of "a..b" cannot. */
static bool is_layer_name(mls_str path)
{
    return path.length > 0 && path.data[path.length - 1] != '.';
}

/* Returns a new list of the paths of `count` nodes, whose positions in `nodes` are in
 * `layers`, without those that is_layer_name refuses. */
static PyObject *paths_list(const mls_name_node *nodes, const uint32_t *layers,
                            size_t count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        if (!is_layer_name(nodes[layers[i]].path)) {
            continue;
        }
        mlspy_append(&list, mlspy_str_of(nodes[layers[i]].path));
    }
    return list;
}

/* Sets `*out` to the number of dotted parts of a layer's name, at least 1; None becomes
 * 0. Returns -1 with an exception set. */
static int take_depth(const mlspy_state *state, PyObject *object, uint32_t *out)
{
    int64_t depth = 0;
    if (object != Py_None && mlspy_take_int64(state, object, "depth", &depth) < 0) {
        return -1;
    }
    if (object != Py_None && depth < 1) {
        return MLSPY_REFUSE(PyExc_ValueError,
                            "depth is the number of parts, at least 1; got %lld",
                            (long long)depth);
    }
    /* no name has that many segments */
    *out = depth > UINT32_MAX ? UINT32_MAX : (uint32_t)depth;
    return 0;
}

/* state_layer_names(state, depth | None) -> the names of the layers, in the state's order
 *
 * With a depth, the layers whose names have that many dotted parts and that have tensors
 * below them; with None, the layers that directly contain a tensor.
 */
PyObject *core_state_layer_names(mlspy_state *state, PyObject *const *args)
{
    uint32_t depth, *layers = NULL;
    size_t layer_count;
    mls_status st;
    if (take_depth(state, args[1], &depth) < 0) {
        return NULL;
    }
    PyObject *capsule = mlspy_describe_names(args[0], make_index);
    if (capsule == NULL) {
        return NULL;
    }
    const mls_name_tree *names = index_in(capsule)->names;
    PyObject *result = NULL;
    if (mls_name_tree_layers(names, depth, &layers, &layer_count, &st) == MLS_OK) {
        result = paths_list(mls_name_tree_nodes(names), layers, layer_count);
        mls_free(layers);
    } else {
        mlspy_raise(state, &st, NULL);
    }
    Py_DECREF(capsule);
    return result;
}

/* state_prefixed(layer name, state) -> a dict with the layer's name and a dot before each
 * name of `state`
 *
 * Names stay distinct, because all get the same prefix. The caller adds the dict to a
 * state, which checks the values then.
 */
PyObject *core_state_prefixed(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    mls_str path;
    mlspy_items items;
    if (take_layer_name(args[0], &path) < 0 ||
        mlspy_items_of(args[1], "layer state", &items) < 0) {
        return NULL;
    }
    PyObject *result = PyDict_New();
    for (size_t i = 0; result != NULL && i < items.count; i++) {
        mlspy_set(&result, PyUnicode_FromFormat("%U.%U", args[0], items.items[i].key),
                  Py_NewRef(items.items[i].value));
    }
    mlspy_items_release(&items);
    return result;
}

/* ---- renaming ---- */

/* Parses a pair (old, new) of str: replace the dotted parts `old` at the start of a name,
 * or with a star before it, at any dot. The rule borrows both texts, which the caller's
 * tuple keeps. Returns -1 with TypeError or ValueError set. */
static int take_rule(PyObject *pair, mls_rename_rule *out)
{
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        return MLSPY_REFUSE(PyExc_TypeError, "rules must be pairs of old and new");
    }
    mls_str old, new;
    if (mlspy_take_text(PyTuple_GET_ITEM(pair, 0), "the old part of a rule", &old) < 0 ||
        mlspy_take_text(PyTuple_GET_ITEM(pair, 1), "the new part of a rule", &new) < 0) {
        return -1;
    }
    if (!mls_rename_rule_of(old, new, out)) {
        return MLSPY_REFUSE(PyExc_ValueError, "rule '*' contains no name to match");
    }
    return 0;
}

/* A buffer that grows to the longest name, so that most names need no allocation. */
typedef struct name_buffer {
    char *data;
    size_t room;
} name_buffer;

static bool ends_with_dot(mls_str text)
{
    return text.length > 0 && text.data[text.length - 1] == '.';
}

/* Raises ValueError because the rules made `new_name`, with an empty part such as in
 * "layers..w", of `old_name`. Shows the rule that was probably meant: one without a dot
 * after `old`, but with one after `new`. Names that had an empty part before may keep
 * it. */
static void raise_empty_part(PyObject *old_name, PyObject *new_name,
                             const mls_rename_rule *rules, size_t rule_count)
{
    PyObject *hint = NULL;
    for (size_t i = 0; hint == NULL && i < rule_count && !PyErr_Occurred(); i++) {
        const mls_str old = rules[i].old, new = rules[i].new;
        if (old.length > 0 && !ends_with_dot(old) && ends_with_dot(new)) {
            PyObject *old_text = mlspy_str_of(old), *new_text = mlspy_str_of(new);
            if (old_text != NULL && new_text != NULL) {
                hint = PyUnicode_FromFormat("; did you mean {'%s%.80U.': %.80R}?",
                                            rules[i].anywhere ? "*" : "", old_text,
                                            new_text);
            }
            Py_XDECREF(old_text);
            Py_XDECREF(new_text);
        }
    }
    if (hint == NULL && !PyErr_Occurred()) {
        hint = PyUnicode_FromString("");
    }
    if (hint != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "the rules make %.200R of the name %.200R, with an empty part%U",
                     new_name, old_name, hint);
        Py_DECREF(hint);
    }
}

/* Returns a new reference to the new name of `item`; NULL with an exception set. Sets
 * used[i] for each rule `i` that matched. `buffer` grows to the longest name, and is kept
 * for the next call. An empty name may stay empty; a name that becomes empty is an error,
 * because no rule can intend that. */
static PyObject *rename_item(const mlspy_item *item, const mls_rename_rule *rules,
                             size_t rule_count, bool *used, name_buffer *buffer)
{
    /* most names fit the buffer of the previous one */
    size_t length =
        mls_name_apply(item->name, rules, rule_count, buffer->data, buffer->room, used);
    if (length > buffer->room) {
        char *larger = mls_realloc(buffer->data, length, 1);
        if (larger == NULL) {
            return PyErr_NoMemory();
        }
        /* the old block is already freed */
        *buffer = (name_buffer){.data = larger, .room = length};
        length = mls_name_apply(item->name, rules, rule_count, larger, length, used);
    }
    if (length == 0 && item->name.length > 0) {
        return PyErr_Format(PyExc_ValueError, "the rules remove all of the name %.200R",
                            item->key);
    }
    const mls_str new_name = {.data = buffer->data, .length = length};
    PyObject *result = mlspy_str_of(new_name);
    if (result != NULL && mls_name_has_empty_part(new_name) &&
        !mls_name_has_empty_part(item->name)) {
        raise_empty_part(item->key, result, rules, rule_count);
        Py_CLEAR(result);
    }
    return result;
}

/* Raises CompatibilityError because the names `first` and `second` would both become
 * `name`. The error's attribute is the new name, as in errors about one tensor. */
static void raise_collapse(const mlspy_state *state, PyObject *first, PyObject *second,
                           PyObject *name)
{
    mlspy_raise_named(
        state->errors[MLSPY_ERROR_COMPATIBILITY],
        PyUnicode_FromFormat(
            "%.200R and %.200R would both become %.200R: nothing was renamed", first,
            second, name),
        name);
}

/* Stores every array under its new name in the empty dict `result`, and sets used[i] for
 * each rule `i` that matched a name. Returns -1 with an exception set: CompatibilityError
 * if two names become equal; the caller then drops `result`. */
static int rename_all(const mlspy_state *state, const mlspy_items *items,
                      const mls_rename_rule *rules, size_t rule_count, bool *used,
                      PyObject *result)
{
    /* `origin` maps new names to old ones, to find names that become equal */
    name_buffer buffer = {0};
    PyObject *origin = PyDict_New();
    int failed = origin == NULL ? -1 : 0;
    for (size_t i = 0; failed == 0 && i < items->count; i++) {
        const mlspy_item *item = &items->items[i];
        PyObject *name = rename_item(item, rules, rule_count, used, &buffer);
        PyObject *earlier = name == NULL ? NULL : PyDict_GetItemWithError(origin, name);
        if (earlier != NULL) {
            raise_collapse(state, earlier, item->key, name);
        }
        failed = name == NULL || PyErr_Occurred() ||
                         PyDict_SetItem(origin, name, item->key) < 0 ||
                         PyDict_SetItem(result, name, item->value) < 0
                     ? -1
                     : 0;
        Py_XDECREF(name);
    }
    Py_XDECREF(origin);
    mls_free(buffer.data);
    return failed;
}

/* Returns a new list of the indices of the rules whose entry of `used` is false. */
static PyObject *unused_rules(const bool *used, size_t rule_count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < rule_count; i++) {
        if (!used[i]) {
            mlspy_append(&list, PyLong_FromSize_t(i));
        }
    }
    return list;
}

/* state_rename(state, ((old, new), ...)) -> (a dict with the new names, the indices of
 * the rules that matched no name)
 *
 * Raises ValueError if a name becomes empty or gets an empty part, and CompatibilityError
 * if two names become equal.
 */
PyObject *core_state_rename(mlspy_state *state, PyObject *const *args)
{
    if (!PyTuple_Check(args[1])) {
        return PyErr_Format(PyExc_TypeError, "state_rename wants a tuple of pairs");
    }
    const size_t rule_count = (size_t)PyTuple_GET_SIZE(args[1]);
    mlspy_items items = {0};
    PyObject *result = NULL, *unused = NULL;
    mls_rename_rule *rules = mls_alloc(rule_count, sizeof *rules);
    bool *used = mls_alloc(rule_count, sizeof *used);
    if (rules == NULL || used == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (size_t i = 0; i < rule_count; i++) {
        used[i] = false;
        if (take_rule(PyTuple_GET_ITEM(args[1], (Py_ssize_t)i), &rules[i]) < 0) {
            goto done;
        }
    }
    if (mlspy_items_of(args[0], "state", &items) < 0) {
        goto done;
    }
    result = PyDict_New();
    if (result != NULL &&
        rename_all(state, &items, rules, rule_count, used, result) == 0) {
        unused = unused_rules(used, rule_count);
    }
done:
    mlspy_items_release(&items);
    mls_free(used);
    mls_free(rules);
    if (unused == NULL) {
        Py_XDECREF(result);
        return NULL;
    }
    return Py_BuildValue("(NN)", result, unused);
}
