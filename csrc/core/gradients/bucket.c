/* bucket: packs gradients into one message for each rank, and sums the received messages
 * in rank order.
 *
 * A message has no table of offsets: the offset of a part follows from the counts before
 * it, and all loops here visit segments in the same order.
 */
#include "gradients/bucket.h"

#include "array/overlap.h"
#include "base/size.h"

#include <string.h>

/* A complex64 needs only 4 bytes of alignment for its components; 8 bytes are required
 * here. */
bool mls_bucket_takes(const mls_tensor *t)
{
    const size_t item = mls_tensor_item_bytes(t);
    return mls_tensor_is_contiguous(t) && !t->swapped &&
           (uintptr_t)t->data % (item < 8 ? item : 8) == 0;
}

/* Check that the counts of all ranks add up to the elements of `data`, that `out` has
 * this rank's count, and that the two arrays are separate or exactly this rank's part. */
mls_code mls_segment_check(const mls_tensor *data, const mls_tensor *out,
                           const size_t *counts, size_t world, size_t rank,
                           mls_status *st)
{
    size_t total = 0, start = 0, data_elements = 0, out_elements = 0;
    if (!mls_size_sum(counts, world, &total) || !mls_size_sum(counts, rank, &start)) {
        return mls_fail(st, MLS_E_VALUE,
                        "the parts of an array have more elements than memory");
    }
    if (!mls_tensor_count(data, &data_elements) ||
        !mls_tensor_count(out, &out_elements) || data_elements != total ||
        out_elements != counts[rank]) {
        return mls_fail(st, MLS_E_VALUE,
                        "an array of %zu elements and an output of %zu do not fit counts "
                        "that add up to %zu, with %zu for this rank",
                        data_elements, out_elements, total, counts[rank]);
    }
    const unsigned char *part = data->data + start * mls_tensor_item_bytes(data);
    if (mls_tensor_overlap(data, out) &&
        (data->dtype != out->dtype || part != out->data)) {
        return mls_fail(st, MLS_E_OVERLAP,
                        "the output shares memory with the array, and is not this rank's "
                        "part of it in the same dtype");
    }
    return MLS_OK;
}

/* Add up the counts of the first `ranks` ranks. For `ranks` = r this is the position of
 * rank r's part, in elements. */
size_t mls_segment_elements(const mls_segment *segment, size_t ranks)
{
    size_t total = 0;
    (void)mls_size_sum(segment->counts, ranks, &total); /* fits: it was checked */
    return total;
}

/* Compute the sums of a segment, block by block if there are intermediate sums, which so
 * stay in the L1 cache; arguments as for mls_segment_reduce. */
static void reduce_in_blocks(mls_segment *s, const mls_kernels *kernels,
                             const void *const *sources, size_t world, size_t start,
                             size_t n, mls_destination destination, bool wants_norm)
{
    enum { BLOCK_BYTES = 4096 };
    _Alignas(64) unsigned char scratch[MLS_SUM_SCRATCH][BLOCK_BYTES];
    const mls_sums *sums = s->sums;
    const size_t memories = world + MLS_SUM_SCRATCH;
    const uint64_t *const end = sums->codes + sums->length;
    const size_t item = mls_dtype_of(s->reduction.dtype)->item_bytes;
    const size_t out_item = mls_dtype_of(s->reduction.out_dtype)->item_bytes;
    size_t block = n;
    for (const uint64_t *code = sums->codes; code < end; code += 2 + code[1]) {
        block = code[0] < memories ? BLOCK_BYTES / out_item : block;
    }
    for (size_t done = 0; done < n; done += block) {
        for (const uint64_t *code = sums->codes; code < end; code += 2 + code[1]) {
            unsigned char *at[1 + MLS_SUM_ADDENDS]; /* target and addends */
            for (size_t i = 0; i <= code[1]; i++) {
                const size_t number = (size_t)code[i == 0 ? 0 : i + 1];
                at[i] = number < world
                            ? (unsigned char *)(uintptr_t)sources[number] + done * item
                        : number < memories
                            ? scratch[number - world]
                            : (unsigned char *)sums->memories[number - memories] +
                                  (start + done) * out_item;
            }
            mls_reduction r = s->reduction;
            r.dtype = code[2] < world ? r.dtype : r.out_dtype;
            const bool is_kept = code[0] >= memories;
            mls_reduce_run(kernels, &r, (const void *const *)(at + 1), (size_t)code[1],
                           at[0], mls_size_least(n - done, block),
                           is_kept ? destination : mls_cached(),
                           is_kept && wants_norm ? &s->norm_partial : NULL);
        }
    }
}

/* Add in the order of ranks, or in the order of `sums`. */
void mls_segment_reduce(mls_segment *s, const mls_kernels *kernels,
                        const void *const *sources, size_t world, size_t start, size_t n,
                        mls_destination destination, bool wants_norm)
{
    if (s->sums != NULL) {
        reduce_in_blocks(s, kernels, sources, world, start, n, destination, wants_norm);
        return;
    }
    const size_t item = mls_dtype_of(s->reduction.out_dtype)->item_bytes;
    mls_reduce_run(kernels, &s->reduction, sources, world,
                   (unsigned char *)s->out + start * item, n, destination,
                   wants_norm ? &s->norm_partial : NULL);
}

/* Set `*out` to the bytes that the part of rank `owner` of a segment takes in a message,
 * with padding to MLS_BUCKET_ALIGN; returns false on overflow. */
static bool padded_bytes(const mls_segment *s, size_t owner, size_t *out)
{
    size_t bytes;
    const size_t item = mls_dtype_of(s->reduction.dtype)->item_bytes;
    if (!mls_size_mul(s->counts[owner], item, &bytes) ||
        !mls_size_add(bytes, MLS_BUCKET_ALIGN - 1, &bytes)) {
        return false;
    }
    *out = bytes / MLS_BUCKET_ALIGN * MLS_BUCKET_ALIGN;
    return true;
}

/* Add up the padded parts. Every product and sum is checked here: part_bytes and the
 * copies below rely on it. */
mls_code mls_bucket_bytes(const mls_bucket *b, size_t owner, size_t *out, mls_status *st)
{
    size_t total = 0;
    for (size_t i = 0; i < b->count; i++) {
        size_t bytes;
        if (!padded_bytes(&b->segments[i], owner, &bytes) ||
            !mls_size_add(total, bytes, &total)) {
            return mls_fail(st, MLS_E_SIZE,
                            "the parts of rank %zu in a bucket of %zu arrays have more "
                            "bytes than memory can",
                            owner, b->count);
        }
    }
    *out = total;
    return MLS_OK;
}

/* Set `*out` to the total bytes of the messages from this rank to all others (`sent`), or
 * to it from all others. MLS_E_SIZE: they exceed memory. */
static mls_code message_bytes(const mls_bucket *b, bool sent, size_t *out, mls_status *st)
{
    size_t total = 0;
    for (size_t rank = 0; rank < b->world; rank++) {
        size_t bytes;
        if (mls_bucket_bytes(b, sent ? rank : b->rank, &bytes, st) != MLS_OK) {
            return st->code;
        }
        if (rank != b->rank && !mls_size_add(total, bytes, &total)) {
            return mls_fail(st, MLS_E_SIZE,
                            "the messages of a bucket of %zu arrays have more bytes than "
                            "memory can",
                            b->count);
        }
    }
    *out = total;
    return MLS_OK;
}

mls_code mls_bucket_sent_bytes(const mls_bucket *b, size_t *out, mls_status *st)
{
    return message_bytes(b, true, out, st);
}

mls_code mls_bucket_received_bytes(const mls_bucket *b, size_t *out, mls_status *st)
{
    return message_bytes(b, false, out, st);
}

/* Return padded_bytes. Call it after mls_bucket_bytes, which checked for overflow. */
static size_t part_bytes(const mls_segment *s, size_t owner)
{
    size_t bytes = 0;
    (void)padded_bytes(s, owner, &bytes);
    return bytes;
}

/* Return the address of the part of rank `owner` in this rank's array. */
static const unsigned char *part_of(const mls_segment *s, size_t owner)
{
    return s->data +
           mls_segment_elements(s, owner) * mls_dtype_of(s->reduction.dtype)->item_bytes;
}

/* Pack the messages to all other ranks, in rank order, each with its parts in segment
 * order. `messages` has mls_bucket_sent_bytes bytes; the pointer moves to the next part.
 * Padding becomes zeros: the message does not depend on old memory contents, and no stray
 * bytes leave the process. */
void mls_bucket_pack(const mls_bucket *b, unsigned char *messages)
{
    for (size_t receiver = 0; receiver < b->world; receiver++) {
        for (size_t i = 0; receiver != b->rank && i < b->count; i++) {
            const mls_segment *s = &b->segments[i];
            const size_t item = mls_dtype_of(s->reduction.dtype)->item_bytes;
            const size_t bytes = s->counts[receiver] * item;
            const size_t padded = part_bytes(s, receiver);
            if (bytes != 0) {
                memcpy(messages, part_of(s, receiver), bytes);
                memset(messages + bytes, 0, padded - bytes);
            }
            messages += padded;
        }
    }
}

/* Return what rank `sender` contributes to this rank's part of segment i: for another
 * rank the bytes at `offset` in its message, for this rank those in its own array.
 * `received` has messages of `message_bytes` bytes each. */
static const unsigned char *source_of(const mls_bucket *b, size_t i, size_t sender,
                                      const unsigned char *received, size_t message_bytes,
                                      size_t offset)
{
    if (sender == b->rank) {
        return part_of(&b->segments[i], b->rank);
    }
    const size_t messages_before =
        sender < b->rank ? sender : sender - 1; /* this rank sends itself no message */
    return received + messages_before * message_bytes + offset;
}

/* Reduce this rank's part of every segment. All messages to this rank have the same
 * length, since all senders have the same counts. `out` may be the rank's own part of
 * `data`: the kernels read an element of all sources before they write it. Stores
 * bypass the cache, or not, as for one result with the bytes of a message. */
void mls_bucket_reduce(const mls_bucket *b, const mls_kernels *kernels,
                       const unsigned char *received, const void **sources)
{
    size_t offset = 0, message_bytes = 0;
    for (size_t i = 0; i < b->count; i++) {
        message_bytes += part_bytes(&b->segments[i], b->rank);
    }
    const mls_destination destination = {.bytes = message_bytes};
    for (size_t i = 0; i < b->count; i++) {
        mls_segment *s = &b->segments[i];
        s->norm_partial = (mls_norm_partial){0};
        for (size_t sender = 0; sender < b->world; sender++) {
            sources[sender] = source_of(b, i, sender, received, message_bytes, offset);
        }
        mls_segment_reduce(s, kernels, sources, b->world, 0, s->counts[b->rank],
                           destination, true);
        offset += part_bytes(s, b->rank);
    }
}
