/* requested_part: the stored ranges that a load needs for a part of a tensor, from the
 * shards of any number of ranks and of any layout. */
#ifndef MLS_REQUESTED_PART_H
#define MLS_REQUESTED_PART_H

#include "checkpoint/ranks/merged_index.h"
#include "checkpoint/read/shard_read.h"

/* Output arrays; each needs space for `places` elements of the tensor. */
typedef struct mls_read_scratch {
    mls_stored_shard *stored;
    mls_part *parts; /* shards' parts that differ from `to` */
    mls_read_piece *pieces;
} mls_read_scratch;

/* List what to read for `to`, a part of a tensor; `to` must outlive the result. The
 * members of `arrays` receive the places that intersect `to`, and pieces whose
 * destination is `data` (the packed part); `*count` is the number of each. Places without
 * a file are zeros that were not stored.
 * MLS_E_FORMAT: no rank stored some of the part; the status names the tensor. */
mls_code mls_requested_part_pieces(const mls_merged_index *merged,
                                   const mls_merged_index_tensor *tensor,
                                   const mls_part *to, unsigned char *data,
                                   const mls_read_scratch *arrays, size_t *count,
                                   mls_status *st);

/* Find a part `to` that is stored as one contiguous range of one plain shard. Returns the
 * shard; `*offset` receives the offset of the range in its file, in bytes. NULL: the part
 * is not stored in this way. */
const mls_merged_index_shard *
mls_requested_part_run(const mls_merged_index *merged,
                       const mls_merged_index_tensor *tensor, const mls_part *to,
                       uint64_t *offset);

#endif
