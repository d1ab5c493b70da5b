/* py_shards: one rank's shards written, and small things that checkpoints need.  The
 * public names and their docstrings are in mlstate/checkpoint.py; these take positional
 * arguments only.
 *
 * Whole states come as dicts, so that no loop over names runs in Python: each value is an
 * array that the rank has whole, or a Shard, whose attributes are read here.
 *
 *   shards_write -> gather          snapshots of both dicts, an item for each shard
 *                                   -> add_whole  an array: its parts that are ours
 *                                   -> add_shard  a Shard: that part
 *                -> write_gathered  without the GIL: mls_shards_write
 *                -> gathering_fini  references given back
 *
 * An item holds what the core needs and no more: most states have tens of thousands of
 * small arrays, and a view of each would take a kilobyte.  Shapes lie one after the other
 * in one block, since arrays may be given another shape while they are saved.
 */
#include "checkpoint.h"

#include "fsio.h"
#include "mem.h"
#include "seal.h"
#include "shard_write.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* A constant table, but asking the processor takes a while: once for each call. */
const mls_crc_kernels *mlsp_crc_of(const mlsp_state *state)
{
    return mls_crc_of(state->kernels->cpu);
}

/* ---- paths and errors ---- */

int mlsp_open_folder(const mlsp_state *state, PyObject *path, int *out)
{
    PyObject *encoded = NULL;
    mls_status st;
    if (!PyUnicode_FSConverter(path, &encoded)) {
        return -1;
    }
    const char *text = PyBytes_AS_STRING(encoded);
    int fd, reason;
    Py_BEGIN_ALLOW_THREADS
        fd = open(text, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        reason = errno;
    Py_END_ALLOW_THREADS
    Py_DECREF(encoded);
    if (fd < 0) {
        mls_fail_os(&st, reason, "cannot open the checkpoint's folder");
        mlsp_raise(state, &st, path);
        return -1;
    }
    *out = fd;
    return 0;
}

/* "path/relative", or `path`; a new reference.  Paths of bytes stay as they are: what a
 * file system has for names need not be text. */
static PyObject *joined(PyObject *path, const char *relative)
{
    if (relative == NULL || relative[0] == '\0' || !PyUnicode_Check(path)) {
        return Py_NewRef(path);
    }
    return PyUnicode_FromFormat("%U/%s", path, relative);
}

/* What is wrong with the content of a file starts with the file's name, and the tensor
 * concerned; an OSError shows its path by itself.  The path that the exception carries is
 * that of the file, where one is known. */
PyObject *mlsp_raise_under(const mlsp_state *state, const mls_status *st, PyObject *path,
                           const char *relative)
{
    mls_status named = *st;
    if (st->code == MLS_E_STOPPED && PyErr_Occurred()) {
        return NULL; /* the callback's own exception, or KeyboardInterrupt */
    }
    const bool about_file = st->code == MLS_E_FORMAT || st->code == MLS_E_CHECKSUM;
    const char *file = about_file && relative != NULL ? relative : "";
    if (strncmp(st->text, "tensor '", strlen("tensor '")) == 0) {
        /* the core named tensor and file: saying it twice would cut off the reason */
    } else if (st->name[0] != '\0') {
        PyOS_snprintf(named.text, sizeof named.text, "%.120s%s'%.60s': %.130s", file,
                      file[0] != '\0' ? ": " : "", st->name, st->text);
    } else if (file[0] != '\0') {
        PyOS_snprintf(named.text, sizeof named.text, "%.120s: %.195s", file, st->text);
    }
    PyObject *full = joined(path, relative);
    if (full != NULL) {
        mlsp_raise(state, &named, full);
        Py_DECREF(full);
    }
    return NULL;
}

/* ---- items ---- */

mls_tensor_id mlsp_id_of(mls_section section, mls_text key)
{
    size_t dot = key.length;
    while (section == MLS_OPTIM_STATE && dot > 0 && key.data[dot - 1] != '.') {
        dot--;
    }
    if (section == MLS_PARAMS || dot == 0) {
        return (mls_tensor_id){.section = section, .name = key};
    }
    return (mls_tensor_id){.section = section,
                           .name = {key.data, dot - 1},
                           .state = {key.data + dot, key.length - dot},
                           .has_state = true};
}

/* An array, held while the GIL is released; what is not packed has a view of its own. The
 * owner is what keeps the memory: the array, or a capsule that it gave out. */
typedef struct held {
    PyObject *owner; /* strong */
    mls_tensor *strided;
} held;

/* What a save holds on to. */
typedef struct gathering {
    const mlsp_state *state;
    PyObject *shard_type;              /* borrowed */
    PyObject *mine[MLS_SECTION_COUNT]; /* borrowed sets of keys; NULL: all whole arrays
                                          are ours */
    mls_layout layout;                 /* that whole arrays are cut by */
    size_t parts;                      /* of it */
    uint64_t rank, world_size;
    mlsp_items sections[MLS_SECTION_COUNT]; /* keep keys and values alive */
    mls_shard_item *items;
    held *holds; /* one for each item */
    size_t count, room;
    size_t *dims; /* shapes of all items; they hold places in it until all are known */
    signed char *axes; /* of states, at the places of their shapes; NULL: not asked for */
    size_t dims_used, dims_room;
} gathering;

/* Needs the GIL.  Accepts one that was left half done: `count` says how many arrays are
 * held. */
static void gathering_fini(gathering *g)
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
static mls_shard_item *add_item(gathering *g, const mls_tensor_id *id, mls_dtype dtype,
                                int rank, const size_t *dims, PyObject *owner)
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
    g->holds[g->count] = (held){.owner = Py_NewRef(owner)};
    g->items[g->count] = (mls_shard_item){.id = *id, .dtype = dtype, .rank = rank};
    return &g->items[g->count++];
}

/* Shapes follow one another in the order of the items.  Only now does the block stay
 * where it is, so only now may anybody point into it. */
static void point_to_shapes(gathering *g)
{
    const size_t *dims = g->dims;
    for (size_t i = 0; i < g->count; i++) {
        g->items[i].shape = dims;
        dims += g->items[i].rank;
    }
}

/* The memory of the last item: packed, or by a view of its own.  An array without
 * elements may have no address, which is not the same as having none. */
static int set_memory(gathering *g, mls_shard_item *item, const mls_tensor *memory,
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
static int check_rank(const gathering *g, const mls_tensor *t, const char *what)
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
static int said_shape(const gathering *g, PyObject *value, size_t *shape)
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
static const signed char *axes_of(const gathering *g, PyObject *model,
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
static int add_part(gathering *g, const mls_tensor_id *id, const mlsp_view *view,
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
static int add_whole(gathering *g, PyObject *model, const mls_tensor_id *id,
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
static int shard_number(const gathering *g, PyObject *shard, const char *name,
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

/* The layout and shape of a Shard; returns the rank, or -1 with an exception set. */
static int shard_shape(const gathering *g, PyObject *shard, mls_layout *layout,
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
static int check_part(const gathering *g, const mls_shard_item *item,
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
static int add_shard(gathering *g, const mls_tensor_id *id, const char *what,
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

static int add_value(gathering *g, PyObject *model, mls_section section,
                     const mlsp_item *entry)
{
    char what[MLS_NAME_BYTES];
    mlsp_view view;
    const mls_tensor_id id = mlsp_id_of(section, entry->name);
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
static int align_states(gathering *g, PyObject *model)
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

/* `dicts` are the model's and the optimizer's, either may be None.  Both are taken as
 * they are at one moment; code of others (an array's own) may change them afterwards. */
static int gather(gathering *g, PyObject *const *dicts)
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

/* {"path": ..., "bytes": ..., ...} */
static PyObject *written_dict(const mls_shards_written *w)
{
    char crc[MLS_CRC_DIGITS];
    mls_crc_to_digits(w->crc, crc);
    return Py_BuildValue(
        "{s:s,s:K,s:s#,s:K,s:K,s:K,s:K,s:K}", "path", w->path, "bytes",
        (unsigned long long)w->bytes, "crc32c", crc, (Py_ssize_t)MLS_CRC_DIGITS, "shards",
        (unsigned long long)w->shard_count, "data_bytes",
        (unsigned long long)w->data_bytes, "new_shards",
        (unsigned long long)w->new_shards, "new_bytes", (unsigned long long)w->new_bytes,
        "new_files", (unsigned long long)w->new_files);
}

/* With everything gathered: write it.  The folder is opened once, and everything happens
 * in that very folder, even if somebody moves it meanwhile. */
static PyObject *write_gathered(gathering *g, PyObject *path, mls_shard_job *job,
                                PyObject *callback)
{
    mlsp_progress progress;
    mls_shards_written written;
    mls_status st;
    mls_code code;
    if (mlsp_progress_init(&progress, callback) < 0 ||
        mlsp_open_folder(g->state, path, &job->folder) < 0) {
        return NULL;
    }
    job->items = g->items;
    job->count = g->count;
    job->kernels = g->state->kernels;
    job->crc = mlsp_crc_of(g->state);
    job->pool = g->state->pool;
    job->progress = &progress.core;
    mlsp_progress_begin(&progress);
    code = mls_shards_write(job, &written, &st);
    (void)close(job->folder);
    mlsp_progress_end(&progress);
    if (code != MLS_OK) {
        return mlsp_raise_under(g->state, &st, path, NULL);
    }
    return mlsp_progress_finish(&progress) < 0 ? NULL : written_dict(&written);
}

/* shards_write(folder, generation, (rank, world_size), (model, optimizer), Shard, mine,
 *              layout, before, pack_below, progress) -> dict */
static PyObject *shards_write(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlsp_state *state = mlsp_state_of(module);
    gathering g = {.state = state};
    mls_shard_job job = {0};
    mls_text generation;
    int64_t rank, world_size, pack_below;
    PyObject *dicts[MLS_SECTION_COUNT], *before, *result = NULL;
    mls_status st;
    if (mlsp_take_count("shards_write", 10, count) < 0 ||
        mlsp_take_text(args[1], "generation", &generation) < 0 ||
        !PyArg_ParseTuple(args[2], "LL", &rank, &world_size) ||
        !PyArg_ParseTuple(args[3], "OO", &dicts[0], &dicts[1]) ||
        (args[5] != Py_None &&
         !PyArg_ParseTuple(args[5], "OO", &g.mine[0], &g.mine[1])) ||
        mlsp_take_layout(state, args[6], &g.layout) < 0 ||
        mlsp_take_int64(state, args[8], "pack_below_bytes", &pack_below) < 0) {
        return NULL;
    }
    if (generation.length != MLS_GENERATION_DIGITS || rank < 0 || world_size <= rank ||
        pack_below < 0) {
        PyErr_SetString(PyExc_ValueError, pack_below < 0 ? "pack_below_bytes is negative"
                                                         : "no such rank or generation");
        return NULL;
    }
    g.shard_type = args[4];
    g.rank = (uint64_t)rank;
    g.world_size = (uint64_t)world_size;
    (void)mls_layout_parts(&g.layout, &g.parts, &st);
    job.generation = generation.data;
    job.rank = g.rank;
    job.world_size = g.world_size;
    job.pack_below = (uint64_t)pack_below;
    before = args[7];
    if ((before == Py_None ||
         mlsp_catalog_index(state, before, rank, &job.before) == 0) &&
        gather(&g, dicts) == 0) {
        result = write_gathered(&g, args[0], &job, args[9]);
    }
    gathering_fini(&g);
    return result;
}

/* ---- sealed texts and small files ---- */

/* seal(text) -> bytes: a text that starts with the seal, with its checksum filled in */
static PyObject *seal(PyObject *module, PyObject *text)
{
    char *bytes;
    Py_ssize_t length;
    const size_t start = sizeof MLS_SEAL_START - 1;
    if (PyBytes_AsStringAndSize(text, &bytes, &length) < 0) {
        return NULL;
    }
    if ((size_t)length < start || memcmp(bytes, MLS_SEAL_START, start) != 0) {
        PyErr_SetString(PyExc_ValueError, "the text must start with " MLS_SEAL_START);
        return NULL;
    }
    PyObject *sealed = PyBytes_FromStringAndSize(bytes, length);
    if (sealed != NULL) {
        mls_seal(PyBytes_AS_STRING(sealed), (size_t)length,
                 mlsp_crc_of(mlsp_state_of(module)));
    }
    return sealed;
}

/* seal_check(data, path): raise unless `data` is what was sealed */
static PyObject *seal_check(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    if (mlsp_take_count("seal_check", 2, count) < 0 ||
        PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    const mlsp_state *state = mlsp_state_of(module);
    return mls_seal_check(bytes, (size_t)length, mlsp_crc_of(state), &st) == MLS_OK
               ? Py_NewRef(Py_None)
               : mlsp_raise(state, &st, args[1]);
}

/* crc32c(data) -> int */
static PyObject *crc32c(PyObject *module, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const mls_crc_kernels *crc = mlsp_crc_of(mlsp_state_of(module));
    uint32_t found;
    Py_BEGIN_ALLOW_THREADS
        found = crc->update(0, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(found);
}

/* Write all of `data` in the place of `path`, durably: roots of checkpoints, which decide
 * what is there. */
static mls_code replace(const char *path, const char *data, size_t length, mls_status *st)
{
    mls_atomic_file file;
    mls_code code = mls_atomic_begin(path, &file, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_atomic_write(&file, data, length, 0, st);
    if (code != MLS_OK) {
        mls_atomic_abort(&file);
        return code;
    }
    return mls_atomic_commit(&file, st);
}

/* file_replace(path, data) */
static PyObject *file_replace(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    char *bytes;
    Py_ssize_t length;
    PyObject *encoded = NULL;
    mls_status st;
    mls_code code;
    if (mlsp_take_count("file_replace", 2, count) < 0 ||
        PyBytes_AsStringAndSize(args[1], &bytes, &length) < 0 ||
        !PyUnicode_FSConverter(args[0], &encoded)) {
        return NULL;
    }
    const char *to = PyBytes_AS_STRING(encoded);
    Py_BEGIN_ALLOW_THREADS
        code = replace(to, bytes, (size_t)length, &st);
    Py_END_ALLOW_THREADS
    Py_DECREF(encoded);
    return code == MLS_OK ? Py_NewRef(Py_None)
                          : mlsp_raise(mlsp_state_of(module), &st, args[0]);
}

/* folder_sync(path): make the names in a folder durable */
static PyObject *folder_sync(PyObject *module, PyObject *path)
{
    const mlsp_state *state = mlsp_state_of(module);
    mls_status st;
    int fd, reason;
    if (mlsp_open_folder(state, path, &fd) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        reason = mls_folder_sync(fd);
        (void)close(fd);
    Py_END_ALLOW_THREADS
    if (reason != 0) {
        mls_fail_os(&st, reason, "cannot bring the folder to the disk");
        return mlsp_raise(state, &st, path);
    }
    return Py_NewRef(Py_None);
}

PyMethodDef mlsp_shards_methods[] = {
    {"shards_write", MLSP_FASTCALL(shards_write),
     "shards_write(folder, generation, ranks, states, shard_type, mine, layout, before, "
     "pack_below, progress, /)\n--\n\nStore one rank's shards, durably."},
    {"seal", seal, METH_O, "seal(text, /)\n--\n\nFill in a text's own checksum."},
    {"seal_check", MLSP_FASTCALL(seal_check),
     "seal_check(data, path, /)\n--\n\nRaise unless a text is what was sealed."},
    {"crc32c", crc32c, METH_O, "crc32c(data, /)\n--\n\nCRC32C of a buffer."},
    {"file_replace", MLSP_FASTCALL(file_replace),
     "file_replace(path, data, /)\n--\n\nReplace a file, atomically and durably."},
    {"folder_sync", folder_sync, METH_O,
     "folder_sync(path, /)\n--\n\nMake the names in a folder durable."},
    {NULL, NULL, 0, NULL},
};
