/* The parts of the preloaded fault library: shared declarations.
 *
 * shim.c decides what happens to a call, calls.c replaces the C library's functions,
 * record.c records the changes on disk.  The process under test calls mls_shim_arm when
 * it is ready; until then, and always for files outside the root folder, calls pass
 * through unchanged.
 *
 * Settings, read from the environment by mls_shim_arm:
 *   MLS_FAULT_ROOT  folder that the faults are for: itself and all below it
 *   MLS_FAULT       CALL:N:HOW or CALL:N+:HOW (see below); unset: none, calls are counted
 *   MLS_FAULT_LOG   file outside the root to record to; unset: nothing is recorded
 *   MLS_FAULT_HINT  name of a file whose content is only a hint, such as a lock: its
 *                   close counts as close_read
 *   MLS_FAULT_SYNC  "no": syncs are counted, failed and recorded, but not carried out
 *
 * CALL is one of the names in MLS_CALLS, or `change` for every call that changes files; N
 * counts from 1, and N+ means that one and all later ones.  HOW is
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

/* X(name, whether it changes files).  Each name covers all forms of the call: `rename`
 * for renameat and renameat2, `pwrite` for pwritev.  `create` opens for writing, `open`
 * for reading, `open_folder` a folder; `unlock` is flock with LOCK_UN; `close` closes a
 * descriptor opened for writing, `close_read` any other. */
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

/* How a call behaves. */
typedef enum mls_how {
    MLS_GO,
    MLS_ERROR,
    MLS_ERROR_AFTER,
    MLS_SHORT,
    MLS_KILL_BEFORE,
    MLS_KILL_AFTER,
    MLS_KILL_HALF
} mls_how;

/* A call in progress, from mls_enter to mls_leave. */
typedef struct mls_step {
    mls_call call;
    mls_how how;
    bool is_watched; /* the file is below the root, and the shim is armed */
    bool holds;      /* holds the recorder's lock */
    int error;       /* the error to fail with */
} mls_step;

/* A path, split into folder and last name. */
typedef struct mls_place {
    char folder[PATH_MAX]; /* without links */
    char name[NAME_MAX + 1];
    uint64_t folder_id; /* the folder's inode */
    bool is_watched;
} mls_place;

/* Resolve `path`, relative to `at` as in openat. Returns false if its folder does not
 * exist or the shim is not armed: then the file is not ours. */
bool mls_locate(int at, const char *path, mls_place *out);

/* Whether a descriptor refers to a file below the root. */
bool mls_is_watched(int fd);

/* Whether a descriptor refers to the file that MLS_FAULT_HINT names. */
bool mls_is_hint(int fd);

/* Count a call and decide about it; MLS_KILL_BEFORE does not return.  If the call will be
 * recorded, takes the recorder's lock, so that the order of the log equals the order on
 * disk. */
mls_step mls_enter(mls_call call, bool is_watched);

/* Whether the call must not be made at all; sets errno. */
bool mls_refused(const mls_step *step);

/* The number of the `bytes` bytes to write. */
size_t mls_shortened(const mls_step *step, size_t bytes);

/* The result for the caller: the true one, or a failure after the call.  Kills the
 * process if the settings say so.  Preserves errno. */
long mls_leave(const mls_step *step, long result);

/* ---- the recorder (record.c) ---- */

/* Open the log; returns -1 without a path.  Ends the process on failure. */
int mls_record_open(const char *path);

void mls_record_lock(int log);
void mls_record_unlock(int log);

/* One entry; `kind` is a letter that replay.py explains.  Does nothing without a log. */
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

/* The open log, or -1. */
int mls_log(void);

#endif
