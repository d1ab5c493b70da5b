/* py_part_write: safetensors files that several ranks write together, for exports to
 * Hugging Face.
 *
 * Headers follow from names, dtypes and shapes, so every rank computes the offsets
 * (safetensors_layout) and writes its parts (parts_write). One rank collects the ranks'
 * shares of the checksums, whose XOR is the checksum (part_write.h), and writes the
 * headers (safetensors_layout again). */
#include "arguments/args.h"
#include "arguments/progress.h"
#include "arguments/results.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/py_layout.h"
#include "checkpoint/shard_items.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/module_state.h"
#include "dictionaries/dict_items.h"

#include "base/memory.h"
#include "checkpoint/write/part_write.h"
#include "safetensors/safetensors_header_build.h"

#include <unistd.h>

enum { ALIGNMENT = 64 }; /* of the elements in a file, in bytes */

/* ---- headers ---- */

/* The tensors of one file and its header; mls_header_init sorts the tensors. */
typedef struct file_layout {
    mls_header_tensor *tensors;
    size_t *shapes; /* MLS_LAYOUT_RANK for each tensor */
    size_t count;
    mls_header header;
} file_layout;

static void layout_fini(file_layout *f)
{
    mls_header_fini(&f->header);
    mls_free(f->tensors);
    mls_free(f->shapes);
}

/* Convert (name, dtype, shape) to a tensor of a header, and check it. `shape` has room
 * for MLS_LAYOUT_RANK dimensions, and `out` borrows it. Returns -1 with an exception
 * set. */
static int take_tensor(const mlspy_state *state, PyObject *object, size_t *shape,
                       mls_header_tensor *out)
{
    PyObject *name, *dtype, *dims;
    mls_str text;
    mls_status st;
    if (mlspy_take_tuple(object, "tensor", "OOO", &name, &dtype, &dims) < 0 ||
        mlspy_take_text(name, "tensor name", &out->name) < 0 ||
        mlspy_take_text(dtype, "dtype", &text) < 0) {
        return -1;
    }
    if (!mls_dtype_from_name(text.data, text.length, &out->dtype)) {
        return MLSPY_REFUSE(state->errors[MLSPY_ERROR_COMPATIBILITY],
                            "%R has dtype %U, for which safetensors has no name", name,
                            dtype);
    }
    out->rank = mlspy_take_shape(state, dims, shape);
    if (out->rank < 0) {
        return -1;
    }
    out->shape = shape;
    mls_tensor full_tensor;
    if (mlspy_check(
            state, mls_tensor_init(&full_tensor, NULL, out->dtype, out->rank, shape, &st),
            &st) < 0) {
        return -1;
    }
    (void)mls_tensor_bytes(&full_tensor, &out->bytes); /* fits: the shape was checked */
    if (mls_header_check(out, &st) != MLS_OK) {
        mls_status_name(&st, out->name.data, out->name.length);
        mlspy_raise(state, &st, NULL);
        return -1;
    }
    return 0;
}

/* Convert a tuple of tensors, and build the header with checksums of 0 and `text` as its
 * "format". Returns -1 with an exception set. The caller zeroes `*f` before, and calls
 * layout_fini in any case. */
static int take_layout(const mlspy_state *state, PyObject *tensors, PyObject *text,
                       file_layout *f)
{
    mls_str value;
    mls_status st;
    f->count = (size_t)PyTuple_GET_SIZE(tensors);
    f->tensors = mls_alloc(f->count, sizeof *f->tensors);
    f->shapes = mls_alloc(f->count * MLS_LAYOUT_RANK, sizeof *f->shapes);
    if (f->tensors == NULL || f->shapes == NULL) {
        return mlspy_no_memory();
    }
    if (mlspy_take_text(text, "format", &value) < 0) {
        return -1;
    }
    for (size_t i = 0; i < f->count; i++) {
        /* the header sorts the tensors; places_list restores the order */
        f->tensors[i].number = i;
        if (take_tensor(state, PyTuple_GET_ITEM(tensors, (Py_ssize_t)i),
                        f->shapes + i * MLS_LAYOUT_RANK, &f->tensors[i]) < 0) {
            return -1;
        }
    }
    const mls_str_pair format = {{"format", strlen("format")}, value};
    return mlspy_check(
        state,
        mls_header_init(&f->header, f->tensors, f->count, &format, 1, ALIGNMENT, &st),
        &st);
}

/* Return a new list of (offset in the file, index of the first block's checksum) of each
 * tensor, in the caller's order. */
static PyObject *places_list(const file_layout *f)
{
    PyObject *list = PyList_New((Py_ssize_t)f->count);
    for (size_t i = 0; list != NULL && i < f->count; i++) {
        const mls_header_tensor *t = &f->tensors[i];
        mlspy_put(
            &list, (Py_ssize_t)t->number,
            Py_BuildValue("(Kn)", (unsigned long long)t->offset,
                          t->crcs == NULL ? 0 : (Py_ssize_t)(t->crcs - f->header.crcs)));
    }
    return list;
}

/* safetensors_layout(((name, dtype, shape), ...), format, crcs or None) -> (header, file
 * bytes, blocks, [(offset, first block), ...])
 *
 * Computes the layout of a safetensors file, and its header if `crcs` is a buffer of
 * uint32 with the CRC32C of each block; without it, the header is None. The elements of
 * each tensor are divided into blocks with a checksum each: `blocks` is their number, and
 * `first block` is the index of a tensor's first one. `format` is the text of the
 * metadata "format".
 */
PyObject *core_safetensors_layout(mlspy_state *state, PyObject *const *args)
{
    file_layout f = {0};
    Py_buffer crcs = {0};
    PyObject *result = NULL, *header = NULL;
    if (!PyTuple_Check(args[0])) {
        return PyErr_Format(PyExc_TypeError, "tensors must be a tuple");
    }
    if (take_layout(state, args[0], args[1], &f) < 0 ||
        (args[2] != Py_None && PyObject_GetBuffer(args[2], &crcs, PyBUF_SIMPLE) < 0)) {
        goto done;
    }
    if (crcs.obj == NULL) {
        header = Py_NewRef(Py_None);
    } else if ((size_t)crcs.len != f.header.block_count * sizeof(uint32_t)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of checksums for %zu blocks", crcs.len,
                     f.header.block_count);
        goto done;
    } else {
        memcpy(f.header.crcs, crcs.buf, (size_t)crcs.len);
        mls_header_finish(&f.header, mlspy_crc(state));
        header = PyBytes_FromStringAndSize(f.header.text.data,
                                           (Py_ssize_t)f.header.text.length);
    }
    result = Py_BuildValue("(NKnN)", header, (unsigned long long)f.header.file_bytes,
                           (Py_ssize_t)f.header.block_count, places_list(&f));
done:
    PyBuffer_Release(&crcs);
    layout_fini(&f);
    return result;
}

/* ---- parts ---- */

/* Arguments of parts_write, converted. */
typedef struct parts_args {
    mls_parts_job job;
    Py_buffer crcs, written;
} parts_args;

/* Releases what take_args acquired, also after a failure. */
static void args_fini(parts_args *a)
{
    PyBuffer_Release(&a->crcs);
    PyBuffer_Release(&a->written);
    if (a->job.folder >= 0) {
        (void)close(a->job.folder);
    }
    mls_free(a->job.items);
    mls_free((void *)a->job.names);
}

/* Look up the place of an item under its name in the dict `places`: the tuple that
 * parts_write describes. Returns -1 with an exception set: KeyError for a missing name.
 */
static int take_place(const mls_shard_item *item, PyObject *places, mls_placed_item *out)
{
    PyObject *name = mlspy_str_of(item->id.name), *place = NULL, *dtype;
    mls_str text;
    out->item = item;
    int failed = name == NULL || mlspy_dict_need(places, name, &place) < 0 ||
                 mlspy_take_tuple(place, "place", "LLLLO", &out->file, &out->offset,
                                  &out->block, &out->number, &dtype) < 0 ||
                 mlspy_take_text(dtype, "dtype", &text) < 0;
    if (!failed && !mls_dtype_from_name(text.data, text.length, &out->dtype)) {
        failed = MLSPY_REFUSE(PyExc_ValueError, "%R is not a dtype", dtype);
    }
    Py_XDECREF(name);
    Py_XDECREF(place);
    return failed ? -1 : 0;
}

/* Convert all arguments of parts_write but the last two. Returns -1 with an exception
 * set; the caller calls args_fini in any case. */
static int take_args(const mlspy_state *state, PyObject *const *args, parts_args *a)
{
    mls_parts_job *job = &a->job;
    const mlspy_shard_items *items = mlspy_shard_items_of(args[0]);
    if (items == NULL) {
        return -1;
    }
    if (!PyTuple_Check(args[2]) || mlspy_take_dict(args[3], "places") < 0) {
        return MLSPY_REFUSE(PyExc_TypeError, "files must be a tuple, and places a dict");
    }
    job->file_count = (size_t)PyTuple_GET_SIZE(args[2]);
    job->count = items->list.count;
    job->items = mls_alloc(job->count, sizeof *job->items);
    job->names = mls_alloc(job->file_count, sizeof *job->names);
    if (job->items == NULL || job->names == NULL) {
        return mlspy_no_memory();
    }
    if (PyObject_GetBuffer(args[4], &a->crcs, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(args[5], &a->written, PyBUF_WRITABLE) < 0) {
        return -1;
    }
    job->crcs = a->crcs.buf;
    job->block_count = (size_t)a->crcs.len / sizeof *job->crcs;
    job->written = a->written.buf;
    job->written_count = (size_t)a->written.len / sizeof *job->written;
    for (size_t i = 0; i < job->file_count; i++) {
        mls_str text;
        if (mlspy_take_text(PyTuple_GET_ITEM(args[2], (Py_ssize_t)i), "file name",
                            &text) < 0) {
            return -1;
        }
        job->names[i] = text.data;
    }
    for (size_t i = 0; i < job->count; i++) {
        if (take_place(&items->list.items[i], args[3], &job->items[i]) < 0) {
            return -1;
        }
    }
    return mlspy_open_folder(state, args[1], &job->folder);
}

/* parts_write(items, folder, files, places, crcs, written, sync, progress)
 *
 * Writes the items of shards_collect into existing files, and syncs these if `sync`.
 * `files` has the names of the files in `folder`. `places` maps each tensor's name to
 * (index of its file, offset, index of its first block in `crcs`, its index in `written`,
 * dtype in the file). This rank's shares of checksums are XORed to `crcs`, a buffer of
 * uint32 with an entry for each block of all files. The bytes written of each tensor are
 * added to `written`, a buffer of uint64. Returns None.
 */
PyObject *core_parts_write(mlspy_state *state, PyObject *const *args)
{
    mlspy_progress progress;
    parts_args a = {.job = {.folder = -1,
                            .kernels = state->kernels,
                            .crc = mlspy_crc(state),
                            .progress = &progress.core}};
    const char *failed;
    mls_status st;
    PyObject *result = NULL;
    if (mlspy_progress_init(&progress, args[7]) < 0) {
        return NULL;
    }
    if (mlspy_take_bool(args[6], &a.job.syncs) == 0 && take_args(state, args, &a) == 0) {
        mlspy_progress_begin(&progress);
        const mls_code code = mls_parts_write(&a.job, &failed, &st);
        mlspy_progress_end(&progress);
        if (code != MLS_OK) {
            mlspy_raise_under(state, &st, args[1], failed);
        } else if (mlspy_progress_finish(&progress) == 0) {
            result = Py_NewRef(Py_None);
        }
    }
    args_fini(&a);
    return result;
}
