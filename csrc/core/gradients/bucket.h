/* bucket: several arrays that are reduced as one operation.
 *
 * Each array is divided among the ranks, and every rank wants the sum of its own part
 * over all ranks.  An engine that only moves bytes gets all parts of a rank in one
 * message: packed here in the order of the arrays, each part starting at a multiple of
 * MLS_BUCKET_ALIGN, and reduced here when all messages are there, in the order of ranks.
 */
#ifndef MLS_BUCKET_H
#define MLS_BUCKET_H

#include "gradients/reduce/reduce.h"
#include "base/status.h"
#include "array/tensor.h"

enum { MLS_BUCKET_ALIGN = 16 };

/* One array of a bucket.  Borrows everything. */
typedef struct mls_segment {
    const unsigned char *data; /* all elements, packed, part after part */
    const size_t *counts;      /* elements of each rank's part, the same on every rank */
    void *out; /* the reduced part of this rank, in `reduction.out_dtype`; where the
                * dtypes are equal it may be that part of `data` */
    mls_reduction reduction;
    mls_tally tally; /* of `out`, once it is there */
} mls_segment;

/* Which segments are sent to whom: `world` ranks, of which this is `rank`. */
typedef struct mls_bucket {
    mls_segment *segments; /* borrowed */
    size_t count;
    size_t world, rank;
} mls_bucket;

/* Whether a bucket takes an array where it is: packed, in the machine's byte order, and
 * aligned to its items, a complex64 to 8 bytes. */
bool mls_bucket_takes(const mls_tensor *t);

/* Check the arrays of a segment, both of which a bucket takes, against the elements of
 * each rank's part.  Pack and reduce trust these counts.  An output is memory of its own,
 * or this rank's part of `data` in the same dtype: anywhere else sums would overwrite
 * elements that were not sent yet. MLS_E_VALUE: the counts do not add up to `data`, or
 * rank's count is not that of `out`. MLS_E_OVERLAP. */
mls_code mls_segment_check(const mls_tensor *data, const mls_tensor *out,
                           const size_t *counts, size_t world, size_t rank,
                           mls_status *st);

/* Elements of all parts of a segment that was checked. */
size_t mls_segment_elements(const mls_segment *segment, size_t world);

/* Bytes of the message to rank `of`: its parts of all segments.  MLS_E_SIZE: more than
 * memory has. */
mls_code mls_bucket_bytes(const mls_bucket *b, size_t of, size_t *out, mls_status *st);

/* Bytes of the messages to all other ranks together, or from all of them: each of these
 * has the length of this rank's own message.  MLS_E_SIZE. */
mls_code mls_bucket_sent_bytes(const mls_bucket *b, size_t *out, mls_status *st);
mls_code mls_bucket_received_bytes(const mls_bucket *b, size_t *out, mls_status *st);

/* Copy the parts of all other ranks into `send`, rank after rank; nothing for this one.
 */
void mls_bucket_pack(const mls_bucket *b, unsigned char *send);

/* Reduce what the other ranks packed for this one: `received` holds their messages in the
 * order of ranks, mls_bucket_bytes of this rank from each other one.  This rank's own
 * elements are read where they lie.  Sets the tallies.  `sources` has room for a pointer
 * for each rank.  Reductions were checked; `received` is aligned to MLS_BUCKET_ALIGN. */
void mls_bucket_reduce(const mls_bucket *b, const mls_kernels *kernels,
                       const unsigned char *received, const void **sources);

#endif
