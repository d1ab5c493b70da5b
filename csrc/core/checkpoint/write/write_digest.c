/* write_digest: the digests that a save records: of which shards while they are written,
 * and of all others.
 *
 * A part whose elements are adjacent in the whole tensor is added while it is copied and
 * checksummed, when it is in the cache. Another one, or one that is not written plain, is
 * read here: a box of its tensor by one call, other parts run by run.
 */
#include "base/memory.h"
#include "checkpoint/write/write_plan.h"
#include "sharding/layout.h"
#include "state/digest.h"

enum { STEP = 256 << 10 }; /* bytes of strided memory that are packed at a time */

/* Add the digest of `run`, elements of an item's part and of its whole tensor, which has
 * `total` elements. `buffer` has STEP bytes if the memory is strided. */
static mls_code add_run(const mls_shard_job *job, const mls_digester *digester,
                        const mls_shard_item *item, mls_run run, size_t total,
                        unsigned char *buffer, mls_digest *sum, mls_status *st)
{
    const size_t most =
        item->data != NULL ? SIZE_MAX : STEP / mls_dtype_of(item->dtype)->item_bytes;
    mls_code code = MLS_OK;
    while (code == MLS_OK && run.count > 0) {
        mls_tensor elements;
        const size_t count = run.count < most ? run.count : most;
        const unsigned char *data = mls_planned_elements(job, item, run.a, count, buffer);
        /* the digest only reads */
        code = mls_tensor_init(&elements, (void *)(uintptr_t)data, item->dtype, 1, &count,
                               st);
        code = code == MLS_OK
                   ? mls_digest_part(digester, &elements, &total, &run.b, sum, st)
                   : code;
        run.a += count, run.b += count, run.count -= count;
    }
    return code;
}

/* Set the digest of `shard` to that of its part, or let the writer add it (`planned`). */
static mls_code digest_shard(const mls_shard_job *job, const mls_digester *digester,
                             mls_planned *planned, mls_index_shard *shard,
                             unsigned char *buffer, mls_status *st)
{
    const mls_shard_item *item = planned->item;
    const mls_layout undivided = {0};
    mls_part part, full;
    mls_overlap overlap;
    mls_run run;
    mls_code code =
        mls_layout_part(&item->layout, item->rank, item->shape, item->part, &part, st);
    if (code != MLS_OK || (code = mls_layout_part(&undivided, item->rank, item->shape, 0,
                                                  &full, st)) != MLS_OK) {
        return code;
    }
    const size_t total = mls_part_count(&full);
    shard->has_digest = true;
    mls_overlap_init(&overlap, &part, &full);
    if (!mls_overlap_next(&overlap, &run)) {
        return MLS_OK; /* no elements */
    }
    const bool is_plain = planned->layers == NULL && !planned->is_reused;
    if (is_plain && run.count == mls_part_count(&part)) {
        planned->digested = true;
        planned->digest_start = (uint64_t)run.b * mls_dtype_of(item->dtype)->item_bytes;
        return MLS_OK;
    }
    if (!part.flat && item->data != NULL) {
        mls_tensor box;
        const unsigned char *data = mls_planned_elements(job, item, 0, 0, NULL);
        code = mls_tensor_init(&box, (void *)(uintptr_t)data, item->dtype, part.rank,
                               part.length, st);
        return code == MLS_OK ? mls_digest_part(digester, &box, item->shape, part.start,
                                                &shard->digest, st)
                              : code;
    }
    do {
        code = add_run(job, digester, item, run, total, buffer, &shard->digest, st);
    } while (code == MLS_OK && mls_overlap_next(&overlap, &run));
    return code;
}

mls_code mls_write_plan_digest(mls_write_plan *plan, mls_status *st)
{
    const mls_shard_job *job = plan->job;
    const mls_digester digester = {job->digest_keys, job->kernels->cpu, job->pool};
    unsigned char *buffer = NULL;
    mls_code code = MLS_OK;
    if (job->digest_keys == NULL) {
        return MLS_OK;
    }
    for (size_t i = 0; code == MLS_OK && i < plan->index.shard_count; i++) {
        mls_planned *planned = &plan->planned[i];
        if (planned->item->data == NULL && buffer == NULL &&
            (buffer = mls_alloc(STEP, 1)) == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of 256 KiB");
        }
        code = digest_shard(job, &digester, planned, &plan->index.shards[i], buffer, st);
    }
    mls_free(buffer);
    return code;
}
