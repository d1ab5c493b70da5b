/* shard_write: planned files, written by several threads.
 *
 * A task is a part of a large shard, or a whole file of small ones.  Bytes go through an
 * aligned buffer where they are checksummed while they are copied, and from there to the
 * disk past the system's cache, where the file system allows it: twice as fast as through
 * the cache and a sync, and training keeps its cache.  The task that completes a file
 * writes its header, which makes it one, and gives it its name.
 *
 * Making all of it durable is one call where there are many files (every one of them
 * would cost a commit of the file system's journal), else one for each file.
 */
#if !defined(_WIN32)

#    include "checkpoint/write/shard_write.h"

#    include "io/file.h"
#    include "base/memory.h"
#    include "checkpoint/write/write_plan.h"

#    include <errno.h>
#    include <fcntl.h>
#    include <pthread.h>
#    include <stdio.h>
#    include <stdlib.h>
#    include <string.h>
#    include <sys/stat.h>
#    include <unistd.h>

#    if defined(__linux__)
#        include <sys/utsname.h>
#        include <sys/vfs.h>
#    endif

enum {
    ALIGNMENT = 4096,       /* of memory, places and lengths of direct writes */
    TASK_BYTES = 8 << 20,   /* of a large shard, of whole blocks */
    DIRECT_LEAST = 1 << 20, /* smaller files are left to the cache */
    PLAIN_STEP = 256 << 10, /* through the cache: stays in the processor's meanwhile */
    FEW_FILES = 4           /* are synced one by one */
};

/* A file in the making.  What must be taken back after a failure is written down as soon
 * as it exists. */
typedef struct output {
    mls_planned_file *planned;
    const char *path;
    char temporary[MLS_PATH_BYTES + 8];
    int fd;       /* -1: not open */
    bool direct;  /* past the system's cache */
    bool created; /* the temporary exists */
    bool named;   /* the file exists */
    size_t tasks; /* that are still to be done */
} output;

/* A part of the work: all tensors of a file; of a single one bytes `start` .. `start +
 * bytes`. */
typedef struct task {
    size_t file;
    size_t start, bytes;
} task;

/* Folders of a checkpoint that files are written to: one for each section, one for
 * indexes. */
enum { INDEX_FOLDER = MLS_SECTION_COUNT, FOLDER_COUNT };

typedef struct writer {
    const mls_shard_job *job;
    mls_shard_plan plan;
    int folders[FOLDER_COUNT]; /* open; a symbolic link is none of them */
    output *outputs;
    task *tasks;
    size_t task_count;
    size_t first_count;   /* tasks that come first, since they read memory of others */
    size_t begun;         /* the number of the first task of a run */
    bool sync_once;       /* the whole file system at the end */
    bool indexed;         /* the index has its name */
    pthread_mutex_t lock; /* round everything below, and `output`s but for their bytes */
    mls_pages buffers[MLS_POOL_MAX_THREADS]; /* that nobody uses now */
    size_t buffer_count;
    size_t failed; /* the first task that failed, SIZE_MAX: none */
    mls_status why;
} writer;

/* ---- buffers ---- */

/* One that was given back, else a new one: at most as many as there are threads.  Whole
 * pages, since direct writes want aligned memory; what malloc is given back it may keep.
 * No data: there is no memory. */
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

/* Kept for the next task: fresh memory would cost as much as the copying. */
static void give_buffer(writer *w, mls_pages buffer)
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

/* When nothing is written any more. */
static void free_buffers(writer *w)
{
    while (w->buffer_count > 0) {
        mls_pages_fini(&w->buffers[--w->buffer_count]);
    }
}

/* ---- one file's bytes ---- */

/* Bytes on their way to a file, from `offset` on. */
typedef struct sink {
    writer *w;
    output *out;
    mls_status *st;
    unsigned char *buffer;
    size_t used;
    uint64_t offset;
    bool silent; /* whoever waits was told already */
} sink;

/* Tell whoever waits; he may want to stop, which is a failure like any other. */
static mls_code report(const sink *s, size_t bytes)
{
    const mls_progress *progress = s->w->job->progress;
    return s->silent || progress == NULL || progress->report(progress->context, bytes)
               ? MLS_OK
               : mls_fail(s->st, MLS_E_STOPPED, "stopped");
}

/* Write `bytes` from an aligned buffer.  A file system that takes direct writes for open
 * and refuses them later is asked without. */
static mls_code write_aligned(sink *s, size_t bytes)
{
    size_t length = bytes;
    if (s->out->direct && bytes % ALIGNMENT != 0) {
        /* the end of the file: what is too much is cut off when it is whole */
        length += ALIGNMENT - bytes % ALIGNMENT;
        memset(s->buffer + bytes, 0, length - bytes);
    }
    mls_code code = mls_file_write_at(s->out->fd, s->buffer, length, s->offset, s->st);
#    if defined(O_DIRECT)
    if (code != MLS_OK && s->out->direct && s->st->os_error == EINVAL) {
        const int flags = fcntl(s->out->fd, F_GETFL);
        (void)fcntl(s->out->fd, F_SETFL, flags & ~O_DIRECT);
        code = mls_file_write_at(s->out->fd, s->buffer, length, s->offset, s->st);
    }
#    endif
    return code;
}

/* Send on what was gathered.  Bytes count as done when the system has them. */
static mls_code flush(sink *s)
{
    mls_code code = s->used == 0 ? MLS_OK : write_aligned(s, s->used);
    if (code == MLS_OK) {
        code = report(s, s->used);
        s->offset += s->used;
        s->used = 0;
    }
    return code;
}

/* Bytes that fit the buffer before it is sent on: little of it through the cache, where
 * what was copied is read again at once. */
static size_t buffer_room(const sink *s)
{
    return (s->out->direct ? (size_t)MLS_WRITE_BUFFER : (size_t)PLAIN_STEP) - s->used;
}

/* A write buffer that the disk reads and the processor does not: whether it fits the
 * cache does not matter, so the fastest way to store is measured. */
static mls_destination buffer_of(const sink *s)
{
    return s->out->direct ? (mls_destination){.bytes = SIZE_MAX} : mls_cached();
}

/* Put a piece of one block, which fits the buffer, into it: elements `first` on.  Copy
 * and checksum are one pass over the memory where it lies packed; else the packed bytes
 * are still in the cache. */
static void put_buffered(sink *s, const mls_shard_item *item, size_t first, size_t bytes,
                         uint32_t *crc)
{
    unsigned char *to = s->buffer + s->used;
    const size_t size = mls_dtype_of(item->dtype)->item_bytes;
    const unsigned char *from =
        mls_planned_elements(s->w->job, item, first, bytes / size, to);
    /* what was packed is in its place already */
    *crc = from == to ? s->w->job->crc->update(*crc, to, bytes)
                      : mls_crc_copy(s->w->job->crc, s->w->job->kernels->choices, *crc,
                                     to, from, bytes, buffer_of(s));
    s->used += bytes;
}

/* Where byte `start` of what is stored is among the elements of the shard, and how many
 * bytes follow it there without a gap.  `run` is the number of a run, at or before that
 * where it is; it goes on to that one. */
static size_t find_stored(const mls_planned *planned, size_t size, size_t start,
                          size_t *run, size_t *bytes)
{
    const mls_layer *fresh = planned->fresh;
    const size_t at = start / size;
    if (fresh == NULL) {
        return at; /* all of it, and as it is */
    }
    while (fresh->runs[*run].at + fresh->runs[*run].count <= at) {
        ++*run;
    }
    const mls_extent *here = &fresh->runs[*run];
    const size_t left = (here->at + here->count - at) * size;
    *bytes = left < *bytes ? left : *bytes;
    return here->begin + (at - here->at);
}

/* The last run that starts at or before byte `start` of a layer: by halves, since each
 * task begins somewhere. */
static size_t first_run(const mls_planned *planned, size_t size, size_t start)
{
    const mls_layer *fresh = planned->fresh;
    size_t low = 0, high = fresh == NULL ? 1 : fresh->run_count;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (fresh->runs[middle].at <= start / size) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Bytes `start` .. `end` of one tensor, `start` being that of a block: so no block
 * belongs to two tasks, and its checksum is one task's to build up piece by piece. */
static mls_code put_tensor(sink *s, const mls_header_tensor *tensor, size_t start,
                           size_t end)
{
    const mls_planned *planned = &s->w->plan.planned[tensor->number];
    const mls_shard_item *item = planned->item;
    const size_t size = mls_dtype_of(item->dtype)->item_bytes;
    size_t run = first_run(planned, size, start);
    mls_code code = MLS_OK;
    while (code == MLS_OK && start < end) {
        uint32_t *crc = &tensor->crcs[start / MLS_SAFETENSORS_BLOCK];
        const size_t block = MLS_SAFETENSORS_BLOCK - start % MLS_SAFETENSORS_BLOCK;
        size_t step = end - start < block ? end - start : block;
        /* of a layer no further than its run: what follows lies elsewhere in memory, but
         * goes into the same buffer, block and file */
        const size_t first = find_stored(planned, size, start, &run, &step);
        /* always copied, and checksummed on the way: the array may change meanwhile */
        if (buffer_room(s) == 0) {
            code = flush(s);
        }
        const size_t room = buffer_room(s);
        step = step < room ? step : room;
        if (code == MLS_OK) {
            put_buffered(s, item, first, step, crc);
            start += step;
        }
    }
    return code;
}

/* All of a coded tensor. */
static mls_code put_coded(sink *s, const mls_header_tensor *tensor,
                          const unsigned char *coded)
{
    mls_code code = MLS_OK;
    for (size_t start = 0; code == MLS_OK && start < tensor->bytes;) {
        const size_t block = MLS_SAFETENSORS_BLOCK - start % MLS_SAFETENSORS_BLOCK;
        const size_t left = tensor->bytes - start, room = buffer_room(s);
        size_t step = left < block ? left : block;
        step = step < room ? step : room;
        uint32_t *crc = &tensor->crcs[start / MLS_SAFETENSORS_BLOCK];
        *crc = mls_crc_copy(s->w->job->crc, s->w->job->kernels->choices, *crc,
                            s->buffer + s->used, coded + start, step, buffer_of(s));
        s->used += step;
        start += step;
        code = buffer_room(s) == 0 ? flush(s) : MLS_OK;
    }
    return code;
}

/* ---- folders ---- */

/* The name of one of them. */
static const char *folder_name(int number)
{
    return number == INDEX_FOLDER ? "index" : mls_section_name((mls_section)number);
}

/* Open all of them.  A link is refused: the files behind it may be another checkpoint's.
 * What is open stays the same folder, even if its name becomes another one's. */
static mls_code open_folders(writer *w, mls_status *st)
{
    for (int i = 0; i < FOLDER_COUNT; i++) {
        do {
            w->folders[i] = openat(w->job->folder, folder_name(i),
                                   O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        } while (w->folders[i] < 0 && errno == EINTR);
        if (w->folders[i] < 0) {
            return mls_fail_os(st, errno, "cannot open the folder %s", folder_name(i));
        }
    }
    return MLS_OK;
}

/* The open folder that a path is in; `*name` is the rest of it. */
static int folder_of(const writer *w, const char *path, const char **name)
{
    for (int i = 0; i < FOLDER_COUNT; i++) {
        const size_t length = strlen(folder_name(i));
        if (strncmp(path, folder_name(i), length) == 0 && path[length] == '/') {
            *name = path + length + 1;
            return w->folders[i];
        }
    }
    *name = path; /* no path of ours is: opening it fails */
    return -1;
}

/* Create a file that must not exist: a descriptor, or -1 and errno. */
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

/* Give a file of one of the folders another name there: 0, or -1 and errno. */
static int rename_file(const writer *w, const char *from, const char *to)
{
    const char *old, *name;
    const int source = folder_of(w, from, &old), target = folder_of(w, to, &name);
    return renameat(source, old, target, name);
}

/* Delete a file that this save made. */
static void remove_file(const writer *w, const char *path)
{
    const char *name;
    const int folder = folder_of(w, path, &name);
    (void)unlinkat(folder, name, 0);
}

/* ---- files ---- */

/* Reserve the room, so that a full disk is noticed before anything is written, and that
 * several threads may write behind the present end.  Elsewhere the file just grows. */
static mls_code reserve(const output *out, mls_status *st)
{
#    if defined(__linux__)
    const uint64_t bytes = out->planned->header.file_bytes;
    int result;
    do {
        result = bytes < DIRECT_LEAST ? 0 : fallocate(out->fd, 0, 0, (off_t)bytes);
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) {
        return mls_fail_os(st, errno, "no room for a file of %llu bytes",
                           (unsigned long long)bytes);
    }
#    else
    (void)out, (void)st;
#    endif
    return MLS_OK;
}

/* The generation makes a name one that nobody has.  Where somebody has it after all, the
 * file is committed already, and giving ours its name would take it away. */
static mls_code expect_new(const writer *w, const char *path, mls_status *st)
{
    struct stat info;
    const char *name;
    const int folder = folder_of(w, path, &name);
    return fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0
               ? mls_fail_os(st, EEXIST, "cannot create a file")
               : MLS_OK;
}

/* Lay the file out and create the temporary, which nobody else has open either. */
static mls_code open_output(writer *w, output *out, mls_status *st)
{
    if (mls_shard_plan_lay_out(&w->plan, out->planned, st) != MLS_OK ||
        expect_new(w, out->path, st) != MLS_OK) {
        return st->code;
    }
    snprintf(out->temporary, sizeof out->temporary, "%s.tmp", out->path);
    out->fd = create_file(w, out->temporary);
    if (out->fd < 0) {
        return mls_fail_os(st, errno, "cannot create a file");
    }
    out->created = true;
    const mls_code code = reserve(out, st);
#    if defined(O_DIRECT)
    if (code == MLS_OK && out->planned->header.file_bytes >= DIRECT_LEAST) {
        const int flags = fcntl(out->fd, F_GETFL);
        out->direct = flags >= 0 && fcntl(out->fd, F_SETFL, flags | O_DIRECT) == 0;
    }
#    endif
    return code;
}

/* The first task of a file opens it; others wait.  Files are opened late, and closed
 * early, so that a hundred thousand of them need no more descriptors than there are
 * threads. */
static mls_code need_output(writer *w, output *out, mls_status *st)
{
    mls_code code = MLS_OK;
    pthread_mutex_lock(&w->lock);
    if (out->fd < 0) {
        code = open_output(w, out, st);
    }
    pthread_mutex_unlock(&w->lock);
    return code;
}

/* The header, which is what makes it a file, in steps of the buffer.  It ends where the
 * first tensor starts, at a multiple of the alignment, so it needs no padding of its own.
 */
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

/* Its last bytes, its length, its way to the disk, its name.  The header goes last: a
 * file that was not finished is none that anybody could take for whole. */
static mls_code finish_output(sink *s)
{
    output *out = s->out;
    mls_code code = write_header(s);
    if (code != MLS_OK) {
        return code;
    }
    /* direct writes have filled up the last block of the disk */
    if (out->direct && ftruncate(out->fd, (off_t)out->planned->header.file_bytes) != 0) {
        return mls_fail_os(s->st, errno, "cannot set the length of a file");
    }
    const int reason = s->w->sync_once ? 0 : mls_file_sync(out->fd);
    if (reason != 0) {
        return mls_fail_os(s->st, reason, "cannot bring a file to the disk");
    }
    const int failed = close(out->fd) != 0 && errno != EINTR ? errno : 0;
    out->fd = -1;
    if (failed != 0) {
        return mls_fail_os(s->st, failed, "cannot close a file");
    }
    if (rename_file(s->w, out->temporary, out->path) != 0) {
        return mls_fail_os(s->st, errno, "cannot give a file its name");
    }
    out->named = true;
    mls_shard_plan_finish(out->planned);
    return MLS_OK;
}

/* ---- tasks ---- */

/* The bytes of one task; whoever does the last one of a file finishes that.  The lock
 * round the count makes the checksums of all others visible to him. */
static mls_code do_task(writer *w, const task *t, unsigned char *buffer, mls_status *st)
{
    output *out = &w->outputs[t->file];
    const size_t count = out->planned->count, first = out->planned->shards[0];
    sink s = {.w = w, .out = out, .st = st, .buffer = buffer};
    unsigned char *coded = NULL;
    mls_code code = MLS_OK;
    if (w->plan.planned[first].frames != NULL) {
        code = mls_planned_encode(&w->plan, first, &coded, st);
        s.silent = true;
    }
    if (code == MLS_OK) {
        code = need_output(w, out, st);
    }
    const mls_header_tensor *tensors = out->planned->tensors;
    s.offset = code == MLS_OK ? tensors[0].offset + t->start : 0;
    if (code == MLS_OK && coded != NULL) {
        code = put_coded(&s, &tensors[0], coded);
    }
    for (size_t i = 0; code == MLS_OK && coded == NULL && i < count; i++) {
        const size_t end = count == 1 ? t->start + t->bytes : tensors[i].bytes;
        code = put_tensor(&s, &tensors[i], t->start, end);
    }
    if (code == MLS_OK) {
        code = flush(&s);
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

/* Of several failures the first is told: by the order of tasks, not by time, so that it
 * is the same one however many threads there are. */
static void note_failure(writer *w, size_t index, const mls_status *st)
{
    pthread_mutex_lock(&w->lock);
    if (index < w->failed) {
        w->failed = index;
        w->why = *st;
    }
    pthread_mutex_unlock(&w->lock);
}

/* After a failure nothing more is begun. */
static void write_task(void *context, size_t index)
{
    writer *w = context;
    const task *t = &w->tasks[w->begun + index];
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
            : do_task(w, t, buffer.data, &st);
    if (buffer.data != NULL) {
        give_buffer(w, buffer);
    }
    if (code != MLS_OK) {
        const mls_text key = w->plan.planned[w->plan.files[t->file].shards[0]].key;
        mls_status_name(&st, key.data, key.length);
        note_failure(w, w->begun + index, &st);
    }
}

/* Bytes of a file's first shard. */
static size_t first_bytes(const mls_shard_plan *plan, size_t number)
{
    const size_t shard = plan->files[number].shards[0];
    return mls_planned_bytes(&plan->planned[shard], &plan->index.shards[shard]);
}

/* Tasks of one file: a single large shard is cut at blocks, all else is one task.  So is
 * what is coded, since each byte's place follows from those before it. */
static size_t cut_file(const mls_shard_plan *plan, size_t number, task *out)
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

/* Whether a file takes a shard whose memory is not a copy of ours.  One such shard makes
 * a whole segment urgent: small shards are copied first, so that is seldom. */
static bool is_lent(const writer *w, size_t number)
{
    const mls_planned_file *file = &w->plan.files[number];
    for (size_t i = 0; i < file->count; i++) {
        if (!w->plan.planned[file->shards[i]].item->staged) {
            return true;
        }
    }
    return false;
}

/* The tasks of all files that are lent, or of all others.  Where nobody waits all files
 * are in one list, in their order. */
static void add_tasks(writer *w, bool lent)
{
    for (size_t i = 0; i < w->plan.file_count; i++) {
        if (w->job->freed == NULL || is_lent(w, i) == lent) {
            mls_planned_file *file = &w->plan.files[i];
            w->outputs[i] = (output){
                .planned = file, .fd = -1, .path = w->plan.index.files[file->file].path};
            w->outputs[i].tasks = cut_file(&w->plan, i, w->tasks + w->task_count);
            w->task_count += w->outputs[i].tasks;
        }
    }
}

/* All of them, in the order of files: threads take them from the front.  Where somebody
 * waits for his memory, what lies in it comes first. */
static mls_code make_tasks(writer *w, mls_status *st)
{
    /* each file has one task at least, and one for each further TASK_BYTES */
    size_t most = w->plan.file_count;
    for (size_t i = 0; i < w->plan.file_count; i++) {
        most += first_bytes(&w->plan, i) / TASK_BYTES; /* far below SIZE_MAX */
    }
    w->tasks = mls_alloc(most, sizeof *w->tasks);
    if (w->tasks != NULL) { /* once there are outputs, release() closes them */
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

/* ---- durable ---- */

/* Whether one call brings all of a file system to the disk and says so when it fails: the
 * usual local ones, from Linux 5.8 on. */
static bool can_sync_once(int folder)
{
#    if defined(__linux__)
    /* ext4, XFS, Btrfs, F2FS, tmpfs, ramfs: others may take the call and do nothing */
    static const unsigned long known[] = {0xEF53,     0x58465342, 0x9123683E,
                                          0xF2F52010, 0x01021994, 0x858458F6};
    struct statfs info;
    struct utsname system;
    int major = 0, minor = 0;
    if (fstatfs(folder, &info) != 0 || uname(&system) != 0 ||
        sscanf(system.release, "%d.%d", &major, &minor) != 2 ||
        major * 100 + minor < 508) {
        return false;
    }
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if ((unsigned long)info.f_type == known[i]) {
            return true;
        }
    }
#    else
    (void)folder;
#    endif
    return false;
}

/* Everything that has a name now. */
static mls_code make_durable(const writer *w, mls_status *st)
{
#    if defined(__linux__)
    if (w->sync_once) {
        int result;
        do {
            result = syncfs(w->job->folder);
        } while (result != 0 && errno == EINTR);
        return result == 0 ? MLS_OK
                           : mls_fail_os(st, errno, "cannot bring the files to the disk");
    }
#    endif
    /* a file that is on the disk without a name is lost */
    for (int i = 0; i < FOLDER_COUNT; i++) {
        const int reason = mls_folder_sync(w->folders[i]);
        if (reason != 0) {
            return mls_fail_os(st, reason, "cannot bring the folder %s to the disk",
                               folder_name(i));
        }
    }
    return MLS_OK;
}

/* ---- the index ---- */

/* The checksum of `bytes` bytes from those of their blocks. */
static uint32_t combined(const uint32_t *crcs, size_t bytes)
{
    uint32_t crc = 0;
    for (size_t start = 0, i = 0; start < bytes; start += MLS_SAFETENSORS_BLOCK) {
        const size_t left = bytes - start;
        crc = mls_crc_combine(
            crc, crcs[i++], left < MLS_SAFETENSORS_BLOCK ? left : MLS_SAFETENSORS_BLOCK);
    }
    return crc;
}

/* Write a small file: temporary, name; durable only where every file is by itself. */
static mls_code write_small(const writer *w, const char *path, const mls_buffer *text,
                            mls_status *st)
{
    char temporary[MLS_INDEX_PATH_BYTES + 8];
    if (expect_new(w, path, st) != MLS_OK) {
        return st->code;
    }
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    const int fd = create_file(w, temporary);
    if (fd < 0) {
        return mls_fail_os(st, errno, "cannot create the index");
    }
    mls_code code = mls_file_write_at(fd, text->data, text->length, 0, st);
    const int reason = code == MLS_OK && !w->sync_once ? mls_file_sync(fd) : 0;
    if (reason != 0) {
        code = mls_fail_os(st, reason, "cannot bring the index to the disk");
    }
    if (close(fd) != 0 && errno != EINTR && code == MLS_OK) {
        code = mls_fail_os(st, errno, "cannot close the index");
    }
    if (code == MLS_OK && rename_file(w, temporary, path) != 0) {
        code = mls_fail_os(st, errno, "cannot give the index its name");
    }
    if (code != MLS_OK) {
        remove_file(w, temporary);
    }
    return code;
}

/* Every checksum is known now.  The index is the last file: whoever has one may rely on
 * all that it lists. */
static mls_code write_index(writer *w, mls_shards_written *out, mls_status *st)
{
    mls_index *index = &w->plan.index;
    mls_buffer text = {0};
    /* kept shards have their checksum from before; those of new blocks are known by now
     */
    for (size_t i = 0; i < index->shard_count; i++) {
        mls_index_shard *shard = &index->shards[i];
        const mls_planned *planned = &w->plan.planned[i];
        const size_t bytes = mls_planned_bytes(planned, shard);
        out->data_bytes += shard->bytes;
        if (planned->fresh != NULL) {
            planned->fresh->crc = combined(planned->fresh->crcs, bytes);
        } else if (mls_planned_is_written(planned)) {
            shard->crc = combined(shard->crcs, bytes);
        }
        out->new_shards += mls_planned_is_written(planned);
        out->new_bytes += bytes;
    }
    out->shard_count = index->shard_count;
    out->new_files = w->plan.file_count;
    /* one for each rank: no two processes ever write the same name */
    snprintf(out->path, sizeof out->path, "index/%s.%llu.json", index->generation,
             (unsigned long long)index->rank);
    mls_code code = mls_index_build(index, w->job->crc, &text, &out->crc, st);
    if (code == MLS_OK) {
        out->bytes = text.length;
        code = write_small(w, out->path, &text, st);
        w->indexed = code == MLS_OK;
    }
    mls_buffer_fini(&text);
    return code;
}

/* ---- the whole ---- */

/* Take back everything that was made, and nothing else. */
static void discard(const writer *w, const char *index)
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

/* Descriptors of files are open only after a failure. */
static void release(writer *w)
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
    mls_shard_plan_fini(&w->plan);
    pthread_mutex_destroy(&w->lock);
}

/* From the plan to files that have their names.  Nothing of it is durable yet, but for
 * files that are synced one by one. */
static mls_code write_files(writer *w, mls_status *st)
{
    mls_code code = make_tasks(w, st);
    if (code != MLS_OK) {
        return code;
    }
    /* decided before any file is written, since each would else sync itself */
    w->sync_once = w->plan.file_count > FEW_FILES && can_sync_once(w->job->folder);
    /* two runs: the first ends when no thread reads memory that somebody waits for */
    mls_pool_run(w->job->pool, write_task, w, w->first_count);
    if (w->job->freed != NULL && w->failed == SIZE_MAX) {
        w->job->freed(w->job->freed_context);
        w->begun = w->first_count;
        mls_pool_run(w->job->pool, write_task, w, w->task_count - w->first_count);
    }
    free_buffers(w); /* the text of the index comes next */
    if (w->failed != SIZE_MAX) {
        *st = w->why;
        return st->code;
    }
    return MLS_OK;
}

/* Step by step, each of which may end it; up to the last one nothing is committed, and
 * whatever was made is taken back. */
mls_code mls_shards_write(const mls_shard_job *job, mls_shards_written *out,
                          mls_status *st)
{
    mls_shards_written written = {0};
    writer w = {.job = job, .failed = SIZE_MAX};
    mls_code code = mls_shard_plan_init(&w.plan, job, st);
    if (code != MLS_OK) {
        return code;
    }
    pthread_mutex_init(&w.lock, NULL);
    for (int i = 0; i < FOLDER_COUNT; i++) {
        w.folders[i] = -1;
    }
    if ((code = open_folders(&w, st)) == MLS_OK &&
        (code = mls_shard_plan_compare(&w.plan, st)) == MLS_OK &&
        (code = mls_shard_plan_keep(&w.plan, st)) == MLS_OK &&
        (code = mls_shard_plan_sift(&w.plan, st)) == MLS_OK &&
        (code = mls_shard_plan_compress(&w.plan, st)) == MLS_OK &&
        (code = mls_shard_plan_place(&w.plan, st)) == MLS_OK &&
        (code = write_files(&w, st)) == MLS_OK &&
        (code = write_index(&w, &written, st)) == MLS_OK) {
        code = make_durable(&w, st);
    }
    if (code != MLS_OK) {
        discard(&w, written.path);
    } else {
        *out = written;
    }
    release(&w);
    return code;
}

#endif
