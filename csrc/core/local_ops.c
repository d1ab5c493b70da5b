/* local_ops: what goes through the slots of each operation.
 *
 * Where ranks send different bytes to each other, a slot has a piece for each peer; else
 * all read the whole slot.  A rank's own bytes go through no slot.
 *
 * Writer and reader walk the same cursors over the same counts, and so agree on what lies
 * where in a piece without writing it down.
 */
#if !defined(_WIN32)

#    include "local_steps.h"

#    include "mem.h"

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

/* Mix a number into a fingerprint. */
static uint64_t mix(uint64_t print, uint64_t value)
{
    print = (print ^ value) * 0x9E3779B97F4A7C15U;
    return print ^ print >> 29;
}

/* What a call says in words takes part. */
static uint64_t mix_text(uint64_t print, const char *text)
{
    for (const char *c = text; c != NULL && *c != '\0'; c++) {
        print = mix(print, (unsigned char)*c);
    }
    return mix(print, 0x100);
}

/* Reductions compare by all that decides their bits. */
static uint64_t mix_reduction(uint64_t print, const mls_reduction *r)
{
    uint64_t divisor;
    memcpy(&divisor, &r->divisor, sizeof divisor);
    print = mix(print,
                (uint64_t)r->dtype | (uint64_t)r->out_dtype << 8 | (uint64_t)r->op << 16);
    return mix(print, divisor);
}

/* The smaller one. */
static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* memcpy, for empty ranges at NULL too. */
static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from) {
        memcpy(to, from, bytes);
    }
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
        copy(to + at, from + at, least(bytes - at, STEP));
    }
}

/* Which of a rank's pieces is that of `peer`. */
static size_t piece_of(const mls_local *g, size_t rank, size_t peer)
{
    return (peer < rank ? peer : peer - 1) * g->piece_bytes;
}

/* Begin and continue: operations of one kind of steps. */
static mls_code run(mls_local *g, const mls_local_flow *flow, const mls_local_call *call,
                    mls_status *st)
{
    mls_local_clock clock;
    const mls_code code = mls_local_begin(g, flow, call, &clock, st);
    return code == MLS_OK ? mls_local_continue(g, flow, &clock, st) : code;
}

/* ---- barrier ---- */

/* One step of nothing. */
mls_code mls_local_barrier(mls_local *g, const mls_local_call *call, mls_status *st)
{
    const mls_local_flow flow = {.kind = MLS_LOCAL_BARRIER,
                                 .fingerprint = mix_text(0, call->text),
                                 .source = NOBODY};
    return run(g, &flow, call, st);
}

/* ---- broadcast ---- */

/* Bytes that were sent, and read. */
typedef struct spread {
    mls_local *g;
    unsigned char *data;
    size_t bytes, root, sent, taken;
} spread;

/* The root fills whole slots; the others' stay empty. */
static void fill_spread(void *context, unsigned char *slot)
{
    spread *s = context;
    const size_t n = least(s->bytes - s->sent, s->g->shape.slot_bytes);
    if (s->g->rank == s->root) {
        copy(slot, s->data + s->sent, n);
    }
    s->sent += n;
}

/* From the root's slot into place. */
static mls_code drain_spread(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    spread *s = context;
    const size_t n = least(s->bytes - s->taken, s->g->shape.slot_bytes);
    if (s->g->rank != s->root) {
        copy(s->data + s->taken, mls_local_slot(s->g, s->root, step), n);
    }
    s->taken += n;
    return MLS_OK;
}

/* Every rank counts the same bytes. */
static bool more_spread(void *context)
{
    const spread *s = context;
    return s->sent < s->bytes;
}

/* After the first step the others wait for the root alone. */
mls_code mls_local_broadcast(mls_local *g, const mls_local_call *call, void *data,
                             size_t bytes, size_t root, mls_status *st)
{
    spread s = {.g = g, .data = data, .bytes = bytes, .root = root};
    const mls_local_flow flow = {
        .kind = MLS_LOCAL_BROADCAST,
        .fingerprint = mix(mix(mix_text(0, call->text), bytes), root),
        .source = (int)root,
        .fill = fill_spread,
        .drain = drain_spread,
        .more = more_spread,
        .context = &s,
    };
    return run(g, &flow, call, st);
}

/* ---- all_gather ---- */

/* Slots filled and read so far stand for bytes of every rank. */
typedef struct gather {
    mls_local *g;
    const unsigned char *data;
    unsigned char *out;
    const size_t *sizes;
    size_t most, sent, taken;
} gather;

/* How much of rank `rank`'s bytes is in the slot that begins at `from`. */
static size_t part_of(const gather *s, size_t rank, size_t from)
{
    return from < s->sizes[rank] ? least(s->sizes[rank] - from, s->g->shape.slot_bytes)
                                 : 0;
}

/* The next bytes of this rank. */
static void fill_gather(void *context, unsigned char *slot)
{
    gather *s = context;
    copy(slot, s->data + s->sent, part_of(s, s->g->rank, s->sent));
    s->sent += s->g->shape.slot_bytes;
}

/* Those of the others; this rank's own from where they lie. */
static mls_code drain_gather(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    gather *s = context;
    unsigned char *place = s->out;
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        const unsigned char *from =
            rank == s->g->rank ? s->data + s->taken : mls_local_slot(s->g, rank, step);
        copy(place + s->taken, from, part_of(s, rank, s->taken));
        place += s->sizes[rank];
    }
    s->taken += s->g->shape.slot_bytes;
    return MLS_OK;
}

/* Until the longest is through. */
static bool more_gather(void *context)
{
    const gather *s = context;
    return s->sent < s->most;
}

/* The state of a gather before its first step. */
static gather gather_of(mls_local *g, const void *data, const size_t *sizes, void *out)
{
    gather s = {.g = g, .data = data, .out = out, .sizes = sizes};
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        s.most = s.most < sizes[rank] ? sizes[rank] : s.most;
    }
    return s;
}

/* Sizes are the same on all ranks, or the fingerprints differ. */
mls_code mls_local_all_gather(mls_local *g, const mls_local_call *call, const void *data,
                              const size_t *sizes, void *out, mls_status *st)
{
    gather s = gather_of(g, data, sizes, out);
    uint64_t print = mix_text(0, call->text);
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        print = mix(print, sizes[rank]);
    }
    const mls_local_flow flow = {
        .kind = MLS_LOCAL_ALL_GATHER,
        .fingerprint = print,
        .source = NOBODY,
        .fill = fill_gather,
        .drain = drain_gather,
        .more = more_gather,
        .context = &s,
    };
    return run(g, &flow, call, st);
}

/* ---- all_to_all ---- */

/* What goes to each rank and comes from it, and how much of that is through.  `most` is
 * the longest of all ways between two ranks. */
typedef struct trade {
    mls_local *g;
    const unsigned char *data;
    unsigned char *out;
    const size_t *sizes[2]; /* sent, wanted */
    size_t most, sent, taken;
    bool began;
} trade;

/* First the sizes, for all to compare; then a piece for each peer. */
static void fill_trade(void *context, unsigned char *slot)
{
    trade *s = context;
    const mls_local *g = s->g;
    const size_t table = g->shape.world * sizeof(size_t);
    if (!s->began) {
        memcpy(slot, s->sizes[0], table);
        memcpy(slot + table, s->sizes[1], table);
        return;
    }
    const unsigned char *from = s->data;
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        if (rank != g->rank && s->sent < s->sizes[0][rank]) {
            copy(slot + piece_of(g, g->rank, rank), from + s->sent,
                 least(s->sizes[0][rank] - s->sent, g->piece_bytes));
        }
        from += s->sizes[0][rank];
    }
    s->sent += g->piece_bytes;
}

/* Compare what each rank sends with what its receivers want; every rank looks at all, and
 * finds the same. */
static mls_code compare_sizes(trade *s, uint64_t step, mls_status *st)
{
    const mls_local *g = s->g;
    const size_t world = g->shape.world;
    for (size_t from = 0; from < world; from++) {
        for (size_t to = 0; to < world; to++) {
            size_t sent, wanted;
            memcpy(&sent, mls_local_slot(g, from, step) + to * sizeof sent, sizeof sent);
            memcpy(&wanted, mls_local_slot(g, to, step) + (world + from) * sizeof wanted,
                   sizeof wanted);
            if (sent != wanted) {
                mls_fail(st, MLS_E_PEER,
                         "all_to_all on rank %zu: rank %zu sends %zu bytes to rank %zu, "
                         "which expects %zu",
                         g->rank, from, sent, to, wanted);
                mls_status_name(st, "all_to_all", strlen("all_to_all"));
                return MLS_E_PEER;
            }
            if (from != to && sent > s->most) {
                s->most = sent;
            }
        }
    }
    return MLS_OK;
}

/* This rank's own bytes need no slot: they move while the others read the sizes. */
static void keep_own(const trade *s)
{
    size_t from = 0, to = 0;
    for (size_t rank = 0; rank < s->g->rank; rank++) {
        from += s->sizes[0][rank];
        to += s->sizes[1][rank];
    }
    copy(s->out + to, s->data + from, s->sizes[0][s->g->rank]);
}

/* From each peer's slot the piece that is for this rank. */
static mls_code drain_trade(void *context, uint64_t step, mls_status *st)
{
    trade *s = context;
    const mls_local *g = s->g;
    if (!s->began) {
        s->began = true;
        const mls_code code = compare_sizes(s, step, st);
        if (code == MLS_OK) {
            keep_own(s);
        }
        return code;
    }
    unsigned char *place = s->out;
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        if (rank != g->rank && s->taken < s->sizes[1][rank]) {
            copy(place + s->taken,
                 mls_local_slot(g, rank, step) + piece_of(g, rank, g->rank),
                 least(s->sizes[1][rank] - s->taken, g->piece_bytes));
        }
        place += s->sizes[1][rank];
    }
    s->taken += g->piece_bytes;
    return MLS_OK;
}

/* Until the longest way is through, on all ranks. */
static bool more_trade(void *context)
{
    const trade *s = context;
    return s->sent < s->most;
}

/* Sizes differ from rank to rank: they take a step of their own. */
mls_code mls_local_all_to_all(mls_local *g, const mls_local_call *call, const void *data,
                              const size_t *sent, void *out, const size_t *wanted,
                              mls_status *st)
{
    trade s = {.g = g, .data = data, .out = out, .sizes = {sent, wanted}};
    const mls_local_flow flow = {
        .kind = MLS_LOCAL_ALL_TO_ALL,
        .fingerprint = mix_text(0, call->text),
        .source = NOBODY,
        .fill = fill_trade,
        .drain = drain_trade,
        .more = more_trade,
        .context = &s,
    };
    return run(g, &flow, call, st);
}

/* ---- reduce_scatter ---- */

/* Cursors of the writer lie in the group, one for each rank; the reader has one for its
 * own share. */
typedef struct scatter {
    mls_local *g;
    mls_segment *segments;
    size_t count;
    mls_local_cursor reader;
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
    *used = least((end + 63) / 64 * 64, s->g->piece_bytes);
    return true;
}

/* The bytes of a stretch where this rank has them. */
static const unsigned char *own(const scatter *s, const stretch *part)
{
    const mls_segment *segment = &s->segments[part->segment];
    const size_t item = mls_dtype_of(segment->reduction.dtype)->item_bytes;
    return (const unsigned char *)segment->data + part->at * item;
}

/* A piece for each peer.  The cursor of this rank itself only walks along, to know when
 * all are through. */
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
                copy_ahead(slot + piece_of(g, g->rank, rank) + part.offset, own(s, &part),
                           part.length * mls_dtype_of(dtype)->item_bytes);
            }
        }
    }
}

/* Sum the pieces of all in the order of ranks, this rank's from where it lies. */
static mls_code drain_scatter(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    scatter *s = context;
    const mls_local *g = s->g;
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
                                      piece_of(g, rank, g->rank) + part.offset;
        }
        mls_reduce_run(g->cpu, &segment->reduction, sources, g->shape.world,
                       (unsigned char *)segment->out + part.start * item, part.length,
                       &segment->tally);
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

/* All that decides what lies where in the slots, and the bits of the sums. */
static uint64_t print_segments(const mls_local *g, const mls_local_call *call,
                               const mls_segment *segments, size_t count)
{
    uint64_t print = mix(mix_text(0, call->text), count);
    for (size_t i = 0; i < count; i++) {
        print = mix_reduction(print, &segments[i].reduction);
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            print = mix(print, segments[i].counts[rank]);
        }
    }
    return print;
}

/* The steps of a scatter; `s` is set to its beginning. */
static mls_local_flow scatter_flow(mls_local *g, mls_local_kind kind, scatter *s,
                                   uint64_t print)
{
    memset(g->cursors, 0, sizeof g->cursors);
    for (size_t i = 0; i < s->count; i++) {
        s->segments[i].tally = (mls_tally){0};
    }
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
                                  mls_segment *segments, size_t count, mls_status *st)
{
    for (size_t i = 0; i < count; i++) {
        const mls_code code = mls_reduce_check(&segments[i].reduction, st);
        if (code != MLS_OK) {
            return code;
        }
    }
    scatter s = {.g = g, .segments = segments, .count = count};
    const mls_local_flow flow = scatter_flow(g, MLS_LOCAL_REDUCE_SCATTER, &s,
                                             print_segments(g, call, segments, count));
    return run(g, &flow, call, st);
}

/* ---- all_reduce ---- */

/* A small array: everybody's goes to everybody, and all reduce all of it. */
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
    copy(slot, s->data, s->bytes);
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
    mls_reduce_run(s->g->cpu, s->reduction, sources, s->g->shape.world, s->out, s->n,
                   NULL);
    return MLS_OK;
}

/* Equal shares, of whole lines as far as there are enough elements. */
static void share_out(size_t n, size_t world, size_t *counts)
{
    enum { MULTIPLE = 64 };
    const size_t each = ((n + world - 1) / world + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
    size_t left = n;
    for (size_t rank = 0; rank < world; rank++) {
        counts[rank] = least(left, each);
        left -= counts[rank];
    }
}

/* A large array: each rank reduces a share into its place in `out`, and all gather them.
 * In place that is safe: a share is overwritten by its own rank alone, after it read it,
 * and those of others when this rank's have been sent. */
static mls_code reduce_large(mls_local *g, const mls_local_call *call, const void *data,
                             void *out, size_t n, const mls_reduction *reduction,
                             uint64_t print, mls_status *st)
{
    const size_t item = mls_dtype_of(reduction->dtype)->item_bytes;
    size_t counts[MLS_LOCAL_MAX_RANKS], sizes[MLS_LOCAL_MAX_RANKS];
    size_t start = 0;
    share_out(n, g->shape.world, counts);
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        sizes[rank] = counts[rank] * item;
        start += rank < g->rank ? sizes[rank] : 0;
    }
    unsigned char *mine = (unsigned char *)out + start;
    mls_segment segment = {
        .data = data, .counts = counts, .out = mine, .reduction = *reduction};
    scatter s = {.g = g, .segments = &segment, .count = 1};
    const mls_local_flow first = scatter_flow(g, MLS_LOCAL_ALL_REDUCE, &s, print);
    gather t = gather_of(g, mine, sizes, out);
    const mls_local_flow then = {.kind = MLS_LOCAL_ALL_REDUCE,
                                 .source = NOBODY,
                                 .fill = fill_gather,
                                 .drain = drain_gather,
                                 .more = more_gather,
                                 .context = &t};
    mls_local_clock clock;
    mls_code code = mls_local_begin(g, &first, call, &clock, st);
    if (code == MLS_OK) {
        code = mls_local_continue(g, &first, &clock, st);
    }
    return code == MLS_OK ? mls_local_continue(g, &then, &clock, st) : code;
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
    const uint64_t print = mix_reduction(mix(mix_text(0, call->text), n), reduction);
    const size_t bytes = n * mls_dtype_of(reduction->dtype)->item_bytes;
    if (bytes * g->shape.world > SMALL) {
        return reduce_large(g, call, data, out, n, reduction, print, st);
    }
    total s = {
        .g = g, .data = data, .out = out, .n = n, .bytes = bytes, .reduction = reduction};
    const mls_local_flow flow = {
        .kind = MLS_LOCAL_ALL_REDUCE,
        .fingerprint = print,
        .source = NOBODY,
        .fill = fill_total,
        .drain = drain_total,
        .context = &s,
    };
    return run(g, &flow, call, st);
}

/* ---- gather_bytes ---- */

/* As a gather, with sizes that the first step tells. */
typedef struct collect {
    gather gather; /* `out` unused */
    size_t sizes[MLS_LOCAL_MAX_RANKS];
    unsigned char *places[MLS_LOCAL_MAX_RANKS];
    const mls_local_places *asked;
    bool takes; /* whether this rank gets the bytes */
    bool began;
} collect;

/* Bytes that the first step carries beside the size, so that short texts take one. */
static size_t first_room(const mls_local *g)
{
    return g->shape.slot_bytes - sizeof(uint64_t);
}

/* The size and the beginning, or a slot of what follows. */
static void fill_collect(void *context, unsigned char *slot)
{
    collect *s = context;
    gather *t = &s->gather;
    const size_t mine = s->sizes[t->g->rank];
    if (s->began) {
        fill_gather(t, slot);
        return;
    }
    const uint64_t size = mine;
    memcpy(slot, &size, sizeof size);
    t->sent = first_room(t->g);
    copy(slot + sizeof size, t->data, least(mine, t->sent));
}

/* All sizes are known: ask for memory. */
static mls_code learn_sizes(collect *s, uint64_t step, mls_status *st)
{
    gather *t = &s->gather;
    s->began = true;
    for (size_t rank = 0; rank < t->g->shape.world; rank++) {
        uint64_t size;
        memcpy(&size, mls_local_slot(t->g, rank, step), sizeof size);
        s->sizes[rank] = (size_t)size;
        t->most = t->most < s->sizes[rank] ? s->sizes[rank] : t->most;
    }
    if (s->takes && !s->asked->place(s->asked->context, s->sizes, s->places)) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the bytes of all ranks");
    }
    return MLS_OK;
}

/* Into the places, this rank's own too. */
static mls_code drain_collect(void *context, uint64_t step, mls_status *st)
{
    collect *s = context;
    gather *t = &s->gather;
    const bool first = !s->began;
    const size_t room = first ? first_room(t->g) : t->g->shape.slot_bytes;
    const mls_code code = first ? learn_sizes(s, step, st) : MLS_OK;
    if (code != MLS_OK) {
        return code;
    }
    for (size_t rank = 0; s->takes && rank < t->g->shape.world; rank++) {
        if (t->taken >= s->sizes[rank]) {
            continue;
        }
        const unsigned char *slot =
            mls_local_slot(t->g, rank, step) + (first ? sizeof(uint64_t) : 0);
        copy(s->places[rank] + t->taken, rank == t->g->rank ? t->data + t->taken : slot,
             least(s->sizes[rank] - t->taken, room));
    }
    t->taken += room;
    return MLS_OK;
}

/* The gather's question, at a place of its own. */
static bool more_collect(void *context)
{
    collect *s = context;
    return more_gather(&s->gather);
}

/* Ranks that do not get the bytes step along. */
mls_code mls_local_gather_bytes(mls_local *g, const mls_local_call *call,
                                const void *data, size_t bytes, int root,
                                const mls_local_places *places, mls_status *st)
{
    collect s = {.gather = {.g = g, .data = data},
                 .asked = places,
                 .takes = root < 0 || (size_t)root == g->rank};
    s.gather.sizes = s.sizes;
    s.sizes[g->rank] = bytes;
    const mls_local_flow flow = {
        .kind = MLS_LOCAL_GATHER_BYTES,
        .fingerprint = mix(mix_text(0, call->text), (uint64_t)root),
        .source = NOBODY,
        .fill = fill_collect,
        .drain = drain_collect,
        .more = more_collect,
        .context = &s,
    };
    return run(g, &flow, call, st);
}

#else
/* See local.c. */
typedef int mls_local_ops_unused;
#endif
