/* shard_read: read stored shards into destination memory.
 *
 * The stored shard and the requested part are parts of one tensor (see layout.h), and may
 * differ. Only their common bytes are read; with verification, the checksummed blocks
 * that contain them. A file that does not match its record (different length, or not a
 * regular file) is refused before it is read. */
#ifndef MLS_SHARD_READ_H
#define MLS_SHARD_READ_H

#include "base/status.h"
#include "checkpoint/read/read_plan.h"
#include "crc32c/crc32c.h"
#include "io/file.h"
#include "runtime/ready_counter.h"
#include "runtime/thread_pool.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Progress callback. Any thread may call it, also several at once, with the number of
 * bytes since the last call. Return false to stop as soon as possible. */
typedef struct mls_progress {
    bool (*report)(void *context, uint64_t bytes);
    void *context;
} mls_progress;

/* Report to a callback, which may be NULL. Returns false to stop. */
static inline bool mls_progress_report(const mls_progress *progress, uint64_t bytes)
{
    return progress == NULL || progress->report(progress->context, bytes);
}

/* Allocates destination buffers while earlier ones are being filled. The calling thread
 * calls `make` once. It sets the `data` of the pieces in their order, and advances the
 * counter to the number of pieces that have it. Before the call, `data` is NULL if it
 * stays NULL; otherwise it is any address, the same for all pieces of a tensor, because
 * the plan depends on it. `make` returns false if it cannot set all of them. */
typedef struct mls_maker {
    bool (*make)(void *context, mls_ready_counter *ready);
    void *context;
} mls_maker;

/* What to read, and how. */
typedef struct mls_read_request {
    int folder; /* descriptor of the checkpoint's folder */
    bool links; /* files may be symbolic links */
    /* The files are in memory, and the folder is not used. Only spans that begin in one
     * of the ranges are read; without ranges, the zeros that were not stored are
     * written instead. So several calls with different ranges read everything. */
    bool in_memory;
    const mls_file_range *ranges;
    size_t range_count;
    const mls_read_piece *pieces;
    size_t count;                 /* number of pieces */
    const mls_crc_kernels *crc;   /* NULL: checksums are not verified; all pieces with
                                     a file have `data` then */
    const mls_codecs *codecs;     /* NULL: compressed shards cannot be read */
    mls_pool *pool;               /* NULL: the calling thread reads */
    const mls_progress *progress; /* NULL: no reports */
    const mls_maker *maker;       /* NULL: all pieces have their `data` */
    uint64_t *read; /* receives the bytes that reached their destination; NULL: not
                       wanted */
} mls_read_request;

/* Read all pieces; threads share large ones. Each thread allocates at most 1 MiB, or 5
 * MiB if a shard is compressed, and has at most one open file.
 * On failure, the contents of all destinations are undefined. `*failed` is the index of
 * the first piece that failed, and the status names its tensor. For MLS_E_MEMORY and
 * MLS_E_STOPPED, `*failed` has no meaning, and the status may name no tensor. Errors:
 * - MLS_E_IO: with os_error (ENOENT: a file is missing).
 * - MLS_E_FORMAT: not a regular file, a length that differs from the record, or a file
 *   that became shorter.
 * - MLS_E_CHECKSUM: a block is damaged; with its offset.
 * - MLS_E_MEMORY: if the plan failed, the maker was not called.
 * - MLS_E_STOPPED: `progress` or `maker` returned false.
 * - errors of a codec. */
mls_code mls_shards_read(const mls_read_request *request, size_t *failed, mls_status *st);

#endif
