/* shard_write: one rank's shards, written as files of the pool, durable but not yet
 * committed.
 *
 * Nothing that exists is touched.  New files get names that carry the generation, and
 * nobody looks at them before a manifest names the index that this makes: up to then they
 * can be thrown away, by their names.
 */
#ifndef MLS_SHARD_WRITE_H
#define MLS_SHARD_WRITE_H

#include "array/copy/copy.h"
#include "base/status.h"
#include "checkpoint/index/index.h"
#include "checkpoint/read/shard_read.h"
#include "crc32c/crc32c.h"
#include "runtime/thread_pool.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One shard that is to be stored, and the memory that it is in.  All is borrowed. */
typedef struct mls_shard_item {
    mls_tensor_id id;
    mls_dtype dtype;
    int rank;            /* of the whole tensor */
    const size_t *shape; /* of the whole tensor */
    /* of a state, those of its parameter (optimizer_axes.h); NULL: found among the items,
     * which lack the parameter where another rank stores it */
    const signed char *axes;
    mls_layout layout;
    size_t part;
    mls_tier tier;
    bool staged;      /* the memory is a copy, which nobody changes (staging.h) */
    uint64_t version; /* as the caller counts; 0: decided by comparing bytes */
    const unsigned char *data; /* packed, in this machine's byte order; NULL where ... */
    const mls_tensor *strided; /* ... this is used, which need not be */
    size_t first; /* of the memory's elements in C order, the first one of the part */
} mls_shard_item;

/* What is to be stored, and where. */
typedef struct mls_shard_job {
    int folder;             /* the pool, open; its folders exist */
    unsigned mode;          /* of new files, less the umask */
    const char *generation; /* MLS_GENERATION_DIGITS and NUL */
    uint64_t rank, world_size;
    const mls_shard_item *items;
    size_t count;
    const mls_index *before; /* what this rank committed last, or NULL */
    uint64_t pack_below;     /* shards of fewer bytes share files */
    bool sparse;             /* rows that are zero are not stored, where that pays */
    bool incremental;        /* of what changed a little only the rows that did are */
    bool compress;           /* what gets smaller by it is coded, with ... */
    mls_codec codec;         /* ... this */
    const mls_codecs
        *codecs; /* NULL: there are none, and what is coded counts as changed */
    const mls_kernels *kernels;
    const mls_crc_kernels *crc;
    mls_pool *pool;
    const mls_progress *progress; /* or NULL */
    /* or NULL; called once, by the calling thread, when the memory of items that are not
     * `staged` is not read any more.  Not called where the write failed before. */
    void (*freed)(void *context);
    void *freed_context;
} mls_shard_job;

enum {
    MLS_INDEX_PATH_BYTES = 64,
    MLS_WRITE_BUFFER = 2 << 20 /* of each thread that writes */
};

/* What became of it. */
typedef struct mls_shards_written {
    char path[MLS_INDEX_PATH_BYTES];           /* of the index, in the pool */
    uint64_t bytes;                            /* of the index */
    uint32_t crc;                              /* of the index, all of it */
    uint64_t shard_count, data_bytes;          /* that the index lists */
    uint64_t new_shards, new_bytes, new_files; /* that were written now, or in part */
} mls_shards_written;

#if !defined(_WIN32)

/* Store all items.  A shard that was committed before and did not change is not written
 * again: its record goes on to point where it lies.  Unchanged is what has the version of
 * before, where the caller states one, else what has the same bytes.  The version of what
 * changed goes up by one, or is the caller's.  A shard whose file is gone or has become
 * another is written again.  Shards that did not change move, too, when they share a file
 * of which less than half is still in use.
 * `sparse`: a new or changed shard leaves out its rows (row_bitmap.h) of zeros, where
 * those are a quarter of them or more; one below `pack_below` is there or, all zero, not
 * at all. `compress`: of what is written and has `pack_below` bytes or more, samples are
 * coded; what becomes shorter by a quarter is stored that way, each file by one thread,
 * which has all that it is coded to in memory until it is written. `incremental`: a shard
 * of which half of the rows changed, or fewer, gets one more layer of these, up to 8
 * layers and twice its bytes; what is below was read and found good. Memory: about 400
 * bytes a shard, a bit for each row that is looked at, and, for each thread, the header
 * of a file and 2 MiB for what is on its way; then the text of the index. MLS_E_VALUE: a
 * part twice, a name that is no UTF-8, a version that goes back, a layout or part that
 * cannot be; MLS_E_SHAPE; MLS_E_SIZE; MLS_E_IO (EEXIST: the generation was written
 * before); MLS_E_MEMORY; MLS_E_STOPPED.  On failure all files that this call made are
 * deleted, and no others. */
mls_code mls_shards_write(const mls_shard_job *job, mls_shards_written *out,
                          mls_status *st);

#endif
#endif
