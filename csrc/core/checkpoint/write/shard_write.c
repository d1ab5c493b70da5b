/* shard_write: writes planned files with threads: direct I/O, checksums, headers,
 * renames, syncs; deletes all on failure.
 *
 * A task is a part of a large shard, or a whole file of small ones. Bytes are copied
 * through an aligned buffer and checksummed in the same pass. If the file system allows
 * it, the buffer is written with direct I/O: this is twice as fast as the page cache plus
 * a sync, and leaves the cache to training. The task that completes a file writes its
 * header, which makes the file valid, and renames it.
 *
 * Many files are made durable with one syncfs (each fsync would commit the file system's
 * journal), few files with one fsync each.
 *
 * A block is the unit of checksums of a tensor in a file. A layer stores some rows of a
 * shard, or its compressed elements; other shards are stored plain. */
#include "checkpoint/write/shard_write.h"

#include "base/memory.h"
#include "checkpoint/write/write_plan.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__)
#    include <sys/utsname.h>
#    include <sys/vfs.h>
#endif

enum {
    ALIGNMENT = 4096,        /* of memory, offsets and lengths of direct writes */
    TASK_BYTES = 8 << 20,    /* of a large shard; a multiple of the block size */
    DIRECT_LEAST = 1 << 20,  /* smaller files use the page cache */
    CACHED_STEP = 256 << 10, /* step of cached writes; stays in the processor's cache */
    FEW_FILES = 4            /* up to this number of files, each is synced separately */
};

/* A file being written. Everything that must be undone after a failure is recorded as
 * soon as it exists. */
typedef struct output {
    mls_planned_file *planned;
    const char *path;
    char temporary[MLS_PATH_BYTES + 8];
    int fd;       /* -1: not open */
    bool direct;  /* direct I/O */
    bool created; /* the temporary file exists */
    bool named;   /* the file has its final name */
    size_t tasks; /* unfinished tasks */
} output;

/* A task: all tensors of a file, or bytes `start` .. `start + bytes` of its only
 * tensor. */
typedef struct task {
    size_t file;
    size_t start, bytes;
} task;

/* Folders of a checkpoint that receive files: one for each section, and one for indexes.
 * The folder of MLS_STATES exists only if the caller created it. */
enum { INDEX_FOLDER = MLS_SECTION_COUNT, FOLDER_COUNT };

typedef struct writer {
    const mls_shard_job *job;
    mls_write_plan plan;
    int folders[FOLDER_COUNT]; /* open descriptors; never symbolic links */
    output *outputs;
    task *tasks;
    size_t task_count;
    size_t first_count;   /* tasks that read the caller's memory; they run first */
    size_t first_task;    /* of the current pool run */
    bool sync_once;       /* sync the whole file system at the end */
    bool sync_each;       /* sync each file and its folder */
    bool indexed;         /* the index has its final name */
    pthread_mutex_t lock; /* protects all below, and outputs except their bytes */
    mls_pages buffers[MLS_POOL_MAX_THREADS]; /* unused buffers */
    size_t buffer_count;
    size_t failed; /* first task that failed; SIZE_MAX: none */
    mls_status why;
} writer;

/* ---- buffers ---- */

/* Return an unused buffer, or a new one; there are at most as many as threads. `data` is
 * NULL if memory runs out. Pages instead of malloc: direct writes need aligned memory,
 * and freed pages return to the system. */
static mls_pages take_buffer(writer *w)
{
    mls_pages buffer = {0};
    mls_status ignored;
    pthread_mutex_lock(&w->lock);
    if (w->buffer_count > 0) {
        buffer = w->buffers[--w->buffer_count];
    }
    pthread_mutex_unlock(&w->lock);
    if (buffer.data == NULL) {
        (void)mls_pages_init(&buffer, MLS_WRITE_BUFFER, &ignored);
    }
    return buffer;
}

/* Keep a buffer for the next task, or free it if enough are kept: fresh memory costs as
 * much as the copying. */
static void return_buffer(writer *w, mls_pages buffer)
{
    pthread_mutex_lock(&w->lock);
    const bool room = w->buffer_count < MLS_POOL_MAX_THREADS;
    if (room) {
        w->buffers[w->buffer_count++] = buffer;
    }
    pthread_mutex_unlock(&w->lock);
    if (!room) {
        mls_pages_fini(&buffer);
    }
}

/* Free the unused buffers. Call it after all writing. */
static void free_buffers(writer *w)
{
    while (w->buffer_count > 0) {
        mls_pages_fini(&w->buffers[--w->buffer_count]);
    }
}

/* ---- one file's bytes ---- */

/* The bytes of one task on their way to its file. */
typedef struct sink {
    writer *w;
    output *out;
    mls_status *st;
    unsigned char *buffer; /* MLS_WRITE_BUFFER bytes */
    size_t used;           /* bytes in the buffer */
    uint64_t offset;       /* of the buffer's first byte in the file */
    bool silent;           /* progress was already reported */
} sink;

/* Report `bytes` finished bytes, unless the sink is silent. MLS_E_STOPPED: the callback
 * wants to stop. */
static mls_code report_progress(const sink *s, size_t bytes)
{
    return s->silent || mls_progress_report(s->w->job->progress, bytes)
               ? MLS_OK
               : mls_fail(s->st, MLS_E_STOPPED, "stopped");
}

/* Write the first `bytes` bytes of the aligned buffer at the sink's offset. For direct
 * I/O the last block is padded with zeros. Some file systems accept O_DIRECT but fail
 * the write (EINVAL); it is then repeated without direct I/O. MLS_E_IO. */
static mls_code write_aligned(sink *s, size_t bytes)
{
    size_t length = bytes;
    if (s->out->direct && bytes % ALIGNMENT != 0) {
        /* at the end of the file, pad to a whole block; the file is truncated later */
        length += ALIGNMENT - bytes % ALIGNMENT;
        memset(s->buffer + bytes, 0, length - bytes);
    }
    mls_code code = mls_file_write_at(s->out->fd, s->buffer, length, s->offset, s->st);
#if defined(O_DIRECT)
    if (code != MLS_OK && s->out->direct && s->st->os_error == EINVAL) {
        const int flags = fcntl(s->out->fd, F_GETFL);
        (void)fcntl(s->out->fd, F_SETFL, flags & ~O_DIRECT);
        code = mls_file_write_at(s->out->fd, s->buffer, length, s->offset, s->st);
    }
#endif
    return code;
}

/* Write the used bytes of the buffer at the sink's offset, advance the offset, and empty
 * the buffer. Bytes are reported as done after the system call. MLS_E_IO,
 * MLS_E_STOPPED. */
static mls_code flush_buffer(sink *s)
{
    mls_code code = s->used == 0 ? MLS_OK : write_aligned(s, s->used);
    if (code == MLS_OK) {
        code = report_progress(s, s->used);
        s->offset += s->used;
        s->used = 0;
    }
    return code;
}

/* Return the bytes that fit into the buffer before the next flush. Cached writes use only
 * CACHED_STEP of it, because the system reads the copied bytes again at once. */
static size_t buffer_room(const sink *s)
{
    return (s->out->direct ? (size_t)MLS_WRITE_BUFFER : (size_t)CACHED_STEP) - s->used;
}

/* Choose the stores for copies into the buffer: the disk, not the processor, reads a
 * direct-I/O buffer. SIZE_MAX selects the fastest stores regardless of cache size. */
static mls_destination buffer_destination(const sink *s)
{
    return s->out->direct ? (mls_destination){.bytes = SIZE_MAX} : mls_cached();
}

/* Copy `bytes` bytes of the item, from element `first` on, into the buffer; they are in
 * one block and fit. `*crc` is the block's checksum so far. Packed memory is copied and
 * checksummed in one pass; other memory is packed first, and checksummed while it is in
 * the cache. So is the digest, from the item's memory: it finds a wrong copy. */
static void put_buffered(sink *s, const mls_planned *planned, size_t first, size_t bytes,
                         uint32_t *crc, mls_digest *digest)
{
    const mls_shard_item *item = planned->item;
    unsigned char *to = s->buffer + s->used;
    const size_t size = mls_dtype_of(item->dtype)->item_bytes;
    const unsigned char *from =
        mls_planned_elements(s->w->job, item, first, bytes / size, to);
    /* packed elements are already in place */
    *crc = from == to ? s->w->job->crc->update(*crc, to, bytes)
                      : mls_crc_copy(s->w->job->crc, s->w->job->kernels->choices, *crc,
                                     to, from, bytes, buffer_destination(s));
    if (planned->digested) {
        const mls_digester digester = {.keys = s->w->job->digest_keys,
                                       .cpu = s->w->job->kernels->cpu};
        mls_digest_bytes(&digester, planned->digest_start + (uint64_t)first * size, from,
                         bytes, digest);
    }
    s->used += bytes;
}

/* Return the element of the shard that is stored at byte `start` of the tensor in the
 * file, and limit `*bytes` to the bytes that are contiguous in the shard from there.
 * `size` is the bytes of an element. `*range_number`, a row range of the new layer at or
 * before `start`, advances to the one that contains it; a plain shard ignores it. */
static size_t find_stored(const mls_planned *planned, size_t size, size_t start,
                          size_t *range_number, size_t *bytes)
{
    const mls_layer *new_layer = planned->new_layer;
    const size_t at = start / size;
    if (new_layer == NULL) {
        return at; /* everything is stored, in order */
    }
    while (new_layer->stored[*range_number].at + new_layer->stored[*range_number].count <=
           at) {
        ++*range_number;
    }
    const mls_row_range *row_range = &new_layer->stored[*range_number];
    const size_t left = (row_range->at + row_range->count - at) * size;
    *bytes = left < *bytes ? left : *bytes;
    return row_range->begin + (at - row_range->at);
}

/* Append bytes `start` .. `end` of one tensor of the file to the sink, and compute the
 * checksums of its blocks. `start` is a block boundary, so each block and its checksum
 * belong to one task. MLS_E_IO, MLS_E_STOPPED. */
static mls_code put_tensor(sink *s, const mls_header_tensor *tensor, size_t start,
                           size_t end)
{
    const mls_planned *planned = &s->w->plan.planned[tensor->number];
    const size_t size = mls_dtype_of(planned->item->dtype)->item_bytes;
    mls_digest digest = {{0}};
    const mls_layer *new_layer = planned->new_layer;
    /* a search, since a task may start anywhere */
    size_t range_number =
        new_layer == NULL ? 0
                          : mls_row_ranges_find_at(new_layer->stored,
                                                   new_layer->stored_count, start / size);
    mls_code code = MLS_OK;
    while (code == MLS_OK && start < end) {
        uint32_t *crc = &tensor->crcs[start / MLS_SAFETENSORS_BLOCK];
        const size_t block = MLS_SAFETENSORS_BLOCK - start % MLS_SAFETENSORS_BLOCK;
        size_t step = end - start < block ? end - start : block;
        /* stop at the end of the row range: the next range is elsewhere in memory, but
         * continues in the same buffer, block and file */
        const size_t first = find_stored(planned, size, start, &range_number, &step);
        /* checksum the copy, never the array, which may change at any time */
        if (buffer_room(s) == 0) {
            code = flush_buffer(s);
        }
        const size_t room = buffer_room(s);
        step = step < room ? step : room;
        if (code == MLS_OK) {
            put_buffered(s, planned, first, step, crc, &digest);
            start += step;
        }
    }
    pthread_mutex_lock(&s->w->lock);
    for (int lane = 0; lane < MLS_DIGEST_LANES; lane++) {
        s->w->plan.index.shards[tensor->number].digest.lanes[lane] += digest.lanes[lane];
    }
    pthread_mutex_unlock(&s->w->lock);
    return code;
}

/* Append all compressed bytes `coded` of a tensor to the sink, and compute the checksum
 * of each block, in steps that end with a block or with the buffer. MLS_E_IO,
 * MLS_E_STOPPED. */
static mls_code put_compressed(sink *s, const mls_header_tensor *tensor,
                               const unsigned char *coded)
{
    mls_code code = MLS_OK;
    for (size_t start = 0; code == MLS_OK && start < tensor->bytes;) {
        const size_t block = MLS_SAFETENSORS_BLOCK - start % MLS_SAFETENSORS_BLOCK;
        const size_t left = tensor->bytes - start, room = buffer_room(s);
        size_t step = left < block ? left : block;
        step = step < room ? step : room;
        uint32_t *crc = &tensor->crcs[start / MLS_SAFETENSORS_BLOCK];
        *crc =
            mls_crc_copy(s->w->job->crc, s->w->job->kernels->choices, *crc,
                         s->buffer + s->used, coded + start, step, buffer_destination(s));
        s->used += step;
        start += step;
        code = buffer_room(s) == 0 ? flush_buffer(s) : MLS_OK;
    }
    return code;
}

/* ---- folders ---- */

/* Return the name of folder `number`, a section or INDEX_FOLDER. */
static const char *folder_name(int number)
{
    return number == INDEX_FOLDER ? "index" : mls_section_name((mls_section)number);
}

/* Open the folders of all sections and of indexes into `w->folders`; the one of states
 * may be missing (-1). A symbolic link is refused: it may lead to another checkpoint. An
 * open descriptor keeps referring to the same folder, even after a rename. MLS_E_IO. */
static mls_code open_folders(writer *w, mls_status *st)
{
    for (int i = 0; i < FOLDER_COUNT; i++) {
        do {
            w->folders[i] = openat(w->job->folder, folder_name(i),
                                   O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        } while (w->folders[i] < 0 && errno == EINTR);
        if (w->folders[i] < 0 && !(i == MLS_STATES && errno == ENOENT)) {
            return mls_fail_os(st, errno, "cannot open the folder %s", folder_name(i));
        }
    }
    return MLS_OK;
}

/* Return the descriptor of the open folder of a path "folder/name", and set `*name` to
 * the rest of the path, borrowed. For any other path returns -1, and `*name` is `path`.
 */
static int folder_of(const writer *w, const char *path, const char **name)
{
    for (int i = 0; i < FOLDER_COUNT; i++) {
        const size_t length = strlen(folder_name(i));
        if (strncmp(path, folder_name(i), length) == 0 && path[length] == '/') {
            *name = path + length + 1;
            return w->folders[i];
        }
    }
    *name = path; /* not a path of the writer: opening it fails */
    return -1;
}

/* Create a file that must not exist, by its path in the folder of the checkpoint. Returns
 * a descriptor, or -1 and errno. */
static int create_file(const writer *w, const char *path)
{
    const char *name;
    const int folder = folder_of(w, path, &name);
    int fd;
    do {
        fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                    (mode_t)w->job->mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

/* Rename a file from the path `from` to `to`, both in that folder. Returns 0, or -1 and
 * errno. */
static int rename_file(const writer *w, const char *from, const char *to)
{
    const char *old, *name;
    const int source = folder_of(w, from, &old), target = folder_of(w, to, &name);
    return renameat(source, old, target, name);
}

/* Delete a file, by its path in the folder of the checkpoint. Failures are ignored. */
static void remove_file(const writer *w, const char *path)
{
    const char *name;
    const int folder = folder_of(w, path, &name);
    (void)unlinkat(folder, name, 0);
}

/* ---- files ---- */

/* Allocate disk space for the open file of `out`, if it has DIRECT_LEAST bytes or more,
 * so that a full disk is detected before writing, and several threads can write behind
 * the current end. File systems without that operation just let the file grow.
 * MLS_E_IO. */
static mls_code reserve_space(const output *out, mls_status *st)
{
#if defined(__linux__)
    const uint64_t bytes = out->planned->header.file_bytes;
    int result;
    do {
        result = bytes < DIRECT_LEAST ? 0 : fallocate(out->fd, 0, 0, (off_t)bytes);
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) {
        return mls_fail_os(st, errno, "no room for a file of %llu bytes",
                           (unsigned long long)bytes);
    }
#else
    (void)out, (void)st;
#endif
    return MLS_OK;
}

/* Fail with MLS_E_IO and EEXIST if a file has this path. The generation makes names
 * unique, so that file is already committed, and a rename would destroy it. */
static mls_code check_new_name(const writer *w, const char *path, mls_status *st)
{
    struct stat info;
    const char *name;
    const int folder = folder_of(w, path, &name);
    return fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0
               ? mls_fail_os(st, EEXIST, "cannot create a file")
               : MLS_OK;
}

/* Lay out one file, unless a task did that before it failed here; create it under its
 * temporary name, and reserve its space. `created` is set as soon as there is a file to
 * delete. A large file gets O_DIRECT if possible. MLS_E_IO, MLS_E_SIZE, MLS_E_MEMORY;
 * `out->fd` may be open then. */
static mls_code open_output(writer *w, output *out, mls_status *st)
{
    const bool is_laid_out = out->planned->tensors != NULL;
    if ((!is_laid_out && mls_write_plan_lay_out(&w->plan, out->planned, st) != MLS_OK) ||
        check_new_name(w, out->path, st) != MLS_OK) {
        return st->code;
    }
    snprintf(out->temporary, sizeof out->temporary, "%s.tmp", out->path);
    out->fd = create_file(w, out->temporary);
    if (out->fd < 0) {
        return mls_fail_os(st, errno, "cannot create a file");
    }
    out->created = true;
    const mls_code code = reserve_space(out, st);
#if defined(O_DIRECT)
    /* the next reader of a temporary file finds it in the page cache */
    if (code == MLS_OK && !w->job->temporary &&
        out->planned->header.file_bytes >= DIRECT_LEAST) {
        const int flags = fcntl(out->fd, F_GETFL);
        out->direct = flags >= 0 && fcntl(out->fd, F_SETFL, flags | O_DIRECT) == 0;
    }
#endif
    return code;
}

/* Open the file of `out` unless another task has opened it; other tasks wait meanwhile.
 * Files are opened late and closed early, so that even a hundred thousand files need few
 * descriptors. Errors of open_output. */
static mls_code ensure_output(writer *w, output *out, mls_status *st)
{
    mls_code code = MLS_OK;
    pthread_mutex_lock(&w->lock);
    if (out->fd < 0) {
        code = open_output(w, out, st);
    }
    pthread_mutex_unlock(&w->lock);
    return code;
}

/* Write the header, which makes the file valid, and record its checksum in the index. It
 * ends at the first tensor, at a multiple of the alignment, so it needs no padding.
 * MLS_E_IO. */
static mls_code write_header(sink *s)
{
    mls_header *header = &s->out->planned->header;
    const size_t length = header->text.length;
    mls_index_file *record = &s->w->plan.index.files[s->out->planned->file];
    record->header_crc = mls_header_finish(header, s->w->job->crc);
    s->used = 0;
    for (s->offset = 0; s->offset < length; s->offset += MLS_WRITE_BUFFER) {
        const size_t left = length - (size_t)s->offset;
        const size_t step = left < MLS_WRITE_BUFFER ? left : MLS_WRITE_BUFFER;
        memcpy(s->buffer, header->text.data + s->offset, step);
        const mls_code code = write_aligned(s, step);
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* Complete the file of the sink, whose tensors are written: header, length, sync, close,
 * rename. The header is written last, so an incomplete file is never mistaken for a valid
 * one. MLS_E_IO: the temporary file stays, for the caller to delete. */
static mls_code finish_output(sink *s)
{
    output *out = s->out;
    mls_code code = write_header(s);
    if (code != MLS_OK) {
        return code;
    }
    /* remove the padding of the last direct write */
    if (out->direct && ftruncate(out->fd, (off_t)out->planned->header.file_bytes) != 0) {
        return mls_fail_os(s->st, errno, "cannot set the length of a file");
    }
    const int reason = s->w->sync_each ? mls_file_sync(out->fd) : 0;
    if (reason != 0) {
        return mls_fail_os(s->st, reason, "cannot sync a file to disk");
    }
    const int failed = close(out->fd) != 0 && errno != EINTR ? errno : 0;
    out->fd = -1;
    if (failed != 0) {
        return mls_fail_os(s->st, failed, "cannot close a file");
    }
    if (rename_file(s->w, out->temporary, out->path) != 0) {
        return mls_fail_os(s->st, errno, "cannot rename the temporary file");
    }
    out->named = true;
    mls_write_plan_finish(out->planned);
    return MLS_OK;
}

/* ---- tasks ---- */

/* Write the bytes of task `t`: a whole file, or `t->bytes` from byte `t->start` on of a
 * file with one tensor. A shard with frames is compressed first; if it does not shrink
 * enough, it is written uncompressed. `buffer` (MLS_WRITE_BUFFER bytes) is memory that
 * no other task uses. The last task of a file completes the file; the lock around the
 * counter makes the other tasks' checksums visible to it. */
static mls_code run_task(writer *w, const task *t, unsigned char *buffer, mls_status *st)
{
    output *out = &w->outputs[t->file];
    const size_t count = out->planned->count, first = out->planned->shards[0];
    sink s = {.w = w, .out = out, .st = st, .buffer = buffer};
    unsigned char *coded = NULL;
    mls_code code = MLS_OK;
    if (w->plan.planned[first].frames != NULL) {
        code = mls_planned_encode(&w->plan, first, &coded, st);
        /* mls_planned_encode has reported the bytes */
        s.silent = true;
    }
    if (code == MLS_OK) {
        code = ensure_output(w, out, st);
    }
    const mls_header_tensor *tensors = out->planned->tensors;
    s.offset = code == MLS_OK ? tensors[0].offset + t->start : 0;
    if (code == MLS_OK && coded != NULL) {
        code = put_compressed(&s, &tensors[0], coded);
    }
    for (size_t i = 0; code == MLS_OK && coded == NULL && i < count; i++) {
        const size_t end = count == 1 ? t->start + t->bytes : tensors[i].bytes;
        code = put_tensor(&s, &tensors[i], t->start, end);
    }
    if (code == MLS_OK) {
        code = flush_buffer(&s);
    }
    mls_free(coded);
    if (code != MLS_OK) {
        return code;
    }
    pthread_mutex_lock(&w->lock);
    const bool last = --out->tasks == 0;
    pthread_mutex_unlock(&w->lock);
    return last ? finish_output(&s) : MLS_OK;
}

/* Record the failure of task `index`. The first task in order wins, so that the reported
 * error does not depend on the number of threads. */
static void record_failure(writer *w, size_t index, const mls_status *st)
{
    pthread_mutex_lock(&w->lock);
    if (index < w->failed) {
        w->failed = index;
        w->why = *st;
    }
    pthread_mutex_unlock(&w->lock);
}

/* Thread function: run task `w->first_task + index` with a buffer, and record its failure
 * under the name of the file's first tensor. After a failure no further task is
 * started. */
static void write_task(void *context, size_t index)
{
    writer *w = context;
    const task *t = &w->tasks[w->first_task + index];
    mls_status st;
    pthread_mutex_lock(&w->lock);
    const bool failed = w->failed != SIZE_MAX;
    pthread_mutex_unlock(&w->lock);
    if (failed) {
        return;
    }
    const mls_pages buffer = take_buffer(w);
    const mls_code code =
        buffer.data == NULL
            ? mls_fail(&st, MLS_E_MEMORY, "no memory for a buffer of 2 MiB")
            : run_task(w, t, buffer.data, &st);
    if (buffer.data != NULL) {
        return_buffer(w, buffer);
    }
    if (code != MLS_OK) {
        const mls_str key = w->plan.planned[w->plan.files[t->file].shards[0]].key;
        mls_status_name(&st, key.data, key.length);
        record_failure(w, w->first_task + index, &st);
    }
}

/* Return the bytes that the first shard of planned file `number` takes in it. */
static size_t first_bytes(const mls_write_plan *plan, size_t number)
{
    const size_t shard = plan->files[number].shards[0];
    return mls_planned_bytes(&plan->planned[shard], &plan->index.shards[shard]);
}

/* Divide planned file `number` into tasks in `out`, which has room, and return their
 * number. A single large shard is cut at block boundaries; every other file is one task.
 * So is a compressed shard, since the position of each byte depends on the previous
 * ones. */
static size_t divide_file(const mls_write_plan *plan, size_t number, task *out)
{
    const size_t bytes = first_bytes(plan, number);
    const bool coded = plan->planned[plan->files[number].shards[0]].frames != NULL;
    if (plan->files[number].count > 1 || bytes <= TASK_BYTES || coded) {
        out[0] = (task){.file = number, .bytes = bytes};
        return 1;
    }
    size_t count = 0;
    for (size_t start = 0; start < bytes; start += TASK_BYTES) {
        const size_t left = bytes - start;
        out[count++] = (task){.file = number,
                              .start = start,
                              .bytes = left < TASK_BYTES ? left : TASK_BYTES};
    }
    return count;
}

/* Return whether planned file `number` contains a shard whose memory is not staged. One
 * such shard makes its whole file urgent; this is rare, since small shards are staged
 * first. */
static bool has_unstaged(const writer *w, size_t number)
{
    const mls_planned_file *file = &w->plan.files[number];
    for (size_t i = 0; i < file->count; i++) {
        if (!w->plan.planned[file->shards[i]].item->staged) {
            return true;
        }
    }
    return false;
}

/* Add the tasks of all files that read unstaged memory (`unstaged`), or of all other
 * files. Without a `freed` callback no caller waits for memory, and one call adds all
 * files, in order. */
static void add_tasks(writer *w, bool unstaged)
{
    for (size_t i = 0; i < w->plan.file_count; i++) {
        if (w->job->freed == NULL || has_unstaged(w, i) == unstaged) {
            mls_planned_file *file = &w->plan.files[i];
            w->outputs[i] = (output){
                .planned = file, .fd = -1, .path = w->plan.index.files[file->file].path};
            w->outputs[i].tasks = divide_file(&w->plan, i, w->tasks + w->task_count);
            w->task_count += w->outputs[i].tasks;
        }
    }
}

/* Create the outputs and tasks of all files. If the caller waits for its memory
 * (`freed`), the `first_count` tasks that read it come first. MLS_E_MEMORY. */
static mls_code make_tasks(writer *w, mls_status *st)
{
    /* at least one task for each file, and one more for each further TASK_BYTES */
    size_t most = w->plan.file_count;
    for (size_t i = 0; i < w->plan.file_count; i++) {
        most += first_bytes(&w->plan, i) / TASK_BYTES; /* cannot overflow */
    }
    w->tasks = mls_alloc(most, sizeof *w->tasks);
    if (w->tasks != NULL) { /* release_writer() would close fd 0 of zeroed outputs */
        w->outputs = mls_alloc(w->plan.file_count, sizeof *w->outputs);
    }
    if (w->outputs == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to write %zu files",
                        w->plan.file_count);
    }
    add_tasks(w, true);
    w->first_count = w->task_count;
    if (w->job->freed != NULL) {
        add_tasks(w, false);
    }
    return MLS_OK;
}

/* ---- durability ---- */

/* Return whether syncfs makes the file system of `folder` durable and reports errors:
 * the usual local file systems do, since Linux 5.8. */
static bool can_sync_once(int folder)
{
#if defined(__linux__)
    /* ext4, XFS, Btrfs, F2FS, tmpfs, ramfs; others may accept the call and do nothing */
    static const unsigned long file_systems[] = {0xEF53,     0x58465342, 0x9123683E,
                                                 0xF2F52010, 0x01021994, 0x858458F6};
    struct statfs info;
    struct utsname system;
    int major = 0, minor = 0;
    if (fstatfs(folder, &info) != 0 || uname(&system) != 0 ||
        sscanf(system.release, "%d.%d", &major, &minor) != 2 ||
        major * 100 + minor < 508) {
        return false;
    }
    for (size_t i = 0; i < sizeof file_systems / sizeof file_systems[0]; i++) {
        if ((unsigned long)info.f_type == file_systems[i]) {
            return true;
        }
    }
#else
    (void)folder;
#endif
    return false;
}

/* Sync the whole file system with syncfs, or else the folders: files that are synced
 * separately were synced when they were written. MLS_E_IO. */
static mls_code make_durable(const writer *w, mls_status *st)
{
#if defined(__linux__)
    if (w->sync_once) {
        int result;
        do {
            result = syncfs(w->job->folder);
        } while (result != 0 && errno == EINTR);
        return result == 0 ? MLS_OK
                           : mls_fail_os(st, errno, "cannot sync the files to disk");
    }
#endif
    /* a file is lost if its data is durable but its name is not */
    for (int i = 0; w->sync_each && i < FOLDER_COUNT; i++) {
        const int reason = w->folders[i] < 0 ? 0 : mls_folder_sync(w->folders[i]);
        if (reason != 0) {
            return mls_fail_os(st, reason, "cannot sync the folder %s to disk",
                               folder_name(i));
        }
    }
    return MLS_OK;
}

/* ---- the index ---- */

/* Write `text`, the index, to a temporary file, and rename it to `path`. It is synced
 * here only if files are synced separately. On failure the temporary file is deleted.
 * MLS_E_IO. */
static mls_code write_index_file(const writer *w, const char *path,
                                 const mls_json_writer *text, mls_status *st)
{
    char temporary[MLS_INDEX_PATH_BYTES + 8];
    if (check_new_name(w, path, st) != MLS_OK) {
        return st->code;
    }
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    const int fd = create_file(w, temporary);
    if (fd < 0) {
        return mls_fail_os(st, errno, "cannot create the index");
    }
    mls_code code = mls_file_write_at(fd, text->data, text->length, 0, st);
    const int reason = code == MLS_OK && w->sync_each ? mls_file_sync(fd) : 0;
    if (reason != 0) {
        code = mls_fail_os(st, reason, "cannot sync the index to disk");
    }
    if (close(fd) != 0 && errno != EINTR && code == MLS_OK) {
        code = mls_fail_os(st, errno, "cannot close the index");
    }
    if (code == MLS_OK && rename_file(w, temporary, path) != 0) {
        code = mls_fail_os(st, errno, "cannot rename the temporary index");
    }
    if (code != MLS_OK) {
        remove_file(w, temporary);
    }
    return code;
}

/* Complete all checksums, write the index that lists all shards, and fill in `out`. The
 * index is written last, so everything that it lists exists. MLS_E_IO, MLS_E_SIZE,
 * MLS_E_MEMORY. */
static mls_code write_index(writer *w, mls_shards_written *out, mls_status *st)
{
    mls_index *index = &w->plan.index;
    mls_json_writer text = {0};
    /* kept shards have their old checksums; new ones are combined from blocks */
    for (size_t i = 0; i < index->shard_count; i++) {
        mls_index_shard *shard = &index->shards[i];
        const mls_planned *planned = &w->plan.planned[i];
        const size_t bytes = mls_planned_bytes(planned, shard);
        out->data_bytes += shard->bytes;
        if (planned->new_layer != NULL) {
            planned->new_layer->crc =
                mls_safetensors_join_crcs(planned->new_layer->crcs, bytes);
        } else if (mls_planned_is_written(planned)) {
            shard->crc = mls_safetensors_join_crcs(shard->crcs, bytes);
        }
        out->new_shards += mls_planned_is_written(planned);
        out->new_bytes += bytes;
    }
    out->shard_count = index->shard_count;
    out->new_files = w->plan.file_count;
    /* the name contains the rank, so no two processes write the same file */
    snprintf(out->path, sizeof out->path, "index/%s.%llu.json", index->generation,
             (unsigned long long)index->rank);
    mls_code code = mls_index_build(index, w->job->crc, &text, &out->crc, st);
    if (code == MLS_OK) {
        out->bytes = text.length;
        code = write_index_file(w, out->path, &text, st);
        w->indexed = code == MLS_OK;
    }
    mls_json_writer_fini(&text);
    return code;
}

/* ---- the whole save ---- */

/* After a failure, delete all files that this call created, under their current names;
 * `index` is the path of the index file. Failures to delete are ignored. */
static void discard_files(const writer *w, const char *index)
{
    for (size_t i = 0; w->outputs != NULL && i < w->plan.file_count; i++) {
        const output *out = &w->outputs[i];
        if (out->created) {
            remove_file(w, out->named ? out->path : out->temporary);
        }
    }
    if (w->indexed) {
        remove_file(w, index);
    }
}

/* Free everything, and close folders and files. Outputs are still open only after a
 * failure. */
static void release_writer(writer *w)
{
    for (size_t i = 0; w->outputs != NULL && i < w->plan.file_count; i++) {
        if (w->outputs[i].fd >= 0) {
            (void)close(w->outputs[i].fd);
        }
    }
    for (int i = 0; i < FOLDER_COUNT; i++) {
        if (w->folders[i] >= 0) {
            (void)close(w->folders[i]);
        }
    }
    free_buffers(w);
    mls_free(w->outputs);
    mls_free(w->tasks);
    mls_write_plan_fini(&w->plan);
    pthread_mutex_destroy(&w->lock);
}

/* Write and rename all planned files, and call `freed` between the two pool runs. The
 * files are durable only if they are synced separately; otherwise make_durable syncs
 * them. Returns the failure of the first task. */
static mls_code write_files(writer *w, mls_status *st)
{
    mls_code code = make_tasks(w, st);
    if (code != MLS_OK) {
        return code;
    }
    /* decided before writing, since it determines whether each file is synced */
    w->sync_once = !w->job->temporary && w->plan.file_count > FEW_FILES &&
                   can_sync_once(w->job->folder);
    w->sync_each = !w->job->temporary && !w->sync_once;
    /* two pool runs: after the first one no thread reads the caller's memory */
    mls_pool_run(w->job->pool, write_task, w, w->first_count);
    if (w->job->freed != NULL && w->failed == SIZE_MAX) {
        w->job->freed(w->job->freed_context);
        w->first_task = w->first_count;
        mls_pool_run(w->job->pool, write_task, w, w->task_count - w->first_count);
    }
    free_buffers(w); /* frees memory for the text of the index */
    if (w->failed != SIZE_MAX) {
        *st = w->why;
        return st->code;
    }
    return MLS_OK;
}

/* Plan, write, sync and index all items. Each step may fail. Nothing is committed before
 * the last one, and a failure deletes everything that was created. */
mls_code mls_shards_write(const mls_shard_job *job, mls_shards_written *out,
                          mls_status *st)
{
    mls_shards_written written = {0};
    writer w = {.job = job, .failed = SIZE_MAX};
    mls_code code = mls_write_plan_init(&w.plan, job, st);
    if (code != MLS_OK) {
        return code;
    }
    pthread_mutex_init(&w.lock, NULL);
    for (int i = 0; i < FOLDER_COUNT; i++) {
        w.folders[i] = -1;
    }
    if ((code = open_folders(&w, st)) == MLS_OK &&
        (code = mls_write_plan_unchanged(&w.plan, st)) == MLS_OK &&
        (code = mls_write_plan_reuse(&w.plan, st)) == MLS_OK &&
        (code = mls_write_plan_sparse(&w.plan, st)) == MLS_OK &&
        (code = mls_write_plan_compress(&w.plan, st)) == MLS_OK &&
        (code = mls_write_plan_assign_files(&w.plan, st)) == MLS_OK &&
        (code = mls_write_plan_digest(&w.plan, st)) == MLS_OK &&
        (code = write_files(&w, st)) == MLS_OK &&
        (code = write_index(&w, &written, st)) == MLS_OK) {
        code = make_durable(&w, st);
    }
    if (code != MLS_OK) {
        discard_files(&w, written.path);
    } else {
        *out = written;
    }
    release_writer(&w);
    return code;
}
