/* delta_encode: which elements of two arrays differ: makes the delta and the new array's
 * checksum.
 *
 * Block by block, while the block is in the cache: the numbers of the changed elements,
 * then gaps and values, then the checksum. */
#include "follow/delta_array.h"
#include "follow/delta_kernels.h"
#include "follow/delta_streams.h"

#include "base/size.h"
#include "state/diff/diff.h"

enum {
    CRC_BYTES = 64 << 10 /* of an array, whose checksum is computed at once */
};

/* Check that two arrays can be compared. MLS_E_SHAPE, MLS_E_DTYPE: they differ in it;
 * MLS_E_DTYPE also if one is byte-swapped. MLS_E_SIZE: more elements than size_t can
 * count. */
static mls_code check_arrays(const mls_tensor *base, const mls_tensor *changed,
                             mls_status *st)
{
    const mls_code code = mls_diff_check(base, changed, st);
    if (code == MLS_OK && (base->swapped || changed->swapped)) {
        return mls_fail(st, MLS_E_DTYPE, "byte-swapped %s cannot be compared: convert it",
                        mls_dtype_of(base->dtype)->name);
    }
    return code;
}

/* Append the `count` changed elements of a block, for which room was reserved, with gaps
 * of 1 byte. `first` is the number of the block's first element, `numbers` count from
 * there, and `block` has the elements of `size` bytes. The ends of the streams are local
 * variables: a store of a byte could change a field of the writer, as far as the compiler
 * knows. */
static inline void put_numbers(mls_delta_writer *writer, size_t first,
                               const uint16_t *numbers, size_t count,
                               const unsigned char *block, size_t size)
{
    mls_delta *d = &writer->delta;
    unsigned char *gap_end = d->gaps + d->gaps_bytes;
    unsigned char *value_end = d->values + d->values_bytes;
    size_t next = writer->next;
    for (size_t i = 0; i < count; i++) {
        size_t gap = first + numbers[i] - next;
        /* without a branch, because one of 12 gaps is long if 1 % has changed */
        const size_t escape = gap >= UINT8_MAX;
        *gap_end = UINT8_MAX;
        gap_end += escape;
        gap -= escape * UINT8_MAX;
        for (; gap >= UINT8_MAX; gap -= UINT8_MAX) {
            *gap_end++ = UINT8_MAX;
        }
        *gap_end++ = (unsigned char)gap;
        memcpy(value_end, block + numbers[i] * size, size);
        value_end += size;
        next = first + numbers[i] + 1;
    }
    d->gaps_bytes = (size_t)(gap_end - d->gaps);
    d->values_bytes = (size_t)(value_end - d->values);
    d->changed += count;
    writer->next = next;
}

/* put_numbers for the writer's element size. A constant size lets the compiler copy a
 * value with one instruction. */
static void put_block(mls_delta_writer *writer, size_t first, const uint16_t *numbers,
                      size_t count, const unsigned char *block)
{
    switch (writer->delta.item_bytes) {
    case 1:
        put_numbers(writer, first, numbers, count, block, 1);
        break;
    case 2:
        put_numbers(writer, first, numbers, count, block, 2);
        break;
    case 4:
        put_numbers(writer, first, numbers, count, block, 4);
        break;
    case 8:
        put_numbers(writer, first, numbers, count, block, 8);
        break;
    default:
        put_numbers(writer, first, numbers, count, block, 16);
        break;
    }
}

/* The checksum of an array that is read block by block. */
typedef struct checksum {
    const mls_crc_kernels *crc32c; /* NULL: not wanted */
    const unsigned char *pending;  /* bytes before the current block, in the cache */
    size_t bytes;                  /* pending */
    uint32_t sum;                  /* of the bytes before the pending ones */
} checksum;

/* Add `bytes` bytes of the array at `block` to the checksum. Blocks that follow each
 * other in memory are read together, because long ranges are faster. `last`: the next
 * block does not follow this one, or does not exist. */
static void add_block(checksum *c, const unsigned char *block, size_t bytes, bool last)
{
    if (c->crc32c == NULL) {
        return;
    }
    if (c->bytes == 0) {
        c->pending = block;
    }
    c->bytes += bytes;
    if (last || c->bytes >= CRC_BYTES) {
        c->sum = c->crc32c->update(c->sum, c->pending, c->bytes);
        c->bytes = 0;
    }
}

/* Make the delta of two arrays. Compare block by block. Room is reserved for the changed
 * elements of a block when their number is known. */
mls_code mls_delta_encode(const mls_delta_kernels *kernels, const mls_crc_kernels *crc32c,
                          const mls_tensor *base, const mls_tensor *changed,
                          mls_delta *out, uint32_t *crc, mls_status *st)
{
    unsigned char base_buffer[MLS_DELTA_BLOCK_BYTES],
        changed_buffer[MLS_DELTA_BLOCK_BYTES];
    uint16_t numbers[MLS_DELTA_BLOCK_BYTES + MLS_DELTA_SURE];
    const size_t size = mls_tensor_item_bytes(base);
    mls_delta_writer writer = {.delta = {.item_bytes = size, .gap_bytes = 1}};
    mls_delta *d = &writer.delta;
    checksum sum = {.crc32c = crc == NULL ? NULL : crc32c};
    const mls_code code = check_arrays(base, changed, st);
    if (code != MLS_OK) {
        return code;
    }
    (void)mls_tensor_count(base, &d->elements); /* checked */
    const mls_delta_compare compare = kernels->compare[__builtin_ctzll(size)];
    const size_t step = MLS_DELTA_BLOCK_BYTES / size;
    const bool base_in_order = mls_tensor_is_contiguous(base);
    const bool changed_in_order = mls_tensor_is_contiguous(changed);
    bool complete = true;
    for (size_t first = 0; first < d->elements && complete; first += step) {
        const size_t count = mls_size_least(step, d->elements - first);
        const unsigned char *before =
            mls_block(base, base_in_order, first, count, base_buffer);
        const unsigned char *after =
            mls_block(changed, changed_in_order, first, count, changed_buffer);
        const size_t unequal = compare(before, after, count, numbers);
        complete = unequal == 0 || mls_delta_reserve(&writer, unequal, first + count);
        if (complete && unequal > 0) {
            put_block(&writer, first, numbers, unequal, after);
        }
        add_block(&sum, after, count * size,
                  !changed_in_order || d->elements - first <= step);
    }
    const mls_code end = mls_delta_finish(&writer, complete, out, st);
    if (end == MLS_OK && crc != NULL) {
        *crc = sum.sum;
    }
    return end;
}
