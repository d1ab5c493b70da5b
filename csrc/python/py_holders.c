/* py_holders: which indexes, files and bytes a load needs, found out without reading.
 *
 * A Catalog may hold the indexes of a few ranks only, one of each pattern (pattern.h);
 * what the manifest says of the other ranks comes in as numbers.
 */
#include "args.h"
#include "catalog_load.h"
#include "catalog_methods.h"
#include "catalog_object.h"
#include "checkpoint_folder.h"
#include "errors.h"
#include "module_state.h"

#include "holders.h"
#include "mem.h"

/* ---- patterns ---- */

/* New reference to (text, (part, ...)), or to None for an index without a pattern.
 *
 * The text goes to a digest at once, which Python has and the core has not; it is about
 * as long as half of the index. */
static PyObject *pattern_tuple(const mlsp_state *state, const mls_index *index)
{
    mls_pattern pattern;
    mls_status st;
    mls_buffer text = {.most = (size_t)1 << 30};
    PyObject *parts = NULL, *result = NULL;
    if (mls_pattern_init(index, &pattern, &st) != MLS_OK) {
        return mlsp_raise(state, &st, NULL);
    }
    if (!pattern.known) {
        return Py_NewRef(Py_None);
    }
    mls_pattern_text(index, &pattern, &text);
    if (text.code != MLS_OK) {
        mls_fail(&st, text.code, "no room for the pattern of %zu shards",
                 index->shard_count);
        mlsp_raise(state, &st, NULL);
    } else if ((parts = PyTuple_New((Py_ssize_t)pattern.group_count)) != NULL) {
        for (size_t i = 0; parts != NULL && i < pattern.group_count; i++) {
            PyObject *part = PyLong_FromSize_t(pattern.parts[i]);
            if (part == NULL) {
                Py_CLEAR(parts);
            } else {
                PyTuple_SET_ITEM(parts, (Py_ssize_t)i, part);
            }
        }
    }
    if (parts != NULL) {
        result = Py_BuildValue("(y#N)", text.data == NULL ? "" : text.data,
                               (Py_ssize_t)text.length, parts);
    }
    mls_buffer_fini(&text);
    mls_pattern_fini(&pattern);
    return result;
}

/* New reference to the checksums of names as bytes, four for each, highest first: their
 * hexadecimal digits are then those of every other checksum in a manifest. */
static PyObject *names_bytes(const mlsp_state *state, const mls_index *index)
{
    uint32_t *names;
    size_t count;
    mls_status st;
    if (mls_pattern_names(index, mls_crc_of(state->kernels->cpu), &names, &count, &st) !=
        MLS_OK) {
        return mlsp_raise(state, &st, NULL);
    }
    /* there are as many in memory */
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * count));
    for (size_t i = 0; bytes != NULL && i < count; i++) {
        unsigned char *to = (unsigned char *)PyBytes_AS_STRING(bytes) + 4 * i;
        for (int j = 0; j < 4; j++) {
            to[j] = (unsigned char)(names[i] >> (24 - 8 * j));
        }
    }
    mls_free(names);
    return bytes;
}

/* New reference to a list with what `make` gives for each index, in the order in which
 * the Catalog was given them. */
static PyObject *for_each(PyObject *object,
                          PyObject *(*make)(const mlsp_state *, const mls_index *))
{
    const catalog_object *self = (catalog_object *)object;
    const mlsp_state *state = mlsp_catalog_state(object);
    PyObject *list = PyList_New((Py_ssize_t)self->index_count);
    for (size_t i = 0; list != NULL && i < self->index_count; i++) {
        PyObject *made = make(state, &self->indexes[i]);
        if (made == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, made);
        }
    }
    return list;
}

/* patterns() -> [(text, parts) or None, ...] */
PyObject *mlsp_catalog_patterns(PyObject *object, PyObject *unused)
{
    (void)unused;
    return for_each(object, pattern_tuple);
}

/* names() -> [bytes, ...] */
PyObject *mlsp_catalog_names(PyObject *object, PyObject *unused)
{
    (void)unused;
    return for_each(object, names_bytes);
}

/* ---- holders ---- */

/* What is asked: the numbers of the manifest, and what is wanted of which tensor. */
typedef struct question {
    Py_buffer *views; /* of ranks and parts, in turn */
    size_t view_count;
    mls_pattern_ranks *patterns;
    const mls_part **wanted;
    bool *needed;
    uint64_t own, world_size;
} question;

/* Accepts one that was left half done: views are counted as they are taken, and whatever
 * else is not there yet is NULL. */
static void question_fini(question *q)
{
    for (size_t i = 0; i < q->view_count; i++) {
        PyBuffer_Release(&q->views[i]);
    }
    mls_free(q->views);
    mls_free(q->patterns);
    mls_free(q->wanted);
    mls_free(q->needed);
}

/* A buffer of numbers, kept by the question until its end, so that nobody can change its
 * length while the core works without the GIL.  NULL with an exception set. */
static const uint64_t *take_numbers(question *q, PyObject *object, size_t *count)
{
    Py_buffer *view = &q->views[q->view_count];
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    q->view_count++;
    *count = (size_t)view->len / sizeof(uint64_t);
    if ((uintptr_t)view->buf % sizeof(uint64_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "the numbers are not aligned");
        return NULL;
    }
    return view->buf;
}

/* ((ranks, parts, groups), ...), one for each index of the Catalog: buffers of uint64. */
static int take_patterns(question *q, const catalog_object *catalog, PyObject *tuple)
{
    if (!PyTuple_Check(tuple) ||
        (size_t)PyTuple_GET_SIZE(tuple) != catalog->index_count) {
        PyErr_SetString(PyExc_ValueError, "a pattern is wanted for each index");
        return -1;
    }
    q->views = mls_alloc(2 * catalog->index_count, sizeof *q->views);
    q->patterns = mls_alloc(catalog->index_count, sizeof *q->patterns);
    if (q->views == NULL || q->patterns == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < catalog->index_count; i++) {
        mls_pattern_ranks *p = &q->patterns[i];
        PyObject *ranks, *parts;
        Py_ssize_t groups;
        size_t part_count = 0;
        p->index = &catalog->indexes[i];
        if (mlsp_take_tuple(PyTuple_GET_ITEM(tuple, (Py_ssize_t)i), "a pattern", "OOn",
                            &ranks, &parts, &groups) < 0 ||
            (p->ranks = take_numbers(q, ranks, &p->count)) == NULL ||
            (p->parts = take_numbers(q, parts, &part_count)) == NULL) {
            return -1;
        }
        p->group_count = (size_t)groups;
        if (groups < 0 || groups > MLS_PATTERN_GROUPS ||
            part_count != p->count * p->group_count) {
            PyErr_SetString(PyExc_ValueError, "as many parts are wanted as ranks have");
            return -1;
        }
    }
    return 0;
}

/* Tables for what is wanted of each tensor, and for the answer: one byte for each rank of
 * the world, which is all here that grows with it. */
static int make_room(question *q, const catalog_object *catalog)
{
    q->wanted = mls_alloc(catalog->catalog.tensor_count, sizeof *q->wanted);
    q->needed = mls_alloc((size_t)q->world_size, sizeof *q->needed);
    if (q->wanted == NULL || q->needed == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Ask for all that a job wants.  A tensor that it wants twice is asked for twice. */
static mls_code ask(const question *q, const load_job *job, mls_status *st)
{
    const mls_catalog *catalog = &job->catalog->catalog;
    mls_code code = MLS_OK;
    for (size_t i = 0; code == MLS_OK && i < job->plan.count;) {
        memset(q->wanted, 0, catalog->tensor_count * sizeof *q->wanted);
        for (; i < job->plan.count; i++) {
            const mls_wanted *w = &job->plan.wanted[i];
            const size_t tensor = (size_t)(w->tensor - catalog->tensors);
            if (q->wanted[tensor] != NULL) {
                break;
            }
            q->wanted[tensor] = &w->part;
        }
        code = mls_holders_find(catalog, q->patterns, job->catalog->index_count,
                                q->wanted, q->own, q->needed, q->world_size, st);
    }
    return code;
}

/* New reference to the ranks that are needed, as a list, rising.  Most of a large world
 * are not in it. */
static PyObject *needed_list(const question *q)
{
    PyObject *list = PyList_New(0);
    for (uint64_t rank = 0; list != NULL && rank < q->world_size; rank++) {
        PyObject *number = q->needed[rank] ? PyLong_FromUnsignedLongLong(rank) : NULL;
        if (q->needed[rank] && (number == NULL || PyList_Append(list, number) < 0)) {
            Py_CLEAR(list);
        }
        Py_XDECREF(number);
    }
    return list;
}

/* holders(folder, section, keys, cutting, patterns, own, world_size) -> [rank, ...]
 *
 * The folder is for errors: nothing is opened.  What does not go together is the
 * manifest's fault, since the indexes were compared with it when they were read. */
PyObject *mlsp_catalog_holders(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    load_job job = {.folder = -1};
    question q = {0};
    PyObject *result = NULL;
    int64_t own, world_size;
    mls_status st;
    mls_code code;
    const mlsp_state *state = mlsp_catalog_state(object);
    if (mlsp_take_count("holders", 7, count) < 0 ||
        mlsp_take_int64(state, args[5], "rank", &own) < 0 ||
        mlsp_take_int64(state, args[6], "world_size", &world_size) < 0) {
        return NULL;
    }
    if (world_size < 1 || world_size > 1 << 24) {
        PyErr_SetString(PyExc_ValueError, "no such world");
        return NULL;
    }
    q.own = (uint64_t)own; /* a negative one is nobody */
    q.world_size = (uint64_t)world_size;
    if (mlsp_load_begin(&job, object, args[0], args[1], args[2], args[3]) == 0 &&
        take_patterns(&q, job.catalog, args[4]) == 0 && make_room(&q, job.catalog) == 0) {
        Py_BEGIN_ALLOW_THREADS
            code = ask(&q, &job, &st);
        Py_END_ALLOW_THREADS
        result = code == MLS_OK ? needed_list(&q)
                                : mlsp_raise_under(state, &st, args[0], "manifest.json");
    }
    question_fini(&q);
    mlsp_load_fini(&job);
    return result;
}

/* check_parts(patterns, world_size) -> None
 *
 * Raise where ranks that saved together did not store all of a tensor.  None for the
 * patterns: the Catalog has the indexes of all ranks.  No path is told: the error is
 * about what was given, and its files go. */
PyObject *mlsp_catalog_check_parts(PyObject *object, PyObject *const *args,
                                   Py_ssize_t count)
{
    const catalog_object *self = (const catalog_object *)object;
    const mlsp_state *state = mlsp_catalog_state(object);
    question q = {0};
    int64_t world_size;
    mls_status st;
    mls_code code = MLS_OK;
    if (mlsp_take_count("check_parts", 2, count) < 0 ||
        mlsp_take_int64(state, args[1], "world_size", &world_size) < 0) {
        return NULL;
    }
    int failed = args[0] == Py_None ? 0 : take_patterns(&q, self, args[0]);
    if (failed == 0) {
        Py_BEGIN_ALLOW_THREADS
            code = mls_holders_check(&self->catalog, q.patterns, self->index_count,
                                     (uint64_t)world_size, &st);
        Py_END_ALLOW_THREADS
        if (code != MLS_OK) {
            mlsp_raise_under(state, &st, Py_None, NULL);
            failed = -1;
        }
    }
    question_fini(&q);
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- reads ---- */

/* Add what one tensor needs to a list of (path, begin, end, bytes), a tuple for each
 * place. The pieces are those that a load would read, from the same function, but without
 * a place for the bytes.  What was never stored is not read. */
static int add_reads(const load_job *job, const mls_wanted *w, bool verify,
                     PyObject *list)
{
    const size_t most = w->tensor->places;
    const mls_piece_room room = {mls_alloc(most, sizeof *room.stored),
                                 mls_alloc(most, sizeof *room.parts),
                                 mls_alloc(most, sizeof *room.pieces)};
    mls_status st;
    size_t count = 0;
    int failed = 0;
    if (room.stored == NULL || room.parts == NULL || room.pieces == NULL) {
        PyErr_NoMemory();
        failed = -1;
    } else if (mls_catalog_pieces(&job->catalog->catalog, w->tensor, &w->part, NULL,
                                  &room, &count, &st) != MLS_OK) {
        mlsp_raise_under(job->state, &st, job->path, NULL);
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
 * No shard file is looked at: it need not even be there. */
PyObject *mlsp_catalog_reads(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    load_job job = {.folder = -1};
    if (mlsp_take_count("reads", 5, count) < 0) {
        return NULL;
    }
    const int verify = PyObject_IsTrue(args[4]);
    PyObject *list = verify < 0 ? NULL : PyList_New(0);
    if (list != NULL &&
        mlsp_load_begin(&job, object, args[0], args[1], args[2], args[3]) < 0) {
        Py_CLEAR(list);
    }
    for (size_t i = 0; list != NULL && i < job.plan.count; i++) {
        if (add_reads(&job, &job.plan.wanted[i], verify != 0, list) < 0) {
            Py_CLEAR(list);
        }
    }
    mlsp_load_fini(&job);
    return list;
}
