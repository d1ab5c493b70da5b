/* shard_write: the job of a save of one rank's shards, and its result; write buffers'
 * size.
 *
 * Writes shards as files in the folder of a checkpoint. They are durable but not
 * committed.
 *
 * Existing files are not modified. File names contain the generation. New files are
 * invisible until a manifest references their index; until then they can be deleted by
 * name. */
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

/* A shard to store, and its memory. Everything is borrowed. */
typedef struct mls_shard_item {
    mls_tensor_id id;
    mls_dtype dtype;
    int rank;            /* rank of the whole tensor */
    const size_t *shape; /* shape of the whole tensor */
    /* parameter axis of each axis of a state (optimizer_axes.h). NULL: derived from the
     * parameter, if it is among the items; another rank may store it */
    const signed char *axes;
    mls_layout layout;
    size_t part;
    mls_tier tier;
    bool staged;      /* the memory is a private copy that does not change (staging.h) */
    uint64_t version; /* version set by the caller; 0: determined by comparing bytes */
    /* The memory: either `data`, packed and in native byte order, or `strided`; the other
     * one is NULL. */
    const unsigned char *data;
    const mls_tensor *strided;
    size_t first; /* element of the memory, in C order, at which the part starts */
} mls_shard_item;

/* What to store, and where. */
typedef struct mls_shard_job {
    int folder;             /* descriptor of the folder; its subfolders exist */
    unsigned mode;          /* mode of new files, before the umask */
    bool temporary;         /* the files are soon read and deleted: they are not synced */
    const char *generation; /* MLS_GENERATION_DIGITS digits and NUL */
    uint64_t rank, world_size;
    const mls_shard_item *items;
    size_t count;
    const mls_index *before; /* this rank's last committed index, or NULL */
    uint64_t pack_below;     /* smaller shards share files */
    bool sparse;             /* omit rows of zeros if that saves enough */
    bool incremental;        /* if few rows of a shard changed, store only these */
    bool compress;           /* compress shards that become smaller */
    mls_codec codec;         /* for `compress` */
    const mls_digest_keys *digest_keys; /* of recorded digests; NULL: record none */
    const mls_codecs *codecs;           /* NULL: compressed shards count as changed */
    const mls_kernels *kernels;
    const mls_crc_kernels *crc;
    mls_pool *pool;
    const mls_progress *progress; /* or NULL */
    /* or NULL. The calling thread calls it once, when the memory of items that are not
     * `staged` is no longer read. Not called if writing failed before. */
    void (*freed)(void *context);
    void *freed_context;
} mls_shard_job;

enum {
    MLS_INDEX_PATH_BYTES = 64,
    MLS_WRITE_BUFFER = 2 << 20 /* for each writing thread */
};

/* Result of a write. */
typedef struct mls_shards_written {
    char path[MLS_INDEX_PATH_BYTES];           /* path of the index in the folder */
    uint64_t bytes;                            /* size of the index */
    uint32_t crc;                              /* CRC32C of the whole index */
    uint64_t shard_count, data_bytes;          /* of all shards that the index lists */
    uint64_t new_shards, new_bytes, new_files; /* written by this call */
} mls_shards_written;

/* Store all items, and the index that lists them.
 * - `digest_keys`: digests are computed from the memory of the items, not from the copies
 *   that are written.
 * - Unchanged shards are not written again: the new index references their old place. A
 *   shard is unchanged if its version equals the committed one, or, without a caller's
 *   version, if its bytes are equal. The version of a changed shard is the caller's, or
 *   the old one plus one. A shard whose file is missing or replaced is written again.
 *   Unchanged shards are also rewritten if less than half of their file is still in use.
 * - `sparse`: a new or changed shard omits its zero rows (row_bitmap.h) if they are at
 *   least a quarter of all rows. A shard below `pack_below` is omitted only if all of it
 *   is zero.
 * - `compress`: samples are compressed of each shard that is written with at least
 *   `pack_below` bytes. If they shrink by a quarter, the shard is compressed. One thread
 *   writes each compressed file, and holds its whole compressed data in memory.
 * - `incremental`: if at most half of a shard's rows changed, these rows become a new
 *   layer, up to 8 layers and twice the shard's bytes. The existing layers have been
 *   verified.
 * - Memory: about 400 bytes for each shard, one bit for each compared row, the header of
 *   a file and 2 MiB of buffer for each thread, and the text of the index.
 *
 * Errors: MLS_E_VALUE (a duplicate part, a name that is not UTF-8, a version that
 * decreases, an invalid layout or part); MLS_E_SHAPE; MLS_E_SIZE; MLS_E_IO (EEXIST: the
 * generation was already written); MLS_E_MEMORY; MLS_E_STOPPED. On failure all files that
 * this call created are deleted, and no others. */
mls_code mls_shards_write(const mls_shard_job *job, mls_shards_written *out,
                          mls_status *st);

#endif
