/* shm_sync: how ranks of a host wait, time out, notice a dead rank, and find calls that
 * do not match.
 *
 * In a step each rank fills one slot of its ring and publishes it, and then reads
 * (drains) the slots of the others and counts them as consumed. In a direct operation the
 * slots contain addresses, and threads access each other's arrays. A rank fills slots
 * while some are free, and reads as soon as all have published, so both sides of a copy
 * work at the same time. Only the first step of an operation is taken alone: when all
 * ranks have published it, each compares the calls of the others. All ranks reach the
 * same result, and none has published more. After a mismatch they are still at the same
 * step, and the group stays usable.
 */
#include "collectives/shm_protocol.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#    include <linux/futex.h>
#    include <sys/syscall.h>
#endif

/* The conditions that a rank waits for; one of `reads` and `writes` is enough. */
typedef struct wait_condition {
    bool reads, writes;
    bool all_consumed; /* wait until no rank reads the published slots any more */
    int source;        /* rank whose slots are read; MLS_SHM_NO_RANK: all */
} wait_condition;

static const int64_t second = 1000000000; /* nanoseconds, like `nap` */
static const int64_t nap =
    20 * 1000 * 1000; /* longest sleep between two checks of a rank's
                         life, and least time between two polls */

/* Return a time in nanoseconds that never decreases. */
static int64_t read_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * second + t.tv_nsec;
}

/* Saves power, and leaves the core to its other hardware thread, while spinning. */
static inline void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* ---- ranks that are not ready ---- */

/* Return a rank that has not published the next step to read, or MLS_SHM_NO_RANK (-1) if
 * there is none; looks only at rank `source` unless that is MLS_SHM_NO_RANK. */
static int find_unpublished(const mls_shm *g, int source)
{
    const size_t first = source < 0 ? 0 : (size_t)source;
    const size_t end = source < 0 ? g->shape.world : first + 1;
    for (size_t rank = first; rank < end; rank++) {
        if (atomic_load(&mls_shm_area_of(g, rank)->published) <= g->consumed) {
            return (int)rank;
        }
    }
    return MLS_SHM_NO_RANK;
}

/* Return a rank that still has `steps` or more of this rank's published steps to consume,
 * or MLS_SHM_NO_RANK. MLS_SHM_NO_RANK means, with `steps` equal to the depth, that the
 * next slot is free; with 1, that all ranks have read everything. */
static int find_unconsumed(const mls_shm *g, size_t steps)
{
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        const uint64_t consumed = atomic_load(&mls_shm_area_of(g, rank)->consumed);
        if (consumed + steps <= g->published) {
            return (int)rank;
        }
    }
    return MLS_SHM_NO_RANK;
}

/* Return a rank for which this rank must wait, or MLS_SHM_NO_RANK if all steps were read
 * (`all_consumed`), or if reading or writing, as far as `condition` asks for them, is
 * possible.
 */
static int find_blocking_rank(const mls_shm *g, wait_condition condition)
{
    int peer = MLS_SHM_NO_RANK;
    if (condition.all_consumed) {
        return find_unconsumed(g, 1);
    }
    if (condition.reads) {
        peer = find_unpublished(g, condition.source);
        if (peer == MLS_SHM_NO_RANK) {
            return MLS_SHM_NO_RANK;
        }
    }
    if (condition.writes) {
        const int slow = find_unconsumed(g, g->shape.depth);
        if (slow == MLS_SHM_NO_RANK) {
            return MLS_SHM_NO_RANK;
        }
        return peer == MLS_SHM_NO_RANK ? slow : peer;
    }
    return peer;
}

/* ---- sleeping ---- */

/* Sleep while the bell has the value `value`, at most `length` nanoseconds; may also
 * return early. */
static void sleep_on_bell(_Atomic(uint32_t) *bell, uint32_t value, int64_t length)
{
#if defined(__linux__)
    struct timespec t = {.tv_sec = (time_t)(length / second), .tv_nsec = length % second};
    (void)syscall(SYS_futex, bell, FUTEX_WAIT, value, &t, NULL, 0);
#else
    /* no futex: poll soon */
    const int64_t soon = 50 * 1000;
    struct timespec t = {.tv_nsec = (long)(length < soon ? length : soon)};
    if (atomic_load(bell) == value) {
        (void)nanosleep(&t, NULL);
    }
#endif
}

/* Return whether the process of rank `rank` has ended: its byte of the file is not
 * locked. Threads (`fd` below 0) cannot die alone. */
static bool is_dead(const mls_shm *g, size_t rank)
{
    struct flock lock = mls_shm_lock_on(rank);
    if (g->fd < 0 || rank == g->rank) {
        return false;
    }
    return fcntl(g->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* ---- failing ---- */

/* Write to `text` (`room` bytes) how far rank `rank` is, for the message of this rank,
 * which waited in vain for it in the operation `kind`. A rank's `doing` is the number of
 * its last operation, shifted by 8 bits, and the operation's kind. */
static void describe_progress(const mls_shm *g, mls_shm_kind kind, size_t rank,
                              char *text, size_t room)
{
    const uint64_t doing = atomic_load(&mls_shm_area_of(g, rank)->doing);
    const uint64_t number = doing >> 8;
    const char *name = mls_shm_kind_name(kind);
    if (number >= g->number) {
        snprintf(text, room, "rank %zu is in %s but makes no progress", rank, name);
    } else if (number == 0) {
        snprintf(text, room, "rank %zu has not called %s, nor any earlier operation",
                 rank, name);
    } else {
        snprintf(text, room,
                 "rank %zu has not called %s (its last operation was number %llu, %s; "
                 "this is number %llu)",
                 rank, name, (unsigned long long)number,
                 mls_shm_kind_name((mls_shm_kind)(doing & 0xFF)),
                 (unsigned long long)g->number);
    }
}

/* Mark the group as broken: `why`, by `peer`, reported by this rank. Returns MLS_E_PEER
 * with the reason that was recorded first, or with `local_reason` unless it is "". */
static mls_code break_group(mls_shm *g, mls_shm_kind kind, mls_shm_why why, size_t peer,
                            const char *local_reason, mls_status *st)
{
    mls_shm_mark_broken(
        g,
        (mls_shm_blame){.why = why, .reporter = g->rank, .culprit = peer, .kind = kind});
    return mls_shm_fail_broken(g, kind, local_reason, st);
}

/* Fails because the deadline passed while this rank waited for `peer`; breaks the group.
 * Returns MLS_E_PEER. */
static mls_code fail_on_timeout(mls_shm *g, const mls_shm_clock *clock, mls_shm_kind kind,
                                size_t peer, mls_status *st)
{
    char text[MLS_TEXT_BYTES / 2], local_reason[MLS_TEXT_BYTES];
    describe_progress(g, kind, peer, text, sizeof text);
    snprintf(local_reason, sizeof local_reason, "not done after %g s: %s",
             clock->call->timeout, text);
    return break_group(g, kind, MLS_SHM_TIMEOUT, peer, local_reason, st);
}

/* Check, while waiting for rank `peer` or working (MLS_SHM_NO_RANK) in the operation
 * `kind`: is the group broken (MLS_E_PEER), has the deadline passed while waiting
 * (MLS_E_PEER), does the caller's `poll` want to stop (MLS_E_STOPPED)? A passed deadline
 * and a stop break the group. `poll` is called at most every `nap` nanoseconds. */
static mls_code check_progress(mls_shm *g, mls_shm_clock *clock, mls_shm_kind kind,
                               int peer, mls_status *st)
{
    if (atomic_load(&mls_shm_header_of(g)->broken) != 0) {
        return mls_shm_fail_broken(g, kind, "", st);
    }
    const int64_t time = read_clock();
    if (time >= clock->deadline && peer != MLS_SHM_NO_RANK) {
        return fail_on_timeout(g, clock, kind, (size_t)peer, st);
    }
    if (clock->call->poll == NULL || time - clock->polled < nap) {
        return MLS_OK;
    }
    clock->polled = time;
    if (clock->call->poll(clock->call->context)) {
        return MLS_OK;
    }
    (void)break_group(g, kind, MLS_SHM_INTERRUPTED, g->rank, "", st);
    /* this rank reports a stop; the others MLS_E_PEER */
    st->code = MLS_E_STOPPED;
    return MLS_E_STOPPED;
}

/* Check whether rank `peer`, for which this rank waits, has left or died; that breaks the
 * group (MLS_E_PEER). A rank that has not joined yet is waited for. Tests the lock before
 * the state, because a leaving rank changes them in the other order. Steps that it
 * published before still count, so the condition `condition` is checked once more. */
static mls_code check_alive(mls_shm *g, mls_shm_kind kind, wait_condition condition,
                            int peer, mls_status *st)
{
    const mls_shm_area *area = mls_shm_area_of(g, (size_t)peer);
    const bool dead = is_dead(g, (size_t)peer);
    const uint32_t state = atomic_load(&area->state);
    if (state == MLS_SHM_ABSENT || (state == MLS_SHM_JOINED && !dead) ||
        find_blocking_rank(g, condition) != peer) {
        return MLS_OK;
    }
    const bool has_left = state == MLS_SHM_CLOSED;
    return break_group(g, kind, has_left ? MLS_SHM_LEFT : MLS_SHM_DIED, (size_t)peer, "",
                       st);
}

/* ---- waiting ---- */

/* Poll for a while before sleeping, since most waits are short. Returns true if no rank
 * blocks `condition` any more, false if it took too long or the group is broken. */
static bool spin_until_ready(const mls_shm *g, wait_condition condition)
{
    const int64_t end = g->spin_nanoseconds == 0 ? 0 : read_clock() + g->spin_nanoseconds;
    do {
        for (int i = 0; i < 64; i++) {
            if (find_blocking_rank(g, condition) == MLS_SHM_NO_RANK) {
                return true;
            }
            pause_cpu();
        }
        if (atomic_load(&mls_shm_header_of(g)->broken) != 0) {
            return false;
        }
    } while (read_clock() < end);
    return false;
}

/* Wait until no rank blocks the condition `condition`: first spin, then sleep on this
 * rank's bell, in short naps between which deadline (`clock`), caller and blocking rank
 * are checked. `sleeping` is set before the condition is tested once more, so that no
 * wake-up is lost. MLS_E_PEER, MLS_E_STOPPED. */
static mls_code wait_for(mls_shm *g, mls_shm_clock *clock, mls_shm_kind kind,
                         wait_condition condition, mls_status *st)
{
    if (find_blocking_rank(g, condition) == MLS_SHM_NO_RANK ||
        spin_until_ready(g, condition)) {
        return MLS_OK;
    }
    mls_shm_area *own_area = mls_shm_area_of(g, g->rank);
    for (;;) {
        const uint32_t value = atomic_load(&own_area->bell);
        atomic_store(&own_area->sleeping, 1);
        const int peer = find_blocking_rank(g, condition);
        if (peer == MLS_SHM_NO_RANK) {
            break;
        }
        mls_code code = check_progress(g, clock, kind, peer, st);
        if (code == MLS_OK) {
            code = check_alive(g, kind, condition, peer, st);
        }
        if (code != MLS_OK) {
            atomic_store(&own_area->sleeping, 0);
            return code;
        }
        const int64_t left = clock->deadline - read_clock();
        sleep_on_bell(&own_area->bell, value, left < 1 ? 1 : left < nap ? left : nap);
    }
    atomic_store(&own_area->sleeping, 0);
    return MLS_OK;
}

/* ---- steps ---- */

/* Fill this rank's next slot, publish it, and wake the others. The slot must be free. */
static void publish_step(mls_shm *g, const mls_shm_flow *flow)
{
    if (flow->fill != NULL) {
        flow->fill(flow->context, mls_shm_slot(g, g->rank, g->published));
    }
    g->published++;
    atomic_store(&mls_shm_area_of(g, g->rank)->published, g->published);
    mls_shm_wake(g);
}

/* Tell the others that this rank has read the next step of all ranks, and wake them. */
static void consume_step(mls_shm *g)
{
    g->consumed++;
    atomic_store(&mls_shm_area_of(g, g->rank)->consumed, g->consumed);
    mls_shm_wake(g);
}

/* Read the next step of all ranks with `drain`, in a direct operation only if the group
 * is intact: otherwise the arrays of other ranks may be freed already. A rank that
 * breaks the group reads `direct` afterwards, and a rank that sets `direct` reads
 * `broken` afterwards, so at least one of them sees the other. MLS_E_PEER: the group is
 * broken; errors of `drain`. */
static mls_code drain_slots(mls_shm *g, const mls_shm_flow *flow, mls_status *st)
{
    if (flow->drain == NULL || !flow->is_direct) {
        return flow->drain == NULL ? MLS_OK : flow->drain(flow->context, g->consumed, st);
    }
    _Atomic(uint32_t) *direct = &mls_shm_area_of(g, g->rank)->direct;
    atomic_store(direct, 1);
    const mls_code code = atomic_load(&mls_shm_header_of(g)->broken) != 0
                              ? mls_shm_fail_broken(g, flow->kind, "", st)
                              : flow->drain(flow->context, g->consumed, st);
    atomic_store(direct, 0);
    return code;
}

/* Read a step, and tell the writers that it was read. After any error but MLS_E_PEER the
 * other ranks would go on without this one, so the group is marked as broken. */
static mls_code drain_step(mls_shm *g, const mls_shm_flow *flow, mls_status *st)
{
    const mls_code code = drain_slots(g, flow, st);
    if (code != MLS_OK && code != MLS_E_PEER) {
        mls_shm_mark_broken(g, (mls_shm_blame){.why = MLS_SHM_FAILED,
                                               .reporter = g->rank,
                                               .culprit = g->rank,
                                               .kind = flow->kind});
        return code;
    }
    consume_step(g);
    return code;
}

/* Write a record of this rank's next call, which the other ranks compare with theirs. It
 * is visible only after publish_step. `text` may be NULL. */
static void record_call(mls_shm *g, const mls_shm_flow *flow, const char *text)
{
    mls_shm_area *area = mls_shm_area_of(g, g->rank);
    mls_shm_record *record = &area->records[g->published % g->shape.depth];
    g->number++;
    atomic_store(&area->doing, g->number << 8 | (uint64_t)flow->kind);
    record->number = g->number;
    record->fingerprint = flow->fingerprint;
    record->kind = (uint32_t)flow->kind;
    snprintf(record->text, sizeof record->text, "%s", text == NULL ? "" : text);
}

/* Fail because this rank's call, `own_record`, differs from the call of rank `rank`,
 * whose record is `other`; the message quotes the difference. Returns MLS_E_PEER. */
static mls_code fail_mismatch(const mls_shm *g, const mls_shm_record *own_record,
                              size_t rank, const mls_shm_record *other, mls_status *st)
{
    const char *name = mls_shm_kind_name((mls_shm_kind)own_record->kind);
    const char *other_name = mls_shm_kind_name((mls_shm_kind)other->kind);
    if (own_record->kind == other->kind && strcmp(own_record->text, other->text) == 0) {
        mls_fail(st, MLS_E_PEER,
                 "%s on rank %zu: rank %zu called it with other shapes, counts or "
                 "arguments; all ranks must make the same call",
                 name, g->rank, rank);
    } else {
        mls_fail(
            st, MLS_E_PEER,
            "%s on rank %zu: this rank called '%s%s%.90s', rank %zu '%s%s%.90s'; all "
            "ranks must make the same call",
            name, g->rank, name, own_record->text[0] == '\0' ? "" : " ", own_record->text,
            rank, other_name, other->text[0] == '\0' ? "" : " ", other->text);
    }
    return mls_status_name(st, name, strlen(name));
}

/* Compare the records of all ranks' calls, which all have published. If they are not all
 * equal, each rank finds one that differs from its own. MLS_E_PEER. */
static mls_code compare_records(const mls_shm *g, mls_status *st)
{
    const size_t at = (size_t)(g->consumed % g->shape.depth);
    const mls_shm_record *own_record = &mls_shm_area_of(g, g->rank)->records[at];
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        const mls_shm_record *other = &mls_shm_area_of(g, rank)->records[at];
        if (other->fingerprint != own_record->fingerprint ||
            other->kind != own_record->kind) {
            return fail_mismatch(g, own_record, rank, other, st);
        }
    }
    return MLS_OK;
}

/* Refuse the operation `kind` in a forked child, and in a broken group. MLS_E_PEER. */
static mls_code check_usable(mls_shm *g, mls_shm_kind kind, mls_status *st)
{
    const char *name = mls_shm_kind_name(kind);
    if (g->process != getpid()) {
        return mls_fail(st, MLS_E_PEER,
                        "%s on rank %zu: this process was forked from the one that "
                        "joined the group; join another group in this process",
                        name, g->rank);
    }
    if (atomic_load(&mls_shm_header_of(g)->broken) != 0) {
        return mls_shm_fail_broken(g, kind, "", st);
    }
    return MLS_OK;
}

/* Publish a record of this call with the first step, and compare all records. Nothing
 * else is published before, so after a mismatch all ranks are at the same step, and the
 * group stays usable. */
mls_code mls_shm_begin(mls_shm *g, const mls_shm_flow *flow, const mls_shm_call *call,
                       mls_shm_clock *clock, mls_status *st)
{
    mls_code code = check_usable(g, flow->kind, st);
    if (code != MLS_OK) {
        return code;
    }
    const int64_t start = read_clock();
    *clock = (mls_shm_clock){.call = call,
                             .deadline = start + (int64_t)(call->timeout * 1e9),
                             .polled = start};
    code = wait_for(g, clock, flow->kind, (wait_condition){.writes = true}, st);
    if (code != MLS_OK) {
        return code;
    }
    record_call(g, flow, call->text);
    publish_step(g, flow);
    code = wait_for(g, clock, flow->kind,
                    (wait_condition){.reads = true, .source = MLS_SHM_NO_RANK}, st);
    if (code != MLS_OK) {
        return code;
    }
    code = compare_records(g, st);
    if (code != MLS_OK) {
        consume_step(g);
        return code;
    }
    return drain_step(g, flow, st);
}

/* Publish if there is more and a slot is free, else read a step that all have published,
 * else wait. Publishing comes first: other ranks wait for it. */
mls_code mls_shm_continue(mls_shm *g, const mls_shm_flow *flow, mls_shm_clock *clock,
                          mls_status *st)
{
    for (;;) {
        const bool has_more = flow->has_more != NULL && flow->has_more(flow->context);
        const bool has_unread = g->consumed < g->published;
        if (!has_more && !has_unread) {
            return MLS_OK;
        }
        mls_code code = check_progress(g, clock, flow->kind, MLS_SHM_NO_RANK, st);
        if (code != MLS_OK) {
            return code;
        }
        if (has_more && find_unconsumed(g, g->shape.depth) == MLS_SHM_NO_RANK) {
            publish_step(g, flow);
        } else if (has_unread && find_unpublished(g, flow->source) == MLS_SHM_NO_RANK) {
            code = drain_step(g, flow, st);
        } else {
            const wait_condition condition = {
                .reads = has_unread, .writes = has_more, .source = flow->source};
            code = wait_for(g, clock, flow->kind, condition, st);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
}

/* ---- arrays of other threads, by their addresses ---- */

/* Slots are used between processes (`fd` is not -1), and for small arrays. */
bool mls_shm_is_direct(const mls_shm *g, size_t bytes)
{
    enum {
        LEAST = 256 << 10
    }; /* smaller arrays are copied faster than their ranks can wait for each other */
    return g->fd < 0 && g->shape.world > 1 && bytes >= LEAST;
}

/* Wait until no thread accesses an array of this rank, whose operation failed. The group
 * is broken, so no thread begins an access. A thread that accesses an array waits for no
 * rank and ends soon. */
static void await_direct(const mls_shm *g)
{
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        while (rank != g->rank && atomic_load(&mls_shm_area_of(g, rank)->direct) != 0) {
            sched_yield();
        }
    }
}

/* Run all steps of an operation. The last wait of a direct operation lets the other ranks
 * finish with this rank's arrays. */
mls_code mls_shm_run(mls_shm *g, const mls_shm_flow *flow, const mls_shm_call *call,
                     mls_status *st)
{
    mls_shm_clock clock;
    mls_code code = mls_shm_begin(g, flow, call, &clock, st);
    if (!flow->is_direct) {
        return code == MLS_OK ? mls_shm_continue(g, flow, &clock, st) : code;
    }
    if (code == MLS_OK) {
        code =
            wait_for(g, &clock, flow->kind, (wait_condition){.all_consumed = true}, st);
    }
    if (code != MLS_OK) {
        await_direct(g);
    }
    return code;
}
