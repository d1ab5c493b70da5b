/* prompt_open: open, lock and close a log. */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "io/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__APPLE__)
#    include <sys/random.h>
#endif

enum { FOLDER_MODE = 0777, MODE = 0666, UNINDEXED = 256 };

static const char letters[] = "mlsprmpt";

/* ---- state ---- */

/* In a child, another thread of the parent may have held the mutexes and changed the
 * index, so both are abandoned. The child opens `store` again: a shared open file would
 * share the lock with the parent. */
static void renew_after_fork(mls_prompt_log *log)
{
    log->pid = getpid();
    pthread_mutex_init(&log->state, NULL);
    pthread_mutex_init(&log->writer, NULL);
    log->index = (mls_prompt_index){0};
    log->segments = NULL;
    log->segment_count = log->segment_room = log->open_files = 0;
    log->is_writing = log->is_locked = false;
    log->is_stale = true;
    const int store = openat(log->folder, MLS_PROMPT_STORE,
                             (log->refused == 0 ? O_RDWR : O_RDONLY) | O_CLOEXEC |
                                 O_NOFOLLOW | O_NONBLOCK);
    (void)close(log->store);
    log->store = store;
}

void mls_prompt_enter_state(mls_prompt_log *log)
{
    if (log->pid != getpid()) {
        renew_after_fork(log);
    }
    pthread_mutex_lock(&log->state);
}

void mls_prompt_leave_state(mls_prompt_log *log)
{
    pthread_mutex_unlock(&log->state);
}

/* ---- a new store ---- */

/* Only hidden files may be in a folder that becomes a store. */
static mls_code check_empty(const mls_prompt_log *log, mls_status *st)
{
    const int fd = openat(log->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *open_folder = fd < 0 ? NULL : fdopendir(fd);
    bool is_empty = true;
    if (open_folder == NULL) {
        const int reason = errno;
        if (fd >= 0) {
            (void)close(fd);
        }
        return mls_fail_os(st, reason, "cannot list the folder");
    }
    for (struct dirent *entry; is_empty && (entry = readdir(open_folder)) != NULL;) {
        is_empty = entry->d_name[0] == '.';
    }
    (void)closedir(open_folder);
    return is_empty ? MLS_OK
                    : mls_fail(st, MLS_E_FORMAT,
                               "not a prompt store, and not empty: pass another folder");
}

static mls_code write_store(const mls_prompt_log *log, mls_status *st)
{
    unsigned char bytes[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head = {0};
    const size_t path_bytes = strlen(log->path) + sizeof MLS_PROMPT_STORE + 1;
    char *path = mls_alloc(path_bytes, 1);
    if (path == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a path");
    }
    mls_code code = MLS_OK;
    if (getentropy(head.id, sizeof head.id) != 0) {
        code = mls_fail_os(st, errno, "cannot get random bytes");
    } else {
        mls_prompt_head_write(bytes, letters, &head, log->crc);
        snprintf(path, path_bytes, "%s/%s", log->path, MLS_PROMPT_STORE);
        code = mls_file_replace(path, MODE, bytes, sizeof bytes, st);
    }
    mls_free(path);
    return code;
}

/* The folder is locked meanwhile, so that two processes do not create two stores. A file
 * system without such locks gets none. */
static mls_code create_store(const mls_prompt_log *log, mls_status *st)
{
    const bool is_locked = flock(log->folder, LOCK_EX) == 0;
    struct stat info;
    mls_code code = MLS_OK;
    if (fstatat(log->folder, MLS_PROMPT_STORE, &info, AT_SYMLINK_NOFOLLOW) != 0) {
        code = check_empty(log, st);
        code = code == MLS_OK ? write_store(log, st) : code;
    }
    if (is_locked) {
        (void)flock(log->folder, LOCK_UN);
    }
    return code;
}

/* ---- open ---- */

static mls_code open_folder(mls_prompt_log *log, bool create, mls_status *st)
{
    if (create && mkdir(log->path, FOLDER_MODE) != 0 && errno != EEXIST) {
        return mls_fail_os(st, errno, "cannot create the folder");
    }
    log->folder = open(log->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return log->folder >= 0 ? MLS_OK : mls_fail_os(st, errno, "cannot open the folder");
}

/* Open `store`, for writing if that is permitted. */
static mls_code open_store(mls_prompt_log *log, mls_status *st)
{
    const int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    struct stat info;
    log->refused = 0;
    log->store = openat(log->folder, MLS_PROMPT_STORE, flags | O_RDWR);
    if (log->store < 0 && (errno == EACCES || errno == EPERM || errno == EROFS)) {
        log->refused = errno;
        log->store = openat(log->folder, MLS_PROMPT_STORE, flags | O_RDONLY);
    }
    if (log->store < 0) {
        return errno == ELOOP || errno == ENXIO || errno == EISDIR
                   ? mls_fail(st, MLS_E_FORMAT, "`store` is not a regular file")
                   : mls_fail_os(st, errno, "cannot open `store`");
    }
    if (fstat(log->store, &info) != 0) {
        return mls_fail_os(st, errno, "cannot examine `store`");
    }
    return S_ISREG(info.st_mode)
               ? MLS_OK
               : mls_fail(st, MLS_E_FORMAT, "`store` is not a regular file");
}

static mls_code read_store(mls_prompt_log *log, mls_status *st)
{
    unsigned char bytes[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head;
    mls_code code = mls_file_read_at(log->store, bytes, sizeof bytes, 0, st);
    if (code == MLS_OK) {
        code = mls_prompt_head_parse(bytes, letters, log->crc, &head, st);
    }
    if (code == MLS_OK) {
        memcpy(log->id, head.id, sizeof head.id);
    }
    return code;
}

/* A folder without `store` is not a prompt store, unless it may become one. */
static mls_code open_files(mls_prompt_log *log, bool create, mls_status *st)
{
    mls_code code = open_folder(log, create, st);
    if (code != MLS_OK) {
        return code;
    }
    code = open_store(log, st);
    if (code == MLS_E_IO && st->os_error == ENOENT) {
        if (!create) {
            return mls_fail(st, MLS_E_FORMAT,
                            "not a prompt store: it has no file `store`");
        }
        code = create_store(log, st);
        code = code == MLS_OK ? open_store(log, st) : code;
    }
    return code == MLS_OK ? read_store(log, st) : code;
}

mls_code mls_prompt_log_open(const char *path, bool create, const mls_kernels *kernels,
                             mls_prompt_log **out, mls_status *st)
{
    mls_prompt_log *log = mls_alloc(1, sizeof *log);
    char *copy = mls_alloc(strlen(path) + 1, 1);
    if (log == NULL || copy == NULL) {
        mls_free(log);
        mls_free(copy);
        return mls_fail(st, MLS_E_MEMORY, "no memory to open a prompt store");
    }
    *log = (mls_prompt_log){.path = strcpy(copy, path),
                            .folder = -1,
                            .store = -1,
                            .used = -1,
                            .pid = getpid(),
                            .kernels = kernels,
                            .crc = mls_crc_of(kernels->cpu)};
    pthread_mutex_init(&log->state, NULL);
    pthread_mutex_init(&log->writer, NULL);
    mls_code code = open_files(log, create, st);
    if (code == MLS_OK) {
        code = mls_prompt_load(log, st);
    }
    if (code != MLS_OK) {
        mls_prompt_log_free(log);
        return code;
    }
    *out = log;
    return MLS_OK;
}

void mls_prompt_log_free(mls_prompt_log *log)
{
    if (log == NULL) {
        return;
    }
    mls_prompt_enter_state(log);
    mls_prompt_log_clear(log);
    mls_prompt_leave_state(log);
    mls_free(log->segments);
    const int descriptors[] = {log->folder, log->store, log->used};
    for (size_t i = 0; i < sizeof descriptors / sizeof descriptors[0]; i++) {
        if (descriptors[i] >= 0) {
            (void)close(descriptors[i]);
        }
    }
    pthread_mutex_destroy(&log->state);
    pthread_mutex_destroy(&log->writer);
    mls_free(log->path);
    mls_free(log);
}

/* ---- the writer ---- */

/* Cut what a killed writer left after the last complete record. */
static mls_code cut_newest(mls_prompt_log *log, mls_status *st)
{
    char name[MLS_PROMPT_NAME];
    struct stat info;
    if (log->segment_count == 0) {
        return MLS_OK;
    }
    const mls_prompt_segment *newest = &log->segments[log->segment_count - 1];
    mls_prompt_segment_name(name, newest->number);
    const int fd =
        openat(log->folder, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    int reason = fd < 0 || fstat(fd, &info) != 0 ? errno : 0;
    if (reason == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size > newest->bytes &&
        ftruncate(fd, (off_t)newest->bytes) != 0) {
        reason = errno;
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    return reason == 0 ? MLS_OK : mls_fail_os(st, reason, "cannot repair %s", name);
}

/* After a power failure the last put may have headers without their payload. All earlier
 * puts were synced. Such records are forgotten; the next put writes them again. */
static mls_code check_last_put(mls_prompt_log *log, mls_status *st)
{
    mls_prompt_segment *segment = mls_prompt_segment_find(log, log->tail_segment);
    mls_prompt_file *file = NULL;
    enum { ROOM = 1 << 18 };
    if (log->is_checked || segment == NULL) {
        log->is_checked = true;
        return MLS_OK;
    }
    unsigned char *buffer = mls_alloc(ROOM, 1);
    mls_code code = buffer == NULL ? mls_fail(st, MLS_E_MEMORY, "no memory for a buffer")
                                   : mls_prompt_segment_hold(log, segment, &file, st);
    for (uint32_t i = 0; code == MLS_OK && i < log->index.count; i++) {
        const mls_prompt_entry *entry = &log->index.entries[i];
        const uint64_t offset = mls_prompt_entry_offset(entry);
        unsigned char room[MLS_PROMPT_HEAD_READ], *bytes = room;
        mls_prompt_header header;
        mls_status damage;
        if (entry->segment != segment->number || offset < log->tail_offset ||
            (entry->flags & MLS_PROMPT_REMOVED) != 0) {
            continue;
        }
        mls_code found = mls_prompt_header_read(file->fd, offset, segment->bytes - offset,
                                                log->crc, room, &bytes, &header, &damage);
        if (found == MLS_OK) {
            found = mls_prompt_payload_check(file->fd, offset, &header, log->crc, buffer,
                                             ROOM, NULL, &damage);
        }
        if (bytes != room) {
            mls_free(bytes);
        }
        if (found != MLS_OK) {
            mls_prompt_forget(log, i);
        }
    }
    mls_prompt_file_release(file);
    mls_free(buffer);
    log->is_checked = code == MLS_OK;
    return code;
}

/* Another process may have created a segment, and been killed before it stored the hint
 * for readers: so the folder is listed. */
static mls_code prepare_writing(mls_prompt_log *log, mls_status *st)
{
    uint32_t *numbers = NULL;
    size_t count = 0;
    mls_code code = mls_prompt_follow(log, st);
    if (code == MLS_OK) {
        code = mls_prompt_segments_list(log, &numbers, &count, st);
    }
    if (code == MLS_OK && count > 0 && numbers[count - 1] > log->highest) {
        code = mls_prompt_load(log, st);
    }
    for (size_t i = 0; code == MLS_OK && i < count && numbers[i] < log->highest; i++) {
        if (mls_prompt_segment_find(log, numbers[i]) == NULL) {
            mls_prompt_segment_remove_stray(log, numbers[i]);
        }
    }
    mls_free(numbers);
    if (code == MLS_OK) {
        code = mls_prompt_scan_behind_damage(log, st);
    }
    if (code == MLS_OK) {
        code = cut_newest(log, st);
    }
    return code == MLS_OK ? check_last_put(log, st) : code;
}

/* File systems without locks have one writer only if the user takes care of it. */
static int lock_store(mls_prompt_log *log)
{
    if (flock(log->store, LOCK_EX | LOCK_NB) == 0) {
        log->is_locked = true;
        return 0;
    }
    return errno == ENOLCK || errno == ENOTSUP || errno == EINVAL || errno == ENOSYS
               ? 0
               : errno;
}

mls_code mls_prompt_lock(mls_prompt_log *log, bool *busy, mls_status *st)
{
    mls_prompt_enter_state(log); /* also in the child of a fork */
    mls_prompt_leave_state(log);
    *busy = false;
    if (log->refused != 0) {
        return mls_fail_os(st, log->refused, "the prompt store can only be read");
    }
    if (pthread_mutex_trylock(&log->writer) != 0) {
        *busy = true;
        return MLS_OK;
    }
    const int reason = lock_store(log);
    if (reason != 0) {
        pthread_mutex_unlock(&log->writer);
        *busy = reason == EWOULDBLOCK || reason == EINTR;
        return *busy ? MLS_OK : mls_fail_os(st, reason, "cannot lock the prompt store");
    }
    mls_prompt_enter_state(log);
    const mls_code code = prepare_writing(log, st);
    log->is_writing = true;
    mls_prompt_leave_state(log);
    if (code != MLS_OK) {
        mls_prompt_unlock(log);
    }
    return code;
}

void mls_prompt_unlock(mls_prompt_log *log)
{
    mls_prompt_enter_state(log);
    log->is_writing = false;
    mls_prompt_leave_state(log);
    if (log->is_locked) {
        log->is_locked = false;
        (void)flock(log->store, LOCK_UN);
    }
    pthread_mutex_unlock(&log->writer);
}

void mls_prompt_log_save_index(mls_prompt_log *log)
{
    bool busy = false;
    mls_status ignored;
    if (log->unindexed >= UNINDEXED && mls_prompt_lock(log, &busy, &ignored) == MLS_OK &&
        !busy) {
        mls_prompt_enter_state(log);
        (void)mls_prompt_index_save(log, &ignored);
        mls_prompt_leave_state(log);
        mls_prompt_unlock(log);
    }
}
