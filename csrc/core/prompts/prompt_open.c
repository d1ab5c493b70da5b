/* prompt_open: opens, creates and closes a store: its folder, its file `store`, its id;
 * forked processes. */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__APPLE__)
#    include <sys/random.h>
#endif

enum { FOLDER_MODE = 0777, MODE = 0666 };

static const char letters[] = "mlsprmpt";

/* ---- state ---- */

/* Make the log usable in the child of a fork. Another thread of the parent may have held
 * the mutexes and changed the index, so both are abandoned. The child opens `store`
 * again: a shared open file would share the lock with the parent. If that fails, it is
 * -1, and later writes fail. */
static void renew_after_fork(mls_prompt_log *log)
{
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
    atomic_store(&log->pid, getpid());
}

/* Lock `state`, and renew the log in the child of a fork. `pid` is 0 while a thread
 * renews the log. */
void mls_prompt_lock_state(mls_prompt_log *log)
{
    const pid_t pid = getpid();
    for (pid_t owner; (owner = atomic_load(&log->pid)) != pid;) {
        /* one thread of the child renews it; the others wait for that */
        if (owner != 0 && atomic_compare_exchange_strong(&log->pid, &owner, 0)) {
            renew_after_fork(log);
        }
    }
    pthread_mutex_lock(&log->state);
}

void mls_prompt_unlock_state(mls_prompt_log *log)
{
    pthread_mutex_unlock(&log->state);
}

/* ---- a new store ---- */

/* Fail with MLS_E_FORMAT unless the folder is empty: only hidden files may be in a folder
 * that becomes a store. MLS_E_IO. */
static mls_code check_empty(const mls_prompt_log *log, mls_status *st)
{
    DIR *open_folder = mls_prompt_folder_list(log, st);
    bool is_empty = true;
    if (open_folder == NULL) {
        return st->code;
    }
    for (struct dirent *entry; is_empty && (entry = readdir(open_folder)) != NULL;) {
        is_empty = entry->d_name[0] == '.';
    }
    (void)closedir(open_folder);
    return is_empty ? MLS_OK
                    : mls_fail(st, MLS_E_FORMAT,
                               "not a prompt store, and not empty: pass another folder");
}

/* Write the file `store` with a new random id, atomically. Errors as
 * mls_file_replace_at. */
static mls_code write_store(const mls_prompt_log *log, mls_status *st)
{
    unsigned char bytes[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head = {0};
    if (getentropy(head.id, sizeof head.id) != 0) {
        return mls_fail_os(st, errno, "cannot get random bytes");
    }
    mls_prompt_head_write(bytes, letters, &head, log->crc);
    return mls_file_replace_at(log->folder, MLS_PROMPT_STORE, MODE, bytes, sizeof bytes,
                               st);
}

/* Create the file `store` unless another process has. The folder is locked meanwhile, so
 * that two processes do not create two stores. A file system without such locks gets
 * none. MLS_E_FORMAT: the folder is not empty; errors as mls_file_replace_at. */
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

/* Make the name of a new folder durable. Returns 0 or errno. */
static int sync_parent(int folder)
{
    const int parent = openat(folder, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0) {
        return errno;
    }
    const int reason = mls_folder_sync(parent);
    (void)close(parent);
    return reason;
}

/* Open the folder `path`, and create it before if `create` and it is missing.
 * MLS_E_IO. */
static mls_code open_folder(mls_prompt_log *log, const char *path, bool create,
                            mls_status *st)
{
    const bool is_new = create && mkdir(path, FOLDER_MODE) == 0;
    if (create && !is_new && errno != EEXIST) {
        return mls_fail_os(st, errno, "cannot create the folder");
    }
    log->folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (log->folder < 0) {
        return mls_fail_os(st, errno, "cannot open the folder");
    }
    const int reason = is_new ? sync_parent(log->folder) : 0;
    return reason == 0 ? MLS_OK : mls_fail_os(st, reason, "cannot sync the new folder");
}

/* Open the file `store`, for writing if that is permitted; otherwise `refused` is the
 * reason. MLS_E_FORMAT: it is not a regular file; MLS_E_IO. */
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

/* Take the log's id from the segments, because the head of `store` is damaged. Fails
 * as `st` does already if no segment has an undamaged head. */
static mls_code read_segments(mls_prompt_log *log, mls_status *st)
{
    uint32_t *numbers = NULL;
    size_t count = 0;
    mls_status other;
    mls_code code = mls_prompt_segments_list(log, false /* delete nothing */, &numbers,
                                             &count, &other);
    for (size_t i = 0; code == MLS_OK && !log->has_damaged_head && i < count; i++) {
        log->has_damaged_head =
            mls_prompt_segment_id(log, numbers[i], log->id, &other) == MLS_OK;
    }
    mls_free(numbers);
    return log->has_damaged_head ? MLS_OK : st->code;
}

/* Read the head of `store`, and set the log's id. MLS_E_IO; MLS_E_FORMAT: it is damaged,
 * of a newer version or no store, and no segment has the id. */
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
    return code == MLS_E_FORMAT ? read_segments(log, st) : code;
}

mls_code mls_prompt_store_mend(mls_prompt_log *log, mls_status *st)
{
    unsigned char bytes[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head = {.number = 0};
    memcpy(head.id, log->id, sizeof head.id);
    mls_prompt_head_write(bytes, letters, &head, log->crc);
    mls_store_le32(bytes + MLS_PROMPT_HINT, log->highest);
    const mls_code code = mls_file_write_at(log->store, bytes, sizeof bytes, 0, st);
    log->has_damaged_head = log->has_damaged_head && code != MLS_OK;
    return code;
}

/* Open folder and `store`, and read the id. A folder without `store` is not a prompt
 * store (MLS_E_FORMAT), unless `create` makes it one. Other errors as
 * mls_prompt_log_open. On failure the caller closes the files. */
static mls_code open_files(mls_prompt_log *log, const char *path, bool create,
                           mls_status *st)
{
    mls_code code = open_folder(log, path, create, st);
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

/* Open a log and read its entries. A failure frees the log with all that is open. */
mls_code mls_prompt_log_open(const char *path, bool create, const mls_kernels *kernels,
                             const mls_progress *progress, mls_prompt_log **out,
                             mls_status *st)
{
    mls_prompt_log *log = mls_alloc(1, sizeof *log);
    if (log == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to open a prompt store");
    }
    *log = (mls_prompt_log){.folder = -1,
                            .store = -1,
                            .used = -1,
                            .pid = getpid(),
                            .kernels = kernels,
                            .progress = progress,
                            .crc = mls_crc_of(kernels->cpu)};
    pthread_mutex_init(&log->state, NULL);
    pthread_mutex_init(&log->writer, NULL);
    mls_code code = open_files(log, path, create, st);
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

/* Close a log and free it. The segments that matches hold stay open. */
void mls_prompt_log_free(mls_prompt_log *log)
{
    if (log == NULL) {
        return;
    }
    mls_prompt_lock_state(log);
    mls_prompt_log_clear(log);
    mls_prompt_unlock_state(log);
    mls_free(log->segments);
    mls_free(log->removed.damage);
    const int descriptors[] = {log->folder, log->store, log->used};
    for (size_t i = 0; i < sizeof descriptors / sizeof descriptors[0]; i++) {
        if (descriptors[i] >= 0) {
            (void)close(descriptors[i]);
        }
    }
    pthread_mutex_destroy(&log->state);
    pthread_mutex_destroy(&log->writer);
    mls_free(log);
}
