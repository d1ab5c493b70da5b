/* catalog: the indexes of all ranks together, by tensor.
 *
 * Borrows the indexes.  A tensor's shards may come from several of them; the same part of
 * a tensor may have been stored by more than one rank, and is taken from the first.
 */
#ifndef MLS_CATALOG_H
#define MLS_CATALOG_H

#include "checkpoint/index/index.h"
#include "checkpoint/read/shard_read.h"
#include "base/status.h"

#include <stddef.h>

/* A shard, and the index that knows its file. */
typedef struct mls_catalog_shard {
    const mls_index *index;
    const mls_index_shard *shard;
} mls_catalog_shard;

/* Shards `from` .. `from + count` of the catalog are those of one tensor, by part.  What
 * concerns the whole tensor is the same in all of them. */
typedef struct mls_catalog_tensor {
    const mls_index_shard *facts; /* one of them */
    size_t from, count;
    size_t places; /* that reading all of it takes: files' and, where there are zeros that
                      no file has, one more for each shard */
} mls_catalog_tensor;

typedef struct mls_catalog {
    mls_catalog_tensor *tensors; /* by id */
    size_t tensor_count;
    mls_catalog_shard *shards;
    size_t shard_count;
} mls_catalog;

/* Gives: release with mls_catalog_fini, before the indexes.
 * MLS_E_FORMAT: shards that do not agree on what tensor they are of, or indexes on what a
 * file is and whose shards fill it.  MLS_E_MEMORY. */
mls_code mls_catalog_init(mls_catalog *out, const mls_index *const *indexes, size_t count,
                          mls_status *st);

void mls_catalog_fini(mls_catalog *catalog); /* accepts a zeroed one; zeroes it */

/* Where a tensor of that id is, or SIZE_MAX. */
size_t mls_catalog_find(const mls_catalog *catalog, const mls_tensor_id *id);

/* Where pieces go, each with room for the `places` of their tensor. */
typedef struct mls_piece_room {
    mls_stored_shard *stored;
    mls_part *parts; /* of those of `stored` that are not just the part that is wanted */
    mls_piece *pieces;
} mls_piece_room;

/* What must be read for `to`, a part of a tensor, which must last as long: the places
 * that have something of it and, with `data` (where the part lies packed), the pieces to
 * read. Places without a file are those of zeros that were not stored. MLS_E_FORMAT: no
 * rank has stored some of it; the status names the tensor. */
mls_code mls_catalog_pieces(const mls_catalog *catalog, const mls_catalog_tensor *tensor,
                            const mls_part *to, unsigned char *data,
                            const mls_piece_room *room, size_t *count, mls_status *st);

/* The same for a part that one plain shard has in one run: where in its file that starts.
 * NULL: it is in several places, or the shard is sparse. */
const mls_catalog_shard *mls_catalog_run(const mls_catalog *catalog,
                                         const mls_catalog_tensor *tensor,
                                         const mls_part *to, uint64_t *offset);

#endif
