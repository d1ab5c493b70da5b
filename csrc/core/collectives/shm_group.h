/* shm_group: collective operations across the ranks of one host, over shared memory; most
 * ranks of a group.
 *
 * Ranks are processes that map one file, or threads of one process. All ranks call the
 * same operations in the same order. Each rank has a ring of a few slots: while other
 * ranks read one slot, the rank fills the next.
 *
 * Failures:
 * - Mismatched calls fail on every rank, and the group stays usable.
 * - A timeout, an interruption, an abort, or the death of a rank breaks the group for
 *   good. Every rank learns the culprit at its next check, and at once while it waits.
 *
 * Sums are computed in rank order (reduce.h), so their bits depend only on the arrays.
 */
#ifndef MLS_SHM_GROUP_H
#define MLS_SHM_GROUP_H

#include "base/status.h"
#include "gradients/bucket.h"
#include "gradients/reduce/reduce.h"
#include "runtime/cpu_features.h"

enum {
    MLS_SHM_MAX_RANKS = 64,
    MLS_SHM_CALL_BYTES = 160 /* bytes of a call's text, with its NUL */
};

/* The operations; mls_shm_kind_name returns their names for messages. */
typedef enum mls_shm_kind {
    MLS_SHM_NONE, /* no operation yet */
    MLS_SHM_BARRIER,
    MLS_SHM_BROADCAST,
    MLS_SHM_ALL_GATHER,
    MLS_SHM_ALL_TO_ALL,
    MLS_SHM_ALL_REDUCE,
    MLS_SHM_REDUCE_SCATTER,
    MLS_SHM_GATHER_BYTES,
    MLS_SHM_KIND_COUNT
} mls_shm_kind;

/* Returns the operation's public name, such as "all_reduce". */
const char *mls_shm_kind_name(mls_shm_kind kind);

/* ---- a group ---- */

/* One rank's handle of a group. */
typedef struct mls_shm mls_shm;

/* How the memory is divided; equal on every rank. */
typedef struct mls_shm_shape {
    size_t world;      /* number of ranks, 1 to MLS_SHM_MAX_RANKS */
    size_t slot_bytes; /* bytes of one slot; 0 chooses a default */
    size_t depth;      /* slots of each rank, 2 to 16; 0 chooses a default */
} mls_shm_shape;

/* Replaces zeros in `shape` by defaults, and computes the bytes of memory that the group
 * needs. MLS_E_VALUE: a number is out of range; nothing was changed. */
mls_code mls_shm_measure(mls_shm_shape *shape, size_t *bytes, mls_status *st);

/* Joins the group as `rank`, in the memory of a file. The file has the size that
 * mls_shm_measure computed, and is zero until the first rank joins. Locks byte `rank` of
 * the file, so that other ranks can detect whether this process is alive. The caller must
 * not open and close that file elsewhere in this process: closing any descriptor releases
 * the lock.
 * Ownership: takes `fd`, also on failure, and closes it with the group; borrows
 * `kernels`. Free the group with mls_shm_free. Errors: MLS_E_VALUE: the shape or the rank
 * is out of range, the memory has another shape or version, or the rank is taken.
 * MLS_E_IO, MLS_E_MEMORY. */
mls_code mls_shm_join(const mls_shm_shape *shape, size_t rank, int fd,
                      const mls_kernels *kernels, mls_shm **out, mls_status *st);

/* Creates a group of threads in memory of this process: `out` receives `shape->world`
 * handles, one for each rank in order. Free each with mls_shm_free. MLS_E_VALUE,
 * MLS_E_MEMORY, MLS_E_IO: nothing was created. */
mls_code mls_shm_threads(const mls_shm_shape *shape, const mls_kernels *kernels,
                         mls_shm **out, mls_status *st);

/* Leaves the group: ranks that still need this rank fail with "closed". Accepts NULL. In
 * a forked child it only frees the memory. No operation may be in progress on this
 * rank. */
void mls_shm_free(mls_shm *g);

/* Breaks the group: the operations of all ranks fail. Any thread may call it, also during
 * an operation. */
void mls_shm_abort(mls_shm *g);

/* Returns whether the group is broken. Then `text` (of `room` bytes; may be NULL)
 * receives the reason, a clause such as "rank 3 aborted the group". */
bool mls_shm_is_broken(mls_shm *g, char *text, size_t room);

/* ---- operations ---- */

/* Arguments of all operations. */
typedef struct mls_shm_call {
    double timeout; /* seconds, above 0 and below 1e9 */
    /* Called now and then while the caller's thread waits; returns false to stop. May be
     * NULL. */
    bool (*poll)(void *context);
    void *context;
    /* Text that must be equal on all ranks, for example shapes and dtypes, in addition to
     * what the operation compares. Messages quote it if it differs. NULL for none. */
    const char *text;
} mls_shm_call;

/* Errors of every operation; outputs may then be partly filled.
 * - MLS_E_PEER: the calls of the ranks do not match (the message names them; the group
 *   stays usable), or the group is broken (see mls_shm_is_broken): timeout, or a rank
 *   died, left or aborted.
 * - MLS_E_STOPPED: `poll` returned false; the group is broken.
 * - MLS_E_MEMORY (mls_shm_gather_bytes only): `provide` returned false; the group is
 *   broken.
 */

/* Waits until every rank has called it. */
mls_code mls_shm_barrier(mls_shm *g, const mls_shm_call *call, mls_status *st);

/* Copies `bytes` bytes at `data` from rank `root` to the memory at `data` of every other
 * rank. */
mls_code mls_shm_broadcast(mls_shm *g, const mls_shm_call *call, void *data, size_t bytes,
                           size_t root, mls_status *st);

/* Concatenates the bytes of all ranks, `sizes[rank]` of each, in `out` on every rank.
 * `data` has this rank's bytes and may be its own range of `out`. The sizes must be equal
 * on all ranks. */
mls_code mls_shm_all_gather(mls_shm *g, const mls_shm_call *call, const void *data,
                            const size_t *sizes, void *out, mls_status *st);

/* Sends send_sizes[r] bytes to each rank r and receives receive_sizes[r] bytes from each.
 * `data` and `out` are packed in rank order and must not overlap. All sizes are compared
 * before any data is copied; a mismatch is MLS_E_PEER on all ranks. */
mls_code mls_shm_all_to_all(mls_shm *g, const mls_shm_call *call, const void *data,
                            const size_t *send_sizes, void *out,
                            const size_t *receive_sizes, mls_status *st);

/* Reduces n elements of all ranks into `out`, which has the same dtype and may be `data`.
 * Arrays are aligned to their items. MLS_E_DTYPE, MLS_E_VALUE: see mls_reduce_check;
 * nothing was sent. */
mls_code mls_shm_all_reduce(mls_shm *g, const mls_shm_call *call, const void *data,
                            void *out, size_t n, const mls_reduction *reduction,
                            mls_status *st);

/* Reduces the `count` arrays `segments` of a bucket (bucket.h) in one operation, without
 * packing them. Computes the norm partials only if `wants_norms`, which takes time;
 * otherwise they are zero. Errors as for mls_shm_all_reduce. */
mls_code mls_shm_reduce_scatter(mls_shm *g, const mls_shm_call *call,
                                mls_segment *segments, size_t count, bool wants_norms,
                                mls_status *st);

/* `provide` provides buffers for gathered bytes: sets out[r] to memory for sizes[r]
 * bytes, for every rank including this one. Called once, during the operation. Returning
 * false fails the operation with MLS_E_MEMORY and breaks the group. */
typedef struct mls_shm_buffer_provider {
    bool (*provide)(void *context, const size_t *sizes, unsigned char **out);
    void *context;
} mls_shm_buffer_provider;

/* Gathers the bytes of all ranks, `bytes` bytes at `data` of this one; their number may
 * differ. `root` is the receiving rank, or -1 for all ranks. `provider` is used on
 * receiving ranks only. */
mls_code mls_shm_gather_bytes(mls_shm *g, const mls_shm_call *call, const void *data,
                              size_t bytes, int root,
                              const mls_shm_buffer_provider *provider, mls_status *st);

#endif
