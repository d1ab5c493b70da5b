/* shm_reduce: all_reduce and reduce_scatter of a host's ranks: which rank sums which
 * elements, and how they travel.
 *
 * Threads publish the addresses of large arrays, and each rank sums its share directly
 * from these. Otherwise each rank sends every peer that peer's share through the slots,
 * in a range for each peer, and sums its own share in rank order.
 *
 * A segment is one array of the call; its elements are divided into one share for each
 * rank, in rank order. In each step a rank fills one slot, and then reads (drains) the
 * slots of all ranks for that step (`step`, its number in the group). Writer and reader
 * advance equal cursors over equal counts, so they agree on the contents of a range
 * without a description in the slot.
 */
#include "collectives/shm_protocol.h"

#include <string.h>

/* Lets the compiler emit PREFETCHW. 64-bit processors either have it or treat it as a
 * no-op. */
#if defined(__x86_64__) && (defined(__clang__) || defined(__GNUC__))
#    define PREFETCHES __attribute__((target("prfchw")))
#else
#    define PREFETCHES
#endif

/* ---- helpers ---- */

/* Mix everything of a reduction that decides the bits of its result into the hash
 * `fingerprint`. */
static uint64_t mix_reduction(uint64_t fingerprint, const mls_reduction *r)
{
    uint64_t divisor;
    memcpy(&divisor, &r->divisor, sizeof divisor);
    fingerprint =
        mls_shm_mix(fingerprint, (uint64_t)r->dtype | (uint64_t)r->out_dtype << 8 |
                                     (uint64_t)r->op << 16);
    return mls_shm_mix(fingerprint, divisor);
}

/* Prefetches the cache line of an address for writing. A hint only; never faults. */
PREFETCHES static inline void prefetch_for_write(const void *address)
{
    __builtin_prefetch(address, 1, 3);
}

/* Copy `bytes` bytes into a slot. The slot's lines are in the cache of the rank that read
 * them last and are slow to fetch, so both source and target are prefetched, AHEAD bytes
 * further on. */
PREFETCHES static void copy_ahead(unsigned char *to, const unsigned char *from,
                                  size_t bytes)
{
    enum { AHEAD = 2048, STEP = 512, LINE = 64 };
    for (size_t at = 0; at < bytes; at += STEP) {
        for (size_t line = at + AHEAD; line < at + AHEAD + STEP; line += LINE) {
            __builtin_prefetch((const void *)((uintptr_t)from + line));
            prefetch_for_write((const void *)((uintptr_t)to + line));
        }
        memcpy(to + at, from + at, mls_size_least(bytes - at, STEP));
    }
}

/* ---- reduce_scatter ---- */

/* The handle holds the writer's cursors, one for each rank; the reader needs one, for its
 * own share. */
typedef struct scatter {
    mls_shm *g;
    mls_segment *segments;
    size_t count;
    mls_shm_cursor reader;
    bool wants_norms; /* compute the norm partials of the segments */
} scatter;

/* Elements of one segment's share of a rank, in the range of a slot for that rank. */
typedef struct share_range {
    size_t segment;
    size_t start;  /* index of the first element in the rank's share */
    size_t at;     /* index of the first element in the segment */
    size_t length; /* elements */
    size_t offset; /* bytes from the start of the range of the slot */
} share_range;

/* Move `c`, the cursor of `rank`, to the first segment that has elements left for it;
 * returns false if there is none. At the start of a segment, `c->base` becomes the index
 * in the segment of the first element of the rank's share. */
static bool advance_cursor(const scatter *s, size_t rank, mls_shm_cursor *c)
{
    while (c->segment < s->count) {
        const size_t *counts = s->segments[c->segment].counts;
        if (c->at == 0) {
            c->base = mls_segment_elements(&s->segments[c->segment], rank);
        }
        if (c->at < counts[rank]) {
            return true;
        }
        c->segment++;
        c->at = 0;
    }
    return false;
}

/* Find the next elements of `rank` for its range of a slot, after the `*used` bytes that
 * are filled, and advance `*used` and the cursor behind them. Returns false if the range
 * is full or nothing is left. Shares are split at whole norm blocks, so that norms do not
 * depend on the split. */
static bool next_range(const scatter *s, size_t rank, mls_shm_cursor *c, size_t *used,
                       share_range *out)
{
    if (!advance_cursor(s, rank, c)) {
        return false;
    }
    const mls_segment *segment = &s->segments[c->segment];
    const size_t item = mls_dtype_of(segment->reduction.dtype)->item_bytes;
    const size_t room = (s->g->piece_bytes - *used) / item;
    size_t length = segment->counts[rank] - c->at;
    if (length > room) {
        length = room - room % MLS_NORM_BLOCK;
    }
    if (length == 0) {
        return false;
    }
    *out = (share_range){.segment = c->segment,
                         .start = c->at,
                         .at = c->base + c->at,
                         .length = length,
                         .offset = *used};
    c->at += length;
    const size_t end = *used + length * item;
    /* the next elements start at a cache line */
    *used = mls_size_least((end + 63) / 64 * 64, s->g->piece_bytes);
    return true;
}

/* Return the elements of `part` in this rank's own array. */
static const unsigned char *own_elements(const scatter *s, const share_range *part)
{
    const mls_segment *segment = &s->segments[part->segment];
    const size_t item = mls_dtype_of(segment->reduction.dtype)->item_bytes;
    return (const unsigned char *)segment->data + part->at * item;
}

/* Fill this rank's slot: a range for each peer, with elements of the peer's share. The
 * cursor for this rank itself advances too, without copying, so that scatter_has_more
 * knows when all shares are done. */
static void fill_scatter(void *context, unsigned char *slot)
{
    scatter *s = context;
    const mls_shm *g = s->g;
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        size_t used = 0;
        share_range part;
        while (next_range(s, rank, &s->g->cursors[rank], &used, &part)) {
            if (rank != g->rank) {
                const mls_dtype dtype = s->segments[part.segment].reduction.dtype;
                copy_ahead(slot + mls_shm_piece_of(g, g->rank, rank) + part.offset,
                           own_elements(s, &part),
                           part.length * mls_dtype_of(dtype)->item_bytes);
            }
        }
    }
}

/* Return the bytes of this rank's share of all results. */
static size_t share_bytes(const scatter *s)
{
    size_t bytes = 0;
    for (size_t i = 0; i < s->count; i++) {
        const mls_segment *segment = &s->segments[i];
        const size_t item = mls_dtype_of(segment->reduction.out_dtype)->item_bytes;
        bytes += segment->counts[s->g->rank] * item;
    }
    return bytes;
}

/* Sum the next elements of this rank's share from the slots of all ranks into the
 * outputs; this rank's elements come from its own array. Cannot fail. */
static mls_code drain_scatter(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    scatter *s = context;
    const mls_shm *g = s->g;
    const mls_destination destination = {.bytes = share_bytes(s)};
    const void *sources[MLS_SHM_MAX_RANKS];
    size_t used = 0;
    share_range part;
    while (next_range(s, g->rank, &s->reader, &used, &part)) {
        mls_segment *segment = &s->segments[part.segment];
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            sources[rank] = rank == g->rank
                                ? own_elements(s, &part)
                                : mls_shm_slot(g, rank, step) +
                                      mls_shm_piece_of(g, rank, g->rank) + part.offset;
        }
        mls_segment_reduce(segment, g->kernels, sources, g->shape.world, part.start,
                           part.length, destination, s->wants_norms);
    }
    return MLS_OK;
}

/* Return whether any rank's share has elements that are not sent yet. */
static bool scatter_has_more(void *context)
{
    scatter *s = context;
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        if (advance_cursor(s, rank, &s->g->cursors[rank])) {
            return true;
        }
    }
    return false;
}

/* ---- reduce_scatter of threads, by address ---- */

/* Return the bytes of all arrays of this rank. */
static size_t total_bytes(const scatter *s)
{
    size_t bytes = 0;
    for (size_t i = 0; i < s->count; i++) {
        const mls_segment *segment = &s->segments[i];
        bytes += mls_segment_elements(segment, s->g->shape.world) *
                 mls_dtype_of(segment->reduction.dtype)->item_bytes;
    }
    return bytes;
}

/* Publish the addresses of this rank's arrays in its slot, in segment order, for a direct
 * operation between threads. */
static void fill_addresses(void *context, unsigned char *slot)
{
    const scatter *s = context;
    for (size_t i = 0; i < s->count; i++) {
        const unsigned char *data = s->segments[i].data;
        memcpy(slot + i * sizeof data, &data, sizeof data);
    }
}

/* Sum this rank's share of each segment directly from the arrays of all ranks, in rank
 * order; their addresses are in the slots. Cannot fail. */
static mls_code sum_addressed(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    scatter *s = context;
    mls_shm *g = s->g;
    const mls_destination destination = {.bytes = share_bytes(s)};
    for (size_t i = 0; i < s->count; i++) {
        mls_segment *segment = &s->segments[i];
        const void *sources[MLS_SHM_MAX_RANKS];
        if (segment->counts[g->rank] == 0) {
            continue; /* an array without elements may be NULL */
        }
        const size_t start = mls_segment_elements(segment, g->rank) *
                             mls_dtype_of(segment->reduction.dtype)->item_bytes;
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            sources[rank] = mls_shm_address(g, rank, step, i) + start;
        }
        mls_segment_reduce(segment, g->kernels, sources, g->shape.world, 0,
                           segment->counts[g->rank], destination, s->wants_norms);
    }
    return MLS_OK;
}

/* Return a hash of the call's text, and of everything in the `count` segments that
 * decides the contents of the slots and the bits of the sums. It must be equal on all
 * ranks. */
static uint64_t hash_segments(const mls_shm *g, const mls_shm_call *call,
                              const mls_segment *segments, size_t count)
{
    uint64_t fingerprint = mls_shm_mix(mls_shm_mix_text(0, call->text), count);
    for (size_t i = 0; i < count; i++) {
        fingerprint = mix_reduction(fingerprint, &segments[i].reduction);
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            fingerprint = mls_shm_mix(fingerprint, segments[i].counts[rank]);
        }
    }
    return fingerprint;
}

/* Return the functions of a scatter through the slots, for the protocol, and reset the
 * handle's cursors. `fingerprint`: of the call. */
static mls_shm_flow scatter_flow(scatter *s, mls_shm_kind kind, uint64_t fingerprint)
{
    memset(s->g->cursors, 0, sizeof s->g->cursors);
    return (mls_shm_flow){.kind = kind,
                          .fingerprint = fingerprint,
                          .source = MLS_SHM_NO_RANK,
                          .fill = fill_scatter,
                          .drain = drain_scatter,
                          .has_more = scatter_has_more,
                          .context = s};
}

/* Sum all segments; each rank gets its share. All reductions are checked before anything
 * is sent. Large arrays of threads are summed directly if their addresses fit a slot. */
mls_code mls_shm_reduce_scatter(mls_shm *g, const mls_shm_call *call,
                                mls_segment *segments, size_t count, bool wants_norms,
                                mls_status *st)
{
    for (size_t i = 0; i < count; i++) {
        const mls_code code = mls_reduce_check(&segments[i].reduction, st);
        if (code != MLS_OK) {
            return code;
        }
        segments[i].norm_partial = (mls_norm_partial){0};
    }
    scatter s = {
        .g = g, .segments = segments, .count = count, .wants_norms = wants_norms};
    mls_shm_flow flow =
        scatter_flow(&s, MLS_SHM_REDUCE_SCATTER, hash_segments(g, call, segments, count));
    if (count <= g->shape.slot_bytes / sizeof(void *) &&
        mls_shm_is_direct(g, total_bytes(&s))) {
        flow.is_direct = true;
        flow.fill = fill_addresses;
        flow.drain = sum_addressed;
    }
    return mls_shm_run(g, &flow, call, st);
}

/* ---- all_reduce ---- */

/* State of an all_reduce. A small array is sent whole to all ranks, and each rank reduces
 * it. */
typedef struct total {
    mls_shm *g;
    const void *data;
    void *out;
    size_t n, bytes; /* elements and bytes of each array */
    const mls_reduction *reduction;
} total;

/* Fill this rank's slot with its whole array. */
static void fill_total(void *context, unsigned char *slot)
{
    const total *sum = context;
    mls_shm_copy(sum->g, slot, sum->data, sum->bytes);
}

/* Reduce the whole arrays in the slots of all ranks, in rank order, into `out`, which
 * may be this rank's own array: the kernels allow that. Cannot fail. */
static mls_code drain_total(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    const total *sum = context;
    const void *sources[MLS_SHM_MAX_RANKS];
    for (size_t rank = 0; rank < sum->g->shape.world; rank++) {
        sources[rank] =
            rank == sum->g->rank ? sum->data : mls_shm_slot(sum->g, rank, step);
    }
    mls_reduce_run(sum->g->kernels, sum->reduction, sources, sum->g->shape.world,
                   sum->out, sum->n, mls_cached(), NULL);
    return MLS_OK;
}

/* Divide n elements into `counts`, one for each of `world` ranks: multiples of 64
 * elements, so of whole cache lines; the last shares may be smaller or empty. */
static void divide_evenly(size_t n, size_t world, size_t *counts)
{
    enum { MULTIPLE = 64 };
    const size_t each = ((n + world - 1) / world + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
    size_t left = n;
    for (size_t rank = 0; rank < world; rank++) {
        counts[rank] = mls_size_least(left, each);
        left -= counts[rank];
    }
}

/* Set `counts` to the elements of all ranks' shares, and return the offset of this rank's
 * share in bytes. */
static size_t find_share(const total *sum, size_t *counts)
{
    size_t start = 0;
    divide_evenly(sum->n, sum->g->shape.world, counts);
    for (size_t rank = 0; rank < sum->g->rank; rank++) {
        start += counts[rank];
    }
    return start * mls_dtype_of(sum->reduction->dtype)->item_bytes;
}

/* Publish the addresses of this rank's array and result, for sum_into_all. */
static void fill_pair(void *context, unsigned char *slot)
{
    const total *sum = context;
    memcpy(slot, &sum->data, sizeof sum->data);
    memcpy(slot + sizeof sum->data, &sum->out, sizeof sum->out);
}

/* Reduce this rank's share of the arrays block by block, and copy each block into the
 * results of all ranks. Only this rank reads or writes this share, in any array, so a
 * result may be the array itself. Cannot fail. */
static mls_code sum_into_all(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    enum { BLOCK = 64 * 1024 }; /* elements; a block stays in the cache */
    const total *sum = context;
    mls_shm *g = sum->g;
    const size_t item = mls_dtype_of(sum->reduction->dtype)->item_bytes;
    size_t counts[MLS_SHM_MAX_RANKS];
    const size_t start = find_share(sum, counts), share = counts[g->rank];
    for (size_t done = 0; done < share; done += BLOCK) {
        const size_t n = mls_size_least(share - done, BLOCK), at = start + done * item;
        const void *sources[MLS_SHM_MAX_RANKS];
        unsigned char *outs[MLS_SHM_MAX_RANKS];
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            sources[rank] = mls_shm_address(g, rank, step, 0) + at;
            outs[rank] = mls_shm_address(g, rank, step, 1);
        }
        unsigned char *own_out = outs[g->rank] + at;
        mls_reduce_run(g->kernels, sum->reduction, sources, g->shape.world, own_out, n,
                       mls_cached(), NULL);
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            mls_shm_copy_direct(g, outs[rank] + at, own_out, n * item, sum->bytes);
        }
    }
    return MLS_OK;
}

/* Reduce a large array: each rank reduces its share into `out`, and then all ranks
 * gather the shares. `out` may be the array itself: a rank overwrites its own share
 * after it read it, and the shares of others after it sent them. `fingerprint`: of the
 * call. MLS_E_PEER, MLS_E_STOPPED; `out` may then be partly filled. */
static mls_code reduce_large(const total *sum, const mls_shm_call *call,
                             uint64_t fingerprint, mls_status *st)
{
    mls_shm *g = sum->g;
    const size_t item = mls_dtype_of(sum->reduction->dtype)->item_bytes;
    size_t counts[MLS_SHM_MAX_RANKS], sizes[MLS_SHM_MAX_RANKS];
    unsigned char *own_out = (unsigned char *)sum->out + find_share(sum, counts);
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        sizes[rank] = counts[rank] * item;
    }
    mls_segment segment = {.data = sum->data,
                           .counts = counts,
                           .out = own_out,
                           .reduction = *sum->reduction};
    scatter parts = {.g = g, .segments = &segment, .count = 1};
    const mls_shm_flow flow = scatter_flow(&parts, MLS_SHM_ALL_REDUCE, fingerprint);
    mls_shm_clock clock;
    mls_code code = mls_shm_begin(g, &flow, call, &clock, st);
    if (code == MLS_OK) {
        code = mls_shm_continue(g, &flow, &clock, st);
    }
    if (code == MLS_OK) {
        code =
            mls_shm_continue_gather(g, flow.kind, own_out, sizes, sum->out, &clock, st);
    }
    return code;
}

/* Reduce an array over all ranks; every rank gets all of it. An array is small if it fits
 * a slot and if all ranks sum it faster than they would exchange the shares of the
 * result. */
mls_code mls_shm_all_reduce(mls_shm *g, const mls_shm_call *call, const void *data,
                            void *out, size_t n, const mls_reduction *reduction,
                            mls_status *st)
{
    enum { SMALL = 64 * 1024 };
    const mls_code code = mls_reduce_check(reduction, st);
    if (code != MLS_OK) {
        return code;
    }
    const uint64_t fingerprint =
        mix_reduction(mls_shm_mix(mls_shm_mix_text(0, call->text), n), reduction);
    const size_t bytes = n * mls_dtype_of(reduction->dtype)->item_bytes;
    total sum = {
        .g = g, .data = data, .out = out, .n = n, .bytes = bytes, .reduction = reduction};
    const bool is_direct = mls_shm_is_direct(g, bytes);
    if (!is_direct && bytes * g->shape.world > SMALL) {
        return reduce_large(&sum, call, fingerprint, st);
    }
    const mls_shm_flow flow = {
        .kind = MLS_SHM_ALL_REDUCE,
        .fingerprint = fingerprint,
        .source = MLS_SHM_NO_RANK,
        .is_direct = is_direct,
        .fill = is_direct ? fill_pair : fill_total,
        .drain = is_direct ? sum_into_all : drain_total,
        .context = &sum,
    };
    return mls_shm_run(g, &flow, call, st);
}
