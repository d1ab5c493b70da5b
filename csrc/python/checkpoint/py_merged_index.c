/* py_merged_index: MergedIndex: parses indexes or headers, lists tensors, shards, files,
 * copies; verifies; header of a file.
 *
 * A MergedIndex is immutable after construction and keep_whole, so any number of threads
 * may use it. Loading has these steps: choose tensors and parts, check that they are
 * stored and that the files exist, create or view the arrays (with the GIL), read
 * (without it). */
#include "arguments/args.h"
#include "arguments/progress.h"
#include "arguments/results.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/merged_index_object.h"
#include "checkpoint/py_layout.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "base/memory.h"
#include "checkpoint/index/file_checksums.h"
#include "checkpoint/index/index_of_files.h"
#include "checkpoint/index/shard_header_rebuild.h"
#include "checkpoint/ranks/merged_index_summary.h"
#include "checkpoint/read/verify.h"
#include "io/json_checksum.h"
#include "safetensors/safetensors.h"

#include <stdlib.h>
#include <unistd.h>

/* ---- construction ---- */

/* Frees a MergedIndex, also a partly filled one. The merged index borrows the indexes, so
 * it is released first. The type holds no Python references, so it needs no garbage
 * collection. */
static void merged_index_dealloc(mlspy_merged_index *self)
{
    mls_merged_index_fini(&self->merged);
    for (size_t i = 0; i < self->index_count; i++) {
        mls_index_fini(&self->indexes[i]);
    }
    mls_free(self->indexes);
    mlspy_free(self);
}

/* Raise the error `st` about an invalid index. The text gets "index/" and the last name
 * of `path`, its file, in front; `path` becomes the exception's path. */
static void raise_index_error(const mlspy_state *state, const mls_status *st,
                              PyObject *path)
{
    mls_status named = *st;
    const char *text = PyUnicode_Check(path) ? PyUnicode_AsUTF8(path) : NULL;
    if (text == NULL) {
        PyErr_Clear(); /* the exception's path attribute shows a path that is not UTF-8 */
    } else {
        const char *file = strrchr(text, '/');
        PyOS_snprintf(named.text, sizeof named.text, "index/%.60s: %.230s",
                      file == NULL ? text : file + 1, st->text);
    }
    mlspy_raise(state, &named, path);
}

/* Parse one index from `text`, a bytes object; `name` (borrowed) is its file's name, for
 * errors. Texts may have megabytes, so they are parsed without the GIL: the bytes object
 * is immutable, and the caller holds it. Returns -1 with an exception set. */
static int add_index(const mlspy_state *state, mlspy_merged_index *self, PyObject *text,
                     PyObject *name)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    mls_code code;
    const mls_crc_kernels *crc = mlspy_crc(state);
    mls_index *index = &self->indexes[self->index_count];
    if (PyBytes_AsStringAndSize(text, &bytes, &length) < 0) {
        return -1;
    }
    MLSPY_WITHOUT_GIL(code = mls_index_parse(bytes, (size_t)length, crc, index, &st));
    if (code != MLS_OK) {
        raise_index_error(state, &st, name);
        return -1;
    }
    self->index_count++;
    return 0;
}

/* Parse all indexes and merge them. `texts` and `names` are tuples of equal length.
 * Returns -1 with an exception set; the MergedIndex can then be freed: `index_count` is
 * the number of valid indexes. */
static int merge_indexes(const mlspy_state *state, mlspy_merged_index *self,
                         PyObject *texts, PyObject *names)
{
    const size_t count = (size_t)PyTuple_GET_SIZE(texts);
    mls_status st;
    mls_code code;
    self->indexes = mls_alloc(count, sizeof *self->indexes);
    const mls_index **pointers = mls_alloc(count, sizeof *pointers);
    const mls_index *disagreeing; /* NULL after other failures */
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
    MLSPY_WITHOUT_GIL(
        code = mls_merged_index_init(&self->merged, pointers, count, &disagreeing, &st));
    failed = code == MLS_OK ? 0 : -1;
    if (failed < 0 && disagreeing != NULL) {
        raise_index_error(state, &st,
                          PyTuple_GET_ITEM(names, disagreeing - self->indexes));
    } else if (failed < 0) {
        mlspy_raise(state, &st, Py_None);
    }
done:
    mls_free(pointers);
    return failed;
}

/* MergedIndex((text, ...), (file, ...)): the texts of indexes, as bytes, and their files'
 * names
 *
 * Implemented in __new__, since __init__ could be called again on a MergedIndex in use.
 */
static PyObject *merged_index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *texts, *names;
    if (mlspy_take_positional(type, args, kwargs, "O!O!", &PyTuple_Type, &texts,
                              &PyTuple_Type, &names) < 0) {
        return NULL;
    }
    if (PyTuple_GET_SIZE(texts) != PyTuple_GET_SIZE(names)) {
        return PyErr_Format(PyExc_ValueError, "a name is wanted for each text");
    }
    PyObject *self = type->tp_alloc(type, 0);
    if (self != NULL && merge_indexes(mlspy_state_of_type(type),
                                      (mlspy_merged_index *)self, texts, names) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

/* Convert the record of a file: (bytes, starts, checksums), or None, which leaves
 * `*record` zeroed. `bytes` is the size of the file, `starts` has the offset of each of
 * its parts, and `checksums` the CRC32C of each MiB of each part (file_checksums.h):
 * bytes objects with native integers of 8 and 4 bytes. The record borrows them, so the
 * caller keeps the tuple alive. Returns -1 with an exception set. */
static int take_record(PyObject *item, mls_file_checksums *record)
{
    unsigned long long bytes;
    char *starts, *crcs;
    Py_ssize_t starts_length, crcs_length;
    PyObject *starts_object, *crcs_object;
    if (item == Py_None) {
        return 0;
    }
    if (mlspy_take_tuple(item, "a record", "KO!O!", &bytes, &PyBytes_Type, &starts_object,
                         &PyBytes_Type, &crcs_object) < 0 ||
        PyBytes_AsStringAndSize(starts_object, &starts, &starts_length) < 0 ||
        PyBytes_AsStringAndSize(crcs_object, &crcs, &crcs_length) < 0) {
        return -1;
    }
    *record = (mls_file_checksums){.bytes = bytes,
                                   .starts = (const uint64_t *)(void *)starts,
                                   .count = (size_t)starts_length / sizeof(uint64_t),
                                   .crcs = (const uint32_t *)(void *)crcs,
                                   .crc_count = (size_t)crcs_length / sizeof(uint32_t)};
    return 0;
}

/* Return a new array with the record of each of `count` files, from a tuple; the caller
 * frees it, before the tuple whose memory it borrows. NULL with an exception set. */
static mls_file_checksums *take_records(PyObject *items, size_t count)
{
    if ((size_t)PyTuple_GET_SIZE(items) != count) {
        PyErr_SetString(PyExc_ValueError, "a record is wanted for each file");
        return NULL;
    }
    mls_file_checksums *records = mls_alloc(count, sizeof *records);
    if (records == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        if (take_record(PyTuple_GET_ITEM(items, (Py_ssize_t)i), &records[i]) < 0) {
            mls_free(records);
            return NULL;
        }
    }
    return records;
}

/* Make the only index of `self` from the headers of the files `names` in `folder`,
 * without the GIL. `checksums` is NULL, or a tuple that is empty or has the record of
 * each file (take_record): then sizes and headers are compared with it, and the tensors
 * get its checksums. Returns -1 with an exception set. */
static int read_headers(const mlspy_state *state, mlspy_merged_index *self,
                        PyObject *folder, PyObject *names, PyObject *checksums)
{
    const size_t count = (size_t)PyTuple_GET_SIZE(names);
    const mls_crc_kernels *crc = mlspy_crc(state);
    PyObject *encoded = NULL;
    const char **texts = mls_alloc(count, sizeof *texts);
    mls_file_checksums *records = NULL;
    self->indexes = mls_alloc(1, sizeof *self->indexes);
    int failed = -1;
    if (texts == NULL || self->indexes == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    /* an empty tuple is the default of of_files */
    if (checksums != NULL && PyTuple_GET_SIZE(checksums) > 0) {
        records = take_records(checksums, count);
        if (records == NULL) {
            goto done;
        }
    }
    for (size_t i = 0; i < count; i++) {
        Py_ssize_t length = 0;
        texts[i] =
            PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(names, (Py_ssize_t)i), &length);
        if (texts[i] == NULL) {
            goto done;
        }
        if (length > MLS_PATH_BYTES) {
            PyErr_Format(PyExc_ValueError,
                         "%.100s...: a file name has at most %d bytes, got %zd", texts[i],
                         MLS_PATH_BYTES, length);
            goto done;
        }
    }
    if (!PyUnicode_FSConverter(folder, &encoded)) {
        goto done;
    }
    const char *path = PyBytes_AS_STRING(encoded);
    const mls_index *index = self->indexes, *disagreeing;
    size_t failed_file = 0; /* its number, for the error */
    mls_status st;
    mls_code code;
    Py_BEGIN_ALLOW_THREADS
        code = records == NULL ? MLS_OK
                               : mls_file_checksums_compare(records, path, texts, count,
                                                            crc, &failed_file, &st);
        if (code == MLS_OK) {
            code = mls_index_of_files(path, texts, count, crc, self->indexes,
                                      &failed_file, &st);
            self->index_count = code == MLS_OK ? 1 : 0;
        }
        if (code == MLS_OK && records != NULL) {
            code = mls_index_use_checksums(self->indexes, records, &failed_file, &st);
        }
        if (code == MLS_OK) {
            code = mls_merged_index_init(&self->merged, &index, 1, &disagreeing, &st);
        }
    Py_END_ALLOW_THREADS
    failed = code == MLS_OK ? 0 : -1;
    if (failed < 0) {
        mlspy_raise_under(state, &st, folder, count > 0 ? texts[failed_file] : NULL);
    }
done:
    mls_free((void *)texts);
    mls_free(records);
    Py_XDECREF(encoded);
    return failed;
}

/* of_files(folder, (name, ...), (record or None, ...)=()) -> MergedIndex of safetensors
 * files of another program, whose names in the folder the caller has checked; a record is
 * the tuple of take_record */
static PyObject *merged_index_of_files(PyObject *type, PyObject *args)
{
    PyTypeObject *cls = (PyTypeObject *)type;
    PyObject *folder, *names, *checksums = NULL;
    if (!PyArg_ParseTuple(args, "OO!|O!", &folder, &PyTuple_Type, &names, &PyTuple_Type,
                          &checksums)) {
        return NULL;
    }
    PyObject *self = cls->tp_alloc(cls, 0);
    if (self != NULL && read_headers(mlspy_state_of_type(cls), (mlspy_merged_index *)self,
                                     folder, names, checksums) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

/* ---- queries ---- */

/* Compares two shards by their tensors; for bsearch. */
static int compare_ids(const void *a, const void *b)
{
    return mls_tensor_id_compare(&((const mls_index_shard *)a)->id,
                                 &((const mls_index_shard *)b)->id);
}

/* keys(section) -> [key, ...]: the names of a section's tensors, ordered by the bytes of
 * the parameter's name, then of the state's */
static PyObject *merged_index_keys(mlspy_merged_index *self, PyObject *argument)
{
    mls_section section;
    if (mlspy_take_section(mlspy_state_of_type(Py_TYPE(self)), argument, &section) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->merged.tensor_count; i++) {
        const mls_tensor_id *id = &self->merged.tensors[i].any_shard->id;
        if (id->section == section) {
            mlspy_append(&list, mlspy_merged_index_key(id));
        }
    }
    return list;
}

/* digests(section) -> {key: (lane, lane), ...}: the recorded digests of a section's
 * tensors, except tensors with a missing part or a part without a digest */
static PyObject *merged_index_digests(mlspy_merged_index *self, PyObject *argument)
{
    mls_section section;
    if (mlspy_take_section(mlspy_state_of_type(Py_TYPE(self)), argument, &section) < 0) {
        return NULL;
    }
    PyObject *digests = PyDict_New();
    for (size_t i = 0; digests != NULL && i < self->merged.tensor_count; i++) {
        const mls_merged_index_tensor *tensor = &self->merged.tensors[i];
        mls_digest digest;
        if (tensor->any_shard->id.section != section ||
            !mls_merged_index_digest(&self->merged, tensor, &digest)) {
            continue;
        }
        PyObject *key = mlspy_merged_index_key(&tensor->any_shard->id);
        PyObject *lanes = key == NULL
                              ? NULL
                              : Py_BuildValue("KK", (unsigned long long)digest.lanes[0],
                                              (unsigned long long)digest.lanes[1]);
        if (lanes == NULL || PyDict_SetItem(digests, key, lanes) < 0) {
            Py_CLEAR(digests);
        }
        Py_XDECREF(key);
        Py_XDECREF(lanes);
    }
    return digests;
}

/* keep_whole(section, keys): let layouts that a load requests cut none of the tensors in
 * the set `keys`, which are bytes of a value. Call it before any other thread has the
 * object. */
static PyObject *merged_index_keep_whole(mlspy_merged_index *self, PyObject *const *args,
                                         Py_ssize_t count)
{
    static const signed char no_axes[MLS_LAYOUT_RANK] = {
        MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS,
        MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS,
        MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS,
    };
    mls_section section;
    if (mlspy_take_count("keep_whole", 2, count) < 0 ||
        mlspy_take_section(mlspy_state_of_type(Py_TYPE(self)), args[0], &section) < 0) {
        return NULL;
    }
    if (!PyAnySet_Check(args[1])) {
        return PyErr_Format(PyExc_TypeError, "keys must be a set");
    }
    for (size_t i = 0; i < self->index_count; i++) {
        mls_index *index = &self->indexes[i];
        for (size_t j = 0; j < index->shard_count; j++) {
            mls_index_shard *shard = &index->shards[j];
            if (shard->id.section != section) {
                continue;
            }
            PyObject *key = mlspy_merged_index_key(&shard->id);
            const int is_whole = key == NULL ? -1 : PySet_Contains(args[1], key);
            Py_XDECREF(key);
            if (is_whole < 0) {
                return NULL;
            }
            shard->axes = is_whole ? no_axes : shard->axes;
        }
    }
    Py_RETURN_NONE;
}

/* Return a new tuple of the parameter's axis of each of a state's axes, None for an axis
 * that the parameter lacks. In the usual case, if the state has the axes of its
 * parameter, return a new reference to None. NULL with an exception set. */
static PyObject *axes_tuple(const mls_index_shard *shard)
{
    PyObject *tuple = shard->axes == NULL ? Py_NewRef(Py_None) : PyTuple_New(shard->rank);
    for (int i = 0; tuple != NULL && shard->axes != NULL && i < shard->rank; i++) {
        mlspy_put(&tuple, i,
                  shard->axes[i] == MLS_NO_AXIS ? Py_NewRef(Py_None)
                                                : PyLong_FromLong(shard->axes[i]));
    }
    return tuple;
}

/* Describe a tensor over all of its shards as a new tuple: section, key (the name in a
 * state dict), its two parts (the parameter, and the optimizer state or None), dtype,
 * shape, layout, axes_tuple, number of shards, their uncompressed bytes, highest version,
 * storage tier or None, stored bytes, number of sparse shards, codec of a compressed
 * shard or None. The dtype is NumPy's name, not the name in the file, except that an
 * opaque tensor, which no array can hold, has dtype and shape of its file. NULL with an
 * exception set. */
static PyObject *tensor_tuple(const mlspy_merged_index *self,
                              const mls_merged_index_tensor *t)
{
    const mls_index_shard *shard = t->any_shard;
    const mls_tensor_summary summary = mls_tensor_summarize(&self->merged, t);
    const char *tier = shard->tier == MLS_TIER_NONE ? NULL : mls_tier_name(shard->tier);
    const mls_stored *opaque = shard->opaque;
    const char *name = mls_dtype_of(shard->dtype)->name;
    PyObject *dtype =
        opaque == NULL ? PyUnicode_FromString(name) : mlspy_str_of(opaque->opaque);
    PyObject *shape = opaque == NULL ? mlspy_sizes_tuple(shard->shape, shard->rank)
                                     : mlspy_sizes_tuple(opaque->shape, opaque->rank);
    PyObject *state =
        shard->id.has_state ? mlspy_str_of(shard->id.state) : Py_NewRef(Py_None);
    /* each N takes its reference; a NULL keeps the exception that is set */
    return Py_BuildValue("(sNNNNNNNnKKzKnz)", mls_section_name(shard->id.section),
                         mlspy_merged_index_key(&shard->id), mlspy_str_of(shard->id.name),
                         state, dtype, shape, mlspy_layout_tuple(&shard->layout),
                         axes_tuple(shard), (Py_ssize_t)t->count,
                         (unsigned long long)summary.bytes,
                         (unsigned long long)summary.version, tier,
                         (unsigned long long)summary.stored_bytes,
                         (Py_ssize_t)summary.sparse, summary.codec);
}

/* tensors() -> [tuple, ...], as tensor_tuple, of the tensors of all sections */
static PyObject *merged_index_tensors(mlspy_merged_index *self, PyObject *unused)
{
    (void)unused;
    PyObject *list = PyList_New((Py_ssize_t)self->merged.tensor_count);
    MLSPY_PUT_EACH(list, i, self->merged.tensor_count,
                   tensor_tuple(self, &self->merged.tensors[i]));
    return list;
}

/* Return a new reference to a tuple of a shard's layers, oldest first, or None for a
 * plain shard; NULL with an exception set. Each layer is a tuple: file, offset, bytes,
 * CRC32C as hexadecimal digits, uncompressed bytes, visible bytes (of elements that no
 * later layer stores), codec or None. */
static PyObject *layers_tuple(const mls_index *index, const mls_index_shard *shard)
{
    if (shard->layers == NULL) {
        return Py_NewRef(Py_None);
    }
    PyObject *tuple = PyTuple_New((Py_ssize_t)shard->layers->count);
    for (size_t i = 0; tuple != NULL && i < shard->layers->count; i++) {
        const mls_layer *layer = &shard->layers->list[i];
        char crc[MLS_CRC_DIGITS];
        mls_crc_to_digits(layer->crc, crc);
        const mls_compressed_frames *frames = layer->frames;
        mlspy_put(&tuple, (Py_ssize_t)i,
                  Py_BuildValue("(sKKs#KKz)", index->files[layer->file].path,
                                (unsigned long long)layer->offset,
                                (unsigned long long)layer->bytes, crc,
                                (Py_ssize_t)MLS_CRC_DIGITS,
                                (unsigned long long)mls_layer_element_bytes(layer),
                                (unsigned long long)mls_layer_visible_bytes(
                                    layer, mls_dtype_of(shard->dtype)->item_bytes),
                                frames == NULL ? NULL : mls_codec_name(frames->codec)));
    }
    return tuple;
}

/* Describe a shard as a new tuple: section, key, number of its part, shape of the part,
 * rank that saved it, file, offset, bytes, CRC32C as hexadecimal digits, version, layers
 * or None. A shard with layers has None for file, offset and CRC32C; one in a file
 * without checksums has none for the CRC32C only. NULL with an exception set. */
static PyObject *shard_tuple(const mls_index *index, const mls_index_shard *shard)
{
    size_t dims[MLS_LAYOUT_RANK];
    char crc[MLS_CRC_DIGITS];
    const mls_part part = mls_index_part(shard);
    const int rank = mls_part_dims(&part, dims);
    /* None instead of 0 for a shard with layers, which has no single place; for a file
     * without checksums too */
    const bool is_dense = shard->layers == NULL;
    const bool has_crc = is_dense && shard->crcs != NULL;
    PyObject *offset =
        is_dense ? PyLong_FromUnsignedLongLong(shard->offset) : Py_NewRef(Py_None);
    mls_crc_to_digits(shard->crc, crc);
    return Py_BuildValue("(sNnNKzNnz#KN)", mls_section_name(shard->id.section),
                         mlspy_merged_index_key(&shard->id), (Py_ssize_t)shard->part,
                         mlspy_sizes_tuple(dims, rank), (unsigned long long)index->rank,
                         is_dense ? index->files[shard->file].path : NULL, offset,
                         (Py_ssize_t)shard->bytes, has_crc ? crc : NULL,
                         (Py_ssize_t)MLS_CRC_DIGITS, (unsigned long long)shard->version,
                         layers_tuple(index, shard));
}

/* shards() -> [tuple, ...], as shard_tuple, of all ranks */
static PyObject *merged_index_shards(mlspy_merged_index *self, PyObject *unused)
{
    (void)unused;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->index_count; i++) {
        const mls_index *index = &self->indexes[i];
        for (size_t j = 0; list != NULL && j < index->shard_count; j++) {
            mlspy_append(&list, shard_tuple(index, &index->shards[j]));
        }
    }
    return list;
}

/* files() -> {path: bytes}, of all ranks
 *
 * A file that several indexes list appears once. */
static PyObject *merged_index_files(mlspy_merged_index *self, PyObject *unused)
{
    (void)unused;
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < self->index_count; i++) {
        const mls_index *index = &self->indexes[i];
        for (size_t j = 0; dict != NULL && j < index->file_count; j++) {
            mlspy_set(&dict, PyUnicode_FromString(index->files[j].path),
                      PyLong_FromUnsignedLongLong(index->files[j].bytes));
        }
    }
    return dict;
}

/* copies() -> [(key, file, file of the listed tensor), ...]: the tensors that files of
 * another program contain more than once: the file of each further copy, and of the one
 * that shards() lists and that is loaded */
static PyObject *merged_index_copies(mlspy_merged_index *self, PyObject *unused)
{
    (void)unused;
    PyObject *list = PyList_New(0);
    const mls_index *index = &self->indexes[0];
    const size_t count = self->index_count > 0 ? index->copy_count : 0;
    for (size_t i = 0; list != NULL && i < count; i++) {
        /* copies follow the listed shards; each has the id of a listed one */
        const mls_index_shard *copy = &index->shards[index->shard_count + i];
        const mls_index_shard *listed =
            bsearch(copy, index->shards, index->shard_count, sizeof *copy, compare_ids);
        mlspy_append(&list, Py_BuildValue("(Nss)", mlspy_merged_index_key(&copy->id),
                                          index->files[copy->file].path,
                                          index->files[listed->file].path));
    }
    return list;
}

/* header(path) -> bytes or None
 *
 * Rebuilds the header of a safetensors file, with its length field, from the first index
 * that lists the complete file; None if no index does.
 */
static PyObject *merged_index_header(mlspy_merged_index *self, PyObject *argument)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    const char *path = PyUnicode_AsUTF8(argument);
    if (path == NULL) {
        return NULL;
    }
    mls_json_writer text = {.most = MLS_SAFETENSORS_MAX_HEADER + 8};
    mls_status st;
    const mls_code code = mls_shard_header_rebuild_path(
        self->indexes, self->index_count, path, mlspy_crc(state), &text, &st);
    PyObject *result = NULL;
    if (code == MLS_OK) {
        result = PyBytes_FromStringAndSize(text.data, (Py_ssize_t)text.length);
    } else if (code == MLS_E_MEMORY) {
        mlspy_raise(state, &st, Py_None);
    } else {
        result = Py_NewRef(Py_None);
    }
    mls_json_writer_fini(&text);
    return result;
}

/* heads() -> [(generation, rank, world_size, shards, bytes, stored bytes), ...], one for
 * each index: `shards` is their number, `bytes` are those of the elements, and stored
 * bytes those in the files */
static PyObject *merged_index_heads(mlspy_merged_index *self, PyObject *unused)
{
    (void)unused;
    PyObject *list = PyList_New((Py_ssize_t)self->index_count);
    for (size_t i = 0; list != NULL && i < self->index_count; i++) {
        const mls_index *index = &self->indexes[i];
        const mls_index_summary summary = mls_index_summarize(index);
        mlspy_put(&list, (Py_ssize_t)i,
                  Py_BuildValue(
                      "(sKKnKK)", index->generation, (unsigned long long)index->rank,
                      (unsigned long long)index->world_size,
                      (Py_ssize_t)index->shard_count, (unsigned long long)summary.bytes,
                      (unsigned long long)summary.stored_bytes));
    }
    return list;
}

/* ---- verification ---- */

/* Describe a problem as a new tuple: kind, file, key or None, part or None, rank, offset,
 * bytes, text. Offset and bytes are the damaged range of the file. Key and part are None
 * for a problem of a whole file. The text may quote the system in any encoding. NULL with
 * an exception set. */
static PyObject *problem_tuple(const mls_index *index, const mls_problem *problem)
{
    const bool is_file_problem = problem->shard == SIZE_MAX;
    const mls_index_shard *shard =
        is_file_problem ? NULL : &index->shards[problem->shard];
    PyObject *key =
        is_file_problem ? Py_NewRef(Py_None) : mlspy_merged_index_key(&shard->id);
    PyObject *part =
        is_file_problem ? Py_NewRef(Py_None) : PyLong_FromSize_t(shard->part);
    PyObject *text = PyUnicode_DecodeUTF8(
        problem->text, (Py_ssize_t)strlen(problem->text), "backslashreplace");
    return Py_BuildValue(
        "(ssNNKKKN)", mls_problem_name(problem->kind), index->files[problem->file].path,
        key, part, (unsigned long long)index->rank, (unsigned long long)problem->offset,
        (unsigned long long)problem->bytes, text);
}

/* verify(folder, progress) -> (bytes read, [problem, ...]), as problem_tuple
 *
 * Reads all files in the folder, and compares their bytes with the checksums of the
 * indexes. Processes one index at a time, so that only one rank's problems are in memory
 * twice. Problems are results, not errors: the function raises only if verification
 * cannot continue.
 */
static PyObject *merged_index_verify(mlspy_merged_index *self, PyObject *const *args,
                                     Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mlspy_progress progress;
    int folder;
    unsigned long long bytes = 0;
    if (mlspy_take_count("verify", 2, count) < 0 ||
        mlspy_progress_init(&progress, args[1]) < 0 ||
        mlspy_open_folder(state, args[0], &folder) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->index_count; i++) {
        const mls_index *index = &self->indexes[i];
        mls_problems problems = {0};
        mls_status st;
        mlspy_progress_begin(&progress);
        const mls_code code = mls_index_verify(
            folder, index, mlspy_crc(state), state->pool, &progress.core, &problems, &st);
        mlspy_progress_end(&progress);
        if (code != MLS_OK) {
            mlspy_raise_under(state, &st, args[0], NULL);
            Py_CLEAR(list);
        }
        bytes += problems.bytes_read;
        for (size_t j = 0; list != NULL && j < problems.count; j++) {
            mlspy_append(&list, problem_tuple(index, &problems.list[j]));
        }
        if (list != NULL && mlspy_progress_finish(&progress) < 0) {
            Py_CLEAR(list);
        }
        mls_problems_fini(&problems);
    }
    (void)close(folder);
    return list == NULL ? NULL : Py_BuildValue("(KN)", bytes, list);
}

/* ---- the type ---- */

static PyMethodDef merged_index_methods[] = {
    {"of_files", merged_index_of_files, METH_VARARGS | METH_CLASS,
     "of_files(folder, names, checksums=(), /)\n--\n\n"},
    MLSPY_METHOD(merged_index, keys, METH_O, "section, /"),
    MLSPY_METHOD(merged_index, digests, METH_O, "section, /"),
    MLSPY_METHOD(merged_index, keep_whole, METH_FASTCALL, "section, keys, /"),
    MLSPY_METHOD(merged_index, tensors, METH_NOARGS, "/"),
    MLSPY_METHOD(merged_index, shards, METH_NOARGS, "/"),
    MLSPY_METHOD(merged_index, files, METH_NOARGS, "/"),
    MLSPY_METHOD(merged_index, copies, METH_NOARGS, "/"),
    MLSPY_METHOD(merged_index, header, METH_O, "path, /"),
    MLSPY_METHOD(merged_index, heads, METH_NOARGS, "/"),
    MLSPY_METHOD(merged_index, verify, METH_FASTCALL, "folder, progress, /"),
    MLSPY_METHOD(mlspy_merged_index, load, METH_FASTCALL,
                 "source, section, keys, cutting, verify, mmap, progress, /"),
    MLSPY_METHOD(mlspy_merged_index, load_into, METH_FASTCALL,
                 "source, section, keys, cutting, targets, verify, progress, /"),
    MLSPY_METHOD(mlspy_merged_index, fits, METH_FASTCALL,
                 "folder, section, keys, cutting, targets, /"),
    MLSPY_METHOD(mlspy_merged_index, patterns, METH_NOARGS, "/"),
    MLSPY_METHOD(mlspy_merged_index, places, METH_NOARGS, "/"),
    MLSPY_METHOD(mlspy_merged_index, select_parts, METH_FASTCALL,
                 "folder, section, keys, cutting, max_parts, /"),
    MLSPY_METHOD(mlspy_merged_index, reads, METH_FASTCALL,
                 "folder, section, keys, cutting, verify, /"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot merged_index_slots[] = {
    {Py_tp_new, merged_index_new},
    {Py_tp_dealloc, merged_index_dealloc},
    {Py_tp_methods, merged_index_methods},
    {Py_tp_doc, "MergedIndex(texts, files, /)\n--\n\n"},
    {0, NULL},
};

MLSPY_DEFINE_SPEC(merged_index, "MergedIndex", mlspy_merged_index,
                  Py_TPFLAGS_IMMUTABLETYPE);

/* The type is immutable, so that no code can replace methods that others rely on. */
int mlspy_merged_index_add(PyObject *module)
{
    return mlspy_add_type(module, &merged_index_spec, NULL,
                          &mlspy_state_of(module)->merged_index_type);
}
