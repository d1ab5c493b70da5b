/* py_shard_items: lists a save's arrays and Shards (layout, part, replica, tier,
 * version); copies them for save_async.
 *
 * A list of shard items is a capsule that connects the two. It holds the arrays, or the
 * memory of their copies, until it is freed.
 *
 * Whole states are passed as dicts, so that no Python code loops over names. Each value
 * is an array, which the rank holds whole, or a Shard, whose attributes are read here.
 *
 * add_dicts               copies the dicts, and adds items
 *   -> add_whole          an array: the parts that this rank stores
 *   -> add_shard          a Shard: its part
 * items_fini              releases all references */
#include "checkpoint/shard_items.h"

#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_view.h"
#include "checkpoint/merged_index_object.h"
#include "checkpoint/py_layout.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "dictionaries/dict_items.h"

#include "base/memory.h"
#include "checkpoint/write/staging.h"

#include <string.h>

/* ---- arrays held ---- */

/* A copied item does not need its array. */
void mlspy_shard_items_release(mlspy_shard_items *items, bool all)
{
    for (size_t i = 0; i < items->owner_count; i++) {
        if (all || items->list.items[i].staged) {
            Py_CLEAR(items->owners[i]);
        }
    }
    /* every array that is still needed has its own owner above */
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        for (size_t i = 0; i < items->sections[s].count; i++) {
            Py_CLEAR(items->sections[s].items[i].value);
        }
    }
}

/* Release everything that a list holds. The memory of the copies is released last, since
 * items point into it. */
static void items_fini(mlspy_shard_items *items)
{
    for (size_t i = 0; i < items->owner_count; i++) {
        Py_XDECREF(items->owners[i]);
    }
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        mlspy_items_release(&items->sections[s]);
    }
    mls_shard_list_fini(&items->list);
    mls_free(items->owners);
    mls_free(items->axes);
    PyBuffer_Release(&items->staging);
}

/* Hold a reference to `owner` for each item added since the last call: the items use its
 * memory. Returns -1 with MemoryError set. */
static int hold_owner(mlspy_shard_items *items, PyObject *owner)
{
    if (items->owner_room < items->list.item_room) {
        PyObject **larger =
            mls_realloc(items->owners, items->list.item_room, sizeof *items->owners);
        if (larger == NULL) {
            return mlspy_no_memory();
        }
        items->owners = larger;
        items->owner_room = items->list.item_room;
    }
    while (items->owner_count < items->list.count) {
        items->owners[items->owner_count++] = Py_NewRef(owner);
    }
    return 0;
}

/* Write "params 'x'", for errors about an array. May be truncated; never written to a
 * file. */
static void describe_tensor(const mls_tensor_id *id, const char *key,
                            char label[MLS_NAME_BYTES])
{
    PyOS_snprintf(label, MLS_NAME_BYTES, "%s '%.130s'", mls_section_name(id->section),
                  key);
}

/* Read the attribute `shape` of a value into `shape`, which has MLS_LAYOUT_RANK entries.
 * Returns the rank, or -1 without an exception if the attribute is missing or invalid. */
static int stated_shape(const mlspy_shard_items *items, PyObject *value, size_t *shape)
{
    PyObject *shape_object =
        PyObject_GetAttr(value, items->state->names[MLSPY_NAME_SHAPE]);
    PyObject *tuple = shape_object == NULL ? NULL : PySequence_Tuple(shape_object);
    const int rank = tuple == NULL ? -1 : mlspy_take_shape(items->state, tuple, shape);
    Py_XDECREF(shape_object);
    Py_XDECREF(tuple);
    PyErr_Clear();
    return rank;
}

/* If the axes of a state `id` with `rank` dimensions `dims` differ from those in its
 * parameter in the dict `model` (or None), fill in `axes`, the parameter's axis of each,
 * and return it; else return NULL. Needed only to cut arrays, and if another rank may
 * store the parameter; otherwise the core derives the axes. A parameter without a valid
 * shape counts as missing. Sets no exception. */
static const signed char *axes_of(const mlspy_shard_items *items, PyObject *model,
                                  const mls_tensor_id *id, int rank, const size_t *dims,
                                  signed char *axes)
{
    size_t parameter_shape[MLS_LAYOUT_RANK];
    PyObject *parameter = NULL, *name = NULL;
    bool differ = false;
    if (id->has_state && model != Py_None && (name = mlspy_str_of(id->name)) != NULL &&
        mlspy_dict_get(model, name, &parameter) == 1) {
        const int parameter_rank = stated_shape(items, parameter, parameter_shape);
        differ = parameter_rank >= 0 &&
                 mls_optimizer_axes(id->state, rank, dims, parameter_rank,
                                    parameter_shape, axes);
    }
    PyErr_Clear();
    Py_XDECREF(name);
    Py_XDECREF(parameter);
    return differ ? axes : NULL;
}

/* Add a whole array: all of it, or the parts that this rank stores. `model` is the dict
 * of parameters, or None. Returns -1 with an exception set. */
static int add_whole(mlspy_shard_items *items, PyObject *model, const mls_tensor_id *id,
                     const mlspy_view *view)
{
    signed char axes_buffer[MLS_LAYOUT_RANK];
    const mls_tensor *t = &view->tensor;
    mls_status st;
    const signed char *axes =
        items->parts > 1 ? axes_of(items, model, id, t->rank, t->shape, axes_buffer)
                         : NULL;
    if (mlspy_check(items->state,
                    mls_shard_list_add_whole(&items->list, id, t, &items->layout, axes,
                                             items->rank, items->world_size, &st),
                    &st) < 0) {
        return -1;
    }
    return hold_owner(items, view->owner);
}

/* ---- Shard objects ---- */

/* Read the attribute `name` of a Shard, an int. Returns -1 with an exception set. */
static int shard_number(const mlspy_shard_items *items, PyObject *shard, const char *name,
                        int64_t *out)
{
    PyObject *value = PyObject_GetAttrString(shard, name);
    const int failed =
        value == NULL ? -1 : mlspy_take_int64(items->state, value, name, out);
    Py_XDECREF(value);
    return failed;
}

/* Read the tier of a Shard, whose class has checked its name; `*out` stays unchanged for
 * None. Returns -1 with an exception set. */
static int shard_tier(PyObject *shard, mls_tier *out)
{
    mls_str text;
    PyObject *value = PyObject_GetAttrString(shard, "tier");
    int failed = value == NULL ? -1 : 0;
    if (failed == 0 && value != Py_None) {
        failed = mlspy_take_text(value, "tier", &text);
        for (int i = 1; failed == 0 && i < MLS_TIER_COUNT; i++) {
            *out = mls_str_is(text, mls_tier_name((mls_tier)i)) ? (mls_tier)i : *out;
        }
    }
    Py_XDECREF(value);
    return failed;
}

/* Read layout and shape of a Shard, which describe the whole tensor, not the memory of
 * the part. `shape` has MLS_LAYOUT_RANK entries. Returns the rank, or -1 with an
 * exception set. */
static int shard_shape(const mlspy_shard_items *items, PyObject *shard,
                       mls_layout *layout, size_t *shape)
{
    PyObject *steps = PyObject_GetAttrString(shard, "_steps");
    PyObject *tuple = steps == NULL ? NULL : PyObject_GetAttrString(shard, "shape");
    const int rank = tuple == NULL || mlspy_take_layout(items->state, steps, layout) < 0
                         ? -1
                         : mlspy_take_shape(items->state, tuple, shape);
    Py_XDECREF(steps);
    Py_XDECREF(tuple);
    return rank;
}

/* Add the part of a Shard: `properties` has its rank, layout, part, version and tier,
 * `shape` the whole tensor's dimensions, `view` its array. `label` names it in errors.
 * The class checked the array when the Shard was made, but arrays can be reshaped later.
 * Returns -1 with an exception set. */
static int add_part(mlspy_shard_items *items, const mls_tensor_id *id, const char *label,
                    const mls_shard_item *properties, const size_t *shape,
                    const mlspy_view *view)
{
    mls_status st;
    const mls_tensor *t = &view->tensor;
    if (mlspy_check(items->state, mls_shard_item_check(properties, shape, t, label, &st),
                    &st) < 0) {
        return -1;
    }
    mls_shard_item *item =
        mls_shard_list_add(&items->list, id, t->dtype, properties->rank, shape, &st);
    if (item == NULL) {
        return mlspy_check(items->state, st.code, &st);
    }
    item->layout = properties->layout;
    item->part = properties->part;
    item->version = properties->version;
    item->tier = properties->tier;
    if (mlspy_check(
            items->state,
            mls_shard_list_set_memory(&items->list, t, 0 /* first element */, &st),
            &st) < 0) {
        return -1;
    }
    return hold_owner(items, view->owner);
}

/* Add a Shard, unless it is a replica that another rank stores. Its attributes may have
 * changed, so each is checked like an argument. Returns -1 with an exception set. */
static int add_shard(mlspy_shard_items *items, const mls_tensor_id *id, const char *label,
                     PyObject *shard)
{
    int64_t index, version, replica;
    size_t shape[MLS_LAYOUT_RANK];
    mls_layout layout;
    mlspy_view view;
    mls_tier tier = MLS_TIER_NONE;
    if (shard_number(items, shard, "index", &index) < 0 ||
        shard_number(items, shard, "_version", &version) < 0 ||
        shard_number(items, shard, "replica", &replica) < 0 ||
        shard_tier(shard, &tier) < 0) {
        return -1;
    }
    /* a single rank has no other rank that could store it; with several ranks, rank 0
     * checks at commit */
    if (replica > 0 && items->world_size == 1) {
        return MLSPY_REFUSE(
            PyExc_ValueError,
            "%s is a Shard with replica=%lld, but this process saves alone: "
            "pass replica=0, the copy that is stored",
            label, (long long)replica);
    }
    if (replica > 0) {
        return 0;
    }
    const int rank = shard_shape(items, shard, &layout, shape);
    PyObject *array = rank < 0 ? NULL : PyObject_GetAttrString(shard, "array");
    if (array == NULL) {
        return -1;
    }
    int failed = mlspy_view_of(items->state, array, label, &view);
    if (failed == 0) {
        const mls_shard_item properties = {.rank = rank,
                                           .layout = layout,
                                           .part = (size_t)index,
                                           .version = (uint64_t)version,
                                           .tier = tier};
        failed = add_part(items, id, label, &properties, shape, &view);
        mlspy_view_release(&view);
    }
    Py_DECREF(array);
    return failed;
}

/* ---- whole states ---- */

/* Add one entry of a dict. A Shard defines its own part; an array is viewed only if this
 * rank stores it. Most values are plain arrays, which take a fast path. `model` is the
 * dict of parameters, or None. Returns -1 with an exception set. */
static int add_value(mlspy_shard_items *items, PyObject *model, mls_section section,
                     const mlspy_item *entry)
{
    char label[MLS_NAME_BYTES];
    mlspy_view view;
    const mls_tensor_id id = mls_tensor_id_of(section, entry->name);
    describe_tensor(&id, entry->name.data, label);
    const int is_shard = PyObject_IsInstance(entry->value, items->shard_type);
    if (is_shard != 0) {
        return is_shard < 0 ? -1 : add_shard(items, &id, label, entry->value);
    }
    if (items->own_names[section] != NULL) {
        const int is_local = PySet_Contains(items->own_names[section], entry->key);
        if (is_local <= 0) {
            return is_local;
        }
    }
    if (mlspy_view_for(items->state, entry->value, label, false /* read-only */, &view) <
        0) {
        return -1;
    }
    const int rank = view.tensor.rank;
    const int failed = rank > MLS_LAYOUT_RANK
                           ? MLSPY_FAIL(items->state, MLS_E_SHAPE,
                                        "%s has %d dimensions: at most %d can be stored",
                                        label, rank, (int)MLS_LAYOUT_RANK)
                           : add_whole(items, model, &id, &view);
    mlspy_view_release(&view);
    return failed;
}

/* Set the axes of all states, from the parameters in the dict `model`. Only this rank's
 * items reach the core, so it cannot find a parameter that another rank stores. Returns
 * -1 with MemoryError set. */
static int set_state_axes(mlspy_shard_items *items, PyObject *model)
{
    items->axes = mls_alloc(items->list.dims_used, 1);
    if (items->axes == NULL) {
        return mlspy_no_memory();
    }
    for (size_t i = 0; i < items->list.count; i++) {
        mls_shard_item *item = &items->list.items[i];
        item->axes = axes_of(items, model, &item->id, item->rank, item->shape,
                             /* each item's axes are at the position of its shape */
                             items->axes + (item->shape - items->list.dims));
    }
    return 0;
}

/* Add all entries of the sections' dicts (parameters first; None: no such section), so
 * that a state finds its parameter in the first dict. Returns -1 with an exception
 * set. */
static int add_dicts(mlspy_shard_items *items, PyObject *const *dicts)
{
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        if (dicts[s] == Py_None) {
            continue;
        }
        if (mlspy_items_of(dicts[s], mls_section_name((mls_section)s),
                           &items->sections[s]) < 0) {
            return -1;
        }
        for (size_t i = 0; i < items->sections[s].count; i++) {
            if (add_value(items, dicts[0], (mls_section)s, &items->sections[s].items[i]) <
                0) {
                return -1;
            }
        }
    }
    mls_shard_list_finish(&items->list);
    return items->world_size > 1 ? set_state_axes(items, dicts[0]) : 0;
}

/* ---- lists as capsules ---- */

/* The name of the capsules of this file. */
#define CAPSULE_NAME "mlstate.shard_items"

/* Releases arrays, so it needs the GIL, which a capsule destructor has. */
static void free_capsule(PyObject *capsule)
{
    mlspy_shard_items *items = PyCapsule_GetPointer(capsule, CAPSULE_NAME);
    items_fini(items);
    mls_free(items);
}

/* The capsule's name identifies its type, so no other capsule is accepted. */
mlspy_shard_items *mlspy_shard_items_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, CAPSULE_NAME);
}

enum { BACKGROUND_THREADS = 4 }; /* each has a buffer */

size_t mlspy_background_threads(const mls_pool *pool)
{
    const size_t threads = mls_pool_threads(pool);
    return threads < BACKGROUND_THREADS ? threads : BACKGROUND_THREADS;
}

/* Set the members of a list that do not depend on arrays from the arguments of
 * shards_collect, and `dicts` to the three states (borrowed). Returns -1 with an
 * exception set. */
static int take_arguments(mlspy_shard_items *items, PyObject *const *args,
                          PyObject **dicts)
{
    int64_t rank, world_size;
    mls_status st;
    if (mlspy_take_tuple(args[0], "ranks", "LL", &rank, &world_size) < 0 ||
        mlspy_take_tuple(args[1], "states", "OOO", &dicts[0], &dicts[1], &dicts[2]) < 0 ||
        (args[3] != Py_None &&
         mlspy_take_tuple(args[3], "own_names", "OOO", &items->own_names[0],
                          &items->own_names[1], &items->own_names[2]) < 0) ||
        mlspy_take_layout(items->state, args[4], &items->layout) < 0) {
        return -1;
    }
    if (rank < 0 || world_size <= rank) {
        return MLSPY_REFUSE(PyExc_ValueError, "no such rank");
    }
    items->shard_type = args[2];
    items->rank = (uint64_t)rank;
    items->world_size = (uint64_t)world_size;
    (void)mls_layout_parts(&items->layout, &items->parts, &st);
    return 0;
}

/* shards_collect((rank, world_size), (model, optimizer, states), Shard, own_names,
 * layout) -> (items, bytes)
 *
 * Lists the shards that this rank stores. The three states are dicts or None, `Shard` is
 * the class, `layout` cuts whole arrays. `own_names` is three sets of names of whole
 * arrays that this rank stores, or None for all of them. Invalid arrays, and a layout
 * that does not fit them, raise here, before any folder is modified. `items` is a
 * capsule, `bytes` the packed size of all shards.
 */
PyObject *core_shards_collect(mlspy_state *state, PyObject *const *args)
{
    PyObject *dicts[MLS_SECTION_COUNT];
    mls_status st;
    size_t bytes = 0;
    /* from here on the capsule frees it, also after a failure */
    mlspy_shard_items *items = mls_alloc(1, sizeof *items);
    PyObject *capsule =
        items == NULL ? NULL : PyCapsule_New(items, CAPSULE_NAME, free_capsule);
    if (capsule == NULL) {
        mls_free(items);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    items->state = state;
    if (take_arguments(items, args, dicts) < 0 || add_dicts(items, dicts) < 0 ||
        mlspy_check(state,
                    mls_staging_need(items->list.items, items->list.count, &bytes, &st),
                    &st) < 0) {
        Py_DECREF(capsule);
        return NULL;
    }
    return Py_BuildValue("(Nn)", capsule, (Py_ssize_t)bytes);
}

/* shards_shapes(items) -> {"params/w": shape, ...}: section and key of each tensor of
 * which a shard is listed, and its whole shape */
PyObject *core_shards_shapes(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    const mlspy_shard_items *items = mlspy_shard_items_of(args[0]);
    PyObject *shapes = items == NULL ? NULL : PyDict_New();
    for (size_t i = 0; shapes != NULL && i < items->list.count; i++) {
        const mls_shard_item *item = &items->list.items[i];
        PyObject *key = mlspy_merged_index_key(&item->id);
        PyObject *name =
            key == NULL
                ? NULL
                : PyUnicode_FromFormat("%s/%U", mls_section_name(item->id.section), key);
        PyObject *shape = mlspy_sizes_tuple(item->shape, item->rank);
        if (name == NULL || shape == NULL || PyDict_SetItem(shapes, name, shape) < 0) {
            Py_CLEAR(shapes);
        }
        Py_XDECREF(key);
        Py_XDECREF(name);
        Py_XDECREF(shape);
    }
    return shapes;
}

/* shards_overhead(items, compress) -> the most bytes that a background write of these
 * shards needs, in addition to the copies */
PyObject *core_shards_overhead(mlspy_state *state, PyObject *const *args)
{
    size_t bytes = 0;
    mls_status st;
    const mlspy_shard_items *items = mlspy_shard_items_of(args[0]);
    bool compress;
    if (items == NULL || mlspy_take_bool(args[1], &compress) < 0) {
        return NULL;
    }
    if (mls_staging_overhead(items->list.items, items->list.count,
                             mlspy_background_threads(state->pool), compress, &bytes,
                             &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    return PyLong_FromSize_t(bytes);
}

/* shards_stage(items, memory, used) -> (bytes used, number of shards not copied)
 *
 * Copies the arrays of as many items as fit into `memory`, a writable buffer. Its first
 * `used` bytes contain copies that the caller made of tensors that only their framework
 * can read; the returned number includes them. The list holds the memory until it is
 * freed. It releases every array that was copied, so a caller that replaces its arrays
 * gets their memory back before the write ends. May be called once. */
PyObject *core_shards_stage(mlspy_state *state, PyObject *const *args)
{
    mls_staged staged;
    mls_status st;
    mls_code code;
    int64_t used;
    if (mlspy_take_int64(state, args[2], "used", &used) < 0) {
        return NULL;
    }
    mlspy_shard_items *items = mlspy_shard_items_of(args[0]);
    if (items == NULL) {
        return NULL;
    }
    if (items->staging.obj != NULL) {
        return PyErr_Format(PyExc_RuntimeError, "the shards were staged already");
    }
    if (PyObject_GetBuffer(args[1], &items->staging, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    if (used < 0 || used > (int64_t)items->staging.len) {
        return PyErr_Format(PyExc_ValueError, "more is used than there is");
    }
    /* the caller's copies count as staged */
    mls_staging_note(items->list.items, items->list.count, items->staging.buf,
                     (size_t)used);
    const mls_staging to = {.memory = (unsigned char *)items->staging.buf + used,
                            .bytes = (size_t)(items->staging.len - (Py_ssize_t)used),
                            .kernels = state->kernels,
                            .pool = state->pool};
    /* no other thread has the list, and it keeps the items' memory alive */
    MLSPY_WITHOUT_GIL(
        code = mls_stage(&to, items->list.items, items->list.count, &staged, &st));
    if (code != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    mlspy_shard_items_release(items, false /* copied items only */);
    return Py_BuildValue("(nn)", (Py_ssize_t)staged.bytes + (Py_ssize_t)used,
                         (Py_ssize_t)staged.lent);
}

/* memory_touch(memory): writes zeros to all of a buffer, so that the system allocates
 * every page before a copy needs it */
PyObject *core_memory_touch(mlspy_state *state, PyObject *const *args)
{
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    const mls_staging all = {
        .memory = view.buf, .bytes = (size_t)view.len, .pool = state->pool};
    MLSPY_WITHOUT_GIL(mls_staging_touch(&all));
    PyBuffer_Release(&view);
    return Py_NewRef(Py_None);
}
