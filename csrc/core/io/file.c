/* Reading goes through descriptors that were examined after they were opened.  Replacing
 * goes: resolve links, hold the folder open, write a temporary in it, sync, rename, sync
 * the folder.  Of every call that can fail, the test suite makes it fail.
 *
 * What the steps of a commit are for, by what is found after a power failure when one is
 * left out: without the first sync, the new name with none or some of its bytes; without
 * the rename, half of each file; without the last sync, the old file after success was
 * reported.
 */
#if !defined(_WIN32)

#    include "io/file.h"

#    include "base/memory.h"
#    include "base/size.h"

#    include <errno.h>
#    include <fcntl.h>
#    include <limits.h>
#    include <stdio.h>
#    include <string.h>
#    include <sys/mman.h>
#    include <sys/stat.h>
#    include <unistd.h>

#    if defined(__APPLE__)
#        include <sys/random.h>
#    endif

/* How files are opened for reading.  O_NONBLOCK: opening a FIFO that nobody writes to
 * must not wait. */
enum { READ_FLAGS = O_RDONLY | O_CLOEXEC | O_NONBLOCK };

/* Look at what was opened rather than at the path: between two calls the path could
 * come to mean another file.  `opened` is below 0 where opening failed with `reason`.
 * Takes `opened`: it becomes `*fd`, or is closed. */
static mls_code examine_opened(int opened, int reason, int *fd, uint64_t *length,
                               mls_status *st)
{
    struct stat info;
    if (opened < 0) {
        return mls_fail_os(st, reason, "cannot open the file");
    }
    if (fstat(opened, &info) != 0) {
        mls_fail_os(st, errno, "cannot examine the file");
    } else if (S_ISDIR(info.st_mode)) {
        mls_fail_os(st, EISDIR, "cannot read the file");
    } else if (!S_ISREG(info.st_mode) || info.st_size < 0) {
        mls_fail(st, MLS_E_FORMAT, "not a regular file but a FIFO, socket or device");
        mls_status_expected(st, "a regular file");
    } else {
        *fd = opened;
        *length = (uint64_t)info.st_size;
        return MLS_OK;
    }
    (void)close(opened);
    return st->code;
}

/* Links are followed: the path is the user's own. */
mls_code mls_file_open(const char *path, int *fd, uint64_t *length, mls_status *st)
{
    const int opened = open(path, READ_FLAGS);
    return examine_opened(opened, errno, fd, length, st);
}

/* Links are not followed: what lies in the folder may be anybody's, and a link would lead
 * out of it. */
mls_code mls_file_open_at(int folder, const char *path, int *fd, uint64_t *length,
                          mls_status *st)
{
    const int opened = openat(folder, path, READ_FLAGS | O_NOFOLLOW);
    if (opened < 0 && errno == ELOOP) {
        mls_fail(st, MLS_E_FORMAT, "not a regular file but a symbolic link");
        mls_status_expected(st, "a regular file");
        return MLS_E_FORMAT;
    }
    return examine_opened(opened, errno, fd, length, st);
}

/* What is found when the file is opened later counts; this only spares work, and memory
 * for what cannot be in the file. */
mls_code mls_file_expect(int folder, const char *path, uint64_t bytes, mls_status *st)
{
    struct stat info;
    if (fstatat(folder, path, &info, AT_SYMLINK_NOFOLLOW) != 0) {
        return mls_fail_os(st, errno, "cannot examine the file");
    }
    if (!S_ISREG(info.st_mode)) {
        mls_fail(st, MLS_E_FORMAT, "not a regular file");
        mls_status_expected(st, "a regular file");
    } else if ((uint64_t)info.st_size != bytes) {
        mls_fail(st, MLS_E_FORMAT, "the file is %llu bytes long, and not %llu",
                 (unsigned long long)info.st_size, (unsigned long long)bytes);
        mls_status_expected(st, "%llu", (unsigned long long)bytes);
        mls_status_got(st, "%llu", (unsigned long long)info.st_size);
    } else {
        return MLS_OK;
    }
    return MLS_E_FORMAT;
}

/* pread leaves the descriptor's own position alone, so threads may share one. */
mls_code mls_file_read_at(int fd, void *data, size_t bytes, uint64_t offset,
                          mls_status *st)
{
    unsigned char *to = data;
    while (bytes > 0) {
        /* one call moves at most 2 GiB on Linux, and fails above that on macOS */
        const size_t step = bytes < MLS_FILE_STEP ? bytes : MLS_FILE_STEP;
        const ssize_t got = pread(fd, to, step, (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return mls_fail_os(st, errno, "cannot read %zu bytes at offset %llu", bytes,
                               (unsigned long long)offset);
        }
        if (got == 0) {
            return mls_fail_at(st, offset,
                               "the file became shorter while it was read: "
                               "%zu bytes are missing",
                               bytes);
        }
        to += got;
        bytes -= (size_t)got;
        offset += (uint64_t)got;
    }
    return MLS_OK;
}

/* A write of nothing counts as an error: some file systems answer so when they are
 * full, and trying again would never end. */
mls_code mls_file_write_at(int fd, const void *data, size_t bytes, uint64_t offset,
                           mls_status *st)
{
    const unsigned char *from = data;
    while (bytes > 0) {
        const size_t step = bytes < MLS_FILE_STEP ? bytes : MLS_FILE_STEP;
        const ssize_t put = pwrite(fd, from, step, (off_t)offset);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return mls_fail_os(st, put < 0 ? errno : EIO,
                               "cannot write %zu bytes at offset %llu", bytes,
                               (unsigned long long)offset);
        }
        from += put;
        bytes -= (size_t)put;
        offset += (uint64_t)put;
    }
    return MLS_OK;
}

/* fsync, and on macOS the stronger form that empties the drive's own cache, where the
 * file system has it. */
int mls_file_sync(int fd)
{
    int result;
#    if defined(F_FULLFSYNC)
    if (fcntl(fd, F_FULLFSYNC) == 0) {
        return 0;
    }
#    endif
    do {
        result = fsync(fd);
    } while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

/* EINVAL: a file system whose folders cannot be synced at all. */
int mls_folder_sync(int fd)
{
    const int reason = mls_file_sync(fd);
    return reason == EINVAL || reason == ENOTSUP ? 0 : reason;
}

/* The length is asked for first and believed only as a bound: a file that grows or
 * shrinks meanwhile is being written by somebody else, and what was read of it may be
 * two versions mixed.  One byte behind the end is asked for to see the file grow. */
mls_code mls_file_read(const char *path, size_t limit, unsigned char **data,
                       size_t *length, mls_status *st)
{
    int fd = -1;
    uint64_t bytes;
    unsigned char *content = NULL;
    unsigned char beyond;
    mls_code code = mls_file_open(path, &fd, &bytes, st);
    if (code != MLS_OK) {
        goto done;
    }
    if (bytes > limit) {
        code = mls_fail_at(st, limit, "the file is %llu bytes long: at most %zu are read",
                           (unsigned long long)bytes, limit);
        goto done;
    }
    content = mls_alloc((size_t)bytes, 1);
    if (content == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for a file of %zu bytes",
                        (size_t)bytes);
        goto done;
    }
    code = mls_file_read_at(fd, content, (size_t)bytes, 0, st);
    if (code == MLS_OK && pread(fd, &beyond, 1, (off_t)bytes) > 0) {
        code = mls_fail_at(st, bytes, "the file became longer while it was read");
    }
done:
    if (fd >= 0) {
        (void)close(fd);
    }
    if (code != MLS_OK) {
        mls_free(content);
        return code;
    }
    *data = content;
    *length = (size_t)bytes;
    return MLS_OK;
}

/* ---- mappings: for those who want to read a part of a large file, or to share it ----
 */

/* Private, so that a write by someone who does not know that he must not (torch has no
 * read-only tensors) changes a copy of that page, and neither the file nor the life of
 * the process.  Until then the pages are those of the system's cache, and reserve
 * nothing. Where such a mapping is refused, a read-only one does for all who read. */
static void *map_private(size_t length, int fd)
{
    void *data =
        mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    return data != MAP_FAILED ? data : mmap(NULL, length, PROT_READ, MAP_SHARED, fd, 0);
}

/* No bytes are no mapping: mmap refuses a length of 0. */
mls_code mls_mapping_init(mls_mapping *out, int fd, uint64_t bytes, mls_status *st)
{
    size_t length;
    if (!mls_size_from_u64(bytes, &length)) {
        return mls_fail(st, MLS_E_SIZE, "a file of %llu bytes is larger than memory",
                        (unsigned long long)bytes);
    }
    void *data = NULL;
    if (length > 0) {
        data = map_private(length, fd);
        if (data == MAP_FAILED) {
            return mls_fail_os(st, errno, "cannot map %zu bytes of the file", length);
        }
    }
    *out = (mls_mapping){.data = data, .bytes = length};
    return MLS_OK;
}

/* Arrays over the mapping must be gone: touching one after this ends the process. */
void mls_mapping_fini(mls_mapping *mapping)
{
    if (mapping->data != NULL) {
        /* the system takes addresses without const */
        (void)munmap((void *)(uintptr_t)mapping->data, mapping->bytes);
    }
    *mapping = (mls_mapping){0};
}

/* ---- the target: folder and name, links resolved ----
 *
 * A link is followed because a program that opens the path for writing would follow it:
 * people put links where large files must lie on another disk.
 */

enum {
    MAX_LINKS = 40,        /* as many as Linux follows */
    NAME_TRIES = 16,       /* a random name that exists is a bug or an attack */
    START_STEP = 8 << 20,  /* how much is written before it is sent to the disk */
    PERMISSION_BITS = 0777 /* what chmod sets, without set-user-id and the like */
};

/* `folder_length` bytes of `folder`, then `name`, as a fresh string; NULL without
 * memory. */
static char *join(const char *folder, size_t folder_length, const char *name)
{
    const size_t name_length = strlen(name);
    size_t bytes;
    char *path = NULL;
    if (mls_size_add(folder_length, name_length, &bytes) &&
        mls_size_add(bytes, 1, &bytes) && (path = mls_alloc(bytes, 1)) != NULL) {
        memcpy(path, folder, folder_length);
        memcpy(path + folder_length, name, name_length);
    }
    return path;
}

/* Length of a path's folder with its last slash; 0 where there is none. */
static size_t folder_length(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? 0 : (size_t)(slash - path) + 1;
}

/* What the link `path` points to, as a path: relative to the link's own folder where it
 * is relative.  MLS_OK with NULL where it is no link. */
static mls_code read_link(const char *path, char **out, mls_status *st)
{
    char target[PATH_MAX];
    const ssize_t length = readlink(path, target, sizeof target - 1);
    *out = NULL;
    if (length < 0) {
        /* no link, or nothing there: whoever opens it finds out what is wrong */
        return MLS_OK;
    }
    target[length] = '\0';
    *out = join(path, target[0] == '/' ? 0 : folder_length(path), target);
    return *out != NULL ? MLS_OK : mls_fail(st, MLS_E_MEMORY, "no memory for a path");
}

/* A copy of `path` with the links at its end followed, dangling ones too, as opening it
 * for writing would.  Links among the folders are left to the system.  Gives. */
static mls_code resolve(const char *path, char **out, mls_status *st)
{
    char *here = join(path, 0, path);
    if (here == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a path");
    }
    for (int links = 0; links <= MAX_LINKS; links++) {
        char *next;
        const mls_code code = read_link(here, &next, st);
        if (code == MLS_OK && next == NULL) {
            *out = here;
            return MLS_OK;
        }
        mls_free(here);
        if (code != MLS_OK) {
            return code;
        }
        here = next;
    }
    mls_free(here);
    return mls_fail_os(st, ELOOP, "cannot write the file");
}

/* The folder is held open from here on: the temporary, the rename and the sync all
 * happen in this very folder, even if somebody moves it meanwhile. */
static mls_code open_folder(const char *path, int *out, mls_status *st)
{
    const size_t length = folder_length(path);
    char *folder = length == 0 ? join(".", 1, "") : join(path, length, "");
    if (folder == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a path");
    }
    *out = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int reason = errno;
    mls_free(folder);
    return *out >= 0 ? MLS_OK : mls_fail_os(st, reason, "cannot open the file's folder");
}

/* Examine what is to be replaced.  `*exists` says whether there is anything.  Renaming
 * would replace a file that may not be written as well, but write protection is how
 * people protect a file. */
static mls_code examine_target(const mls_atomic_file *file, struct stat *info,
                               bool *exists, mls_status *st)
{
    if (file->name[0] == '\0') {
        return mls_fail_os(st, EISDIR, "cannot write the file");
    }
    *exists = fstatat(file->folder, file->name, info, AT_SYMLINK_NOFOLLOW) == 0;
    if (!*exists) {
        return errno == ENOENT ? MLS_OK
                               : mls_fail_os(st, errno, "cannot examine the old file");
    }
    if (S_ISDIR(info->st_mode)) {
        return mls_fail_os(st, EISDIR, "cannot write the file");
    }
    if (!S_ISREG(info->st_mode)) {
        return mls_fail(st, MLS_E_VALUE,
                        "only a regular file can be replaced, not a FIFO, socket, "
                        "device or link");
    }
    if (faccessat(file->folder, file->name, W_OK, AT_EACCESS) != 0) {
        return mls_fail_os(st, errno, "the old file may not be replaced");
    }
    return MLS_OK;
}

/* ---- the temporary ---- */

/* A random name nobody can lay a trap under beforehand, and O_EXCL for the case that
 * somebody guesses it all the same.  The mode of a file that is replaced follows
 * (take_after). */
static mls_code open_temporary(mls_atomic_file *file, unsigned mode, mls_status *st)
{
    for (int tries = 0; tries < NAME_TRIES; tries++) {
        uint64_t random;
        if (getentropy(&random, sizeof random) != 0) {
            const int failed = errno;
            file->temporary[0] = '\0'; /* that of the last try is somebody else's file */
            return mls_fail_os(st, failed, "cannot get random bytes");
        }
        snprintf(file->temporary, sizeof file->temporary, ".mlstate-%016llx.tmp",
                 (unsigned long long)random);
        file->fd =
            openat(file->folder, file->temporary,
                   O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, (mode_t)mode);
        if (file->fd >= 0) {
            return MLS_OK;
        }
        if (errno != EEXIST && errno != EINTR) {
            break;
        }
    }
    const int reason = errno;
    file->temporary[0] = '\0';
    return mls_fail_os(st, reason, "cannot create a temporary file beside the target");
}

/* Give the temporary the owner and permissions of the file that it will replace.  Only
 * root may give files away: others keep what they can. */
static mls_code take_after(int fd, const struct stat *old, mls_status *st)
{
    struct stat now;
    if (fstat(fd, &now) == 0 &&
        (now.st_uid != old->st_uid || now.st_gid != old->st_gid) &&
        fchown(fd, old->st_uid, old->st_gid) != 0 && errno != EPERM) {
        return mls_fail_os(st, errno, "cannot keep the old file's owner");
    }
    if (fchmod(fd, old->st_mode & PERMISSION_BITS) != 0) {
        return mls_fail_os(st, errno, "cannot keep the old file's permissions");
    }
    return MLS_OK;
}

/* Everything that can be refused is refused here, before any byte is written.  `file` is
 * one that can be aborted at every step, which is what a failure does with it. */
mls_code mls_atomic_begin(const char *path, unsigned mode, mls_atomic_file *out,
                          mls_status *st)
{
    mls_atomic_file file = {.fd = -1, .folder = -1};
    struct stat old;
    bool exists = false;
    char *resolved = NULL;
    mls_code code = resolve(path, &resolved, st);
    if (code != MLS_OK) {
        goto done;
    }
    code = open_folder(resolved, &file.folder, st);
    if (code != MLS_OK) {
        goto done;
    }
    file.name = join(resolved, 0, resolved + folder_length(resolved));
    if (file.name == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for a path");
        goto done;
    }
    code = examine_target(&file, &old, &exists, st);
    if (code == MLS_OK) {
        code = open_temporary(&file, mode, st);
    }
    if (code == MLS_OK && exists) {
        code = take_after(file.fd, &old, st);
    }
done:
    mls_free(resolved);
    if (code == MLS_OK) {
        *out = file;
    } else {
        mls_atomic_abort(&file);
    }
    return code;
}

/* Send what was written so far on its way to the disk, so that the final sync finds
 * little left to do.  Only a hint. */
static void start_writeback(mls_atomic_file *file, uint64_t end)
{
#    if defined(__linux__)
    if (end >= file->started + START_STEP) {
        (void)sync_file_range(file->fd, (off_t)file->started,
                              (off_t)(end - file->started), SYNC_FILE_RANGE_WRITE);
        file->started = end;
    }
#    else
    (void)file, (void)end;
#    endif
}

/* To the temporary: whoever opens the target meanwhile sees the old file.  After a
 * failure the temporary has any part of the bytes, and is only good for an abort. */
mls_code mls_atomic_write(mls_atomic_file *file, const void *data, size_t bytes,
                          uint64_t offset, mls_status *st)
{
    const mls_code code = mls_file_write_at(file->fd, data, bytes, offset, st);
    if (code == MLS_OK) {
        start_writeback(file, offset + bytes);
    }
    return code;
}

/* ---- commit ----
 *
 * Up to the rename every failure is undone by removing the temporary.  After it nothing
 * can be undone, and nothing needs to be: the new file is whole.
 */

/* Close descriptors and free the name, leaving the temporary where it is. */
static void release(mls_atomic_file *file)
{
    if (file->fd >= 0) {
        (void)close(file->fd);
    }
    if (file->folder >= 0) {
        (void)close(file->folder);
    }
    mls_free(file->name);
    *file = (mls_atomic_file){.fd = -1, .folder = -1};
}

/* Also the way out of every failure, so that no path leaves a temporary behind.  Removing
 * it may fail too; then there is nothing left to try, and the first error is told. */
void mls_atomic_abort(mls_atomic_file *file)
{
    if (file->temporary[0] != '\0') {
        (void)unlinkat(file->folder, file->temporary, 0);
    }
    release(file);
}

/* The order is what makes it safe: the bytes reach the disk before the name points to
 * them, and the name reaches the disk before success is reported.  A close that was
 * interrupted has closed the file all the same, so it counts as done. */
mls_code mls_atomic_commit(mls_atomic_file *file, mls_status *st)
{
    int reason = mls_file_sync(file->fd);
    if (reason != 0) {
        mls_fail_os(st, reason, "cannot bring the file to the disk");
        goto failed;
    }
    reason = close(file->fd) != 0 && errno != EINTR ? errno : 0;
    file->fd = -1;
    if (reason != 0) {
        mls_fail_os(st, reason, "cannot close the file");
        goto failed;
    }
    if (renameat(file->folder, file->temporary, file->folder, file->name) != 0) {
        mls_fail_os(st, errno, "cannot put the new file in the old one's place");
        goto failed;
    }
    reason = mls_folder_sync(file->folder);
    release(file);
    if (reason != 0) {
        return mls_fail_os(st, reason,
                           "the file is replaced, but its new name may not survive a "
                           "power failure: cannot bring the folder to the disk");
    }
    return MLS_OK;
failed:
    mls_atomic_abort(file);
    return st->code;
}

#endif
