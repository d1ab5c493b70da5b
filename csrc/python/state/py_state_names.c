/* py_names: the layers of a state dict, its outline, and renaming.  The public names and
 * their docstrings are in mlstate/state/__init__.py; these take positional arguments only.
 *
 * The tree of names is made once and kept by the state dict; the arrays are always looked
 * up anew, so that an index which is out of date can miss a name but never give a wrong
 * array.
 */
#include "common/args.h"
#include "common/errors.h"
#include "common/dict_items.h"
#include "common/module_state.h"
#include "state/py_state_dict.h"
#include "state/state_bindings.h"

#include "base/memory.h"
#include "state/name_tree_preview.h"
#include "state/rename_rules.h"

/* ---- the index ----
 *
 * A capsule, since it must live as long as the state dict keeps it or a call uses it.
 * Once made it is only read: threads share it, and a change of the dict makes another.
 */

typedef struct name_index {
    PyObject *keys;  /* a tuple of str, in the dict's order */
    mls_text *texts; /* their UTF-8, which the str hold */
    mls_names *names;
} name_index;

static const char index_name[] = "mlstate.names";

/* Accepts an index that make_index left half done. */
static void free_index(name_index *index)
{
    mls_names_free(index->names);
    mls_free(index->texts);
    Py_XDECREF(index->keys);
    mls_free(index);
}

/* Nobody uses the index any more.  Its keys are plain str, so that its end runs no code
 * of others. */
static void index_end(PyObject *capsule)
{
    free_index(PyCapsule_GetPointer(capsule, index_name));
}

/* Fill an index from the items of a dict.  On failure what is there already stays in it,
 * for the caller to free. */
static int fill_index(name_index *index, const mlspy_items *items)
{
    mls_status st;
    /* the tuple keeps the str alive, and with them the texts that the tree borrows */
    index->texts = mls_alloc(items->count, sizeof *index->texts);
    index->keys = PyTuple_New((Py_ssize_t)items->count);
    if (index->texts == NULL || index->keys == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < items->count; i++) {
        /* a plain str leads nowhere, while one of a subclass may lead back to the dict,
         * and no collection looks into a capsule */
        PyObject *key = PyUnicode_FromObject(items->items[i].key);
        if (key == NULL) {
            return -1;
        }
        PyTuple_SET_ITEM(index->keys, (Py_ssize_t)i, key);
        if (mlspy_take_text(key, "tensor name", &index->texts[i]) < 0) {
            return -1;
        }
    }
    /* the names of a dict are all different, so only memory can be short */
    if (mls_names_new(index->texts, items->count, &index->names, &st) != MLS_OK) {
        PyErr_SetString(st.code == MLS_E_MEMORY ? PyExc_MemoryError : PyExc_ValueError,
                        st.text);
        return -1;
    }
    return 0;
}

/* New capsule for the names that `dict` has now.  The arrays are let go again: an index
 * that a state dict keeps must not keep alive what is deleted from it. */
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
        capsule = PyCapsule_New(index, index_name, index_end);
    }
    if (capsule == NULL && index != NULL) {
        free_index(index);
    }
    mlspy_items_release(&items);
    return capsule;
}

/* The index in a capsule (borrowed from it). */
static const name_index *index_in(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, index_name);
}

/* ---- layers ---- */

/* The name of a layer: not empty, and without the dot that the function adds itself. */
static int layer_name(PyObject *object, mls_text *out)
{
    if (mlspy_take_text(object, "layer name", out) < 0) {
        return -1;
    }
    if (out->length == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "the layer name is empty: the whole state is the state itself");
        return -1;
    }
    if (out->data[out->length - 1] == '.') {
        PyErr_Format(PyExc_ValueError,
                     "layer name %.200R ends with a dot: leave the dot away", object);
        return -1;
    }
    return 0;
}

/* Add the array under `key`, with `skipped` characters of the name left out.  1 where the
 * dict has no such name any more, -1 with an exception set. */
static int add_part(PyObject *layer, PyObject *dict, PyObject *key, Py_ssize_t skipped)
{
    PyObject *array;
    const int found = mlspy_dict_get(dict, key, &array);
    if (found <= 0) {
        return found < 0 ? -1 : 1;
    }
    PyObject *part = PyUnicode_Substring(key, skipped, PyUnicode_GET_LENGTH(key));
    PyObject *name = part == NULL ? NULL : mlspy_check_entry(part, array);
    const int failed = name == NULL ? -1 : PyDict_SetItem(layer, name, array);
    Py_XDECREF(name);
    Py_XDECREF(part);
    Py_DECREF(array);
    return failed;
}

/* Fill an empty dict with what lies under a layer.  1 where the index is out of date: the
 * dict is then partly filled, and the caller starts again. */
static int fill_layer(PyObject *layer, PyObject *dict, PyObject *name,
                      const name_index *index)
{
    mls_text path;
    if (layer_name(name, &path) < 0) {
        return -1;
    }
    const uint32_t node = mls_names_find(index->names, path);
    /* no such layer is a layer without tensors, as the specification has it */
    if (node == MLS_NAME_NONE) {
        return 0;
    }
    uint32_t *positions =
        mls_alloc(mls_names_nodes(index->names)[node].count, sizeof *positions);
    if (positions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const size_t count = mls_names_under(index->names, node, positions);
    /* in characters, not bytes: the name of the layer and its dot */
    const Py_ssize_t skipped = PyUnicode_GET_LENGTH(name) + 1;
    int result = 0;
    for (size_t i = 0; result == 0 && i < count; i++) {
        PyObject *key = PyTuple_GET_ITEM(index->keys, (Py_ssize_t)positions[i]);
        result = add_part(layer, dict, key, skipped);
    }
    mls_free(positions);
    return result;
}

/* New, empty instance of a class; its __init__ does not run: it may want arguments that
 * nobody here knows. */
static PyObject *new_empty(PyObject *class)
{
    if (!PyType_Check(class) || !PyType_IsSubtype((PyTypeObject *)class, &PyDict_Type)) {
        PyErr_SetString(PyExc_TypeError, "state_layer wants a class of dicts");
        return NULL;
    }
    PyObject *nothing = PyTuple_New(0);
    PyTypeObject *type = (PyTypeObject *)class;
    PyObject *made = nothing == NULL ? NULL : type->tp_new(type, nothing, NULL);
    Py_XDECREF(nothing);
    return made;
}

/* state_layer(state, name, class) -> the tensors under a layer, in a new `class`
 *
 * Tried twice at most: a dict that loses names between both looks is being changed by
 * another thread, and an answer about some moment of it is not to be had. */
static PyObject *state_layer(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (mlspy_take_count("state_layer", 3, count) < 0) {
        return NULL;
    }
    /* the index may have been made long ago, the arrays are those of this moment */
    PyObject *capsule = mlspy_describe_names(args[0], make_index);
    PyObject *layer = capsule == NULL ? NULL : new_empty(args[2]);
    int result =
        layer == NULL ? -1 : fill_layer(layer, args[0], args[1], index_in(capsule));
    if (result == 1) { /* dict's own methods went round us: look at the names again */
        Py_DECREF(capsule);
        PyDict_Clear(layer);
        capsule = make_index(args[0]);
        result =
            capsule == NULL ? -1 : fill_layer(layer, args[0], args[1], index_in(capsule));
    }
    Py_XDECREF(capsule);
    if (result != 0) {
        if (result == 1) {
            PyErr_SetString(PyExc_RuntimeError, "the state dict changes all the time");
        }
        Py_CLEAR(layer);
    }
    return layer;
}

/* Whether the name is one that layer_name accepts: "a..b" has a layer "a." that it does
 * not. */
static bool can_be_asked(mls_text path)
{
    return path.length > 0 && path.data[path.length - 1] != '.';
}

/* New list of the paths of some nodes, those left out that nobody could ask for. */
static PyObject *paths_list(const mls_name_node *nodes, const uint32_t *layers,
                            size_t count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        if (!can_be_asked(nodes[layers[i]].path)) {
            continue;
        }
        PyObject *path = mlspy_str_of(nodes[layers[i]].path);
        if (path == NULL || PyList_Append(list, path) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(path);
    }
    return list;
}

/* What None or a number of parts asks for, as the core counts: 0 for None.  -1 with an
 * exception set. */
static int take_depth(const mlspy_state *state, PyObject *object, uint32_t *out)
{
    int64_t depth = 0;
    if (object != Py_None && mlspy_take_int64(state, object, "depth", &depth) < 0) {
        return -1;
    }
    if (object != Py_None && depth < 1) {
        PyErr_Format(PyExc_ValueError,
                     "depth is the number of parts, at least 1; got %lld",
                     (long long)depth);
        return -1;
    }
    /* no name has as many parts, so nothing is lost */
    *out = depth > UINT32_MAX ? UINT32_MAX : (uint32_t)depth;
    return 0;
}

/* state_layer_names(state, depth | None) -> the layers, in the state's order */
static PyObject *state_layer_names(PyObject *module, PyObject *const *args,
                                   Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    uint32_t depth, *layers = NULL;
    size_t layer_count;
    mls_status st;
    if (mlspy_take_count("state_layer_names", 2, count) < 0 ||
        take_depth(state, args[1], &depth) < 0) {
        return NULL;
    }
    PyObject *capsule = mlspy_describe_names(args[0], make_index);
    if (capsule == NULL) {
        return NULL;
    }
    const mls_names *names = index_in(capsule)->names;
    PyObject *result = NULL;
    if (mls_names_layers(names, depth, &layers, &layer_count, &st) == MLS_OK) {
        result = paths_list(mls_names_nodes(names), layers, layer_count);
        mls_free(layers);
    } else {
        mlspy_raise(state, &st, NULL);
    }
    Py_DECREF(capsule);
    return result;
}

/* state_prefixed(layer name, state) -> a dict whose names begin with the layer's
 *
 * No two names can become one: all get the same in front.  Values are looked at when the
 * state takes them in. */
static PyObject *state_prefixed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    mls_text path;
    mlspy_items items;
    if (mlspy_take_count("state_prefixed", 2, count) < 0 ||
        layer_name(args[0], &path) < 0 ||
        mlspy_items_of(args[1], "layer state", &items) < 0) {
        return NULL;
    }
    PyObject *result = PyDict_New();
    for (size_t i = 0; result != NULL && i < items.count; i++) {
        PyObject *name = PyUnicode_FromFormat("%U.%U", args[0], items.items[i].key);
        if (name == NULL || PyDict_SetItem(result, name, items.items[i].value) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(name);
    }
    mlspy_items_release(&items);
    return result;
}

/* ---- renaming ---- */

/* A pair (old, new) of str; a star in front of `old` means anywhere.  The rule borrows
 * the text of both, which the caller's tuple keeps. */
static int take_rule(PyObject *pair, mls_rename_rule *out)
{
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "rules must be pairs of old and new");
        return -1;
    }
    mls_text old, new;
    if (mlspy_take_text(PyTuple_GET_ITEM(pair, 0), "the old part of a rule", &old) < 0 ||
        mlspy_take_text(PyTuple_GET_ITEM(pair, 1), "the new part of a rule", &new) < 0) {
        return -1;
    }
    if (!mls_rename_rule_of(old, new, out)) {
        PyErr_SetString(PyExc_ValueError, "rule '*' says nothing to look for");
        return -1;
    }
    return 0;
}

/* A buffer that grows to the longest name, so that most names take no allocation. */
typedef struct name_buffer {
    char *data;
    size_t room;
} name_buffer;

/* New reference to the name that `item` gets.  A name that was empty may stay so; one
 * that becomes empty has lost what told it apart, which no rule can be meant for. */
static PyObject *renamed(const mlspy_item *item, const mls_rename_rule *rules,
                         size_t rule_count, bool *used, name_buffer *buffer)
{
    /* asked with the room there is: most names fit where the one before did */
    size_t length =
        mls_name_apply(item->name, rules, rule_count, buffer->data, buffer->room, used);
    if (length > buffer->room) {
        char *larger = mls_realloc(buffer->data, length, 1);
        if (larger == NULL) {
            return PyErr_NoMemory();
        }
        /* the old block is gone, whatever happens next */
        *buffer = (name_buffer){.data = larger, .room = length};
        length = mls_name_apply(item->name, rules, rule_count, larger, length, used);
    }
    if (length == 0 && item->name.length > 0) {
        PyErr_Format(PyExc_ValueError, "the rules leave nothing of the name %.200R",
                     item->key);
        return NULL;
    }
    return mlspy_str_of((mls_text){.data = buffer->data, .length = length});
}

/* Raise for two names that would become one.  The error carries the new name, as
 * errors of one tensor do. */
static void refuse_collapse(const mlspy_state *state, PyObject *first, PyObject *second,
                            PyObject *name)
{
    PyObject *class = state->errors[MLSPY_ERROR_COMPATIBILITY];
    PyObject *text = PyUnicode_FromFormat(
        "%.200R and %.200R would both become %.200R: nothing was renamed", first, second,
        name);
    PyObject *error = text == NULL ? NULL : PyObject_CallOneArg(class, text);
    if (error != NULL && PyObject_SetAttrString(error, "name", name) == 0) {
        PyErr_SetObject(class, error);
    }
    Py_XDECREF(error);
    Py_XDECREF(text);
}

/* Put every array under its new name.  `origin` maps new names to old ones. */
static int rename_all(const mlspy_state *state, const mlspy_items *items,
                      const mls_rename_rule *rules, size_t rule_count, bool *used,
                      PyObject *result)
{
    /* two names that become one are found before anyone sees the result, which is
     * dropped then */
    name_buffer buffer = {0};
    PyObject *origin = PyDict_New();
    int failed = origin == NULL ? -1 : 0;
    for (size_t i = 0; failed == 0 && i < items->count; i++) {
        const mlspy_item *item = &items->items[i];
        PyObject *name = renamed(item, rules, rule_count, used, &buffer);
        PyObject *earlier = name == NULL ? NULL : PyDict_GetItemWithError(origin, name);
        if (earlier != NULL) {
            refuse_collapse(state, earlier, item->key, name);
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

/* A list of the numbers of the rules that matched no name. */
static PyObject *unused_rules(const bool *used, size_t rule_count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < rule_count; i++) {
        PyObject *number = used[i] ? NULL : PyLong_FromSize_t(i);
        if (!used[i] && (number == NULL || PyList_Append(list, number) < 0)) {
            Py_CLEAR(list);
        }
        Py_XDECREF(number);
    }
    return list;
}

/* state_rename(state, ((old, new), ...)) -> (a dict with the new names, the numbers of
 * the rules that matched no name) */
static PyObject *state_rename(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (mlspy_take_count("state_rename", 2, count) < 0) {
        return NULL;
    }
    if (!PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "state_rename wants a tuple of pairs");
        return NULL;
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
    if (result != NULL && rename_all(mlspy_state_of(module), &items, rules, rule_count,
                                     used, result) == 0) {
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

/* The texts of a list of str, which must not change while they are used; NULL with an
 * exception set.  Gives: free with mls_free. */
static mls_text *texts_of(PyObject *list)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "state_explain wants two lists of str");
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(list);
    mls_text *texts = mls_alloc((size_t)count, sizeof *texts);
    if (texts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (mlspy_take_text(PyList_GET_ITEM(list, i), "a name", &texts[i]) < 0) {
            mls_free(texts);
            return NULL;
        }
    }
    return texts;
}

/* ([(old, new), ...], matched) of an explanation: rules in the form that state_rename
 * takes, the star included. */
static PyObject *explanation_tuple(const mls_explanation *found)
{
    PyObject *rules = PyList_New(0);
    for (size_t i = 0; rules != NULL && i < found->rule_count; i++) {
        const mls_rename_rule *rule = &found->rules[i];
        PyObject *old = mlspy_str_of(rule->old);
        PyObject *new = mlspy_str_of(rule->new);
        PyObject *pair =
            old == NULL || new == NULL
                ? NULL
                : Py_BuildValue("(NN)",
                                PyUnicode_FromFormat(rule->anywhere ? "*%U" : "%U", old),
                                Py_NewRef(new));
        if (pair == NULL || PyList_Append(rules, pair) < 0) {
            Py_CLEAR(rules);
        }
        Py_XDECREF(pair);
        Py_XDECREF(new);
        Py_XDECREF(old);
    }
    return rules == NULL ? NULL
                         : Py_BuildValue("(Nn)", rules, (Py_ssize_t)found->matched);
}

/* state_explain(unexpected, missing) -> (rules, matched)
 *
 * No rules and 0 where nothing explains the names, which is no error. */
static PyObject *state_explain(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (mlspy_take_count("state_explain", 2, count) < 0) {
        return NULL;
    }
    mls_status st;
    mls_explanation found = {0};
    PyObject *result = NULL;
    mls_text *unexpected = texts_of(args[0]);
    mls_text *missing = unexpected == NULL ? NULL : texts_of(args[1]);
    if (missing != NULL) {
        const mls_code code =
            mls_names_explain(unexpected, (size_t)PyList_GET_SIZE(args[0]), missing,
                              (size_t)PyList_GET_SIZE(args[1]), &found, &st);
        result = code == MLS_OK ? explanation_tuple(&found)
                                : mlspy_raise(mlspy_state_of(module), &st, NULL);
        mls_explanation_fini(&found);
    }
    mls_free(missing);
    mls_free(unexpected);
    return result;
}

/* ---- the outline ---- */

/* Bytes and dtype of each array, in the order of the items; NULL with an exception set.
 * Gives: free with mls_free. */
static mls_outline_sum *leaves_of(const mlspy_state *state, const mlspy_items *items)
{
    mls_outline_sum *leaves = mls_alloc(items->count, sizeof *leaves);
    if (leaves == NULL) {
        PyErr_NoMemory();
    }
    for (size_t i = 0; leaves != NULL && i < items->count; i++) {
        const mlspy_item *item = &items->items[i];
        leaves[i].dtype = item->facts.dtype;
        if (mlspy_array_bytes(state, item->value, &leaves[i].bytes) < 0) {
            mls_free(leaves);
            leaves = NULL;
        }
    }
    return leaves;
}

/* (depth, name, count, nbytes, dtype, shape or None, hidden, open) */
static PyObject *row_tuple(const mls_names *names, const mls_outline_sum *sums,
                           const mls_outline_row *row, const mlspy_items *items)
{
    const mls_outline_entry e = mls_outline_describe(names, sums, row);
    PyObject *shape = e.name == MLS_NAME_NONE
                          ? Py_NewRef(Py_None)
                          : mlspy_shape_tuple(&items->items[e.name].facts);
    /* each N takes its reference, or passes a NULL on as the exception that is set */
    return Py_BuildValue("(INnKsNIO)", mls_names_nodes(names)[row->node].depth,
                         mlspy_str_of(e.label), (Py_ssize_t)e.count,
                         (unsigned long long)e.sum.bytes,
                         e.sum.dtype == NULL ? "" : e.sum.dtype, shape, row->hidden,
                         row->open ? Py_True : Py_False);
}

/* The rows as a list of tuples.  All sums are made, shown or not: a row says what lies
 * under it, and that may be the whole state. */
static PyObject *rows_list(const mlspy_state *state, const mls_names *names,
                           const mlspy_items *items, const mls_outline_row *rows,
                           size_t count)
{
    mls_status st;
    mls_outline_sum *sums = NULL;
    mls_outline_sum *leaves = leaves_of(state, items);
    if (leaves != NULL && mls_outline_sums(names, leaves, &sums, &st) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
    }
    mls_free(leaves);
    PyObject *list = sums == NULL ? NULL : PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *row = row_tuple(names, sums, &rows[i], items);
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(row);
    }
    mls_free(sums);
    return list;
}

/* state_outline(state, max_rows, max_children) -> rows for the page that a person sees */
static PyObject *state_outline(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    int64_t max_rows, max_children;
    if (mlspy_take_count("state_outline", 3, count) < 0 ||
        mlspy_take_int64(state, args[1], "max_rows", &max_rows) < 0 ||
        mlspy_take_int64(state, args[2], "max_children", &max_children) < 0) {
        return NULL;
    }
    mlspy_items items;
    name_index index = {0};
    mls_outline_row *rows = NULL;
    size_t row_count;
    mls_status st;
    PyObject *result = NULL;
    /* made anew: rows, arrays and names must be of one moment */
    if (mlspy_items_of(args[0], "state", &items) < 0) {
        return NULL;
    }
    if (mlspy_items_facts(state, &items) < 0 || fill_index(&index, &items) < 0) {
        goto done;
    }
    /* negative or tiny limits are the core's least ones: a page can always be drawn */
    if (mls_outline_new(index.names, max_rows < 0 ? 0 : (size_t)max_rows,
                        max_children < 3 ? 3 : (size_t)max_children, &rows, &row_count,
                        &st) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
        goto done;
    }
    result = rows_list(state, index.names, &items, rows, row_count);
done:
    mls_free(rows);
    mls_names_free(index.names);
    mls_free(index.texts);
    Py_XDECREF(index.keys);
    mlspy_items_release(&items);
    return result;
}

PyMethodDef mlspy_names_methods[] = {
    {"state_layer", MLSPY_FASTCALL(state_layer),
     "state_layer(state, name, cls, /)\n--\n\nThe tensors under a layer."},
    {"state_layer_names", MLSPY_FASTCALL(state_layer_names),
     "state_layer_names(state, depth, /)\n--\n\nThe layers of a state."},
    {"state_prefixed", MLSPY_FASTCALL(state_prefixed),
     "state_prefixed(name, state, /)\n--\n\nA state under a layer's name."},
    {"state_rename", MLSPY_FASTCALL(state_rename),
     "state_rename(state, rules, /)\n--\n\nA state with other names, and "
     "the rules that matched none."},
    {"state_explain", MLSPY_FASTCALL(state_explain),
     "state_explain(unexpected, missing, /)\n--\n\nRules that would match the names."},
    {"state_outline", MLSPY_FASTCALL(state_outline),
     "state_outline(state, max_rows, max_children, /)\n--\n\nRows of the tree of names."},
    {NULL, NULL, 0, NULL},
};
