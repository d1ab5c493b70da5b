/* local: the memory of a group, who is in it, and who is to blame.
 *
 * The memory begins with a page of words about the group; then each rank has an area for
 * its counters and notes, and then each has its ring of slots.  Processes that join at
 * the same moment need no first one: the shape is one word, which whoever comes first
 * sets.
 *
 * A process holds a record lock on its own byte of the file.  The system gives it up when
 * the process ends in whatever way, a zombie's too, and a forked child does not have it:
 * who asks for it learns whether that rank lives.
 */
#if !defined(_WIN32)

#    include "collectives/shm_protocol.h"

#    include "base/memory.h"
#    include "base/size.h"

#    include <errno.h>
#    include <stdio.h>
#    include <string.h>
#    include <sys/mman.h>
#    include <sys/stat.h>
#    include <unistd.h>

#    if defined(__linux__)
#        include <linux/futex.h>
#        include <sys/syscall.h>
#    endif

enum { VERSION = 3, SLOT_BYTES = 256 * 1024, DEPTH = 4, SPIN_NANOSECONDS = 40 * 1000 };

/* A slot is divided among all peers, and each piece must hold a block of the widest
 * elements. */
static const size_t piece_least = (size_t)MLS_TALLY_BLOCK * 8;

/* In the order of the kinds. */
const char *mls_local_kind_name(mls_local_kind kind)
{
    static const char *const names[MLS_LOCAL_KIND_COUNT] = {
        [MLS_LOCAL_NONE] = "no operation",
        [MLS_LOCAL_BARRIER] = "barrier",
        [MLS_LOCAL_BROADCAST] = "broadcast",
        [MLS_LOCAL_ALL_GATHER] = "all_gather",
        [MLS_LOCAL_ALL_TO_ALL] = "all_to_all",
        [MLS_LOCAL_ALL_REDUCE] = "all_reduce",
        [MLS_LOCAL_REDUCE_SCATTER] = "reduce_scatter",
        [MLS_LOCAL_GATHER_BYTES] = "gather_bytes",
    };
    return (unsigned)kind < MLS_LOCAL_KIND_COUNT ? names[kind] : "?";
}

/* ---- how memory is divided ---- */

/* Ranks that get a piece of each slot; a rank that is alone has one piece, unused. */
static size_t peers_of(size_t world)
{
    return world > 1 ? world - 1 : 1;
}

/* Bytes of a rank's area, in whole pages. */
static size_t area_bytes(void)
{
    return (sizeof(mls_local_area) + MLS_LOCAL_PAGE - 1) / MLS_LOCAL_PAGE *
           MLS_LOCAL_PAGE;
}

/* Slots of whole pages, so that pieces lie well. */
static void fill_in(mls_local_shape *shape)
{
    const size_t least = peers_of(shape->world) * piece_least;
    if (shape->slot_bytes == 0) {
        shape->slot_bytes = SLOT_BYTES;
    }
    if (shape->slot_bytes < least) {
        shape->slot_bytes = least;
    }
    shape->slot_bytes =
        (shape->slot_bytes + MLS_LOCAL_PAGE - 1) / MLS_LOCAL_PAGE * MLS_LOCAL_PAGE;
    if (shape->depth == 0) {
        shape->depth = DEPTH;
    }
}

/* Slots above a gigabyte help nobody, and a limit keeps the products small. */
mls_code mls_local_measure(mls_local_shape *shape, size_t *bytes, mls_status *st)
{
    enum { SLOT_MOST = 1 << 30 };
    mls_local_shape full = *shape;
    size_t ring, all;
    if (full.world < 1 || full.world > MLS_LOCAL_MAX_RANKS) {
        return mls_fail(st, MLS_E_VALUE, "%zu ranks: a group on one host has 1 to %d",
                        full.world, (int)MLS_LOCAL_MAX_RANKS);
    }
    if (full.slot_bytes > SLOT_MOST) {
        return mls_fail(st, MLS_E_VALUE, "slots of %zu bytes: choose at most %d",
                        full.slot_bytes, (int)SLOT_MOST);
    }
    fill_in(&full);
    if (full.depth < 2 || full.depth > MLS_LOCAL_MAX_DEPTH) {
        return mls_fail(st, MLS_E_VALUE, "%zu slots for each rank: choose 2 to %d",
                        full.depth, (int)MLS_LOCAL_MAX_DEPTH);
    }
    if (!mls_size_mul(full.slot_bytes, full.depth, &ring) ||
        !mls_size_add(ring, area_bytes(), &ring) ||
        !mls_size_mul(ring, full.world, &all) ||
        !mls_size_add(all, MLS_LOCAL_PAGE, &all)) {
        return mls_fail(st, MLS_E_VALUE, "a group of %zu ranks does not fit memory",
                        full.world);
    }
    *shape = full;
    *bytes = all;
    return MLS_OK;
}

/* A shape as the word that ranks compare, never 0. */
static uint64_t shape_word(const mls_local_shape *shape)
{
    return (uint64_t)VERSION << 56 | (uint64_t)shape->world << 48 |
           (uint64_t)shape->depth << 40 | (uint64_t)shape->slot_bytes;
}

/* The memory's first page. */
mls_local_header *mls_local_header_of(const mls_local *g)
{
    return (mls_local_header *)(void *)g->memory->data;
}

/* Areas follow the header. */
mls_local_area *mls_local_area_of(const mls_local *g, size_t rank)
{
    unsigned char *start = g->memory->data + MLS_LOCAL_PAGE;
    return (mls_local_area *)(void *)(start + rank * area_bytes());
}

/* Rings follow the areas. */
unsigned char *mls_local_slot(const mls_local *g, size_t rank, uint64_t step)
{
    const size_t number = rank * g->shape.depth + (size_t)(step % g->shape.depth);
    unsigned char *rings =
        g->memory->data + MLS_LOCAL_PAGE + g->shape.world * area_bytes();
    return rings + number * g->shape.slot_bytes;
}

/* ---- blame ---- */

/* One word, never 0 where something is wrong. */
static uint64_t pack(mls_local_blame blame)
{
    return (uint64_t)blame.why | (uint64_t)blame.kind << 8 |
           (uint64_t)blame.reporter << 16 | (uint64_t)blame.culprit << 32;
}

/* The other way. */
static mls_local_blame unpack(uint64_t word)
{
    return (mls_local_blame){.why = (mls_local_why)(word & 0xFF),
                             .kind = (mls_local_kind)(word >> 8 & 0xFF),
                             .reporter = (size_t)(word >> 16 & 0xFFFF),
                             .culprit = (size_t)(word >> 32 & 0xFFFF)};
}

/* Wake a rank that sleeps on its bell (shm_sync.c). */
static void wake(_Atomic(uint32_t) *bell)
{
    atomic_fetch_add(bell, 1);
#    if defined(__linux__)
    (void)syscall(SYS_futex, bell, FUTEX_WAKE, 1, NULL, NULL, 0);
#    endif
}

/* One who took the word "sleeping" back is not rung for twice. */
void mls_local_ring(const mls_local *g)
{
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        mls_local_area *area = mls_local_area_of(g, rank);
        if (rank != g->rank && atomic_load(&area->sleeping) != 0 &&
            atomic_exchange(&area->sleeping, 0) != 0) {
            wake(&area->bell);
        }
    }
}

/* The first one is believed: what follows is mostly its consequence. */
void mls_local_break(mls_local *g, mls_local_blame blame)
{
    uint64_t none = 0;
    atomic_compare_exchange_strong(&mls_local_header_of(g)->broken, &none, pack(blame));
    mls_local_ring(g);
}

/* What happened, told by a rank that is not to blame, or is. */
static void tell(const mls_local *g, mls_local_blame b, char *text, size_t room)
{
    const char *kind = mls_local_kind_name(b.kind);
    const mls_local_area *area = mls_local_area_of(g, b.culprit);
    switch (b.why) {
    case MLS_LOCAL_TIMEOUT:
        snprintf(text, room, "rank %zu gave up waiting for rank %zu in %s", b.reporter,
                 b.culprit, kind);
        break;
    case MLS_LOCAL_DIED:
        snprintf(text, room, "rank %zu is gone: its process, %lld, has ended", b.culprit,
                 (long long)atomic_load(&area->process));
        break;
    case MLS_LOCAL_LEFT:
        snprintf(text, room, "rank %zu closed the group, and rank %zu needed it for %s",
                 b.culprit, b.reporter, kind);
        break;
    case MLS_LOCAL_ABORTED:
        snprintf(text, room, "rank %zu aborted the group", b.culprit);
        break;
    case MLS_LOCAL_INTERRUPTED:
        snprintf(text, room, "rank %zu was interrupted in %s", b.culprit, kind);
        break;
    case MLS_LOCAL_WORKS:
    case MLS_LOCAL_FAILED:
        snprintf(text, room, "%s failed on rank %zu", kind, b.culprit);
        break;
    }
}

/* `more` is what this rank alone knows, such as how long it waited. */
mls_code mls_local_blamed(mls_local *g, mls_local_kind kind, const char *more,
                          mls_status *st)
{
    const mls_local_blame blame = unpack(atomic_load(&mls_local_header_of(g)->broken));
    char text[MLS_TEXT_BYTES];
    tell(g, blame, text, sizeof text);
    mls_fail(st, MLS_E_PEER, "%s on rank %zu: %s; the group is of no use any more",
             mls_local_kind_name(kind), g->rank, more[0] != '\0' ? more : text);
    mls_status_name(st, mls_local_kind_name(kind), strlen(mls_local_kind_name(kind)));
    return MLS_E_PEER;
}

/* Others' wishes are theirs to tell: this rank's own state is not looked at. */
bool mls_local_ended(mls_local *g, char *text, size_t room)
{
    const uint64_t word = atomic_load(&mls_local_header_of(g)->broken);
    if (word != 0 && text != NULL) {
        tell(g, unpack(word), text, room);
    }
    return word != 0;
}

/* This rank is the culprit and the reporter.  A forked child has no say. */
void mls_local_abort(mls_local *g)
{
    if (g->process != getpid()) {
        return;
    }
    mls_local_break(g, (mls_local_blame){.why = MLS_LOCAL_ABORTED,
                                         .reporter = g->rank,
                                         .culprit = g->rank});
}

/* ---- joining and leaving ---- */

/* Map a file, or for -1 memory of this process.  NULL with `st` filled. */
static mls_local_memory *map(int fd, size_t bytes, mls_status *st)
{
    mls_local_memory *memory = mls_alloc(1, sizeof *memory);
    if (memory == NULL) {
        mls_fail(st, MLS_E_MEMORY, "no memory for a group");
        return NULL;
    }
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (data == MAP_FAILED) {
        mls_fail_os(st, errno, "%zu bytes of memory for a group cannot be mapped", bytes);
        mls_free(memory);
        return NULL;
    }
    memory->data = data;
    memory->bytes = bytes;
    atomic_store(&memory->users, 1);
    return memory;
}

/* The last user unmaps. */
static void unmap(mls_local_memory *memory)
{
    if (memory != NULL && atomic_fetch_sub(&memory->users, 1) == 1) {
        munmap(memory->data, memory->bytes);
        mls_free(memory);
    }
}

/* A rank with all that needs no memory of the group. */
static mls_local *make(const mls_local_shape *shape, size_t rank,
                       const mls_kernels *kernels)
{
    mls_local *g = mls_alloc(1, sizeof *g);
    if (g == NULL) {
        return NULL;
    }
    g->shape = *shape;
    g->rank = rank;
    g->fd = -1;
    g->kernels = kernels;
    g->process = getpid();
    g->spins = mls_cpu_count() < shape->world ? 0 : SPIN_NANOSECONDS;
    g->piece_bytes =
        shape->slot_bytes / peers_of(shape->world) / MLS_LOCAL_LINE * MLS_LOCAL_LINE;
    return g;
}

/* Agree on the shape, and take the place of `rank`. */
static mls_code enter(mls_local *g, mls_status *st)
{
    uint64_t found = 0;
    const uint64_t word = shape_word(&g->shape);
    if (!atomic_compare_exchange_strong(&mls_local_header_of(g)->shape, &found, word) &&
        found != word) {
        return mls_fail(st, MLS_E_VALUE,
                        "the memory is of a group of another shape or version");
    }
    mls_local_area *area = mls_local_area_of(g, g->rank);
    uint32_t absent = MLS_LOCAL_ABSENT;
    if (!atomic_compare_exchange_strong(&area->state, &absent, MLS_LOCAL_JOINED)) {
        return mls_fail(st, MLS_E_VALUE, "rank %zu is taken", g->rank);
    }
    atomic_store(&area->process, (int64_t)g->process);
    return MLS_OK;
}

/* Check the file's size, which the map relies on, and lock this rank's byte. */
static mls_code hold_file(int fd, size_t rank, size_t bytes, mls_status *st)
{
    struct stat about;
    struct flock lock = mls_local_lock_on(rank);
    if (fstat(fd, &about) < 0) {
        return mls_fail_os(st, errno, "the memory of a group");
    }
    if (about.st_size < 0 || (uint64_t)about.st_size < bytes) {
        return mls_fail(st, MLS_E_VALUE, "the memory of a group has %lld bytes, not %zu",
                        (long long)about.st_size, bytes);
    }
    if (fcntl(fd, F_SETLK, &lock) < 0) {
        return errno == EAGAIN || errno == EACCES
                   ? mls_fail(st, MLS_E_VALUE, "rank %zu is taken", rank)
                   : mls_fail_os(st, errno, "the lock of rank %zu", rank);
    }
    return MLS_OK;
}

/* Descriptor first, since it is ours whatever happens. */
mls_code mls_local_join(const mls_local_shape *shape, size_t rank, int fd,
                        const mls_kernels *kernels, mls_local **out, mls_status *st)
{
    mls_local_shape full = *shape;
    mls_local *g = NULL;
    size_t bytes;
    mls_code code = mls_local_measure(&full, &bytes, st);
    if (code == MLS_OK && rank >= full.world) {
        code = mls_fail(st, MLS_E_VALUE, "rank %zu of %zu ranks", rank, full.world);
    }
    if (code != MLS_OK || (code = hold_file(fd, rank, bytes, st)) != MLS_OK) {
        goto done;
    }
    g = make(&full, rank, kernels);
    if (g == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for a group");
        goto done;
    }
    g->memory = map(fd, bytes, st);
    code = g->memory == NULL ? st->code : enter(g, st);
done:
    if (code != MLS_OK) {
        unmap(g == NULL ? NULL : g->memory);
        mls_free(g);
        close(fd);
        return code;
    }
    g->fd = fd;
    *out = g;
    return MLS_OK;
}

/* The first rank maps, the others share what it mapped. */
mls_code mls_local_threads(const mls_local_shape *shape, const mls_kernels *kernels,
                           mls_local **out, mls_status *st)
{
    mls_local_shape full = *shape;
    mls_local *made[MLS_LOCAL_MAX_RANKS] = {NULL};
    size_t bytes;
    const mls_code code = mls_local_measure(&full, &bytes, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_local_memory *memory = map(-1, bytes, st);
    if (memory == NULL) {
        return st->code;
    }
    for (size_t rank = 0; rank < full.world; rank++) {
        made[rank] = make(&full, rank, kernels);
        if (made[rank] == NULL) {
            while (rank > 0) {
                mls_free(made[--rank]);
            }
            unmap(memory);
            return mls_fail(st, MLS_E_MEMORY, "no memory for a group");
        }
        made[rank]->memory = memory;
        (void)enter(made[rank], st); /* new memory refuses nobody */
    }
    atomic_store(&memory->users, full.world);
    memcpy(out, made, full.world * sizeof(mls_local *));
    return MLS_OK;
}

/* A forked child holds neither the lock nor the place: both are its parent's. */
void mls_local_free(mls_local *g)
{
    if (g == NULL) {
        return;
    }
    if (g->process == getpid()) {
        atomic_store(&mls_local_area_of(g, g->rank)->state, MLS_LOCAL_CLOSED);
        mls_local_ring(g);
    }
    const int fd = g->fd;
    unmap(g->memory);
    mls_free(g);
    if (fd >= 0) {
        close(fd);
    }
}

#else
/* Neither files of POSIX nor its locks: see file.h. */
typedef int mls_local_unused;
#endif
