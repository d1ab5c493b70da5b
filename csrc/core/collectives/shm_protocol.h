/* local_steps: what shm_group.c, shm_sync.c and shm_collectives.c share: the memory of a group,
 * and the steps that every operation is made of.
 *
 * In each step every rank fills one slot of its ring, publishes it, and reads the slots
 * of the others.  Steps are counted from the group's beginning, by two numbers of each
 * rank: `published`, and `consumed`, steps that it has read from everybody.  A slot is
 * free again when all have consumed the step that was in it.  All operations take equally
 * many steps on every rank, so that the numbers stay together.
 *
 * A rank that finds nothing to do spins for a while and then sleeps on its own `bell`.
 * Who publishes or consumes rings the bells of those who sleep.  All of these words are
 * read and written in one order that all ranks agree on (memory_order_seq_cst): a sleeper
 * first says that he sleeps and then looks again, so that nobody is forgotten.
 */
#ifndef MLS_LOCAL_STEPS_H
#define MLS_LOCAL_STEPS_H

#if !defined(_WIN32)

#    include "array/copy/copy.h"
#    include "collectives/shm_group.h"

#    include <fcntl.h>
#    include <stdatomic.h>
#    include <string.h>
#    include <sys/types.h>
#    include <unistd.h>

/* Words of different ranks lie this far apart: processors fetch lines in pairs. */
enum { MLS_LOCAL_LINE = 128, MLS_LOCAL_PAGE = 4096 };

/* What a rank says of the operation that begins with this slot. */
typedef struct mls_local_note {
    uint64_t number;      /* of the operation, from 1 */
    uint64_t fingerprint; /* of all that ranks must call alike */
    uint32_t kind;
    char text[MLS_LOCAL_CALL_BYTES];
} mls_local_note;

enum { MLS_LOCAL_MAX_DEPTH = 16 };

/* Written by one rank, read by all. */
typedef struct mls_local_area {
    _Alignas(MLS_LOCAL_LINE) _Atomic(uint64_t) published;
    _Alignas(MLS_LOCAL_LINE) _Atomic(uint64_t) consumed;
    _Alignas(MLS_LOCAL_LINE) _Atomic(uint32_t) bell; /* others write these two */
    _Atomic(uint32_t) sleeping;
    _Alignas(MLS_LOCAL_LINE) _Atomic(uint64_t) doing; /* operation number << 8 | kind */
    _Atomic(uint32_t) state;                          /* mls_local_state */
    _Atomic(uint32_t) direct; /* it reads or writes arrays of other ranks */
    _Atomic(int64_t) process;
    _Alignas(MLS_LOCAL_LINE) mls_local_note notes[MLS_LOCAL_MAX_DEPTH];
} mls_local_area;

/* Where a rank is in its life. */
typedef enum mls_local_state {
    MLS_LOCAL_ABSENT,
    MLS_LOCAL_JOINED,
    MLS_LOCAL_CLOSED
} mls_local_state;

/* Why a group is of no use any more. */
typedef enum mls_local_why {
    MLS_LOCAL_WORKS,
    MLS_LOCAL_TIMEOUT,     /* `reporter` waited for `culprit` */
    MLS_LOCAL_DIED,        /* the process of `culprit` */
    MLS_LOCAL_LEFT,        /* `culprit` closed, and `reporter` needed it */
    MLS_LOCAL_ABORTED,     /* by `culprit` */
    MLS_LOCAL_INTERRUPTED, /* `culprit`, by its caller */
    MLS_LOCAL_FAILED       /* an operation of `culprit`, for reasons of its own */
} mls_local_why;

/* The first bytes of the memory.  Both words are 0 at first and set once. */
typedef struct mls_local_header {
    _Alignas(MLS_LOCAL_LINE) _Atomic(uint64_t) shape;  /* version and mls_local_shape */
    _Alignas(MLS_LOCAL_LINE) _Atomic(uint64_t) broken; /* an mls_local_blame, packed */
} mls_local_header;

/* Who is to blame.  It fits one word, so that a rank which dies while it writes leaves
 * all of it or nothing. */
typedef struct mls_local_blame {
    mls_local_why why;
    size_t reporter, culprit;
    mls_local_kind kind; /* the operation that was under way */
} mls_local_blame;

/* The memory, held by those ranks of this process that use it. */
typedef struct mls_local_memory {
    unsigned char *data;
    size_t bytes;
    atomic_size_t users;
} mls_local_memory;

/* A place among destinations that are dealt out piece by piece (shm_collectives.c). */
typedef struct mls_local_cursor {
    size_t segment;
    size_t at;   /* elements of its share that were dealt out */
    size_t base; /* where the share begins in the segment */
} mls_local_cursor;

struct mls_local {
    mls_local_memory *memory; /* shares */
    mls_local_shape shape;
    size_t rank;
    int fd; /* owned; -1 among threads */
    pid_t process;
    const mls_kernels *kernels; /* borrowed */
    uint64_t written, read;     /* steps published and consumed by this rank */
    uint64_t number;            /* operations begun */
    long spins;                 /* nanoseconds to spin before sleeping */
    size_t piece_bytes;         /* of a slot, for one peer */
    mls_local_cursor cursors[MLS_LOCAL_MAX_RANKS];
};

/* ---- shm_group.c: the memory ---- */

mls_local_header *mls_local_header_of(const mls_local *g);
mls_local_area *mls_local_area_of(const mls_local *g, size_t rank);

/* The slot of a rank that holds a step. */
unsigned char *mls_local_slot(const mls_local *g, size_t rank, uint64_t step);

/* Ring for every rank that sleeps. */
void mls_local_ring(const mls_local *g);

/* Declare the group to be of no use, unless somebody did before, and wake everybody. */
void mls_local_break(mls_local *g, mls_local_blame blame);

/* Fill `st` (MLS_E_PEER) with who is to blame, as this rank tells it in `kind`.  Returns
 * the code. */
mls_code mls_local_blamed(mls_local *g, mls_local_kind kind, const char *more,
                          mls_status *st);

/* ---- shm_sync.c: one operation, step by step ---- */

/* An operation as the steps see it. */
typedef struct mls_local_flow {
    mls_local_kind kind;
    uint64_t fingerprint;
    int source; /* the one rank whose slots are read after the first step; -1 for all */
    /* Write this rank's part of a step; NULL where it never has one. */
    void (*fill)(void *context, unsigned char *slot);
    /* Read everybody's; NULL for nothing. */
    mls_code (*drain)(void *context, uint64_t step, mls_status *st);
    /* Whether another step is to be filled; asked after the first one was drained. */
    bool (*more)(void *context);
    void *context;
} mls_local_flow;

/* When an operation must end. */
typedef struct mls_local_clock {
    const mls_local_call *call;
    int64_t deadline, polled; /* nanoseconds */
} mls_local_clock;

/* Begin an operation: take its first step, in which ranks find out whether they called
 * the same. */
mls_code mls_local_begin(mls_local *g, const mls_local_flow *flow,
                         const mls_local_call *call, mls_local_clock *clock,
                         mls_status *st);

/* The steps that follow, until there are no more. */
mls_code mls_local_continue(mls_local *g, const mls_local_flow *flow,
                            mls_local_clock *clock, mls_status *st);

/* Begin and continue. */
mls_code mls_local_run(mls_local *g, const mls_local_flow *flow,
                       const mls_local_call *call, mls_status *st);

/* Whether ranks access arrays of `bytes` bytes of each other by their addresses: they are
 * threads, and the array is large enough.  All ranks find the same. */
bool mls_local_is_direct(const mls_local *g, size_t bytes);

/* An operation of one step, in which slots contain addresses.  Returns when no rank uses
 * this one's arrays any more, after a failure too: the caller may free them. */
mls_code mls_local_run_direct(mls_local *g, const mls_local_flow *flow,
                              const mls_local_call *call, mls_status *st);

/* Begin to access arrays of other ranks, in the drain of mls_local_run_direct.  False:
 * the group is broken, and the arrays may be gone.  End with mls_local_end_direct. */
bool mls_local_begin_direct(mls_local *g);

/* No array of another rank is accessed any more. */
void mls_local_end_direct(mls_local *g);

/* ---- small things ---- */

/* Mix a number into a fingerprint. */
static inline uint64_t mls_local_mix(uint64_t print, uint64_t value)
{
    print = (print ^ value) * 0x9E3779B97F4A7C15U;
    return print ^ print >> 29;
}

/* What a call says in words takes part. */
static inline uint64_t mls_local_mix_text(uint64_t print, const char *text)
{
    for (const char *c = text; c != NULL && *c != '\0'; c++) {
        print = mls_local_mix(print, (unsigned char)*c);
    }
    return mls_local_mix(print, 0x100);
}

/* The smaller one. */
static inline size_t mls_local_least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Copy through the cache, to a slot or from one; empty ranges may be at NULL.  Slots
 * begin at pages and arrays of NumPy 16 bytes behind one, the case in which memcpy may be
 * slowest (copy_avx2.c). */
static inline void mls_local_copy(const mls_local *g, void *to, const void *from,
                                  size_t bytes)
{
    if (bytes > 0 && to != from) {
        g->kernels->copy(to, from, bytes, MLS_STORE_PLAIN);
    }
}

/* Copy from one array to another, of an operation that writes `all` bytes. */
static inline void mls_local_copy_direct(const mls_local *g, void *to, const void *from,
                                         size_t bytes, size_t all)
{
    if (bytes > 0 && to != from) {
        mls_copy_bytes(g->kernels, to, from, bytes, (mls_destination){.bytes = all});
    }
}

/* Address number i in the slot of a rank, in a step of mls_local_run_direct. */
static inline unsigned char *mls_local_address(const mls_local *g, size_t rank,
                                               uint64_t step, size_t i)
{
    unsigned char *address;
    memcpy(&address, mls_local_slot(g, rank, step) + i * sizeof address, sizeof address);
    return address;
}

/* A write lock on a rank's byte of the group's file. */
static inline struct flock mls_local_lock_on(size_t rank)
{
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)rank;
    lock.l_len = 1;
    return lock;
}

/* Which of a rank's pieces is that of `peer`. */
static inline size_t mls_local_piece_of(const mls_local *g, size_t rank, size_t peer)
{
    return (peer < rank ? peer : peer - 1) * g->piece_bytes;
}

/* ---- shm_collectives.c ---- */

/* Continue an operation of that kind by an all_gather through the slots. */
mls_code mls_local_gather_on(mls_local *g, mls_local_kind kind, const void *data,
                             const size_t *sizes, void *out, mls_local_clock *clock,
                             mls_status *st);

#endif
#endif
