/* local_reduce: sums over the ranks of a host.
 *
 * Arrays that all ranks can read are summed where they lie (local_shared.h).  Of others
 * each rank sends its peers their shares through the slots, a piece for each, and sums
 * its own share in the order of ranks.
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

/* Cursors of the writer lie in the group, one for each rank; the reader has one for its
 * own share. */
typedef struct scatter {
    mls_local *g;
    mls_segment *segments;
    size_t count;
    mls_local_cursor reader;
    size_t piece_bytes; /* what a step takes of each rank's shares */
    /* where arrays of all lie that nobody sends: of rank r's segment i, at r * count + i;
     * NULL where they are sent.  The rest is settled in the first steps. */
    const unsigned char **lie;
    bool offers, began, mapped;
    bool is_tallied; /* the tallies of the segments are wanted */
    mls_local_kind kind;
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
    const size_t room = (s->piece_bytes - *used) / item;
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
    *used = mls_local_least((end + 63) / 64 * 64, s->piece_bytes);
    return true;
}

/* ... of arrays that all ranks read where they lie */

enum {
    SHARED_PIECE = 4 << 20, /* of each rank's share in a step: then it looks around */
    SHARED_LEAST = 1 << 20  /* of all arrays: less is sent sooner than agreed on */
};

/* Bytes of a whole array. */
static size_t bytes_of(const scatter *s, size_t i)
{
    const mls_segment *segment = &s->segments[i];
    size_t n = 0;
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        n += segment->counts[rank];
    }
    return n * mls_dtype_of(segment->reduction.dtype)->item_bytes;
}

/* Where others find an array of this rank, if they do: threads find each at its address.
 */
static mls_local_spot spot_of(const scatter *s, size_t i)
{
    const void *data = s->segments[i].data;
    return s->g->fd < 0 ? (mls_local_spot){.start = 1, .at = (uintptr_t)data}
                        : mls_local_blocks_find(s->g->blocks, data, bytes_of(s, i));
}

/* The array of another rank in this one's memory; NULL if it could not be mapped. */
static const unsigned char *array_at(mls_local *g, size_t rank,
                                     const mls_local_spot *spot, size_t bytes)
{
    const unsigned char *found = NULL;
    mls_status unused;
    if (g->fd < 0) {
        return (const unsigned char *)(uintptr_t)spot->at;
    }
    (void)mls_local_views_find(&g->views[rank], g->fd, rank, spot, bytes, &found,
                               &unused);
    return found;
}

/* Whether all arrays of this rank are in memory that the others read, a slot has room to
 * say where, and it is worth it.  Most calls have an array elsewhere, the first one. */
static bool can_offer(const scatter *s)
{
    size_t bytes = 0;
    bool all = s->g->shape.world > 1 &&
               s->count <= s->g->shape.slot_bytes / sizeof(mls_local_spot);
    for (size_t i = 0; all && i < s->count; i++) {
        bytes += bytes_of(s, i);
        all = bytes_of(s, i) == 0 || spot_of(s, i).start != 0;
    }
    return all && bytes >= SHARED_LEAST;
}

/* The bytes of a stretch where this rank has them. */
static const unsigned char *own(const scatter *s, const stretch *part)
{
    const mls_segment *segment = &s->segments[part->segment];
    const size_t item = mls_dtype_of(segment->reduction.dtype)->item_bytes;
    return (const unsigned char *)segment->data + part->at * item;
}

/* Where the arrays of this rank lie, in the place of their elements. */
static void tell_spots(const scatter *s, unsigned char *slot)
{
    for (size_t i = 0; i < s->count; i++) {
        const mls_local_spot spot = spot_of(s, i);
        memcpy(slot + i * sizeof spot, &spot, sizeof spot);
    }
}

/* Read where those of the others lie; whether this process could map it all. */
static bool find_spots(scatter *s, uint64_t step)
{
    mls_local *g = s->g;
    bool good = true;
    for (size_t rank = 0; rank < g->shape.world && good; rank++) {
        const unsigned char *slot = mls_local_slot(g, rank, step);
        for (size_t i = 0; i < s->count && good; i++) {
            const unsigned char **lies = &s->lie[rank * s->count + i];
            mls_local_spot spot;
            memcpy(&spot, slot + i * sizeof spot, sizeof spot);
            if (rank == g->rank || bytes_of(s, i) == 0) {
                *lies = s->segments[i].data;
            } else {
                *lies = array_at(g, rank, &spot, bytes_of(s, i));
                good = *lies != NULL;
            }
        }
    }
    return good;
}

/* From now on everything is sent. */
static void send_all(scatter *s)
{
    mls_free((void *)(uintptr_t)s->lie);
    s->lie = NULL;
    s->piece_bytes = s->g->piece_bytes;
}

/* How many ranks say yes in the note of a step. */
static size_t consenting(const mls_local *g, uint64_t step)
{
    size_t count = 0;
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        count += mls_local_area_of(g, rank)->notes[step % g->shape.depth].shared != 0;
    }
    return count;
}

/* In the first step all see who offers what.  Where all do nothing is sent; where only
 * some do, what the others sent in this step is sent again.  Whether there is something
 * to read in it. */
static bool agree_on_way(scatter *s, uint64_t step)
{
    mls_local *g = s->g;
    const size_t offers = consenting(g, step);
    s->began = true;
    if (offers == 0) {
        return true;
    }
    memset(g->cursors, 0, sizeof g->cursors);
    if (offers < g->shape.world) {
        send_all(s);
    } else {
        s->piece_bytes = SHARED_PIECE;
        s->mapped = find_spots(s, step);
    }
    return false;
}

/* In the second all see whether each could map what it is to read. */
static mls_code drain_maps(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    scatter *s = context;
    if (consenting(s->g, step) < s->g->shape.world) {
        send_all(s);
    }
    return MLS_OK;
}

/* What was read where it lies counts only if nobody had given up by then, whose arrays
 * may be another's since: who fails says so before its caller hears of it. */
static mls_code check_whole(const scatter *s, mls_status *st)
{
    atomic_thread_fence(memory_order_acquire);
    return s->lie != NULL && atomic_load(&mls_local_header_of(s->g)->broken) != 0
               ? mls_local_blamed(s->g, s->kind, "", st)
               : MLS_OK;
}

/* A piece for each peer.  The cursor of this rank itself only walks along, to know when
 * all are through. */
static void fill_scatter(void *context, unsigned char *slot)
{
    scatter *s = context;
    const mls_local *g = s->g;
    if (s->offers && !s->began) {
        tell_spots(s, slot);
        return;
    }
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        size_t used = 0;
        stretch part;
        while (next_stretch(s, rank, &s->g->cursors[rank], &used, &part)) {
            if (rank != g->rank && s->lie == NULL) {
                const mls_dtype dtype = s->segments[part.segment].reduction.dtype;
                copy_ahead(slot + mls_local_piece_of(g, g->rank, rank) + part.offset,
                           own(s, &part), part.length * mls_dtype_of(dtype)->item_bytes);
            }
        }
    }
}

/* The elements of a stretch on some rank. */
static const unsigned char *elements(const scatter *s, size_t rank, uint64_t step,
                                     const stretch *part, size_t item)
{
    const mls_local *g = s->g;
    if (s->lie != NULL) {
        return s->lie[rank * s->count + part->segment] + part->at * item;
    }
    return rank == g->rank ? own(s, part)
                           : mls_local_slot(g, rank, step) +
                                 mls_local_piece_of(g, rank, g->rank) + part->offset;
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

/* Sum the pieces of all in the order of ranks, this rank's from where it lies. */
static mls_code drain_scatter(void *context, uint64_t step, mls_status *st)
{
    scatter *s = context;
    const mls_local *g = s->g;
    if (!s->began && !agree_on_way(s, step)) {
        return MLS_OK;
    }
    if (s->lie != NULL && !mls_local_begin_direct(s->g)) {
        return mls_local_blamed(s->g, s->kind, "", st);
    }
    const void *sources[MLS_LOCAL_MAX_RANKS];
    const mls_destination destination = {.bytes = share_bytes(s)};
    size_t used = 0;
    stretch part;
    while (next_stretch(s, g->rank, &s->reader, &used, &part)) {
        mls_segment *segment = &s->segments[part.segment];
        const size_t from = mls_dtype_of(segment->reduction.dtype)->item_bytes;
        const size_t item = mls_dtype_of(segment->reduction.out_dtype)->item_bytes;
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            sources[rank] = elements(s, rank, step, &part, from);
        }
        mls_reduce_run(g->kernels, &segment->reduction, sources, g->shape.world,
                       (unsigned char *)segment->out + part.start * item, part.length,
                       destination, s->is_tallied ? &segment->tally : NULL);
    }
    mls_local_end_direct(s->g);
    return check_whole(s, st);
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
    uint64_t print = mls_local_mix(mls_local_mix_text(0, call->text), count);
    for (size_t i = 0; i < count; i++) {
        print = mix_reduction(print, &segments[i].reduction);
        for (size_t rank = 0; rank < g->shape.world; rank++) {
            print = mls_local_mix(print, segments[i].counts[rank]);
        }
    }
    return print;
}

/* The steps of a scatter; `s` is set to its beginning. */
static mls_local_flow scatter_flow(scatter *s, uint64_t print)
{
    memset(s->g->cursors, 0, sizeof s->g->cursors);
    s->piece_bytes = s->g->piece_bytes;
    for (size_t i = 0; i < s->count; i++) {
        s->segments[i].tally = (mls_tally){0};
    }
    return (mls_local_flow){.kind = s->kind,
                            .fingerprint = print,
                            .source = NOBODY,
                            .shared = s->offers,
                            .fill = fill_scatter,
                            .drain = drain_scatter,
                            .more = more_scatter,
                            .context = s};
}

/* All steps of a scatter.  Others may read its arrays until they settle, which is left to
 * what follows in an all_reduce.  Threads have nothing to map. */
static mls_code run_scatter(scatter *s, uint64_t print, const mls_local_call *call,
                            mls_local_clock *clock, mls_status *st)
{
    mls_local *g = s->g;
    if (can_offer(s)) {
        s->lie = mls_alloc(g->shape.world * s->count, sizeof *s->lie);
        s->offers = s->lie != NULL; /* or else they are sent */
    }
    const mls_local_flow flow = scatter_flow(s, print);
    mls_code code = mls_local_begin(g, &flow, call, clock, st);
    if (code == MLS_OK && s->lie != NULL && g->fd >= 0) {
        const int64_t deadline = clock->deadline;
        const mls_local_flow maps = {.kind = flow.kind,
                                     .fingerprint = print,
                                     .source = NOBODY,
                                     .shared = s->mapped,
                                     .drain = drain_maps,
                                     .context = s};
        code = mls_local_begin(g, &maps, call, clock, st);
        clock->deadline = deadline;
    }
    if (code == MLS_OK) {
        code = mls_local_continue(g, &flow, clock, st);
    }
    if (code == MLS_OK && s->lie != NULL && s->kind == MLS_LOCAL_REDUCE_SCATTER) {
        code = mls_local_settle(g, &flow, clock, st);
    }
    if (code != MLS_OK && s->offers) {
        mls_local_await_direct(g);
    }
    mls_free((void *)(uintptr_t)s->lie);
    return code;
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
    }
    scatter s = {.g = g,
                 .segments = segments,
                 .count = count,
                 .is_tallied = is_tallied,
                 .kind = MLS_LOCAL_REDUCE_SCATTER};
    mls_local_clock clock;
    return run_scatter(&s, print_segments(g, call, segments, count), call, &clock, st);
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

/* A large array: each rank reduces a share into its place in `out`, and all gather them.
 * In place that is safe: a share is overwritten by its own rank alone, after it read it,
 * and those of others when
 * this rank's have been sent, or all have read them: the gather begins after that. */
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
    scatter s = {.g = g, .segments = &segment, .count = 1, .kind = MLS_LOCAL_ALL_REDUCE};
    mls_local_clock clock;
    mls_code code = run_scatter(&s, print, call, &clock, st);
    if (code == MLS_OK) {
        code = mls_local_gather_on(g, s.kind, call, mine, sizes, out, &clock, st);
    }
    if (code != MLS_OK) {
        mls_local_await_direct(g);
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
    return mls_local_run(g, &flow, call, st);
}

#else
/* See local.c. */
typedef int mls_local_reduce_unused;
#endif
