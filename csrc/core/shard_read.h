/* shard_read: bytes of stored shards, brought to where they are wanted.
 *
 * What is stored and what is wanted are parts of one tensor (see layout.h), and need not
 * be the same part: only the bytes that both have in common are read, or, where they are
 * verified, the checksummed blocks that hold such bytes.  A file that the caller's
 * records do not describe (another length, no regular file) is refused before it is read.
 */
#ifndef MLS_SHARD_READ_H
#define MLS_SHARD_READ_H

#include "crc32c.h"
#include "gate.h"
#include "pool.h"
#include "read_plan.h"
#include "status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Called by any of the threads, also by several at once, with the number of bytes that
 * were done since the last call; false stops the work as soon as may be. */
typedef struct mls_progress {
    bool (*report)(void *context, uint64_t bytes);
    void *context;
} mls_progress;

/* Places that are made while the first of them are read to.  `make` is called once, by
 * the calling thread: it gives the pieces their `data`, in their order, and says by the
 * gate how many have it.  Until then `data` is NULL where it will be, and else one
 * address for all pieces of a tensor, whichever: the plan is made by that.  False: there
 * will be no more places. */
typedef struct mls_maker {
    bool (*make)(void *context, mls_gate *made);
    void *context;
} mls_maker;

#if !defined(_WIN32)

/* Read all pieces; large ones in parts by several threads.  At most 1 MiB a thread is
 * allocated besides, 5 MiB where something is coded, and each thread has one file open at
 * most.  `crc` NULL: not verified.  `codecs` NULL: what is coded cannot be read.
 * `progress` NULL: nobody asks.
 * MLS_E_IO, with os_error (ENOENT: a file is gone); MLS_E_FORMAT: no regular file,
 * or another length than recorded, or shorter by now; MLS_E_CHECKSUM: a block's bytes are
 * not those that were written, with the offset of the block; MLS_E_MEMORY; what a codec
 * says;
 * MLS_E_STOPPED: `progress` said so.  The status names the tensor, and `*failed` is the
 * index of the piece: of several failures, that of the first piece.  After a failure the
 * places hold anything. */
mls_code mls_shards_read(int folder, const mls_piece *pieces, size_t count,
                         const mls_crc_kernels *crc, const mls_codecs *codecs,
                         mls_pool *pool, const mls_progress *progress, size_t *failed,
                         mls_status *st);

/* The same to places that are made meanwhile; NULL: they are there.  Where the plan finds
 * no memory, none are made.  MLS_E_STOPPED also where `make` said false. */
mls_code mls_shards_read_made(int folder, const mls_piece *pieces, size_t count,
                              const mls_crc_kernels *crc, const mls_codecs *codecs,
                              mls_pool *pool, const mls_progress *progress,
                              const mls_maker *maker, size_t *failed, mls_status *st);

#endif
#endif
