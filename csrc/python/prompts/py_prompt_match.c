/* py_prompt_match: PromptMatch: the records under a prefix; reads their parts into
 * arrays, and lists damage.
 */
#include "arguments/args.h"
#include "arguments/progress.h"
#include "arguments/results.h"
#include "array/array_view.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "prompts/prompt_objects.h"

#include "base/memory.h"

#include <stdio.h>

/* ---- closing ---- */

/* Refuse further calls, and close the match if none is in progress. */
static void close_match(mlspy_prompt_match *self)
{
    MLSPY_BEGIN_LOCKED((PyObject *)self)
        self->is_closed = true;
        if (self->calls == 0) {
            mls_prompt_match_close(self->match);
        }
    MLSPY_END_LOCKED();
}

/* Counts the call, so that close() does not close the match before it ends. */
const mls_prompt_match *mlspy_prompt_match_enter(const mlspy_state *state,
                                                 PyObject *object)
{
    if (!PyObject_TypeCheck(object, state->prompt_match_type)) {
        PyErr_Format(PyExc_TypeError, "a PromptMatch is expected, got %.100s",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    mlspy_prompt_match *self = (mlspy_prompt_match *)object;
    const mls_prompt_match *match = NULL;
    MLSPY_BEGIN_LOCKED(object)
        if (!self->is_closed) {
            match = self->match;
            self->calls++;
        }
    MLSPY_END_LOCKED();
    if (match == NULL) {
        PyErr_SetString(PyExc_ValueError, "the match is closed");
    }
    return match;
}

/* The last call of a closed match closes its files. */
void mlspy_prompt_match_leave(PyObject *object)
{
    mlspy_prompt_match *self = (mlspy_prompt_match *)object;
    bool is_closed;
    MLSPY_BEGIN_LOCKED(object)
        self->calls--;
        is_closed = self->is_closed;
    MLSPY_END_LOCKED();
    if (is_closed) {
        close_match(self);
    }
}

static void match_dealloc(mlspy_prompt_match *self)
{
    mls_prompt_match_free(self->match);
    Py_XDECREF(self->records);
    Py_XDECREF(self->heads);
    Py_XDECREF(self->damage);
    Py_XDECREF(self->path);
    mlspy_free(self);
}

/* ---- construction ---- */

PyObject *mlspy_prompt_damage_text(const mls_prompt_damage *damage)
{
    char text[MLS_TEXT_BYTES + 64];
    PyOS_snprintf(text, sizeof text, "segment-%08u, offset %llu: %s",
                  (unsigned)damage->segment, (unsigned long long)damage->offset,
                  damage->text);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
}

/* Return a tuple of (kind, start, end, bytes) for the records of a match: the record is
 * of the tokens start .. end - 1 of the prompt, and its payload has that many bytes. NULL
 * with an exception set. */
static PyObject *records_tuple(const mls_prompt_match *match)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)match->count);
    for (size_t i = 0; tuple != NULL && i < match->count; i++) {
        const mls_prompt_hit *hit = &match->hits[i];
        mlspy_put(&tuple, (Py_ssize_t)i,
                  Py_BuildValue("(InnK)", hit->kind, (Py_ssize_t)hit->start,
                                (Py_ssize_t)hit->end,
                                (unsigned long long)hit->header.payload_bytes));
    }
    return tuple;
}

/* Return a tuple of (number, kind, start, end) for the first block of a match and the
 * records that are not blocks. NULL with an exception set. */
static PyObject *heads_tuple(const mls_prompt_match *match)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < match->count; i++) {
        const mls_prompt_hit *hit = &match->hits[i];
        if (hit->kind != 0 || hit->start == 0) {
            mlspy_append(&list,
                         Py_BuildValue("(nInn)", (Py_ssize_t)i, hit->kind,
                                       (Py_ssize_t)hit->start, (Py_ssize_t)hit->end));
        }
    }
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

/* Return a tuple with a str about each damaged record. */
static PyObject *damage_tuple(const mls_prompt_match *match)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)match->damage_count);
    MLSPY_PUT_EACH(tuple, i, match->damage_count,
                   mlspy_prompt_damage_text(&match->damage[i]));
    return tuple;
}

PyObject *mlspy_prompt_match_of(const mlspy_state *state, mls_prompt_match *match,
                                PyObject *path)
{
    PyTypeObject *type = state->prompt_match_type;
    mlspy_prompt_match *self = (mlspy_prompt_match *)type->tp_alloc(type, 0);
    if (self == NULL) {
        mls_prompt_match_free(match);
        return NULL;
    }
    self->match = match;
    self->length = match->length;
    self->path = Py_NewRef(path);
    self->heads = heads_tuple(match);
    self->damage = damage_tuple(match);
    if (self->heads == NULL || self->damage == NULL) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* ---- methods ---- */

/* Convert the number of a record of a match, from 0; returns SIZE_MAX with an exception
 * set: IndexError for one that the match lacks. */
static size_t take_record(const mls_prompt_match *match, PyObject *object)
{
    const Py_ssize_t number = PyNumber_AsSsize_t(object, PyExc_IndexError);
    if (number == -1 && PyErr_Occurred()) {
        return SIZE_MAX;
    }
    if (number < 0 || (size_t)number >= match->count) {
        PyErr_Format(PyExc_IndexError, "the match has no record %zd", number);
        return SIZE_MAX;
    }
    return (size_t)number;
}

/* Return the result of `describe` for the header of a record, which is given by its
 * number; NULL with an exception set. */
static PyObject *describe_record(PyObject *self, PyObject *record,
                                 PyObject *(*describe)(const mls_prompt_header *))
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    const mls_prompt_match *match = mlspy_prompt_match_enter(state, self);
    if (match == NULL) {
        return NULL;
    }
    const size_t number = take_record(match, record);
    PyObject *result = number == SIZE_MAX ? NULL : describe(&match->hits[number].header);
    mlspy_prompt_match_leave(self);
    return result;
}

static PyObject *meta_bytes(const mls_prompt_header *header)
{
    return PyBytes_FromStringAndSize((const char *)header->meta,
                                     (Py_ssize_t)header->meta_bytes);
}

/* Return a tuple of the bytes of each part of a record. */
static PyObject *part_sizes(const mls_prompt_header *header)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)header->part_count);
    MLSPY_PUT_EACH(tuple, i, header->part_count,
                   PyLong_FromUnsignedLongLong(mls_prompt_header_part(header, i).bytes));
    return tuple;
}

/* meta(record) -> bytes: the metadata of the record with this number. */
static PyObject *match_meta(PyObject *self, PyObject *record)
{
    return describe_record(self, record, meta_bytes);
}

/* parts(record) -> (bytes, ...): the length of each part of the record with this
 * number. */
static PyObject *match_parts(PyObject *self, PyObject *record)
{
    return describe_record(self, record, part_sizes);
}

/* reach(prefix, token_bytes) -> int: the tokens of the adjacent blocks from the first one
 * on whose metadata begins with `prefix`, and which have `token_bytes` for each token. */
static PyObject *match_reach(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    char *prefix;
    Py_ssize_t bytes;
    int64_t token_bytes;
    if (mlspy_take_count("reach", 2, count) < 0 ||
        PyBytes_AsStringAndSize(args[0], &prefix, &bytes) < 0 ||
        mlspy_take_int64(state, args[1], "token_bytes", &token_bytes) < 0) {
        return NULL;
    }
    const mls_prompt_match *match = mlspy_prompt_match_enter(state, self);
    if (match == NULL) {
        return NULL;
    }
    const size_t reach = mls_prompt_match_reach(match, (const unsigned char *)prefix,
                                                (size_t)bytes, (uint64_t)token_bytes);
    mlspy_prompt_match_leave(self);
    return PyLong_FromSize_t(reach);
}

/* ---- reading ---- */

/* Convert the number of a record, of its part, and the array that receives bytes of the
 * part, to a request. Sets `*bytes` to the length of the part. The caller releases
 * `view`, also on failure. Returns -1 with an exception set: IndexError for a record or
 * part that does not exist. */
static int take_part(const mlspy_state *state, const mls_prompt_match *match,
                     PyObject *record, Py_ssize_t part, PyObject *array,
                     mls_prompt_request *request, mlspy_view *view, uint64_t *bytes)
{
    const size_t hit = take_record(match, record);
    if (hit == SIZE_MAX) {
        return -1;
    }
    const mls_prompt_header *header = &match->hits[hit].header;
    if (part < 0 || (size_t)part >= header->part_count) {
        return MLSPY_REFUSE(PyExc_IndexError, "record %zu has no part %zd", hit, part);
    }
    if (mlspy_view_for(state, array, "into", true /* writable */, view) < 0) {
        return -1;
    }
    *bytes = mls_prompt_header_part(header, (size_t)part).bytes;
    *request =
        (mls_prompt_request){.hit = hit, .part = (size_t)part, .into = view->tensor};
    return 0;
}

/* Convert one request (record, part, array); the array must have as many bytes as the
 * part, else CompatibilityError. The caller releases `view`, also on failure. Returns -1
 * with an exception set. */
static int take_request(const mlspy_state *state, const mls_prompt_match *match,
                        PyObject *item, mls_prompt_request *request, mlspy_view *view)
{
    PyObject *record, *array;
    Py_ssize_t part;
    uint64_t bytes = 0;
    if (mlspy_take_tuple(item, "a request", "OnO", &record, &part, &array) < 0 ||
        take_part(state, match, record, part, array, request, view, &bytes) < 0) {
        return -1;
    }
    if (mlspy_bytes(&view->tensor) != bytes) {
        return MLSPY_FAIL(state, MLS_E_SHAPE,
                          "part %zd of record %zu has %llu bytes, and the array %zu",
                          part, request->hit, (unsigned long long)bytes,
                          mlspy_bytes(&view->tensor));
    }
    return 0;
}

static bool is_damaged(mls_code code)
{
    return code == MLS_E_FORMAT || code == MLS_E_CHECKSUM;
}

/* Return a new str about the damage of the record with this number; `text` is the
 * reason. */
static PyObject *request_damage(const mls_prompt_match *match, size_t number,
                                const char *text)
{
    const mls_prompt_hit *hit = &match->hits[number];
    mls_prompt_damage damage = {.segment = hit->segment, .offset = hit->offset};
    snprintf(damage.text, sizeof damage.text, "%s", text);
    return mlspy_prompt_damage_text(&damage);
}

/* Return a list of (record, text) for the damaged records of `count` requests, each
 * once. */
static PyObject *damaged_list(const mls_prompt_match *match,
                              const mls_prompt_request *requests, size_t count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        bool is_first = is_damaged(requests[i].code);
        for (size_t j = 0; is_first && j < i; j++) {
            is_first =
                !is_damaged(requests[j].code) || requests[j].hit != requests[i].hit;
        }
        if (is_first) {
            mlspy_append(&list, Py_BuildValue("(nN)", (Py_ssize_t)requests[i].hit,
                                              request_damage(match, requests[i].hit,
                                                             requests[i].text)));
        }
    }
    return list;
}

/* Raise the error of a read, with the log's path; after a signal, its exception is set
 * already. */
static void raise_error(const mlspy_state *state, const mls_status *st, PyObject *self)
{
    if (st->code != MLS_E_STOPPED) {
        mlspy_raise(state, st, ((mlspy_prompt_match *)self)->path);
    }
}

/* Read the parts of a list of requests. Returns the list of damaged records, or NULL with
 * an exception set. */
static PyObject *read_all(const mlspy_state *state, PyObject *self,
                          const mls_prompt_match *match, PyObject *list)
{
    const size_t count = (size_t)PyList_GET_SIZE(list);
    mls_prompt_request *requests = mls_alloc(count, sizeof *requests);
    mlspy_view *views = mls_alloc(count, sizeof *views);
    mlspy_progress progress;
    PyObject *result = NULL;
    bool is_good = requests != NULL && views != NULL;
    if (!is_good) {
        PyErr_NoMemory();
    }
    for (size_t i = 0; is_good && i < count; i++) {
        is_good = take_request(state, match, PyList_GET_ITEM(list, (Py_ssize_t)i),
                               &requests[i], &views[i]) == 0;
    }
    if (is_good && mlspy_progress_init(&progress, Py_None) == 0) {
        mls_status st;
        mlspy_progress_begin(&progress);
        is_good =
            mls_prompt_read(match, requests, count, state->kernels, mlspy_crc(state),
                            state->pool, &progress.core, &st) == MLS_OK;
        mlspy_progress_end(&progress);
        if (is_good) {
            result = damaged_list(match, requests, count);
        } else {
            raise_error(state, &st, self);
        }
    }
    if (views != NULL) {
        mlspy_views_release(views, count);
    }
    mls_free(views);
    mls_free(requests);
    return result;
}

/* read([(record, part, array), ...]) -> [(record, text), ...]: read parts into arrays,
 * and return the damaged records. All requests are checked before any byte is written. */
static PyObject *match_read(PyObject *self, PyObject *requests)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    PyObject *list = PySequence_List(requests); /* a copy: no other thread has it */
    const mls_prompt_match *match =
        list == NULL ? NULL : mlspy_prompt_match_enter(state, self);
    PyObject *result = NULL;
    if (match != NULL) {
        result = read_all(state, self, match, list);
        mlspy_prompt_match_leave(self);
    }
    Py_XDECREF(list);
    return result;
}

/* Read the bytes of `part` from `offset` on that the array args[3] has room for; args[0]
 * is the number of the record. Returns the checksum that continues `checksum`, a str
 * about damage, or NULL with an exception set. */
static PyObject *read_piece(const mlspy_state *state, PyObject *self,
                            const mls_prompt_match *match, PyObject *const *args,
                            Py_ssize_t part, uint64_t offset, uint32_t checksum)
{
    mls_prompt_request request;
    mlspy_view view = {.owner = NULL};
    uint64_t bytes = 0;
    mls_status st;
    mls_code code;
    PyObject *result = NULL;
    if (take_part(state, match, args[0], part, args[3], &request, &view, &bytes) < 0) {
        return NULL;
    }
    if (offset > bytes || mlspy_bytes(&view.tensor) > bytes - offset) {
        mlspy_raise_text(state, MLS_E_SHAPE, "the piece is not within part %zd", part);
    } else {
        MLSPY_WITHOUT_GIL(code = mls_prompt_read_piece(match, &request, offset,
                                                       state->kernels, mlspy_crc(state),
                                                       &checksum, &st));
        if (code == MLS_OK) {
            result = PyLong_FromUnsignedLong(checksum);
        } else if (is_damaged(code)) {
            result = request_damage(match, request.hit, st.text);
        } else {
            raise_error(state, &st, self);
        }
    }
    mlspy_view_release(&view);
    return result;
}

/* read_piece(record, part, offset, array, checksum) -> int, or a text about damage: read
 * bytes of part number `part` from byte `offset` on, as many as the array has. `checksum`
 * is the checksum of the part's bytes before them; the result continues it. */
static PyObject *match_read_piece(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    const mlspy_state *state = mlspy_state_of_type(Py_TYPE(self));
    int64_t part, offset, checksum;
    if (mlspy_take_count("read_piece", 5, count) < 0 ||
        mlspy_take_int64(state, args[1], "part", &part) < 0 ||
        mlspy_take_int64(state, args[2], "offset", &offset) < 0 ||
        mlspy_take_int64(state, args[4], "checksum", &checksum) < 0) {
        return NULL;
    }
    const mls_prompt_match *match = mlspy_prompt_match_enter(state, self);
    PyObject *result = NULL;
    if (match != NULL) {
        result = read_piece(state, self, match, args, (Py_ssize_t)part, (uint64_t)offset,
                            (uint32_t)checksum);
        mlspy_prompt_match_leave(self);
    }
    return result;
}

/* close(): close the segments, once no call is in progress. */
static PyObject *match_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    close_match((mlspy_prompt_match *)self);
    Py_RETURN_NONE;
}

/* ---- attributes, the type ---- */

/* Made at the first use: most matches of which nothing is restored need no tuple. */
static PyObject *match_get_records(PyObject *object, void *unused)
{
    mlspy_prompt_match *self = (mlspy_prompt_match *)object;
    PyObject *result;
    (void)unused;
    MLSPY_BEGIN_LOCKED(object)
        if (self->records == NULL) {
            PyObject *tuple = records_tuple(self->match);
            Py_XSETREF(self->records, tuple); /* another thread may have been faster */
        }
        result = Py_XNewRef(self->records);
    MLSPY_END_LOCKED();
    return result;
}

static PyObject *match_get_heads(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(((mlspy_prompt_match *)self)->heads);
}

static PyObject *match_get_damage(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(((mlspy_prompt_match *)self)->damage);
}

static PyObject *match_get_length(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((mlspy_prompt_match *)self)->length);
}

static PyGetSetDef match_attributes[] = {
    {"records", match_get_records, NULL, NULL, NULL},
    {"heads", match_get_heads, NULL, NULL, NULL},
    {"damage", match_get_damage, NULL, NULL, NULL},
    {"length", match_get_length, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef match_methods[] = {
    MLSPY_METHOD(match, meta, METH_O, "record, /"),
    MLSPY_METHOD(match, parts, METH_O, "record, /"),
    MLSPY_METHOD(match, reach, METH_FASTCALL, "prefix, token_bytes, /"),
    MLSPY_METHOD(match, read, METH_O, "requests, /"),
    MLSPY_METHOD(match, read_piece, METH_FASTCALL,
                 "record, part, offset, array, checksum, /"),
    MLSPY_METHOD(match, close, METH_NOARGS, "/"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot match_slots[] = {
    {Py_tp_dealloc, (void *)match_dealloc},
    {Py_tp_methods, match_methods},
    {Py_tp_getset, match_attributes},
    {0, NULL},
};

MLSPY_DEFINE_SPEC(match, "PromptMatch", mlspy_prompt_match,
                  Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION);

int mlspy_prompt_match_add(PyObject *module)
{
    return mlspy_add_type(module, &match_spec, NULL,
                          &mlspy_state_of(module)->prompt_match_type);
}
