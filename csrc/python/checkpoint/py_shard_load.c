/* py_shard_load: loads tensors or their parts into new, mapped or `into=` arrays.
 *
 * Both ways of loading have the same steps: choose tensors and parts; check that they are
 * stored and that the files exist; create the arrays or view the caller's; read without
 * the GIL. Files are checked again when they are opened for reading. */
#include "arguments/args.h"
#include "arguments/progress.h"
#include "arguments/results.h"
#include "array/array_alloc.h"
#include "array/array_view.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/codecs.h"
#include "checkpoint/merged_index_object.h"
#include "checkpoint/py_layout.h"
#include "checkpoint/py_safetensors.h"
#include "common/errors.h"
#include "common/gil.h"
#include "common/module_state.h"
#include "dictionaries/dict_items.h"

#include "base/memory.h"
#include "checkpoint/ranks/index_pattern.h"
#include "checkpoint/ranks/load_plan.h"
#include "checkpoint/ranks/requested_part.h"
#include "sharding/layout_intersection.h"

#include <unistd.h>

/* ---- loading: choose parts ---- */

/* Python objects of one part to load. */
typedef struct load_result {
    PyObject *key;   /* strong: the requested key */
    PyObject *array; /* strong: the result, or the owner of the target's memory */
} load_result;

/* One load: the parts to load, the files, and the destinations. */
typedef struct load_job {
    const mlspy_merged_index *merged; /* borrowed */
    const mlspy_state *state;
    PyObject *path; /* borrowed */
    int folder;     /* owned; -1: none */
    bool in_memory; /* the files are in `ranges`, not in a folder */
    bool zeroed;    /* the targets are new arrays: long zeros need no write */
    mls_file_range *ranges;
    Py_buffer *buffers; /* of the ranges */
    size_t range_count;
    uint64_t bytes_read; /* that reached their destination */
    mls_load_plan plan;
    load_result *results;     /* one for each part of the plan */
    mls_load_target *targets; /* one for each part; NULL: new arrays are loaded */
} load_job;

/* Releases all that a job holds; accepts a partly initialized one. Needs the GIL. */
static void load_fini(load_job *job)
{
    for (size_t i = 0; i < job->plan.count; i++) {
        Py_XDECREF(job->results[i].key);
        Py_XDECREF(job->results[i].array);
        if (job->targets != NULL) {
            mls_load_target_fini(&job->targets[i]);
        }
    }
    if (job->folder >= 0) {
        (void)close(job->folder);
    }
    for (size_t i = 0; i < job->range_count; i++) {
        PyBuffer_Release(&job->buffers[i]);
    }
    mls_free(job->ranges);
    mls_free(job->buffers);
    mls_free(job->results);
    mls_free(job->targets);
    mls_load_plan_fini(&job->plan);
}

/* Convert (layout or None, index, world): part `index` of the layout. Without a layout,
 * the stored one divides the tensors among `world` ranks, and `index` is the rank;
 * `world` 0: load whole tensors. Returns -1 with an exception set. */
static int take_cutting(const mlspy_state *state, PyObject *object, mls_cutting *out)
{
    PyObject *layout;
    int64_t index, world;
    size_t parts;
    mls_status st;
    if (mlspy_take_tuple(object, "cuts", "OLL", &layout, &index, &world) < 0) {
        return -1;
    }
    *out = (mls_cutting){.has_layout = layout != Py_None};
    if (out->has_layout && mlspy_take_layout(state, layout, &out->layout) < 0) {
        return -1;
    }
    (void)mls_layout_parts(&out->layout, &parts, &st);
    const int64_t part_count = out->has_layout ? (int64_t)parts : world > 0 ? world : 1;
    if (index < 0 || index >= part_count || world < 0) {
        return MLSPY_REFUSE(PyExc_ValueError, "part %lld of %lld does not exist",
                            (long long)index, (long long)part_count);
    }
    out->index = (size_t)index;
    out->world = (size_t)world;
    return 0;
}

/* As mlspy_check (returns 0 or -1), with the checkpoint's path in the exception. */
static int check_core(const load_job *job, mls_code code, const mls_status *st)
{
    if (code != MLS_OK) {
        mlspy_raise_under(job->state, st, job->path, NULL);
        return -1;
    }
    return 0;
}

/* Choose the part of the tensor `item` from its place: (whole shape, layout, index) or
 * (whole shape, begin, end), a range of elements. Returns -1 with an exception set.
 *
 * The layout is used unchanged: the caller has already projected it to the axes of a
 * state. The stored layout does not matter.
 */
static int take_place(const load_job *job, PyObject *place, mls_load_item *item)
{
    size_t shape[MLS_LAYOUT_RANK];
    mls_layout layout;
    int64_t begin = 0, index_or_end;
    mls_status st;
    PyObject *dims, *layout_or_begin, *last;
    if (mlspy_take_tuple(place, "a place", "OOO", &dims, &layout_or_begin, &last) < 0) {
        return -1;
    }
    const int rank = mlspy_take_shape(job->state, dims, shape);
    if (rank < 0 ||
        mlspy_take_int64(job->state, last, "index or end", &index_or_end) < 0 ||
        check_core(job, mls_load_item_check_full(item, rank, shape, &st), &st) < 0) {
        return -1;
    }
    const bool is_range = !PyTuple_Check(layout_or_begin);
    if ((is_range ? mlspy_take_int64(job->state, layout_or_begin, "begin", &begin)
                  : mlspy_take_layout(job->state, layout_or_begin, &layout)) < 0) {
        return -1;
    }
    /* a negative index becomes a large one, which is refused too */
    const mls_code code =
        is_range ? mls_load_item_run(item, begin, index_or_end, &st)
                 : mls_load_item_part(item, &layout, (size_t)index_or_end, &st);
    return check_core(job, code, &st);
}

/* Look up all keys of a list, and choose the part of each; the plan has the same order.
 * `places` has a place for each key, or is NULL if `cutting` applies to all tensors.
 * Returns -1 with an exception set. */
static int choose_parts(load_job *job, mls_section section, PyObject *keys,
                        const mls_cutting *cutting, PyObject *places)
{
    const Py_ssize_t count = PyList_GET_SIZE(keys);
    mls_status st;
    if (check_core(
            job, mls_load_plan_init(&job->plan, &job->merged->merged, (size_t)count, &st),
            &st) < 0) {
        return -1;
    }
    job->results = mls_realloc(NULL, (size_t)count, sizeof *job->results);
    if (job->results == NULL) {
        return mlspy_no_memory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        mls_str text;
        PyObject *key = PyList_GET_ITEM(keys, i);
        if (mlspy_take_text(key, "tensor name", &text) < 0) {
            return -1;
        }
        const mls_tensor_id id = mls_tensor_id_of(section, text);
        mls_load_item *item = mls_load_plan_add(&job->plan, &id);
        if (item == NULL) {
            return MLSPY_REFUSE(job->state->errors[MLSPY_ERROR_NOT_FOUND],
                                "Tensor '%.200U' not found in checkpoint", key);
        }
        job->results[i] = (load_result){.key = Py_NewRef(key)};
        const mls_stored *opaque = item->tensor->any_shard->opaque;
        if (opaque != NULL && check_core(job, mls_stored_check(opaque, &st), &st) < 0) {
            return -1;
        }
        if ((places != NULL
                 ? take_place(job, PyList_GET_ITEM(places, i), item)
                 : check_core(job, mls_load_item_select(item, cutting, &st), &st)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- loading: find stored ranges ---- */

/* Find the stored ranges (pieces) of all parts, and check the files in the folder, before
 * memory for the result is allocated. Returns -1 with an exception set. */
static int find_pieces(load_job *job)
{
    mls_status st;
    mls_code code;
    const char *file;
    MLSPY_WITHOUT_GIL(code = mls_load_plan_find(&job->plan, job->folder, &file, &st));
    if (code != MLS_OK) {
        mlspy_raise_under(job->state, &st, job->path, file);
        return -1;
    }
    return 0;
}

/* ---- loading: new arrays ---- */

/* Return the bytes of new array `index` in a shared block, for mlspy_allocator; 0
 * if the array gets its own zeroed memory. */
static size_t new_bytes(const void *context, size_t index)
{
    const mls_load_item *item = &((const load_job *)context)->plan.items[index];
    return item->long_zeros ? 0 : mls_load_item_bytes(item);
}

/* Return a new array for part `index`: in a shared block, or with its own memory if
 * `alone`. NULL with an exception set. */
static PyObject *new_array(const load_job *job, size_t index, mlspy_allocator *allocator,
                           bool alone)
{
    const mls_load_item *item = &job->plan.items[index];
    const mls_dtype dtype = item->tensor->any_shard->dtype;
    size_t dims[MLS_LAYOUT_RANK];
    const int rank = mls_part_dims(&item->part, dims);
    return alone || item->long_zeros
               ? mlspy_array_new(allocator, dtype, rank, dims, item->long_zeros)
               : mlspy_allocator_array(allocator, index, dtype, rank, dims);
}

/* Map a whole file, once for all of its tensors. Returns the capsule of the mapping,
 * borrowed from the dict `capsules` of all files; NULL with an exception set. `links`:
 * the file may be a symbolic link. The arrays keep the capsules alive, and these the
 * mappings. */
static PyObject *map_file(load_job *job, PyObject *capsules, bool links,
                          const mls_index_file *file)
{
    mls_status st;
    mls_code code;
    mls_mapping mapping;
    PyObject *capsule = PyDict_GetItemString(capsules, file->path);
    if (capsule != NULL) {
        return capsule;
    }
    MLSPY_WITHOUT_GIL(code = mls_mapping_init_at(&mapping, job->folder, file->path, links,
                                                 file->bytes, &st));
    if (code != MLS_OK) {
        return mlspy_raise_under(job->state, &st, job->path, file->path);
    }
    capsule = mlspy_mapping_capsule(&mapping);
    if (capsule == NULL || mlspy_dict_set(capsules, file->path, capsule) < 0) {
        Py_XDECREF(capsule);
        return NULL;
    }
    Py_DECREF(capsule); /* the dict holds it */
    return capsule;
}

/* Return a new array over the mapped file if the part is one contiguous range there, else
 * a new reference to None. NULL with an exception set. */
static PyObject *mapped_array(load_job *job, const mls_load_item *item,
                              PyObject *capsules, mlspy_allocator *allocator)
{
    uint64_t offset;
    const mls_merged_index_shard *shard =
        mls_requested_part_run(&job->merged->merged, item->tensor, &item->part, &offset);
    if (shard == NULL) {
        return Py_NewRef(Py_None);
    }
    PyObject *capsule = map_file(job, capsules, shard->index->links,
                                 &shard->index->files[shard->shard->file]);
    if (capsule == NULL) {
        return NULL;
    }
    size_t dims[MLS_LAYOUT_RANK];
    const int rank = mls_part_dims(&item->part, dims);
    return mlspy_array_over(allocator, item->tensor->any_shard->dtype, rank, dims,
                            mlspy_mapping_data(capsule) + offset, capsule);
}

/* Keep the pieces of part `i`, which is mapped, to compare their checksums: they get no
 * destination. Without `verify`, or without checksums, its pieces are dropped. */
static void keep_mapped(load_job *job, size_t i, bool verify, size_t *used)
{
    const mls_load_item *item = &job->plan.items[i];
    if (verify && item->count > 0 && job->plan.pieces[item->first].shard->crcs != NULL) {
        mls_load_plan_place(&job->plan, i, NULL, true /* zeroed */);
        mls_load_plan_keep(&job->plan, i, used);
    }
}

/* Create all arrays and return {key: array}; NULL with an exception set. If `maps`,
 * arrays are mapped if possible; of their pieces only those to `verify` are kept, and
 * later ones move down.
 *
 * Each array is added to the dict at once, while both are in the cache. The job holds the
 * arrays too: their memory must stay valid during the read, even if other code gets the
 * dict or a later array fails. `ready` receives the number of pieces (ranges to
 * read) with destinations after every 64th array; when this returns, the core releases
 * the waiting threads. NULL: no thread waits.
 */
static PyObject *make_arrays(load_job *job, bool maps, bool verify,
                             mls_ready_counter *ready)
{
    size_t used = 0;
    PyObject *result = PyDict_New(), *capsules = maps ? PyDict_New() : NULL;
    mlspy_allocator arena = {
        .bytes_of = new_bytes, .context = job, .count = job->plan.count};
    bool good = result != NULL && (!maps || capsules != NULL);
    enum { ARRAYS_PER_UPDATE = 64 }; /* of the counter */
    for (size_t i = 0; good && i < job->plan.count; i++) {
        load_result *entry = &job->results[i];
        PyObject *array = maps ? mapped_array(job, &job->plan.items[i], capsules, &arena)
                               : Py_NewRef(Py_None);
        const bool is_read = array == Py_None;
        if (is_read) {
            Py_DECREF(array);
            array = new_array(job, i, &arena, maps);
        }
        entry->array = array;
        if (array != NULL && is_read) {
            mls_load_plan_place(&job->plan, i, PyArray_DATA((PyArrayObject *)array),
                                true /* zeroed */);
            mls_load_plan_keep(&job->plan, i, &used);
        } else if (array != NULL) {
            keep_mapped(job, i, verify, &used);
        }
        good = array != NULL && PyDict_SetItem(result, entry->key, array) == 0;
        if (ready != NULL && i % ARRAYS_PER_UPDATE == 0) {
            mls_ready_counter_advance(ready, used);
        }
    }
    job->plan.piece_count = used;
    mlspy_allocator_fini(&arena);
    Py_XDECREF(capsules);
    if (!good) {
        Py_CLEAR(result);
    }
    return result;
}

/* ---- loading: reading ---- */

/* Arrays that are created while earlier ones are being read. */
typedef struct make_state {
    load_job *job;
    mlspy_progress *progress;
    PyObject *result; /* NULL with an exception set, or not called yet */
} make_state;

/* The core's callback: creates the arrays while threads read the earlier ones. Runs in
 * the calling thread, which takes the GIL for it. Returns false with an exception set. */
static bool make_during_read(void *context, mls_ready_counter *ready)
{
    make_state *m = context;
    mlspy_progress_end(m->progress);
    m->result = make_arrays(m->job, false, false, ready);
    mlspy_progress_begin(m->progress);
    return m->result != NULL;
}

/* Read all pieces to their destinations, and report bytes to `callback` (or None).
 * `verify`: checksums are computed while the data is in the cache. If `result` is not
 * NULL, the arrays are created meanwhile, and `*result` receives them, or NULL. Returns
 * -1 with an exception set, which names the file except for no memory or a stop. */
static int read_all(load_job *job, bool verify, PyObject *callback, PyObject **result)
{
    mlspy_progress progress;
    mls_status st;
    size_t failed_piece = 0;
    make_state maker_context = {job, &progress, NULL};
    const mls_maker maker = {make_during_read, &maker_context};
    if (mlspy_progress_init(&progress, callback) < 0) {
        return -1;
    }
    const mls_read_request request = {
        .folder = job->folder,
        .links = job->merged->merged.links,
        .in_memory = job->in_memory,
        .ranges = job->ranges,
        .range_count = job->range_count,
        .read = &job->bytes_read,
        .pieces = job->plan.pieces,
        .count = job->plan.piece_count,
        .crc = verify ? mlspy_crc(job->state) : NULL,
        .codecs = mlspy_codecs(),
        .pool = job->state->pool,
        .progress = &progress.core,
        .maker = result == NULL ? NULL : &maker,
    };
    mlspy_progress_begin(&progress);
    const mls_code code = mls_shards_read(&request, &failed_piece, &st);
    mlspy_progress_end(&progress);
    if (result != NULL) {
        *result = maker_context.result;
    }
    if (code != MLS_OK) {
        const bool names_file = code != MLS_E_MEMORY && code != MLS_E_STOPPED;
        mlspy_raise_under(job->state, &st, job->path,
                          names_file ? job->plan.pieces[failed_piece].shard->file : NULL);
        return -1;
    }
    return mlspy_progress_finish(&progress);
}

/* Return {key: array} with mapped arrays if possible, the others read by read_all, which
 * with `verify` also compares the checksums of the mapped ones; NULL with an exception
 * set. The arrays are created first, since this decides what is read. */
static PyObject *map_and_read(load_job *job, bool verify, PyObject *callback)
{
    PyObject *result = make_arrays(job, true, verify, NULL);
    if (result != NULL && read_all(job, verify, callback, NULL) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Return {key: array} with new arrays, created during the read, see read_all: allocating
 * memory for many arrays takes a while. NULL with an exception set. */
static PyObject *make_and_read(load_job *job, bool verify, PyObject *callback)
{
    PyObject *result = NULL;
    mls_load_plan_foresee(&job->plan);
    if (read_all(job, verify, callback, &result) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Choose tensors and parts, without accessing files. `path` is used in errors. `cutting`
 * is (layout or None, index, world) for all tensors, or a list with a place for each key.
 * Returns -1 with an exception set; call load_fini also then. */
static int load_begin(load_job *job, mlspy_merged_index *self, PyObject *path,
                      PyObject *section, PyObject *keys, PyObject *cutting)
{
    mls_section section_id;
    mls_cutting cut;
    PyObject *places = PyList_Check(cutting) ? cutting : NULL;
    *job = (load_job){.merged = self,
                      .state = mlspy_state_of_type(Py_TYPE(self)),
                      .path = path,
                      .folder = -1};
    if (!PyList_Check(keys)) {
        return MLSPY_REFUSE(PyExc_TypeError, "keys must be a list");
    }
    if (places != NULL && PyList_GET_SIZE(places) != PyList_GET_SIZE(keys)) {
        return MLSPY_REFUSE(PyExc_ValueError, "a place is wanted for each key");
    }
    return mlspy_take_section(job->state, section, &section_id) < 0 ||
                   (places == NULL && take_cutting(job->state, cutting, &cut) < 0) ||
                   choose_parts(job, section_id, keys, &cut, places) < 0
               ? -1
               : 0;
}

/* Add one (path, begin, end, file's length, buffer) to the job's ranges: the buffer has
 * the file's bytes begin .. end - 1. The tuple keeps the path alive. Returns -1 with an
 * exception set. */
static int take_range(load_job *job, PyObject *object)
{
    mls_file_range *range = &job->ranges[job->range_count];
    Py_buffer *buffer = &job->buffers[job->range_count];
    unsigned long long begin, end, file_bytes;
    PyObject *data;
    if (mlspy_take_tuple(object, "a range", "sKKKO", &range->file, &begin, &end,
                         &file_bytes, &data) < 0 ||
        PyObject_GetBuffer(data, buffer, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    range->begin = begin;
    range->end = end;
    range->file_bytes = file_bytes;
    range->data = buffer->buf;
    range->bytes = (size_t)buffer->len;
    job->range_count++;
    return 0;
}

/* Take the ranges of files in memory from a tuple. Returns -1 with an exception set. */
static int take_ranges(load_job *job, PyObject *tuple)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    job->in_memory = true;
    job->ranges = mls_alloc((size_t)count, sizeof *job->ranges);
    job->buffers = mls_alloc((size_t)count, sizeof *job->buffers);
    if (job->ranges == NULL || job->buffers == NULL) {
        return mlspy_no_memory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (take_range(job, PyTuple_GET_ITEM(tuple, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* As load_begin, with all other checks that are possible before anything must be undone.
 * `source` is a folder, or (URL, ranges, zeroed). Returns -1 with an exception set. */
static int load_init(load_job *job, mlspy_merged_index *self, PyObject *source,
                     PyObject *section, PyObject *keys, PyObject *cutting)
{
    PyObject *path = source, *ranges = NULL;
    int zeroed = 0;
    if (PyTuple_Check(source) && mlspy_take_tuple(source, "a source", "OO!p", &path,
                                                  &PyTuple_Type, &ranges, &zeroed) < 0) {
        return -1;
    }
    const int failed = load_begin(job, self, path, section, keys, cutting);
    job->zeroed = zeroed != 0;
    return failed < 0 ||
                   (ranges == NULL ? mlspy_open_folder(job->state, path, &job->folder)
                                   : take_ranges(job, ranges)) < 0 ||
                   find_pieces(job) < 0
               ? -1
               : 0;
}

/* load(source, section, keys, cutting, verify, mmap, progress) -> {key: array}
 *
 * `source` is a folder, or (URL, ranges, true): then the arrays are only created.
 * `cutting` is as for load_into. `verify`: compare checksums; `mmap`: map arrays if
 * possible; `progress` (or None) is called with numbers of bytes that were read. */
PyObject *mlspy_merged_index_load(mlspy_merged_index *self, PyObject *const *args,
                                  Py_ssize_t count)
{
    load_job job = {.folder = -1};
    PyObject *result = NULL;
    bool verify, maps;
    if (mlspy_take_count("load", 7, count) == 0 &&
        mlspy_take_bool(args[4], &verify) == 0 && mlspy_take_bool(args[5], &maps) == 0 &&
        load_init(&job, self, args[0], args[1], args[2], args[3]) == 0) {
        result = job.in_memory ? make_arrays(&job, false, false, NULL)
                 : maps        ? map_and_read(&job, verify, args[6])
                               : make_and_read(&job, verify, args[6]);
    }
    load_fini(&job);
    return result;
}

/* ---- loading: into existing arrays ---- */

/* Check that a view fits part `i`, and keep in the job its memory, or for a target that
 * is not packed a copy of the view. On success the job takes the view's owner. Returns -1
 * with an exception set. */
static int keep_target(const load_job *job, size_t i, mlspy_view *view)
{
    mls_status st;
    if (mls_load_item_check_target(&job->plan.items[i], &view->tensor, &st) != MLS_OK) {
        const mls_dtype stored = job->plan.items[i].tensor->any_shard->dtype;
        if (st.code == MLS_E_SHAPE && stored != view->tensor.dtype &&
            mls_dtype_of(stored)->kind == MLS_KIND_FLOAT &&
            mls_dtype_of(view->tensor.dtype)->kind == MLS_KIND_FLOAT) {
            mlspy_status_hint(&st, "cast=True converts floats");
        }
        return check_core(job, st.code, &st);
    }
    if (mls_load_target_init(&job->targets[i], &view->tensor, &st) != MLS_OK) {
        return check_core(job, st.code, &st);
    }
    job->results[i].array = view->owner;
    view->owner = NULL;
    return 0;
}

/* View the target `array` of part `item` for writing. The name for the error message is
 * only built on failure. Returns -1 with an exception set, and no owner. */
static int view_array(const load_job *job, const mls_load_item *item, PyObject *array,
                      mlspy_view *out)
{
    char label[MLS_NAME_BYTES];
    mls_status named = {0};
    if (mlspy_view_quickly(job->state, array, true /* writable */, out)) {
        return 0;
    }
    mls_status_tensor(&named, &item->tensor->any_shard->id);
    PyOS_snprintf(label, sizeof label, "target '%.120s'", named.name);
    return mlspy_view_writable(job->state, array, label, out);
}

/* View the target of part `i` in a dict, and check dtype and shape. The view's owner then
 * keeps the array alive. Returns -1 with an exception set. */
static int view_target(const load_job *job, size_t i, PyObject *targets)
{
    mlspy_view view;
    PyObject *array = NULL, *key = job->results[i].key;
    if (mlspy_dict_need(targets, key, &array) < 0) {
        return -1;
    }
    int failed = view_array(job, &job->plan.items[i], array, &view);
    Py_DECREF(array);
    if (failed == 0) {
        failed = keep_target(job, i, &view);
        mlspy_view_release(&view);
    }
    return failed;
}

/* View and check all targets in a dict before anything is read. Returns -1 with an
 * exception set. */
static int view_targets(load_job *job, PyObject *targets)
{
    if (!PyDict_Check(targets)) {
        return MLSPY_REFUSE(PyExc_TypeError, "targets must be a dict");
    }
    job->targets = mls_alloc(job->plan.count, sizeof *job->targets);
    if (job->targets == NULL) {
        return mlspy_no_memory();
    }
    for (size_t i = 0; i < job->plan.count; i++) {
        if (view_target(job, i, targets) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Return a new pair of the bytes of all parts, and the list of keys whose targets are
 * read through temporary memory; NULL with an exception set. */
static PyObject *describe_targets(const load_job *job)
{
    PyObject *list = PyList_New(0);
    unsigned long long bytes = 0;
    for (size_t i = 0; list != NULL && i < job->plan.count; i++) {
        bytes += mls_load_item_bytes(&job->plan.items[i]);
        if (job->targets[i].strided != NULL &&
            PyList_Append(list, job->results[i].key) < 0) {
            Py_CLEAR(list);
        }
    }
    return list == NULL ? NULL : Py_BuildValue("(KN)", bytes, list);
}

/* fits(folder, section, keys, cutting, targets) -> (bytes, [key, ...])
 *
 * Returns the bytes to load, and the keys whose targets are not packed. Raises the errors
 * that load_into would raise because of the targets, without accessing files. Callers
 * that fill several sections, or load together with other ranks, check all of them before
 * the first one changes. The folder is only used in errors. */
PyObject *mlspy_merged_index_fits(mlspy_merged_index *self, PyObject *const *args,
                                  Py_ssize_t count)
{
    load_job job = {.folder = -1};
    const bool good = mlspy_take_count("fits", 5, count) == 0 &&
                      load_begin(&job, self, args[0], args[1], args[2], args[3]) == 0 &&
                      view_targets(&job, args[4]) == 0;
    PyObject *result = good ? describe_targets(&job) : NULL;
    load_fini(&job);
    return result;
}

/* Set the destinations of all parts: their targets, zeroed memory if job->zeroed. Returns
 * -1 with an exception set. */
static int place_targets(load_job *job)
{
    mls_status st;
    if (check_core(job, mls_load_plan_place_all(&job->plan, job->targets, &st), &st) <
        0) {
        return -1;
    }
    /* again, because mls_load_plan_place_all assumes memory that is not zeroed */
    for (size_t i = 0; job->zeroed && i < job->plan.count; i++) {
        if (job->targets[i].strided == NULL) {
            mls_load_plan_place(&job->plan, i, job->targets[i].data, true /* zeroed */);
        }
    }
    return 0;
}

/* load_into(source, section, keys, cutting, targets, verify, progress) -> bytes
 *
 * `source` is a folder, or (URL, ranges, zeroed) with a tuple of (path, begin, end,
 * length of the file, buffer): then only the bytes of these ranges are read, or, if
 * `ranges` is empty, only zeros that were not stored are written. A target that is not
 * packed needs all its bytes at once. `zeroed` is true if `load` has created the targets:
 * long zeros are not written.
 *
 * `cutting` is (layout, index, world) for all tensors, or a list with a place for each.
 * `targets` maps keys to writable arrays or tensors; targets that are not packed are read
 * through temporary memory. `verify` and `progress` are as for load. */
PyObject *mlspy_merged_index_load_into(mlspy_merged_index *self, PyObject *const *args,
                                       Py_ssize_t count)
{
    load_job job = {.folder = -1};
    bool good = false, verify;
    if (mlspy_take_count("load_into", 7, count) == 0 &&
        mlspy_take_bool(args[5], &verify) == 0 &&
        load_init(&job, self, args[0], args[1], args[2], args[3]) == 0 &&
        view_targets(&job, args[4]) == 0) {
        good = place_targets(&job) == 0 && read_all(&job, verify, args[6], NULL) == 0;
    }
    if (good) {
        mls_load_plan_scatter(&job.plan, job.targets, job.state->kernels);
    }
    const uint64_t bytes_read = job.bytes_read;
    load_fini(&job);
    return good ? PyLong_FromUnsignedLongLong(bytes_read) : NULL;
}

/* ---- parts and bytes that a load needs ---- */

/* Return the set under `key` in a dict (borrowed), created if needed; NULL with an
 * exception set. */
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

/* Add the numbers of the stored parts that intersect the part of `item` to the set under
 * mlspy_tensor_places in `dict`, created if needed. At most `max_parts` numbers are
 * added, as a layout may claim any number of parts. Returns -1 with an exception set. */
static int add_parts(const load_job *job, const mls_index_pattern *patterns,
                     const mls_load_item *item, Py_ssize_t max_parts, PyObject *dict)
{
    const mls_index_shard *shard = item->tensor->any_shard;
    PyObject *key = mlspy_tensor_places(job->merged, patterns, item->tensor);
    PyObject *set = key == NULL ? NULL : part_set_for(dict, key);
    mls_layout_intersection iter;
    size_t part;
    int failed = set == NULL ? -1 : 0;
    mls_layout_intersection_init(&iter, &shard->layout, shard->rank, shard->shape,
                                 &item->part);
    while (failed == 0 && max_parts-- > 0 && mls_layout_intersection_next(&iter, &part)) {
        PyObject *number = PyLong_FromSize_t(part);
        failed = number == NULL ? -1 : PySet_Add(set, number);
        Py_XDECREF(number);
    }
    Py_XDECREF(key);
    return failed;
}

/* select_parts(folder, section, keys, cutting, max_parts) -> {places: {part, ...}, ...}
 *
 * Returns the numbers of the stored parts that a load needs, by the places of their
 * tensors, as places() returns them. At most `max_parts` parts of each tensor are listed.
 * The folder is only used in errors; no file is opened. */
PyObject *mlspy_merged_index_select_parts(mlspy_merged_index *self, PyObject *const *args,
                                          Py_ssize_t count)
{
    load_job job = {.folder = -1};
    mls_index_pattern *patterns = NULL;
    PyObject *dict = NULL;
    const Py_ssize_t max_parts = count == 5 ? PyLong_AsSsize_t(args[4]) : 0;
    if (mlspy_take_count("select_parts", 5, count) == 0 &&
        (max_parts != -1 || !PyErr_Occurred()) &&
        load_begin(&job, self, args[0], args[1], args[2], args[3]) == 0 &&
        (patterns = mlspy_index_patterns(job.merged, job.state)) != NULL) {
        dict = PyDict_New();
    }
    for (size_t i = 0; dict != NULL && i < job.plan.count; i++) {
        if (add_parts(&job, patterns, &job.plan.items[i], max_parts, dict) < 0) {
            Py_CLEAR(dict);
        }
    }
    mls_index_patterns_free(patterns, self->index_count);
    load_fini(&job);
    return dict;
}

/* Append the reads of one tensor to a list of (path, begin, end, bytes, origin), one for
 * each place: `bytes` of the file's bytes begin .. end - 1 are read. On failure the list
 * is released and set to NULL. Reads may be divided at multiples of MLS_READ_SPAN from
 * the origin, an offset in the file; -1: not at all. They are computed by the same
 * function as in a load, but without destinations. Zeros without bytes are not read. */
static void add_reads(const load_job *job, const mls_load_item *item, bool verify,
                      PyObject **list)
{
    const size_t most = item->tensor->places;
    const mls_read_scratch out = {mls_alloc(most, sizeof *out.stored),
                                  mls_alloc(most, sizeof *out.parts),
                                  mls_alloc(most, sizeof *out.pieces)};
    mls_status st;
    size_t count = 0;
    if (out.stored == NULL || out.parts == NULL || out.pieces == NULL) {
        PyErr_NoMemory();
        Py_CLEAR(*list);
    } else if (check_core(job,
                          mls_requested_part_pieces(&job->merged->merged, item->tensor,
                                                    &item->part, NULL, &out, &count, &st),
                          &st) < 0) {
        Py_CLEAR(*list);
    }
    for (size_t i = 0; *list != NULL && i < count; i++) {
        const mls_stored_shard *stored = &out.stored[i];
        if (stored->file != NULL) {
            const mls_stored_reads read =
                mls_stored_reads_of(stored, &item->part, verify);
            mlspy_append(list,
                         Py_BuildValue(
                             "(sKKKL)", stored->file, (unsigned long long)read.begin,
                             (unsigned long long)read.end, (unsigned long long)read.bytes,
                             stored->frames != NULL ? -1LL : (long long)stored->offset));
        }
    }
    mls_free(out.stored);
    mls_free(out.parts);
    mls_free(out.pieces);
}

/* reads(folder, section, keys, cutting, verify) -> [(path, begin, end, bytes, origin),
 * ...]
 *
 * Returns the reads of a load, as add_reads. Shard files are not accessed and need not
 * exist.
 */
PyObject *mlspy_merged_index_reads(mlspy_merged_index *self, PyObject *const *args,
                                   Py_ssize_t count)
{
    load_job job = {.folder = -1};
    PyObject *list = NULL;
    bool verify;
    if (mlspy_take_count("reads", 5, count) == 0 &&
        mlspy_take_bool(args[4], &verify) == 0 &&
        load_begin(&job, self, args[0], args[1], args[2], args[3]) == 0) {
        list = PyList_New(0);
    }
    for (size_t i = 0; list != NULL && i < job.plan.count; i++) {
        add_reads(&job, &job.plan.items[i], verify, &list);
    }
    load_fini(&job);
    return list;
}
