/* local_ops: what goes through the slots of each operation.
 *
 * Threads publish the addresses of large arrays, and copy from these.
 * Where ranks send different bytes to each other, a slot has a piece for each peer; else
 * all read the whole slot.  A rank's own bytes go through no slot.
 * Sums are shm_reduce.c's.
 */
#if !defined(_WIN32)

#    include "collectives/shm_protocol.h"

#    include <string.h>

enum { NOBODY = -1 };

/* ---- barrier ---- */

/* One step of nothing. */
mls_code mls_local_barrier(mls_local *g, const mls_local_call *call, mls_status *st)
{
    const mls_local_flow flow = {.kind = MLS_LOCAL_BARRIER,
                                 .fingerprint = mls_local_mix_text(0, call->text),
                                 .source = NOBODY};
    return mls_local_run(g, &flow, call, st);
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
    const size_t n = mls_local_least(s->bytes - s->sent, s->g->shape.slot_bytes);
    if (s->g->rank == s->root) {
        mls_local_copy(s->g, slot, s->data + s->sent, n);
    }
    s->sent += n;
}

/* From the root's slot into place. */
static mls_code drain_spread(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    spread *s = context;
    const size_t n = mls_local_least(s->bytes - s->taken, s->g->shape.slot_bytes);
    if (s->g->rank != s->root) {
        mls_local_copy(s->g, s->data + s->taken, mls_local_slot(s->g, s->root, step), n);
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

/* Where this rank has the bytes, or wants them. */
static void tell_spread(void *context, unsigned char *slot)
{
    const spread *s = context;
    memcpy(slot, &s->data, sizeof s->data);
}

/* Each rank copies a part of the root's bytes to all others: the root would idle. */
static mls_code copy_spread(void *context, uint64_t step, mls_status *st)
{
    enum { LINE = 64 };
    const spread *s = context;
    const size_t world = s->g->shape.world;
    const size_t each = (s->bytes / world + LINE - 1) / LINE * LINE;
    const size_t start = mls_local_least(s->g->rank * each, s->bytes);
    const size_t length = s->g->rank + 1 == world
                              ? s->bytes - start
                              : mls_local_least(each, s->bytes - start);
    if (!mls_local_begin_direct(s->g)) {
        return mls_local_blamed(s->g, MLS_LOCAL_BROADCAST, "", st);
    }
    const unsigned char *from = mls_local_address(s->g, s->root, step, 0);
    for (size_t rank = 0; rank < world; rank++) {
        unsigned char *to = mls_local_address(s->g, rank, step, 0);
        if (rank != s->root) {
            mls_local_copy_direct(s->g, to + start, from + start, length, s->bytes);
        }
    }
    mls_local_end_direct(s->g);
    return MLS_OK;
}

/* After the first step the others wait for the root alone. */
mls_code mls_local_broadcast(mls_local *g, const mls_local_call *call, void *data,
                             size_t bytes, size_t root, mls_status *st)
{
    const bool direct = mls_local_is_direct(g, bytes);
    spread s = {.g = g, .data = data, .bytes = bytes, .root = root};
    const mls_local_flow flow = {
        .kind = MLS_LOCAL_BROADCAST,
        .fingerprint =
            mls_local_mix(mls_local_mix(mls_local_mix_text(0, call->text), bytes), root),
        .source = (int)root,
        .fill = direct ? tell_spread : fill_spread,
        .drain = direct ? copy_spread : drain_spread,
        .more = more_spread,
        .context = &s,
    };
    return direct ? mls_local_run_direct(g, &flow, call, st)
                  : mls_local_run(g, &flow, call, st);
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
    return from < s->sizes[rank]
               ? mls_local_least(s->sizes[rank] - from, s->g->shape.slot_bytes)
               : 0;
}

/* The next bytes of this rank. */
static void fill_gather(void *context, unsigned char *slot)
{
    gather *s = context;
    mls_local_copy(s->g, slot, s->data + s->sent, part_of(s, s->g->rank, s->sent));
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
        mls_local_copy(s->g, place + s->taken, from, part_of(s, rank, s->taken));
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

/* This rank's address. */
static void tell_gather(void *context, unsigned char *slot)
{
    const gather *s = context;
    memcpy(slot, &s->data, sizeof s->data);
}

/* From where each rank has it. */
static mls_code read_gather(void *context, uint64_t step, mls_status *st)
{
    const gather *s = context;
    unsigned char *place = s->out;
    size_t all = 0;
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        all += s->sizes[rank];
    }
    if (!mls_local_begin_direct(s->g)) {
        return mls_local_blamed(s->g, MLS_LOCAL_ALL_GATHER, "", st);
    }
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        mls_local_copy_direct(s->g, place, mls_local_address(s->g, rank, step, 0),
                              s->sizes[rank], all);
        place += s->sizes[rank];
    }
    mls_local_end_direct(s->g);
    return MLS_OK;
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
    const bool direct = mls_local_is_direct(g, s.most);
    uint64_t print = mls_local_mix_text(0, call->text);
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        print = mls_local_mix(print, sizes[rank]);
    }
    const mls_local_flow flow = {
        .kind = MLS_LOCAL_ALL_GATHER,
        .fingerprint = print,
        .source = NOBODY,
        .fill = direct ? tell_gather : fill_gather,
        .drain = direct ? read_gather : drain_gather,
        .more = more_gather,
        .context = &s,
    };
    return direct ? mls_local_run_direct(g, &flow, call, st)
                  : mls_local_run(g, &flow, call, st);
}

/* Nothing is compared: that was done when the operation began. */
mls_code mls_local_gather_on(mls_local *g, mls_local_kind kind, const void *data,
                             const size_t *sizes, void *out, mls_local_clock *clock,
                             mls_status *st)
{
    gather s = gather_of(g, data, sizes, out);
    const mls_local_flow flow = {.kind = kind,
                                 .source = NOBODY,
                                 .fill = fill_gather,
                                 .drain = drain_gather,
                                 .more = more_gather,
                                 .context = &s};
    return mls_local_continue(g, &flow, clock, st);
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
            mls_local_copy(g, slot + mls_local_piece_of(g, g->rank, rank), from + s->sent,
                           mls_local_least(s->sizes[0][rank] - s->sent, g->piece_bytes));
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
    mls_local_copy(s->g, s->out + to, s->data + from, s->sizes[0][s->g->rank]);
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
            mls_local_copy(g, place + s->taken,
                           mls_local_slot(g, rank, step) +
                               mls_local_piece_of(g, rank, g->rank),
                           mls_local_least(s->sizes[1][rank] - s->taken, g->piece_bytes));
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
        .fingerprint = mls_local_mix_text(0, call->text),
        .source = NOBODY,
        .fill = fill_trade,
        .drain = drain_trade,
        .more = more_trade,
        .context = &s,
    };
    return mls_local_run(g, &flow, call, st);
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
    mls_local_copy(t->g, slot + sizeof size, t->data, mls_local_least(mine, t->sent));
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
        mls_local_copy(t->g, s->places[rank] + t->taken,
                       rank == t->g->rank ? t->data + t->taken : slot,
                       mls_local_least(s->sizes[rank] - t->taken, room));
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
        .fingerprint = mls_local_mix(mls_local_mix_text(0, call->text), (uint64_t)root),
        .source = NOBODY,
        .fill = fill_collect,
        .drain = drain_collect,
        .more = more_collect,
        .context = &s,
    };
    return mls_local_run(g, &flow, call, st);
}

#else
/* See shm_group.c. */
typedef int mls_local_ops_unused;
#endif
