/* py_shard_write: writes the shards that py_shard_items.c listed (shards_write), or plans
 * their index (shards_plan).
 *
 * mlstate/checkpoint/_save/commit.py and _save/plan_save.py call it.
 */
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
#include "io/json_checksum.h"

#include <unistd.h>

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
 * a codec or None, digest: record the shards' digests), see mls_shards_write. Python has
 * checked the three flags, so any value except True is False; `pack_below` comes from the
 * user. `progress` is called with the number of bytes since its last call, or is None.
 * `freed` is called at most once, without arguments, after the last read of the arrays of
 * the list, and not if writing failed before; if it is set, the save runs beside other
 * work, and has its own threads instead of the shared ones. `mode`: permission bits of
 * new files. `temporary`: the files are read soon and then deleted, so they are not
 * synced.
 */
PyObject *core_shards_write(mlspy_state *state, PyObject *const *args)
{
    PyObject *pack_below, *sparse, *incremental, *compress, *digest;
    mls_shard_job job;
    if (mlspy_take_tuple(args[4], "options", "OOOOO", &pack_below, &sparse, &incremental,
                         &compress, &digest) < 0) {
        return NULL;
    }
    mlspy_shard_items *items = take_job(state, args[1], args[2], pack_below, &job);
    if (items == NULL || take_codec(compress, &job) < 0 ||
        mlspy_take_mode(state, args[7], &job.mode) < 0 ||
        (args[3] != Py_None &&
         mlspy_merged_index_of_rank(state, args[3], (int64_t)items->rank, &job.before) <
             0)) {
        return NULL;
    }
    job.sparse = sparse == Py_True;
    job.incremental = incremental == Py_True;
    job.digest_keys = digest == Py_True ? &state->digest_keys : NULL;
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
