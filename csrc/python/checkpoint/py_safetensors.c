/* py_safetensors: safetensors files. mlstate/checkpoint/__init__.py has the public
 * functions and their docstrings; these functions take positional arguments only.
 *
 * Each function has three parts. With the GIL, it converts Python objects to plain
 * pointers, which strong references keep valid. Without the GIL, the core does the work.
 * With the GIL again, it converts the status to an exception. The arguments are tuples
 * that the Python wrapper made for this call, so no other thread can change them. */
#include "checkpoint/py_safetensors.h"

#include "checkpoint/checkpoint_bindings.h"
#include "common/args.h"
#include "common/array_alloc.h"
#include "common/array_view.h"
#include "common/errors.h"
#include "common/module_state.h"

#include "base/memory.h"
#include "safetensors/safetensors.h"

#if defined(_WIN32)
#    error "file access needs POSIX"
#endif

#include <unistd.h>

/* A path as the caller passed it, and encoded for the system. */
typedef struct file_path {
    PyObject *given;   /* borrowed: str or bytes */
    PyObject *encoded; /* bytes, strong */
    const char *text;  /* contents of `encoded` */
} file_path;

/* Encode a str, bytes or object with __fspath__ for the system. A path with a NUL is
 * refused. */
static int take_path(PyObject *given, file_path *out)
{
    PyObject *encoded = NULL;
    if (!PyUnicode_FSConverter(given, &encoded)) {
        return -1;
    }
    *out = (file_path){
        .given = given, .encoded = encoded, .text = PyBytes_AS_STRING(encoded)};
    return 0;
}

/* Raise `st`. Errors about contents start with the file's name; an OSError shows its path
 * anyway. */
static PyObject *raise_status(PyObject *module, const mls_status *st,
                              const file_path *path)
{
    mls_status named = *st;
    if (st->code == MLS_E_FORMAT || st->code == MLS_E_CHECKSUM) {
        const char *slash = strrchr(path->text, '/');
        PyOS_snprintf(named.text, sizeof named.text, "%.100s: %.215s",
                      slash == NULL ? path->text : slash + 1, st->text);
    }
    return mlspy_raise(mlspy_state_of(module), &named, path->given);
}

/* Checksums use the instruction set of the module, which respects MLSTATE_CPU. */
static const mls_crc_kernels *crc_of(PyObject *module)
{
    return mls_crc_of(mlspy_state_of(module)->kernels->cpu);
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

/* Accepts a partly initialized job: `content.count` is the number of views. */
static void save_job_fini(save_job *job)
{
    for (size_t i = 0; job->views != NULL && i < job->content.count; i++) {
        mlspy_view_release(&job->views[i]);
    }
    mls_free(job->tensors);
    mls_free(job->metadata);
    mls_free(job->views);
}

/* Return pair `i` of a tuple; borrowed. */
static int take_pair(PyObject *pairs, Py_ssize_t i, PyObject **first, PyObject **second)
{
    PyObject *pair = PyTuple_GET_ITEM(pairs, i);
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "items() must give pairs");
        return -1;
    }
    *first = PyTuple_GET_ITEM(pair, 0);
    *second = PyTuple_GET_ITEM(pair, 1);
    return 0;
}

/* The view holds the array (or its DLPack capsule), so its memory stays valid without the
 * GIL, even if the dict changes. */
static int take_tensor(PyObject *module, PyObject *items, Py_ssize_t i, save_job *job)
{
    PyObject *name, *array;
    mls_named_tensor *t = &job->tensors[i];
    if (take_pair(items, i, &name, &array) < 0 ||
        mlspy_take_text(name, "tensor name", &t->name) < 0) {
        return -1;
    }
    /* names the tensor in errors about the array; may be truncated, never written to a
     * file */
    char what[MLS_NAME_BYTES];
    PyOS_snprintf(what, sizeof what, "tensor '%.140s'", t->name.data);
    if (mlspy_view_of(mlspy_state_of(module), array, what, &job->views[i]) < 0) {
        return -1;
    }
    t->tensor = &job->views[i].tensor;
    job->content.count++;
    return 0;
}

/* Convert the metadata pairs. The strings are borrowed. */
static int take_metadata(PyObject *pairs, save_job *job)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *key, *value;
        mls_str_pair *pair = &job->metadata[i];
        if (take_pair(pairs, i, &key, &value) < 0 ||
            mlspy_take_text(key, "metadata key", &pair->key) < 0 ||
            mlspy_take_text(value, "metadata value", &pair->value) < 0) {
            return -1;
        }
        job->content.metadata_count++;
    }
    return 0;
}

/* Do everything that needs Python, before the GIL is released. */
static int save_job_init(PyObject *module, PyObject *items, PyObject *pairs,
                         save_job *job)
{
    const size_t count = (size_t)PyTuple_GET_SIZE(items);
    job->tensors = mls_alloc(count, sizeof *job->tensors);
    job->views = mls_alloc(count, sizeof *job->views);
    job->metadata = mls_alloc((size_t)PyTuple_GET_SIZE(pairs), sizeof *job->metadata);
    if (job->tensors == NULL || job->views == NULL || job->metadata == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    job->content.tensors = job->tensors;
    job->content.metadata = job->metadata;
    for (size_t i = 0; i < count; i++) {
        if (take_tensor(module, items, (Py_ssize_t)i, job) < 0) {
            return -1;
        }
    }
    return take_metadata(pairs, job);
}

/* file_save(path, ((name, array), ...), ((key, value), ...)) */
static PyObject *file_save(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (mlspy_take_count("file_save", 3, count) < 0) {
        return NULL;
    }
    if (!PyTuple_Check(args[1]) || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "file_save wants two tuples of pairs");
        return NULL;
    }
    const mls_kernels *kernels = mlspy_state_of(module)->kernels;
    const mls_crc_kernels *crc = crc_of(module);
    save_job job = {0};
    file_path path = {0};
    mls_status st;
    mls_code code;
    PyObject *result = NULL;
    if (take_path(args[0], &path) < 0 ||
        save_job_init(module, args[1], args[2], &job) < 0) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
        code = mls_safetensors_write(path.text, &job.content, kernels, crc, &st);
    Py_END_ALLOW_THREADS
    result = code == MLS_OK ? Py_NewRef(Py_None) : raise_status(module, &st, &path);
done:
    save_job_fini(&job);
    Py_XDECREF(path.encoded);
    return result;
}

/* ---- loading ----
 *
 * The header is read first and gives the size of each array. Then file_load maps or reads
 * the file. Replacing the file in between is harmless: the descriptor refers to the file
 * whose header was read. */

/* Convert the metadata to a dict, in the header's order. */
static PyObject *metadata_of(const mls_safetensors *file)
{
    PyObject *result = PyDict_New();
    for (size_t i = 0; result != NULL && i < file->metadata_count; i++) {
        PyObject *key = mlspy_str_of(file->metadata[i].key);
        PyObject *value = key == NULL ? NULL : mlspy_str_of(file->metadata[i].value);
        if (value == NULL || PyDict_SetItem(result, key, value) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return result;
}

/* Size of a new array. */
static size_t bytes_of(const void *context, size_t index)
{
    return ((const mls_safetensors *)context)->tensors[index].bytes;
}

/* Return a dict of arrays in the header's order: over a mapping, or in new memory if
 * `base` is NULL. */
static PyObject *arrays_of(const mls_safetensors *file, const unsigned char *mapped,
                           PyObject *base)
{
    PyObject *result = PyDict_New();
    mlspy_room room = {bytes_of, file, file->count, NULL, 0, 0, {NULL}};
    for (size_t i = 0; result != NULL && i < file->count; i++) {
        const mls_stored *t = &file->tensors[i];
        PyObject *name = mlspy_str_of(t->name), *array = NULL;
        if (name != NULL) {
            array = base == NULL ? mlspy_room_array(&room, i, t->dtype, t->rank, t->shape)
                                 : mlspy_array_over(&room, t->dtype, t->rank, t->shape,
                                                    mapped + t->offset, base);
        }
        if (array == NULL || PyDict_SetItem(result, name, array) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(name);
        Py_XDECREF(array);
    }
    mlspy_room_fini(&room);
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

/* Return read-only arrays over one mapping, which exists as long as any of them. */
static PyObject *load_mapped(PyObject *module, const file_path *path, int fd,
                             const mls_safetensors *file)
{
    mls_status st;
    mls_mapping mapping;
    if (mls_mapping_init(&mapping, fd, mls_safetensors_end(file), &st) != MLS_OK) {
        return raise_status(module, &st, path);
    }
    PyObject *capsule = mlspy_mapping_capsule(&mapping);
    if (capsule == NULL) {
        return NULL;
    }
    PyObject *arrays = arrays_of(file, mlspy_mapping_data(capsule), capsule);
    Py_DECREF(capsule);
    return arrays;
}

/* Return the addresses of the arrays' memory, in the header's order. No other thread has
 * the dict yet. */
static void **array_addresses(PyObject *arrays, size_t count)
{
    void **places = mls_alloc(count, sizeof *places);
    PyObject *name, *array;
    Py_ssize_t at = 0;
    for (size_t i = 0; places != NULL && PyDict_Next(arrays, &at, &name, &array); i++) {
        places[i] = PyArray_DATA((PyArrayObject *)array);
    }
    return places;
}

/* Read the file into new arrays. They are created with the GIL and filled without it; no
 * other thread has them yet. */
static PyObject *load_copied(PyObject *module, const file_path *path, int fd,
                             const mls_safetensors *file)
{
    const mls_crc_kernels *crc = crc_of(module); /* a constant table */
    mls_pool *pool = mlspy_state_of(module)->pool;
    mls_status st;
    mls_code code;
    PyObject *arrays = arrays_of(file, NULL, NULL);
    if (arrays == NULL) {
        return NULL;
    }
    void **places = array_addresses(arrays, file->count);
    if (places == NULL) {
        Py_DECREF(arrays);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
        code = mls_safetensors_read(fd, file, places, crc, pool, &st);
    Py_END_ALLOW_THREADS
    mls_free(places);
    if (code != MLS_OK) {
        Py_CLEAR(arrays);
        raise_status(module, &st, path);
    }
    return arrays;
}

/* Open a file and read its header, without the GIL. Returns -1 with an exception set on
 * failure. */
static int open_file(PyObject *module, const file_path *path, bool verify, int *fd,
                     mls_safetensors *file)
{
    const mls_crc_kernels *crc = crc_of(module);
    mls_status st;
    mls_code code;
    Py_BEGIN_ALLOW_THREADS
        code = mls_safetensors_open(path->text, crc, verify, fd, file, &st);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        raise_status(module, &st, path);
        return -1;
    }
    return 0;
}

/* file_load(path, mmap, verify) -> ({name: array}, {key: text}) */
static PyObject *file_load(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (mlspy_take_count("file_load", 3, count) < 0) {
        return NULL;
    }
    const int maps = PyObject_IsTrue(args[1]);
    const int verifies = PyObject_IsTrue(args[2]);
    file_path path = {0};
    mls_safetensors file = {0};
    int fd = -1;
    PyObject *result = NULL;
    if (maps < 0 || verifies < 0 || take_path(args[0], &path) < 0 ||
        open_file(module, &path, verifies != 0, &fd, &file) < 0) {
        goto done;
    }
    PyObject *arrays = maps != 0 ? load_mapped(module, &path, fd, &file)
                                 : load_copied(module, &path, fd, &file);
    if (arrays != NULL) {
        result = Py_BuildValue("(NN)", arrays, metadata_of(&file));
    }
done:
    if (fd >= 0) {
        (void)close(fd);
    }
    mls_safetensors_fini(&file);
    Py_XDECREF(path.encoded);
    return result;
}

/* file_metadata(path, verify) -> {key: value} */
static PyObject *file_metadata(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (mlspy_take_count("file_metadata", 2, count) < 0) {
        return NULL;
    }
    const int verifies = PyObject_IsTrue(args[1]);
    file_path path = {0};
    mls_safetensors file = {0};
    int fd = -1;
    PyObject *result = NULL;
    if (verifies >= 0 && take_path(args[0], &path) == 0 &&
        open_file(module, &path, verifies != 0, &fd, &file) == 0) {
        result = metadata_of(&file);
        (void)close(fd);
    }
    mls_safetensors_fini(&file);
    Py_XDECREF(path.encoded);
    return result;
}

PyMethodDef mlspy_file_methods[] = {
    {"file_save", MLSPY_FASTCALL(file_save),
     "file_save(path, tensors, metadata, /)\n--\n\nWrite a safetensors file atomically."},
    {"file_load", MLSPY_FASTCALL(file_load),
     "file_load(path, mmap, verify, /)\n--\n\nArrays and metadata of a safetensors "
     "file."},
    {"file_metadata", MLSPY_FASTCALL(file_metadata),
     "file_metadata(path, verify, /)\n--\n\nThe metadata of a safetensors file."},
    {NULL, NULL, 0, NULL},
};
