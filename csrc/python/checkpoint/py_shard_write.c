/* py_shard_write: write one rank's shards, and small helpers for checkpoints.
 * mlstate/checkpoint/__init__.py has the public functions and their docstrings; these
 * functions take positional arguments only.
 *
 * shards_collect, shards_stage (py_staging.c): list and copy the shards
 * shards_write: calls mls_shards_write without the GIL */
#include "checkpoint/checkpoint_bindings.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/codecs.h"
#include "checkpoint/merged_index_object.h"
#include "checkpoint/shard_items.h"
#include "common/args.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "common/progress.h"

#include "checkpoint/write/write_plan.h"
#include "io/file.h"
#include "io/json_checksum.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

enum { MANIFEST_NODES = 64 << 20 };

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

/* State of a background save whose caller waits until its arrays may change. */
typedef struct waiting {
    mlspy_shard_items *items;
    mlspy_progress *progress; /* stores the thread state while the GIL is released */
    PyObject *call;           /* borrowed */
} waiting_caller;

/* Called when the core no longer reads the arrays. An exception of the callback is
 * printed and ignored, since the save continues. */
static void release_arrays(void *context)
{
    const waiting_caller *w = context;
    PyEval_RestoreThread(w->progress->saved);
    mlspy_shard_items_release(w->items, true);
    PyObject *result = PyObject_CallNoArgs(w->call);
    if (result == NULL) {
        PyErr_WriteUnraisable(w->call);
    }
    Py_XDECREF(result);
    w->progress->saved = PyEval_SaveThread();
}

/* A background save has its own threads: the module's pool serves one call at a time, and
 * would be blocked until the disk is done. */
static mls_code write_in_background(mls_shard_job *job, mls_shards_written *out,
                                    mls_status *st)
{
    mls_pool *pool = NULL;
    mls_code code = mls_pool_new(mlspy_threads_aside(job->pool), &pool, st);
    if (code == MLS_OK) {
        job->pool = pool;
        code = mls_shards_write(job, out, st);
        mls_pool_free(pool);
    }
    return code;
}

/* Write a list of shard items. The folder is opened once and used by its descriptor, so
 * that renaming it during the save is harmless. */
static PyObject *write_gathered(mlspy_shard_items *g, PyObject *path, mls_shard_job *job,
                                PyObject *callback, PyObject *freed)
{
    mlspy_progress progress;
    mls_shards_written written;
    mls_status st;
    mls_code code;
    waiting_caller who = {.items = g, .progress = &progress, .call = freed};
    if (mlspy_progress_init(&progress, callback) < 0 ||
        mlspy_open_folder(g->state, path, &job->folder) < 0) {
        return NULL;
    }
    job->rank = g->rank;
    job->world_size = g->world_size;
    job->items = g->list.items;
    job->count = g->list.count;
    job->kernels = g->state->kernels;
    job->crc = mls_crc_of(g->state->kernels->cpu);
    job->pool = g->state->pool;
    job->progress = &progress.core;
    /* the callback runs in this thread, whose state `progress` stores */
    job->freed = freed == Py_None ? NULL : release_arrays;
    job->freed_context = &who;
    mlspy_progress_begin(&progress);
    code = freed == Py_None ? mls_shards_write(job, &written, &st)
                            : write_in_background(job, &written, &st);
    (void)close(job->folder);
    mlspy_progress_end(&progress);
    if (code != MLS_OK) {
        return mlspy_raise_under(g->state, &st, path, NULL);
    }
    return mlspy_progress_finish(&progress) < 0 ? NULL : written_dict(&written);
}

/* Convert the permission bits of new files. */
static int take_mode(const mlspy_state *state, PyObject *object, unsigned *out)
{
    int64_t mode;
    if (mlspy_take_int64(state, object, "mode", &mode) < 0) {
        return -1;
    }
    if (mode < 0 || mode > 0777) {
        PyErr_Format(PyExc_ValueError, "mode %lld has bits that are not permissions",
                     (long long)mode);
        return -1;
    }
    *out = (unsigned)mode;
    return 0;
}

/* Convert the name of a codec, which Python has checked; None means no compression. */
static int take_codec(PyObject *name, mls_shard_job *job)
{
    mls_str text;
    if (name == Py_None) {
        return 0;
    }
    if (mlspy_take_text(name, "compress", &text) < 0) {
        return -1;
    }
    for (int i = 0; i < MLS_CODEC_COUNT; i++) {
        if (mls_str_is(text, mls_codec_name((mls_codec)i))) {
            job->compress = true;
            job->codec = (mls_codec)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "no codec is called '%.80U'", name);
    return -1;
}

/* Convert (pack_below, sparse, incremental, compress). Python has checked the two flags,
 * so any value except True is False; the number comes from the user. */
static int take_how(const mlspy_state *state, PyObject *how, mls_shard_job *job)
{
    int64_t pack_below;
    if (!PyTuple_Check(how) || PyTuple_GET_SIZE(how) != 4) {
        PyErr_SetString(PyExc_TypeError,
                        "not (pack_below, sparse, incremental, compress)");
        return -1;
    }
    if (mlspy_take_int64(state, PyTuple_GET_ITEM(how, 0), "pack_below_bytes",
                         &pack_below) < 0) {
        return -1;
    }
    if (pack_below < 0) {
        PyErr_SetString(PyExc_ValueError, "pack_below_bytes is negative");
        return -1;
    }
    job->pack_below = (uint64_t)pack_below;
    job->sparse = PyTuple_GET_ITEM(how, 1) == Py_True;
    job->incremental = PyTuple_GET_ITEM(how, 2) == Py_True;
    job->codecs = mlspy_codecs();
    return take_codec(PyTuple_GET_ITEM(how, 3), job);
}

/* shards_write(folder, generation, items, before, how, progress, freed, mode, temporary)
 * -> dict
 *
 * `before` is a MergedIndex of the committed checkpoint, or None to write everything.
 * `progress` is called with bytes. `freed` is called once, without arguments, after the
 * last read of the arrays of the list; if it is set, the save has its own threads.
 * `temporary`: the files are read soon and then deleted, so they are not synced.
 */
static PyObject *shards_write(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_shard_job job = {0};
    mls_str generation;
    if (mlspy_take_count("shards_write", 9, count) < 0 ||
        take_mode(state, args[7], &job.mode) < 0 ||
        mlspy_take_text(args[1], "generation", &generation) < 0 ||
        take_how(state, args[4], &job) < 0) {
        return NULL;
    }
    mlspy_shard_items *g = mlspy_shard_items_of(args[2]);
    if (g == NULL) {
        return NULL;
    }
    if (generation.length != MLS_GENERATION_DIGITS) {
        PyErr_SetString(PyExc_ValueError, "no such generation");
        return NULL;
    }
    job.generation = generation.data;
    if (args[3] != Py_None &&
        mlspy_merged_index_index(state, args[3], (int64_t)g->rank, &job.before) < 0) {
        return NULL;
    }
    job.temporary = args[8] == Py_True;
    return write_gathered(g, args[0], &job, args[5], args[6]);
}

/* shards_plan(generation, items, pack_below) -> bytes
 *
 * Returns the index that shards_write would make, without its checksums. */
static PyObject *shards_plan(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_shard_job job = {.crc = mls_crc_of(state->kernels->cpu)};
    mls_json_writer text = {0};
    mls_str generation;
    mls_status st;
    mls_code code;
    int64_t pack_below;
    PyObject *result = NULL;
    if (mlspy_take_count("shards_plan", 3, count) < 0 ||
        mlspy_take_text(args[0], "generation", &generation) < 0 ||
        mlspy_take_int64(state, args[2], "pack_below_bytes", &pack_below) < 0) {
        return NULL;
    }
    const mlspy_shard_items *g = mlspy_shard_items_of(args[1]);
    if (g == NULL) {
        return NULL;
    }
    if (generation.length != MLS_GENERATION_DIGITS || pack_below < 0) {
        PyErr_SetString(PyExc_ValueError, pack_below < 0 ? "pack_below_bytes is negative"
                                                         : "no such generation");
        return NULL;
    }
    job.generation = generation.data;
    job.pack_below = (uint64_t)pack_below;
    job.items = g->list.items;
    job.count = g->list.count;
    job.rank = g->rank;
    job.world_size = g->world_size;
    Py_BEGIN_ALLOW_THREADS
        code = mls_write_plan_index(&job, &text, &st);
    Py_END_ALLOW_THREADS
    if (code != MLS_OK) {
        mlspy_raise(state, &st, NULL);
    } else {
        result = PyBytes_FromStringAndSize(text.data, (Py_ssize_t)text.length);
    }
    mls_json_writer_fini(&text);
    return result;
}

/* ---- JSON checksums and small files ---- */

/* json_checksum_set(text) -> bytes: set the checksum of a text that starts with the
 * checksum member */
static PyObject *json_checksum_set(PyObject *module, PyObject *text)
{
    char *bytes;
    Py_ssize_t length;
    const size_t start = sizeof MLS_JSON_CHECKSUM_START - 1;
    if (PyBytes_AsStringAndSize(text, &bytes, &length) < 0) {
        return NULL;
    }
    if ((size_t)length < start || memcmp(bytes, MLS_JSON_CHECKSUM_START, start) != 0) {
        PyErr_SetString(PyExc_ValueError,
                        "the text must start with " MLS_JSON_CHECKSUM_START);
        return NULL;
    }
    PyObject *result = PyBytes_FromStringAndSize(bytes, length);
    if (result != NULL) {
        mls_json_checksum_set(PyBytes_AS_STRING(result), (size_t)length,
                              mls_crc_of(mlspy_state_of(module)->kernels->cpu));
    }
    return result;
}

/* json_checksum_check(data, path): raise unless the checksum of `data` is correct */
static PyObject *json_checksum_check(PyObject *module, PyObject *const *args,
                                     Py_ssize_t count)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    if (mlspy_take_count("json_checksum_check", 2, count) < 0 ||
        PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    const mlspy_state *state = mlspy_state_of(module);
    return mls_json_checksum_check(bytes, (size_t)length, mls_crc_of(state->kernels->cpu),
                                   &st) == MLS_OK
               ? Py_NewRef(Py_None)
               : mlspy_raise(state, &st, args[1]);
}

/* json_check(data, depth, path): raise unless `data` is JSON as docs/format.md requires
 */
static PyObject *json_check(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    mls_json *json = NULL;
    mls_code code;
    if (mlspy_take_count("json_check", 3, count) < 0 ||
        PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    const size_t depth = PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        code = mls_json_parse(bytes, (size_t)length,
                              (mls_json_limits){depth, MANIFEST_NODES}, &json, &st);
    Py_END_ALLOW_THREADS
    mls_json_free(json);
    return code == MLS_OK ? Py_NewRef(Py_None)
                          : mlspy_raise(mlspy_state_of(module), &st, args[2]);
}

/* crc32c(data) -> int
 *
 * Accepts any buffer. Always releases the GIL: the usual input is an index, which is
 * large. */
static PyObject *crc32c(PyObject *module, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const mls_crc_kernels *crc = mls_crc_of(mlspy_state_of(module)->kernels->cpu);
    uint32_t found;
    Py_BEGIN_ALLOW_THREADS
        found = crc->update(0, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(found);
}

/* Replace a file atomically and durably. Used for the roots of checkpoints. */
static mls_code replace_file(const char *path, unsigned mode, const char *data,
                             size_t length, mls_status *st)
{
    mls_atomic_file file;
    mls_code code = mls_atomic_begin(path, mode, &file, st);
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

/* file_replace(path, data, mode)
 *
 * Afterwards the file contains all of `data`, durably; after a failure it is unchanged.
 * `mode`, less the umask, applies to a new file. */
static PyObject *file_replace(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    char *bytes;
    Py_ssize_t length;
    PyObject *encoded = NULL;
    mls_status st;
    mls_code code;
    unsigned mode;
    if (mlspy_take_count("file_replace", 3, count) < 0 ||
        take_mode(mlspy_state_of(module), args[2], &mode) < 0 ||
        PyBytes_AsStringAndSize(args[1], &bytes, &length) < 0 ||
        !PyUnicode_FSConverter(args[0], &encoded)) {
        return NULL;
    }
    const char *to = PyBytes_AS_STRING(encoded);
    Py_BEGIN_ALLOW_THREADS
        code = replace_file(to, mode, bytes, (size_t)length, &st);
    Py_END_ALLOW_THREADS
    Py_DECREF(encoded);
    return code == MLS_OK ? Py_NewRef(Py_None)
                          : mlspy_raise(mlspy_state_of(module), &st, args[0]);
}

/* folder_sync(path): make the names in a folder durable; the contents of its files are
 * synced separately */
static PyObject *folder_sync(PyObject *module, PyObject *path)
{
    const mlspy_state *state = mlspy_state_of(module);
    mls_status st;
    int fd, reason;
    if (mlspy_open_folder(state, path, &fd) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        reason = mls_folder_sync(fd);
        (void)close(fd);
    Py_END_ALLOW_THREADS
    if (reason != 0) {
        mls_fail_os(&st, reason, "cannot sync the folder to disk");
        return mlspy_raise(state, &st, path);
    }
    return Py_NewRef(Py_None);
}

PyMethodDef mlspy_shards_methods[] = {
    {"shards_write", MLSPY_FASTCALL(shards_write),
     "shards_write(folder, generation, items, before, how, progress, freed, mode, "
     "temporary, /)\n--\n\nStore one rank's shards; durably unless temporary."},
    {"shards_plan", MLSPY_FASTCALL(shards_plan),
     "shards_plan(generation, items, pack_below, /)\n--\n\nThe index that "
     "shards_write would make."},
    {"json_checksum_set", json_checksum_set, METH_O,
     "json_checksum_set(text, /)\n--\n\nFill in a text's own checksum."},
    {"json_checksum_check", MLSPY_FASTCALL(json_checksum_check),
     "json_checksum_check(data, path, /)\n--\n\nRaise unless the checksum of a text is "
     "correct."},
    {"json_check", MLSPY_FASTCALL(json_check),
     "json_check(data, depth, path, /)\n--\n\nRaise unless a text is JSON, nested at "
     "most "
     "`depth` deep."},
    {"crc32c", crc32c, METH_O, "crc32c(data, /)\n--\n\nCRC32C of a buffer."},
    {"file_replace", MLSPY_FASTCALL(file_replace),
     "file_replace(path, data, mode, /)\n--\n\nReplace a file, atomically and durably."},
    {"folder_sync", folder_sync, METH_O,
     "folder_sync(path, /)\n--\n\nMake the names in a folder durable."},
    {NULL, NULL, 0, NULL},
};
