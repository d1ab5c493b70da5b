/* bucket: parts of many arrays in one message for each rank.
 *
 * There is no table of offsets: the place of a part follows from the counts before it,
 * and all loops here visit segments in the same order.
 */
#include "bucket.h"

#include "size.h"

#include <string.h>

/* Bytes that a part takes in a message, padding included; false where they overflow. */
static bool padded_bytes(const mls_segment *s, size_t of, size_t *out)
{
    size_t bytes;
    const size_t item = mls_dtype_of(s->reduction.dtype)->item_bytes;
    if (!mls_size_mul(s->counts[of], item, &bytes) ||
        !mls_size_add(bytes, MLS_BUCKET_ALIGN - 1, &bytes)) {
        return false;
    }
    *out = bytes / MLS_BUCKET_ALIGN * MLS_BUCKET_ALIGN;
    return true;
}

/* Every product and sum is checked here: part_bytes and the copies below rely on it. */
mls_code mls_bucket_bytes(const mls_bucket *b, size_t of, size_t *out, mls_status *st)
{
    size_t total = 0;
    for (size_t i = 0; i < b->count; i++) {
        size_t bytes;
        if (!padded_bytes(&b->segments[i], of, &bytes) ||
            !mls_size_add(total, bytes, &total)) {
            return mls_fail(st, MLS_E_SIZE,
                            "the parts of rank %zu in a bucket of %zu arrays have more "
                            "bytes than memory can",
                            of, b->count);
        }
    }
    *out = total;
    return MLS_OK;
}

/* What mls_bucket_bytes found to fit. */
static size_t part_bytes(const mls_segment *s, size_t of)
{
    size_t bytes = 0;
    (void)padded_bytes(s, of, &bytes);
    return bytes;
}

/* The first element of a rank's part in the array itself. */
static const unsigned char *part_of(const mls_segment *s, size_t of)
{
    size_t start = 0;
    for (size_t rank = 0; rank < of; rank++) {
        start += s->counts[rank];
    }
    return s->data + start * mls_dtype_of(s->reduction.dtype)->item_bytes;
}

/* Padding is zeroed: what lies in a message does not depend on what the memory held, and
 * no bytes of another array leave the process. */
void mls_bucket_pack(const mls_bucket *b, unsigned char *send)
{
    for (size_t to = 0; to < b->world; to++) {
        for (size_t i = 0; to != b->rank && i < b->count; i++) {
            const mls_segment *s = &b->segments[i];
            const size_t item = mls_dtype_of(s->reduction.dtype)->item_bytes;
            const size_t bytes = s->counts[to] * item, room = part_bytes(s, to);
            if (bytes != 0) {
                memcpy(send, part_of(s, to), bytes);
                memset(send + bytes, 0, room - bytes);
            }
            send += room;
        }
    }
}

/* Where the part of this rank lies that rank `of` has: in its message, `at` bytes from
 * the start, or in the array itself. */
static const unsigned char *source_of(const mls_bucket *b, size_t i, size_t of,
                                      const unsigned char *received, size_t message,
                                      size_t at)
{
    if (of == b->rank) {
        return part_of(&b->segments[i], b->rank);
    }
    const size_t before = of < b->rank ? of : of - 1; /* none comes from this rank */
    return received + before * message + at;
}

/* All messages for this rank have one length, since all senders have the same counts.
 * `out` may be the rank's own part of `data`: the kernels have read an element from all
 * sources before they write it. */
void mls_bucket_reduce(const mls_bucket *b, const mls_kernels *kernels,
                       const unsigned char *received, const void **sources)
{
    size_t at = 0, message = 0;
    for (size_t i = 0; i < b->count; i++) {
        message += part_bytes(&b->segments[i], b->rank);
    }
    const mls_destination destination = {.bytes = message};
    for (size_t i = 0; i < b->count; i++) {
        mls_segment *s = &b->segments[i];
        s->tally = (mls_tally){0};
        for (size_t of = 0; of < b->world; of++) {
            sources[of] = source_of(b, i, of, received, message, at);
        }
        mls_reduce_run(kernels, &s->reduction, sources, b->world, s->out,
                       s->counts[b->rank], destination, &s->tally);
        at += part_bytes(s, b->rank);
    }
}
