/* shim: what the parts of the preloaded fault library share.
 *
 * shim.c decides what happens to a call, calls.c stands in front of the C library's
 * functions, record.c writes down what changed on the disk.  Everything begins with
 * mls_shim_arm, which the process under test calls when it is ready; until then, and for
 * files outside the root folder always, calls go through untouched.
 *
 * Settings, read from the environment by mls_shim_arm:
 *   MLS_FAULT_ROOT  folder that the faults are for: itself and all below it
 *   MLS_FAULT       CALL:N:HOW or CALL:N+:HOW (see below); unset: none, calls are counted
 *   MLS_FAULT_LOG   file outside the root to record to; unset: nothing is recorded
 *   MLS_FAULT_HINT  name of a file whose text nobody depends on, such as a lock: its
 * close counts as close_read MLS_FAULT_SYNC  "no": syncs are counted, failed and
 * recorded, but not carried out
 *
 * CALL is one of the names in MLS_CALLS, or `change` for every call that changes files;
 * N counts from 1, and N+ means that one and all later ones.  HOW is
 *   EIO, ENOSPC, ...  fail, with nothing done (but `close`, which closes all the same)
 *   after-EIO, ...    do it, then fail
 *   short             write half of the bytes
 *   kill-before, kill-after, kill-half
 *                     end the process with SIGKILL; half: after half of the bytes
 */
#ifndef MLS_SHIM_H
#define MLS_SHIM_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, whether it changes files).  Each stands for all forms of the call: `rename`
 * for renameat and renameat2, `pwrite` for pwritev.  `create` opens for writing, `open`
 * for reading, `open_folder` a folder; `unlock` is flock with LOCK_UN; `close` ends what
 * was opened for writing, `close_read` the rest. */
#define MLS_CALLS(X)                                                                     \
    X(open, false)                                                                       \
    X(open_folder, false)                                                                \
    X(create, true)                                                                      \
    X(close, true)                                                                       \
    X(close_read, false)                                                                 \
    X(read, false)                                                                       \
    X(pread, false)                                                                      \
    X(write, true)                                                                       \
    X(pwrite, true)                                                                      \
    X(copy, true)                                                                        \
    X(truncate, true)                                                                    \
    X(allocate, true)                                                                    \
    X(fsync, true)                                                                       \
    X(fsync_folder, true)                                                                \
    X(fdatasync, true)                                                                   \
    X(syncfs, true)                                                                      \
    X(sync_file_range, false)                                                            \
    X(rename, true)                                                                      \
    X(unlink, true)                                                                      \
    X(mkdir, true)                                                                       \
    X(rmdir, true)                                                                       \
    X(link, true)                                                                        \
    X(symlink, true)                                                                     \
    X(mode, true)                                                                        \
    X(mmap, false)                                                                       \
    X(stat, false)                                                                       \
    X(list, false)                                                                       \
    X(unlock, false)                                                                     \
    X(flock, false)                                                                      \
    X(fcntl, false)
#define MLS_CALL_NAME(name, changes) MLS_##name,
typedef enum mls_call { MLS_CALLS(MLS_CALL_NAME) MLS_CALL_COUNT } mls_call;
#undef MLS_CALL_NAME

/* What is to happen to one call. */
typedef enum mls_how {
    MLS_GO,
    MLS_ERROR,
    MLS_ERROR_AFTER,
    MLS_SHORT,
    MLS_KILL_BEFORE,
    MLS_KILL_AFTER,
    MLS_KILL_HALF
} mls_how;

/* One call on its way: from mls_enter to mls_leave. */
typedef struct mls_step {
    mls_call call;
    mls_how how;
    bool ours;  /* below the root, and armed */
    bool holds; /* the recorder's lock */
    int error;  /* what it fails with */
} mls_step;

/* A path split where folders hold names. */
typedef struct mls_place {
    char folder[PATH_MAX]; /* without links */
    char name[NAME_MAX + 1];
    uint64_t folder_id; /* its inode */
    bool ours;
} mls_place;

/* Find out what `path`, relative to `at` as in openat, means.  False where its folder
 * does not exist or nothing is armed: then it is not ours. */
bool mls_locate(int at, const char *path, mls_place *out);

/* Whether a descriptor is of something below the root. */
bool mls_is_ours(int fd);

/* Whether a descriptor is of the file that MLS_FAULT_HINT names. */
bool mls_is_hint(int fd);

/* Count a call and decide about it; MLS_KILL_BEFORE does not return.  A call that will be
 * recorded takes the recorder's lock, so that the log has the order of the disk. */
mls_step mls_enter(mls_call call, bool ours);

/* Whether the call is not to be made at all: errno is set. */
bool mls_refused(const mls_step *step);

/* How many of `bytes` are to be written. */
size_t mls_shortened(const mls_step *step, size_t bytes);

/* What the caller is told: the true result, or a failure after the fact.  Kills where
 * that was asked for.  Keeps errno. */
long mls_leave(const mls_step *step, long result);

/* ---- the recorder (record.c) ---- */

/* Open the log; -1 without a path.  Ends the process where it cannot. */
int mls_record_open(const char *path);

void mls_record_lock(int log);
void mls_record_unlock(int log);

/* One entry; `kind` is a letter that replay.py explains.  Nothing without a log. */
typedef struct mls_entry {
    char kind;
    uint64_t a, b; /* inodes */
    int64_t number;
    const char *name, *other; /* may be NULL */
    const void *data;
    size_t bytes;
} mls_entry;

void mls_record(const mls_step *step, const mls_entry *entry);

/* Whether syncs are carried out. */
bool mls_syncs(void);

/* The log that is open, or -1. */
int mls_log(void);

#endif
