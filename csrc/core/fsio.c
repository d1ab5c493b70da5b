#if !defined(_WIN32)

#    include "fsio.h"

#    include "mem.h"
#    include "size.h"

#    include <errno.h>
#    include <fcntl.h>
#    include <sys/stat.h>
#    include <unistd.h>

mls_code mls_file_open(const char *path, int *fd, uint64_t *length, mls_status *st)
{
    struct stat info;
    /* O_NONBLOCK: opening a FIFO that nobody writes to must not wait */
    const int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0) {
        return mls_fail_os(st, errno, "cannot open the file");
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

#endif
