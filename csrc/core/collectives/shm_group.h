/* local: operations across the ranks of one host, over memory that they share.
 *
 * Ranks are processes, which map one file, or threads of one process.  All of them call
 * the same operations in the same order.  Data goes through a ring of a few slots for
 * each rank: while one slot is read by the others, its rank fills the next.
 *
 * Calls that do not go together are an error on every rank, and the group lives on. After
 * a timeout, an interruption, an abort, or the death of a rank it is of no use any more:
 * every rank learns who was to blame at its next look, at once where it waits.
 *
 * Sums are made in the order of ranks (reduce.h), so that their bits depend on nothing
 * but the arrays.
 */
#ifndef MLS_LOCAL_H
#define MLS_LOCAL_H

#if !defined(_WIN32)

#    include "gradients/bucket.h"
#    include "runtime/cpu_features.h"
#    include "gradients/reduce/reduce.h"
#    include "base/status.h"

enum {
    MLS_LOCAL_MAX_RANKS = 64,
    MLS_LOCAL_CALL_BYTES = 160 /* room for what a rank says of its call, with its NUL */
};

/* The operations, by the names that messages have for them. */
typedef enum mls_local_kind {
    MLS_LOCAL_NONE, /* no operation yet */
    MLS_LOCAL_BARRIER,
    MLS_LOCAL_BROADCAST,
    MLS_LOCAL_ALL_GATHER,
    MLS_LOCAL_ALL_TO_ALL,
    MLS_LOCAL_ALL_REDUCE,
    MLS_LOCAL_REDUCE_SCATTER,
    MLS_LOCAL_GATHER_BYTES,
    MLS_LOCAL_KIND_COUNT
} mls_local_kind;

/* "all_reduce", and so on. */
const char *mls_local_kind_name(mls_local_kind kind);

/* ---- a group ---- */

/* One rank's place in a group. */
typedef struct mls_local mls_local;

/* How the memory is divided; the same on every rank. */
typedef struct mls_local_shape {
    size_t world;      /* ranks, 1 to MLS_LOCAL_MAX_RANKS */
    size_t slot_bytes; /* of each slot; 0 for what suits the world */
    size_t depth;      /* slots of each rank, 2 to 16; 0 for what suits */
} mls_local_shape;

/* Fill in what is 0, and the bytes of memory that this takes.
 * MLS_E_VALUE: a number out of range; nothing was changed. */
mls_code mls_local_measure(mls_local_shape *shape, size_t *bytes, mls_status *st);

/* Take a rank's place in the memory behind a file of mls_local_measure's bytes, zeros
 * until the first rank came, and lock the file's byte `rank`, so that others can tell
 * whether this process lives.  Use no descriptor of that file besides: closing one gives
 * the lock up.  Give: free with mls_local_free.
 *
 * Takes `fd`, and closes it with the group; a failure closes it too.
 * MLS_E_VALUE: a shape or a rank out of range, memory of another shape or version, a rank
 * that is taken.  MLS_E_IO, MLS_E_MEMORY. */
mls_code mls_local_join(const mls_local_shape *shape, size_t rank, int fd,
                        const mls_kernels *kernels, mls_local **out, mls_status *st);

/* Make the places of all ranks, `shape->world` of them, in memory of this process: for
 * threads.  Free each.  MLS_E_VALUE, MLS_E_MEMORY: nothing was made. */
mls_code mls_local_threads(const mls_local_shape *shape, const mls_kernels *kernels,
                           mls_local **out, mls_status *st);

/* Leave the group: others that need this rank learn that it closed.  Accepts NULL.  In a
 * forked child it only lets the memory go.  No operation may be under way. */
void mls_local_free(mls_local *g);

/* Make the operations of all ranks fail.  Any thread may, while an operation is under way
 * too. */
void mls_local_abort(mls_local *g);

/* Whether the group is of no use any more; `text` (NULL for none) then says why, as in
 * "this group was ...". */
bool mls_local_ended(mls_local *g, char *text, size_t room);

/* ---- operations ---- */

/* What all operations take. */
typedef struct mls_local_call {
    double timeout; /* seconds, above 0 */
    /* NULL, or asked now and then while the caller's thread waits: false to stop. */
    bool (*poll)(void *context);
    void *context;
    /* What all ranks must say alike, beside what the operation compares by itself: shapes
     * and dtypes, in words for the message where they differ.  NULL for nothing. */
    const char *text;
} mls_local_call;

/* Each operation fails with
 * MLS_E_PEER: ranks called what does not go together, named in the text; or, with the
 *     group ended (see mls_local_ended), a timeout, or a rank that died, left or aborted;
 * MLS_E_STOPPED: `poll` said so; the group is ended;
 * MLS_E_MEMORY: nothing was sent, the group lives on (another rank may time out).
 * Outputs are filled in part then. */

/* Wait until every rank is here. */
mls_code mls_local_barrier(mls_local *g, const mls_local_call *call, mls_status *st);

/* Copy `bytes` at `data` from rank `root` to every other one. */
mls_code mls_local_broadcast(mls_local *g, const mls_local_call *call, void *data,
                             size_t bytes, size_t root, mls_status *st);

/* Every rank's bytes, sizes[rank] of them, one behind the other into `out`.  `data` may
 * lie at its own place there. */
mls_code mls_local_all_gather(mls_local *g, const mls_local_call *call, const void *data,
                              const size_t *sizes, void *out, mls_status *st);

/* sent[r] bytes to each rank r, from one behind the other; wanted[r] bytes from each, one
 * behind the other into `out`, which does not overlap.  What one rank sends and another
 * wants is compared before anything moves: MLS_E_PEER on all ranks. */
mls_code mls_local_all_to_all(mls_local *g, const mls_local_call *call, const void *data,
                              const size_t *sent, void *out, const size_t *wanted,
                              mls_status *st);

/* Reduce n elements of all ranks into `out`, of the same dtype, which may be `data`.
 * Arrays are aligned to their items.  MLS_E_DTYPE, MLS_E_VALUE: see mls_reduce_check;
 * nothing was sent. */
mls_code mls_local_all_reduce(mls_local *g, const mls_local_call *call, const void *data,
                              void *out, size_t n, const mls_reduction *reduction,
                              mls_status *st);

/* Reduce the `count` arrays of a bucket (bucket.h) as one operation, without packing
 * them.  Their tallies are zero unless `is_tallied`, which takes time.  Errors as
 * mls_local_all_reduce. */
mls_code mls_local_reduce_scatter(mls_local *g, const mls_local_call *call,
                                  mls_segment *segments, size_t count, bool is_tallied,
                                  mls_status *st);

/* Where the bytes of other ranks go: fill out[r] with memory for sizes[r] bytes, this
 * rank's own too.  Called once, from within the operation; false ends it and the group.
 */
typedef struct mls_local_places {
    bool (*place)(void *context, const size_t *sizes, unsigned char **out);
    void *context;
} mls_local_places;

/* The bytes of all ranks, of any lengths.  `root` is the rank that gets them, or -1 for
 * all; `places` is asked there only. */
mls_code mls_local_gather_bytes(mls_local *g, const mls_local_call *call,
                                const void *data, size_t bytes, int root,
                                const mls_local_places *places, mls_status *st);

#endif
#endif
