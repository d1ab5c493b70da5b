/* py_prompt_log: PromptLog: match, put, mark, prune, verify, repair, records; waits for
 * another writer (`timeout`).
 */
#include "arguments/args.h"
#include "arguments/progress.h"
#include "arguments/results.h"
#include "array/array_view.h"
#include "common/attempts.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "prompts/prompt_objects.h"

#include "base/memory.h"
#include "prompts/prompt_extra.h"

#include <errno.h>
#include <stdio.h>
#include <time.h>

enum { PAUSE = 2 * 1000 * 1000 }; /* nanoseconds between two attempts to lock */

/* ---- opening and closing ---- */

/* Refuse further calls, and free the log if none is in progress. */
static void close_log(mlspy_prompt_log *self)
{
    mls_prompt_log *log = NULL;
    MLSPY_BEGIN_LOCKED((PyObject *)self)
        self->is_closed = true;
        if (self->calls == 0) {
            log = self->log;
            self->log = NULL;
        }
    MLSPY_END_LOCKED();
    mls_prompt_log_free(log);
}

/* Begin a call: return the log, or NULL with ValueError set if it is closed. The caller
 * ends the call with end_call. */
static mls_prompt_log *begin_call(mlspy_prompt_log *self)
{
    mls_prompt_log *log = NULL;
    MLSPY_BEGIN_LOCKED((PyObject *)self)
        if (!self->is_closed) {
            log = self->log;
            self->calls++;
        }
    MLSPY_END_LOCKED();
    if (log == NULL) {
        PyErr_SetString(PyExc_ValueError, "the prompt store is closed");
    }
    return log;
}

/* End a call. The last one of a closed log frees it. */
static void end_call(mlspy_prompt_log *self)
{
    bool is_closed;
    MLSPY_BEGIN_LOCKED((PyObject *)self)
        self->calls--;
        is_closed = self->is_closed;
    MLSPY_END_LOCKED();
    if (is_closed) {
        close_log(self);
    }
}

/* Raise the error of a call of the core; after MLS_E_STOPPED the exception of a signal
 * handler is set already. Does nothing after MLS_OK. Returns NULL. */
static PyObject *raise_failure(const mlspy_state *state, mls_code code,
                               const mls_status *st, PyObject *path)
{
    if (code != MLS_OK && code != MLS_E_STOPPED) {
        mlspy_raise(state, st, path);
    }
    return NULL;
}

/* Begin work without the GIL and without the log's own lock: a signal stops it, and its
 * handler runs meanwhile. The caller ends it with mlspy_progress_end. */
static void begin_work(mlspy_progress *progress)
{
    (void)mlspy_progress_init(progress, Py_None); /* cannot fail with None */
    mlspy_progress_begin(progress);
}

static void log_dealloc(mlspy_prompt_log *self)
{
    mls_prompt_log_free(self->log);
    Py_XDECREF(self->path);
    mlspy_free(self);
}

/* PromptLog(path, create): open the store in the folder `path`, and create it if `create`
 * and it is missing. Raises the exceptions of mls_prompt_log_open, with `path`. */
static PyObject *log_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const mls_progress progress = {.report = mlspy_attempt_continues};
    const mlspy_state *state = mlspy_state_of_type(type);
    PyObject *path, *encoded = NULL;
    int create;
    mls_status st;
    mls_code code = MLS_E_STOPPED;
    if (mlspy_take_positional(type, args, kwargs, "Op", &path, &create) < 0 ||
        !PyUnicode_FSConverter(path, &encoded)) {
        return NULL;
    }
    mlspy_prompt_log *self = (mlspy_prompt_log *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->path = PyUnicode_DecodeFSDefault(PyBytes_AS_STRING(encoded));
        const char *name = PyBytes_AS_STRING(encoded);
        for (mlspy_attempts attempts = {0}; mlspy_attempt(&attempts, code);) {
            MLSPY_WITHOUT_GIL(code = mls_prompt_log_open(name, create, state->kernels,
                                                         &progress, &self->log, &st));
        }
        raise_failure(state, code, &st, path);
        if (code != MLS_OK || self->path == NULL) {
            Py_CLEAR(self);
        }
    }
    Py_DECREF(encoded);
    return (PyObject *)self;
}

/* close(): write the index file if that saves much work later, and close the log once no
 * call is in progress. Does nothing on a closed log. */
static PyObject *log_close(mlspy_prompt_log *self, PyObject *unused)
{
    (void)unused;
    mls_prompt_log *log = begin_call(self);
    mlspy_attempts attempts = {0};
    if (log == NULL) {
        PyErr_Clear(); /* it is closed already */
    } else {
        if (mlspy_attempt(&attempts, MLS_E_STOPPED)) {
            MLSPY_WITHOUT_GIL(mls_prompt_log_save_index(log));
            (void)mlspy_attempt(&attempts, MLS_OK); /* the first one is enough */
        }
        end_call(self);
        close_log(self);
        if (PyErr_Occurred()) { /* of a signal handler */
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* ---- prompts ---- */

static void release_prefix(mls_prompt_prefix *prefix)
{
    mls_free((void *)(uintptr_t)prefix->tokens);
    prefix->tokens = NULL;
}

/* Convert the arguments (fingerprint, tokens, block_tokens) at `args` to `*out`: bytes
 * that identify the model, the token ids of a prompt, and the tokens of a block, the unit
 * of its prefixes. `extras`: bytes as in mls_prompt_extras_check, or NULL. The token ids
 * are copied: the caller frees them with release_prefix. Fingerprint and extras are
 * borrowed. Returns -1 with an exception set. */
static int take_prefix(const mlspy_state *state, PyObject *const *args, PyObject *extras,
                       mls_prompt_prefix *out)
{
    char *fingerprint, *extra = NULL;
    Py_ssize_t bytes, extra_bytes = 0;
    int64_t block;
    mlspy_view view = {.owner = NULL};
    uint32_t *tokens = NULL;
    mls_status st;
    if (PyBytes_AsStringAndSize(args[0], &fingerprint, &bytes) < 0 ||
        mlspy_take_int64(state, args[2], "block_tokens", &block) < 0 ||
        (extras != NULL && PyBytes_AsStringAndSize(extras, &extra, &extra_bytes) < 0)) {
        return -1;
    }
    if (bytes < 1 || bytes > MLS_PROMPT_FINGERPRINT) {
        return MLSPY_REFUSE(PyExc_ValueError, "a fingerprint has 1 to %d bytes, got %zd",
                            MLS_PROMPT_FINGERPRINT, bytes);
    }
    if (block < 1 || block > MLS_PROMPT_MAX_TOKENS) {
        return MLSPY_REFUSE(PyExc_ValueError, "block_tokens must be 1 to %d, got %lld",
                            MLS_PROMPT_MAX_TOKENS, (long long)block);
    }
    if (mlspy_view_for(state, args[1], "tokens", false /* read-only */, &view) < 0) {
        return -1;
    }
    const size_t count = view.tensor.rank == 1 ? view.tensor.shape[0] : 0;
    mls_code code = mls_prompt_extras_check((const unsigned char *)extra,
                                            (size_t)extra_bytes, count, &st);
    code = code != MLS_OK ? code : mls_prompt_tokens(&view.tensor, &tokens, &st);
    mlspy_view_release(&view);
    *out = (mls_prompt_prefix){.fingerprint = (const unsigned char *)fingerprint,
                               .fingerprint_bytes = (size_t)bytes,
                               .tokens = tokens,
                               .count = count,
                               .block_tokens = (size_t)block,
                               .extras = (const unsigned char *)extra,
                               .extra_count = (size_t)extra_bytes / MLS_PROMPT_EXTRA};
    return mlspy_check(state, code, &st);
}

/* match(fingerprint, tokens, block_tokens, extras=b"") -> PromptMatch: find the records
 * under the longest stored prefix of the prompt. */
static PyObject *log_match(mlspy_prompt_log *self, PyObject *const *args,
                           Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mls_prompt_prefix prefix = {0};
    mls_prompt_match *match = NULL;
    mls_status st;
    mls_code code = MLS_E_STOPPED;
    if ((count != 3 && mlspy_take_count("match", 4, count) < 0) ||
        take_prefix(state, args, count == 4 ? args[3] : NULL, &prefix) < 0) {
        return NULL;
    }
    mls_prompt_log *log = begin_call(self);
    PyObject *result = NULL;
    if (log != NULL) {
        for (mlspy_attempts attempts = {0}; mlspy_attempt(&attempts, code);) {
            MLSPY_WITHOUT_GIL(code = mls_prompt_match_new(log, &prefix, &match, &st));
        }
        result = code == MLS_OK ? mlspy_prompt_match_of(state, match, self->path)
                                : raise_failure(state, code, &st, self->path);
        end_call(self);
    }
    release_prefix(&prefix);
    return result;
}

/* ---- the lock ---- */

/* Sleep without the GIL. */
static void pause_briefly(void)
{
    const struct timespec time = {.tv_nsec = PAUSE};
    MLSPY_WITHOUT_GIL(nanosleep(&time, NULL));
}

static double read_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Become the writer, and wait at most `timeout` seconds for another one. Returns 0, or -1
 * with StoreError (EBUSY) or another exception set. Signal handlers run between two
 * attempts. */
static int become_writer(const mlspy_state *state, mlspy_prompt_log *self, double timeout)
{
    const double end = read_seconds() + timeout;
    for (;;) {
        bool busy = false;
        mls_status st;
        mls_code code = MLS_E_STOPPED;
        for (mlspy_attempts attempts = {0}; mlspy_attempt(&attempts, code);) {
            MLSPY_WITHOUT_GIL(code = mls_prompt_lock(self->log, &busy, &st));
        }
        if (code == MLS_OK && busy && read_seconds() >= end) {
            code = mls_fail_os(&st, EBUSY,
                               "another process or thread writes to the prompt store; "
                               "to wait longer, pass lock_timeout= in seconds");
        }
        if (code != MLS_OK) {
            raise_failure(state, code, &st, self->path);
            return -1;
        }
        if (!busy) {
            return 0;
        }
        pause_briefly();
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
}

/* ---- put ---- */

/* The records of a put, as the core needs them. */
typedef struct put_items {
    mls_prompt_item *items;
    size_t count;
    mlspy_view *views; /* of all parts */
    mls_tensor *tensors;
    PyObject *
        *fetchers;     /* strong: callables of parts that another device has, else NULL */
    size_t part_count; /* of all records */
} put_items;

/* Free all arrays of `all`, and release views and callables; works at every stage of
 * take_items. */
static void release_items(put_items *all)
{
    if (all->views != NULL) {
        mlspy_views_release(all->views, all->part_count);
    }
    for (size_t i = 0; all->fetchers != NULL && i < all->part_count; i++) {
        Py_XDECREF(all->fetchers[i]);
    }
    mls_free(all->fetchers);
    mls_free(all->views);
    mls_free(all->tensors);
    mls_free(all->items);
}

/* Convert a part to all->tensors[number]: an array, or (bytes, callable) of one that is
 * fetched when its turn comes. Returns -1 with an exception set. */
static int take_part(const mlspy_state *state, PyObject *part, put_items *all,
                     size_t number)
{
    mlspy_view *view = &all->views[number];
    PyObject *fetcher;
    Py_ssize_t bytes;
    mls_status st;
    if (!PyTuple_Check(part)) {
        const int failed =
            mlspy_view_for(state, part, "a part", false /* read-only */, view);
        all->tensors[number] = view->tensor;
        return failed;
    }
    if (mlspy_take_tuple(part, "a part", "nO", &bytes, &fetcher) < 0) {
        return -1;
    }
    if (bytes < 0 || !PyCallable_Check(fetcher)) {
        return MLSPY_REFUSE(PyExc_TypeError, "a part is an array or (bytes, callable)");
    }
    const size_t shape[] = {(size_t)bytes};
    const mls_code code =
        mls_tensor_init(&all->tensors[number], NULL, MLS_U8, 1, shape, &st);
    all->fetchers[number] = Py_NewRef(fetcher);
    return mlspy_check(state, code, &st);
}

/* Convert one record (kind, end, meta, parts) to `item`: its kind (0: a block), the
 * tokens of the prompt up to its end, metadata as bytes, and a list of parts. Its parts
 * get the numbers from `*next` on, which advances. Returns -1 with an exception set. */
static int take_item(const mlspy_state *state, PyObject *object, put_items *all,
                     mls_prompt_item *item, size_t *next)
{
    int kind;
    Py_ssize_t end, meta_bytes;
    char *meta;
    PyObject *meta_object, *parts;
    if (mlspy_take_tuple(object, "a record", "inSO!", &kind, &end, &meta_object,
                         &PyList_Type, &parts) < 0 ||
        PyBytes_AsStringAndSize(meta_object, &meta, &meta_bytes) < 0) {
        return -1;
    }
    if (kind < 0 || kind > 255 || end < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "a record has kind %d and end %zd", kind,
                            end);
    }
    *item = (mls_prompt_item){.kind = (unsigned)kind,
                              .end = (size_t)end,
                              .meta = (const unsigned char *)meta,
                              .meta_bytes = (size_t)meta_bytes,
                              .parts = all->tensors + *next};
    /* the list may have grown since count_parts */
    const size_t left = all->part_count - *next;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts) && item->part_count < left; i++) {
        PyObject *part = Py_NewRef(PyList_GET_ITEM(parts, i));
        const int failed = take_part(state, part, all, (*next)++);
        Py_DECREF(part);
        if (failed < 0) {
            return -1;
        }
        item->part_count++;
    }
    return 0;
}

/* Set `*out` to the number of parts of all records. Returns -1 with an exception set if
 * one is not a tuple as in take_item. */
static int count_parts(PyObject *records, size_t *out)
{
    size_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(records); i++) {
        int kind;
        Py_ssize_t end;
        PyObject *meta, *parts;
        if (mlspy_take_tuple(PyTuple_GET_ITEM(records, i), "a record", "inSO!", &kind,
                             &end, &meta, &PyList_Type, &parts) < 0) {
            return -1;
        }
        count += (size_t)PyList_GET_SIZE(parts);
    }
    *out = count;
    return 0;
}

/* Convert a tuple of records to `all`, which is zeroed. The caller releases it, also on
 * failure. Returns -1 with an exception set. */
static int take_items(const mlspy_state *state, PyObject *records, put_items *all)
{
    size_t next = 0;
    if (count_parts(records, &all->part_count) < 0) {
        return -1;
    }
    all->count = (size_t)PyTuple_GET_SIZE(records);
    all->items = mls_alloc(all->count, sizeof *all->items);
    all->views = mls_alloc(all->part_count, sizeof *all->views);
    all->tensors = mls_alloc(all->part_count, sizeof *all->tensors);
    all->fetchers = mls_alloc(all->part_count, sizeof(PyObject *));
    if (all->items == NULL || all->views == NULL || all->tensors == NULL ||
        all->fetchers == NULL) {
        return mlspy_no_memory();
    }
    for (size_t i = 0; i < all->count; i++) {
        if (take_item(state, PyTuple_GET_ITEM(records, (Py_ssize_t)i), all,
                      &all->items[i], &next) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Convert max_bytes, a number of bytes, to `*out`; None is unlimited (UINT64_MAX).
 * Returns -1 with an exception set. */
static int take_limit(const mlspy_state *state, PyObject *object, uint64_t *out)
{
    int64_t bytes = 0;
    if (object != Py_None && mlspy_take_int64(state, object, "max_bytes", &bytes) < 0) {
        return -1;
    }
    if (bytes < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "max_bytes must not be negative, got %lld",
                            (long long)bytes);
    }
    *out = object == Py_None ? UINT64_MAX : (uint64_t)bytes;
    return 0;
}

/* Return a list with the result of each record: 1 if it was written, 0 if it was stored
 * already, -1 if it had no parent or no room. NULL with an exception set. */
static PyObject *put_results(const put_items *all)
{
    PyObject *list = PyList_New((Py_ssize_t)all->count);
    MLSPY_PUT_EACH(list, i, all->count, PyLong_FromLong(all->items[i].result));
    return list;
}

/* Fetches parts during a put. */
typedef struct part_source {
    mls_prompt_source core;
    const mlspy_state *state;
    const put_items *all;
    mlspy_progress *progress;
    mlspy_view view; /* of the part that was fetched last */
} part_source;

/* Call the callable of part `number`, and set `*out` to a view of the array that it
 * returns, valid until the next call. Needs the GIL. Returns -1 with an exception set:
 * its own, or CompatibilityError if the array has another size than the part. */
static int call_fetcher(part_source *source, size_t number, mls_tensor *out)
{
    mlspy_view_release(&source->view);
    PyObject *array = PyObject_CallNoArgs(source->all->fetchers[number]);
    if (array == NULL) {
        return -1;
    }
    const int failed = mlspy_view_for(source->state, array, "a part",
                                      false /* read-only */, &source->view);
    Py_DECREF(array);
    if (failed < 0) {
        return -1;
    }
    *out = source->view.tensor;
    const size_t expected = mlspy_bytes(&source->all->tensors[number]);
    if (mlspy_bytes(out) != expected) {
        return MLSPY_FAIL(source->state, MLS_E_SHAPE,
                          "a part of %zu bytes was fetched, and not of %zu",
                          mlspy_bytes(out), expected);
    }
    return 0;
}

/* The core's callback mls_prompt_source.fetch, called by the thread that called put,
 * without the GIL. Returns false with an exception set. */
static bool fetch_part(void *context, const mls_tensor *part, mls_tensor *out)
{
    part_source *source = context;
    PyEval_RestoreThread(source->progress->saved);
    const int failed = call_fetcher(source, (size_t)(part - source->all->tensors), out);
    source->progress->saved = PyEval_SaveThread();
    return failed == 0;
}

/* Store the records of `all` under `prefix`, in a log of at most `max_bytes` (UINT64_MAX:
 * unlimited); the caller has locked the log, which is unlocked here. Returns the list of
 * results, or NULL with an exception set. */
static PyObject *put_locked(const mlspy_state *state, mlspy_prompt_log *self,
                            const mls_prompt_prefix *prefix, put_items *all,
                            uint64_t max_bytes)
{
    mlspy_progress progress;
    mls_status st;
    part_source source = {.core = {.fetch = fetch_part, .context = &source},
                          .state = state,
                          .all = all,
                          .progress = &progress};
    for (size_t i = 0; i < all->count; i++) {
        all->items[i].source = &source.core;
    }
    begin_work(&progress);
    const mls_code code = mls_prompt_put(self->log, prefix, all->items, all->count,
                                         max_bytes, &progress.core, &st);
    mls_prompt_unlock(self->log);
    mlspy_progress_end(&progress);
    mlspy_view_release(&source.view);
    return code == MLS_OK ? put_results(all)
                          : raise_failure(state, code, &st, self->path);
}

/* put(fingerprint, tokens, block_tokens, records, max_bytes, timeout, extras=b"") ->
 * [int, ...]: store the records of one prompt, tuples as in take_item. Evicts others
 * first if the log would exceed `max_bytes` (None: unlimited). Results as in put_results.
 * Waits at most `timeout` seconds for another writer. */
static PyObject *log_put(mlspy_prompt_log *self, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mls_prompt_prefix prefix = {0};
    put_items all = {0};
    uint64_t max_bytes = 0;
    double timeout = 0;
    PyObject *result = NULL, *records = NULL;
    if ((count != 6 && mlspy_take_count("put", 7, count) < 0) ||
        take_limit(state, args[4], &max_bytes) < 0 ||
        mlspy_take_double(args[5], "timeout", &timeout) < 0 ||
        take_prefix(state, args, count == 7 ? args[6] : NULL, &prefix) < 0) {
        return NULL;
    }
    records = PySequence_Tuple(args[3]);
    if (records != NULL && take_items(state, records, &all) == 0 &&
        begin_call(self) != NULL) {
        if (become_writer(state, self, timeout) == 0) {
            result = put_locked(state, self, &prefix, &all, max_bytes);
        }
        end_call(self);
    }
    release_items(&all);
    Py_XDECREF(records);
    release_prefix(&prefix);
    return result;
}

/* ---- marks, eviction ---- */

/* Convert the name of an operation of mark(). Returns -1 with ValueError set. */
static int take_operation(PyObject *object, mls_prompt_operation *out)
{
    /* in the order of mls_prompt_operation */
    static const char *const names[] = {"pin", "unpin", "delete", "drop"};
    for (int i = 0; i < 4 && PyUnicode_Check(object); i++) {
        if (PyUnicode_CompareWithASCIIString(object, names[i]) == 0) {
            *out = (mls_prompt_operation)i;
            return 0;
        }
    }
    return MLSPY_REFUSE(PyExc_ValueError, "unknown operation %R", object);
}

/* Convert a tuple of numbers of a match's records to an array, which the caller frees;
 * NULL with an exception set: IndexError for a record that the match lacks. */
static size_t *take_hits(const mls_prompt_match *match, PyObject *numbers)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(numbers);
    size_t *hits = mls_alloc((size_t)count, sizeof *hits);
    if (hits == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; hits != NULL && i < count; i++) {
        const Py_ssize_t number =
            PyNumber_AsSsize_t(PyTuple_GET_ITEM(numbers, i), PyExc_IndexError);
        if (number < 0 || (size_t)number >= match->count) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_IndexError, "the match has no record %zd", number);
            }
            mls_free(hits);
            return NULL;
        }
        hits[i] = (size_t)number;
    }
    return hits;
}

/* Apply `operation` to the records of a match with these numbers, and return how many
 * changed; NULL with an exception set. Waits at most `timeout` seconds for another
 * writer. */
static PyObject *mark_records(const mlspy_state *state, mlspy_prompt_log *self,
                              const mls_prompt_match *match, PyObject *numbers,
                              mls_prompt_operation operation, double timeout)
{
    PyObject *result = NULL;
    size_t changed = 0;
    mls_status st;
    size_t *hits = take_hits(match, numbers);
    if (hits == NULL || begin_call(self) == NULL) {
        mls_free(hits);
        return NULL;
    }
    if (become_writer(state, self, timeout) == 0) {
        const size_t count = (size_t)PyTuple_GET_SIZE(numbers);
        mlspy_progress progress;
        begin_work(&progress);
        const mls_code code = mls_prompt_mark(self->log, match, hits, count, operation,
                                              &progress.core, &changed, &st);
        mls_prompt_unlock(self->log);
        mlspy_progress_end(&progress);
        result = code == MLS_OK ? PyLong_FromSize_t(changed)
                                : raise_failure(state, code, &st, self->path);
    }
    end_call(self);
    mls_free(hits);
    return result;
}

/* mark(match, records, operation, timeout) -> number of changed records: "pin", "unpin",
 * "delete" or "drop" records of a match, given by their numbers. "delete" keeps records
 * that are the parent of another one, "drop" removes them too. Waits at most `timeout`
 * seconds for another writer. */
static PyObject *log_mark(mlspy_prompt_log *self, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mls_prompt_operation operation;
    double timeout = 0;
    if (mlspy_take_count("mark", 4, count) < 0 ||
        take_operation(args[2], &operation) < 0 ||
        mlspy_take_double(args[3], "timeout", &timeout) < 0) {
        return NULL;
    }
    PyObject *numbers = PySequence_Tuple(args[1]);
    const mls_prompt_match *match =
        numbers == NULL ? NULL : mlspy_prompt_match_enter(state, args[0]);
    PyObject *result = NULL;
    if (match != NULL) {
        result = mark_records(state, self, match, numbers, operation, timeout);
        mlspy_prompt_match_leave(args[0]);
    }
    Py_XDECREF(numbers);
    return result;
}

/* prune(max_bytes, timeout) -> freed bytes: evict records until the log has at most
 * max_bytes (None: evict none), and compact it. Waits at most `timeout` seconds for
 * another writer. */
static PyObject *log_prune(mlspy_prompt_log *self, PyObject *const *args,
                           Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    uint64_t max_bytes = 0, freed = 0;
    double timeout = 0;
    mls_status st;
    PyObject *result = NULL;
    if (mlspy_take_count("prune", 2, count) < 0 ||
        take_limit(state, args[0], &max_bytes) < 0 ||
        mlspy_take_double(args[1], "timeout", &timeout) < 0 || begin_call(self) == NULL) {
        return NULL;
    }
    if (become_writer(state, self, timeout) == 0) {
        mlspy_progress progress;
        begin_work(&progress);
        const mls_code code =
            mls_prompt_prune(self->log, max_bytes, &progress.core, &freed, &st);
        mls_prompt_unlock(self->log);
        mlspy_progress_end(&progress);
        result = code == MLS_OK ? PyLong_FromUnsignedLongLong(freed)
                                : raise_failure(state, code, &st, self->path);
    }
    end_call(self);
    return result;
}

/* ---- the whole log ---- */

/* Read the changes of other processes, and set `*out`. A signal stops this reading, but
 * not the one that the core repeats before it lists or verifies records, which is
 * short then. Returns -1 with an exception set. */
static int read_changes(const mlspy_state *state, mlspy_prompt_log *self,
                        mls_prompt_stats *out)
{
    mls_status st;
    mls_code code = MLS_E_STOPPED;
    for (mlspy_attempts attempts = {0}; mlspy_attempt(&attempts, code);) {
        MLSPY_WITHOUT_GIL(code = mls_prompt_stats_of(self->log, out, &st));
    }
    raise_failure(state, code, &st, self->path);
    return code == MLS_OK ? 0 : -1;
}

/* sync(): make the records of other processes durable. */
static PyObject *log_sync(mlspy_prompt_log *self, PyObject *unused)
{
    (void)unused;
    mls_status st;
    mls_code code;
    if (begin_call(self) == NULL) {
        return NULL;
    }
    MLSPY_WITHOUT_GIL(code = mls_prompt_sync(self->log, &st));
    raise_failure(mlspy_state_of_type(Py_TYPE(self)), code, &st, self->path);
    end_call(self);
    if (code != MLS_OK) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Return a list of (name of the segment, offset, text) for `count` damaged records. */
static PyObject *damage_list(const mls_prompt_damage *damage, size_t count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        char name[32];
        if (damage[i].segment == 0) {
            memcpy(name, "store", sizeof "store");
        } else {
            PyOS_snprintf(name, sizeof name, "segment-%08u", (unsigned)damage[i].segment);
        }
        PyObject *text = PyUnicode_DecodeUTF8(
            damage[i].text, (Py_ssize_t)strlen(damage[i].text), "backslashreplace");
        mlspy_append(&list, Py_BuildValue("(sKN)", name,
                                          (unsigned long long)damage[i].offset, text));
    }
    return list;
}

/* Verify all records, and return the damage_list, or NULL with an exception set. With
 * `repair` the caller has locked the log, which is unlocked here, and damaged records are
 * removed. */
static PyObject *verify_log(const mlspy_state *state, mlspy_prompt_log *self, bool repair)
{
    mls_prompt_damage *damage = NULL;
    size_t count = 0;
    mlspy_progress progress;
    mls_status st;
    PyObject *result = NULL;
    begin_work(&progress);
    const mls_code code =
        mls_prompt_verify(self->log, repair, &progress.core, &damage, &count, &st);
    if (repair) {
        mls_prompt_unlock(self->log);
    }
    mlspy_progress_end(&progress);
    if (code == MLS_OK) {
        result = damage_list(damage, count);
    } else {
        raise_failure(state, code, &st, self->path);
    }
    mls_free(damage);
    return result;
}

/* verify() -> [(segment, offset, text), ...]: reads all records, and returns the damaged
 * ones: the segment's name, the offset in it, and the reason. */
static PyObject *log_verify(mlspy_prompt_log *self, PyObject *unused)
{
    (void)unused;
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    mls_prompt_stats ignored;
    PyObject *result = NULL;
    if (begin_call(self) != NULL) {
        if (read_changes(state, self, &ignored) == 0) {
            result = verify_log(state, self, false);
        }
        end_call(self);
    }
    return result;
}

/* repair(timeout) -> [(segment, offset, text), ...]: remove the damaged records, and
 * return them. Waits at most `timeout` seconds for another writer. */
static PyObject *log_repair(mlspy_prompt_log *self, PyObject *argument)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    double timeout = 0;
    PyObject *result = NULL;
    if (mlspy_take_double(argument, "timeout", &timeout) < 0 ||
        begin_call(self) == NULL) {
        return NULL;
    }
    if (become_writer(state, self, timeout) == 0) {
        result = verify_log(state, self, true);
    }
    end_call(self);
    return result;
}

/* Return the token ids of a record as a new array of uint32. */
static PyObject *tokens_array(const mls_prompt_header *header)
{
    npy_intp length = (npy_intp)header->token_count;
    PyObject *array = PyArray_SimpleNew(1, &length, NPY_UINT32);
    for (size_t i = 0; array != NULL && i < header->token_count; i++) {
        ((npy_uint32 *)PyArray_DATA((PyArrayObject *)array))[i] =
            mls_prompt_header_token(header, i);
    }
    return array;
}

/* A list that grows while the GIL is released between records. `list` is NULL after an
 * exception. */
typedef struct record_list {
    PyObject *list;
    mlspy_progress progress;
} record_list;

/* The callback of mls_prompt_list: append one record, with the GIL held meanwhile.
 * Returns false with an exception set. */
static bool list_record(void *context, const mls_prompt_listed *listed)
{
    record_list *records = context;
    const mls_prompt_hit *hit = &listed->hit;
    const mls_prompt_header *header = &hit->header;
    PyEval_RestoreThread(records->progress.saved);
    PyObject *tokens = tokens_array(header);
    mlspy_append(
        &records->list,
        Py_BuildValue("(y#y#Iny#KNINy#y#)", header->key.bytes, (Py_ssize_t)MLS_PROMPT_KEY,
                      header->parent.bytes, (Py_ssize_t)MLS_PROMPT_KEY, hit->kind,
                      (Py_ssize_t)hit->end, header->fingerprint,
                      (Py_ssize_t)header->fingerprint_bytes,
                      (unsigned long long)hit->header.payload_bytes,
                      PyBool_FromLong(listed->is_pinned), (unsigned)listed->used, tokens,
                      header->meta, (Py_ssize_t)header->meta_bytes, header->extras,
                      (Py_ssize_t)(MLS_PROMPT_EXTRA * header->extra_count)));
    records->progress.saved = PyEval_SaveThread();
    return records->list != NULL;
}

/* records() -> [(key, parent, kind, end, fingerprint, bytes, pinned, used, tokens, meta,
 * extras), ...]: all records whose header can be read. `parent` is the key of the record
 * before, `bytes` the size of the payload, `used` the time of the last use: the larger,
 * the later. */
static PyObject *log_records(mlspy_prompt_log *self, PyObject *unused)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    (void)unused;
    mls_prompt_stats ignored;
    mls_status st;
    if (begin_call(self) == NULL) {
        return NULL;
    }
    record_list records = {.list = PyList_New(0)};
    if (records.list != NULL && read_changes(state, self, &ignored) == 0) {
        begin_work(&records.progress);
        const mls_code code = mls_prompt_list(self->log, list_record, &records,
                                              &records.progress.core, &st);
        mlspy_progress_end(&records.progress);
        raise_failure(state, code, &st, self->path);
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(records.list);
    }
    end_call(self);
    return records.list;
}

/* stats() -> {name: int}, the members of mls_prompt_stats: numbers of records, blocks,
 * pinned records and segments (files); live_bytes of the records, disk_bytes of the
 * files, memory_bytes of the index. */
static PyObject *log_stats(mlspy_prompt_log *self, PyObject *unused)
{
    (void)unused;
    mls_prompt_stats stats = {0};
    if (begin_call(self) == NULL) {
        return NULL;
    }
    const int failed = read_changes(mlspy_state_of_type(Py_TYPE(self)), self, &stats);
    end_call(self);
    if (failed < 0) {
        return NULL;
    }
    return Py_BuildValue("{sKsKsKsKsKsKsK}", "records", stats.records, "blocks",
                         stats.blocks, "pinned", stats.pinned, "live_bytes",
                         stats.live_bytes, "disk_bytes", stats.disk_bytes, "segments",
                         stats.segments, "memory_bytes", stats.memory_bytes);
}

/* ---- the type ---- */

static PyObject *log_get_path(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(((mlspy_prompt_log *)self)->path);
}

static PyGetSetDef log_attributes[] = {
    {"path", log_get_path, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef log_methods[] = {
    MLSPY_METHOD(log, match, METH_FASTCALL,
                 "fingerprint, tokens, block_tokens, extras=b'', /"),
    MLSPY_METHOD(log, put, METH_FASTCALL,
                 "fingerprint, tokens, block_tokens, records, max_bytes, timeout, "
                 "extras=b'', /"),
    MLSPY_METHOD(log, mark, METH_FASTCALL, "match, records, operation, timeout, /"),
    MLSPY_METHOD(log, prune, METH_FASTCALL, "max_bytes, timeout, /"),
    MLSPY_METHOD(log, sync, METH_NOARGS, "/"),
    MLSPY_METHOD(log, verify, METH_NOARGS, "/"),
    MLSPY_METHOD(log, repair, METH_O, "timeout, /"),
    MLSPY_METHOD(log, records, METH_NOARGS, "/"),
    MLSPY_METHOD(log, stats, METH_NOARGS, "/"),
    MLSPY_METHOD(log, close, METH_NOARGS, "/"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot log_slots[] = {
    {Py_tp_new, (void *)log_new},
    {Py_tp_dealloc, (void *)log_dealloc},
    {Py_tp_methods, log_methods},
    {Py_tp_getset, log_attributes},
    {Py_tp_doc, (void *)"PromptLog(path, create, /)\n--\n\n"},
    {0, NULL},
};

MLSPY_DEFINE_SPEC(log, "PromptLog", mlspy_prompt_log, Py_TPFLAGS_IMMUTABLETYPE);

int mlspy_prompt_log_add(PyObject *module)
{
    return mlspy_add_type(module, &log_spec, NULL, NULL);
}
