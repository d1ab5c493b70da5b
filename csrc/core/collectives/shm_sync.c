/* local_wait: operations step by step, and how ranks wait for each other.
 *
 * A rank fills slots as long as some are free, and reads as soon as all have published;
 * so both sides of a copy are at work at the same time.  The first step of an operation
 * is taken by itself: when all have published it, each compares what the others say of
 * their call.  All find the same, and none has published more, so that after a difference
 * they stand at one place and the group lives on.
 */
#if !defined(_WIN32)

#    include "collectives/shm_protocol.h"

#    include <errno.h>
#    include <sched.h>
#    include <stdio.h>
#    include <string.h>
#    include <time.h>
#    include <unistd.h>

#    if defined(__linux__)
#        include <linux/futex.h>
#        include <sys/syscall.h>
#    endif

/* What a rank can do next, where it waits for either. */
typedef struct wish {
    bool reads, writes;
    bool settles; /* nobody reads any more what this rank published */
    int source;   /* whose slots it reads; -1 for everybody's */
} wish;

enum { NOBODY = -1 };

static const int64_t second = 1000000000;
static const int64_t nap = 20 * 1000 * 1000; /* between two looks at a rank's life */

/* What deadlines are in. */
static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * second + t.tv_nsec;
}

/* Lets the other thread of this core, or its power, profit from a wait. */
static inline void relax(void)
{
#    if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#    elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#    endif
}

/* ---- who is not there yet ---- */

/* The first rank that has not published the step that is read next. */
static int unpublished(const mls_local *g, int source)
{
    const size_t first = source < 0 ? 0 : (size_t)source;
    const size_t end = source < 0 ? g->shape.world : first + 1;
    for (size_t rank = first; rank < end; rank++) {
        if (atomic_load(&mls_local_area_of(g, rank)->published) <= g->read) {
            return (int)rank;
        }
    }
    return NOBODY;
}

/* The first rank that still needs the last slots that this one wrote, all but `most - 1`
 * of them: the one that is written next where `most` is all that there are. */
static int unconsumed(const mls_local *g, size_t most)
{
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        const uint64_t consumed = atomic_load(&mls_local_area_of(g, rank)->consumed);
        if (consumed + most <= g->written) {
            return (int)rank;
        }
    }
    return NOBODY;
}

/* The rank that keeps this one from doing anything it wishes to. */
static int missing(const mls_local *g, wish w)
{
    int who = NOBODY;
    if (w.settles) {
        return unconsumed(g, 1);
    }
    if (w.reads) {
        who = unpublished(g, w.source);
        if (who == NOBODY) {
            return NOBODY;
        }
    }
    if (w.writes) {
        const int slow = unconsumed(g, g->shape.depth);
        return slow == NOBODY || who == NOBODY ? slow : who;
    }
    return who;
}

/* ---- sleeping ---- */

/* Sleep until the bell is no longer at `value`, at most for `length`. */
static void sleep_on(_Atomic(uint32_t) *bell, uint32_t value, int64_t length)
{
#    if defined(__linux__)
    struct timespec t = {.tv_sec = (time_t)(length / second), .tv_nsec = length % second};
    (void)syscall(SYS_futex, bell, FUTEX_WAIT, value, &t, NULL, 0);
#    else
    /* no bell that processes share: look again soon */
    const int64_t soon = 50 * 1000;
    struct timespec t = {.tv_nsec = (long)(length < soon ? length : soon)};
    if (atomic_load(bell) == value) {
        (void)nanosleep(&t, NULL);
    }
#    endif
}

/* Whether the process of a rank has ended: nobody holds its lock. */
static bool is_dead(const mls_local *g, size_t rank)
{
    struct flock lock = mls_local_lock_on(rank);
    if (g->fd < 0 || rank == g->rank) {
        return false;
    }
    return fcntl(g->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* ---- giving up ---- */

/* How a rank stands to the operation, for the message of one that waited in vain. */
static void describe(const mls_local *g, mls_local_kind kind, size_t rank, char *text,
                     size_t room)
{
    const uint64_t doing = atomic_load(&mls_local_area_of(g, rank)->doing);
    const uint64_t number = doing >> 8;
    const char *name = mls_local_kind_name(kind);
    if (number >= g->number) {
        snprintf(text, room, "rank %zu is in %s but does not go on", rank, name);
    } else if (number == 0) {
        snprintf(text, room, "rank %zu has not called %s, nor anything before", rank,
                 name);
    } else {
        snprintf(text, room,
                 "rank %zu has not called %s (its last operation was number %llu, %s; "
                 "this is number %llu)",
                 rank, name, (unsigned long long)number,
                 mls_local_kind_name((mls_local_kind)(doing & 0xFF)),
                 (unsigned long long)g->number);
    }
}

/* Declare the group broken over `who`, and fail. */
static mls_code give_up(mls_local *g, mls_local_kind kind, mls_local_why why, size_t who,
                        const char *more, mls_status *st)
{
    mls_local_break(
        g,
        (mls_local_blame){.why = why, .reporter = g->rank, .culprit = who, .kind = kind});
    return mls_local_blamed(g, kind, more, st);
}

/* The deadline has passed while `who` was waited for. */
static mls_code time_out(mls_local *g, const mls_local_clock *clock, mls_local_kind kind,
                         size_t who, mls_status *st)
{
    char text[MLS_TEXT_BYTES / 2], more[MLS_TEXT_BYTES];
    describe(g, kind, who, text, sizeof text);
    snprintf(more, sizeof more, "not done after %g s: %s", clock->call->timeout, text);
    return give_up(g, kind, MLS_LOCAL_TIMEOUT, who, more, st);
}

/* Who waits long, or works long, looks up: is the group whole, is there time, does the
 * caller want to go on? */
static mls_code look_up(mls_local *g, mls_local_clock *clock, mls_local_kind kind,
                        int who, mls_status *st)
{
    if (atomic_load(&mls_local_header_of(g)->broken) != 0) {
        return mls_local_blamed(g, kind, "", st);
    }
    const int64_t time = now();
    if (time >= clock->deadline && who != NOBODY) {
        return time_out(g, clock, kind, (size_t)who, st);
    }
    if (clock->call->poll == NULL || time - clock->polled < nap) {
        return MLS_OK;
    }
    clock->polled = time;
    if (clock->call->poll(clock->call->context)) {
        return MLS_OK;
    }
    (void)give_up(g, kind, MLS_LOCAL_INTERRUPTED, g->rank, "", st);
    st->code = MLS_E_STOPPED;
    return MLS_E_STOPPED;
}

/* A rank that is waited for may have left, or died.  The lock is asked before the state:
 * who leaves changes them in the other order.  What it had published counts, so that the
 * wish is looked at once more. */
static mls_code check_life(mls_local *g, mls_local_kind kind, wish w, int who,
                           mls_status *st)
{
    const mls_local_area *area = mls_local_area_of(g, (size_t)who);
    const bool dead = is_dead(g, (size_t)who);
    const uint32_t state = atomic_load(&area->state);
    if (state == MLS_LOCAL_ABSENT || (state == MLS_LOCAL_JOINED && !dead) ||
        missing(g, w) != who) {
        return MLS_OK;
    }
    const bool left = state == MLS_LOCAL_CLOSED;
    return give_up(g, kind, left ? MLS_LOCAL_LEFT : MLS_LOCAL_DIED, (size_t)who, "", st);
}

/* ---- waiting ---- */

/* Look again and again for a while; whether there is something to do. */
static bool spin(const mls_local *g, wish w)
{
    const int64_t end = g->spins == 0 ? 0 : now() + g->spins;
    do {
        for (int i = 0; i < 64; i++) {
            if (missing(g, w) == NOBODY) {
                return true;
            }
            relax();
        }
        if (atomic_load(&mls_local_header_of(g)->broken) != 0) {
            return false;
        }
    } while (now() < end);
    return false;
}

/* Return when one of the wishes can be had. */
static mls_code wait_for(mls_local *g, mls_local_clock *clock, mls_local_kind kind,
                         wish w, mls_status *st)
{
    if (missing(g, w) == NOBODY || spin(g, w)) {
        return MLS_OK;
    }
    mls_local_area *mine = mls_local_area_of(g, g->rank);
    for (;;) {
        const uint32_t value = atomic_load(&mine->bell);
        atomic_store(&mine->sleeping, 1);
        const int who = missing(g, w);
        if (who == NOBODY) {
            break;
        }
        mls_code code = look_up(g, clock, kind, who, st);
        if (code == MLS_OK) {
            code = check_life(g, kind, w, who, st);
        }
        if (code != MLS_OK) {
            atomic_store(&mine->sleeping, 0);
            return code;
        }
        const int64_t left = clock->deadline - now();
        sleep_on(&mine->bell, value, left < 1 ? 1 : left < nap ? left : nap);
    }
    atomic_store(&mine->sleeping, 0);
    return MLS_OK;
}

/* ---- steps ---- */

/* Fill the next slot and show it. */
static void publish(mls_local *g, const mls_local_flow *flow)
{
    if (flow->fill != NULL) {
        flow->fill(flow->context, mls_local_slot(g, g->rank, g->written));
    }
    g->written++;
    atomic_store(&mls_local_area_of(g, g->rank)->published, g->written);
    mls_local_ring(g);
}

/* Done with everybody's slots of the step that was read. */
static void consume(mls_local *g)
{
    g->read++;
    atomic_store(&mls_local_area_of(g, g->rank)->consumed, g->read);
    mls_local_ring(g);
}

/* Read a step.  Where that fails the others go on without this rank: the group is
 * broken. */
static mls_code drain(mls_local *g, const mls_local_flow *flow, mls_status *st)
{
    const mls_code code =
        flow->drain == NULL ? MLS_OK : flow->drain(flow->context, g->read, st);
    if (code != MLS_OK && code != MLS_E_PEER) {
        mls_local_break(g, (mls_local_blame){.why = MLS_LOCAL_FAILED,
                                             .reporter = g->rank,
                                             .culprit = g->rank,
                                             .kind = flow->kind});
        return code;
    }
    consume(g);
    return code;
}

/* Say what this rank is about to do, beside the slot that its first step will fill. */
static void take_note(mls_local *g, const mls_local_flow *flow, const char *text)
{
    mls_local_area *area = mls_local_area_of(g, g->rank);
    mls_local_note *note = &area->notes[g->written % g->shape.depth];
    g->number++;
    atomic_store(&area->doing, g->number << 8 | (uint64_t)flow->kind);
    note->number = g->number;
    note->fingerprint = flow->fingerprint;
    note->kind = (uint32_t)flow->kind;
    snprintf(note->text, sizeof note->text, "%s", text == NULL ? "" : text);
}

/* Refuse a call that does not go with that of another rank: the first that differs. */
static mls_code differs(const mls_local *g, const mls_local_note *mine, size_t rank,
                        const mls_local_note *other, mls_status *st)
{
    const char *name = mls_local_kind_name((mls_local_kind)mine->kind);
    const char *theirs = mls_local_kind_name((mls_local_kind)other->kind);
    if (mine->kind == other->kind && strcmp(mine->text, other->text) == 0) {
        mls_fail(st, MLS_E_PEER,
                 "%s on rank %zu: rank %zu called it with other shapes, counts or "
                 "arguments; all must call the same",
                 name, g->rank, rank);
    } else {
        mls_fail(
            st, MLS_E_PEER,
            "%s on rank %zu: this rank called '%s%s%.90s', rank %zu '%s%s%.90s'; all "
            "must call the same",
            name, g->rank, name, mine->text[0] == '\0' ? "" : " ", mine->text, rank,
            theirs, other->text[0] == '\0' ? "" : " ", other->text);
    }
    mls_status_name(st, name, strlen(name));
    return MLS_E_PEER;
}

/* All have published: compare the notes.  Where they are not all alike, each rank finds
 * one that differs from its own. */
static mls_code compare(const mls_local *g, mls_status *st)
{
    const size_t at = (size_t)(g->read % g->shape.depth);
    const mls_local_note *mine = &mls_local_area_of(g, g->rank)->notes[at];
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        const mls_local_note *other = &mls_local_area_of(g, rank)->notes[at];
        if (other->fingerprint != mine->fingerprint || other->kind != mine->kind) {
            return differs(g, mine, rank, other, st);
        }
    }
    return MLS_OK;
}

/* Whether this process may use the group at all. */
static mls_code check_usable(mls_local *g, mls_local_kind kind, mls_status *st)
{
    const char *name = mls_local_kind_name(kind);
    if (g->process != getpid()) {
        return mls_fail(st, MLS_E_PEER,
                        "%s on rank %zu: this process was forked from the one that "
                        "joined the group; join a group of its own",
                        name, g->rank);
    }
    if (atomic_load(&mls_local_header_of(g)->broken) != 0) {
        return mls_local_blamed(g, kind, "", st);
    }
    return MLS_OK;
}

/* Nothing else is published before all notes were compared. */
mls_code mls_local_begin(mls_local *g, const mls_local_flow *flow,
                         const mls_local_call *call, mls_local_clock *clock,
                         mls_status *st)
{
    mls_code code = check_usable(g, flow->kind, st);
    if (code != MLS_OK) {
        return code;
    }
    const int64_t start = now();
    *clock = (mls_local_clock){.call = call,
                               .deadline = start + (int64_t)(call->timeout * 1e9),
                               .polled = start};
    code = wait_for(g, clock, flow->kind, (wish){.writes = true}, st);
    if (code != MLS_OK) {
        return code;
    }
    take_note(g, flow, call->text);
    publish(g, flow);
    code = wait_for(g, clock, flow->kind, (wish){.reads = true, .source = NOBODY}, st);
    if (code != MLS_OK) {
        return code;
    }
    code = compare(g, st);
    if (code != MLS_OK) {
        consume(g);
        return code;
    }
    return drain(g, flow, st);
}

/* Writing comes first: others wait for it. */
mls_code mls_local_continue(mls_local *g, const mls_local_flow *flow,
                            mls_local_clock *clock, mls_status *st)
{
    for (;;) {
        const bool more = flow->more != NULL && flow->more(flow->context);
        const bool behind = g->read < g->written;
        if (!more && !behind) {
            return MLS_OK;
        }
        mls_code code = look_up(g, clock, flow->kind, NOBODY, st);
        if (code != MLS_OK) {
            return code;
        }
        if (more && unconsumed(g, g->shape.depth) == NOBODY) {
            publish(g, flow);
        } else if (behind && unpublished(g, flow->source) == NOBODY) {
            code = drain(g, flow, st);
        } else {
            const wish w = {.reads = behind, .writes = more, .source = flow->source};
            code = wait_for(g, clock, flow->kind, w, st);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
}

/* Operations of one kind of steps. */
mls_code mls_local_run(mls_local *g, const mls_local_flow *flow,
                       const mls_local_call *call, mls_status *st)
{
    mls_local_clock clock;
    const mls_code code = mls_local_begin(g, flow, call, &clock, st);
    return code == MLS_OK ? mls_local_continue(g, flow, &clock, st) : code;
}

/* ---- arrays of other threads, by their addresses ---- */

bool mls_local_is_direct(const mls_local *g, size_t bytes)
{
    enum { LEAST = 256 << 10 }; /* smaller ones are sent sooner than waited for */
    return g->fd < 0 && g->shape.world > 1 && bytes >= LEAST;
}

/* A rank that breaks the group reads `direct` afterwards, and one that copies reads
 * `broken` afterwards: one of them sees the other. */
bool mls_local_begin_direct(mls_local *g)
{
    atomic_store(&mls_local_area_of(g, g->rank)->direct, 1);
    if (atomic_load(&mls_local_header_of(g)->broken) != 0) {
        mls_local_end_direct(g);
        return false;
    }
    return true;
}

void mls_local_end_direct(mls_local *g)
{
    atomic_store(&mls_local_area_of(g, g->rank)->direct, 0);
}

/* Wait until no thread accesses an array of this rank, whose operation failed.  The group
 * is broken, so none begins to; one that does waits for no rank, and ends soon. */
static void await_direct(const mls_local *g)
{
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        while (rank != g->rank && atomic_load(&mls_local_area_of(g, rank)->direct) != 0) {
            sched_yield();
        }
    }
}

/* The last wait is for the others to finish with this rank's arrays. */
mls_code mls_local_run_direct(mls_local *g, const mls_local_flow *flow,
                              const mls_local_call *call, mls_status *st)
{
    mls_local_clock clock;
    mls_code code = mls_local_begin(g, flow, call, &clock, st);
    if (code == MLS_OK) {
        code = wait_for(g, &clock, flow->kind, (wish){.settles = true}, st);
    }
    if (code != MLS_OK) {
        await_direct(g);
    }
    return code;
}

#else
/* Neither futexes nor record locks: see file.h. */
typedef int mls_local_wait_unused;
#endif
