/* store_choice: how large copies store their result, chosen by measurement.
 *
 * A copy can store through the cache (plain), past the cache in one stream, or past the
 * cache in four streams a page apart.  Which is fastest depends on the processor: four
 * streams took 27 % less time than one on an Intel Xeon and 3 to 8 times as long on an
 * AMD EPYC.  So nothing is assumed:
 * - A result below four times the second level's cache is stored the plain way.
 * - For a larger result, parts of the caller's own copy are trials: the variants take
 *   turns over parts of 256 KiB, and the fastest is used from then on.  There is one
 *   decision for each operation, size class and kind of destination.  The bytes stored
 *   are the same whichever variant runs.
 * - A result that fits the last level together with its source may be in the cache
 *   already, and is there when it is read next, unless a stream evicts it.  So a stream
 *   must win by a quarter, and each variant is measured as it is in continued use: it
 *   stores two whole results in turn, and only the second one counts.  Parts in turn
 *   measured plain stores to lines that a stream had just evicted, and chose a stream
 *   that took 1.4 times as long (4 MiB, AMD EPYC family 25 model 17).  Four streams are
 *   not tried here.
 * - The size of the last level alone decides nothing: a virtual machine with 2 processors
 *   reported 480 MiB that it shares with other machines, and one stream was twice as fast
 *   over 224 MiB (bench_copy.py).
 * - The first copy may mislead: memory that the system has just cleared is in the cache.
 *   So a decision is made again after 64 MiB, and then after every GiB; within the last
 *   level after every 256 MiB, because its memory may be cached once and not the next
 * time.
 * - MLSTATE_COPY forces one variant.
 *
 * Trials are counted with atomics, so any number of threads may take part.  A child of
 * fork inherits the counts and goes on from there.
 */
#ifndef MLS_STORE_CHOICE_H
#define MLS_STORE_CHOICE_H

#include "base/status.h"

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
    MLS_STORING_REDUCE,   /* a reduction of several arrays */
    MLS_STORE_OPERATIONS
} mls_store_operation;

/* The memory that an operation writes, as far as it matters here. */
typedef struct mls_destination {
    size_t bytes;  /* of the whole operation, which may be many copies */
    bool is_fresh; /* its pages were never touched: the system clears them on the way */
} mls_destination;

/* The size of a result decides which measurements count.  Smaller ones are plain. */
typedef enum mls_store_size {
    MLS_STORING_WITHIN,     /* the last level of the cache may hold source and result */
    MLS_STORING_WITHIN_4X,  /* the same, from 4 times the size on */
    MLS_STORING_WITHIN_16X, /* the same, from 16 times the size on */
    MLS_STORING_PAST,
    MLS_STORE_SIZES
} mls_store_size;

enum {
    MLS_STORE_TRIALS = 4,               /* of each variant */
    MLS_STORE_TRIAL_BYTES = 256 << 10,  /* of one trial, at most */
    MLS_STORE_TRIAL_LEAST = 32 << 10,   /* of one trial that counts */
    MLS_STORE_FIRST_LASTS = 64 << 20,   /* bytes stored by the first decision */
    MLS_STORE_LASTS_WITHIN = 256 << 20, /* by a later one, within the last level */
    MLS_STORE_LASTS = 1 << 30           /* by a later one, past it */
};

/* One decision, and the trials that lead to it. */
typedef struct mls_store_choice {
    mls_store_size size;             /* of the results that it is for */
    atomic_int chosen;               /* an mls_store, or -1: none yet */
    atomic_bool is_decided;          /* no trials are going on */
    atomic_uint begun;               /* trials, of all variants */
    atomic_uint counted[MLS_STORES]; /* trials that ended, since the last decision */
    atomic_uint_fast64_t rate[MLS_STORES]; /* the best of them, in bytes a second */
    atomic_uint_fast64_t stored;           /* bytes, of all operations so far */
    atomic_uint_fast64_t tried_since;      /* `stored`, when the trials began */
    atomic_uint_fast64_t lasts_until;      /* `stored`, when trials begin again */
} mls_store_choice;

/* All decisions of a process.  The caller's storage; shared by all threads. */
typedef struct mls_store_choices {
    int forced;                    /* an mls_store, or -1: measure */
    size_t cache_bytes;            /* of the last level */
    size_t least[MLS_STORE_SIZES]; /* the smallest result of each class, in bytes */
    mls_store_choice choice[MLS_STORE_OPERATIONS][MLS_STORE_SIZES][2]; /* [1]: fresh */
} mls_store_choices;

/* "plain", "stream1" or "stream4". */
const char *mls_store_name(mls_store store);

/* "within", "within_4x", "within_16x" or "past". */
const char *mls_store_size_name(mls_store_size size);

/* "copy", "fill", "narrow", "widen", "checksum" or "reduce". */
const char *mls_store_operation_name(mls_store_operation operation);

/* Begin without a decision.  `forced` is the text of MLSTATE_COPY: a variant's name,
 * "auto", or NULL or "" for "auto".  MLS_E_VALUE: another text; `*out` is untouched. */
mls_code mls_store_choices_init(mls_store_choices *out, const char *forced,
                                mls_status *st);

/* One thread's part of an operation.  Not shared. */
typedef struct mls_store_trial {
    mls_store store;          /* how to store next */
    size_t left;              /* how many bytes, before mls_store_advance is called */
    mls_store_choice *choice; /* NULL: it is decided, nothing is timed */
    unsigned variants;
    int fixed;   /* the variant of all trials of this part, or -1: they take turns */
    bool counts; /* trials are counted */
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
 * variant must beat a simpler one by a sixteenth; within the last level by a quarter. */
void mls_store_count(mls_store_choice *choice, unsigned variants, mls_store store,
                     size_t bytes, uint64_t nanoseconds);

/* The variant that the next trial is of. */
mls_store mls_store_next(mls_store_choice *choice, unsigned variants);

/* The variant for the bytes that are stored `at` bytes after the trials began, if
 * variants take turns over two results of `all` bytes each.  `*counts`: it is the second
 * result. */
mls_store mls_store_turn(uint64_t at, size_t all, unsigned variants, bool *counts);

#endif
