/* store_choice: how large copies store their result, chosen by measurement.
 *
 * A copy can store through the cache (plain), past the cache in one stream, or past the
 * cache in four streams a page apart.  Which is fastest depends on the processor: four
 * streams took 27 % less time than one on an Intel Xeon and 3 to 8 times as long on an
 * AMD EPYC.  So nothing is assumed:
 * - A result that fits the caches together with its source is stored the plain way.
 *   Streaming would evict what is read next.  On the EPYC, "copy, then read" over warm
 *   memory was 1.2 to 3 times as fast with plain stores up to 8 MiB; with cold caches the
 *   two were alike, or streaming was up to a fifth faster (bench_copy.py).
 * - For a larger result, parts of the caller's own copy are trials: the variants take
 *   turns over parts of 256 KiB, and the fastest is used from then on.  There is one
 *   decision for each operation and kind of destination.  The bytes stored are the same
 *   whichever variant runs.
 * - The first copy may mislead: memory that the system has just cleared is in the cache.
 *   So a decision is made again after 64 MiB, and then after every GiB.
 * - MLSTATE_COPY forces one variant.
 *
 * Trials are counted with atomics, so any number of threads may take part.  A child of
 * fork inherits the counts and goes on from there.
 */
#ifndef MLS_STORE_CHOICE_H
#define MLS_STORE_CHOICE_H

#include "status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* From the simplest: a tie is decided in favour of the smaller number. */
typedef enum mls_store {
    MLS_STORE_PLAIN,   /* through the cache */
    MLS_STORE_STREAM1, /* past the cache, one stream */
    MLS_STORE_STREAM4, /* past the cache, four streams; plain copies only */
    MLS_STORES
} mls_store;

/* Operations that are measured apart: each has another ratio of bytes read to written,
 * or of arithmetic to bytes. */
typedef enum mls_store_operation {
    MLS_STORING_COPY,
    MLS_STORING_FILL,
    MLS_STORING_NARROW,   /* conversions to items of the same size or smaller */
    MLS_STORING_WIDEN,    /* conversions to larger items */
    MLS_STORING_CHECKSUM, /* a copy with its CRC32C */
    MLS_STORE_OPERATIONS
} mls_store_operation;

/* The memory that an operation writes, as far as it matters here. */
typedef struct mls_destination {
    size_t bytes;  /* of the whole operation, which may be many copies */
    bool is_fresh; /* its pages were never touched: the system clears them on the way */
} mls_destination;

enum {
    MLS_STORE_TRIALS = 4,              /* of each variant */
    MLS_STORE_TRIAL_BYTES = 256 << 10, /* of one trial, at most */
    MLS_STORE_TRIAL_LEAST = 32 << 10,  /* of one trial that counts */
    MLS_STORE_FIRST_LASTS = 64 << 20,  /* bytes stored by the first decision */
    MLS_STORE_LASTS = 1 << 30          /* bytes stored by a later one */
};

/* One decision, and the trials that lead to it. */
typedef struct mls_store_choice {
    atomic_int chosen;               /* an mls_store, or -1: none yet */
    atomic_bool is_decided;          /* no trials are going on */
    atomic_uint begun;               /* trials, of all variants */
    atomic_uint counted[MLS_STORES]; /* trials that ended, since the last decision */
    atomic_uint_fast64_t rate[MLS_STORES]; /* the best of them, in bytes a second */
    atomic_uint_fast64_t stored;           /* bytes, of all operations so far */
    atomic_uint_fast64_t lasts_until;      /* `stored`, when trials begin again */
} mls_store_choice;

/* All decisions of a process.  The caller's storage; shared by all threads. */
typedef struct mls_store_choices {
    int forced;                                       /* an mls_store, or -1: measure */
    size_t cache_bytes;                               /* of the last level */
    mls_store_choice choice[MLS_STORE_OPERATIONS][2]; /* [1]: fresh destinations */
} mls_store_choices;

/* "plain", "stream1" or "stream4". */
const char *mls_store_name(mls_store store);

/* "copy", "fill", "narrow", "widen" or "checksum". */
const char *mls_store_operation_name(mls_store_operation operation);

/* Begin without a decision.  `forced` is the text of MLSTATE_COPY: a variant's name,
 * "auto", or NULL or "" for "auto".  MLS_E_VALUE: another text; `*out` is untouched. */
mls_code mls_store_choices_init(mls_store_choices *out, const char *forced,
                                mls_status *st);

/* Results from this size on are measured; smaller ones are stored the plain way. */
size_t mls_store_least(const mls_store_choices *choices);

/* One thread's part of an operation.  Not shared. */
typedef struct mls_store_trial {
    mls_store store;          /* how to store next */
    size_t left;              /* how many bytes, before mls_store_advance is called */
    mls_store_choice *choice; /* NULL: it is decided, nothing is timed */
    unsigned variants;
    size_t stored;
    uint64_t started; /* in nanoseconds */
} mls_store_trial;

/* Begin to store `bytes` bytes of an operation.  `variants` is how many variants the
 * kernel has, from the first on.  The stores are plain if `choices` is NULL; if `bytes`
 * are too few for a trial, they follow the last decision. */
mls_store_trial mls_store_begin(mls_store_choices *choices, mls_store_operation operation,
                                unsigned variants, mls_destination destination,
                                size_t bytes);

/* `bytes` were stored, at most `trial->left`: the next store may be another variant. */
void mls_store_advance(mls_store_trial *trial, size_t bytes);

/* The thread's part of the operation is complete. */
void mls_store_end(mls_store_trial *trial);

/* Count one trial: `bytes` in `nanoseconds`.  Decides once every variant has
 * MLS_STORE_TRIALS, or is hopeless: twice as slow as the best in two trials.  The best of
 * a variant's trials counts, because whatever disturbs a trial makes it slower.  A
 * variant must beat a simpler one by a sixteenth. */
void mls_store_count(mls_store_choice *choice, unsigned variants, mls_store store,
                     size_t bytes, uint64_t nanoseconds);

/* The variant that the next trial is of. */
mls_store mls_store_next(mls_store_choice *choice, unsigned variants);

#endif
