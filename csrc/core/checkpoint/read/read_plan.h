/* read_plan: divide the reading of stored shards into tasks for threads.
 *
 * Each piece is divided into spans at block boundaries. The spans of all pieces are
 * sorted by file and offset, and neighbouring spans are grouped into tasks of a useful
 * size. So several threads share a large tensor, and many small tensors of one file are
 * read with few opens. Consecutive tasks of one file form a work queue (work_stealing.h)
 * for one thread: sequential reads let the system read ahead further, into larger pages.
 */
#ifndef MLS_READ_PLAN_H
#define MLS_READ_PLAN_H

#include "base/status.h"
#include "checkpoint/storage/stored_ranges.h"
#include "sharding/layout.h"

#include <stddef.h>
#include <stdint.h>

/* Spans end at multiples of this from the start of their place; large enough for one
 * task. */
enum { MLS_READ_SPAN = 4 << 20 };

/* A piece: read the common elements of the place `shard` and the requested part `to` into
 * `data`, which receives the packed part `to`. `data` NULL: nothing is written, because
 * the place has no file and the memory is already zero, or because only the checksums of
 * the place, which is not compressed, are compared. Pieces may share a place. They may
 * share `data` if their places have different elements of the tensor. */
typedef struct mls_read_piece {
    const mls_stored_shard *shard;
    const mls_part *to;
    unsigned char *data;
} mls_read_piece;

/* Bytes `from` .. `end` (uncompressed) of a piece's place: whole blocks, except at the
 * ends of the piece. File, offset and cost are copied here, because the shard has left
 * the cache when spans are sorted. */
typedef struct mls_read_span {
    const mls_read_piece *piece;
    size_t from, end;
    size_t to; /* byte of the packed destination that receives byte `from`, if the span is
                  one contiguous run; SIZE_MAX: several runs */
    size_t zeros_from,
        zeros_end; /* range of the destination; gaps between runs become zeros */
    const char *file;
    uint64_t at;   /* offset of `from` in the file */
    uint64_t cost; /* estimated time, as the bytes that could be read in it */
} mls_read_span;

/* Created by mls_read_plan_make. */
typedef struct mls_read_plan {
    mls_read_span *spans;        /* in the order of the pieces */
    const mls_read_span **order; /* sorted by file and offset */
    size_t *tasks;               /* first span of each task in `order`, and the end */
    size_t *queues;              /* first task of each work queue, and the end */
    size_t count, room;          /* number of spans, allocated spans */
    size_t task_count, queue_count;
    uint64_t cost; /* of all spans */
} mls_read_plan;

/* Make a plan. Gives: free with mls_read_plan_fini, also after a failure. Planning stops
 * at the first invalid piece; the pieces before it are still planned, since reading one
 * of them may fail first. `*planned` is the number of valid pieces. Destinations and
 * files are not accessed. Of `data`, only two properties matter: whether it is NULL, and
 * whether it equals the `data` of the next piece.
 * MLS_E_FORMAT: the recorded bytes exceed the file; the status names the tensor and the
 * file. MLS_E_MEMORY: nothing is planned, and `*planned` has no meaning. */
mls_code mls_read_plan_make(mls_read_plan *plan, const mls_read_piece *pieces,
                            size_t count, size_t *planned, mls_status *st);

/* Accepts a zeroed plan. */
void mls_read_plan_fini(mls_read_plan *plan);

#endif
