/* file: opens, reads, maps and syncs files; replaces one atomically, with its owner,
 * permissions and links.
 *
 * Files are examined after they are opened. Replacing a file takes these steps: resolve
 * links, keep the folder open, write a temporary in it, sync, rename, sync the folder.
 * The test suite makes every call fail that can fail.
 *
 * Each step of a commit prevents one state after a power failure. Without the first sync:
 * the new name with some or none of its bytes. Without the rename: a mix of both files.
 * Without the last sync: the old file although success was reported.
 */
#include "io/file.h"

#include "base/memory.h"
#include "base/size.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__APPLE__)
#    include <sys/random.h>
#elif defined(__linux__)
#    include <sys/syscall.h>
#endif

/* Flags for reading. O_NONBLOCK: opening a FIFO without a writer must not wait. */
enum { READ_FLAGS = O_RDONLY | O_CLOEXEC | O_NONBLOCK };

static mls_code fail_not_regular(mls_status *st)
{
    mls_fail(st, MLS_E_FORMAT, "not a regular file but a FIFO, socket or device");
    return mls_status_expected(st, "a regular file");
}

/* Accept the descriptor `opened` only if it is of a regular file, and set `*fd` to it and
 * `*length` to the file's size in bytes. Examines the opened file instead of the path,
 * which could name another file by now. `opened` is negative if opening failed with the
 * errno `reason`. On failure `opened` is closed and the outputs are untouched. */
static mls_code examine_opened(int opened, int reason, int *fd, uint64_t *length,
                               mls_status *st)
{
    struct stat info;
    if (opened < 0 && reason == ENXIO) { /* of a socket */
        return fail_not_regular(st);
    }
    if (opened < 0) {
        return mls_fail_os(st, reason, "cannot open the file");
    }
    if (fstat(opened, &info) != 0) {
        mls_fail_os(st, errno, "cannot examine the file");
    } else if (S_ISDIR(info.st_mode)) {
        mls_fail_os(st, EISDIR, "cannot read the file");
    } else if (!S_ISREG(info.st_mode) || info.st_size < 0) {
        fail_not_regular(st);
    } else {
        *fd = opened;
        *length = (uint64_t)info.st_size;
        return MLS_OK;
    }
    (void)close(opened);
    return st->code;
}

/* Follows links: the user chose the path. */
mls_code mls_file_open(const char *path, int *fd, uint64_t *length, mls_status *st)
{
    const int opened = open(path, READ_FLAGS);
    return examine_opened(opened, errno, fd, length, st);
}

/* Open a regular file in an open folder for reading. Without `follow_links`, a link is
 * refused because the folder, which mlstate made, may contain files of others, and a link
 * could point out of it. */
mls_code mls_file_open_at(int folder, const char *path, bool follow_links, int *fd,
                          uint64_t *length, mls_status *st)
{
    const int opened = openat(folder, path, READ_FLAGS | (follow_links ? 0 : O_NOFOLLOW));
    if (opened < 0 && errno == ELOOP && !follow_links) {
        mls_fail(st, MLS_E_FORMAT, "not a regular file but a symbolic link");
        return mls_status_expected(st, "a regular file");
    }
    return examine_opened(opened, errno, fd, length, st);
}

/* Check that a path is a regular file of `bytes` bytes. Compare type and size without
 * opening the file. Only saves work and memory for a file that cannot be right: the file
 * is examined again when it is opened. */
mls_code mls_file_expect(int folder, const char *path, bool follow_links, uint64_t bytes,
                         mls_status *st)
{
    struct stat info;
    if (fstatat(folder, path, &info, follow_links ? 0 : AT_SYMLINK_NOFOLLOW) != 0) {
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

/* Fail with MLS_E_FORMAT because the `missing` bytes from `offset` on do not exist. */
static mls_code fail_shorter(uint64_t offset, size_t missing, mls_status *st)
{
    return mls_fail_at(st, offset,
                       "the file became shorter while it was read: "
                       "%zu bytes are missing",
                       missing);
}

/* Read exactly `bytes` bytes at `offset`. pread does not use the descriptor's position,
 * so threads may share a descriptor. */
mls_code mls_file_read_at(int fd, void *data, size_t bytes, uint64_t offset,
                          mls_status *st)
{
    unsigned char *to = data;
    while (bytes > 0) {
        /* one call transfers at most 2 GiB on Linux and fails above that on macOS */
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
            return fail_shorter(offset, bytes, st);
        }
        to += got;
        bytes -= (size_t)got;
        offset += (uint64_t)got;
    }
    return MLS_OK;
}

/* Return the range that contains byte `offset`, or NULL. Compare the ranges one by one,
 * since they are few. A range may be in memory only in part: the caller compares with its
 * `bytes`. */
const mls_file_range *mls_source_range(const mls_source *source, uint64_t offset)
{
    for (size_t i = 0; i < source->range_count; i++) {
        const mls_file_range *range = &source->ranges[i];
        if (range->begin <= offset && offset < range->end &&
            strcmp(range->file, source->file) == 0) {
            return range;
        }
    }
    return NULL;
}

/* Read from the file or from the ranges of a source. Copy from range to range until
 * `bytes` bytes are complete: one read may need several adjacent ranges. */
mls_code mls_source_read_at(const mls_source *source, void *data, size_t bytes,
                            uint64_t offset, mls_status *st)
{
    unsigned char *to = data;
    if (source->ranges == NULL) {
        return mls_file_read_at(source->fd, data, bytes, offset, st);
    }
    while (bytes > 0) {
        const mls_file_range *range = mls_source_range(source, offset);
        const uint64_t start = range == NULL ? 0 : offset - range->begin;
        if (range == NULL || start >= range->bytes) {
            return fail_shorter(offset, bytes, st);
        }
        const size_t left = range->bytes - (size_t)start;
        const size_t step = bytes < left ? bytes : left;
        memcpy(to, range->data + start, step);
        to += step;
        bytes -= step;
        offset += step;
    }
    return MLS_OK;
}

/* Write exactly `bytes` bytes at `offset`. A write of 0 bytes is an error: some file
 * systems return 0 when they are full, and retrying would never end. */
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

/* Make a file or folder durable; returns 0 or errno. On macOS fsync leaves bytes in the
 * drive's cache; F_FULLFSYNC flushes it, if the file system supports that. */
int mls_file_sync(int fd)
{
    int result;
#if defined(F_FULLFSYNC)
    if (fcntl(fd, F_FULLFSYNC) == 0) {
        return 0;
    }
#endif
    do {
        result = fsync(fd);
    } while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

/* EINVAL and ENOTSUP: the file system cannot sync folders. */
int mls_folder_sync(int fd)
{
    const int reason = mls_file_sync(fd);
    return reason == EINVAL || reason == ENOTSUP ? 0 : reason;
}

/* ---- renaming without replacing ---- */

/* Rename `from` to `to` with the flag of `mode`: replace nothing, or exchange both.
 * Returns 0, or -1 with errno. Uses the number of the system call, because the C
 * libraries of older systems have no function for it, and the numbers of the flags,
 * because not every system with the call has their names (<linux/fs.h>). */
static int rename_by_mode(const char *from, const char *to, mls_rename_mode mode)
{
#if defined(__APPLE__)
    return renamex_np(from, to, mode == MLS_RENAME_NEW ? RENAME_EXCL : RENAME_SWAP);
#elif defined(SYS_renameat2)
    const unsigned flag = mode == MLS_RENAME_NEW ? 1U : 2U;
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flag);
#else
    (void)from;
    (void)to;
    (void)mode;
    errno = ENOTSUP;
    return -1;
#endif
}

/* Look a path up, without following a link as its last name. */
bool mls_path_exists(const char *path)
{
    struct stat facts;
    return lstat(path, &facts) == 0 ||
           (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG);
}

/* Rename without replacing anything; returns 0 or errno. Report all errors of a missing
 * operation as ENOTSUP. */
int mls_path_rename(const char *from, const char *to, mls_rename_mode mode)
{
    if (rename_by_mode(from, to, mode) == 0) {
        return 0;
    }
    /* EINVAL: this file system lacks it; ENOSYS: this system, or a filter of its calls */
    return errno == EINVAL || errno == ENOSYS ? ENOTSUP : errno;
}

/* ---- mappings: to read a part of a large file, or to share its pages ---- */

/* Map `length` bytes of a file and return their address, or MAP_FAILED with errno. The
 * mapping is private, so that a write (torch has no read-only tensors) changes a copy of
 * the page, and neither changes the file nor ends the process. Unwritten pages belong to
 * the system's cache and reserve no memory. If the system refuses such a mapping, a
 * read-only one is used. */
static void *map_private(size_t length, int fd)
{
    void *data =
        mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    return data != MAP_FAILED ? data : mmap(NULL, length, PROT_READ, MAP_SHARED, fd, 0);
}

/* Map the first `bytes` bytes of a file. An empty file has no mapping, because mmap
 * refuses a length of 0. */
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

/* Map a file that must have `bytes` bytes. Open, compare the length, map, and close the
 * descriptor, which a mapping does not need. */
mls_code mls_mapping_init_at(mls_mapping *out, int folder, const char *path,
                             bool follow_links, uint64_t bytes, mls_status *st)
{
    int fd;
    uint64_t length;
    mls_code code = mls_file_open_at(folder, path, follow_links, &fd, &length, st);
    if (code != MLS_OK) {
        return code;
    }
    code = length == bytes
               ? mls_mapping_init(out, fd, length, st)
               : mls_fail_at(st, length, "the file's length changed meanwhile");
    (void)close(fd);
    return code;
}

/* End a mapping. No array over the mapping may exist any more: accessing one afterwards
 * crashes the process. */
void mls_mapping_fini(mls_mapping *mapping)
{
    if (mapping->data != NULL) {
        /* munmap takes a pointer without const */
        (void)munmap((void *)(uintptr_t)mapping->data, mapping->bytes);
    }
    *mapping = (mls_mapping){0};
}

/* ---- the target: folder and name, links resolved ----
 *
 * A link is followed because a program that opens the path for writing would follow it:
 * users create links to keep large files on another disk. */

enum {
    MAX_LINKS = 40,       /* the limit of Linux */
    NAME_TRIES = 16,      /* a random name that exists is a bug or an attack */
    START_STEP = 8 << 20, /* bytes written before their writeback starts */
    PERMISSION_BITS =
        0777 /* permission bits without set-user-id, set-group-id and sticky bit */
};

/* Return the first `folder_length` bytes of `folder` followed by `name` as a new string,
 * or NULL if memory runs out. The caller frees it. */
static char *join_path(const char *folder, size_t folder_length, const char *name)
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

/* Return the length of the folder in `path`, with its last slash; 0 without a slash. */
static size_t folder_length(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? 0 : (size_t)(slash - path) + 1;
}

/* Set `*out` to the target of the link `path` as a new path, or to NULL if `path` is not
 * a link. A relative target is relative to the link's folder. The caller frees `*out`.
 * MLS_E_MEMORY. */
static mls_code read_link(const char *path, char **out, mls_status *st)
{
    char target[PATH_MAX];
    const ssize_t length = readlink(path, target, sizeof target - 1);
    *out = NULL;
    if (length < 0) {
        /* not a link, or missing: opening it later reports the error */
        return MLS_OK;
    }
    target[length] = '\0';
    *out = join_path(path, target[0] == '/' ? 0 : folder_length(path), target);
    return *out != NULL ? MLS_OK : mls_fail(st, MLS_E_MEMORY, "no memory for a path");
}

/* Set `*out` to a copy of `path` with the links at its end followed, as opening it for
 * writing would; dangling links too. The system follows links among the folders. The
 * caller frees `*out`.
 * MLS_E_IO: more than MAX_LINKS links. MLS_E_MEMORY. */
static mls_code resolve_links(const char *path, char **out, mls_status *st)
{
    char *current = join_path(path, 0, path);
    if (current == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a path");
    }
    for (int links = 0; links <= MAX_LINKS; links++) {
        char *next;
        const mls_code code = read_link(current, &next, st);
        if (code == MLS_OK && next == NULL) {
            *out = current;
            return MLS_OK;
        }
        mls_free(current);
        if (code != MLS_OK) {
            return code;
        }
        current = next;
    }
    mls_free(current);
    return mls_fail_os(st, ELOOP, "cannot write the file");
}

/* Open the folder that contains `path`; the caller closes `*out`. The folder stays open
 * from here on, so the temporary, the rename and the sync use the same folder even if
 * another process moves it. MLS_E_IO, MLS_E_MEMORY. */
static mls_code open_folder(const char *path, int *out, mls_status *st)
{
    const size_t length = folder_length(path);
    char *folder = length == 0 ? join_path(".", 1, "") : join_path(path, length, "");
    if (folder == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a path");
    }
    *out = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int reason = errno;
    mls_free(folder);
    return *out >= 0 ? MLS_OK : mls_fail_os(st, reason, "cannot open the file's folder");
}

/* Check that the file to be replaced is regular and writable. Sets `*exists` to whether
 * it exists, and fills `info` then. Renaming would also replace a file without write
 * permission, but users protect files by that. MLS_E_IO, MLS_E_VALUE. */
static mls_code examine_target(const mls_atomic_file *file, struct stat *info,
                               bool *exists, mls_status *st)
{
    if (file->name[0] == '\0') { /* the path ends with a slash */
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

/* Create the temporary file in the open folder, and set the descriptor and the name in
 * `file`; after a failure the name is empty. A random name prevents an attack with a
 * prepared file; O_EXCL covers a guessed name. `mode` has the permission bits of a new
 * file; copy_owner_and_mode later sets the bits of a replaced file. */
static mls_code open_temporary(mls_atomic_file *file, unsigned mode, mls_status *st)
{
    for (int tries = 0; tries < NAME_TRIES; tries++) {
        uint64_t random;
        if (getentropy(&random, sizeof random) != 0) {
            const int failed = errno;
            file->temporary[0] =
                '\0'; /* the name of the last try belongs to another process's file */
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
    return mls_fail_os(st, reason,
                       "cannot create a temporary file in the folder of the target");
}

/* Give the temporary `fd` the owner and the permissions of `old`, the file that it
 * replaces. Only root may change the owner, so being refused that (EPERM) is not an
 * error. */
static mls_code copy_owner_and_mode(int fd, const struct stat *old, mls_status *st)
{
    struct stat now;
    if (fstat(fd, &now) == 0 &&
        (now.st_uid != old->st_uid || now.st_gid != old->st_gid) &&
        fchown(fd, old->st_uid, old->st_gid) != 0 && errno != EPERM) {
        return mls_fail_os(st, errno, "cannot keep the old file's owner");
    }
    if (fchmod(fd, old->st_mode & PERMISSION_BITS) == 0) {
        return MLS_OK;
    }
    const int reason = errno;
    /* file systems without permissions refuse every change, also one to the same mode */
    const bool is_refused = reason == EPERM || reason == ENOTSUP;
    if (is_refused && fstat(fd, &now) == 0 &&
        ((now.st_mode ^ old->st_mode) & PERMISSION_BITS) == 0) {
        return MLS_OK;
    }
    return mls_fail_os(st, reason, "cannot keep the old file's permissions");
}

/* Examine the target `name` in the open folder of `file`, and create the temporary for
 * it, with the owner and permissions of an existing target. On failure the caller aborts
 * `file`. `mode` as in mls_atomic_begin. MLS_E_MEMORY: the caller had no memory for the
 * name, which is NULL. MLS_E_IO, MLS_E_VALUE: as for mls_atomic_begin. */
static mls_code begin_named(mls_atomic_file *file, unsigned mode, mls_status *st)
{
    struct stat old;
    bool exists = false;
    if (file->name == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a path");
    }
    mls_code code = examine_target(file, &old, &exists, st);
    if (code == MLS_OK) {
        code = open_temporary(file, mode, st);
    }
    return code == MLS_OK && exists ? copy_owner_and_mode(file->fd, &old, st) : code;
}

/* Begin to replace the file `path`. All refusals happen here, before any byte is written.
 * `file` can be aborted after every step, and a failure does so. */
mls_code mls_atomic_begin(const char *path, unsigned mode, mls_atomic_file *out,
                          mls_status *st)
{
    mls_atomic_file file = {.fd = -1, .folder = -1};
    char *resolved = NULL;
    mls_code code = resolve_links(path, &resolved, st);
    if (code == MLS_OK) {
        code = open_folder(resolved, &file.folder, st);
    }
    if (code == MLS_OK) {
        file.name = join_path(resolved, 0, resolved + folder_length(resolved));
        code = begin_named(&file, mode, st);
    }
    mls_free(resolved);
    if (code == MLS_OK) {
        *out = file;
    } else {
        mls_atomic_abort(&file);
    }
    return code;
}

/* Begin to replace a file in an open folder. The folder is opened again, so that `out`
 * owns a descriptor that its end closes. */
mls_code mls_atomic_begin_at(int folder, const char *name, unsigned mode,
                             mls_atomic_file *out, mls_status *st)
{
    mls_atomic_file file = {.fd = -1, .name = join_path(name, 0, name)};
    file.folder = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const mls_code code = file.folder < 0
                              ? mls_fail_os(st, errno, "cannot open the file's folder")
                              : begin_named(&file, mode, st);
    if (code == MLS_OK) {
        *out = file;
    } else {
        mls_atomic_abort(&file);
    }
    return code;
}

/* Return whether a name is a temporary's. Compare with the start, 16 hexadecimal digits,
 * and the end of such a name. `strnlen` keeps a short name from being read beyond its
 * NUL. */
bool mls_atomic_is_temporary(const char *name)
{
    static const char begin[] = ".mlstate-", end[] = ".tmp";
    const size_t digits =
        strspn(name + strnlen(name, sizeof begin - 1), "0123456789abcdef");
    return strncmp(name, begin, sizeof begin - 1) == 0 && digits == 16 &&
           strcmp(name + sizeof begin - 1 + digits, end) == 0;
}

/* Start to write new bytes to the disk, once they are at least START_STEP. Does nothing
 * on systems without sync_file_range, and ignores its errors: the sync reports them. */
void mls_file_start_writeback(int fd, uint64_t *started, uint64_t end)
{
#if defined(__linux__)
    if (end >= *started + START_STEP) {
        (void)sync_file_range(fd, (off_t)*started, (off_t)(end - *started),
                              SYNC_FILE_RANGE_WRITE);
        *started = end;
    }
#else
    (void)fd, (void)started, (void)end;
#endif
}

/* Writes to the temporary: other processes still see the old file. After a failure the
 * temporary has an unknown number of the bytes and can only be aborted. */
mls_code mls_atomic_write(mls_atomic_file *file, const void *data, size_t bytes,
                          uint64_t offset, mls_status *st)
{
    const mls_code code = mls_file_write_at(file->fd, data, bytes, offset, st);
    if (code == MLS_OK) {
        mls_file_start_writeback(file->fd, &file->started, offset + bytes);
    }
    return code;
}

/* ---- commit ----
 *
 * A failure up to the rename is undone by removing the temporary. After the rename the
 * new file is complete, so nothing needs to be undone. */

/* Close descriptors and free the name; the temporary stays. */
static void release_file(mls_atomic_file *file)
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

/* Every failure ends here, so no temporary is left behind. If removing it fails too, the
 * first error is reported. */
void mls_atomic_abort(mls_atomic_file *file)
{
    if (file->temporary[0] != '\0') {
        (void)unlinkat(file->folder, file->temporary, 0);
    }
    release_file(file);
}

/* Replace the old file by the temporary, durably. The order makes the commit safe: the
 * bytes are on the disk before the name refers to them, and the name is on the disk
 * before success is reported. An interrupted close has closed the file, so it counts as
 * done. */
mls_code mls_atomic_commit(mls_atomic_file *file, mls_status *st)
{
    int reason = mls_file_sync(file->fd);
    if (reason != 0) {
        mls_fail_os(st, reason, "cannot sync the file to disk");
        goto failed;
    }
    reason = close(file->fd) != 0 && errno != EINTR ? errno : 0;
    file->fd = -1;
    if (reason != 0) {
        mls_fail_os(st, reason, "cannot close the file");
        goto failed;
    }
    if (renameat(file->folder, file->temporary, file->folder, file->name) != 0) {
        mls_fail_os(st, errno, "cannot rename the new file over the old one");
        goto failed;
    }
    reason = mls_folder_sync(file->folder);
    release_file(file);
    if (reason != 0) {
        return mls_fail_os(st, reason,
                           "the file is replaced, but its new name may not survive a "
                           "power failure: cannot sync the folder to disk");
    }
    return MLS_OK;
failed:
    mls_atomic_abort(file);
    return st->code;
}

/* Write all of `data` to a file that has begun, and commit it; abort it if writing
 * fails. */
static mls_code write_whole(mls_atomic_file *file, const void *data, size_t bytes,
                            mls_status *st)
{
    const mls_code code = mls_atomic_write(file, data, bytes, 0, st);
    if (code != MLS_OK) {
        mls_atomic_abort(file);
        return code;
    }
    return mls_atomic_commit(file, st);
}

/* Replace a file by `bytes` bytes in one call: begin, write, commit. */
mls_code mls_file_replace(const char *path, unsigned mode, const void *data, size_t bytes,
                          mls_status *st)
{
    mls_atomic_file file;
    const mls_code code = mls_atomic_begin(path, mode, &file, st);
    return code == MLS_OK ? write_whole(&file, data, bytes, st) : code;
}

mls_code mls_file_replace_at(int folder, const char *name, unsigned mode,
                             const void *data, size_t bytes, mls_status *st)
{
    mls_atomic_file file;
    const mls_code code = mls_atomic_begin_at(folder, name, mode, &file, st);
    return code == MLS_OK ? write_whole(&file, data, bytes, st) : code;
}
