/* The functions that replace the C library's. Each finds out whether its file is below
 * the root, asks shim.c what to do, makes the system call itself, and records the change.
 *
 * Programs built for large files call the names that end in 64. On 64-bit systems, the
 * only ones supported, both forms are the same.
 */
#include "shim.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if !defined(__linux__) || !defined(__LP64__)
#    error "the shim is for 64-bit Linux"
#endif

#define EXPORT __attribute__((visibility("default")))

/* Both names of a function that has the same arguments for small and for large files. */
#define SAME(name, other) EXPORT __typeof__(name) name __attribute__((alias(#other)))

enum { COPY_STEP = 1 << 16 };

/* ---- recording ---- */

static uint64_t inode_of(int fd)
{
    struct stat info;
    return syscall(SYS_newfstatat, fd, "", &info, AT_EMPTY_PATH) == 0 ? info.st_ino : 0;
}

static int flags_of(int fd)
{
    return (int)syscall(SYS_fcntl, fd, F_GETFL);
}

static bool is_folder(int fd)
{
    struct stat info;
    return syscall(SYS_newfstatat, fd, "", &info, AT_EMPTY_PATH) == 0 &&
           S_ISDIR(info.st_mode);
}

/* A change that cannot be replayed must not be overlooked: replay.py rejects such a
 * log. */
static void record_unknown(const mls_step *step, const char *entry_name)
{
    mls_record(step, &(mls_entry){.kind = 'X', .name = entry_name});
}

static void record_sync(const mls_step *step, uint64_t inode)
{
    mls_record(step, &(mls_entry){.kind = 'S', .a = inode});
}

/* Each write to a file opened with O_DSYNC is durable. */
static void record_write(const mls_step *step, int fd, const void *data, long bytes,
                         off64_t offset)
{
    const int before = errno;
    if (bytes > 0 && mls_log() >= 0) {
        const uint64_t inode = inode_of(fd);
        mls_record(step, &(mls_entry){.kind = 'W',
                                      .a = inode,
                                      .number = offset,
                                      .data = data,
                                      .bytes = (size_t)bytes});
        if ((flags_of(fd) & O_DSYNC) != 0) {
            record_sync(step, inode);
        }
    }
    errno = before;
}

/* Record a write whose data we do not hold, by reading them back from the file. */
static void record_written(const mls_step *step, int fd, off64_t offset, long bytes)
{
    const int before = errno;
    char path[40];
    char piece[COPY_STEP];
    if (bytes > 0 && mls_log() >= 0) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        const long again = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
        while (bytes > 0) {
            const long step_bytes = bytes < COPY_STEP ? bytes : COPY_STEP;
            const long got = syscall(SYS_pread64, again, piece, step_bytes, offset);
            if (got <= 0) {
                record_unknown(step, "a write that cannot be read back");
                break;
            }
            record_write(step, fd, piece, got, offset);
            offset += got;
            bytes -= got;
        }
        syscall(SYS_close, again);
    }
    errno = before;
}

static void record_name(const mls_step *step, char kind, const mls_place *place,
                        uint64_t inode)
{
    const int before = errno;
    mls_record(step,
               &(mls_entry){
                   .kind = kind, .a = place->folder_id, .b = inode, .name = place->name});
    errno = before;
}

/* The inode of a name, without following links; 0 if there is none. */
static uint64_t inode_at(int at, const char *path)
{
    struct stat info;
    const int before = errno;
    const bool exists =
        syscall(SYS_newfstatat, at, path, &info, AT_SYMLINK_NOFOLLOW) == 0;
    errno = before;
    return exists ? info.st_ino : 0;
}

/* ---- open and close ---- */

static bool opens_for_writing(int flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) != 0;
}

static mls_call call_to_open(int at, const char *path, int flags)
{
    struct stat info;
    if (opens_for_writing(flags)) {
        return MLS_create;
    }
    const bool exists = syscall(SYS_newfstatat, at, path, &info, 0) == 0;
    return exists && S_ISDIR(info.st_mode) ? MLS_open_folder : MLS_open;
}

static int shim_open(int at, const char *path, int flags, mode_t mode)
{
    mls_place place;
    const bool is_watched = mls_locate(at, path, &place);
    const bool nameless = (flags & O_TMPFILE) == O_TMPFILE;
    const mls_step step =
        mls_enter(is_watched ? call_to_open(at, path, flags) : MLS_open, is_watched);
    long fd = -1;
    if (!mls_refused(&step)) {
        const bool existed = step.holds && inode_at(at, path) != 0;
        fd = syscall(SYS_openat, at, path, flags, mode);
        if (fd >= 0 && step.holds && nameless) {
            record_name(&step, 'C', &(mls_place){.name = ""}, inode_of((int)fd));
        } else if (fd >= 0 && step.holds && !existed) {
            record_name(&step, 'C', &place, inode_of((int)fd));
        } else if (fd >= 0 && step.holds && (flags & O_TRUNC) != 0) {
            mls_record(&step, &(mls_entry){.kind = 'T', .a = inode_of((int)fd)});
        }
    }
    return (int)mls_leave(&step, fd);
}

static mode_t mode_argument(int flags, va_list list)
{
    return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0;
}

EXPORT int open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    const mode_t mode = mode_argument(flags, list);
    va_end(list);
    return shim_open(AT_FDCWD, path, flags, mode);
}

SAME(open64, open);

EXPORT int openat(int at, const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    const mode_t mode = mode_argument(flags, list);
    va_end(list);
    return shim_open(at, path, flags, mode);
}

SAME(openat64, openat);

EXPORT int creat(const char *path, mode_t mode)
{
    return shim_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

/* Programs built with fortified headers call these. */
EXPORT int __open_2(const char *path, int flags)
{
    return shim_open(AT_FDCWD, path, flags, 0);
}

EXPORT int __open64_2(const char *path, int flags) __attribute__((alias("__open_2")));

/* On Linux a descriptor whose close fails is closed all the same, so close first, then
 * fail.
 */
EXPORT int close(int fd)
{
    const bool is_watched = mls_is_watched(fd);
    const bool writes =
        is_watched && (flags_of(fd) & O_ACCMODE) != O_RDONLY && !mls_is_hint(fd);
    const mls_step step = mls_enter(writes ? MLS_close : MLS_close_read, is_watched);
    const long result = syscall(SYS_close, fd);
    const bool failed = mls_refused(&step);
    return (int)mls_leave(&step, failed ? -1 : result);
}

/* ---- read ---- */

EXPORT ssize_t read(int fd, void *data, size_t bytes)
{
    const mls_step step = mls_enter(MLS_read, mls_is_watched(fd));
    return mls_leave(&step, mls_refused(&step) ? -1
                                               : syscall(SYS_read, fd, data,
                                                         mls_shortened(&step, bytes)));
}

EXPORT ssize_t pread64(int fd, void *data, size_t bytes, off64_t offset)
{
    const mls_step step = mls_enter(MLS_pread, mls_is_watched(fd));
    return mls_leave(
        &step, mls_refused(&step)
                   ? -1
                   : syscall(SYS_pread64, fd, data, mls_shortened(&step, bytes), offset));
}

SAME(pread, pread64);

EXPORT ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset)
{
    const mls_step step = mls_enter(MLS_pread, mls_is_watched(fd));
    if (step.how == MLS_SHORT && count > 0) {
        count = 1; /* a short read: only the first part */
    }
    return mls_leave(&step, mls_refused(&step)
                                ? -1
                                : syscall(SYS_preadv, fd, parts, count, offset, 0L));
}

SAME(preadv, preadv64);

/* ---- write ---- */

/* The offset at which a plain write will put its bytes. */
static off64_t position(int fd, const mls_step *step)
{
    if (!step->holds) {
        return 0;
    }
    struct stat info;
    if ((flags_of(fd) & O_APPEND) != 0 &&
        syscall(SYS_newfstatat, fd, "", &info, AT_EMPTY_PATH) == 0) {
        return info.st_size;
    }
    return syscall(SYS_lseek, fd, 0L, SEEK_CUR);
}

EXPORT ssize_t write(int fd, const void *data, size_t bytes)
{
    const mls_step step = mls_enter(MLS_write, mls_is_watched(fd));
    long result = -1;
    if (!mls_refused(&step)) {
        const off64_t offset = position(fd, &step);
        result = syscall(SYS_write, fd, data, mls_shortened(&step, bytes));
        record_write(&step, fd, data, result, offset);
    }
    return mls_leave(&step, result);
}

EXPORT ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset)
{
    const mls_step step = mls_enter(MLS_pwrite, mls_is_watched(fd));
    long result = -1;
    if (!mls_refused(&step)) {
        result = syscall(SYS_pwrite64, fd, data, mls_shortened(&step, bytes), offset);
        record_write(&step, fd, data, result, offset);
    }
    return mls_leave(&step, result);
}

SAME(pwrite, pwrite64);

/* Each part that was written gets its own entry. */
static void record_parts(const mls_step *step, int fd, const struct iovec *parts,
                         int count, long written, off64_t offset)
{
    for (int i = 0; i < count && written > 0; i++) {
        const long left =
            (long)parts[i].iov_len < written ? (long)parts[i].iov_len : written;
        record_write(step, fd, parts[i].iov_base, left, offset);
        written -= left;
        offset += left;
    }
}

/* Write half of a vector's bytes by a plain write, so that short writes also end within a
 * part. */
static long write_half(const struct iovec *parts, int count, int fd, off64_t offset)
{
    size_t total = 0;
    size_t done = 0;
    for (int i = 0; i < count; i++) {
        total += parts[i].iov_len;
    }
    for (int i = 0; i < count && done < total / 2; i++) {
        const size_t left = total / 2 - done;
        const size_t bytes = parts[i].iov_len < left ? parts[i].iov_len : left;
        const long put = offset < 0 ? syscall(SYS_write, fd, parts[i].iov_base, bytes)
                                    : syscall(SYS_pwrite64, fd, parts[i].iov_base, bytes,
                                              offset + (off64_t)done);
        if (put < 0) {
            return done > 0 ? (long)done : -1;
        }
        done += (size_t)put;
    }
    return (long)done;
}

/* A negative offset: at the file position, which moves. */
static ssize_t shim_writev(mls_call call, int fd, const struct iovec *parts, int count,
                           off64_t offset, int flags)
{
    const mls_step step = mls_enter(call, mls_is_watched(fd));
    long result = -1;
    if (!mls_refused(&step)) {
        const off64_t from = offset < 0 ? position(fd, &step) : offset;
        result = step.how == MLS_SHORT || step.how == MLS_KILL_HALF
                     ? write_half(parts, count, fd, offset)
                     : syscall(SYS_pwritev2, fd, parts, count, offset, 0L, flags);
        record_parts(&step, fd, parts, count, result, from);
        if (result > 0 && (flags & (RWF_DSYNC | RWF_SYNC)) != 0 && step.holds) {
            record_sync(&step, inode_of(fd));
        }
    }
    return mls_leave(&step, result);
}

EXPORT ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset)
{
    return shim_writev(MLS_pwrite, fd, parts, count, offset, 0);
}

SAME(pwritev, pwritev64);

EXPORT ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset,
                           int flags)
{
    return shim_writev(MLS_pwrite, fd, parts, count, offset, flags);
}

SAME(pwritev2, pwritev64v2);

EXPORT ssize_t writev(int fd, const struct iovec *parts, int count)
{
    return shim_writev(MLS_write, fd, parts, count, -1, 0);
}

/* Copies within the kernel; they move the file position if no offset is given. */
EXPORT ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset,
                               size_t bytes, unsigned flags)
{
    const mls_step step = mls_enter(MLS_copy, mls_is_watched(out));
    long result = -1;
    if (!mls_refused(&step)) {
        const off64_t to = out_offset != NULL ? *out_offset : position(out, &step);
        result = syscall(SYS_copy_file_range, in, in_offset, out, out_offset,
                         mls_shortened(&step, bytes), flags);
        record_written(&step, out, to, result);
    }
    return mls_leave(&step, result);
}

EXPORT ssize_t sendfile64(int out, int in, off64_t *offset, size_t bytes)
{
    const mls_step step = mls_enter(MLS_copy, mls_is_watched(out));
    long result = -1;
    if (!mls_refused(&step)) {
        const off64_t to = position(out, &step);
        result = syscall(SYS_sendfile, out, in, offset, mls_shortened(&step, bytes));
        record_written(&step, out, to, result);
    }
    return mls_leave(&step, result);
}

SAME(sendfile, sendfile64);

EXPORT int ftruncate64(int fd, off64_t bytes)
{
    const mls_step step = mls_enter(MLS_truncate, mls_is_watched(fd));
    long result = -1;
    if (!mls_refused(&step)) {
        result = syscall(SYS_ftruncate, fd, bytes);
        if (result == 0 && step.holds) {
            mls_record(&step,
                       &(mls_entry){.kind = 'T', .a = inode_of(fd), .number = bytes});
        }
    }
    return (int)mls_leave(&step, result);
}

SAME(ftruncate, ftruncate64);

/* Open the path first: the recorder identifies files by descriptor. */
EXPORT int truncate64(const char *path, off64_t bytes)
{
    const long fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    const int result = ftruncate64((int)fd, bytes);
    const int reason = errno;
    syscall(SYS_close, fd);
    errno = reason;
    return result;
}

SAME(truncate, truncate64);

/* Preallocation: recorded if it extends the file. */
EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t bytes)
{
    const mls_step step = mls_enter(MLS_allocate, mls_is_watched(fd));
    long result = -1;
    if (!mls_refused(&step)) {
        struct stat info = {0};
        result = syscall(SYS_fallocate, fd, mode, offset, bytes);
        if (result == 0 && step.holds && (mode & ~FALLOC_FL_KEEP_SIZE) != 0) {
            record_unknown(&step, "fallocate that changes content");
        } else if (result == 0 && step.holds && mode == 0 &&
                   syscall(SYS_newfstatat, fd, "", &info, AT_EMPTY_PATH) == 0) {
            mls_record(&step, &(mls_entry){
                                  .kind = 'T', .a = info.st_ino, .number = info.st_size});
        }
    }
    return (int)mls_leave(&step, result);
}

SAME(fallocate, fallocate64);

/* Returns the error instead of setting errno. */
EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t bytes)
{
    const int before = errno;
    const int result = fallocate64(fd, 0, offset, bytes) == 0 ? 0 : errno;
    errno = before;
    return result;
}

SAME(posix_fallocate, posix_fallocate64);

/* ---- sync ---- */

/* With MLS_FAULT_SYNC=no nothing is synced: the power does not really fail here; the log
 * tells which states a power failure could leave. */
static int shim_sync(mls_call call, int fd, long number)
{
    const mls_step step = mls_enter(call, mls_is_watched(fd));
    long result = -1;
    if (!mls_refused(&step)) {
        result = step.is_watched && !mls_syncs() ? 0 : syscall(number, fd);
        if (result == 0 && step.holds) {
            record_sync(&step, call == MLS_syncfs ? 0 : inode_of(fd));
        }
    }
    return (int)mls_leave(&step, result);
}

EXPORT int fsync(int fd)
{
    return shim_sync(mls_is_watched(fd) && is_folder(fd) ? MLS_fsync_folder : MLS_fsync,
                     fd, SYS_fsync);
}

EXPORT int fdatasync(int fd)
{
    return shim_sync(MLS_fdatasync, fd, SYS_fdatasync);
}

EXPORT int syncfs(int fd)
{
    return shim_sync(MLS_syncfs, fd, SYS_syncfs);
}

/* A hint without a guarantee, so it is not recorded. */
EXPORT int sync_file_range(int fd, off64_t offset, off64_t bytes, unsigned flags)
{
    const mls_step step = mls_enter(MLS_sync_file_range, mls_is_watched(fd));
    long result = -1;
    if (!mls_refused(&step)) {
        result = syscall(SYS_sync_file_range, fd, offset, bytes, flags);
    }
    return (int)mls_leave(&step, result);
}

/* ---- names ---- */

static long system_call(long number, const long values[6])
{
    static long (*real)(long number, ...);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    }
    return real(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

EXPORT int renameat2(int from_at, const char *from, int to_at, const char *to,
                     unsigned flags)
{
    mls_place source;
    mls_place target;
    const bool from_ours = mls_locate(from_at, from, &source);
    const bool to_ours = mls_locate(to_at, to, &target);
    const mls_step step = mls_enter(MLS_rename, from_ours || to_ours);
    long result = -1;
    if (!mls_refused(&step)) {
        result = system_call(SYS_renameat2, (const long[]){from_at, (long)from, to_at,
                                                           (long)to, (long)flags, 0});
        if (result == 0 && step.holds && from_ours && to_ours) {
            const bool swaps = (flags & RENAME_EXCHANGE) != 0;
            mls_record(&step, &(mls_entry){.kind = swaps ? 'E' : 'R',
                                           .a = source.folder_id,
                                           .b = target.folder_id,
                                           .name = source.name,
                                           .other = target.name});
        } else if (result == 0 && step.holds) {
            record_unknown(&step, "rename that crosses the root");
        }
    }
    return (int)mls_leave(&step, result);
}

/* The core makes this call by its number, because some C libraries lack the function. */
EXPORT long syscall(long number, ...)
{
    long values[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) {
        values[i] = va_arg(list, long);
    }
    va_end(list);
    if (number == SYS_renameat2) {
        return renameat2((int)values[0], (const char *)values[1], (int)values[2],
                         (const char *)values[3], (unsigned)values[4]);
    }
    return system_call(number, values);
}

EXPORT int renameat(int from_at, const char *from, int to_at, const char *to)
{
    return renameat2(from_at, from, to_at, to, 0);
}

EXPORT int rename(const char *from, const char *to)
{
    return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0);
}

EXPORT int unlinkat(int at, const char *path, int flags)
{
    mls_place place;
    const bool is_watched = mls_locate(at, path, &place);
    const mls_step step =
        mls_enter((flags & AT_REMOVEDIR) != 0 ? MLS_rmdir : MLS_unlink, is_watched);
    long result = -1;
    if (!mls_refused(&step)) {
        result = syscall(SYS_unlinkat, at, path, flags);
        if (result == 0 && step.holds) {
            record_name(&step, 'D', &place, 0);
        }
    }
    return (int)mls_leave(&step, result);
}

EXPORT int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

EXPORT int rmdir(const char *path)
{
    return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

EXPORT int mkdirat(int at, const char *path, mode_t mode)
{
    mls_place place;
    const bool is_watched = mls_locate(at, path, &place);
    const mls_step step = mls_enter(MLS_mkdir, is_watched);
    long result = -1;
    if (!mls_refused(&step)) {
        result = syscall(SYS_mkdirat, at, path, mode);
        if (result == 0 && step.holds) {
            record_name(&step, 'M', &place, inode_at(at, path));
        }
    }
    return (int)mls_leave(&step, result);
}

EXPORT int mkdir(const char *path, mode_t mode)
{
    return mkdirat(AT_FDCWD, path, mode);
}

/* Adds a name to a file, or gives the first name to one opened with O_TMPFILE. */
EXPORT int linkat(int from_at, const char *from, int to_at, const char *to, int flags)
{
    mls_place place;
    const bool is_watched = mls_locate(to_at, to, &place);
    const mls_step step = mls_enter(MLS_link, is_watched);
    long result = -1;
    if (!mls_refused(&step)) {
        result = syscall(SYS_linkat, from_at, from, to_at, to, flags);
        if (result == 0 && step.holds) {
            record_name(&step, 'L', &place, inode_at(to_at, to));
        }
    }
    return (int)mls_leave(&step, result);
}

EXPORT int link(const char *from, const char *to)
{
    return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

EXPORT int symlinkat(const char *content, int at, const char *path)
{
    mls_place place;
    const bool is_watched = mls_locate(at, path, &place);
    const mls_step step = mls_enter(MLS_symlink, is_watched);
    long result = -1;
    if (!mls_refused(&step)) {
        result = syscall(SYS_symlinkat, content, at, path);
        if (result == 0 && step.holds) {
            record_unknown(&step, "symlink");
        }
    }
    return (int)mls_leave(&step, result);
}

EXPORT int symlink(const char *content, const char *path)
{
    return symlinkat(content, AT_FDCWD, path);
}

/* ---- calls that are not recorded: permissions, mappings, queries, locks ---- */

EXPORT int fchmod(int fd, mode_t mode)
{
    const mls_step step = mls_enter(MLS_mode, mls_is_watched(fd));
    return (int)mls_leave(&step, mls_refused(&step) ? -1 : syscall(SYS_fchmod, fd, mode));
}

EXPORT int fchown(int fd, uid_t owner, gid_t group)
{
    const mls_step step = mls_enter(MLS_mode, mls_is_watched(fd));
    return (int)mls_leave(
        &step, mls_refused(&step) ? -1 : syscall(SYS_fchown, fd, owner, group));
}

/* Writes through a shared mapping would bypass the recorder. */
EXPORT void *mmap64(void *where, size_t bytes, int access, int flags, int fd,
                    off64_t offset)
{
    const bool is_watched = (flags & MAP_ANONYMOUS) == 0 && mls_is_watched(fd);
    const mls_step step = mls_enter(MLS_mmap, is_watched);
    if (mls_refused(&step)) {
        return MAP_FAILED;
    }
    void *data = (void *)syscall(SYS_mmap, where, bytes, access, flags, fd, offset);
    if (is_watched && data != MAP_FAILED && (access & PROT_WRITE) != 0 &&
        (flags & MAP_TYPE) != MAP_PRIVATE) {
        record_unknown(&step, "mapping that writes to a file");
    }
    (void)mls_leave(&step, 0);
    return data;
}

SAME(mmap, mmap64);

static int shim_stat(int at, const char *path, void *info, int flags)
{
    mls_place place;
    const bool is_watched = (flags & AT_EMPTY_PATH) != 0 && path[0] == '\0'
                                ? mls_is_watched(at)
                                : mls_locate(at, path, &place);
    const mls_step step = mls_enter(MLS_stat, is_watched);
    return (int)mls_leave(
        &step, mls_refused(&step) ? -1 : syscall(SYS_newfstatat, at, path, info, flags));
}

EXPORT int fstatat(int at, const char *path, struct stat *info, int flags)
{
    return shim_stat(at, path, info, flags);
}

EXPORT int fstatat64(int at, const char *path, struct stat64 *info, int flags)
{
    return shim_stat(at, path, info, flags);
}

EXPORT int fstat(int fd, struct stat *info)
{
    return shim_stat(fd, "", info, AT_EMPTY_PATH);
}

EXPORT int fstat64(int fd, struct stat64 *info)
{
    return shim_stat(fd, "", info, AT_EMPTY_PATH);
}

EXPORT int stat(const char *path, struct stat *info)
{
    return shim_stat(AT_FDCWD, path, info, 0);
}

EXPORT int stat64(const char *path, struct stat64 *info)
{
    return shim_stat(AT_FDCWD, path, info, 0);
}

EXPORT int lstat(const char *path, struct stat *info)
{
    return shim_stat(AT_FDCWD, path, info, AT_SYMLINK_NOFOLLOW);
}

EXPORT int lstat64(const char *path, struct stat64 *info)
{
    return shim_stat(AT_FDCWD, path, info, AT_SYMLINK_NOFOLLOW);
}

EXPORT int flock(int fd, int operation)
{
    const bool unlocks = (operation & LOCK_UN) != 0;
    const mls_step step = mls_enter(unlocks ? MLS_unlock : MLS_flock, mls_is_watched(fd));
    return (int)mls_leave(&step,
                          mls_refused(&step) ? -1 : syscall(SYS_flock, fd, operation));
}

/* Descriptor flags and locks of another kind. Commands that duplicate descriptors or only
 * query are passed through. */
EXPORT int fcntl(int fd, int command, ...)
{
    const bool acts = command == F_SETFL || command == F_SETLK || command == F_SETLKW ||
                      command == F_OFD_SETLK || command == F_OFD_SETLKW;
    const mls_step step = mls_enter(MLS_fcntl, acts && mls_is_watched(fd));
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    return (int)mls_leave(
        &step, mls_refused(&step) ? -1 : syscall(SYS_fcntl, fd, command, argument));
}

SAME(fcntl64, fcntl);

/* The C library's function of that name. memcpy, because ISO C has no cast from object to
 * function pointers. */
#define NEXT(function, name)                                                             \
    do {                                                                                 \
        void *found_ = dlsym(RTLD_NEXT, name);                                           \
        memcpy(&(function), &found_, sizeof(function));                                  \
    } while (0)

EXPORT DIR *opendir(const char *path)
{
    mls_place place;
    DIR *(*next)(const char *);
    const mls_step step = mls_enter(MLS_list, mls_locate(AT_FDCWD, path, &place));
    DIR *folder = NULL;
    if (!mls_refused(&step)) {
        NEXT(next, "opendir");
        folder = next(path);
    }
    (void)mls_leave(&step, 0);
    return folder;
}

EXPORT DIR *fdopendir(int fd)
{
    DIR *(*next)(int);
    const mls_step step = mls_enter(MLS_list, mls_is_watched(fd));
    DIR *folder = NULL;
    if (!mls_refused(&step)) {
        NEXT(next, "fdopendir");
        folder = next(fd);
    }
    (void)mls_leave(&step, 0);
    return folder;
}

EXPORT struct dirent64 *readdir64(DIR *folder)
{
    struct dirent64 *(*next)(DIR *);
    const mls_step step = mls_enter(MLS_list, mls_is_watched(dirfd(folder)));
    struct dirent64 *entry = NULL;
    if (!mls_refused(&step)) {
        NEXT(next, "readdir64");
        entry = next(folder);
    }
    (void)mls_leave(&step, 0);
    return entry;
}

EXPORT struct dirent *readdir(DIR *folder)
{
    return (struct dirent *)readdir64(folder);
}
