/* local_reduce: sums over the ranks of a host.
 *
 * Threads publish the addresses of large arrays, and each rank sums its share directly
 * from these.  Otherwise each rank sends its peers their shares through the slots, a
 * piece for each, and sums its own share in the order of ranks.
 *
 * Writer and reader advance the same cursors over the same counts, and so agree on the
 * contents of a piece without writing them down.
 */
#if !defined(_WIN32)

#    include "collectives/shm_protocol.h"

#    include <string.h>

enum { NOBODY = -1 };

/* Compilers need leave to ask for a line as its future writer.  Processors of 64 bits
 * have the instruction, or take it for none. */
#    if defined(__x86_64__) && (defined(__clang__) || defined(__GNUC__))
#        define PREFETCHES __attribute__((target("prfchw")))
#    else
#        define PREFETCHES
#    endif

/* ---- small things ---- */

/* Reductions compare by all that decides their bits. */
static uint64_t mix_reduction(uint64_t print, const mls_reduction *r)
{
    uint64_t divisor;
    memcpy(&divisor, &r->divisor, sizeof divisor);
    print = mls_local_mix(print, (uint64_t)r->dtype | (uint64_t)r->out_dtype << 8 |
                                     (uint64_t)r->op << 16);
    return mls_local_mix(print, divisor);
}

/* Take the cache line of an address to write to from whoever has it; a wish. */
PREFETCHES static inline void claim(const void *address)
{
    __builtin_prefetch(address, 1, 3);
}

/* memcpy into a slot.  Its lines are in the cache of the rank that read them last, and
 * each is far to fetch: they are asked for in advance, as is what will be read. */
PREFETCHES static void copy_ahead(unsigned char *to, const unsigned char *from,
                                  size_t bytes)
{
    enum { AHEAD = 2048, STEP = 512, LINE = 64 };
    for (size_t at = 0; at < bytes; at += STEP) {
        for (size_t line = at + AHEAD; line < at + AHEAD + STEP; line += LINE) {
            __builtin_prefetch((const void *)((uintptr_t)from + line));
            claim((const void *)((uintptr_t)to + line));
        }
        memcpy(to + at, from + at, mls_local_least(bytes - at, STEP));
    }
}

/* ---- reduce_scatter ---- */

/* The group has the cursors of the writer, one for each rank; the reader has one for its
 * own share. */
typedef struct scatter {
    mls_local *g;
    mls_segment *segments;
    size_t count;
    mls_local_cursor reader;
    bool is_tallied; /* the tallies of the segments are wanted */
} scatter;

/* What one segment has in a piece. */
typedef struct stretch {
    size_t segment;
    size_t start;  /* elements from the beginning of the rank's share */
    size_t at;     /* elements from the beginning of the segment */
    size_t length; /* elements */
    size_t offset; /* bytes into the piece */
} stretch;

/* Stand at the first segment that has elements left for `rank`; false at the end. */
static bool settle(const scatter *s, size_t rank, mls_local_cursor *c)
{
    while (c->segment < s->count) {
        const size_t *counts = s->segments[c->segment].counts;
        if (c->at == 0) {
            c->base = 0;
            for (size_t r = 0; r < rank; r++) {
                c->base += counts[r];
            }
        }
        if (c->at < counts[rank]) {
            return true;
        }
        c->segment++;
        c->at = 0;
    }
    return false;
}

/* The next stretch of `rank`'s shares into a piece of which `*used` bytes are taken;
 * false where it is full or nothing is left.  Shares are cut at whole blocks of a tally.
 */
static bool next_stretch(const scatter *s, size_t rank, mls_local_cursor *c, size_t *used,
                         stretch *out)
{
    if (!settle(s, rank, c)) {
        return false;
    }
    const mls_segment *segment = &s->segments[c->segment];
    const size_t item = mls_dtype_of(segment->reduction.dtype)->item_bytes;
    const size_t room = (s->g->piece_bytes - *used) / item;
    size_t length = segment->counts[rank] - c->at;
    if (length > room) {
        length = room - room % MLS_TALLY_BLOCK;
    }
    if (length == 0) {
        return false;
    }
    *out = (stretch){.segment = c->segment,
                     .start = c->at,
                     .at = c->base + c->at,
                     .length = length,
                     .offset = *used};
    c->at += length;
    const size_t end = *used + length * item;
    *used = mls_local_least((end + 63) / 64 * 64, s->g->piece_bytes);
    return true;
}

/* The bytes of a stretch in this rank's own array. */
static const unsigned char *own(const scatter *s, const stretch *part)
{
    const mls_segment *segment = &s->segments[part->segment];
    const size_t item = mls_dtype_of(segment->reduction.dtype)->item_bytes;
    return (const unsigned char *)segment->data + part->at * item;
}

/* A piece for each peer.  The cursor of this rank itself only advances, to know when all
 * are through. */
static void fill_scatter(void *context, unsigned char *slot)
{
    scatter *s = context;
    const mls_local *g = s->g;
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        size_t used = 0;
        stretch part;
        while (next_stretch(s, rank, &s->g->cursors[rank], &used, &part)) {
            if (rank != g->rank) {
                const mls_dtype dtype = s->segments[part.segment].reduction.dtype;
                copy_ahead(slot + mls_local_piece_of(g, g->rank, rank) + part.offset,
                           own(s, &part), part.length * mls_dtype_of(dtype)->item_bytes);
            }
        }
    }
}

/* Bytes of the results of this rank. */
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

/* Sum the pieces of all in the order of ranks, this rank's from its own array. */
static mls_code drain_scatter(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    scatter *s = context;
    const mls_local *g = s->g;
    const mls_destination destination = {.bytes = share_bytes(s)};
    const void *sources[MLS_LOCAL_MAX_RANKS];
    size_t used = 0;
    stretch part;
    while (next_stretch(s, g->rank, &s->reader, &used, &part)) {
        mls_segment *segment = &s->segments[part.segment];
        const size_t item = mls_dtype_of(segment->reduction.out_dtype)->item_bytes;
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            sources[rank] = rank == g->rank
                                ? own(s, &part)
                                : mls_local_slot(g, rank, step) +
                                      mls_local_piece_of(g, rank, g->rank) + part.offset;
        }
        mls_reduce_run(g->kernels, &segment->reduction, sources, g->shape.world,
                       (unsigned char *)segment->out + part.start * item, part.length,
                       destination, s->is_tallied ? &segment->tally : NULL);
    }
    return MLS_OK;
}

/* Whether any rank's share goes on. */
static bool more_scatter(void *context)
{
    scatter *s = context;
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        if (settle(s, rank, &s->g->cursors[rank])) {
            return true;
        }
    }
    return false;
}

/* ... of arrays of threads, without slots */

/* Bytes of all arrays. */
static size_t bytes_of(const scatter *s)
{
    size_t bytes = 0;
    for (size_t i = 0; i < s->count; i++) {
        const mls_segment *segment = &s->segments[i];
        for (size_t rank = 0; rank < s->g->shape.world; rank++) {
            bytes += segment->counts[rank] *
                     mls_dtype_of(segment->reduction.dtype)->item_bytes;
        }
    }
    return bytes;
}

/* The addresses of this rank's arrays. */
static void fill_addresses(void *context, unsigned char *slot)
{
    const scatter *s = context;
    for (size_t i = 0; i < s->count; i++) {
        const unsigned char *data = s->segments[i].data;
        memcpy(slot + i * sizeof data, &data, sizeof data);
    }
}

/* Sum this rank's share of each array, from the arrays of all ranks. */
static mls_code sum_addressed(void *context, uint64_t step, mls_status *st)
{
    scatter *s = context;
    mls_local *g = s->g;
    const mls_destination destination = {.bytes = share_bytes(s)};
    if (!mls_local_begin_direct(g)) {
        return mls_local_blamed(g, MLS_LOCAL_REDUCE_SCATTER, "", st);
    }
    for (size_t i = 0; i < s->count; i++) {
        mls_segment *segment = &s->segments[i];
        const void *sources[MLS_LOCAL_MAX_RANKS];
        size_t start = 0;
        if (segment->counts[g->rank] == 0) {
            continue; /* an array without elements may be NULL */
        }
        for (size_t rank = 0; rank < g->rank; rank++) {
            start += segment->counts[rank];
        }
        start *= mls_dtype_of(segment->reduction.dtype)->item_bytes;
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            sources[rank] = mls_local_address(g, rank, step, i) + start;
        }
        mls_reduce_run(g->kernels, &segment->reduction, sources, g->shape.world,
                       segment->out, segment->counts[g->rank], destination,
                       s->is_tallied ? &segment->tally : NULL);
    }
    mls_local_end_direct(g);
    return MLS_OK;
}

/* All that decides the contents of the slots, and the bits of the sums. */
static uint64_t print_segments(const mls_local *g, const mls_local_call *call,
                               const mls_segment *segments, size_t count)
{
    uint64_t print = mls_local_mix(mls_local_mix_text(0, call->text), count);
    for (size_t i = 0; i < count; i++) {
        print = mix_reduction(print, &segments[i].reduction);
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            print = mls_local_mix(print, segments[i].counts[rank]);
        }
    }
    return print;
}

/* The steps of a scatter through the slots; `s` is set to its beginning. */
static mls_local_flow scatter_flow(scatter *s, mls_local_kind kind, uint64_t print)
{
    memset(s->g->cursors, 0, sizeof s->g->cursors);
    return (mls_local_flow){.kind = kind,
                            .fingerprint = print,
                            .source = NOBODY,
                            .fill = fill_scatter,
                            .drain = drain_scatter,
                            .more = more_scatter,
                            .context = s};
}

/* Nothing is sent before all reductions were checked. */
mls_code mls_local_reduce_scatter(mls_local *g, const mls_local_call *call,
                                  mls_segment *segments, size_t count, bool is_tallied,
                                  mls_status *st)
{
    for (size_t i = 0; i < count; i++) {
        const mls_code code = mls_reduce_check(&segments[i].reduction, st);
        if (code != MLS_OK) {
            return code;
        }
        segments[i].tally = (mls_tally){0};
    }
    scatter s = {.g = g, .segments = segments, .count = count, .is_tallied = is_tallied};
    mls_local_flow flow = scatter_flow(&s, MLS_LOCAL_REDUCE_SCATTER,
                                       print_segments(g, call, segments, count));
    if (count > g->shape.slot_bytes / sizeof(void *) ||
        !mls_local_is_direct(g, bytes_of(&s))) {
        return mls_local_run(g, &flow, call, st);
    }
    flow.fill = fill_addresses;
    flow.drain = sum_addressed;
    return mls_local_run_direct(g, &flow, call, st);
}

/* ---- all_reduce ---- */

/* A small array is sent to all ranks, and each reduces all of it. */
typedef struct total {
    mls_local *g;
    const void *data;
    void *out;
    size_t n, bytes;
    const mls_reduction *reduction;
} total;

/* The whole array. */
static void fill_total(void *context, unsigned char *slot)
{
    const total *s = context;
    mls_local_copy(s->g, slot, s->data, s->bytes);
}

/* `out` may be this rank's own array: the kernels allow that. */
static mls_code drain_total(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    const total *s = context;
    const void *sources[MLS_LOCAL_MAX_RANKS];
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        sources[rank] = rank == s->g->rank ? s->data : mls_local_slot(s->g, rank, step);
    }
    mls_reduce_run(s->g->kernels, s->reduction, sources, s->g->shape.world, s->out, s->n,
                   mls_cached(), NULL);
    return MLS_OK;
}

/* Equal shares, of whole lines as far as there are enough elements. */
static void share_out(size_t n, size_t world, size_t *counts)
{
    enum { MULTIPLE = 64 };
    const size_t each = ((n + world - 1) / world + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
    size_t left = n;
    for (size_t rank = 0; rank < world; rank++) {
        counts[rank] = mls_local_least(left, each);
        left -= counts[rank];
    }
}

/* Where this rank's share of the array begins, in bytes; `counts` gets all shares. */
static size_t find_share(const total *s, size_t *counts)
{
    size_t start = 0;
    share_out(s->n, s->g->shape.world, counts);
    for (size_t rank = 0; rank < s->g->rank; rank++) {
        start += counts[rank];
    }
    return start * mls_dtype_of(s->reduction->dtype)->item_bytes;
}

/* The addresses of this rank's array and of its result. */
static void fill_pair(void *context, unsigned char *slot)
{
    const total *s = context;
    memcpy(slot, &s->data, sizeof s->data);
    memcpy(slot + sizeof s->data, &s->out, sizeof s->out);
}

/* Sum this rank's share piece by piece, and copy each piece to the results of all.  Only
 * this rank reads or writes the share, in any array, so results may be arrays. */
static mls_code sum_for_all(void *context, uint64_t step, mls_status *st)
{
    enum { PIECE = 64 * 1024 }; /* elements, which stay in the cache */
    const total *s = context;
    mls_local *g = s->g;
    const size_t item = mls_dtype_of(s->reduction->dtype)->item_bytes;
    size_t counts[MLS_LOCAL_MAX_RANKS];
    const size_t start = find_share(s, counts), share = counts[g->rank];
    if (!mls_local_begin_direct(g)) {
        return mls_local_blamed(g, MLS_LOCAL_ALL_REDUCE, "", st);
    }
    for (size_t done = 0; done < share; done += PIECE) {
        const size_t n = mls_local_least(share - done, PIECE), at = start + done * item;
        const void *sources[MLS_LOCAL_MAX_RANKS];
        unsigned char *outs[MLS_LOCAL_MAX_RANKS];
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            sources[rank] = mls_local_address(g, rank, step, 0) + at;
            outs[rank] = mls_local_address(g, rank, step, 1);
        }
        unsigned char *mine = outs[g->rank] + at;
        mls_reduce_run(g->kernels, s->reduction, sources, g->shape.world, mine, n,
                       mls_cached(), NULL);
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            mls_local_copy_direct(g, outs[rank] + at, mine, n * item, s->bytes);
        }
    }
    mls_local_end_direct(g);
    return MLS_OK;
}

/* A large array: each rank reduces a share into its place in `out`, and all gather them.
 * That is safe if `out` is the array itself: a rank overwrites its own share after it
 * read it, and the shares of others after it sent them. */
static mls_code reduce_large(const total *s, const mls_local_call *call, uint64_t print,
                             mls_status *st)
{
    mls_local *g = s->g;
    const size_t item = mls_dtype_of(s->reduction->dtype)->item_bytes;
    size_t counts[MLS_LOCAL_MAX_RANKS], sizes[MLS_LOCAL_MAX_RANKS];
    unsigned char *mine = (unsigned char *)s->out + find_share(s, counts);
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        sizes[rank] = counts[rank] * item;
    }
    mls_segment segment = {
        .data = s->data, .counts = counts, .out = mine, .reduction = *s->reduction};
    scatter parts = {.g = g, .segments = &segment, .count = 1};
    const mls_local_flow flow = scatter_flow(&parts, MLS_LOCAL_ALL_REDUCE, print);
    mls_local_clock clock;
    mls_code code = mls_local_begin(g, &flow, call, &clock, st);
    if (code == MLS_OK) {
        code = mls_local_continue(g, &flow, &clock, st);
    }
    if (code == MLS_OK) {
        code = mls_local_gather_on(g, flow.kind, mine, sizes, s->out, &clock, st);
    }
    return code;
}

/* Small is what fits a slot and is summed by all sooner than it would be sent again. */
mls_code mls_local_all_reduce(mls_local *g, const mls_local_call *call, const void *data,
                              void *out, size_t n, const mls_reduction *reduction,
                              mls_status *st)
{
    enum { SMALL = 64 * 1024 };
    const mls_code code = mls_reduce_check(reduction, st);
    if (code != MLS_OK) {
        return code;
    }
    const uint64_t print =
        mix_reduction(mls_local_mix(mls_local_mix_text(0, call->text), n), reduction);
    const size_t bytes = n * mls_dtype_of(reduction->dtype)->item_bytes;
    total s = {
        .g = g, .data = data, .out = out, .n = n, .bytes = bytes, .reduction = reduction};
    const bool direct = mls_local_is_direct(g, bytes);
    if (!direct && bytes * g->shape.world > SMALL) {
        return reduce_large(&s, call, print, st);
    }
    const mls_local_flow flow = {
        .kind = MLS_LOCAL_ALL_REDUCE,
        .fingerprint = print,
        .source = NOBODY,
        .fill = direct ? fill_pair : fill_total,
        .drain = direct ? sum_for_all : drain_total,
        .context = &s,
    };
    return direct ? mls_local_run_direct(g, &flow, call, st)
                  : mls_local_run(g, &flow, call, st);
}

#else
/* See shm_group.c. */
typedef int mls_local_reduce_unused;
#endif
