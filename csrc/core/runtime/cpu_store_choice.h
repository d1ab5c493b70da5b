/* cpu_store_choice: how copies store their result, chosen by measurement; sizes and
 * number of trials.
 *
 * A copy can use plain stores (memcpy), an own loop of vectors, or non-temporal stores,
 * which bypass the cache. Which is fastest depends on the processor: for copies within
 * the level 2 cache, memcpy took twice as long as the loop on an AMD EPYC of Zen 3 and
 * 0.8 times as long on one of Zen 5. So the choice is measured:
 * - A result below MLS_STORE_LEAST uses the loop, or plain stores if the operation has
 *   no loop.
 * - For a larger result, parts of the caller's own copy serve as trials: the variants
 *   alternate over parts of 256 KiB, and the fastest is used from then on. There is one
 *   decision for each operation, size class and kind of destination. All variants store
 *   the same bytes.
 * - A result below four times the size of the level 2 cache is never stored past the
 *   cache. Only memcpy and the loop are compared, by their best of 16 trials, and the
 *   decision does not expire: it depends on the processor alone, and to count the bytes
 *   of each copy would cost 2 % of a copy of 32 KiB.
 * - If a result and its source fit into the last-level cache, the result may already be
 *   cached, and it stays cached for the next read unless a stream evicts it. So a stream
 *   must win by a quarter, twice in succession. Each variant is measured as in continued
 *   use: it stores two whole results, and only the second one counts. Alternating parts
 *   measured plain stores to lines that a stream had just evicted, and chose a stream
 *   that took 1.4 times as long (4 MiB, AMD EPYC family 25 model 17).
 * - The size of the last-level cache alone decides nothing: a virtual machine with 2
 *   processors reported 480 MiB that it shares with other machines, and one stream was
 *   twice as fast over 224 MiB (bench_copy.py).
 * - The first copy may mislead, because memory that the system has just cleared is
 *   cached. So the decision is repeated after 64 MiB, then after every GiB. For results
 *   within the last-level cache it is repeated after every 256 MiB, because their memory
 *   may be cached one time and not the next.
 * - MLSTATE_COPY forces one variant.
 *
 * Trials are counted with atomics, so any number of threads may take part. A child of
 * fork inherits the counts and continues from them.
 */
#ifndef MLS_CPU_STORE_CHOICE_H
#define MLS_CPU_STORE_CHOICE_H

#include "base/status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Ordered from the simplest: a tie is decided in favour of the smaller number. */
typedef enum mls_store {
    MLS_STORE_CACHED, /* through the cache; copies call memcpy */
    MLS_STORE_LOOP,   /* through the cache by a loop of vectors; copies only */
    MLS_STORE_STREAM, /* non-temporal */
    MLS_STORES
} mls_store;

/* A set of variants: the sum of their bits. */
#define MLS_STORE_BIT(store) (1U << (store))

/* Operations that are measured separately: their ratios of bytes read to bytes written,
 * or of arithmetic to bytes, differ. */
typedef enum mls_store_operation {
    MLS_STORING_COPY,
    MLS_STORING_FILL,
    MLS_STORING_NARROW,   /* conversions to items of the same size or smaller */
    MLS_STORING_WIDEN,    /* conversions to larger items */
    MLS_STORING_CHECKSUM, /* a copy with its CRC32C */
    MLS_STORING_REDUCE,   /* a reduction of several arrays */
    MLS_STORE_OPERATIONS
} mls_store_operation;

/* The properties of an operation's destination that affect the choice. */
typedef struct mls_destination {
    size_t bytes;  /* of the whole operation, which may consist of many copies */
    bool is_fresh; /* its pages are untouched: the system clears them during the copy */
} mls_destination;

/* Size class of a result; each class has its own measurements. */
typedef enum mls_store_size {
    MLS_STORING_SMALL,      /* from MLS_STORE_LEAST on */
    MLS_STORING_SMALL_8X,   /* from 8 times that size on */
    MLS_STORING_SMALL_64X,  /* from 64 times that size on */
    MLS_STORING_WITHIN,     /* the last-level cache may hold source and result */
    MLS_STORING_WITHIN_4X,  /* the same, from 4 times that size on */
    MLS_STORING_WITHIN_16X, /* the same, from 16 times that size on */
    MLS_STORING_PAST,
    MLS_STORE_SIZES
} mls_store_size;

enum {
    MLS_STORE_LEAST = 32 << 10,        /* the smallest result that is measured */
    MLS_STORE_TRIALS = 4,              /* trials of each variant */
    MLS_STORE_TRIALS_SMALL = 16,       /* the same, below MLS_STORING_WITHIN */
    MLS_STORE_TRIAL_BYTES = 256 << 10, /* bytes of one trial, at most */
    MLS_STORE_TRIAL_LEAST = 32 << 10,  /* the fewest bytes of a trial that counts */
    MLS_STORE_FIRST_LASTS = 64 << 20,  /* bytes stored until the first decision expires */
    MLS_STORE_LASTS_WITHIN =
        256 << 20, /* the same for later decisions, within the last-level cache */
    MLS_STORE_LASTS = 1 << 30 /* the same for later decisions, past it */
};

/* One decision and the trials that lead to it. */
typedef struct mls_store_choice {
    mls_store_size size;             /* size class of the results */
    atomic_int chosen;               /* an mls_store, or -1: none yet */
    atomic_int fastest;              /* the same, in the last completed trials */
    atomic_bool is_decided;          /* no trials are in progress */
    atomic_uint begun;               /* trials begun, of all variants */
    atomic_uint counted[MLS_STORES]; /* trials completed since the last decision */
    atomic_uint_fast64_t
        rate[MLS_STORES];        /* the best rate of the trials, in bytes per second */
    atomic_uint_fast64_t stored; /* bytes stored by all operations so far */
    atomic_uint_fast64_t tried_since; /* value of `stored` when the trials began */
    atomic_uint_fast64_t lasts_until; /* value of `stored` at which trials begin again */
} mls_store_choice;

/* All decisions of a process. The storage belongs to the caller; all threads share it. */
typedef struct mls_store_choices {
    int forced;                    /* an mls_store, or -1: measure */
    bool is_replaced;              /* MLSTATE_COPY named a variant that was removed */
    size_t cache_bytes;            /* size of the last-level cache */
    size_t least[MLS_STORE_SIZES]; /* the smallest result of each class, in bytes */
    mls_store_choice choice[MLS_STORE_OPERATIONS][MLS_STORE_SIZES][2]; /* [1]: fresh */
} mls_store_choices;

/* Return "plain", "loop" or "stream1". */
const char *mls_store_name(mls_store store);

/* Return "small", "small_8x", "small_64x", "within", "within_4x", "within_16x" or
 * "past". */
const char *mls_store_size_name(mls_store_size size);

/* Return "copy", "fill", "narrow", "widen", "checksum" or "reduce". */
const char *mls_store_operation_name(mls_store_operation operation);

/* Initialise all choices without a decision. `forced` is the value of MLSTATE_COPY: a
 * variant's name or "auto"; NULL and "" mean "auto". "stream4", of earlier versions,
 * means "stream1".
 * MLS_E_VALUE: another text; `*out` is untouched. */
mls_code mls_store_choices_init(mls_store_choices *out, const char *forced,
                                mls_status *st);

/* One thread's part of an operation. Not shared between threads. */
typedef struct mls_store_trial {
    mls_store store; /* the variant to use next */
    size_t left;     /* bytes to store before the next call of mls_store_advance */
    mls_store_choice *choice; /* NULL: the decision is made, nothing is timed */
    unsigned variants;        /* a set */
    int fixed; /* the variant of all trials of this part, or -1: the variants alternate */
    bool counts;      /* the trials of this part are counted */
    size_t stored;    /* bytes stored since the trial began */
    uint64_t started; /* nanoseconds, on the monotonic clock */
} mls_store_trial;

/* Begin to store `bytes` bytes, this thread's part of an operation, to `destination`.
 * `variants` is the set that the kernel implements; it includes plain stores. If
 * `choices` is NULL, the result goes through the cache. If `bytes` is too small for a
 * trial, the last decision is used. Returns the variant and the trial that measures
 * it. */
mls_store_trial mls_store_begin(mls_store_choices *choices, mls_store_operation operation,
                                unsigned variants, mls_destination destination,
                                size_t bytes);

/* Record that `bytes` bytes were stored, at most `trial->left`. May change
 * `trial->store`, the variant of the next store. */
void mls_store_advance(mls_store_trial *trial, size_t bytes);

/* End the thread's part of the operation, and count its last trial. */
void mls_store_end(mls_store_trial *trial);

/* Count one trial of the variant `store`: `bytes` in `nanoseconds`. Decides when every
 * variant of the set has MLS_STORE_TRIALS trials, or two trials and was less than half as
 * fast as the best; below MLS_STORING_WITHIN, when every variant has
 * MLS_STORE_TRIALS_SMALL. The best trial of a variant counts, because disturbances only
 * make a trial slower. A variant must beat a simpler one by a sixteenth; non-temporal
 * stores must win by a quarter in two successive decisions within the last-level
 * cache. */
void mls_store_count(mls_store_choice *choice, unsigned variants, mls_store store,
                     size_t bytes, uint64_t nanoseconds);

/* Return the variant to try next, of the set `variants` (bits: MLS_STORE_BIT). Variants
 * alternate; those with enough trials are skipped. If all have enough,
 * MLS_STORE_CACHED. */
mls_store mls_store_next(mls_store_choice *choice, unsigned variants);

/* Return the variant for bytes that are stored `at` bytes after the trials began, if the
 * variants of a set alternate after every two results of `result_bytes` bytes. Sets
 * `*counts` to whether this is the second of the two results. */
mls_store mls_store_turn(uint64_t at, size_t result_bytes, unsigned variants,
                         bool *counts);

#endif
