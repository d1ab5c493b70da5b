/* Decides what happens to each call: settings, counters, and the location of a path or
 * descriptor.
 *
 * There is one preloaded library a process, so its state is static, unlike all of csrc.
 * No function here may call one that calls.c replaces.
 */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { NO_CALL = -1, EVERY_CHANGE = -2 };

static struct {
    atomic_bool armed;
    char root[PATH_MAX];
    size_t root_length;
    int call; /* an mls_call, NO_CALL or EVERY_CHANGE */
    long at;
    bool onward;
    bool syncs;
    mls_how how;
    int error;
    char hint[NAME_MAX + 1];
    int log;
    char log_path[PATH_MAX];
    pid_t owner; /* the process that opened the log: a child opens its own */
    atomic_long counts[MLS_CALL_COUNT];
    atomic_long changes;
    atomic_long hits;
} shim = {.call = NO_CALL, .log = -1};

#define NAME_AND_CHANGE(name, changes) {#name, changes},
static const struct {
    const char *name;
    bool changes;
} calls[] = {MLS_CALLS(NAME_AND_CHANGE)};

#define ERROR(name) {#name, name}
static const struct {
    const char *name;
    int number;
} errors[] = {
    ERROR(EACCES), ERROR(EBADF),   ERROR(EDQUOT), ERROR(EINTR),
    ERROR(EINVAL), ERROR(EIO),     ERROR(EAGAIN), ERROR(EMFILE),
    ERROR(ENOENT), ERROR(ENOLCK),  ERROR(ENOMEM), ERROR(ENOSPC),
    ERROR(ENOSYS), ERROR(ENOTSUP), ERROR(EROFS),  ERROR(EPERM),
};

/* ---- settings ---- */

/* A wrong setting would test nothing and pass, so it ends the process. */
static void refuse(const char *label, const char *value)
{
    fprintf(stderr, "shim: %s: '%s'\n", label, value);
    abort();
}

static int error_of(const char *name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (strcmp(errors[i].name, name) == 0) {
            return errors[i].number;
        }
    }
    refuse("unknown HOW in MLS_FAULT", name);
    return 0;
}

/* Returns NO_CALL for an unknown name. */
static int call_of(const char *name, size_t length)
{
    if (length == strlen("change") && strncmp(name, "change", length) == 0) {
        return EVERY_CHANGE;
    }
    for (int i = 0; i < MLS_CALL_COUNT; i++) {
        if (strlen(calls[i].name) == length &&
            strncmp(calls[i].name, name, length) == 0) {
            return i;
        }
    }
    return NO_CALL;
}

static void understand_how(const char *how)
{
    static const struct {
        const char *name;
        mls_how how;
    } ways[] = {{"short", MLS_SHORT},
                {"kill-before", MLS_KILL_BEFORE},
                {"kill-after", MLS_KILL_AFTER},
                {"kill-half", MLS_KILL_HALF}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        if (strcmp(how, ways[i].name) == 0) {
            shim.how = ways[i].how;
            return;
        }
    }
    const bool after = strncmp(how, "after-", 6) == 0;
    shim.how = after ? MLS_ERROR_AFTER : MLS_ERROR;
    shim.error = error_of(after ? how + 6 : how);
}

static void understand_fault(const char *fault)
{
    shim.call = NO_CALL;
    if (fault == NULL || fault[0] == '\0') {
        return;
    }
    const char *number = strchr(fault, ':');
    const char *how = number != NULL ? strchr(number + 1, ':') : NULL;
    char *end = NULL;
    if (how == NULL) {
        refuse("MLS_FAULT is not CALL:N:HOW", fault);
        return;
    }
    shim.at = strtol(number + 1, &end, 10);
    shim.onward = *end == '+';
    if (end + shim.onward != how || shim.at < 1) {
        refuse("N in MLS_FAULT is not a number from 1", fault);
    }
    understand_how(how + 1);
    shim.call = call_of(fault, (size_t)(number - fault));
    if (shim.call == NO_CALL) {
        refuse("unknown CALL in MLS_FAULT", fault);
    }
}

/* Start. The process under test calls this when its preparations are done. */
EXPORT void mls_shim_arm(void)
{
    const char *root = getenv("MLS_FAULT_ROOT");
    const char *log = getenv("MLS_FAULT_LOG");
    const char *sync = getenv("MLS_FAULT_SYNC");
    if (root == NULL || realpath(root, shim.root) == NULL) {
        refuse("MLS_FAULT_ROOT is no folder", root != NULL ? root : "");
    }
    shim.root_length = strlen(shim.root);
    understand_fault(getenv("MLS_FAULT"));
    snprintf(shim.log_path, sizeof shim.log_path, "%s", log != NULL ? log : "");
    for (int i = 0; i < MLS_CALL_COUNT; i++) {
        shim.counts[i] = 0;
    }
    const char *hint = getenv("MLS_FAULT_HINT");
    snprintf(shim.hint, sizeof shim.hint, "%s", hint != NULL ? hint : "");
    shim.syncs = sync == NULL || strcmp(sync, "no") != 0;
    shim.changes = 0;
    shim.hits = 0;
    shim.log = mls_record_open(shim.log_path);
    shim.owner = getpid();
    shim.armed = true;
}

EXPORT void mls_shim_disarm(void)
{
    shim.armed = false;
}

/* The number of times a call was made since arming, faults included; `change` counts all
 * calls that change files; -1 for an unknown name. */
EXPORT long mls_shim_count(const char *name)
{
    const int call = call_of(name, strlen(name));
    return call == NO_CALL ? -1 : call == EVERY_CHANGE ? shim.changes : shim.counts[call];
}

/* The number of times the fault happened. */
EXPORT long mls_shim_hits(void)
{
    return shim.hits;
}

/* Write a word of the process under test, such as "returned", into the log. */
EXPORT void mls_shim_note(const char *text)
{
    const mls_step step = {.is_watched = true};
    mls_record_lock(mls_log());
    mls_record(&step, &(mls_entry){.kind = 'N', .name = text});
    mls_record_unlock(mls_log());
}

bool mls_syncs(void)
{
    return shim.syncs;
}

/* flock belongs to the open file, not to the process, so each process opens the log
 * itself. */
int mls_log(void)
{
    if (shim.log >= 0 && shim.owner != getpid()) {
        shim.log = mls_record_open(shim.log_path);
        shim.owner = getpid();
    }
    return shim.log;
}

/* ---- paths ---- */

static bool below_root(const char *path)
{
    return strncmp(path, shim.root, shim.root_length) == 0 &&
           (path[shim.root_length] == '/' || path[shim.root_length] == '\0');
}

/* The path of an open descriptor, as the system knows it. */
static bool path_of(int fd, char *out)
{
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const long length = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    if (length < 0) {
        return false;
    }
    out[length] = '\0';
    return true;
}

bool mls_is_watched(int fd)
{
    const int before = errno;
    char path[PATH_MAX];
    const bool is_watched =
        shim.armed && fd >= 0 && path_of(fd, path) && below_root(path);
    errno = before;
    return is_watched;
}

bool mls_is_hint(int fd)
{
    char path[PATH_MAX];
    const char *slash;
    return shim.hint[0] != '\0' && path_of(fd, path) &&
           (slash = strrchr(path, '/')) != NULL && strcmp(slash + 1, shim.hint) == 0;
}

/* `path` as an absolute one, which may still contain links and dots. */
static bool absolute(int at, const char *path, char *out)
{
    char base[PATH_MAX] = "";
    if (path[0] != '/') {
        if (at == AT_FDCWD ? getcwd(base, sizeof base) == NULL : !path_of(at, base)) {
            return false;
        }
    }
    const int length = snprintf(out, PATH_MAX, "%s/%s", base, path);
    return length > 0 && length < PATH_MAX;
}

static bool split(char *path, mls_place *out)
{
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') {
        path[--length] = '\0';
    }
    char *slash = strrchr(path, '/');
    const char *name = slash + 1;
    struct stat info;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        char resolved[PATH_MAX];
        if (realpath(path, resolved) == NULL) {
            return false;
        }
        snprintf(path, PATH_MAX, "%s", resolved);
        slash = strrchr(path, '/');
        name = slash + 1;
    }
    if (strlen(name) > NAME_MAX) {
        return false;
    }
    memcpy(out->name, name, strlen(name) + 1);
    *slash = '\0';
    if (realpath(path[0] == '\0' ? "/" : path, out->folder) == NULL ||
        syscall(SYS_newfstatat, AT_FDCWD, out->folder, &info, 0) != 0) {
        return false;
    }
    out->folder_id = info.st_ino;
    return true;
}

bool mls_locate(int at, const char *path, mls_place *out)
{
    const int before = errno;
    char full_path[PATH_MAX];
    out->is_watched = false;
    if (shim.armed && path != NULL && absolute(at, path, full_path) &&
        split(full_path, out)) {
        const int length =
            snprintf(full_path, sizeof full_path, "%s/%s",
                     strcmp(out->folder, "/") == 0 ? "" : out->folder, out->name);
        out->is_watched = length < PATH_MAX && below_root(full_path);
    }
    errno = before;
    return out->is_watched;
}

/* ---- one call ---- */

static void end_process(void)
{
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) {
        syscall(SYS_sched_yield); /* until the signal arrives */
    }
}

/* Whether the fault applies to this call. */
static bool is_hit(mls_call call)
{
    const long count = atomic_fetch_add(&shim.counts[call], 1) + 1;
    const long change = calls[call].changes ? atomic_fetch_add(&shim.changes, 1) + 1 : 0;
    const long number = shim.call == (int)call      ? count
                        : shim.call == EVERY_CHANGE ? change
                                                    : 0;
    return number == shim.at ? number > 0 : shim.onward && number > shim.at;
}

mls_step mls_enter(mls_call call, bool is_watched)
{
    const int before = errno;
    mls_step step = {.call = call, .is_watched = is_watched};
    if (is_watched && is_hit(call)) {
        shim.hits++;
        step.how = shim.how;
        step.error = shim.error;
        if (step.how == MLS_KILL_BEFORE) {
            end_process();
        }
    }
    if (is_watched && calls[call].changes && mls_log() >= 0) {
        mls_record_lock(shim.log);
        step.holds = true;
    }
    errno = before;
    return step;
}

bool mls_refused(const mls_step *step)
{
    if (step->how != MLS_ERROR) {
        return false;
    }
    errno = step->error;
    return true;
}

size_t mls_shortened(const mls_step *step, size_t bytes)
{
    const bool halved = step->how == MLS_SHORT || step->how == MLS_KILL_HALF;
    return halved && bytes > 1 ? bytes / 2 : bytes;
}

long mls_leave(const mls_step *step, long result)
{
    const int before = errno;
    if (step->holds) {
        mls_record_unlock(shim.log);
    }
    if (step->how == MLS_KILL_AFTER || step->how == MLS_KILL_HALF) {
        end_process();
    }
    errno = before;
    if (step->how == MLS_ERROR_AFTER && result >= 0) {
        errno = step->error;
        return -1;
    }
    return result;
}
