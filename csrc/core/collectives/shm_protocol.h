/* shm_protocol: the shared memory of a group (header, slots, counters), and the steps of
 * every operation.
 *
 * Private to shm_group.c, shm_sync.c, shm_collectives.c and shm_reduce.c.
 *
 * In each step every rank fills one slot of its ring, publishes it, and reads the slots
 * of the other ranks. Steps are counted from the group's creation by two counters of each
 * rank: `published`, and `consumed` (steps that the rank has read from all ranks). A slot
 * is free again when all ranks have consumed its step. Every operation takes the same
 * number of steps on every rank, so the counters stay in step.
 *
 * A rank that has to wait spins for a while and then sleeps on its own `bell`. A rank
 * that publishes or consumes rings the bells of all sleepers. All of these words are
 * accessed with memory_order_seq_cst, so all ranks agree on one order. A sleeper sets
 * `sleeping` before it checks again, so no wake-up is lost.
 */
#ifndef MLS_SHM_PROTOCOL_H
#define MLS_SHM_PROTOCOL_H

#include "array/copy/copy.h"
#include "base/size.h"
#include "collectives/shm_group.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* Words of different ranks are this many bytes apart: processors prefetch cache lines in
 * pairs. */
enum { MLS_SHM_LINE = 128, MLS_SHM_PAGE = 4096 };

/* A rank's description of the operation that begins with this slot. */
typedef struct mls_shm_record {
    uint64_t number;      /* of the operation, counted from 1 */
    uint64_t fingerprint; /* hash of all arguments that must match */
    uint32_t kind;
    char text[MLS_SHM_CALL_BYTES];
} mls_shm_record;

enum { MLS_SHM_MAX_DEPTH = 16 };

/* Written by one rank, read by all; `bell` and `sleeping` are also written by others. */
typedef struct mls_shm_area {
    _Alignas(MLS_SHM_LINE) _Atomic(uint64_t) published;
    _Alignas(MLS_SHM_LINE) _Atomic(uint64_t) consumed;
    _Alignas(MLS_SHM_LINE) _Atomic(uint32_t) bell; /* see the top of this file */
    _Atomic(uint32_t) sleeping;
    _Alignas(MLS_SHM_LINE) _Atomic(uint64_t) doing; /* operation number << 8 | kind */
    _Atomic(uint32_t) state;                        /* an mls_shm_state */
    _Atomic(uint32_t) direct; /* 1 while the rank accesses arrays of other ranks */
    _Atomic(int64_t) process;
    _Alignas(MLS_SHM_LINE) mls_shm_record records[MLS_SHM_MAX_DEPTH];
} mls_shm_area;

/* State of a rank. */
typedef enum mls_shm_state {
    MLS_SHM_ABSENT,
    MLS_SHM_JOINED,
    MLS_SHM_CLOSED
} mls_shm_state;

/* Why a group is broken. */
typedef enum mls_shm_why {
    MLS_SHM_WORKS,
    MLS_SHM_TIMEOUT,     /* `reporter` timed out waiting for `culprit` */
    MLS_SHM_DIED,        /* the process of `culprit` died */
    MLS_SHM_LEFT,        /* `culprit` closed the group, and `reporter` needed it */
    MLS_SHM_ABORTED,     /* `culprit` aborted the group */
    MLS_SHM_INTERRUPTED, /* the caller of `culprit` stopped it */
    MLS_SHM_FAILED       /* an operation of `culprit` failed for a local reason */
} mls_shm_why;

/* The first bytes of the memory. Both words begin as 0 and are set once. */
typedef struct mls_shm_header {
    _Alignas(MLS_SHM_LINE) _Atomic(uint64_t) shape;  /* version and mls_shm_shape */
    _Alignas(MLS_SHM_LINE) _Atomic(uint64_t) broken; /* an mls_shm_blame, packed */
} mls_shm_header;

/* Why the group broke. It is packed into one word, so that a rank that dies while writing
 * leaves all of it or nothing. */
typedef struct mls_shm_blame {
    mls_shm_why why;
    size_t reporter, culprit;
    mls_shm_kind kind; /* the operation in progress */
} mls_shm_blame;

/* The mapped memory, shared by the handles of this process. */
typedef struct mls_shm_memory {
    unsigned char *data;
    size_t bytes;
    atomic_size_t users;
} mls_shm_memory;

/* Position in a bucket's segments (shm_reduce.c). */
typedef struct mls_shm_cursor {
    size_t segment;
    size_t at;   /* elements of the rank's share already sent or read */
    size_t base; /* index of the share's first element in the segment */
} mls_shm_cursor;

struct mls_shm {
    mls_shm_memory *memory; /* one reference */
    mls_shm_shape shape;
    size_t rank;
    int fd; /* owned; -1 for threads */
    pid_t process;
    const mls_kernels *kernels; /* borrowed */
    uint64_t published;         /* as in this rank's area */
    uint64_t consumed;          /* the same */
    uint64_t number;            /* operations begun */
    long spin_nanoseconds;      /* before sleeping */
    size_t piece_bytes;         /* bytes of a slot for one peer */
    mls_shm_cursor cursors[MLS_SHM_MAX_RANKS];
};

/* ---- shm_group.c: the memory ---- */

/* The shared structures of the group and of rank `rank`; valid until the handle is
 * freed. */
mls_shm_header *mls_shm_header_of(const mls_shm *g);
mls_shm_area *mls_shm_area_of(const mls_shm *g, size_t rank);

/* Returns the slot of a rank that holds step number `step`, counted from the group's
 * creation. It is reused after `depth` steps. */
unsigned char *mls_shm_slot(const mls_shm *g, size_t rank, uint64_t step);

/* Wakes every sleeping rank. */
void mls_shm_wake(const mls_shm *g);

/* Marks the group as broken, unless it is already, and wakes all ranks. */
void mls_shm_mark_broken(mls_shm *g, mls_shm_blame blame);

/* Fills `st` (MLS_E_PEER) with the reason why the group is broken, for the operation
 * `kind`. `local_reason` is one that only this rank knows, such as how long it waited,
 * and replaces the common one; "" for none. Returns the code. */
mls_code mls_shm_fail_broken(mls_shm *g, mls_shm_kind kind, const char *local_reason,
                             mls_status *st);

/* ---- shm_sync.c: the steps of one operation ---- */

enum { MLS_SHM_NO_RANK = -1 };

/* Callbacks of one operation. */
typedef struct mls_shm_flow {
    mls_shm_kind kind;
    uint64_t fingerprint;
    int source; /* rank whose slots are read after the first step; MLS_SHM_NO_RANK: all */
    /* The slots contain addresses, and the ranks access each other's arrays in the first
     * step, which is the only one. */
    bool is_direct;
    /* Writes this rank's part of a step; NULL if it never has one. */
    void (*fill)(void *context, unsigned char *slot);
    /* Reads the slots of all ranks; NULL if there are none to read. */
    mls_code (*drain)(void *context, uint64_t step, mls_status *st);
    /* Returns whether another step must be filled; called after the first step was
     * drained. */
    bool (*has_more)(void *context);
    void *context;
} mls_shm_flow;

/* Deadline of an operation, and the last call of its `poll`. */
typedef struct mls_shm_clock {
    const mls_shm_call *call;
    int64_t deadline, polled; /* nanoseconds of the monotonic clock */
} mls_shm_clock;

/* Begins an operation: starts `clock`, publishes the first step of `flow`, and compares
 * the ranks' calls. MLS_E_PEER: they differ, and no data was read; or the group is
 * broken. MLS_E_STOPPED; errors of `flow->drain`. */
mls_code mls_shm_begin(mls_shm *g, const mls_shm_flow *flow, const mls_shm_call *call,
                       mls_shm_clock *clock, mls_status *st);

/* Runs the steps after the first one, until `flow->has_more` returns false and all
 * published steps were read. MLS_E_PEER, MLS_E_STOPPED, and errors of `flow->drain`. */
mls_code mls_shm_continue(mls_shm *g, const mls_shm_flow *flow, mls_shm_clock *clock,
                          mls_status *st);

/* mls_shm_begin, then mls_shm_continue. A direct operation returns only when no rank uses
 * this rank's arrays any more, also after a failure, so that the caller may free them. */
mls_code mls_shm_run(mls_shm *g, const mls_shm_flow *flow, const mls_shm_call *call,
                     mls_status *st);

/* Returns whether ranks access each other's arrays of `bytes` bytes by address: they are
 * threads, and the array is large enough. The result is equal on all ranks. */
bool mls_shm_is_direct(const mls_shm *g, size_t bytes);

/* ---- helpers ---- */

/* Mixes a number into a fingerprint. */
static inline uint64_t mls_shm_mix(uint64_t fingerprint, uint64_t value)
{
    fingerprint = (fingerprint ^ value) * 0x9E3779B97F4A7C15U;
    return fingerprint ^ fingerprint >> 29;
}

/* Mixes a text (may be NULL) into a fingerprint. */
static inline uint64_t mls_shm_mix_text(uint64_t fingerprint, const char *text)
{
    for (const char *c = text; c != NULL && *c != '\0'; c++) {
        fingerprint = mls_shm_mix(fingerprint, (unsigned char)*c);
    }
    return mls_shm_mix(fingerprint, 0x100);
}

/* Copies `bytes` bytes to or from a slot through the cache; empty ranges may be NULL.
 * Does not use memcpy: slots begin at pages and NumPy arrays 16 bytes after one, which
 * may be memcpy's slowest case (copy_avx2.c). */
static inline void mls_shm_copy(const mls_shm *g, void *to, const void *from,
                                size_t bytes)
{
    if (bytes > 0 && to != from) {
        g->kernels->copy(to, from, bytes, MLS_STORE_LOOP);
    }
}

/* Copies `bytes` bytes between arrays, in an operation that writes `all` bytes
 * altogether, which decides how they are stored. */
static inline void mls_shm_copy_direct(const mls_shm *g, void *to, const void *from,
                                       size_t bytes, size_t all)
{
    if (bytes > 0 && to != from) {
        mls_copy_bytes(g->kernels, to, from, bytes, (mls_destination){.bytes = all});
    }
}

/* Returns address i in a rank's slot, in a direct operation; it is an address in the
 * memory of the other thread's rank. */
static inline unsigned char *mls_shm_address(const mls_shm *g, size_t rank, uint64_t step,
                                             size_t i)
{
    unsigned char *address;
    memcpy(&address, mls_shm_slot(g, rank, step) + i * sizeof address, sizeof address);
    return address;
}

/* Returns the description for fcntl of a write lock on byte `rank` of the group's
 * file. */
static inline struct flock mls_shm_lock_on(size_t rank)
{
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)rank;
    lock.l_len = 1;
    return lock;
}

/* Returns where the bytes for `peer` start in a slot of `rank`: a slot has one range of
 * `piece_bytes` bytes for each peer, none for the rank itself. */
static inline size_t mls_shm_piece_of(const mls_shm *g, size_t rank, size_t peer)
{
    return (peer < rank ? peer : peer - 1) * g->piece_bytes;
}

/* ---- shm_collectives.c ---- */

/* Continues an operation of the kind `kind`, which has begun, with an all_gather through
 * the slots. Arguments as for mls_shm_all_gather; nothing is compared. */
mls_code mls_shm_continue_gather(mls_shm *g, mls_shm_kind kind, const void *data,
                                 const size_t *sizes, void *out, mls_shm_clock *clock,
                                 mls_status *st);

#endif
