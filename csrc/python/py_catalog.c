/* py_catalog: what a checkpoint holds, read from its indexes, and how it is loaded.
 *
 * A Catalog is immutable once it exists, so any number of threads may use it.  Loading
 * goes: choose tensors and parts, see that all of it is stored and that the files are
 * there, make or view the arrays (with the GIL), read (without).
 */
#include "checkpoint.h"

#include "catalog.h"
#include "fsio.h"
#include "mem.h"
#include "seal.h"
#include "size.h"
#include "verify.h"

#include <unistd.h>

typedef struct catalog_object {
    PyObject_HEAD mls_index *indexes;
    size_t index_count;
    mls_catalog catalog;
} catalog_object;

/* ---- life ---- */

static void catalog_dealloc(PyObject *object)
{
    catalog_object *self = (catalog_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    mls_catalog_fini(&self->catalog);
    for (size_t i = 0; i < self->index_count; i++) {
        mls_index_fini(&self->indexes[i]);
    }
    mls_free(self->indexes);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Parse one index; `name` (borrowed) is that of its file, for errors. */
static int add_index(const mlsp_state *state, catalog_object *self, PyObject *text,
                     PyObject *name)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    mls_code code;
    const mls_crc_kernels *crc = mlsp_crc_of(state);
    mls_index *index = &self->indexes[self->index_count];
    if (PyBytes_AsStringAndSize(text, &bytes, &length) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
        code = mls_index_parse(bytes, (size_t)length, crc, index, &st);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        mlsp_raise_under(state, &st, name, NULL);
        return -1;
    }
    self->index_count++;
    return 0;
}

/* All indexes, and the catalog over them. */
static int fill(const mlsp_state *state, catalog_object *self, PyObject *texts,
                PyObject *names)
{
    const size_t count = (size_t)PyTuple_GET_SIZE(texts);
    mls_status st;
    mls_code code;
    self->indexes = mls_alloc(count, sizeof *self->indexes);
    const mls_index **pointers = mls_alloc(count, sizeof *pointers);
    int failed = -1;
    if (self->indexes == NULL || pointers == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (size_t i = 0; i < count; i++) {
        if (add_index(state, self, PyTuple_GET_ITEM(texts, (Py_ssize_t)i),
                      PyTuple_GET_ITEM(names, (Py_ssize_t)i)) < 0) {
            goto done;
        }
        pointers[i] = &self->indexes[i];
    }
    Py_BEGIN_ALLOW_THREADS
        code = mls_catalog_init(&self->catalog, pointers, count, &st);
    Py_END_ALLOW_THREADS
    failed = code == MLS_OK ? 0 : -1;
    if (failed < 0) {
        mlsp_raise_under(state, &st, count > 0 ? PyTuple_GET_ITEM(names, 0) : Py_None,
                         NULL);
    }
done:
    mls_free(pointers);
    return failed;
}

/* Catalog((text, ...), (file, ...)) */
static PyObject *catalog_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *texts, *names, *module = mlsp_module_of(type);
    if (module == NULL ||
        !PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &texts, &PyTuple_Type, &names)) {
        return NULL;
    }
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Catalog takes positional arguments only");
        return NULL;
    }
    if (PyTuple_GET_SIZE(texts) != PyTuple_GET_SIZE(names)) {
        PyErr_SetString(PyExc_ValueError, "a name is wanted for each text");
        return NULL;
    }
    PyObject *self = type->tp_alloc(type, 0);
    if (self != NULL &&
        fill(mlsp_state_of(module), (catalog_object *)self, texts, names) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

int mlsp_catalog_index(const mlsp_state *state, PyObject *catalog, int64_t rank,
                       const mls_index **out)
{
    if (!PyObject_TypeCheck(catalog, state->catalog_type)) {
        PyErr_SetString(PyExc_TypeError, "a Catalog is wanted");
        return -1;
    }
    catalog_object *self = (catalog_object *)catalog;
    *out = NULL;
    for (size_t i = 0; i < self->index_count; i++) {
        if (self->indexes[i].rank == (uint64_t)rank) {
            *out = &self->indexes[i];
        }
    }
    return 0;
}

/* The module's state, from an object of ours. */
static const mlsp_state *state_of(PyObject *self)
{
    return mlsp_state_of(mlsp_module_of(Py_TYPE(self)));
}

/* ---- what it holds ---- */

/* New reference to the key under which a state dict has a tensor. */
static PyObject *key_of(const mls_tensor_id *id)
{
    PyObject *name = mlsp_str_of(id->name);
    if (name == NULL || !id->has_state) {
        return name;
    }
    PyObject *state = mlsp_str_of(id->state);
    PyObject *key = state == NULL ? NULL : PyUnicode_FromFormat("%U.%U", name, state);
    Py_DECREF(name);
    Py_XDECREF(state);
    return key;
}

/* A section's number as an argument. */
static int take_section(const mlsp_state *state, PyObject *object, mls_section *out)
{
    int64_t number;
    if (mlsp_take_int64(state, object, "section", &number) < 0) {
        return -1;
    }
    if (number < 0 || number >= MLS_SECTION_COUNT) {
        PyErr_SetString(PyExc_ValueError, "no such section");
        return -1;
    }
    *out = (mls_section)number;
    return 0;
}

/* keys(section) -> [key, ...] */
static PyObject *catalog_keys(PyObject *object, PyObject *argument)
{
    const catalog_object *self = (catalog_object *)object;
    mls_section section;
    if (take_section(state_of(object), argument, &section) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->catalog.tensor_count; i++) {
        const mls_tensor_id *id = &self->catalog.tensors[i].facts->id;
        if (id->section == section) {
            PyObject *key = key_of(id);
            if (key == NULL || PyList_Append(list, key) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(key);
        }
    }
    return list;
}

/* New reference to a tuple of sizes. */
static PyObject *sizes_tuple(const size_t *sizes, int count)
{
    const mls_facts facts = {.rank = count, .shape = sizes};
    return mlsp_shape_tuple(&facts);
}

/* New reference to None, or to a tuple of the axes of a state's parameter. */
static PyObject *axes_tuple(const mls_index_shard *shard)
{
    PyObject *tuple = shard->axes == NULL ? Py_NewRef(Py_None) : PyTuple_New(shard->rank);
    for (int i = 0; tuple != NULL && shard->axes != NULL && i < shard->rank; i++) {
        PyObject *axis = shard->axes[i] == MLS_NO_AXIS ? Py_NewRef(Py_None)
                                                       : PyLong_FromLong(shard->axes[i]);
        if (axis == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, i, axis);
        }
    }
    return tuple;
}

/* A tensor as a tuple: section, key, parameter, state or None, dtype, shape, layout, axes
 * or None, shards that are there, their bytes, the highest version, tier or None. */
static PyObject *tensor_tuple(const catalog_object *self, const mls_catalog_tensor *t)
{
    const mls_index_shard *facts = t->facts;
    uint64_t bytes = 0, version = 0;
    for (size_t i = 0; i < t->count; i++) {
        const mls_index_shard *shard = self->catalog.shards[t->from + i].shard;
        bytes += shard->bytes;
        version = shard->version > version ? shard->version : version;
    }
    const char *tier = facts->tier == MLS_TIER_NONE ? NULL : mls_tier_name(facts->tier);
    PyObject *state =
        facts->id.has_state ? mlsp_str_of(facts->id.state) : Py_NewRef(Py_None);
    return Py_BuildValue(
        "(sNNNsNNNnKKz)", mls_section_name(facts->id.section), key_of(&facts->id),
        mlsp_str_of(facts->id.name), state, mls_dtype_of(facts->dtype)->name,
        sizes_tuple(facts->shape, facts->rank), mlsp_layout_tuple(&facts->layout),
        axes_tuple(facts), (Py_ssize_t)t->count, (unsigned long long)bytes,
        (unsigned long long)version, tier);
}

/* tensors() -> [tuple, ...] */
static PyObject *catalog_tensors(PyObject *object, PyObject *unused)
{
    const catalog_object *self = (catalog_object *)object;
    (void)unused;
    PyObject *list = PyList_New((Py_ssize_t)self->catalog.tensor_count);
    for (size_t i = 0; list != NULL && i < self->catalog.tensor_count; i++) {
        PyObject *tuple = tensor_tuple(self, &self->catalog.tensors[i]);
        if (tuple == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, tuple);
        }
    }
    return list;
}

/* A shard as a tuple: section, key, part, shape of the part, rank, file, offset, bytes,
 * CRC32C, version. */
static PyObject *shard_tuple(const mls_index *index, const mls_index_shard *shard)
{
    size_t dims[MLS_LAYOUT_RANK];
    char crc[MLS_CRC_DIGITS];
    const mls_part part = mls_index_part(shard);
    const int rank = mlsp_part_dims(&part, dims);
    mls_crc_to_digits(shard->crc, crc);
    return Py_BuildValue("(sNnNKsKns#K)", mls_section_name(shard->id.section),
                         key_of(&shard->id), (Py_ssize_t)shard->part,
                         sizes_tuple(dims, rank), (unsigned long long)index->rank,
                         index->files[shard->file].path,
                         (unsigned long long)shard->offset, (Py_ssize_t)shard->bytes, crc,
                         (Py_ssize_t)MLS_CRC_DIGITS, (unsigned long long)shard->version);
}

/* shards() -> [tuple, ...], of all ranks */
static PyObject *catalog_shards(PyObject *object, PyObject *unused)
{
    const catalog_object *self = (catalog_object *)object;
    (void)unused;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->index_count; i++) {
        const mls_index *index = &self->indexes[i];
        for (size_t j = 0; list != NULL && j < index->shard_count; j++) {
            PyObject *tuple = shard_tuple(index, &index->shards[j]);
            if (tuple == NULL || PyList_Append(list, tuple) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(tuple);
        }
    }
    return list;
}

/* files() -> {path: bytes}, of all ranks */
static PyObject *catalog_files(PyObject *object, PyObject *unused)
{
    const catalog_object *self = (catalog_object *)object;
    (void)unused;
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < self->index_count; i++) {
        const mls_index *index = &self->indexes[i];
        for (size_t j = 0; dict != NULL && j < index->file_count; j++) {
            PyObject *bytes = PyLong_FromUnsignedLongLong(index->files[j].bytes);
            if (bytes == NULL ||
                PyDict_SetItemString(dict, index->files[j].path, bytes) < 0) {
                Py_CLEAR(dict);
            }
            Py_XDECREF(bytes);
        }
    }
    return dict;
}

/* heads() -> [(generation, rank, world_size, shards), ...] */
static PyObject *catalog_heads(PyObject *object, PyObject *unused)
{
    const catalog_object *self = (catalog_object *)object;
    (void)unused;
    PyObject *list = PyList_New((Py_ssize_t)self->index_count);
    for (size_t i = 0; list != NULL && i < self->index_count; i++) {
        const mls_index *index = &self->indexes[i];
        PyObject *tuple = Py_BuildValue(
            "(sKKn)", index->generation, (unsigned long long)index->rank,
            (unsigned long long)index->world_size, (Py_ssize_t)index->shard_count);
        if (tuple == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, tuple);
        }
    }
    return list;
}

/* ---- loading: what is wanted ---- */

/* A tensor, the part of it that is wanted, and where it goes. */
typedef struct wanted {
    const mls_catalog_tensor *tensor;
    mls_part part;
    PyObject *array;     /* strong: the result, or the target */
    mlsp_view view;      /* of a target */
    size_t first, count; /* of the job's pieces */
} wanted;

typedef struct load_job {
    PyObject *object; /* the Catalog, borrowed */
    const catalog_object *catalog;
    const mlsp_state *state;
    PyObject *path;
    int folder;
    wanted *wanted;
    size_t count;
    mls_stored_shard *stored;
    mls_piece *pieces;
    size_t piece_count;
} load_job;

static void load_fini(load_job *job)
{
    for (size_t i = 0; i < job->count; i++) {
        Py_XDECREF(job->wanted[i].array);
        mlsp_view_release(&job->wanted[i].view);
    }
    if (job->folder >= 0) {
        (void)close(job->folder);
    }
    mls_free(job->wanted);
    mls_free(job->stored);
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

/* (layout or None, index, world) */
static int take_cutting(const mlsp_state *state, PyObject *object, cutting *out)
{
    PyObject *layout;
    int64_t index, world;
    size_t parts;
    mls_status st;
    if (!PyArg_ParseTuple(object, "OLL", &layout, &index, &world)) {
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

/* The wanted part of one tensor. */
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

/* Look up all keys of a list. */
static int choose(load_job *job, mls_section section, PyObject *keys, const cutting *how)
{
    const Py_ssize_t count = PyList_GET_SIZE(keys);
    job->wanted = mls_alloc((size_t)count, sizeof *job->wanted);
    if (job->wanted == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        mls_text text;
        wanted *w = &job->wanted[job->count];
        if (mlsp_take_text(PyList_GET_ITEM(keys, i), "tensor name", &text) < 0) {
            return -1;
        }
        const mls_tensor_id id = mlsp_id_of(section, text);
        const size_t at = mls_catalog_find(&job->catalog->catalog, &id);
        if (at == SIZE_MAX) {
            PyErr_Format(job->state->errors[MLSP_ERROR_NOT_FOUND],
                         "Tensor '%.200U' not found in checkpoint",
                         PyList_GET_ITEM(keys, i));
            return -1;
        }
        w->tensor = &job->catalog->catalog.tensors[at];
        if (cut(job, how, w) < 0) {
            return -1;
        }
        job->count++;
        job->piece_count += w->tensor->count;
    }
    return 0;
}

/* ---- loading: what must be read ---- */

/* Without the GIL: the pieces of all that is wanted, and whether their files are what was
 * recorded.  `*file` is the one that is not. */
static mls_code find_pieces(load_job *job, const char **file, mls_status *st)
{
    size_t used = 0;
    const char *seen = NULL;
    *file = NULL;
    for (size_t i = 0; i < job->count; i++) {
        wanted *w = &job->wanted[i];
        const mls_code code =
            mls_catalog_pieces(&job->catalog->catalog, w->tensor, &w->part, NULL,
                               job->stored + used, job->pieces + used, &w->count, st);
        if (code != MLS_OK) {
            return code;
        }
        w->first = used;
        used += w->count;
        for (size_t j = w->first; j < used; j++) {
            const mls_stored_shard *stored = &job->stored[j];
            if (stored->file != seen) {
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

/* Plan the reading, before any memory for its result is asked for. */
static int plan(load_job *job)
{
    mls_status st;
    mls_code code;
    const char *file;
    job->stored = mls_alloc(job->piece_count, sizeof *job->stored);
    job->pieces = mls_alloc(job->piece_count, sizeof *job->pieces);
    if (job->stored == NULL || job->pieces == NULL) {
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

/* Say where the bytes of one tensor go. */
static void place(load_job *job, const wanted *w, unsigned char *data)
{
    for (size_t j = w->first; j < w->first + w->count; j++) {
        job->pieces[j].data = data;
    }
}

/* Read all pieces. */
static int read_all(load_job *job, bool verify, PyObject *callback)
{
    mlsp_progress progress;
    mls_status st;
    size_t failed = 0;
    const mls_crc_kernels *crc = verify ? mlsp_crc_of(job->state) : NULL;
    mls_pool *pool = job->state->pool;
    if (mlsp_progress_init(&progress, callback) < 0) {
        return -1;
    }
    mlsp_progress_begin(&progress);
    const mls_code code = mls_shards_read(job->folder, job->pieces, job->piece_count, crc,
                                          pool, &progress.core, &failed, &st);
    mlsp_progress_end(&progress);
    if (code != MLS_OK) {
        const bool about = code != MLS_E_MEMORY && code != MLS_E_STOPPED;
        mlsp_raise_under(job->state, &st, job->path,
                         about ? job->pieces[failed].shard->file : NULL);
        return -1;
    }
    return mlsp_progress_finish(&progress);
}

/* ---- loading: new arrays ---- */

/* A new array for a part: over `data`, which `base` keeps alive, or of its own memory. */
static PyObject *new_array(const wanted *w, const unsigned char *data, PyObject *base)
{
    size_t dims[MLS_LAYOUT_RANK];
    npy_intp shape[MLS_LAYOUT_RANK];
    const int rank = mlsp_part_dims(&w->part, dims);
    for (int i = 0; i < rank; i++) {
        shape[i] = (npy_intp)dims[i]; /* no more than its shard's bytes */
    }
    PyArray_Descr *descr = mlsp_descr_of_dtype(w->tensor->facts->dtype);
    if (descr == NULL) {
        return NULL;
    }
    void *address = base == NULL ? NULL : (void *)(uintptr_t)data;
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, descr, rank, shape, NULL, address, 0, NULL);
    if (array == NULL || base == NULL) {
        return array;
    }
    PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_ALIGNED);
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(base)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* The whole of a file, mapped once; borrowed from the dict. */
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
    if (capsule == NULL || PyDict_SetItemString(capsules, file->path, capsule) < 0) {
        Py_XDECREF(capsule);
        return NULL;
    }
    Py_DECREF(capsule); /* the dict has it */
    return capsule;
}

/* The part as a view of its file, where it lies there in one run; None where it does
 * not.  A new reference. */
static PyObject *mapped_array(load_job *job, const wanted *w, PyObject *capsules)
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
    return new_array(w, mlsp_mapping_data(capsule) + offset, capsule);
}

/* Arrays for all that is wanted; what is mapped needs no reading. */
static int make_arrays(load_job *job, bool maps)
{
    size_t used = 0;
    PyObject *capsules = maps ? PyDict_New() : NULL;
    bool good = !maps || capsules != NULL;
    for (size_t i = 0; good && i < job->count; i++) {
        wanted *w = &job->wanted[i];
        PyObject *array = maps ? mapped_array(job, w, capsules) : Py_NewRef(Py_None);
        const bool read = array == Py_None;
        if (read) {
            Py_DECREF(array);
            array = new_array(w, NULL, NULL);
        }
        w->array = array;
        good = array != NULL;
        if (good && read) {
            place(job, w, PyArray_DATA((PyArrayObject *)array));
            memmove(job->pieces + used, job->pieces + w->first,
                    w->count * sizeof *job->pieces);
            used += w->count;
        }
    }
    job->piece_count = used;
    Py_XDECREF(capsules);
    return good ? 0 : -1;
}

/* {key: array} */
static PyObject *arrays_dict(const load_job *job)
{
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < job->count; i++) {
        PyObject *key = key_of(&job->wanted[i].tensor->facts->id);
        if (key == NULL || PyDict_SetItem(dict, key, job->wanted[i].array) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(key);
    }
    return dict;
}

/* The arguments that both ways of loading begin with. */
static int load_init(load_job *job, PyObject *object, PyObject *path, PyObject *section,
                     PyObject *keys, PyObject *cuts)
{
    mls_section which;
    cutting how;
    *job = (load_job){.object = object,
                      .catalog = (catalog_object *)object,
                      .state = state_of(object),
                      .path = path,
                      .folder = -1};
    if (!PyList_Check(keys)) {
        PyErr_SetString(PyExc_TypeError, "keys must be a list");
        return -1;
    }
    return take_section(job->state, section, &which) < 0 ||
                   take_cutting(job->state, cuts, &how) < 0 ||
                   mlsp_open_folder(job->state, path, &job->folder) < 0 ||
                   choose(job, which, keys, &how) < 0 || plan(job) < 0
               ? -1
               : 0;
}

/* load(folder, section, keys, (layout, index, world), verify, mmap, progress)
 *     -> {key: array} */
static PyObject *catalog_load(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    load_job job = {.folder = -1};
    PyObject *result = NULL;
    if (mlsp_take_count("load", 7, count) < 0) {
        return NULL;
    }
    const int verify = PyObject_IsTrue(args[4]), maps = PyObject_IsTrue(args[5]);
    if (verify >= 0 && maps >= 0 &&
        load_init(&job, object, args[0], args[1], args[2], args[3]) == 0 &&
        make_arrays(&job, maps != 0) == 0 && read_all(&job, verify != 0, args[6]) == 0) {
        result = arrays_dict(&job);
    }
    load_fini(&job);
    return result;
}

/* ---- loading: into arrays that exist ---- */

/* View the target of one tensor, and see that it is what its part is. */
static int view_target(load_job *job, wanted *w, PyObject *targets)
{
    size_t dims[MLS_LAYOUT_RANK];
    char what[MLS_NAME_BYTES];
    mls_status st;
    const mls_index_shard *facts = w->tensor->facts;
    PyObject *key = key_of(&facts->id);
    if (key == NULL || mlsp_dict_get(targets, key, &w->array) != 1) {
        if (key != NULL && !PyErr_Occurred()) {
            PyErr_SetObject(PyExc_KeyError, key);
        }
        Py_XDECREF(key);
        return -1;
    }
    Py_DECREF(key);
    PyOS_snprintf(what, sizeof what, "target '%.*s'",
                  (int)(facts->id.name.length < 120 ? facts->id.name.length : 120),
                  facts->id.name.data == NULL ? "" : facts->id.name.data);
    if (mlsp_view_writable(job->state, w->array, what, &w->view) < 0) {
        return -1;
    }
    const mls_tensor *t = &w->view.tensor;
    const int rank = mlsp_part_dims(&w->part, dims);
    bool same = t->rank == rank;
    for (int i = 0; same && i < rank; i++) {
        same = t->shape[i] == dims[i];
    }
    if (same && t->dtype == facts->dtype) {
        return 0;
    }
    char have[64], want[64];
    mls_shape_text(have, sizeof have, rank, dims);
    mls_shape_text(want, sizeof want, t->rank, t->shape);
    mls_fail(&st, MLS_E_SHAPE, "the checkpoint has %s of %s, the target is %s of %s",
             mls_dtype_of(facts->dtype)->name, have, mls_dtype_of(t->dtype)->name, want);
    mls_status_name(&st, facts->id.name.data, facts->id.name.length);
    mls_status_expected(&st, "%s", want);
    mls_status_got(&st, "%s", have);
    mlsp_raise_under(job->state, &st, job->path, NULL);
    return -1;
}

/* Where targets are not packed, bytes go by way of new memory.  `*out` has one block for
 * each of them, else NULL. */
static int place_targets(load_job *job, unsigned char **blocks)
{
    for (size_t i = 0; i < job->count; i++) {
        wanted *w = &job->wanted[i];
        const mls_tensor *t = &w->view.tensor;
        if (!t->swapped && mls_tensor_is_contiguous(t)) {
            place(job, w, t->data);
            continue;
        }
        size_t bytes = 0;
        (void)mls_tensor_bytes(t, &bytes); /* it lies in memory */
        blocks[i] = mls_alloc(bytes, 1);
        if (blocks[i] == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        place(job, w, blocks[i]);
    }
    return 0;
}

/* Bring what came by way of new memory to its strided place. */
static void scatter(load_job *job, unsigned char *const *blocks)
{
    for (size_t i = 0; i < job->count; i++) {
        const mls_tensor *t = &job->wanted[i].view.tensor;
        mls_tensor packed;
        mls_status ignored;
        if (blocks[i] != NULL && mls_tensor_init(&packed, blocks[i], t->dtype, t->rank,
                                                 t->shape, &ignored) == MLS_OK) {
            mls_copy(job->state->kernels, t, &packed, false);
        }
    }
}

/* load_into(folder, section, keys, (layout, index, world), targets, verify, progress) */
static PyObject *catalog_load_into(PyObject *object, PyObject *const *args,
                                   Py_ssize_t count)
{
    load_job job = {.folder = -1};
    unsigned char **blocks = NULL;
    bool good = false;
    if (mlsp_take_count("load_into", 7, count) < 0) {
        return NULL;
    }
    const int verify = PyObject_IsTrue(args[5]);
    if (!PyDict_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "targets must be a dict");
        return NULL;
    }
    if (verify < 0 || load_init(&job, object, args[0], args[1], args[2], args[3]) < 0) {
        goto done;
    }
    for (size_t i = 0; i < job.count; i++) {
        if (view_target(&job, &job.wanted[i], args[4]) < 0) {
            goto done;
        }
    }
    blocks = mls_alloc(job.count, sizeof *blocks);
    if (blocks == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (place_targets(&job, blocks) == 0 && read_all(&job, verify != 0, args[6]) == 0) {
        scatter(&job, blocks);
        good = true;
    }
done:
    for (size_t i = 0; blocks != NULL && i < job.count; i++) {
        mls_free(blocks[i]);
    }
    mls_free(blocks);
    load_fini(&job);
    return good ? Py_NewRef(Py_None) : NULL;
}

/* ---- verifying ---- */

/* A problem as a tuple: kind, file, key or None, part or None, rank, offset, bytes,
 * text. */
static PyObject *problem_tuple(const mls_index *index, const mls_problem *problem)
{
    const bool whole = problem->shard == SIZE_MAX;
    const mls_index_shard *shard = whole ? NULL : &index->shards[problem->shard];
    PyObject *key = whole ? Py_NewRef(Py_None) : key_of(&shard->id);
    PyObject *part = whole ? Py_NewRef(Py_None) : PyLong_FromSize_t(shard->part);
    PyObject *text = PyUnicode_DecodeUTF8(
        problem->text, (Py_ssize_t)strlen(problem->text), "backslashreplace");
    return Py_BuildValue(
        "(ssNNKKKN)", mls_problem_name(problem->kind), index->files[problem->file].path,
        key, part, (unsigned long long)index->rank, (unsigned long long)problem->offset,
        (unsigned long long)problem->bytes, text);
}

/* Add the problems of one index to a list. */
static int add_problems(const mls_index *index, const mls_problems *problems,
                        PyObject *list)
{
    for (size_t i = 0; i < problems->count; i++) {
        PyObject *tuple = problem_tuple(index, &problems->list[i]);
        if (tuple == NULL || PyList_Append(list, tuple) < 0) {
            Py_XDECREF(tuple);
            return -1;
        }
        Py_DECREF(tuple);
    }
    return 0;
}

/* verify(folder, progress) -> (bytes read, [problem, ...]) */
static PyObject *catalog_verify(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    const catalog_object *self = (catalog_object *)object;
    const mlsp_state *state = state_of(object);
    mlsp_progress progress;
    int folder;
    unsigned long long bytes = 0;
    bool good = true;
    if (mlsp_take_count("verify", 2, count) < 0 ||
        mlsp_progress_init(&progress, args[1]) < 0 ||
        mlsp_open_folder(state, args[0], &folder) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; good && list != NULL && i < self->index_count; i++) {
        const mls_crc_kernels *crc = mlsp_crc_of(state);
        mls_problems problems = {0};
        mls_status st;
        mlsp_progress_begin(&progress);
        const mls_code code = mls_index_verify(
            folder, &self->indexes[i], crc, state->pool, &progress.core, &problems, &st);
        mlsp_progress_end(&progress);
        if (code != MLS_OK) {
            mlsp_raise_under(state, &st, args[0], NULL);
            good = false;
        } else {
            bytes += problems.bytes_read;
            good = add_problems(&self->indexes[i], &problems, list) == 0 &&
                   mlsp_progress_finish(&progress) == 0;
        }
        mls_problems_fini(&problems);
    }
    (void)close(folder);
    if (!good || list == NULL) {
        Py_XDECREF(list);
        return NULL;
    }
    return Py_BuildValue("(KN)", bytes, list);
}

/* ---- the type ---- */

static PyMethodDef catalog_methods[] = {
    {"keys", catalog_keys, METH_O, "keys(section, /)\n--\n\nKeys of a section."},
    {"tensors", catalog_tensors, METH_NOARGS, "tensors()\n--\n\nFacts of all tensors."},
    {"shards", catalog_shards, METH_NOARGS, "shards()\n--\n\nFacts of all shards."},
    {"files", catalog_files, METH_NOARGS, "files()\n--\n\nFiles and their sizes."},
    {"heads", catalog_heads, METH_NOARGS,
     "heads()\n--\n\nWhat each index says of "
     "itself."},
    {"load", MLSP_FASTCALL(catalog_load),
     "load(folder, section, keys, cutting, verify, mmap, progress, /)\n--\n\nArrays."},
    {"load_into", MLSP_FASTCALL(catalog_load_into),
     "load_into(folder, section, keys, cutting, targets, verify, progress, "
     "/)\n--\n\nRead into arrays that exist."},
    {"verify", MLSP_FASTCALL(catalog_verify),
     "verify(folder, progress, /)\n--\n\nEverything that is wrong with the files."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot catalog_slots[] = {
    {Py_tp_new, catalog_new},
    {Py_tp_dealloc, catalog_dealloc},
    {Py_tp_methods, catalog_methods},
    {Py_tp_doc, "Catalog(texts, files, /)\n--\n\nWhat the indexes of a checkpoint list."},
    {0, NULL},
};

static PyType_Spec catalog_spec = {
    .name = "mlstate._core.Catalog",
    .basicsize = sizeof(catalog_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = catalog_slots,
};

int mlsp_catalog_add(PyObject *module)
{
    mlsp_state *state = mlsp_state_of(module);
    state->catalog_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &catalog_spec, NULL);
    return state->catalog_type == NULL ? -1
                                       : PyModule_AddType(module, state->catalog_type);
}
