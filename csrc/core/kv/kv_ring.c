/* kv_ring: the slot of each position in a cache of fixed size: appends, eviction, sinks,
 * trims, order (RollingKVState).
 *
 * Consecutive positions are in consecutive slots, except at the end of the ring, so every
 * operation handles at most three ranges of slots: the sinks, and the others up to the
 * end of the ring and from its beginning. The window is the number of slots behind the
 * sinks.
 */
#include "kv/kv_ring.h"

#include "array/overlap.h"
#include "base/size.h"
#include "kv/kv_transition.h"

#include <inttypes.h>
#include <string.h>

static size_t capacity_of(const mls_kv_ring *ring)
{
    return ring->slots.shape[ring->axis];
}

/* Return the slot that stores `position`: slot p for a sink at position p; the other
 * positions use the slots behind the sinks in turn, rotated by `shift`. */
static size_t slot_of(const mls_kv_ring *ring, size_t position)
{
    if (position < ring->sinks) {
        return position;
    }
    const size_t window = capacity_of(ring) - ring->sinks;
    return ring->sinks + (position - ring->sinks + ring->shift) % window;
}

/* Return how many of the positions first .. first + count - 1 are in adjacent slots,
 * counted from `first` on. The sinks and the slots behind them are separate ranges, so
 * none spans both. */
static size_t adjacent_slots(const mls_kv_ring *ring, size_t first, size_t count)
{
    const size_t end = first < ring->sinks ? ring->sinks : capacity_of(ring);
    const size_t room = end - slot_of(ring, first);
    return count < room ? count : room;
}

/* Return how many sinks are held. */
static size_t stored_sinks(const mls_kv_ring *ring)
{
    return ring->next < ring->sinks ? ring->next : ring->sinks;
}

/* Return how many tokens after the sinks are held. */
static size_t stored_others(const mls_kv_ring *ring)
{
    return ring->next > ring->oldest ? ring->next - ring->oldest : 0;
}

size_t mls_kv_ring_length(const mls_kv_ring *ring)
{
    return stored_sinks(ring) + stored_others(ring);
}

/* Check the rank of `slots`, the sequence axis, and that `sinks` leave a slot for other
 * tokens. A capacity of 0 without sinks passes: a borrowed ring may have it. MLS_E_SHAPE,
 * MLS_E_CAPACITY. */
static mls_code check_ring(const mls_tensor *slots, int axis, size_t sinks,
                           mls_status *st)
{
    int found_axis;
    const mls_code code = mls_kv_find_axis("a rolling cache", slots->rank, slots->shape,
                                           "the sequence axis", axis, &found_axis, st);
    if (code != MLS_OK) {
        return code;
    }
    const size_t capacity = slots->shape[axis];
    if (sinks > 0 && sinks >= capacity) {
        mls_fail(
            st, MLS_E_CAPACITY,
            "%zu sinks leave no room for other tokens in a capacity of %zu: use fewer "
            "sinks or a larger capacity",
            sinks, capacity);
        mls_status_expected(st, "0..%zu", capacity - 1);
        return mls_status_got(st, "%zu", sinks);
    }
    return MLS_OK;
}

/* Reserve an empty ring. `oldest` is `sinks` from the start, as the header requires,
 * although no such token exists yet. */
mls_code mls_kv_ring_init(mls_kv_ring *out, const mls_tensor *slots, int axis,
                          size_t sinks, mls_status *st)
{
    mls_kv_ring ring = {.axis = axis, .sinks = sinks, .oldest = sinks};
    mls_code code = check_ring(slots, axis, sinks, st);
    if (code == MLS_OK && slots->shape[axis] == 0) {
        mls_fail(st, MLS_E_CAPACITY, "capacity must be at least 1 position, got 0");
        mls_status_expected(st, "at least 1");
        code = mls_status_got(st, "0");
    }
    if (code == MLS_OK) {
        code = mls_tensor_init(&ring.slots, NULL, slots->dtype, slots->rank, slots->shape,
                               st);
    }
    if (code == MLS_OK) {
        code = mls_pages_init(&ring.pages, mls_kv_bytes(&ring.slots), st);
    }
    if (code != MLS_OK) {
        return code;
    }
    /* no huge pages, so that slots that are never used cost no memory */
    mls_advise_pages(ring.pages.data, ring.pages.mapped, false /* no huge pages */);
    ring.slots.data = ring.pages.data;
    ring.slots.swapped = slots->swapped;
    *out = ring;
    return MLS_OK;
}

/* A zeroed ring has no pages, so this may be called twice. */
void mls_kv_ring_fini(mls_kv_ring *ring)
{
    mls_pages_fini(&ring->pages);
    *ring = (mls_kv_ring){0};
}

/* Describe memory of the caller as a ring. Check the shape, and compute the counters from
 * the number of appended tokens. */
mls_code mls_kv_ring_borrow(mls_kv_ring *out, const mls_tensor *slots, int axis,
                            size_t sinks, size_t length, size_t shift, mls_status *st)
{
    const mls_code code = check_ring(slots, axis, sinks, st);
    if (code != MLS_OK) {
        return code;
    }
    const size_t window = slots->shape[axis] - sinks;
    const size_t others = length > sinks ? length - sinks : 0;
    *out = (mls_kv_ring){.slots = *slots,
                         .axis = axis,
                         .sinks = sinks,
                         .shift = window > 0 ? shift % window : 0,
                         .oldest = sinks,
                         .next = length};
    if (others > window) {
        out->evicted = others - window;
        out->oldest = length - window;
    }
    return MLS_OK;
}

/* Check that `tokens` have the ring's dtype, its shape except for the sequence, and no
 * memory in common with it. MLS_E_SHAPE, MLS_E_DTYPE, MLS_E_OVERLAP. */
static mls_code check_tokens(const mls_kv_ring *ring, const mls_tensor *tokens,
                             mls_status *st)
{
    char text[MLS_FACT_BYTES], expected_text[MLS_FACT_BYTES];
    bool is_same = tokens->rank == ring->slots.rank;
    for (int axis = 0; is_same && axis < tokens->rank; axis++) {
        is_same = axis == ring->axis || tokens->shape[axis] == ring->slots.shape[axis];
    }
    if (!is_same) {
        mls_shape_text(text, sizeof text, tokens->rank, tokens->shape);
        mls_shape_text(expected_text, sizeof expected_text, ring->slots.rank,
                       ring->slots.shape);
        mls_fail(
            st, MLS_E_SHAPE,
            "tokens have shape %s, the cache %s: they may differ only in axis %d, the "
            "sequence",
            text, expected_text, ring->axis);
        return mls_status_differ(st, expected_text, text);
    }
    if (tokens->dtype != ring->slots.dtype) {
        const char *got = mls_dtype_of(tokens->dtype)->name;
        const char *expected = mls_dtype_of(ring->slots.dtype)->name;
        mls_fail(st, MLS_E_DTYPE, "tokens are %s, the cache is %s: convert them first",
                 got, expected);
        return mls_status_differ(st, expected, got);
    }
    if (mls_tensor_overlap(&ring->slots, tokens)) {
        return mls_fail(st, MLS_E_OVERLAP,
                        "tokens share memory with the cache: pass a copy of them");
    }
    return MLS_OK;
}

/* Copy `rows` runs of `bytes` bytes. Run i is read at `from` + i * from_step and written
 * at `to` + i * to_step (bytes). If the sequence axis is the last one and one token is
 * appended, a run is one element: a constant size makes its copy one instruction. */
static void copy_rows(unsigned char *to, size_t to_step, const unsigned char *from,
                      size_t from_step, size_t bytes, size_t rows)
{
#define COPY_ROWS(size)                                                                  \
    for (size_t i = 0; i < rows; i++) {                                                  \
        memcpy(to + i * to_step, from + i * from_step, (size));                          \
    }
    switch (bytes) {
    case 2:
        COPY_ROWS(2)
        break;
    case 4:
        COPY_ROWS(4)
        break;
    default:
        COPY_ROWS(bytes)
    }
#undef COPY_ROWS
}

/* Rows of more than so many bytes are copied by mls_copy, which chooses how to store
 * them. For 224 rows of 256 bytes, it took 1.8 times as long as copy_rows. */
enum { SHORT_ROW = 4096 };

/* Copy `count` tokens to adjacent slots: those at indices at .. at + count - 1 of the
 * sequence axis of `tokens` to the slots from `slot` on. */
static void copy_tokens(const mls_kv_ring *ring, const mls_kernels *kernels,
                        const mls_tensor *tokens, size_t at, size_t slot, size_t count)
{
    const mls_tensor to = mls_tensor_slice(&ring->slots, ring->axis, slot, count);
    const mls_tensor from = mls_tensor_slice(tokens, ring->axis, at, count);
    const size_t bytes = mls_kv_bytes(&to), rows = mls_kv_rows(&to, ring->axis);
    const bool is_packed =
        mls_tensor_is_contiguous(tokens) && tokens->swapped == ring->slots.swapped;
    if (bytes == 0 || !is_packed || bytes / rows > SHORT_ROW) {
        mls_copy(kernels, &to, &from, (mls_destination){.bytes = bytes});
        return;
    }
    const size_t step = bytes / rows / count; /* of one token in one row */
    copy_rows(to.data, step * capacity_of(ring), from.data,
              step * tokens->shape[ring->axis], step * count, rows);
}

/* Copy the tokens of positions first .. first + count - 1 to their slots, in runs of
 * adjacent slots. `base` is the position of the first token of `tokens`. */
static void store_tokens(const mls_kv_ring *ring, const mls_kernels *kernels,
                         const mls_tensor *tokens, size_t base, size_t first,
                         size_t count)
{
    while (count > 0) {
        const size_t part = adjacent_slots(ring, first, count);
        copy_tokens(ring, kernels, tokens, first - base, slot_of(ring, first), part);
        first += part;
        count -= part;
    }
}

/* Append tokens. Copy only the tokens that remain: first the sinks that are still
 * missing, then the last tokens that fit behind the sinks. Tokens between them are only
 * counted. */
mls_code mls_kv_ring_append(mls_kv_ring *ring, const mls_kernels *kernels,
                            const mls_tensor *tokens, mls_status *st)
{
    const mls_code code = check_tokens(ring, tokens, st);
    if (code != MLS_OK) {
        return code;
    }
    const size_t base = ring->next, count = tokens->shape[ring->axis];
    size_t end;
    if (!mls_size_add(base, count, &end) || end > INT64_MAX) {
        return mls_fail(st, MLS_E_SIZE,
                        "position %zu + %zu tokens does not fit into 63 bits", base,
                        count);
    }
    size_t start = base;
    if (base < ring->sinks) {
        const size_t limit = end < ring->sinks ? end : ring->sinks;
        store_tokens(ring, kernels, tokens, base, base, limit - base);
        start = limit;
    }
    const size_t window = capacity_of(ring) - ring->sinks;
    const size_t stored_count = end - start < window ? end - start : window;
    store_tokens(ring, kernels, tokens, base, end - stored_count, stored_count);
    /* `oldest` may be beyond `end` while sinks are missing, so compare before
     * subtracting */
    if (end > ring->oldest && end - ring->oldest > window) {
        ring->evicted += end - window - ring->oldest;
        ring->oldest = end - window;
    }
    ring->next = end;
    return MLS_OK;
}

/* Zero the slots of positions first .. first + count - 1. */
static void clear_slots(const mls_kv_ring *ring, const mls_kernels *kernels, size_t first,
                        size_t count)
{
    const mls_element zero = {.size = mls_dtype_of(ring->slots.dtype)->item_bytes};
    while (count > 0) {
        const size_t part = adjacent_slots(ring, first, count);
        const mls_tensor dropped =
            mls_tensor_slice(&ring->slots, ring->axis, slot_of(ring, first), part);
        mls_fill(kernels, &dropped, zero,
                 (mls_destination){.bytes = mls_kv_bytes(&dropped)});
        first += part;
        count -= part;
    }
}

/* Drop the tokens after the sinks first, from the newest on, then sinks. Once a sink is
 * dropped, no other token is left, so `oldest` is reset as in an empty ring. */
mls_code mls_kv_ring_trim(mls_kv_ring *ring, const mls_kernels *kernels, size_t count,
                          mls_status *st)
{
    const size_t length = mls_kv_ring_length(ring);
    if (count > length) {
        mls_fail(st, MLS_E_CAPACITY, "cannot drop %zu tokens: the cache holds %zu", count,
                 length);
        mls_status_expected(st, "0..%zu", length);
        return mls_status_got(st, "%zu", count);
    }
    const size_t others = stored_others(ring);
    const size_t dropped_others = count < others ? count : others;
    clear_slots(ring, kernels, ring->next - dropped_others, dropped_others);
    ring->next -= dropped_others;
    if (count > dropped_others) {
        const size_t sinks = stored_sinks(ring), left = sinks - (count - dropped_others);
        clear_slots(ring, kernels, left, sinks - left);
        ring->next = left;
        ring->oldest = ring->sinks;
    }
    return MLS_OK;
}

/* Replace slots and counters. Check the counters before a slot is computed from them,
 * since they may come from a file. */
mls_code mls_kv_ring_fill(mls_kv_ring *ring, const mls_kernels *kernels,
                          const mls_tensor *slots, size_t oldest, size_t next,
                          size_t evicted, mls_status *st)
{
    mls_code code = check_tokens(ring, slots, st);
    if (code != MLS_OK) {
        return code;
    }
    if (slots->shape[ring->axis] != capacity_of(ring)) {
        return mls_fail(st, MLS_E_SHAPE, "the slots have %zu positions, the cache %zu",
                        slots->shape[ring->axis], capacity_of(ring));
    }
    /* every position behind the sinks and before `oldest` was evicted at some time */
    const size_t end = next > ring->sinks ? next : ring->sinks;
    const size_t window = capacity_of(ring) - ring->sinks;
    if (next > INT64_MAX || oldest < ring->sinks || oldest > end ||
        end - oldest > window || evicted > INT64_MAX || evicted < oldest - ring->sinks) {
        return mls_fail(st, MLS_E_CAPACITY,
                        "a cache of %zu positions with %zu sinks cannot have evicted %zu "
                        "tokens, hold positions from %zu on, and continue at %zu",
                        capacity_of(ring), ring->sinks, evicted, oldest, next);
    }
    mls_copy(kernels, &ring->slots, slots,
             (mls_destination){.bytes = mls_kv_bytes(slots), .is_fresh = true});
    ring->oldest = oldest;
    ring->next = next;
    ring->evicted = evicted;
    return MLS_OK;
}

/* Copy the tokens in the order of their positions, each range of adjacent slots at once;
 * `copied` counts the positions of `dst` already written. */
void mls_kv_ring_copy_ordered(const mls_kv_ring *ring, const mls_kernels *kernels,
                              const mls_tensor *dst)
{
    const size_t bytes = mls_kv_bytes(dst);
    size_t copied = 0;
    const size_t firsts[] = {0, ring->oldest};
    const size_t counts[] = {stored_sinks(ring), stored_others(ring)};
    for (int range = 0; range < 2; range++) {
        size_t first = firsts[range], count = counts[range];
        while (count > 0) {
            const size_t part = adjacent_slots(ring, first, count);
            const mls_tensor to = mls_tensor_slice(dst, ring->axis, copied, part);
            const mls_tensor from =
                mls_tensor_slice(&ring->slots, ring->axis, slot_of(ring, first), part);
            mls_copy(kernels, &to, &from,
                     (mls_destination){.bytes = bytes, .is_fresh = true});
            copied += part;
            first += part;
            count -= part;
        }
    }
}

/* Write the position of each slot's token to `out`: first the positions of the sinks and
 * -1 for all other slots, then the positions from `oldest` on over these. */
void mls_kv_ring_positions(const mls_kv_ring *ring, int64_t *out)
{
    const size_t sinks = stored_sinks(ring);
    for (size_t slot = 0; slot < capacity_of(ring); slot++) {
        out[slot] = slot < sinks ? (int64_t)slot : -1;
    }
    for (size_t position = ring->oldest; position < ring->next; position++) {
        out[slot_of(ring, position)] = (int64_t)position;
    }
}
