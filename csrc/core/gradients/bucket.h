/* bucket: several arrays that are reduced in one operation, each divided among the ranks.
 *
 * Each array is divided among the ranks, and every rank receives the sum of its own part
 * over all ranks. An engine that only moves bytes sends all parts for a rank in one
 * message. This module packs the message, in the order of the arrays with each part at a
 * multiple of MLS_BUCKET_ALIGN. After all messages have arrived, it reduces them in rank
 * order, or in the order of mls_sums.
 */
#ifndef MLS_BUCKET_H
#define MLS_BUCKET_H

#include "array/tensor.h"
#include "base/status.h"
#include "gradients/reduce/reduce.h"

enum {
    MLS_BUCKET_ALIGN = 16,
    MLS_SUM_SCRATCH = 16, /* intermediate sums */
    MLS_SUM_ADDENDS = 64  /* of one sum */
};

/* Sums whose order is not the ranks' order, such as a tree. Borrows both pointers.
 * `codes` has, for each sum in turn: its target, the number of its addends (1 to
 * MLS_SUM_ADDENDS), and the addends, which are added in this order. A number below the
 * number of ranks is the part that this rank sent (only an addend), the next
 * MLS_SUM_SCRATCH are intermediate sums, and the others are `memories`, which have this
 * rank's elements. Except if their dtypes are equal, parts are not added to sums. */
typedef struct mls_sums {
    const uint64_t *codes;
    size_t length; /* of `codes` */
    void *const *memories;
} mls_sums;

/* One array of a bucket. Borrows all pointers. */
typedef struct mls_segment {
    const unsigned char *data; /* all elements, packed, in rank order */
    const size_t *counts;      /* elements of each rank's part; equal on every rank */
    void *out; /* this rank's reduced part, in `reduction.out_dtype`; may be the rank's
                  part of `data` if the dtypes are equal */
    mls_reduction reduction;
    const mls_sums *sums;          /* instead of `out`; NULL: ranks are added in order */
    mls_norm_partial norm_partial; /* of `out` or the memories, after the reduction */
} mls_segment;

/* The segments of `world` ranks, as seen by `rank`. */
typedef struct mls_bucket {
    mls_segment *segments; /* borrowed */
    size_t count;
    size_t world, rank;
} mls_bucket;

/* Returns whether a bucket can use an array without a copy: packed, in native byte order,
 * and aligned to min(item size, 8) bytes. */
bool mls_bucket_takes(const mls_tensor *t);

/* Checks the arrays of a segment against the element counts of the ranks' parts; pack and
 * reduce trust these counts. mls_bucket_takes must hold for both arrays. The output must
 * be separate memory, or this rank's part of `data` in the same dtype: otherwise sums
 * would overwrite elements that are not sent yet. MLS_E_VALUE: the counts do not add up
 * to the size of `data`, or this rank's count is not the size of `out`. MLS_E_OVERLAP. */
mls_code mls_segment_check(const mls_tensor *data, const mls_tensor *out,
                           const size_t *counts, size_t world, size_t rank,
                           mls_status *st);

/* Returns the elements of the parts of the first `ranks` ranks of a checked segment. */
size_t mls_segment_elements(const mls_segment *segment, size_t ranks);

/* Reduces `n` elements of a rank's part of a segment, from element `start` of the part
 * on: `sources` has the addresses of the first one by rank, of `world` ranks. Adds to
 * `norm_partial` if `wants_norm`. `destination`: as for mls_reduce_run. */
void mls_segment_reduce(mls_segment *s, const mls_kernels *kernels,
                        const void *const *sources, size_t world, size_t start, size_t n,
                        mls_destination destination, bool wants_norm);

/* Computes the bytes of the message to rank `owner`: its parts of all segments with their
 * padding. MLS_E_SIZE: overflow; `*out` is unchanged. */
mls_code mls_bucket_bytes(const mls_bucket *b, size_t owner, size_t *out, mls_status *st);

/* Compute the bytes of the messages to all other ranks, or from all of them. Each
 * received message is as long as this rank's own part. MLS_E_SIZE: overflow. */
mls_code mls_bucket_sent_bytes(const mls_bucket *b, size_t *out, mls_status *st);
mls_code mls_bucket_received_bytes(const mls_bucket *b, size_t *out, mls_status *st);

/* Packs the messages to all other ranks one after the other, in rank order. `messages`
 * has mls_bucket_sent_bytes bytes. */
void mls_bucket_pack(const mls_bucket *b, unsigned char *messages);

/* Reduces the messages that the other ranks packed for this one, and sets the norm
 * partials. `received` holds the messages in rank order, mls_bucket_bytes of this rank
 * from each other rank, and is aligned to MLS_BUCKET_ALIGN. This rank's own elements are
 * read from its arrays. `sources` is scratch for `world` pointers. The reductions must
 * have passed mls_reduce_check. */
void mls_bucket_reduce(const mls_bucket *b, const mls_kernels *kernels,
                       const unsigned char *received, const void **sources);

#endif
