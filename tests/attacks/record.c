/* The recorder: appends entries to one file, each by one write, under a lock that other
 * processes see as well.  A killed process leaves complete entries; replay.py drops a
 * truncated last one.
 *
 * It makes system calls directly, so that it does not record itself.
 */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;

/* A recording with gaps would prove nothing, so the process ends. */
static void give_up(const char *label)
{
    fprintf(stderr, "shim: %s: %s\n", label, strerror(errno));
    abort();
}

int mls_record_open(const char *path)
{
    if (path == NULL || path[0] == '\0') {
        return -1;
    }
    const long log = syscall(SYS_openat, AT_FDCWD, path,
                             O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0) {
        give_up(path);
    }
    return (int)log;
}

/* flock alone does not exclude threads of one process, because they share the
 * descriptor. */
void mls_record_lock(int log)
{
    if (log >= 0) {
        pthread_mutex_lock(&threads);
        while (syscall(SYS_flock, log, LOCK_EX) != 0) {
            if (errno != EINTR) {
                give_up("cannot lock the log");
            }
        }
    }
}

void mls_record_unlock(int log)
{
    if (log >= 0) {
        syscall(SYS_flock, log, LOCK_UN);
        pthread_mutex_unlock(&threads);
    }
}

/* A line of numbers, then names and data, whose lengths are in the line. */
void mls_record(const mls_step *step, const mls_entry *entry)
{
    const int log = mls_log();
    if (log < 0 || !step->is_watched) {
        return;
    }
    char line[160];
    const char *name = entry->name != NULL ? entry->name : "";
    const char *other = entry->other != NULL ? entry->other : "";
    const int length =
        snprintf(line, sizeof line, "%c %llu %llu %lld %zu %zu %zu\n", entry->kind,
                 (unsigned long long)entry->a, (unsigned long long)entry->b,
                 (long long)entry->number, strlen(name), strlen(other), entry->bytes);
    const struct iovec parts[] = {
        {.iov_base = line, .iov_len = (size_t)length},
        {.iov_base = (void *)(uintptr_t)name, .iov_len = strlen(name)},
        {.iov_base = (void *)(uintptr_t)other, .iov_len = strlen(other)},
        {.iov_base = (void *)(uintptr_t)entry->data, .iov_len = entry->bytes},
    };
    const size_t total =
        parts[0].iov_len + parts[1].iov_len + parts[2].iov_len + entry->bytes;
    if (syscall(SYS_writev, log, parts, 4) != (long)total) {
        give_up("cannot write to the log");
    }
}
