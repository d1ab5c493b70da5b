/* shm_collectives: barrier, broadcast, all_gather, all_to_all and gather_bytes of a
 * host's ranks; shm_reduce.c has the sums.
 *
 * Threads publish the addresses of large arrays and copy directly. Otherwise data moves
 * through the slots: in each step a rank fills one slot, and then reads (drains) the
 * slots of all ranks for that step (`step`, its number in the group). If a rank sends
 * different bytes to each peer, its slot is divided into one range for each peer;
 * otherwise all ranks read the whole slot. A rank's own bytes never pass through a slot.
 */
#include "collectives/shm_protocol.h"

#include <string.h>

/* ---- barrier ---- */

/* Run one empty step: it ends when all ranks have published it. */
mls_code mls_shm_barrier(mls_shm *g, const mls_shm_call *call, mls_status *st)
{
    const mls_shm_flow flow = {.kind = MLS_SHM_BARRIER,
                               .fingerprint = mls_shm_mix_text(0, call->text),
                               .source = MLS_SHM_NO_RANK};
    return mls_shm_run(g, &flow, call, st);
}

/* ---- all_gather and broadcast ---- */

/* State of a gather. `sizes` are the bytes of each rank, and `most` is the largest of
 * them. `sent` and `read` are offsets that apply to the bytes of every rank. A broadcast
 * is a gather in which only the root has bytes; `data` and `out` are the same there, so
 * that nothing is written to the root's array. */
typedef struct gather {
    mls_shm *g;
    const unsigned char *data;
    unsigned char *out;
    const size_t *sizes;
    size_t most, sent, read;
    size_t root; /* of a broadcast */
} gather;

/* Return the bytes of `rank` that a slot holds if it starts at byte `from` of the rank's
 * contribution; 0 behind its end. */
static size_t bytes_in_slot(const gather *s, size_t rank, size_t from)
{
    return from < s->sizes[rank]
               ? mls_size_least(s->sizes[rank] - from, s->g->shape.slot_bytes)
               : 0;
}

/* Fill this rank's slot with its next bytes, if any are left. */
static void fill_gather(void *context, unsigned char *slot)
{
    gather *s = context;
    mls_shm_copy(s->g, slot, s->data + s->sent, bytes_in_slot(s, s->g->rank, s->sent));
    s->sent += s->g->shape.slot_bytes;
}

/* Copy one slot of each rank to its place in `out`. This rank's own bytes are copied
 * from its array, not through a slot. Cannot fail. */
static mls_code drain_gather(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    gather *s = context;
    unsigned char *place = s->out;
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        const unsigned char *from =
            rank == s->g->rank ? s->data + s->read : mls_shm_slot(s->g, rank, step);
        mls_shm_copy(s->g, place + s->read, from, bytes_in_slot(s, rank, s->read));
        place += s->sizes[rank];
    }
    s->read += s->g->shape.slot_bytes;
    return MLS_OK;
}

/* Return whether the longest contribution of any rank has bytes left, so all ranks take
 * the same number of steps. */
static bool gather_has_more(void *context)
{
    const gather *s = context;
    return s->sent < s->most;
}

/* Publish the address of this rank's array, for a direct operation. */
static void publish_address(void *context, unsigned char *slot)
{
    const gather *s = context;
    memcpy(slot, &s->data, sizeof s->data);
}

/* Copy the bytes of all ranks directly from their arrays, whose addresses are in the
 * slots, into `out` in rank order. Cannot fail. */
static mls_code read_gather(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    const gather *s = context;
    unsigned char *place = s->out;
    size_t total = 0;
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        total += s->sizes[rank];
    }
    for (size_t rank = 0; rank < s->g->shape.world; rank++) {
        mls_shm_copy_direct(s->g, place, mls_shm_address(s->g, rank, step, 0),
                            s->sizes[rank], total);
        place += s->sizes[rank];
    }
    return MLS_OK;
}

/* Return the state of a gather that has not begun; its `most` is the largest of the
 * sizes. */
static gather gather_of(mls_shm *g, const void *data, const size_t *sizes, void *out)
{
    gather s = {.g = g, .data = data, .out = out, .sizes = sizes};
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        s.most = s.most < sizes[rank] ? sizes[rank] : s.most;
    }
    return s;
}

/* Gather directly or through the slots. The fingerprint contains all sizes, so ranks with
 * different sizes fail. */
mls_code mls_shm_all_gather(mls_shm *g, const mls_shm_call *call, const void *data,
                            const size_t *sizes, void *out, mls_status *st)
{
    gather s = gather_of(g, data, sizes, out);
    const bool is_direct = mls_shm_is_direct(g, s.most);
    uint64_t fingerprint = mls_shm_mix_text(0, call->text);
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        fingerprint = mls_shm_mix(fingerprint, sizes[rank]);
    }
    const mls_shm_flow flow = {
        .kind = MLS_SHM_ALL_GATHER,
        .fingerprint = fingerprint,
        .source = MLS_SHM_NO_RANK,
        .is_direct = is_direct,
        .fill = is_direct ? publish_address : fill_gather,
        .drain = is_direct ? read_gather : drain_gather,
        .has_more = gather_has_more,
        .context = &s,
    };
    return mls_shm_run(g, &flow, call, st);
}

/* Copy this rank's share of the root's bytes to all ranks but the root, directly between
 * their arrays. The ranks divide the work, in whole cache lines, and the last one
 * takes the rest; otherwise only the root would copy. Cannot fail. */
static mls_code copy_broadcast(void *context, uint64_t step, mls_status *st)
{
    (void)st;
    enum { LINE = 64 };
    const gather *s = context;
    const size_t world = s->g->shape.world;
    const size_t each = (s->most / world + LINE - 1) / LINE * LINE;
    const size_t start = mls_size_least(s->g->rank * each, s->most);
    const size_t length =
        s->g->rank + 1 == world ? s->most - start : mls_size_least(each, s->most - start);
    const unsigned char *from = mls_shm_address(s->g, s->root, step, 0);
    for (size_t rank = 0; rank < world; rank++) {
        unsigned char *to = mls_shm_address(s->g, rank, step, 0);
        if (rank != s->root) {
            mls_shm_copy_direct(s->g, to + start, from + start, length, s->most);
        }
    }
    return MLS_OK;
}

/* Copy the root's bytes to all ranks. After the first step the other ranks wait only for
 * the root (`source`). */
mls_code mls_shm_broadcast(mls_shm *g, const mls_shm_call *call, void *data, size_t bytes,
                           size_t root, mls_status *st)
{
    const bool is_direct = mls_shm_is_direct(g, bytes);
    size_t sizes[MLS_SHM_MAX_RANKS] = {0};
    sizes[root] = bytes;
    gather s = gather_of(g, data, sizes, data);
    s.root = root;
    const mls_shm_flow flow = {
        .kind = MLS_SHM_BROADCAST,
        .fingerprint =
            mls_shm_mix(mls_shm_mix(mls_shm_mix_text(0, call->text), bytes), root),
        .source = (int)root,
        .is_direct = is_direct,
        .fill = is_direct ? publish_address : fill_gather,
        .drain = is_direct ? copy_broadcast : drain_gather,
        .has_more = gather_has_more,
        .context = &s,
    };
    return mls_shm_run(g, &flow, call, st);
}

/* Gather within an operation that has begun, without comparing anything: the ranks
 * compared their calls when the operation began. */
mls_code mls_shm_continue_gather(mls_shm *g, mls_shm_kind kind, const void *data,
                                 const size_t *sizes, void *out, mls_shm_clock *clock,
                                 mls_status *st)
{
    gather s = gather_of(g, data, sizes, out);
    const mls_shm_flow flow = {.kind = kind,
                               .source = MLS_SHM_NO_RANK,
                               .fill = fill_gather,
                               .drain = drain_gather,
                               .has_more = gather_has_more,
                               .context = &s};
    return mls_shm_continue(g, &flow, clock, st);
}

/* ---- all_to_all ---- */

/* Bytes to and from each rank, and progress: `sent` and `read` bytes of every transfer
 * are done. `most` is the largest transfer between two different ranks. */
typedef struct exchange_state {
    mls_shm *g;
    const unsigned char *data;
    unsigned char *out;
    const size_t *send_sizes, *receive_sizes; /* one for each rank */
    size_t most, sent, read;
    bool sizes_known; /* the first step was read */
} exchange_state;

/* Fill this rank's slot for one step. The first step sends the two tables of sizes (to
 * send, to receive), the following ones a range of bytes for each peer. */
static void fill_exchange(void *context, unsigned char *slot)
{
    exchange_state *s = context;
    const mls_shm *g = s->g;
    const size_t table = g->shape.world * sizeof(size_t);
    if (!s->sizes_known) {
        memcpy(slot, s->send_sizes, table);
        memcpy(slot + table, s->receive_sizes, table);
        return;
    }
    const unsigned char *from = s->data;
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        if (rank != g->rank && s->sent < s->send_sizes[rank]) {
            mls_shm_copy(g, slot + mls_shm_piece_of(g, g->rank, rank), from + s->sent,
                         mls_size_least(s->send_sizes[rank] - s->sent, g->piece_bytes));
        }
        from += s->send_sizes[rank];
    }
    s->sent += g->piece_bytes;
}

/* Compare what each rank sends with what its receiver expects, and set `s->most`. Every
 * rank checks all pairs, so all find the same mismatch (MLS_E_PEER). */
static mls_code compare_sizes(exchange_state *s, uint64_t step, mls_status *st)
{
    const mls_shm *g = s->g;
    const size_t world = g->shape.world;
    for (size_t from = 0; from < world; from++) {
        for (size_t to = 0; to < world; to++) {
            size_t sent, expected;
            memcpy(&sent, mls_shm_slot(g, from, step) + to * sizeof sent, sizeof sent);
            memcpy(&expected,
                   mls_shm_slot(g, to, step) + (world + from) * sizeof expected,
                   sizeof expected);
            if (sent != expected) {
                mls_fail(st, MLS_E_PEER,
                         "all_to_all on rank %zu: rank %zu sends %zu bytes to rank %zu, "
                         "which expects %zu",
                         g->rank, from, sent, to, expected);
                return mls_status_name(st, "all_to_all", strlen("all_to_all"));
            }
            if (from != to && sent > s->most) {
                s->most = sent;
            }
        }
    }
    return MLS_OK;
}

/* Copy the bytes that this rank sends to itself. Called after its sizes were published:
 * other ranks read these meanwhile. */
static void copy_own(const exchange_state *s)
{
    size_t from = 0, to = 0;
    for (size_t rank = 0; rank < s->g->rank; rank++) {
        from += s->send_sizes[rank];
        to += s->receive_sizes[rank];
    }
    mls_shm_copy(s->g, s->out + to, s->data + from, s->send_sizes[s->g->rank]);
}

/* Read one step of all peers. The first step has their sizes: they are compared, and
 * this rank's own bytes are copied. Later steps have up to `piece_bytes` bytes of each
 * peer for this rank. MLS_E_PEER: the sizes do not match. */
static mls_code drain_exchange(void *context, uint64_t step, mls_status *st)
{
    exchange_state *s = context;
    const mls_shm *g = s->g;
    if (!s->sizes_known) {
        s->sizes_known = true;
        const mls_code code = compare_sizes(s, step, st);
        if (code == MLS_OK) {
            copy_own(s);
        }
        return code;
    }
    unsigned char *place = s->out;
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        if (rank != g->rank && s->read < s->receive_sizes[rank]) {
            mls_shm_copy(
                g, place + s->read,
                mls_shm_slot(g, rank, step) + mls_shm_piece_of(g, rank, g->rank),
                mls_size_least(s->receive_sizes[rank] - s->read, g->piece_bytes));
        }
        place += s->receive_sizes[rank];
    }
    s->read += g->piece_bytes;
    return MLS_OK;
}

/* Return whether the largest transfer between two ranks has bytes left, so all ranks take
 * the same number of steps. */
static bool exchange_has_more(void *context)
{
    const exchange_state *s = context;
    return s->sent < s->most;
}

/* Exchange different bytes with each peer. Sizes may differ between ranks, so they are
 * not part of the fingerprint: the first step compares them. */
mls_code mls_shm_all_to_all(mls_shm *g, const mls_shm_call *call, const void *data,
                            const size_t *send_sizes, void *out,
                            const size_t *receive_sizes, mls_status *st)
{
    exchange_state s = {.g = g,
                        .data = data,
                        .out = out,
                        .send_sizes = send_sizes,
                        .receive_sizes = receive_sizes};
    const mls_shm_flow flow = {
        .kind = MLS_SHM_ALL_TO_ALL,
        .fingerprint = mls_shm_mix_text(0, call->text),
        .source = MLS_SHM_NO_RANK,
        .fill = fill_exchange,
        .drain = drain_exchange,
        .has_more = exchange_has_more,
        .context = &s,
    };
    return mls_shm_run(g, &flow, call, st);
}

/* ---- gather_bytes ---- */

/* A gather whose sizes are known after the first step. */
typedef struct collect_state {
    gather gather; /* its `out` is unused */
    size_t sizes[MLS_SHM_MAX_RANKS];
    unsigned char *buffers[MLS_SHM_MAX_RANKS]; /* of the caller, one for each rank */
    const mls_shm_buffer_provider *provider;   /* provides these buffers */
    bool receives;                             /* this rank receives the bytes */
    bool sizes_known;                          /* the first step was read */
} collect_state;

/* Return the bytes of data in the first step's slot, after the size, so that short texts
 * need only one step. */
static size_t first_step_bytes(const mls_shm *g)
{
    return g->shape.slot_bytes - sizeof(uint64_t);
}

/* Fill this rank's slot for one step. The first slot contains the size and the first
 * bytes; the following slots only bytes. */
static void fill_collect(void *context, unsigned char *slot)
{
    collect_state *s = context;
    gather *t = &s->gather;
    const size_t own_size = s->sizes[t->g->rank];
    if (s->sizes_known) {
        fill_gather(t, slot);
        return;
    }
    const uint64_t size = own_size;
    memcpy(slot, &size, sizeof size);
    t->sent = first_step_bytes(t->g);
    mls_shm_copy(t->g, slot + sizeof size, t->data, mls_size_least(own_size, t->sent));
}

/* Read the sizes from the first slots of all ranks, and ask the caller for buffers if
 * this rank receives (`receives`). MLS_E_MEMORY: the caller has none. */
static mls_code read_sizes(collect_state *s, uint64_t step, mls_status *st)
{
    gather *t = &s->gather;
    s->sizes_known = true;
    for (size_t rank = 0; rank < t->g->shape.world; rank++) {
        uint64_t size;
        memcpy(&size, mls_shm_slot(t->g, rank, step), sizeof size);
        s->sizes[rank] = (size_t)size;
        t->most = t->most < s->sizes[rank] ? s->sizes[rank] : t->most;
    }
    if (s->receives &&
        !s->provider->provide(s->provider->context, s->sizes, s->buffers)) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the bytes of all ranks");
    }
    return MLS_OK;
}

/* Copy one step of all ranks into the caller's buffers, if this rank receives; its own
 * bytes come from its array. MLS_E_MEMORY: the caller has no buffers. */
static mls_code drain_collect(void *context, uint64_t step, mls_status *st)
{
    collect_state *s = context;
    gather *t = &s->gather;
    const bool is_first = !s->sizes_known;
    const size_t room = is_first ? first_step_bytes(t->g) : t->g->shape.slot_bytes;
    const mls_code code = is_first ? read_sizes(s, step, st) : MLS_OK;
    if (code != MLS_OK) {
        return code;
    }
    for (size_t rank = 0; s->receives && rank < t->g->shape.world; rank++) {
        if (t->read >= s->sizes[rank]) {
            continue;
        }
        const unsigned char *slot =
            mls_shm_slot(t->g, rank, step) + (is_first ? sizeof(uint64_t) : 0);
        mls_shm_copy(t->g, s->buffers[rank] + t->read,
                     rank == t->g->rank ? t->data + t->read : slot,
                     mls_size_least(s->sizes[rank] - t->read, room));
    }
    t->read += room;
    return MLS_OK;
}

/* gather_has_more for a collect_state. */
static bool collect_has_more(void *context)
{
    collect_state *s = context;
    return gather_has_more(&s->gather);
}

/* Gather bytes of any length; only receiving ranks get buffers. The other ranks take part
 * in every step too. */
mls_code mls_shm_gather_bytes(mls_shm *g, const mls_shm_call *call, const void *data,
                              size_t bytes, int root,
                              const mls_shm_buffer_provider *provider, mls_status *st)
{
    collect_state s = {.gather = {.g = g, .data = data},
                       .provider = provider,
                       .receives = root < 0 || (size_t)root == g->rank};
    s.gather.sizes = s.sizes;
    s.sizes[g->rank] = bytes;
    const mls_shm_flow flow = {
        .kind = MLS_SHM_GATHER_BYTES,
        .fingerprint = mls_shm_mix(mls_shm_mix_text(0, call->text), (uint64_t)root),
        .source = MLS_SHM_NO_RANK,
        .fill = fill_collect,
        .drain = drain_collect,
        .has_more = collect_has_more,
        .context = &s,
    };
    return mls_shm_run(g, &flow, call, st);
}
