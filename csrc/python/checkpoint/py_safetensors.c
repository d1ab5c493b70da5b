/* py_safetensors: save_file and load_file of one safetensors file: arrays, metadata,
 * mapping (`mmap=True`).
 *
 * The public functions and their docstrings are in mlstate/_safetensors.py.
 *
 * Each function has three parts. With the GIL, it converts Python objects to plain
 * pointers, which strong references keep valid. Without the GIL, the core does the work.
 * With the GIL again, it converts the status to an exception. The arguments are tuples
 * that the Python wrapper made for this call, so no other thread can change them. */
#include "checkpoint/py_safetensors.h"

#include "arguments/args.h"
#include "arguments/results.h"
#include "array/array_alloc.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "base/memory.h"
#include "safetensors/safetensors.h"

#include <unistd.h>

/* Raise `st`, about the file `path`; `encoded` has the bytes of that path. Errors about
 * contents start with the file's name; an OSError shows its path anyway. Returns NULL. */
static PyObject *raise_status(const mlspy_state *state, const mls_status *st,
                              PyObject *path, PyObject *encoded)
{
    mls_status named = *st;
    if (st->code == MLS_E_FORMAT || st->code == MLS_E_CHECKSUM) {
        const char *text = PyBytes_AS_STRING(encoded), *slash = strrchr(text, '/');
        const char *name = slash == NULL ? text : slash + 1;
        size_t length = strlen(name) < 100 ? strlen(name) : 100;
        while (length > 0 && ((unsigned char)name[length] & 0xC0) == 0x80) {
            length--; /* keep whole characters of UTF-8 */
        }
        PyOS_snprintf(named.text, sizeof named.text, "%.*s: %.215s", (int)length, name,
                      st->text);
    }
    return mlspy_raise(state, &named, path);
}

/* ---- saving ----
 *
 * file_save -> save_job_init (views of all arrays, with the GIL)
 *           -> mls_safetensors_write (without)
 *           -> save_job_fini (releases references, with the GIL again) */

/* Everything that a save holds while the GIL is released. */
typedef struct save_job {
    mls_safetensors_content content;
    mls_named_tensor *tensors;
    mls_str_pair *metadata;
    mlspy_view *views;
} save_job;

/* Releases what a job holds; accepts one that save_job_init left incomplete:
 * `content.count` is the number of views. */
static void save_job_fini(save_job *job)
{
    mlspy_views_release(job->views, job->content.count);
    mls_free(job->tensors);
    mls_free(job->metadata);
    mls_free(job->views);
}

/* Convert item `i` of the tuple, a pair (name, array), to tensor `i` of the job. The view
 * holds the array (or its DLPack capsule), so its memory stays valid without the GIL,
 * even if the dict changes. Returns -1 with an exception set, without a view. */
static int take_tensor(const mlspy_state *state, PyObject *items, Py_ssize_t i,
                       save_job *job)
{
    PyObject *name, *array;
    mls_named_tensor *t = &job->tensors[i];
    if (mlspy_take_tuple(PyTuple_GET_ITEM(items, i), "an item", "OO", &name, &array) <
            0 ||
        mlspy_take_text(name, "tensor name", &t->name) < 0) {
        return -1;
    }
    /* names the tensor in errors about the array; may be truncated, never written to a
     * file */
    char label[MLS_NAME_BYTES];
    PyOS_snprintf(label, sizeof label, "tensor '%.140s'", t->name.data);
    if (mlspy_view_of(state, array, label, &job->views[i]) < 0) {
        return -1;
    }
    t->tensor = &job->views[i].tensor;
    job->content.count++;
    return 0;
}

/* Convert a tuple of pairs (key, value) of str to the job's metadata; the texts are
 * borrowed. Returns -1 with an exception set. */
static int take_metadata(PyObject *pairs, save_job *job)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *key, *value;
        mls_str_pair *pair = &job->metadata[i];
        if (mlspy_take_tuple(PyTuple_GET_ITEM(pairs, i), "an item", "OO", &key, &value) <
                0 ||
            mlspy_take_text(key, "metadata key", &pair->key) < 0 ||
            mlspy_take_text(value, "metadata value", &pair->value) < 0) {
            return -1;
        }
        job->content.metadata_count++;
    }
    return 0;
}

/* Convert tensors (`items`) and metadata (`pairs`), before the GIL is released. Returns
 * -1 with an exception set. The caller zeroes the job before, and calls save_job_fini in
 * any case. */
static int save_job_init(const mlspy_state *state, PyObject *items, PyObject *pairs,
                         save_job *job)
{
    const size_t count = (size_t)PyTuple_GET_SIZE(items);
    job->tensors = mls_alloc(count, sizeof *job->tensors);
    job->views = mls_alloc(count, sizeof *job->views);
    job->metadata = mls_alloc((size_t)PyTuple_GET_SIZE(pairs), sizeof *job->metadata);
    if (job->tensors == NULL || job->views == NULL || job->metadata == NULL) {
        return mlspy_no_memory();
    }
    job->content.tensors = job->tensors;
    job->content.metadata = job->metadata;
    for (size_t i = 0; i < count; i++) {
        if (take_tensor(state, items, (Py_ssize_t)i, job) < 0) {
            return -1;
        }
    }
    return take_metadata(pairs, job);
}

/* file_save(path, ((name, array), ...), ((key, value), ...)): writes a safetensors file
 * with these tensors and metadata, or replaces it when the new one is complete. Returns
 * None. After an exception an existing file is unchanged, unless only the sync of its
 * folder failed. */
PyObject *core_file_save(mlspy_state *state, PyObject *const *args)
{
    if (!PyTuple_Check(args[1]) || !PyTuple_Check(args[2])) {
        return PyErr_Format(PyExc_TypeError, "file_save wants two tuples of pairs");
    }
    save_job job = {0};
    mls_status st;
    mls_code code;
    PyObject *result = NULL, *encoded = NULL;
    if (PyUnicode_FSConverter(args[0], &encoded) &&
        save_job_init(state, args[1], args[2], &job) == 0) {
        const char *path = PyBytes_AS_STRING(encoded);
        MLSPY_WITHOUT_GIL(code = mls_safetensors_write(path, &job.content, state->kernels,
                                                       mlspy_crc(state), &st));
        result = code == MLS_OK ? Py_NewRef(Py_None)
                                : raise_status(state, &st, args[0], encoded);
    }
    save_job_fini(&job);
    Py_XDECREF(encoded);
    return result;
}

/* ---- loading ----
 *
 * The header is read first and gives the size of each array. Then file_load maps or reads
 * the file. Replacing the file in between is harmless: the descriptor refers to the file
 * whose header was read. */

/* Return the metadata of a file as a new dict of str, in the header's order; NULL with an
 * exception set. */
static PyObject *metadata_of(const mls_safetensors *file)
{
    PyObject *result = PyDict_New();
    for (size_t i = 0; result != NULL && i < file->metadata_count; i++) {
        mlspy_set(&result, mlspy_str_of(file->metadata[i].key),
                  mlspy_str_of(file->metadata[i].value));
    }
    return result;
}

/* Return the bytes of array `index` of a file, for mlspy_allocator. */
static size_t bytes_of(const void *context, size_t index)
{
    return ((const mls_safetensors *)context)->tensors[index].bytes;
}

/* Return a new dict of arrays in the header's order: over the mapping at `mapped`, which
 * `base` owns, or uninitialised in new memory if `base` is NULL. NULL with an exception
 * set. */
static PyObject *arrays_of(const mls_safetensors *file, const unsigned char *mapped,
                           PyObject *base)
{
    PyObject *result = PyDict_New();
    mlspy_allocator allocator = {
        .bytes_of = bytes_of, .context = file, .count = file->count};
    for (size_t i = 0; result != NULL && i < file->count; i++) {
        const mls_stored *t = &file->tensors[i];
        mlspy_set(&result, mlspy_str_of(t->name),
                  base == NULL
                      ? mlspy_allocator_array(&allocator, i, t->dtype, t->rank, t->shape)
                      : mlspy_array_over(&allocator, t->dtype, t->rank, t->shape,
                                         mapped + t->offset, base));
    }
    mlspy_allocator_fini(&allocator);
    return result;
}

static const char capsule_name[] = "mlstate.mapping";

/* Called when the last array over the mapping is freed. */
static void mapping_end(PyObject *capsule)
{
    mls_mapping *mapping = PyCapsule_GetPointer(capsule, capsule_name);
    mls_mapping_fini(mapping);
    mls_free(mapping);
}

PyObject *mlspy_mapping_capsule(mls_mapping *mapping)
{
    mls_mapping *owned = mls_alloc(1, sizeof *owned);
    PyObject *capsule = NULL;
    if (owned == NULL) {
        PyErr_NoMemory();
    } else {
        *owned = *mapping;
        capsule = PyCapsule_New(owned, capsule_name, mapping_end);
    }
    if (capsule == NULL) {
        mls_mapping_fini(mapping);
        mls_free(owned);
    }
    return capsule;
}

const unsigned char *mlspy_mapping_data(PyObject *capsule)
{
    const mls_mapping *mapping = PyCapsule_GetPointer(capsule, capsule_name);
    return mapping->data;
}

/* Set `*arrays` to a new dict of read-only arrays over one mapping, which exists as long
 * as any of them. The elements are read and compared before, if the file has checksums. A
 * failure of the core returns its code; after one of Python, returns MLS_OK, and
 * `*arrays` is NULL with an exception set. */
static mls_code load_mapped(const mlspy_state *state, int fd, const mls_safetensors *file,
                            PyObject **arrays, mls_status *st)
{
    mls_mapping mapping;
    mls_code code = MLS_OK;
    if (file->has_crc) {
        MLSPY_WITHOUT_GIL(code = mls_safetensors_read(fd, file, NULL, mlspy_crc(state),
                                                      state->pool, st));
    }
    if (code == MLS_OK) {
        code = mls_mapping_init(&mapping, fd, file->bytes, st);
    }
    PyObject *capsule = code == MLS_OK ? mlspy_mapping_capsule(&mapping) : NULL;
    if (capsule != NULL) {
        *arrays = arrays_of(file, mlspy_mapping_data(capsule), capsule);
        Py_DECREF(capsule);
    }
    return code;
}

/* Return the addresses of the memory of a dict's `count` arrays, in its order; the caller
 * frees the result. NULL without an exception if memory runs out. No other thread has the
 * dict yet. */
static void **array_addresses(PyObject *arrays, size_t count)
{
    void **addresses = mls_alloc(count, sizeof *addresses);
    PyObject *name, *array;
    Py_ssize_t at = 0;
    for (size_t i = 0; addresses != NULL && PyDict_Next(arrays, &at, &name, &array);
         i++) {
        addresses[i] = PyArray_DATA((PyArrayObject *)array);
    }
    return addresses;
}

/* As load_mapped, for new arrays with the file's elements. They are created with the GIL
 * and filled without it; no other thread has them yet. */
static mls_code load_copied(const mlspy_state *state, int fd, const mls_safetensors *file,
                            PyObject **arrays, mls_status *st)
{
    mls_code code = MLS_OK;
    PyObject *copies = arrays_of(file, NULL, NULL);
    void **addresses = copies == NULL ? NULL : array_addresses(copies, file->count);
    if (addresses != NULL) {
        MLSPY_WITHOUT_GIL(code = mls_safetensors_read(fd, file, addresses,
                                                      mlspy_crc(state), state->pool, st));
    } else if (copies != NULL) {
        PyErr_NoMemory();
    }
    if (addresses != NULL && code == MLS_OK) {
        *arrays = Py_NewRef(copies);
    }
    mls_free(addresses);
    Py_XDECREF(copies);
    return code;
}

/* Read a file: returns (arrays, metadata), or only the metadata if `mmap` is NULL; NULL
 * with an exception set. A true `mmap` maps the arrays. A true `verify` compares the
 * checksums of the header and of the elements, if the file has checksums. */
static PyObject *load_file(const mlspy_state *state, PyObject *path, PyObject *mmap,
                           PyObject *verify)
{
    bool maps = false, verifies;
    mls_safetensors file = {0};
    mls_status st;
    mls_code code;
    int fd = -1;
    PyObject *result = NULL, *arrays = NULL, *encoded = NULL;
    if ((mmap != NULL && mlspy_take_bool(mmap, &maps) < 0) ||
        mlspy_take_bool(verify, &verifies) < 0 ||
        !PyUnicode_FSConverter(path, &encoded)) {
        return NULL;
    }
    const char *text = PyBytes_AS_STRING(encoded);
    MLSPY_WITHOUT_GIL(
        code = mls_safetensors_open(text, mlspy_crc(state), verifies, &fd, &file, &st));
    code = code == MLS_OK && mmap != NULL ? mls_safetensors_check(&file, &st) : code;
    if (code == MLS_OK && mmap != NULL) {
        code = maps ? load_mapped(state, fd, &file, &arrays, &st)
                    : load_copied(state, fd, &file, &arrays, &st);
    }
    if (code != MLS_OK) {
        raise_status(state, &st, path, encoded);
    } else if (mmap == NULL) {
        result = metadata_of(&file);
    } else if (arrays != NULL) {
        result = Py_BuildValue("(NN)", arrays, metadata_of(&file));
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    mls_safetensors_fini(&file);
    Py_DECREF(encoded);
    return result;
}

/* file_load(path, mmap, verify) -> ({name: array}, {key: text}), as load_file */
PyObject *core_file_load(mlspy_state *state, PyObject *const *args)
{
    return load_file(state, args[0], args[1], args[2]);
}

/* file_metadata(path, verify) -> {key: text}: the metadata in the header of a file */
PyObject *core_file_metadata(mlspy_state *state, PyObject *const *args)
{
    return load_file(state, args[0], NULL, args[1]);
}
