/* py_shard_owners: which parts of tensors, and which bytes of files, a load needs.
 *
 * A MergedIndex may contain only one index for each pattern (index_pattern.h).
 * mlstate/checkpoint/_store/index_patterns.py determines which ranks store which parts.
 */
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/load_job.h"
#include "checkpoint/merged_index_object.h"
#include "common/args.h"
#include "common/errors.h"
#include "common/module_state.h"
#include "common/results.h"

#include "base/memory.h"
#include "checkpoint/ranks/index_pattern.h"
#include "sharding/layout_intersection.h"

/* ---- patterns ---- */

/* Return a new reference to (bytes, (part, ...)), or to None for an index without a
 * pattern. */
static PyObject *pattern_tuple(const mlspy_state *state, const mls_index *index)
{
    mls_index_pattern pattern;
    mls_status st;
    mls_json_writer bytes = {.most = (size_t)1 << 30};
    PyObject *parts = NULL, *result = NULL;
    if (mls_index_pattern_init(index, &pattern, &st) != MLS_OK) {
        return mlspy_raise(state, &st, NULL);
    }
    if (!pattern.known) {
        return Py_NewRef(Py_None);
    }
    mls_index_pattern_bytes(index, &pattern, &bytes);
    if (bytes.code != MLS_OK) {
        mls_fail(&st, bytes.code, "no room for the pattern of %zu shards",
                 index->shard_count);
        mlspy_raise(state, &st, NULL);
    } else {
        parts = PyTuple_New((Py_ssize_t)pattern.group_count);
    }
    for (size_t i = 0; parts != NULL && i < pattern.group_count; i++) {
        mlspy_put(&parts, (Py_ssize_t)i, PyLong_FromSize_t(pattern.parts[i]));
    }
    if (parts != NULL) {
        result = Py_BuildValue("(y#N)", bytes.data == NULL ? "" : bytes.data,
                               (Py_ssize_t)bytes.length, parts);
    }
    mls_json_writer_fini(&bytes);
    mls_index_pattern_fini(&pattern);
    return result;
}

/* patterns() -> [(bytes, parts) or None, ...], one for each index */
PyObject *mlspy_merged_index_patterns(PyObject *object, PyObject *unused)
{
    const mlspy_merged_index *self = (mlspy_merged_index *)object;
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(object));
    (void)unused;
    PyObject *list = PyList_New((Py_ssize_t)self->index_count);
    for (size_t i = 0; list != NULL && i < self->index_count; i++) {
        mlspy_put(&list, (Py_ssize_t)i, pattern_tuple(state, &self->indexes[i]));
    }
    return list;
}

/* ---- owners ---- */

/* Accepts NULL. */
static void free_patterns(const mlspy_merged_index *self, mls_index_pattern *patterns)
{
    for (size_t i = 0; patterns != NULL && i < self->index_count; i++) {
        mls_index_pattern_fini(&patterns[i]);
    }
    mls_free(patterns);
}

/* Return the patterns of all indexes, or NULL with an exception set. */
static mls_index_pattern *find_patterns(const mlspy_merged_index *self,
                                        const mlspy_state *state)
{
    mls_status st;
    mls_index_pattern *patterns = mls_alloc(self->index_count, sizeof *patterns);
    if (patterns == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < self->index_count; i++) {
        if (mls_index_pattern_init(&self->indexes[i], &patterns[i], &st) != MLS_OK) {
            free_patterns(self, patterns);
            mlspy_raise(state, &st, NULL);
            return NULL;
        }
    }
    return patterns;
}

/* Return a new reference to the places of a tensor: pairs of 32-bit numbers as bytes. */
static PyObject *places_bytes(const mlspy_merged_index *self,
                              const mls_index_pattern *patterns,
                              const mls_merged_index_tensor *tensor)
{
    mls_json_writer b = {.most = (size_t)1 << 30};
    mls_index_pattern_places(self->indexes, patterns, self->index_count,
                             &tensor->facts->id, &b);
    PyObject *bytes = b.code == MLS_OK
                          ? PyBytes_FromStringAndSize(b.data, (Py_ssize_t)b.length)
                          : PyErr_NoMemory();
    mls_json_writer_fini(&b);
    return bytes;
}

/* places() -> [bytes, ...], one for each of tensors() */
PyObject *mlspy_merged_index_places(PyObject *object, PyObject *unused)
{
    const mlspy_merged_index *self = (mlspy_merged_index *)object;
    (void)unused;
    mls_index_pattern *patterns =
        find_patterns(self, mlspy_state_of_type(Py_TYPE(object)));
    PyObject *list =
        patterns == NULL ? NULL : PyList_New((Py_ssize_t)self->merged.tensor_count);
    for (size_t i = 0; list != NULL && i < self->merged.tensor_count; i++) {
        mlspy_put(&list, (Py_ssize_t)i,
                  places_bytes(self, patterns, &self->merged.tensors[i]));
    }
    free_patterns(self, patterns);
    return list;
}

/* Return the set of parts for `key` in a dict, created if needed; borrowed. */
static PyObject *part_set_for(PyObject *dict, PyObject *key)
{
    PyObject *set = PyDict_GetItemWithError(dict, key);
    if (set == NULL && !PyErr_Occurred() && (set = PySet_New(NULL)) != NULL) {
        const int failed = PyDict_SetItem(dict, key, set);
        Py_DECREF(set); /* the dict holds it */
        set = failed < 0 ? NULL : set;
    }
    return set;
}

/* Add the parts that intersect the requested part of one tensor, at most `most` of them:
 * a layout may claim any number of parts. */
static int add_parts(const mlspy_load_job *job, const mls_index_pattern *patterns,
                     const mls_wanted *w, Py_ssize_t most, PyObject *dict)
{
    const mls_index_shard *facts = w->tensor->facts;
    PyObject *key = places_bytes(job->merged, patterns, w->tensor);
    PyObject *set = key == NULL ? NULL : part_set_for(dict, key);
    mls_layout_intersection meeting;
    size_t part;
    int failed = set == NULL ? -1 : 0;
    mls_layout_intersection_init(&meeting, &facts->layout, facts->rank, facts->shape,
                                 &w->part);
    while (failed == 0 && most-- > 0 && mls_layout_intersection_next(&meeting, &part)) {
        PyObject *number = PyLong_FromSize_t(part);
        failed = number == NULL ? -1 : PySet_Add(set, number);
        Py_XDECREF(number);
    }
    Py_XDECREF(key);
    return failed;
}

/* wanted_parts(folder, section, keys, cutting, most) -> {places: {part, ...}, ...}
 *
 * The folder is only used in errors; no file is opened. */
PyObject *mlspy_merged_index_wanted_parts(PyObject *object, PyObject *const *args,
                                          Py_ssize_t count)
{
    mlspy_load_job job = {.folder = -1};
    mls_index_pattern *patterns = NULL;
    PyObject *dict = NULL;
    if (mlspy_take_count("wanted_parts", 5, count) < 0) {
        return NULL;
    }
    const Py_ssize_t most = PyLong_AsSsize_t(args[4]);
    if ((most != -1 || !PyErr_Occurred()) &&
        mlspy_load_begin(&job, object, args[0], args[1], args[2], args[3]) == 0 &&
        (patterns = find_patterns(job.merged, job.state)) != NULL) {
        dict = PyDict_New();
    }
    for (size_t i = 0; dict != NULL && i < job.plan.count; i++) {
        if (add_parts(&job, patterns, &job.plan.wanted[i], most, dict) < 0) {
            Py_CLEAR(dict);
        }
    }
    free_patterns((const mlspy_merged_index *)object, patterns);
    mlspy_load_fini(&job);
    return dict;
}

/* ---- reads ---- */

/* Append the reads of one tensor to a list of (path, begin, end, bytes), one for each
 * place. They are computed by the same function as in a load, but without destinations.
 * Zeros that were not stored are not read. */
static int add_reads(const mlspy_load_job *job, const mls_wanted *w, bool verify,
                     PyObject *list)
{
    const size_t most = w->tensor->places;
    const mls_read_scratch room = {mls_alloc(most, sizeof *room.stored),
                                   mls_alloc(most, sizeof *room.parts),
                                   mls_alloc(most, sizeof *room.pieces)};
    mls_status st;
    size_t count = 0;
    int failed = 0;
    if (room.stored == NULL || room.parts == NULL || room.pieces == NULL) {
        PyErr_NoMemory();
        failed = -1;
    } else if (mls_merged_index_pieces(&job->merged->merged, w->tensor, &w->part, NULL,
                                       &room, &count, &st) != MLS_OK) {
        mlspy_raise_under(job->state, &st, job->path, NULL);
        failed = -1;
    }
    for (size_t i = 0; failed == 0 && i < count; i++) {
        const mls_stored_shard *stored = &room.stored[i];
        if (stored->file == NULL) {
            continue;
        }
        const mls_stored_reads e = mls_stored_reads_of(stored, &w->part, verify);
        PyObject *tuple =
            Py_BuildValue("(sKKK)", stored->file, (unsigned long long)e.begin,
                          (unsigned long long)e.end, (unsigned long long)e.bytes);
        failed = tuple == NULL ? -1 : PyList_Append(list, tuple);
        Py_XDECREF(tuple);
    }
    mls_free(room.stored);
    mls_free(room.parts);
    mls_free(room.pieces);
    return failed;
}

/* reads(folder, section, keys, cutting, verify) -> [(path, begin, end, bytes), ...]
 *
 * Shard files are not accessed and need not exist. */
PyObject *mlspy_merged_index_reads(PyObject *object, PyObject *const *args,
                                   Py_ssize_t count)
{
    mlspy_load_job job = {.folder = -1};
    if (mlspy_take_count("reads", 5, count) < 0) {
        return NULL;
    }
    bool verify;
    PyObject *list = mlspy_take_bool(args[4], &verify) < 0 ? NULL : PyList_New(0);
    if (list != NULL &&
        mlspy_load_begin(&job, object, args[0], args[1], args[2], args[3]) < 0) {
        Py_CLEAR(list);
    }
    for (size_t i = 0; list != NULL && i < job.plan.count; i++) {
        if (add_reads(&job, &job.plan.wanted[i], verify, list) < 0) {
            Py_CLEAR(list);
        }
    }
    mlspy_load_fini(&job);
    return list;
}
