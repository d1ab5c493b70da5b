/* py_catalog_load: tensors of a Catalog, or parts of them, as arrays.
 *
 * Both ways of loading go alike: choose tensors and parts; see that all of it is stored,
 * and that the files are there; make the arrays or view the caller's; read, without the
 * GIL.  Nothing that was found out about a file is believed when it is opened later.
 */
#include "catalog_load.h"

#include "mem.h"
#include "new_arrays.h"

#include <unistd.h>

/* ---- loading: what is wanted ---- */

/* Needs the GIL: arrays may die here.  Accepts a job that was left half done at any
 * point. */
void mlsp_load_fini(load_job *job)
{
    for (size_t i = 0; i < job->count; i++) {
        Py_XDECREF(job->wanted[i].key);
        Py_XDECREF(job->wanted[i].array);
        mls_free(job->wanted[i].strided);
    }
    if (job->folder >= 0) {
        (void)close(job->folder);
    }
    mls_free(job->wanted);
    mls_free(job->stored);
    mls_free(job->parts);
    mls_free(job->pieces);
}

/* How the parts are cut: by `layout`, part `index`; or, without one, as they were stored,
 * for a world of `world` ranks; or not at all, where that is 0. */
typedef struct cutting {
    bool has_layout;
    mls_layout layout;
    size_t index;
    size_t world;
} cutting;

/* (layout or None, index, world)
 *
 * Without a layout the world counts: 0 is everybody's whole state. */
static int take_cutting(const mlsp_state *state, PyObject *object, cutting *out)
{
    PyObject *layout;
    int64_t index, world;
    size_t parts;
    mls_status st;
    if (mlsp_take_tuple(object, "cuts", "OLL", &layout, &index, &world) < 0) {
        return -1;
    }
    *out = (cutting){.has_layout = layout != Py_None};
    if (out->has_layout && mlsp_take_layout(state, layout, &out->layout) < 0) {
        return -1;
    }
    (void)mls_layout_parts(&out->layout, &parts, &st);
    const int64_t most = out->has_layout ? (int64_t)parts : world > 0 ? world : 1;
    if (index < 0 || index >= most || world < 0) {
        PyErr_Format(PyExc_ValueError, "part %lld of %lld does not exist",
                     (long long)index, (long long)most);
        return -1;
    }
    out->index = (size_t)index;
    out->world = (size_t)world;
    return 0;
}

/* The wanted part of one tensor.  A layout that was given is that of the parameters;
 * states are cut along those axes of it that they have.  Without one, a tensor that was
 * cut once is cut in the same way for the new world, and one that was cut twice asks for
 * a layout: two numbers cannot be made of one. */
static int cut(const load_job *job, const cutting *how, wanted *w)
{
    const mls_index_shard *facts = w->tensor->facts;
    mls_layout layout = {0};
    size_t index = 0;
    mls_status st;
    if (how->has_layout) {
        mls_layout_project(&how->layout, how->index, facts->rank, facts->axes, &layout,
                           &index);
    } else if (how->world > 0 && facts->layout.count > 1) {
        mls_fail(&st, MLS_E_VALUE,
                 "it was cut in %d steps: say by layout= how this world is to cut it",
                 facts->layout.count);
        mls_status_name(&st, facts->id.name.data, facts->id.name.length);
        mlsp_raise_under(job->state, &st, job->path, NULL);
        return -1;
    } else if (how->world > 0 && facts->layout.count == 1) {
        layout = facts->layout;
        layout.steps[0].parts = how->world;
        index = how->index;
    }
    if (mls_layout_part(&layout, facts->rank, facts->shape, index, &w->part, &st) !=
        MLS_OK) {
        mlsp_raise_under(job->state, &st, job->path, NULL);
        return -1;
    }
    return 0;
}

/* Where the tensor of an id is, or SIZE_MAX: at `next`, where whoever asks for all of
 * them in their order finds each, or elsewhere. */
static size_t find(const mls_catalog *catalog, const mls_tensor_id *id, size_t next)
{
    return next < catalog->tensor_count &&
                   mls_tensor_id_compare(&catalog->tensors[next].facts->id, id) == 0
               ? next
               : mls_catalog_find(catalog, id);
}

/* Refuse a place for a tensor of another shape.  Parts of both may well look alike: the
 * first of two parts has three rows, be there five rows or six, and a run of elements has
 * no shape at all.  So what the owner believes of the whole is compared, not the part. */
static int refuse_shape(const load_job *job, const mls_index_shard *facts, int rank,
                        const size_t *shape)
{
    char have[64], want[64];
    mls_status st;
    mls_shape_text(have, sizeof have, facts->rank, facts->shape);
    mls_shape_text(want, sizeof want, rank, shape);
    mls_fail(&st, MLS_E_SHAPE, "the checkpoint has shape %s, the target %s", have, want);
    mls_status_name(&st, facts->id.name.data, facts->id.name.length);
    mls_status_expected(&st, "%s", want);
    mls_status_got(&st, "%s", have);
    mlsp_raise_under(job->state, &st, job->path, NULL);
    return -1;
}

/* The elements `begin` .. `end` of a whole tensor, in C order, as one who has several
 * tensors behind each other has them: where the cut falls into one is anybody's guess, so
 * that no layout says it.  None of them is a part too. */
static int take_run(const mls_index_shard *facts, int64_t begin, int64_t end,
                    mls_part *out)
{
    mls_part part = {.rank = facts->rank, .flat = true};
    size_t count = 1; /* of elements: the index was checked */
    for (int i = 0; i < facts->rank; i++) {
        part.length[i] = facts->shape[i];
        count *= facts->shape[i];
    }
    if (begin < 0 || end < begin || (uint64_t)end > count) {
        PyErr_Format(PyExc_ValueError, "no elements %lld to %lld of %zu",
                     (long long)begin, (long long)end, count);
        return -1;
    }
    part.begin = (size_t)begin;
    part.end = (size_t)end;
    *out = part;
    return 0;
}

/* The wanted part of one tensor whose place says what it is: (shape of the whole, layout,
 * index) or (shape of the whole, begin, end).
 *
 * The layout is the tensor's own, and is taken as it is: whoever has a state cut along
 * the axes of its parameter has done so already.  How the tensor was cut when it was
 * stored plays no part here. */
static int take_place(const load_job *job, PyObject *place, wanted *w)
{
    const mls_index_shard *facts = w->tensor->facts;
    size_t shape[MLS_LAYOUT_RANK];
    mls_layout layout;
    int64_t begin, end;
    mls_status st;
    if (!PyTuple_Check(place) || PyTuple_GET_SIZE(place) != 3) {
        PyErr_SetString(PyExc_TypeError, "a place is a tuple of three");
        return -1;
    }
    PyObject *how = PyTuple_GET_ITEM(place, 1), *last = PyTuple_GET_ITEM(place, 2);
    const int rank = mlsp_take_shape(job->state, PyTuple_GET_ITEM(place, 0), shape);
    if (rank < 0 || mlsp_take_int64(job->state, last, "index or end", &end) < 0) {
        return -1;
    }
    const size_t bytes = (size_t)rank * sizeof *shape;
    if (rank != facts->rank || memcmp(shape, facts->shape, bytes) != 0) {
        return refuse_shape(job, facts, rank, shape);
    }
    if (!PyTuple_Check(how)) {
        return mlsp_take_int64(job->state, how, "begin", &begin) < 0
                   ? -1
                   : take_run(facts, begin, end, &w->part);
    }
    if (mlsp_take_layout(job->state, how, &layout) < 0) {
        return -1;
    }
    /* a negative index is a large one, of which there is no part either */
    if (mls_layout_part(&layout, facts->rank, facts->shape, (size_t)end, &w->part, &st) !=
        MLS_OK) {
        mlsp_raise_under(job->state, &st, job->path, NULL);
        return -1;
    }
    return 0;
}

/* Look up all keys of a list, in its order, which becomes that of the result.  `places`
 * has one for each, or is NULL: then all are cut alike. */
static int choose(load_job *job, mls_section section, PyObject *keys, const cutting *how,
                  PyObject *places)
{
    const Py_ssize_t count = PyList_GET_SIZE(keys);
    size_t at = SIZE_MAX;
    /* what is not counted is not looked at, and a part takes hundreds of bytes: so there
     * are no zeros to begin with, here and in plan */
    job->wanted = mls_realloc(NULL, (size_t)count, sizeof *job->wanted);
    if (job->wanted == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        mls_text text;
        wanted *w = &job->wanted[job->count];
        PyObject *key = PyList_GET_ITEM(keys, i);
        if (mlsp_take_text(key, "tensor name", &text) < 0) {
            return -1;
        }
        const mls_tensor_id id = mlsp_id_of(section, text);
        at = find(&job->catalog->catalog, &id, at + 1); /* begins with 0 */
        if (at == SIZE_MAX) {
            PyErr_Format(job->state->errors[MLSP_ERROR_NOT_FOUND],
                         "Tensor '%.200U' not found in checkpoint", key);
            return -1;
        }
        w->tensor = &job->catalog->catalog.tensors[at];
        if ((places == NULL ? cut(job, how, w)
                            : take_place(job, PyList_GET_ITEM(places, i), w)) < 0) {
            return -1;
        }
        w->key = Py_NewRef(key);
        w->array = NULL;
        w->data = NULL;
        w->strided = NULL;
        w->first = w->count = 0;
        w->long_zeros = false;
        job->count++;
        job->piece_count += w->tensor->places;
    }
    return 0;
}

/* ---- loading: what must be read ---- */

/* Whether memory that is zero to begin with saves work: where what was never stored lies
 * in ranges of many pages, which are then not even touched.  Between short ones all pages
 * are touched all the same, and zeroing them beforehand would be done for nothing. */
static bool has_long_zeros(const load_job *job, const wanted *w)
{
    enum { LONG = 64 << 10 };
    size_t bytes = 0, count = 0;
    for (size_t j = w->first; j < w->first + w->count; j++) {
        const mls_stored_shard *stored = &job->stored[j];
        for (size_t i = 0; stored->file == NULL && i < stored->visible_count; i++) {
            bytes += stored->visible[i].count * stored->item_bytes; /* of a shard's */
            count++;
        }
    }
    return count > 0 && bytes / count >= LONG;
}

/* Without the GIL: the pieces of all that is wanted, and whether their files are what was
 * recorded.  `*file` is the one that is not. */
static mls_code find_pieces(load_job *job, const char **file, mls_status *st)
{
    size_t used = 0;
    const char *seen = NULL;
    *file = NULL;
    for (size_t i = 0; i < job->count; i++) {
        wanted *w = &job->wanted[i];
        const mls_piece_room room = {job->stored + used, job->parts + used,
                                     job->pieces + used};
        const mls_code code = mls_catalog_pieces(&job->catalog->catalog, w->tensor,
                                                 &w->part, NULL, &room, &w->count, st);
        if (code != MLS_OK) {
            return code;
        }
        w->first = used;
        used += w->count;
        w->long_zeros = has_long_zeros(job, w);
        for (size_t j = w->first; j < used; j++) {
            const mls_stored_shard *stored = &job->stored[j];
            if (stored->file != NULL && stored->file != seen) {
                seen = *file = stored->file;
                if (mls_file_expect(job->folder, seen, stored->file_bytes, st) !=
                    MLS_OK) {
                    return st->code;
                }
            }
        }
    }
    job->piece_count = used;
    return MLS_OK;
}

/* Plan the reading, before any memory for its result is asked for: an index may claim
 * terabytes, and only its files can back that up. */
static int plan(load_job *job)
{
    mls_status st;
    mls_code code;
    const char *file;
    job->stored = mls_realloc(NULL, job->piece_count, sizeof *job->stored);
    job->parts = mls_realloc(NULL, job->piece_count, sizeof *job->parts);
    job->pieces = mls_realloc(NULL, job->piece_count, sizeof *job->pieces);
    if (job->stored == NULL || job->parts == NULL || job->pieces == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
        code = find_pieces(job, &file, &st);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        mlsp_raise_under(job->state, &st, job->path, file);
        return -1;
    }
    return 0;
}

/* Say where the bytes of one tensor go: all its pieces lay into the same part. */
static void place(load_job *job, const wanted *w, unsigned char *data)
{
    for (size_t j = w->first; j < w->first + w->count; j++) {
        job->pieces[j].data = data;
    }
}

/* ---- loading: new arrays ---- */

/* Bytes of a new array; none where one of zeros pays. */
static size_t new_bytes(const void *context, size_t index)
{
    const wanted *w = &((const load_job *)context)->wanted[index];
    const size_t count = mls_part_count(&w->part); /* its bytes fit: mls_index_fits */
    return w->long_zeros ? 0 : count * mls_dtype_of(w->tensor->facts->dtype)->item_bytes;
}

/* A new array for a part, in the room for all of them or, where `alone`, by itself. */
static PyObject *new_array(const load_job *job, size_t index, mlsp_room *room, bool alone)
{
    const wanted *w = &job->wanted[index];
    const mls_dtype dtype = w->tensor->facts->dtype;
    size_t dims[MLS_LAYOUT_RANK];
    const int rank = mlsp_part_dims(&w->part, dims);
    return alone || w->long_zeros ? mlsp_array_new(room, dtype, rank, dims, w->long_zeros)
                                  : mlsp_room_array(room, index, dtype, rank, dims);
}

/* The whole of a file, mapped once for all tensors in it; borrowed from the dict.  The
 * arrays keep the capsules, and these the mappings, when the dict is gone. */
static PyObject *map_file(load_job *job, PyObject *capsules, const mls_index_file *file)
{
    mls_status st;
    mls_mapping mapping;
    int fd;
    uint64_t length;
    PyObject *capsule = PyDict_GetItemString(capsules, file->path);
    if (capsule != NULL) {
        return capsule;
    }
    mls_code code = mls_file_open_at(job->folder, file->path, &fd, &length, &st);
    if (code == MLS_OK) {
        code = length == file->bytes
                   ? mls_mapping_init(&mapping, fd, length, &st)
                   : mls_fail_at(&st, length, "the file's length changed meanwhile");
        (void)close(fd);
    }
    if (code != MLS_OK) {
        return mlsp_raise_under(job->state, &st, job->path, file->path);
    }
    capsule = mlsp_mapping_capsule(&mapping);
    if (capsule == NULL || mlsp_dict_set(capsules, file->path, capsule) < 0) {
        Py_XDECREF(capsule);
        return NULL;
    }
    Py_DECREF(capsule); /* the dict has it */
    return capsule;
}

/* The part as a view of its file, where it lies there in one run; None where it does
 * not.  A new reference. */
static PyObject *mapped_array(load_job *job, const wanted *w, PyObject *capsules,
                              mlsp_room *room)
{
    uint64_t offset;
    const mls_catalog_shard *run =
        mls_catalog_run(&job->catalog->catalog, w->tensor, &w->part, &offset);
    if (run == NULL) {
        return Py_NewRef(Py_None);
    }
    PyObject *capsule = map_file(job, capsules, &run->index->files[run->shard->file]);
    if (capsule == NULL) {
        return NULL;
    }
    size_t dims[MLS_LAYOUT_RANK];
    const int rank = mlsp_part_dims(&w->part, dims);
    return mlsp_array_over(room, w->tensor->facts->dtype, rank, dims,
                           mlsp_mapping_data(capsule) + offset, capsule);
}

/* Zeros that a new array begins with go nowhere. */
static void keep_zeros(load_job *job, const wanted *w)
{
    for (size_t j = w->first; w->long_zeros && j < w->first + w->count; j++) {
        if (job->stored[j].file == NULL) {
            job->pieces[j].data = NULL;
        }
    }
}

/* Before there are arrays: which pieces will go anywhere. */
static void foresee_places(load_job *job)
{
    for (size_t i = 0; i < job->count; i++) {
        const wanted *w = &job->wanted[i];
        place(job, w, (unsigned char *)(uintptr_t)w); /* any address but NULL */
        keep_zeros(job, w);
    }
}

/* Arrays for all that is wanted, as {key: array}; what is mapped needs no reading, so its
 * pieces are left out and those of the others move up.
 *
 * Each goes into the dict at once, while both of them are in the cache.  The job keeps
 * the arrays as well: their memory must last while it is read to, whoever may get hold of
 * the dict meanwhile, and also where one of them cannot be made.  `made` is told how many
 * pieces have their places; NULL: nobody waits. */
static PyObject *make_arrays(load_job *job, bool maps, mls_gate *made)
{
    size_t used = 0;
    PyObject *result = PyDict_New(), *capsules = maps ? PyDict_New() : NULL;
    mlsp_room room = {new_bytes, job, job->count, NULL, 0, 0, {NULL}};
    bool good = result != NULL && (!maps || capsules != NULL);
    enum { TOGETHER = 64 }; /* told of by one call */
    for (size_t i = 0; good && i < job->count; i++) {
        wanted *w = &job->wanted[i];
        PyObject *array =
            maps ? mapped_array(job, w, capsules, &room) : Py_NewRef(Py_None);
        const bool read = array == Py_None;
        if (read) {
            Py_DECREF(array);
            array = new_array(job, i, &room, maps);
        }
        w->array = array;
        if (array != NULL && read) {
            place(job, w, PyArray_DATA((PyArrayObject *)array));
            keep_zeros(job, w);
            memmove(job->pieces + used, job->pieces + w->first,
                    w->count * sizeof *job->pieces);
            used += w->count;
        }
        good = array != NULL && PyDict_SetItem(result, w->key, array) == 0;
        if (made != NULL && i % TOGETHER == 0) {
            mls_gate_open(made, used);
        }
    }
    job->piece_count = used;
    mlsp_room_fini(&room);
    Py_XDECREF(capsules);
    if (!good) {
        Py_CLEAR(result);
    }
    return result;
}

/* ---- loading: reading ---- */

/* Arrays that are made while the first of them are read to. */
typedef struct making {
    load_job *job;
    mlsp_progress *progress;
    PyObject *result; /* NULL with an exception set, or not called yet */
} making;

/* In the calling thread, which takes the GIL back for it. */
static bool make_meanwhile(void *context, mls_gate *made)
{
    making *m = context;
    mlsp_progress_end(m->progress);
    m->result = make_arrays(m->job, false, made);
    mlsp_progress_begin(m->progress);
    return m->result != NULL;
}

/* Read all pieces, checksummed while they are in the cache; `*result` is made meanwhile,
 * where that is not NULL.  Which file a failure concerns is known for all but those of
 * our own. */
static int read_all(load_job *job, bool verify, PyObject *callback, PyObject **result)
{
    mlsp_progress progress;
    mls_status st;
    size_t failed = 0;
    making m = {job, &progress, NULL};
    const mls_maker maker = {make_meanwhile, &m};
    if (mlsp_progress_init(&progress, callback) < 0) {
        return -1;
    }
    const mls_read_request request = {
        .folder = job->folder,
        .pieces = job->pieces,
        .count = job->piece_count,
        .crc = verify ? mlsp_crc_of(job->state) : NULL,
        .codecs = mlsp_codecs(),
        .pool = job->state->pool,
        .progress = &progress.core,
        .maker = result == NULL ? NULL : &maker,
    };
    mlsp_progress_begin(&progress);
    const mls_code code = mls_shards_read(&request, &failed, &st);
    mlsp_progress_end(&progress);
    if (result != NULL) {
        *result = m.result;
    }
    if (code != MLS_OK) {
        const bool about = code != MLS_E_MEMORY && code != MLS_E_STOPPED;
        mlsp_raise_under(job->state, &st, job->path,
                         about ? job->pieces[failed].shard->file : NULL);
        return -1;
    }
    return mlsp_progress_finish(&progress);
}

/* Arrays first: what is mapped is not read. */
static PyObject *map_and_read(load_job *job, bool verify, PyObject *callback)
{
    PyObject *result = make_arrays(job, true, NULL);
    if (result != NULL && read_all(job, verify, callback, NULL) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Arrays while the first of them are read to: their memory must be had for each, and that
 * takes a while where there are many. */
static PyObject *make_and_read(load_job *job, bool verify, PyObject *callback)
{
    PyObject *result = NULL;
    foresee_places(job);
    if (read_all(job, verify, callback, &result) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* The arguments that all ways of loading begin with, and what is wrong with them before
 * any file is looked at.  `cuts` is one for all tensors, or a list of places. */
int mlsp_load_begin(load_job *job, PyObject *object, PyObject *path, PyObject *section,
                    PyObject *keys, PyObject *cuts)
{
    mls_section which;
    cutting how;
    PyObject *places = PyList_Check(cuts) ? cuts : NULL;
    *job = (load_job){.object = object,
                      .catalog = (catalog_object *)object,
                      .state = mlsp_catalog_state(object),
                      .path = path,
                      .folder = -1};
    if (!PyList_Check(keys)) {
        PyErr_SetString(PyExc_TypeError, "keys must be a list");
        return -1;
    }
    if (places != NULL && PyList_GET_SIZE(places) != PyList_GET_SIZE(keys)) {
        PyErr_SetString(PyExc_ValueError, "a place is wanted for each key");
        return -1;
    }
    return mlsp_take_section(job->state, section, &which) < 0 ||
                   (places == NULL && take_cutting(job->state, cuts, &how) < 0) ||
                   choose(job, which, keys, &how, places) < 0
               ? -1
               : 0;
}

/* The same, and all else that can be found wrong before there is anything to undo. */
static int load_init(load_job *job, PyObject *object, PyObject *path, PyObject *section,
                     PyObject *keys, PyObject *cuts)
{
    return mlsp_load_begin(job, object, path, section, keys, cuts) < 0 ||
                   mlsp_open_folder(job->state, path, &job->folder) < 0 || plan(job) < 0
               ? -1
               : 0;
}

/* load(folder, section, keys, (layout, index, world), verify, mmap, progress)
 *     -> {key: array} */
PyObject *mlsp_catalog_load(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    load_job job = {.folder = -1};
    PyObject *result = NULL;
    if (mlsp_take_count("load", 7, count) < 0) {
        return NULL;
    }
    const int verify = PyObject_IsTrue(args[4]), maps = PyObject_IsTrue(args[5]);
    if (verify >= 0 && maps >= 0 &&
        load_init(&job, object, args[0], args[1], args[2], args[3]) == 0) {
        result = maps ? map_and_read(&job, verify != 0, args[6])
                      : make_and_read(&job, verify != 0, args[6]);
    }
    mlsp_load_fini(&job);
    return result;
}

/* ---- loading: into arrays that exist ---- */

/* Say how a target differs from what would go there, with both sides as the user has
 * them. */
static void refuse_target(const load_job *job, const mls_index_shard *facts, int rank,
                          const size_t *dims, const mls_tensor *t)
{
    char have[64], want[64];
    mls_status st;
    mls_shape_text(have, sizeof have, rank, dims);
    mls_shape_text(want, sizeof want, t->rank, t->shape);
    mls_fail(&st, MLS_E_SHAPE, "the checkpoint has %s of %s, the target is %s of %s",
             mls_dtype_of(facts->dtype)->name, have, mls_dtype_of(t->dtype)->name, want);
    mls_status_name(&st, facts->id.name.data, facts->id.name.length);
    mls_status_expected(&st, "%s", want);
    mls_status_got(&st, "%s", have);
    mlsp_raise_under(job->state, &st, job->path, NULL);
}

/* Whether a target is what goes there: nothing is converted, since a state that was
 * loaded in another precision is not the state that was saved. */
static bool fits(const load_job *job, const wanted *w, const mls_tensor *t)
{
    size_t dims[MLS_LAYOUT_RANK];
    const mls_index_shard *facts = w->tensor->facts;
    const int rank = mlsp_part_dims(&w->part, dims);
    bool same = t->rank == rank && t->dtype == facts->dtype;
    for (int i = 0; same && i < rank; i++) {
        same = t->shape[i] == dims[i];
    }
    if (!same) {
        refuse_target(job, facts, rank, dims, t);
    }
    return same;
}

/* Keep what is needed of a view: where it is packed, that is little. */
static int keep_target(wanted *w, mlsp_view *view)
{
    const mls_tensor *t = &view->tensor;
    if (!t->swapped && mls_tensor_is_contiguous(t)) {
        w->data = t->data;
    } else if ((w->strided = mls_alloc(1, sizeof *w->strided)) == NULL) {
        PyErr_NoMemory();
        return -1;
    } else {
        *w->strided = *t;
    }
    w->array = view->owner; /* takes the view's reference */
    view->owner = NULL;
    return 0;
}

/* View a target; what is to be said of one that is none is only made up for that. */
static int view_array(const load_job *job, const wanted *w, PyObject *array,
                      mlsp_view *out)
{
    char what[MLS_NAME_BYTES];
    const mls_text name = w->tensor->facts->id.name;
    if (mlsp_view_quickly(job->state, array, true, out)) {
        return 0;
    }
    PyOS_snprintf(what, sizeof what, "target '%.*s'",
                  (int)(name.length < 120 ? name.length : 120),
                  name.data == NULL ? "" : name.data);
    return mlsp_view_writable(job->state, array, what, out);
}

/* View the target of one tensor, and see that it is what its part is.  The array is held
 * by its owner's reference from then on. */
static int view_target(load_job *job, wanted *w, PyObject *targets)
{
    mlsp_view view;
    PyObject *array = NULL;
    if (mlsp_dict_get(targets, w->key, &array) != 1) {
        if (!PyErr_Occurred()) {
            PyErr_SetObject(PyExc_KeyError, w->key);
        }
        return -1;
    }
    int failed = view_array(job, w, array, &view);
    Py_DECREF(array);
    if (failed == 0) {
        failed = fits(job, w, &view.tensor) ? keep_target(w, &view) : -1;
        mlsp_view_release(&view);
    }
    return failed;
}

/* Where targets are not packed, bytes go by way of new memory.  `*out` has one block for
 * each of them, else NULL. */
static int place_targets(load_job *job, unsigned char **blocks)
{
    for (size_t i = 0; i < job->count; i++) {
        wanted *w = &job->wanted[i];
        size_t bytes = 0;
        if (w->strided == NULL) {
            place(job, w, w->data);
            continue;
        }
        (void)mls_tensor_bytes(w->strided, &bytes); /* it lies in memory */
        blocks[i] = mls_alloc(bytes, 1);
        if (blocks[i] == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        place(job, w, blocks[i]);
    }
    return 0;
}

/* Bring what came by way of new memory to its strided place, in its own byte order. */
static void scatter(load_job *job, unsigned char *const *blocks)
{
    for (size_t i = 0; i < job->count; i++) {
        const mls_tensor *t = job->wanted[i].strided;
        mls_tensor packed;
        mls_status ignored;
        if (t != NULL && mls_tensor_init(&packed, blocks[i], t->dtype, t->rank, t->shape,
                                         &ignored) == MLS_OK) {
            mls_copy(job->state->kernels, t, &packed, mls_cached());
        }
    }
}

/* View all targets, each of which then is what goes there.  Nothing is read before all of
 * them were looked at. */
static int view_targets(load_job *job, PyObject *targets)
{
    if (!PyDict_Check(targets)) {
        PyErr_SetString(PyExc_TypeError, "targets must be a dict");
        return -1;
    }
    for (size_t i = 0; i < job->count; i++) {
        if (view_target(job, &job->wanted[i], targets) < 0) {
            return -1;
        }
    }
    return 0;
}

/* fits(folder, section, keys, cutting, targets)
 *
 * What load_into would refuse for the targets' sake, without a look at files: whoever
 * fills several sections, or goes on together with other ranks, asks for all of them
 * before the first is changed.  The folder is for the text of errors. */
PyObject *mlsp_catalog_fits(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    load_job job = {.folder = -1};
    if (mlsp_take_count("fits", 5, count) < 0) {
        return NULL;
    }
    const bool good =
        mlsp_load_begin(&job, object, args[0], args[1], args[2], args[3]) == 0 &&
        view_targets(&job, args[4]) == 0;
    mlsp_load_fini(&job);
    return good ? Py_NewRef(Py_None) : NULL;
}

/* load_into(folder, section, keys, cutting, targets, verify, progress)
 *
 * `cutting` is (layout, index, world) for all tensors, or a list with a place for each.
 * `targets` are writable arrays or tensors by key; where they are not packed, bytes go by
 * way of new memory. */
PyObject *mlsp_catalog_load_into(PyObject *object, PyObject *const *args,
                                 Py_ssize_t count)
{
    load_job job = {.folder = -1};
    unsigned char **blocks = NULL;
    bool good = false;
    if (mlsp_take_count("load_into", 7, count) < 0) {
        return NULL;
    }
    const int verify = PyObject_IsTrue(args[5]);
    if (verify < 0 || load_init(&job, object, args[0], args[1], args[2], args[3]) < 0 ||
        view_targets(&job, args[4]) < 0) {
        goto done;
    }
    blocks = mls_alloc(job.count, sizeof *blocks);
    if (blocks == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (place_targets(&job, blocks) == 0 &&
        read_all(&job, verify != 0, args[6], NULL) == 0) {
        scatter(&job, blocks);
        good = true;
    }
done:
    for (size_t i = 0; blocks != NULL && i < job.count; i++) {
        mls_free(blocks[i]);
    }
    mls_free(blocks);
    mlsp_load_fini(&job);
    return good ? Py_NewRef(Py_None) : NULL;
}
