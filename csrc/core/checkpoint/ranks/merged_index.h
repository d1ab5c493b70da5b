/* merged_index: the indexes of all ranks, merged by tensor.
 *
 * Borrows the indexes. A tensor's shards may come from several indexes. If several ranks
 * stored the same part, the shard of the lowest rank is used. */
#ifndef MLS_MERGED_INDEX_H
#define MLS_MERGED_INDEX_H

#include "base/status.h"
#include "checkpoint/index/index.h"
#include "checkpoint/read/shard_read.h"

#include <stdbool.h>
#include <stddef.h>

/* A shard, and the index that lists its file. */
typedef struct mls_merged_index_shard {
    const mls_index *index;
    const mls_index_shard *shard;
} mls_merged_index_shard;

/* Shards `from` .. `from + count` of the merged index belong to one tensor, sorted by
 * part. Properties of the whole tensor are equal in all of them. */
typedef struct mls_merged_index_tensor {
    const mls_index_shard *any_shard; /* one of its shards */
    size_t from, count;
    size_t places; /* upper bound of the pieces for the whole tensor: one for each place,
                      and one more for each shard with zeros that are not stored */
} mls_merged_index_tensor;

typedef struct mls_merged_index {
    mls_merged_index_tensor *tensors; /* sorted by id */
    size_t tensor_count;
    mls_merged_index_shard *shards;
    size_t shard_count;
    bool links; /* files may be symbolic links, see mls_index */
} mls_merged_index;

/* Merge `count` indexes. Gives: release with mls_merged_index_fini, before the indexes.
 * MLS_E_FORMAT: shards disagree on their tensor's dtype, shape or layout, or indexes
 * disagree on a file's size or checksum, or their shards need more bytes than the file
 * has. MLS_E_MEMORY. `*out` is untouched on failure. `*failed` receives the later
 * one of two indexes that disagree; NULL for success and other failures. */
mls_code mls_merged_index_init(mls_merged_index *out, const mls_index *const *indexes,
                               size_t count, const mls_index **failed, mls_status *st);

void mls_merged_index_fini(
    mls_merged_index *merged); /* accepts a zeroed one; zeroes it */

/* Return the position in `merged->tensors` of the tensor with this id, or SIZE_MAX if
 * there is none. */
size_t mls_merged_index_find(const mls_merged_index *merged, const mls_tensor_id *id);

/* Set `*out` to the digest of a tensor, the sum of its parts' digests. Returns false, and
 * leaves `*out` unchanged, unless all its parts are listed with a recorded digest. */
bool mls_merged_index_digest(const mls_merged_index *merged,
                             const mls_merged_index_tensor *tensor, mls_digest *out);

#endif
