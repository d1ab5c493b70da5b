/* gathering: the arrays of a state as the core's items, held for as long as it needs
 * them.
 *
 * Whole states come as dicts, so that no loop over names runs in Python: each value is an
 * array that the rank has whole, or a Shard, whose attributes are read here.
 *
 *   mlsp_gather         snapshots of both dicts, an item for each shard
 *     -> add_whole      an array: its parts that are ours
 *     -> add_shard      a Shard: that part
 *   mlsp_gathering_fini references given back
 *
 * An item holds what the core needs and no more: most states have tens of thousands of
 * small arrays, and a view of each would take a kilobyte.  Shapes lie one after the other
 * in one block, since arrays may be given another shape while they are saved.
 */
#include "gathering.h"

#include "args.h"
#include "array_view.h"
#include "errors.h"
#include "items.h"
#include "py_layout.h"

#include "mem.h"

#include <string.h>

/* ---- items ---- */

/* Copies do not need the arrays that they were made of. */
void mlsp_gathering_let_go(mlsp_gathering *g, bool all)
{
    for (size_t i = 0; i < g->count; i++) {
        if (all || g->items[i].staged) {
            Py_CLEAR(g->holds[i].owner);
        }
    }
    /* each array that is still needed has an owner of its own above */
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        for (size_t i = 0; i < g->sections[s].count; i++) {
            Py_CLEAR(g->sections[s].items[i].value);
        }
    }
}

/* The copies' memory goes last: items point into it. */
void mlsp_gathering_fini(mlsp_gathering *g)
{
    for (size_t i = 0; i < g->count; i++) {
        Py_XDECREF(g->holds[i].owner);
        mls_free(g->holds[i].strided);
    }
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        mlsp_items_release(&g->sections[s]);
    }
    mls_free(g->items);
    mls_free(g->holds);
    mls_free(g->dims);
    mls_free(g->axes);
    if (g->staging.obj != NULL) {
        PyBuffer_Release(&g->staging);
    }
}

/* Room for `needed` more of what `*block` holds `used` of; false with MemoryError set. */
static bool make_room(void **block, size_t size, size_t used, size_t needed, size_t *room)
{
    if (used + needed <= *room) {
        return true;
    }
    const size_t wanted = 2 * (used + needed);
    void *larger = mls_realloc(*block, wanted, size);
    if (larger == NULL) {
        PyErr_NoMemory();
        return false;
    }
    *block = larger;
    *room = wanted;
    return true;
}

/* A new item, whose tensor has the shape `dims`; NULL with MemoryError set.  The array's
 * owner is shared. */
static mls_shard_item *add_item(mlsp_gathering *g, const mls_tensor_id *id,
                                mls_dtype dtype, int rank, const size_t *dims,
                                PyObject *owner)
{
    void *items = g->items, *holds = g->holds, *all = g->dims;
    size_t room = g->room;
    const bool good =
        make_room(&items, sizeof *g->items, g->count, 1, &room) &&
        make_room(&holds, sizeof *g->holds, g->count, 1, &g->room) &&
        make_room(&all, sizeof *g->dims, g->dims_used, (size_t)rank, &g->dims_room);
    g->items = items;
    g->holds = holds;
    g->dims = all;
    if (!good) {
        g->room = room < g->room ? room : g->room;
        return NULL;
    }
    for (int i = 0; i < rank; i++) {
        g->dims[g->dims_used + (size_t)i] = dims[i];
    }
    g->dims_used += (size_t)rank;
    g->holds[g->count] = (mlsp_held){.owner = Py_NewRef(owner)};
    g->items[g->count] = (mls_shard_item){.id = *id, .dtype = dtype, .rank = rank};
    return &g->items[g->count++];
}

/* Shapes follow one another in the order of the items.  Only now does the block stay
 * where it is, so only now may anybody point into it. */
static void point_to_shapes(mlsp_gathering *g)
{
    const size_t *dims = g->dims;
    for (size_t i = 0; i < g->count; i++) {
        g->items[i].shape = dims;
        dims += g->items[i].rank;
    }
}

/* The memory of the last item: packed, or by a view of its own.  An array without
 * elements may have no address, which is not the same as having none. */
static int set_memory(mlsp_gathering *g, mls_shard_item *item, const mls_tensor *memory,
                      size_t first)
{
    item->first = first;
    if (!memory->swapped && mls_tensor_is_contiguous(memory)) {
        item->data = memory->data;
        if (item->data == NULL) {
            item->data = (const unsigned char *)""; /* no elements */
        }
        return 0;
    }
    mls_tensor *copy = mls_alloc(1, sizeof *copy);
    if (copy == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *copy = *memory;
    g->holds[g->count - 1].strided = copy;
    item->strided = copy;
    return 0;
}

/* "params 'x'", for errors about an array.  Cut, and never in a file. */
static void describe(const mls_tensor_id *id, const char *key, char what[MLS_NAME_BYTES])
{
    PyOS_snprintf(what, MLS_NAME_BYTES, "%s '%.130s'", mls_section_name(id->section),
                  key);
}

/* Too many axes for a shard. */
static int check_rank(const mlsp_gathering *g, const mls_tensor *t, const char *what)
{
    mls_status st;
    if (t->rank <= MLS_LAYOUT_RANK) {
        return 0;
    }
    mls_fail(&st, MLS_E_SHAPE, "%s has %d dimensions: at most %d can be stored", what,
             t->rank, (int)MLS_LAYOUT_RANK);
    mlsp_raise(g->state, &st, NULL);
    return -1;
}

/* The shape that a value says it has; its rank, or -1 without an exception where it says
 * nothing of use. */
static int said_shape(const mlsp_gathering *g, PyObject *value, size_t *shape)
{
    PyObject *said = PyObject_GetAttr(value, g->state->shape_name);
    PyObject *tuple = said == NULL ? NULL : PySequence_Tuple(said);
    const int rank = tuple == NULL ? -1 : mlsp_take_shape(g->state, tuple, shape);
    Py_XDECREF(said);
    Py_XDECREF(tuple);
    PyErr_Clear();
    return rank;
}

/* Where a state's axes are not its parameter's own, fill in `axes` and return them. Asked
 * where arrays are cut, and where another rank may store the parameter: else the core
 * finds out by itself what it writes down.  A parameter that cannot say its shape is as
 * good as one that is not there. */
static const signed char *axes_of(const mlsp_gathering *g, PyObject *model,
                                  const mls_tensor_id *id, int rank, const size_t *dims,
                                  signed char *axes)
{
    size_t shape[MLS_LAYOUT_RANK];
    PyObject *parameter = NULL, *name = NULL;
    bool differ = false;
    if (id->has_state && model != Py_None && (name = mlsp_str_of(id->name)) != NULL &&
        mlsp_dict_get(model, name, &parameter) == 1) {
        const int said = said_shape(g, parameter, shape);
        differ = said >= 0 && mls_align(id->state, rank, dims, said, shape, axes);
    }
    PyErr_Clear();
    Py_XDECREF(name);
    Py_XDECREF(parameter);
    return differ ? axes : NULL;
}

/* One part of an array that the rank has whole: a box of it, which is a view, and of flat
 * parts the first element that counts. */
static int add_part(mlsp_gathering *g, const mls_tensor_id *id, const mlsp_view *view,
                    const mls_layout *layout, size_t index)
{
    const mls_tensor *t = &view->tensor;
    mls_part part;
    mls_status st;
    if (mls_layout_part(layout, t->rank, t->shape, index, &part, &st) != MLS_OK) {
        mls_status_name(&st, id->name.data, id->name.length);
        mlsp_raise(g->state, &st, NULL);
        return -1;
    }
    mls_shard_item *item = add_item(g, id, t->dtype, t->rank, t->shape, view->owner);
    if (item == NULL) {
        return -1;
    }
    mls_tensor box = *t;
    for (int i = 0; i < t->rank; i++) {
        box = mls_tensor_slice(&box, i, part.start[i], part.length[i]);
    }
    item->layout = *layout;
    item->part = index;
    return set_memory(g, item, &box, part.begin);
}

/* An array that this rank has whole: all of it, or the parts that are this rank's.  Ranks
 * take turns by the number of the part, so that a tensor of many parts is everyone's
 * work, and one that cannot be cut is the first rank's. */
static int add_whole(mlsp_gathering *g, PyObject *model, const mls_tensor_id *id,
                     const mlsp_view *view)
{
    signed char axes[MLS_LAYOUT_RANK];
    mls_layout layout = {0};
    size_t parts = 1, ignored;
    mls_status st;
    if (g->parts > 1) {
        mls_layout_project(
            &g->layout, 0, view->tensor.rank,
            axes_of(g, model, id, view->tensor.rank, view->tensor.shape, axes), &layout,
            &ignored);
        (void)mls_layout_parts(&layout, &parts,
                               &st); /* no more than those of g->layout */
    }
    const uint64_t first = g->parts > 1 ? g->rank : 0;
    const uint64_t step = g->parts > 1 ? g->world_size : 1;
    for (uint64_t part = first; part < parts; part += step) {
        if (add_part(g, id, view, &layout, (size_t)part) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- Shard objects ---- */

/* An attribute of a Shard that is an int. */
static int shard_number(const mlsp_gathering *g, PyObject *shard, const char *name,
                        int64_t *out)
{
    PyObject *value = PyObject_GetAttrString(shard, name);
    const int failed = value == NULL ? -1 : mlsp_take_int64(g->state, value, name, out);
    Py_XDECREF(value);
    return failed;
}

/* Where the shard says it is kept; the class has checked the name. */
static int shard_tier(PyObject *shard, mls_tier *out)
{
    mls_text text;
    PyObject *value = PyObject_GetAttrString(shard, "tier");
    int failed = value == NULL ? -1 : 0;
    if (failed == 0 && value != Py_None) {
        failed = mlsp_take_text(value, "tier", &text);
        for (int i = 1; failed == 0 && i < MLS_TIER_COUNT; i++) {
            *out = mls_text_is(text, mls_tier_name((mls_tier)i)) ? (mls_tier)i : *out;
        }
    }
    Py_XDECREF(value);
    return failed;
}

/* The layout and shape of a Shard, which describe the whole tensor and not the memory
 * that the part lies in; returns the rank, or -1 with an exception set. */
static int shard_shape(const mlsp_gathering *g, PyObject *shard, mls_layout *layout,
                       size_t *shape)
{
    PyObject *steps = PyObject_GetAttrString(shard, "_steps");
    PyObject *tuple = steps == NULL ? NULL : PyObject_GetAttrString(shard, "shape");
    const int rank = tuple == NULL || mlsp_take_layout(g->state, steps, layout) < 0
                         ? -1
                         : mlsp_take_shape(g->state, tuple, shape);
    Py_XDECREF(steps);
    Py_XDECREF(tuple);
    return rank;
}

/* The array of a Shard must have the elements of its part, in whatever shape: flat parts
 * often come as views of something larger.  The class has checked this when the Shard was
 * made, but arrays can be given another shape. */
static int check_part(const mlsp_gathering *g, const mls_shard_item *item,
                      const mls_tensor *memory, const char *what)
{
    mls_part part;
    mls_status st;
    size_t count = 0;
    if (mls_layout_part(&item->layout, item->rank, item->shape, item->part, &part, &st) !=
        MLS_OK) {
        mlsp_raise(g->state, &st, NULL);
        return -1;
    }
    (void)mls_tensor_count(memory, &count); /* it lies in memory */
    if (count == mls_part_count(&part)) {
        return 0;
    }
    mls_fail(&st, MLS_E_SHAPE,
             "%s: the shard has %zu elements, and its part of the tensor %zu", what,
             count, mls_part_count(&part));
    mlsp_raise(g->state, &st, NULL);
    return -1;
}

/* A Shard, which is this rank's unless it is a copy of another's.  Its attributes may be
 * anything by now, so each is taken as any argument is. */
static int add_shard(mlsp_gathering *g, const mls_tensor_id *id, const char *what,
                     PyObject *shard)
{
    int64_t index, version, replica;
    size_t shape[MLS_LAYOUT_RANK];
    mls_layout layout;
    mlsp_view view;
    mls_tier tier = MLS_TIER_NONE;
    if (shard_number(g, shard, "index", &index) < 0 ||
        shard_number(g, shard, "_version", &version) < 0 ||
        shard_number(g, shard, "replica", &replica) < 0 || shard_tier(shard, &tier) < 0) {
        return -1;
    }
    /* alone there is nobody who could have it; of many, rank 0 looks when it commits */
    if (replica > 0 && g->world_size == 1) {
        PyErr_Format(PyExc_ValueError,
                     "%s is a Shard with replica=%lld, and nobody else saves: no rank "
                     "gives replica 0, which is what would be stored",
                     what, (long long)replica);
        return -1;
    }
    const int rank = replica > 0 ? 0 : shard_shape(g, shard, &layout, shape);
    PyObject *array =
        rank < 0 || replica > 0 ? NULL : PyObject_GetAttrString(shard, "array");
    if (replica > 0 || rank < 0 || array == NULL) {
        return replica > 0 ? 0 : -1;
    }
    int failed = mlsp_view_of(g->state, array, what, &view);
    if (failed == 0) {
        mls_shard_item *item =
            add_item(g, id, view.tensor.dtype, rank, shape, view.owner);
        failed = item == NULL ? -1 : 0;
        if (item != NULL) {
            item->shape = shape;
            item->layout = layout;
            item->part = (size_t)index;
            item->version = (uint64_t)version;
            item->tier = tier;
            failed = check_part(g, item, &view.tensor, what) < 0
                         ? -1
                         : set_memory(g, item, &view.tensor, 0);
        }
        mlsp_view_release(&view);
    }
    Py_DECREF(array);
    return failed;
}

/* ---- all of a state ---- */

/* One entry of a dict: a Shard says itself which part it is, an array is looked at only
 * where it is ours to store.  Most are plain arrays, which have a short way. */
static int add_value(mlsp_gathering *g, PyObject *model, mls_section section,
                     const mlsp_item *entry)
{
    char what[MLS_NAME_BYTES];
    mlsp_view view;
    const mls_tensor_id id = mls_tensor_id_of(section, entry->name);
    describe(&id, entry->name.data, what);
    const int is_shard = PyObject_IsInstance(entry->value, g->shard_type);
    if (is_shard != 0) {
        return is_shard < 0 ? -1 : add_shard(g, &id, what, entry->value);
    }
    if (g->mine[section] != NULL) {
        const int ours = PySet_Contains(g->mine[section], entry->key);
        if (ours <= 0) {
            return ours;
        }
    }
    if (!mlsp_view_quickly(g->state, entry->value, false, &view) &&
        mlsp_view_of(g->state, entry->value, what, &view) < 0) {
        return -1;
    }
    const int failed =
        check_rank(g, &view.tensor, what) < 0 ? -1 : add_whole(g, model, &id, &view);
    mlsp_view_release(&view);
    return failed;
}

/* Say which axes states have.  A rank that stores a state knows the parameter even where
 * it is another rank's to store, and the core sees only what this one stores. */
static int align_states(mlsp_gathering *g, PyObject *model)
{
    g->axes = mls_alloc(g->dims_used, 1);
    if (g->axes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < g->count; i++) {
        mls_shard_item *item = &g->items[i];
        item->axes = axes_of(g, model, &item->id, item->rank, item->shape,
                             g->axes + (item->shape - g->dims));
    }
    return 0;
}

/* Section by section, so that a state finds its parameter in the model's dict. */
int mlsp_gather(mlsp_gathering *g, PyObject *const *dicts)
{
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        if (dicts[s] == Py_None) {
            continue;
        }
        if (mlsp_items_of(dicts[s], mls_section_name((mls_section)s), &g->sections[s]) <
            0) {
            return -1;
        }
        for (size_t i = 0; i < g->sections[s].count; i++) {
            if (add_value(g, dicts[0], (mls_section)s, &g->sections[s].items[i]) < 0) {
                return -1;
            }
        }
    }
    point_to_shapes(g);
    return g->world_size > 1 ? align_states(g, dicts[0]) : 0;
}
