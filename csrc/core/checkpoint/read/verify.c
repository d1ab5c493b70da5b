/* verify: compares all files of an index with their recorded lengths, headers and
 * checksums; lists every problem.
 *
 * A task checks the header of a file, or reads some places of it. Places of a file that
 * is missing or has the wrong length are skipped: the header task reports the file once.
 */
#include "checkpoint/read/verify.h"

#include "base/memory.h"
#include "base/search.h"
#include "base/size.h"
#include "io/file.h"
#include "safetensors/safetensors.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Return the word for a kind of problem. Scripts may rely on these words. */
const char *mls_problem_name(mls_problem_kind kind)
{
    static const char *const names[MLS_PROBLEM_COUNT] = {
        [MLS_PROBLEM_MISSING] = "missing", [MLS_PROBLEM_UNREADABLE] = "unreadable",
        [MLS_PROBLEM_LENGTH] = "length",   [MLS_PROBLEM_FOREIGN] = "foreign",
        [MLS_PROBLEM_HEADER] = "header",   [MLS_PROBLEM_ALTERED] = "altered"};
    return names[kind];
}

void mls_problems_fini(mls_problems *problems)
{
    mls_free(problems->list);
    *problems = (mls_problems){0};
}

enum {
    STEP = 256 << 10, /* stays in the cache between reading and checksum */
    PART = 8 << 20,   /* bytes of one task; a multiple of the block size */
    LENGTH_BYTES = 8  /* length field before a header */
};

/* A place of a shard: the only one of a plain shard (`layer` 0), or one of its layers.
 * `file` and `offset` are copied from it, to sort by them. */
typedef struct place_entry {
    size_t file;
    uint64_t offset;
    size_t shard; /* index into the shards of the index */
    size_t layer; /* number for mls_index_place */
} place_entry;

/* Places `first` .. `first + count` in the order of files. A single place is read from
 * byte `start` on, at most PART bytes. If `count` is 0, the task checks the file of place
 * `first`. */
typedef struct task {
    size_t first, count, start;
} task;

typedef struct verifier {
    int folder;
    const mls_index *index;
    const mls_crc_kernels *crc;
    const mls_progress *progress;
    const place_entry *order; /* all places, sorted by file and offset */
    size_t place_count;
    const task *tasks;
    pthread_mutex_t lock; /* protects everything below */
    mls_problems report;
    size_t room;
    mls_code code; /* first failure of the verification itself */
} verifier;

/* Return the place that is element `number` of `order`. */
static mls_layer place_of(const verifier *v, size_t number)
{
    const place_entry *entry = &v->order[number];
    return mls_index_place(&v->index->shards[entry->shard], entry->layer);
}

/* ---- the list of problems ---- */

/* Record why verification cannot continue: MLS_E_MEMORY or MLS_E_STOPPED. The first
 * reason is kept. */
static void set_failure(verifier *v, mls_code code)
{
    pthread_mutex_lock(&v->lock);
    v->code = v->code == MLS_OK ? code : v->code;
    pthread_mutex_unlock(&v->lock);
}

/* Return whether verification cannot continue. Checked between blocks, so that a stop
 * takes effect within one block. */
static bool has_failed(verifier *v)
{
    pthread_mutex_lock(&v->lock);
    const bool result = v->code != MLS_OK;
    pthread_mutex_unlock(&v->lock);
    return result;
}

/* Append a copy of `problem`; the caller holds the lock. The list is limited: an empty
 * folder would otherwise give a problem for each of a million files. If memory runs out,
 * the verification fails (`v->code`). */
static void append_problem(verifier *v, const mls_problem *problem)
{
    mls_problems *problems = &v->report;
    if (problems->count == MLS_PROBLEMS_MOST) {
        return;
    }
    mls_problem *list = mls_grow(problems->list, problems->count, &v->room, sizeof *list);
    if (list == NULL) {
        v->code = MLS_E_MEMORY;
        return;
    }
    problems->list = list;
    problems->list[problems->count++] = *problem;
}

/* Add a problem of the kind `kind` to the list; takes the lock. `file` and `shard` are
 * positions in the index, SIZE_MAX for no shard; `offset` and `bytes` are a range of the
 * file. `text` is copied. */
static void add_problem(verifier *v, mls_problem_kind kind, size_t file, size_t shard,
                        uint64_t offset, uint64_t bytes, const char *text)
{
    mls_problem problem = {
        .kind = kind, .file = file, .shard = shard, .offset = offset, .bytes = bytes};
    snprintf(problem.text, sizeof problem.text, "%s", text);
    pthread_mutex_lock(&v->lock);
    append_problem(v, &problem);
    pthread_mutex_unlock(&v->lock);
}

/* Order for qsort: by file and offset, since tasks finish in any order. */
static int compare_problems(const void *a, const void *b)
{
    const mls_problem *x = a, *y = b;
    return x->file != y->file      ? (x->file < y->file ? -1 : 1)
           : x->offset < y->offset ? -1
                                   : x->offset > y->offset;
}

/* Count `bytes` bytes as read, and report them. If the caller wants to stop, the
 * verification fails with MLS_E_STOPPED. */
static void report_progress(verifier *v, uint64_t bytes)
{
    pthread_mutex_lock(&v->lock);
    v->report.bytes_read += bytes;
    pthread_mutex_unlock(&v->lock);
    if (!mls_progress_report(v->progress, bytes)) {
        set_failure(v, MLS_E_STOPPED);
    }
}

/* ---- a file ---- */

/* Open file number `file` of the index as `*fd`. Returns false if it is missing or its
 * length differs from its record. If `reports`, this adds a problem; only the file's own
 * task reports, so that there is one problem for each file. */
static bool open_file(verifier *v, size_t file, bool reports, int *fd)
{
    const mls_index_file *record = &v->index->files[file];
    mls_status st;
    uint64_t length;
    const mls_code code =
        mls_file_open_at(v->folder, record->path, false /* no links */, fd, &length, &st);
    if (code == MLS_OK && length == record->bytes) {
        return true;
    }
    if (code == MLS_OK) {
        (void)close(*fd);
    }
    if (reports && code == MLS_OK) {
        const bool cut = length < record->bytes;
        add_problem(v, MLS_PROBLEM_LENGTH, file, SIZE_MAX, cut ? length : record->bytes,
                    cut ? record->bytes - length : length - record->bytes,
                    cut ? "the file is truncated" : "the file is longer than it was");
    } else if (reports) {
        add_problem(v,
                    st.code == MLS_E_FORMAT || st.os_error == EISDIR ? MLS_PROBLEM_FOREIGN
                    : st.os_error == ENOENT                          ? MLS_PROBLEM_MISSING
                                            : MLS_PROBLEM_UNREADABLE,
                    file, SIZE_MAX, 0, record->bytes, st.text);
    }
    return false;
}

/* Return whether a header lists a tensor of the packed `dtype` as bytes, which is
 * correct: see mls_header_dtype. */
static bool is_listed_as_bytes(mls_dtype dtype, mls_dtype listed)
{
    return mls_dtype_of(dtype)->kind == MLS_KIND_PACKED && listed == MLS_U8;
}

/* Return whether the header lists every place of its file that the index lists; place
 * `first` in `order` is the first of them. In a file, a layer of rows or a compressed
 * layer is an array of bytes; a full, uncompressed layer was a plain shard when it was
 * written. */
static bool is_header_recorded(const verifier *v, const mls_safetensors *header,
                               size_t first)
{
    const size_t file = place_of(v, first).file;
    for (size_t i = first; i < v->place_count; i++) {
        const mls_index_shard *shard = &v->index->shards[v->order[i].shard];
        const mls_layer place = place_of(v, i);
        const bool is_tensor = place.row == 0 && place.frames == NULL;
        const mls_dtype dtype = is_tensor ? shard->dtype : MLS_U8;
        if (place.file != file) {
            break;
        }
        size_t at; /* tensors are sorted by offset */
        MLS_FIND_FIRST(at, header->count, header->tensors[at].offset >= place.offset);
        /* an empty tensor has the offset of the next one, so several may match */
        while (at < header->count && header->tensors[at].offset == place.offset &&
               (header->tensors[at].bytes != place.bytes ||
                (header->tensors[at].dtype != dtype &&
                 !is_listed_as_bytes(dtype, header->tensors[at].dtype)))) {
            at++;
        }
        if (at == header->count || header->tensors[at].offset != place.offset) {
            return false;
        }
    }
    return true;
}

/* Read the length field and the text of the header of the open file `fd`; both must end
 * at or before byte `end`. `*out` receives `*length` bytes; free them with mls_free.
 * MLS_E_IO, MLS_E_MEMORY; MLS_E_FORMAT: the length is impossible. */
static mls_code read_head(int fd, uint64_t end, unsigned char **out, size_t *length,
                          mls_status *st)
{
    unsigned char start[LENGTH_BYTES];
    mls_code code = mls_file_read_at(fd, start, sizeof start, 0, st);
    if (code != MLS_OK) {
        return code;
    }
    /* the length field itself may be damaged, so it is checked before it sets an
     * allocation */
    const uint64_t header_length = mls_load_le64(start);
    if (header_length > MLS_SAFETENSORS_MAX_HEADER ||
        header_length + LENGTH_BYTES > end) {
        return mls_fail_at(st, 0, "its header's length changed");
    }
    unsigned char *head = mls_alloc((size_t)header_length + LENGTH_BYTES, 1);
    if (head == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a header");
    }
    code = mls_file_read_at(fd, head, (size_t)header_length + LENGTH_BYTES, 0, st);
    if (code != MLS_OK) {
        mls_free(head);
        return code;
    }
    *out = head;
    *length = (size_t)header_length + LENGTH_BYTES;
    return MLS_OK;
}

/* Read the header, which ends at or before byte `end` of the open file `fd`, into
 * `*head`, parse it into `header`, and check its own checksum. The caller has zeroed both
 * outputs, and releases them also after an error. MLS_E_IO, MLS_E_MEMORY; MLS_E_FORMAT,
 * MLS_E_CHECKSUM: it is damaged; MLS_E_VALUE: it is valid but not the one in `record`, so
 * it belongs to a file of another save: a copy went wrong, but the disk is fine. */
static mls_code read_header(int fd, uint64_t end, const mls_index_file *record,
                            const mls_crc_kernels *crc, unsigned char **head,
                            mls_safetensors *header, mls_status *st)
{
    size_t length = 0;
    mls_code code = read_head(fd, end, head, &length, st);
    if (code == MLS_OK) {
        code = mls_safetensors_parse(*head, length, record->bytes, crc, true /* verify */,
                                     header, st);
    }
    if (code == MLS_OK &&
        (!header->has_crc || header->header_crc != record->header_crc)) {
        code = mls_fail(st, MLS_E_VALUE, "the file was replaced by another one");
    }
    return code;
}

/* Read and check the header, and free it again. */
mls_code mls_index_check_header(int fd, uint64_t end, const mls_index_file *record,
                                const mls_crc_kernels *crc, mls_status *st)
{
    unsigned char *head = NULL;
    mls_safetensors header = {0};
    const mls_code code = read_header(fd, end, record, crc, &head, &header, st);
    mls_safetensors_fini(&header);
    mls_free(head);
    return code;
}

/* Check that the header of the open file `fd` is undamaged, has the recorded checksum,
 * and lists the file's places; `v->order[first]` is the first of these. MLS_E_VALUE: it
 * belongs to another file. Other errors as read_header. */
static mls_code check_header(verifier *v, int fd, size_t first, mls_status *st)
{
    const mls_layer place = place_of(v, first);
    const mls_index_file *record = &v->index->files[place.file];
    unsigned char *head = NULL;
    mls_safetensors header = {0};
    mls_code code = read_header(fd, place.offset, record, v->crc, &head, &header, st);
    if (code == MLS_OK && !is_header_recorded(v, &header, first)) {
        code = mls_fail(st, MLS_E_VALUE, "the file was replaced by another one");
    }
    mls_safetensors_fini(&header);
    mls_free(head);
    return code;
}

/* Check that a file exists and has the recorded length and header; the bytes of tensors
 * are not read. `v->order[first]` is the file's first place. All bytes before it count as
 * read, although obsolete shards among them are skipped. */
static void verify_file(verifier *v, size_t first)
{
    const mls_layer place = place_of(v, first);
    mls_status st;
    int fd;
    if (!open_file(v, place.file, true, &fd)) {
        return;
    }
    const mls_code code = check_header(v, fd, first, &st);
    (void)close(fd);
    if (code == MLS_E_MEMORY) {
        set_failure(v, code);
    } else if (code != MLS_OK) {
        add_problem(v,
                    code == MLS_E_VALUE ? MLS_PROBLEM_FOREIGN
                    : code == MLS_E_IO  ? MLS_PROBLEM_UNREADABLE
                                        : MLS_PROBLEM_HEADER,
                    place.file, SIZE_MAX, 0, place.offset, st.text);
    }
    report_progress(v, place.offset);
}

/* ---- bytes ---- */

/* Add a problem for damaged bytes of a place: `length` bytes at `offset` of file number
 * `file`. For a shard with layers the message has the number of the layer, from 1. */
static void add_altered(verifier *v, const place_entry *entry, size_t file,
                        uint64_t offset, uint64_t length)
{
    static const char message[] = "the bytes have changed since they were written";
    const mls_layers *layers = v->index->shards[entry->shard].layers;
    char text[120];
    if (layers == NULL) {
        add_problem(v, MLS_PROBLEM_ALTERED, file, entry->shard, offset, length, message);
        return;
    }
    snprintf(text, sizeof text, "%s, in layer %zu of %zu", message, entry->layer + 1,
             layers->count);
    add_problem(v, MLS_PROBLEM_ALTERED, file, entry->shard, offset, length, text);
}

/* Read the block that starts at byte `start` of place `number` in the open file `fd`,
 * compare its checksum, and add a problem if it differs or cannot be read. A block is the
 * smallest range that a checksum can identify as damaged. `buffer` has STEP bytes. */
static void verify_block(verifier *v, int fd, size_t number, size_t start,
                         unsigned char *buffer)
{
    const mls_layer place = place_of(v, number);
    const size_t left = place.bytes - start;
    const size_t length = left < MLS_SAFETENSORS_BLOCK ? left : MLS_SAFETENSORS_BLOCK;
    const uint64_t at = place.offset + start;
    uint32_t crc = 0;
    mls_status st;
    for (size_t done = 0; done < length;) {
        const size_t step = length - done < STEP ? length - done : STEP;
        if (mls_file_read_at(fd, buffer, step, at + done, &st) != MLS_OK) {
            add_problem(
                v, st.code == MLS_E_IO ? MLS_PROBLEM_UNREADABLE : MLS_PROBLEM_LENGTH,
                place.file, v->order[number].shard, at + done, length - done, st.text);
            return;
        }
        crc = v->crc->update(crc, buffer, step);
        done += step;
    }
    /* compare with the index: the checksum in the file may be damaged too */
    if (crc != place.crcs[start / MLS_SAFETENSORS_BLOCK]) {
        add_altered(v, &v->order[number], place.file, at, length);
    }
    report_progress(v, length);
}

/* Return how many places from `first` on, at most `most`, are adjacent in the file and
 * fit the buffer together; `*bytes` is their total size. 0: the first one does not
 * fit. */
static size_t count_adjacent(const verifier *v, size_t first, size_t most, size_t *bytes)
{
    const uint64_t start = place_of(v, first).offset;
    size_t count = 0;
    for (*bytes = 0; count < most; count++) {
        const mls_layer place = place_of(v, first + count);
        if (place.offset != start + *bytes || place.bytes > STEP - *bytes) {
            break;
        }
        *bytes += place.bytes;
    }
    return count;
}

/* Verify `count` adjacent places of the open file `fd` from `first` on, of `bytes` bytes
 * in total, with one read into `buffer`; none is longer than a block. Returns false if
 * the read failed; the caller then reads each place alone. */
static bool verify_adjacent(verifier *v, int fd, size_t first, size_t count, size_t bytes,
                            unsigned char *buffer)
{
    mls_status ignored;
    const unsigned char *data = buffer;
    if (mls_file_read_at(fd, buffer, bytes, place_of(v, first).offset, &ignored) !=
        MLS_OK) {
        return false;
    }
    /* each place has its own checksum, so damage is reported as if it had been read
     * separately; an empty place has none */
    for (size_t i = first; i < first + count; i++) {
        const mls_layer place = place_of(v, i);
        if (place.bytes > 0 && v->crc->update(0, data, place.bytes) != place.crcs[0]) {
            add_altered(v, &v->order[i], place.file, place.offset, place.bytes);
        }
        data += place.bytes;
    }
    report_progress(v, bytes);
    return true;
}

/* Verify place `number` in the open file `fd` from byte `start` on: all of it, or at
 * most PART bytes. Stops if verification has failed. `buffer` has STEP bytes. */
static void verify_place(verifier *v, int fd, size_t number, size_t start,
                         unsigned char *buffer)
{
    const size_t bytes = place_of(v, number).bytes;
    const size_t end = bytes - start > PART ? start + PART : bytes;
    for (size_t at = start; at < end && !has_failed(v); at += MLS_SAFETENSORS_BLOCK) {
        verify_block(v, fd, number, at, buffer);
    }
}

/* Verify the places of a task: adjacent small ones with one read, or one by one if that
 * read fails. Nothing is done if the file cannot be opened: its own task reports it. */
static void verify_places(verifier *v, const task *t)
{
    int fd;
    unsigned char *buffer = mls_alloc(STEP, 1);
    if (buffer == NULL) {
        set_failure(v, MLS_E_MEMORY);
        return;
    }
    if (open_file(v, place_of(v, t->first).file, false, &fd)) {
        for (size_t i = 0; i < t->count && !has_failed(v);) {
            size_t bytes = 0;
            const size_t first = t->first + i;
            const size_t count = count_adjacent(v, first, t->count - i, &bytes);
            if (count < 2 || !verify_adjacent(v, fd, first, count, bytes, buffer)) {
                verify_place(v, fd, first, t->start, buffer);
                i += 1;
            } else {
                i += count;
            }
        }
        (void)close(fd);
    }
    mls_free(buffer);
}

/* Thread function: run task `index`. A task without places (`count` 0) checks a file's
 * length and header. */
static void verify_task(void *context, size_t index)
{
    verifier *v = context;
    const task *t = &v->tasks[index];
    if (has_failed(v)) {
        return;
    }
    if (t->count == 0) {
        verify_file(v, t->first);
    } else {
        verify_places(v, t);
    }
}

/* ---- the whole index ---- */

/* Order for qsort: by file, offset and shard, ascending. */
static int compare_places(const void *a, const void *b)
{
    const place_entry *x = a, *y = b;
    return x->file != y->file       ? (x->file < y->file ? -1 : 1)
           : x->offset != y->offset ? (x->offset < y->offset ? -1 : 1)
           : x->shard < y->shard    ? -1
                                    : x->shard > y->shard;
}

/* Set `*out` to the `*count` places of the index, sorted by file and offset, for
 * sequential reads; the places of a file become neighbours. The caller frees `*out` with
 * mls_free. MLS_E_MEMORY. */
static mls_code sort_places(const mls_index *index, place_entry **out, size_t *count,
                            mls_status *st)
{
    size_t all = 0;
    for (size_t i = 0; i < index->shard_count; i++) {
        all += mls_index_place_count(&index->shards[i]);
    }
    place_entry *order = mls_alloc(all, sizeof *order);
    if (order == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to verify %zu shards",
                        index->shard_count);
    }
    all = 0;
    for (size_t i = 0; i < index->shard_count; i++) {
        const size_t layers = mls_index_place_count(&index->shards[i]);
        for (size_t j = 0; j < layers; j++) {
            const mls_layer place = mls_index_place(&index->shards[i], j);
            order[all++] = (place_entry){place.file, place.offset, i, j};
        }
    }
    qsort(order, all, sizeof *order, compare_places);
    *out = order;
    *count = all;
    return MLS_OK;
}

/* Divide the work into `tasks`, which has room for the number that count_tasks returns,
 * and return the number of tasks: one for each file, one for each PART of a large place,
 * and one for each group of small places. */
static size_t make_tasks(const verifier *v, task *tasks)
{
    size_t count = 0, bytes = 0, file = SIZE_MAX;
    bool has_room = false; /* the last task can take more places */
    for (size_t i = 0; i < v->place_count; i++) {
        const mls_layer place = place_of(v, i);
        if (i == 0 || file != place.file) {
            tasks[count++] = (task){.first = i, .count = 0}; /* the file itself */
            file = place.file;
            has_room = false;
        }
        /* several tasks share a large place; small places share a task */
        if (place.bytes > PART) {
            for (size_t start = 0; start < place.bytes; start += PART) {
                tasks[count++] = (task){.first = i, .count = 1, .start = start};
            }
            has_room = false;
            continue;
        }
        if (!has_room || bytes + place.bytes > PART) {
            tasks[count++] = (task){.first = i}; /* its places are counted below */
            bytes = 0;
            has_room = true;
        }
        tasks[count - 1].count++;
        bytes += place.bytes;
    }
    return count;
}

/* Set `*out` to an upper bound of the number of tasks. Returns false if it exceeds the
 * address space: the sizes come from an untrusted index. */
static bool count_tasks(const verifier *v, size_t *out)
{
    /* for each place: its file's task, a task that it starts, and one for each started
     * PART */
    uint64_t most = 0;
    for (size_t i = 0; i < v->place_count; i++) {
        most += 3 + place_of(v, i).bytes / PART;
    }
    *out = (size_t)most;
    return most < SIZE_MAX / sizeof(task);
}

/* Verify all files with the threads of the pool. Problems are sorted at the end, so that
 * the same damage gives the same list, unless it is full. */
mls_code mls_index_verify(int folder, const mls_index *index, const mls_crc_kernels *crc,
                          mls_pool *pool, const mls_progress *progress, mls_problems *out,
                          mls_status *st)
{
    verifier v = {.folder = folder, .index = index, .crc = crc, .progress = progress};
    place_entry *order = NULL;
    size_t most;
    task *tasks = NULL;
    mls_code code = sort_places(index, &order, &v.place_count, st);
    if (code != MLS_OK) {
        return code;
    }
    v.order = order;
    if (!count_tasks(&v, &most) || (tasks = mls_alloc(most, sizeof *tasks)) == NULL) {
        mls_free(order);
        return mls_fail(st, MLS_E_MEMORY, "no memory to verify %zu shards",
                        index->shard_count);
    }
    /* the lock protects the results; the input is constant */
    v.tasks = tasks;
    pthread_mutex_init(&v.lock, NULL);
    mls_pool_run(pool, verify_task, &v, make_tasks(&v, tasks));
    pthread_mutex_destroy(&v.lock);
    mls_free(order);
    mls_free(tasks);
    if (v.code != MLS_OK) {
        mls_problems_fini(&v.report);
        return mls_fail(st, v.code,
                        v.code == MLS_E_STOPPED ? "stopped" : "no memory to continue");
    }
    if (v.report.count > 0) {
        qsort(v.report.list, v.report.count, sizeof *v.report.list, compare_problems);
    }
    *out = v.report;
    return MLS_OK;
}
