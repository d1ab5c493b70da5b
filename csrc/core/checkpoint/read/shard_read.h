/* shard_read: bytes of stored shards, brought to where they are wanted.
 *
 * What is stored and what is wanted are parts of one tensor (see layout.h), and need not
 * be the same part: only the bytes that both have in common are read, or, where they are
 * verified, the checksummed blocks that hold such bytes.  A file that the caller's
 * records do not describe (another length, no regular file) is refused before it is read.
 */
#ifndef MLS_SHARD_READ_H
#define MLS_SHARD_READ_H

#include "crc32c/crc32c.h"
#include "runtime/watermark.h"
#include "runtime/thread_pool.h"
#include "checkpoint/read/read_plan.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Called by any of the threads, also by several at once, with the number of bytes that
 * were done since the last call; false stops the work as soon as may be. */
typedef struct mls_progress {
    bool (*report)(void *context, uint64_t bytes);
    void *context;
} mls_progress;

/* Allocates destination buffers while earlier ones are being filled.  `make` is called
 * once, by the calling thread: it sets the pieces' `data`, in their order, and opens the
 * gate up to the number of pieces that have it.  Before that, `data` is NULL if it stays
 * NULL, and else any address, the same for all pieces of a tensor: the plan depends on
 * it.  `make` returns false if it cannot set all of them. */
typedef struct mls_maker {
    bool (*make)(void *context, mls_gate *made);
    void *context;
} mls_maker;

#if !defined(_WIN32)

/* What to read, and how. */
typedef struct mls_read_request {
    int folder; /* descriptor of the checkpoint's folder */
    const mls_piece *pieces;
    size_t count;                 /* of pieces */
    const mls_crc_kernels *crc;   /* NULL: checksums are not compared */
    const mls_codecs *codecs;     /* NULL: compressed shards cannot be read */
    mls_pool *pool;               /* NULL: the calling thread reads */
    const mls_progress *progress; /* NULL: no reports */
    const mls_maker *maker;       /* NULL: all pieces have their `data` */
} mls_read_request;

/* Read all pieces; several threads divide large ones.  Allocates at most 1 MiB a thread,
 * 5 MiB if a shard is compressed; each thread has at most one file open.
 * MLS_E_IO, with os_error (ENOENT: a file is missing); MLS_E_FORMAT: not a regular file,
 * or another length than recorded, or shorter by now; MLS_E_CHECKSUM: a block's bytes are
 * not those that were written, with the offset of the block; MLS_E_MEMORY: the maker was
 * not called if the plan found none; errors of a codec; MLS_E_STOPPED: `progress` or
 * `maker` returned false.  The status names the tensor, and `*failed` is the index of the
 * piece: of several failures, that of the first piece.  After a failure the contents of
 * all destinations are undefined. */
mls_code mls_shards_read(const mls_read_request *request, size_t *failed, mls_status *st);

#endif
#endif
