/* read_plan: what is to be read of stored shards, cut into work that can be handed out.
 *
 * A piece is cut into spans at block boundaries, the spans of all pieces are put in the
 * order in which they lie in each file, and neighbours make up a task until they are
 * worth handing out.  So a large tensor is read by several threads, and many small ones
 * in few openings of the files that they share.  Tasks along one file make up a stretch,
 * which one thread should read from its beginning to its end: systems that see that read
 * ahead further and further, and into larger pages.
 */
#ifndef MLS_READ_PLAN_H
#define MLS_READ_PLAN_H

#include "sharding/layout.h"
#include "base/status.h"
#include "checkpoint/storage/stored_ranges.h"

#include <stddef.h>
#include <stdint.h>

/* What goes where: the elements that `shard` and `to` have in common, to `data`, where
 * the part `to` lies packed.  NULL, of zeros only: they are there already.  Pieces may
 * share a shard, and may share `data` where their shards are different parts of the
 * tensor. */
typedef struct mls_piece {
    const mls_stored_shard *shard;
    const mls_part *to;
    unsigned char *data;
} mls_piece;

/* Bytes `from` .. `end` of a piece's shard.  Whole blocks, but for the ends of what the
 * piece needs.  File, place and cost are kept here: the shard that they come from is out
 * of the cache by the time that spans are put in order. */
typedef struct mls_read_span {
    const mls_piece *piece;
    size_t from, end;
    size_t to; /* byte of what is wanted that `from` is; all others follow. SIZE_MAX:
                * there are several runs */
    size_t zeros_from,
        zeros_end; /* of what is wanted: zeros are filled in between runs */
    const char *file;
    uint64_t at;   /* of `from` in the file */
    uint64_t cost; /* in bytes: what it takes besides them, what it reads, zeros */
} mls_read_span;

/* Make it with mls_read_plan_make. */
typedef struct mls_read_plan {
    mls_read_span *spans;        /* in the order of the pieces */
    const mls_read_span **order; /* in the order of the files */
    size_t *tasks;               /* the first span of each in `order`, and the end */
    size_t *stretches;           /* the first task of each, and the end */
    size_t count, room;          /* of spans, of room for them */
    size_t task_count, stretch_count;
    uint64_t cost; /* of all spans */
} mls_read_plan;

/* Gives: free with mls_read_plan_fini, also after a failure.  Pieces are planned as far
 * as one that cannot be read, since those in front of it may fail as well; `*planned` is
 * the number of good ones.  No memory is touched, no file looked at; of `data` only
 * whether there is any counts, and whether it is that of the next piece.
 * MLS_E_FORMAT: records that place bytes beyond the file; MLS_E_MEMORY: nothing is
 * planned.  The status names the tensor and its file. */
mls_code mls_read_plan_make(mls_read_plan *plan, const mls_piece *pieces, size_t count,
                            size_t *planned, mls_status *st);

/* Accepts a plan of zeros. */
void mls_read_plan_fini(mls_read_plan *plan);

#endif
