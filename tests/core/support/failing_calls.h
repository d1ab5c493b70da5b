/* failing_calls: calls of the system that fail on request.  Included by one file of a
 * program, which is linked with -Wl,--wrap for each of them (tools/core.mk).
 */
#ifndef MLS_FAILING_CALLS_H
#define MLS_FAILING_CALLS_H

#include "base/status.h"
#include "support/runner.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *failing_call; /* NULL: none fails */
static long calls_left;          /* until one fails with EIO */

static inline bool call_fails(const char *name)
{
    if (failing_call == NULL || strcmp(failing_call, name) != 0 || --calls_left != 0) {
        return false;
    }
    errno = EIO;
    return true;
}

#define FAILING(result, name, parameters, ...)                                           \
    result __real_##name parameters;                                                     \
    result __wrap_##name parameters;                                                     \
    result __wrap_##name parameters                                                      \
    {                                                                                    \
        return call_fails(#name) ? -1 : __real_##name(__VA_ARGS__);                      \
    }

FAILING(int, faccessat, (int folder, const char *name, int mode, int flags), folder, name,
        mode, flags)
FAILING(int, fallocate, (int fd, int mode, off_t offset, off_t bytes), fd, mode, offset,
        bytes)
FAILING(int, fchown, (int fd, uid_t owner, gid_t group), fd, owner, group)
FAILING(int, fsync, (int fd), fd)
FAILING(int, fstat, (int fd, struct stat *info), fd, info)
FAILING(int, fstatat, (int folder, const char *name, struct stat *info, int flags),
        folder, name, info, flags)
FAILING(int, ftruncate, (int fd, off_t bytes), fd, bytes)
FAILING(int, getentropy, (void *out, size_t bytes), out, bytes)
FAILING(ssize_t, pread, (int fd, void *out, size_t bytes, off_t offset), fd, out, bytes,
        offset)
FAILING(int, renameat, (int from, const char *old, int to, const char *name), from, old,
        to, name)

int __real_close(int fd);
int __wrap_close(int fd);
int __real_openat(int folder, const char *name, int flags, ...);
int __wrap_openat(int folder, const char *name, int flags, ...);

int __wrap_close(int fd) /* a descriptor is closed also if the call fails */
{
    const int closed = __real_close(fd);
    return call_fails("close") ? -1 : closed;
}

int __wrap_openat(int folder, const char *name, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return call_fails("openat") ? -1 : __real_openat(folder, name, flags, mode);
}

/* Run `job` with the n-th call `name` failing, for n = 1, 2, ... until none fails. Every
 * failure is reported or harmless; one is reported by this whole text. */
static inline void check_call(const char *name, mls_code (*job)(mls_status *st),
                              const char *text)
{
    bool is_reported = false, has_failed = true;
    char expected[2 * MLS_TEXT_BYTES];
    snprintf(expected, sizeof expected, "%s: %s", text, strerror(EIO));
    for (long n = 1; has_failed; n++) {
        mls_status st = {0};
        failing_call = name;
        calls_left = n;
        const mls_code code = job(&st);
        failing_call = NULL;
        has_failed = calls_left <= 0;
        CHECK(code == MLS_OK || (has_failed && code == MLS_E_IO && st.os_error == EIO));
        is_reported = is_reported || strcmp(st.text, expected) == 0;
    }
    if (!is_reported) {
        printf("    a failing %s is not reported by \"%s\"\n", name, expected);
    }
    CHECK(is_reported);
}

#endif
