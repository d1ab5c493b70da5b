/* py_shard_write: writes the listed shards (py_shard_items.c lists them); checks of JSON,
 * CRC32C, replaced and renamed files.
 *
 * mlstate/checkpoint/__init__.py has the public functions and their docstrings.
 *
 * shards_collect, shards_stage (py_shard_items.c): list and copy the shards
 * shards_write: calls mls_shards_write without the GIL */
#include "arguments/args.h"
#include "arguments/progress.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/codecs.h"
#include "checkpoint/merged_index_object.h"
#include "checkpoint/shard_items.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "checkpoint/write/write_plan.h"
#include "io/file.h"
#include "io/json_checksum.h"
#include "io/safe_filename.h"

#include <errno.h>
#include <unistd.h>

enum { MAX_JSON_VALUES = 64 << 20 }; /* in one text */

/* Return the result of a write as a new dict: "path", "bytes" and "crc32c" (hexadecimal
 * digits) of the index, "shards" and "data_bytes" of all shards that it lists, and
 * "new_shards", "new_bytes" and "new_files" that this write made. NULL with an exception
 * set. */
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
typedef struct waiting_caller {
    mlspy_shard_items *items;
    mlspy_progress *progress; /* stores the thread state while the GIL is released */
    PyObject *freed;          /* borrowed: the caller's function */
} waiting_caller;

/* The core's callback, called once without the GIL in the thread of the save when it no
 * longer reads the arrays: releases them, and calls the caller's function. An exception
 * of that function is printed and ignored, since the save continues. */
static void release_arrays(void *context)
{
    const waiting_caller *w = context;
    PyEval_RestoreThread(w->progress->saved);
    mlspy_shard_items_release(w->items, true /* all */);
    PyObject *result = PyObject_CallNoArgs(w->freed);
    if (result == NULL) {
        PyErr_WriteUnraisable(w->freed);
    }
    Py_XDECREF(result);
    w->progress->saved = PyEval_SaveThread();
}

/* As mls_shards_write, which returns when all is written, with threads of its own: the
 * module's pool serves one call at a time, and other calls would wait for the disk. */
static mls_code write_with_own_threads(mls_shard_job *job, mls_shards_written *out,
                                       mls_status *st)
{
    mls_pool *pool = NULL;
    mls_code code = mls_pool_new(mlspy_background_threads(job->pool), &pool, st);
    if (code == MLS_OK) {
        job->pool = pool;
        code = mls_shards_write(job, out, st);
        mls_pool_free(pool);
    }
    return code;
}

/* Write the shards `items` into the folder `path`, with the settings in `job`.
 * `callback` (or None) gets the progress; `freed`, unless it is None, is called when the
 * arrays are free, and the save then has its own threads. Returns the result of
 * written_dict, or NULL with an exception set. The folder is opened once and used by its
 * descriptor, so that renaming it during the save is harmless. */
static PyObject *write_shards(mlspy_shard_items *items, PyObject *path,
                              mls_shard_job *job, PyObject *callback, PyObject *freed)
{
    mlspy_progress progress;
    mls_shards_written written;
    mls_status st;
    mls_code code;
    waiting_caller caller = {.items = items, .progress = &progress, .freed = freed};
    if (mlspy_progress_init(&progress, callback) < 0 ||
        mlspy_open_folder(items->state, path, &job->folder) < 0) {
        return NULL;
    }
    job->progress = &progress.core;
    /* the callback runs in this thread, whose state `progress` stores */
    job->freed = freed == Py_None ? NULL : release_arrays;
    job->freed_context = &caller;
    mlspy_progress_begin(&progress);
    code = freed == Py_None ? mls_shards_write(job, &written, &st)
                            : write_with_own_threads(job, &written, &st);
    (void)close(job->folder);
    mlspy_progress_end(&progress);
    if (code != MLS_OK) {
        return mlspy_raise_under(items->state, &st, path, NULL);
    }
    return mlspy_progress_finish(&progress) < 0 ? NULL : written_dict(&written);
}

/* Convert the permission bits of new files, an int. Returns -1 with an exception set:
 * ValueError for any other bit. */
static int take_mode(const mlspy_state *state, PyObject *object, unsigned *out)
{
    int64_t mode;
    if (mlspy_take_int64(state, object, "mode", &mode) < 0) {
        return -1;
    }
    if (mode < 0 || mode > 0777) {
        return MLSPY_REFUSE(PyExc_ValueError,
                            "mode %lld has bits that are not permissions",
                            (long long)mode);
    }
    *out = (unsigned)mode;
    return 0;
}

/* Convert the name of a codec, which Python has checked, to members of the job; None
 * means no compression. Returns -1 with an exception set. */
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
    return MLSPY_REFUSE(PyExc_ValueError, "no codec is called '%.80U'", name);
}

/* Set the members of a job from the arguments that shards_write and shards_plan share,
 * and zero the rest. Shards smaller than `pack_below` bytes share a file. Returns the
 * items (borrowed from their capsule), or NULL with an exception set. */
static mlspy_shard_items *take_job(const mlspy_state *state, PyObject *generation,
                                   PyObject *items, PyObject *pack_below,
                                   mls_shard_job *job)
{
    mls_str digits;
    int64_t below;
    mlspy_shard_items *shards = mlspy_shard_items_of(items);
    if (shards == NULL || mlspy_take_text(generation, "generation", &digits) < 0 ||
        mlspy_take_int64(state, pack_below, "pack_below_bytes", &below) < 0) {
        return NULL;
    }
    if (digits.length != MLS_GENERATION_DIGITS || below < 0) {
        PyErr_SetString(PyExc_ValueError, below < 0 ? "pack_below_bytes is negative"
                                                    : "no such generation");
        return NULL;
    }
    *job = (mls_shard_job){.generation = digits.data,
                           .pack_below = (uint64_t)below,
                           .rank = shards->rank,
                           .world_size = shards->world_size,
                           .items = shards->list.items,
                           .count = shards->list.count,
                           .kernels = state->kernels,
                           .crc = mlspy_crc(state),
                           .pool = state->pool};
    return shards;
}

/* shards_write(folder, generation, items, previous_index, options, progress, freed, mode,
 * temporary) -> dict of the written index, as written_dict
 *
 * Writes the shards of `items` and an index of them as `generation`, the name of a
 * version of the checkpoint in hexadecimal digits. `previous_index` is a MergedIndex of
 * the committed checkpoint, whose unchanged shards are not written again, or None to
 * write everything. `options` is (pack_below: shards of fewer bytes share files, sparse:
 * omit rows of zeros, incremental: write only changed rows of a shard, compress: name of
 * a codec or None), see mls_shards_write. Python has checked the two flags, so any value
 * except True is False; `pack_below` comes from the user. `progress` is called with the
 * number of bytes since its last call, or is None. `freed` is called at most once,
 * without arguments, after the last read of the arrays of the list, and not if writing
 * failed before; if it is set, the save runs beside other work, and has its own threads
 * instead of the shared ones. `mode`: permission bits of new files. `temporary`: the
 * files are read soon and then deleted, so they are not synced.
 */
PyObject *core_shards_write(mlspy_state *state, PyObject *const *args)
{
    PyObject *pack_below, *sparse, *incremental, *compress;
    mls_shard_job job;
    if (mlspy_take_tuple(args[4], "options", "OOOO", &pack_below, &sparse, &incremental,
                         &compress) < 0) {
        return NULL;
    }
    mlspy_shard_items *items = take_job(state, args[1], args[2], pack_below, &job);
    if (items == NULL || take_codec(compress, &job) < 0 ||
        take_mode(state, args[7], &job.mode) < 0 ||
        (args[3] != Py_None &&
         mlspy_merged_index_of_rank(state, args[3], (int64_t)items->rank, &job.before) <
             0)) {
        return NULL;
    }
    job.sparse = sparse == Py_True;
    job.incremental = incremental == Py_True;
    job.codecs = mlspy_codecs();
    job.temporary = args[8] == Py_True;
    return write_shards(items, args[0], &job, args[5], args[6]);
}

/* shards_plan(generation, items, pack_below) -> bytes: the text of the index that
 * shards_write would make, without its checksums; writes nothing */
PyObject *core_shards_plan(mlspy_state *state, PyObject *const *args)
{
    mls_shard_job job;
    mls_json_writer text = {0};
    mls_status st;
    mls_code code;
    PyObject *result = NULL;
    if (take_job(state, args[0], args[1], args[2], &job) == NULL) {
        return NULL;
    }
    MLSPY_WITHOUT_GIL(code = mls_write_plan_index(&job, &text, &st));
    if (mlspy_check(state, code, &st) == 0) {
        result = PyBytes_FromStringAndSize(text.data, (Py_ssize_t)text.length);
    }
    mls_json_writer_fini(&text);
    return result;
}

/* ---- JSON checksums and small files ---- */

/* json_checksum_set(text) -> bytes: a copy of a JSON text, which starts with the checksum
 * member, with the correct checksum in it */
PyObject *core_json_checksum_set(mlspy_state *state, PyObject *const *args)
{
    char *bytes;
    Py_ssize_t length;
    const size_t start = sizeof MLS_JSON_CHECKSUM_START - 1;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    if ((size_t)length < start || memcmp(bytes, MLS_JSON_CHECKSUM_START, start) != 0) {
        return PyErr_Format(PyExc_ValueError,
                            "the text must start with " MLS_JSON_CHECKSUM_START);
    }
    PyObject *result = PyBytes_FromStringAndSize(bytes, length);
    if (result != NULL) {
        mls_json_checksum_set(PyBytes_AS_STRING(result), (size_t)length,
                              mlspy_crc(state));
    }
    return result;
}

/* json_checksum_check(data, path): raises ChecksumError or FormatError unless the
 * checksum in the JSON text `data` is correct; `path` is only for the error */
PyObject *core_json_checksum_check(mlspy_state *state, PyObject *const *args)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    return mls_json_checksum_check(bytes, (size_t)length, mlspy_crc(state), &st) == MLS_OK
               ? Py_NewRef(Py_None)
               : mlspy_raise(state, &st, args[1]);
}

/* json_check(data, max_depth, path): raises FormatError unless `data` is JSON as
 * docs/format.md requires, nested at most `max_depth` deep, with at most MAX_JSON_VALUES
 * values; `path` is only for the error */
PyObject *core_json_check(mlspy_state *state, PyObject *const *args)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    mls_json *json = NULL;
    mls_code code;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    const size_t max_depth = PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    MLSPY_WITHOUT_GIL(code = mls_json_parse(bytes, (size_t)length,
                                            (mls_json_limits){max_depth, MAX_JSON_VALUES},
                                            &json, &st));
    mls_json_free(json);
    return code == MLS_OK ? Py_NewRef(Py_None) : mlspy_raise(state, &st, args[2]);
}

/* crc32c(data) -> the CRC32C of any buffer, an int
 *
 * Always releases the GIL: the usual input is an index, which is large.
 */
PyObject *core_crc32c(mlspy_state *state, PyObject *const *args)
{
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const mls_crc_kernels *crc = mlspy_crc(state);
    uint32_t checksum;
    MLSPY_WITHOUT_GIL(checksum = crc->update(0, view.buf, (size_t)view.len));
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(checksum);
}

/* file_replace(path, data, mode): makes `data` the content of a file, or creates the file
 *
 * Used for the roots of checkpoints. Afterwards the file contains all of `data`, durably;
 * after a failure it is unchanged, unless only the sync of its folder failed. `mode`,
 * less the umask, applies to a new file.
 */
PyObject *core_file_replace(mlspy_state *state, PyObject *const *args)
{
    char *bytes;
    Py_ssize_t length;
    PyObject *encoded = NULL;
    mls_status st;
    mls_code code;
    unsigned mode;
    if (take_mode(state, args[2], &mode) < 0 ||
        PyBytes_AsStringAndSize(args[1], &bytes, &length) < 0 ||
        !PyUnicode_FSConverter(args[0], &encoded)) {
        return NULL;
    }
    const char *to = PyBytes_AS_STRING(encoded);
    MLSPY_WITHOUT_GIL(code = mls_file_replace(to, mode, bytes, (size_t)length, &st));
    Py_DECREF(encoded);
    return code == MLS_OK ? Py_NewRef(Py_None) : mlspy_raise(state, &st, args[0]);
}

/* folder_sync(path): make the names in a folder durable; the contents of its files are
 * synced separately */
PyObject *core_folder_sync(mlspy_state *state, PyObject *const *args)
{
    mls_status st;
    int fd, reason;
    if (mlspy_open_folder(state, args[0], &fd) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        reason = mls_folder_sync(fd);
        (void)close(fd);
    Py_END_ALLOW_THREADS
    if (reason != 0) {
        mls_fail_os(&st, reason, "cannot sync the folder to disk");
        return mlspy_raise(state, &st, args[0]);
    }
    return Py_NewRef(Py_None);
}

/* path_rename(source, target, swap): renames without replacing anything, or swaps two
 * names if `swap`; raises OSError, whose meaning the caller knows */
PyObject *core_path_rename(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    bool swap;
    int reason;
    PyObject *from = NULL, *to = NULL;
    if (mlspy_take_bool(args[2], &swap) < 0 || !PyUnicode_FSConverter(args[0], &from)) {
        return NULL;
    }
    if (!PyUnicode_FSConverter(args[1], &to)) {
        Py_DECREF(from);
        return NULL;
    }
    const char *old_name = PyBytes_AS_STRING(from), *new_name = PyBytes_AS_STRING(to);
    const mls_rename_mode mode = swap ? MLS_RENAME_SWAP : MLS_RENAME_NEW;
    MLSPY_WITHOUT_GIL(reason = mls_path_rename(old_name, new_name, mode));
    Py_DECREF(from);
    Py_DECREF(to);
    if (reason != 0) {
        errno = reason;
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, args[1]);
    }
    return Py_NewRef(Py_None);
}

/* file_name(name, number) -> a file name for `name` that is valid on any system, without
 * a suffix; only long names are truncated, and then contain the number, which the caller
 * makes unique among them */
PyObject *core_file_name(mlspy_state *state, PyObject *const *args)
{
    mls_str text;
    int64_t number;
    char encoded[MLS_FILENAME_BYTES + 1];
    if (mlspy_take_text(args[0], "name", &text) < 0 ||
        mlspy_take_int64(state, args[1], "number", &number) < 0) {
        return NULL;
    }
    (void)mls_filename_encode(text, (uint64_t)number, encoded);
    return PyUnicode_FromString(encoded);
}
