/* shm_group: creates, joins, leaves and aborts a group in shared memory; its slots and
 * spin time; words why it broke.
 *
 * The memory begins with a page that holds the header. Then each rank has an area with
 * its counters and records, and then each has its ring of slots. Processes that join at
 * the same moment need no leader: the shape is one word, which the first one sets.
 *
 * Each process holds a record lock on its own byte of the file. The system releases the
 * lock however the process ends, even if it stays a zombie, and a forked child does not
 * inherit it. Another rank tests the lock to learn whether the process is alive.
 */
#include "collectives/shm_protocol.h"

#include "base/memory.h"
#include "base/size.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__)
#    include <linux/futex.h>
#    include <sys/syscall.h>
#endif

enum { VERSION = 3, SLOT_BYTES = 256 * 1024, DEPTH = 4, SPIN_NANOSECONDS = 40 * 1000 };

/* A slot is divided among all peers, and the range of each must hold a block of the
 * widest elements. */
static const size_t least_piece_bytes = (size_t)MLS_NORM_BLOCK * 8;

/* Return a constant string; "?" for a `kind` that is not an operation, since it may come
 * from another process. */
const char *mls_shm_kind_name(mls_shm_kind kind)
{
    static const char *const names[MLS_SHM_KIND_COUNT] = {
        [MLS_SHM_NONE] = "no operation",
        [MLS_SHM_BARRIER] = "barrier",
        [MLS_SHM_BROADCAST] = "broadcast",
        [MLS_SHM_ALL_GATHER] = "all_gather",
        [MLS_SHM_ALL_TO_ALL] = "all_to_all",
        [MLS_SHM_ALL_REDUCE] = "all_reduce",
        [MLS_SHM_REDUCE_SCATTER] = "reduce_scatter",
        [MLS_SHM_GATHER_BYTES] = "gather_bytes",
    };
    return (unsigned)kind < MLS_SHM_KIND_COUNT ? names[kind] : "?";
}

/* ---- how memory is divided ---- */

/* Return the number of ranges in each slot: one for each peer. A single rank has one,
 * unused. */
static size_t peers_of(size_t world)
{
    return world > 1 ? world - 1 : 1;
}

/* Return the bytes of a rank's area, in whole pages. */
static size_t area_bytes(void)
{
    return (sizeof(mls_shm_area) + MLS_SHM_PAGE - 1) / MLS_SHM_PAGE * MLS_SHM_PAGE;
}

/* Complete a shape: replace `slot_bytes` and `depth` by defaults if they are 0, and round
 * `slot_bytes` up, to the least range for each peer and to whole pages, so that ranges
 * are aligned. */
static void fill_defaults(mls_shm_shape *shape)
{
    const size_t least = peers_of(shape->world) * least_piece_bytes;
    if (shape->slot_bytes == 0) {
        shape->slot_bytes = SLOT_BYTES;
    }
    if (shape->slot_bytes < least) {
        shape->slot_bytes = least;
    }
    shape->slot_bytes =
        (shape->slot_bytes + MLS_SHM_PAGE - 1) / MLS_SHM_PAGE * MLS_SHM_PAGE;
    if (shape->depth == 0) {
        shape->depth = DEPTH;
    }
}

/* Work on a copy of the shape, so that a failure changes nothing. Slots above 1 GiB gain
 * nothing, and the limit keeps the products from overflowing. */
mls_code mls_shm_measure(mls_shm_shape *shape, size_t *bytes, mls_status *st)
{
    enum { SLOT_MOST = 1 << 30 };
    mls_shm_shape full = *shape;
    size_t ring, all;
    if (full.world < 1 || full.world > MLS_SHM_MAX_RANKS) {
        return mls_fail(st, MLS_E_VALUE, "%zu ranks: a group on one host has 1 to %d",
                        full.world, (int)MLS_SHM_MAX_RANKS);
    }
    if (full.slot_bytes > SLOT_MOST) {
        return mls_fail(st, MLS_E_VALUE, "slots of %zu bytes: choose at most %d",
                        full.slot_bytes, (int)SLOT_MOST);
    }
    fill_defaults(&full);
    if (full.depth < 2 || full.depth > MLS_SHM_MAX_DEPTH) {
        return mls_fail(st, MLS_E_VALUE, "%zu slots for each rank: choose 2 to %d",
                        full.depth, (int)MLS_SHM_MAX_DEPTH);
    }
    if (!mls_size_mul(full.slot_bytes, full.depth, &ring) ||
        !mls_size_add(ring, area_bytes(), &ring) ||
        !mls_size_mul(ring, full.world, &all) || !mls_size_add(all, MLS_SHM_PAGE, &all)) {
        return mls_fail(st, MLS_E_VALUE, "a group of %zu ranks does not fit memory",
                        full.world);
    }
    *shape = full;
    *bytes = all;
    return MLS_OK;
}

/* Return the shape as one word, never 0, which ranks compare. */
static uint64_t shape_word(const mls_shm_shape *shape)
{
    return (uint64_t)VERSION << 56 | (uint64_t)shape->world << 48 |
           (uint64_t)shape->depth << 40 | (uint64_t)shape->slot_bytes;
}

mls_shm_header *mls_shm_header_of(const mls_shm *g)
{
    return (mls_shm_header *)(void *)g->memory->data;
}

mls_shm_area *mls_shm_area_of(const mls_shm *g, size_t rank)
{
    unsigned char *start = g->memory->data + MLS_SHM_PAGE;
    return (mls_shm_area *)(void *)(start + rank * area_bytes());
}

/* Return the slot in the ring of `rank` for step number `step`: the rings follow the
 * areas of all ranks. */
unsigned char *mls_shm_slot(const mls_shm *g, size_t rank, uint64_t step)
{
    const size_t number = rank * g->shape.depth + (size_t)(step % g->shape.depth);
    unsigned char *rings = g->memory->data + MLS_SHM_PAGE + g->shape.world * area_bytes();
    return rings + number * g->shape.slot_bytes;
}

/* ---- why the group broke ---- */

/* Return a blame as one word, never 0, since `why` is not MLS_SHM_WORKS in a broken
 * group. */
static uint64_t pack_blame(mls_shm_blame blame)
{
    return (uint64_t)blame.why | (uint64_t)blame.kind << 8 |
           (uint64_t)blame.reporter << 16 | (uint64_t)blame.culprit << 32;
}

/* Return the blame that pack_blame packed. */
static mls_shm_blame unpack_blame(uint64_t word)
{
    return (mls_shm_blame){.why = (mls_shm_why)(word & 0xFF),
                           .kind = (mls_shm_kind)(word >> 8 & 0xFF),
                           .reporter = (size_t)(word >> 16 & 0xFFFF),
                           .culprit = (size_t)(word >> 32 & 0xFFFF)};
}

/* Ring a rank's bell: change its value, and wake the rank if it sleeps. */
static void wake_rank(_Atomic(uint32_t) *bell)
{
    atomic_fetch_add(bell, 1);
#if defined(__linux__)
    (void)syscall(SYS_futex, bell, FUTEX_WAKE, 1, NULL, NULL, 0);
#endif
}

/* Wake every other rank that sleeps on its bell. The exchange avoids a second wake-up of
 * a rank whose `sleeping` was already cleared. */
void mls_shm_wake(const mls_shm *g)
{
    for (size_t rank = 0; rank < g->shape.world; rank++) {
        mls_shm_area *area = mls_shm_area_of(g, rank);
        if (rank != g->rank && atomic_load(&area->sleeping) != 0 &&
            atomic_exchange(&area->sleeping, 0) != 0) {
            wake_rank(&area->bell);
        }
    }
}

/* Record the reason, unless there is one: later reasons are mostly consequences of the
 * first. */
void mls_shm_mark_broken(mls_shm *g, mls_shm_blame blame)
{
    uint64_t none = 0;
    atomic_compare_exchange_strong(&mls_shm_header_of(g)->broken, &none,
                                   pack_blame(blame));
    mls_shm_wake(g);
}

/* Write to `text` (`room` bytes) why the group is broken, from `b`, in words that suit
 * any rank. */
static void describe_blame(const mls_shm *g, mls_shm_blame b, char *text, size_t room)
{
    const char *kind = mls_shm_kind_name(b.kind);
    const mls_shm_area *area = mls_shm_area_of(g, b.culprit);
    switch (b.why) {
    case MLS_SHM_TIMEOUT:
        snprintf(text, room, "rank %zu gave up waiting for rank %zu in %s", b.reporter,
                 b.culprit, kind);
        break;
    case MLS_SHM_DIED:
        snprintf(text, room, "rank %zu is gone: its process, %lld, has ended", b.culprit,
                 (long long)atomic_load(&area->process));
        break;
    case MLS_SHM_LEFT:
        snprintf(text, room, "rank %zu closed the group, and rank %zu needed it for %s",
                 b.culprit, b.reporter, kind);
        break;
    case MLS_SHM_ABORTED:
        snprintf(text, room, "rank %zu aborted the group", b.culprit);
        break;
    case MLS_SHM_INTERRUPTED:
        snprintf(text, room, "rank %zu was interrupted in %s", b.culprit, kind);
        break;
    case MLS_SHM_WORKS:
    case MLS_SHM_FAILED:
        snprintf(text, room, "%s failed on rank %zu", kind, b.culprit);
        break;
    }
}

/* Fail the operation `kind` because the group is broken. `local_reason` replaces the
 * common reason unless it is "". */
mls_code mls_shm_fail_broken(mls_shm *g, mls_shm_kind kind, const char *local_reason,
                             mls_status *st)
{
    const mls_shm_blame blame = unpack_blame(atomic_load(&mls_shm_header_of(g)->broken));
    char text[MLS_TEXT_BYTES];
    describe_blame(g, blame, text, sizeof text);
    mls_fail(
        st, MLS_E_PEER, "%s on rank %zu: %s; the group is unusable: create a new one",
        mls_shm_kind_name(kind), g->rank, local_reason[0] != '\0' ? local_reason : text);
    return mls_status_name(st, mls_shm_kind_name(kind), strlen(mls_shm_kind_name(kind)));
}

/* Return whether the group is broken; then `text`, unless NULL, receives the reason. */
bool mls_shm_is_broken(mls_shm *g, char *text, size_t room)
{
    const uint64_t word = atomic_load(&mls_shm_header_of(g)->broken);
    if (word != 0 && text != NULL) {
        describe_blame(g, unpack_blame(word), text, room);
    }
    return word != 0;
}

/* Break the group on behalf of this rank, which is both culprit and reporter. A forked
 * child is not a member and cannot abort. */
void mls_shm_abort(mls_shm *g)
{
    if (g->process != getpid()) {
        return;
    }
    mls_shm_mark_broken(
        g,
        (mls_shm_blame){.why = MLS_SHM_ABORTED, .reporter = g->rank, .culprit = g->rank});
}

/* ---- joining and leaving ---- */

/* Map `bytes` bytes of a file, or of new memory of this process if `fd` is -1. Returns an
 * object with one user, or NULL with `st` filled (MLS_E_MEMORY, MLS_E_IO). */
static mls_shm_memory *map_memory(int fd, size_t bytes, mls_status *st)
{
    mls_shm_memory *memory = mls_alloc(1, sizeof *memory);
    if (memory == NULL) {
        mls_fail(st, MLS_E_MEMORY, "no memory for a group");
        return NULL;
    }
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (data == MAP_FAILED) {
        mls_fail_os(st, errno, "%zu bytes of shared memory for a group cannot be mapped",
                    bytes);
        mls_free(memory);
        return NULL;
    }
    memory->data = data;
    memory->bytes = bytes;
    atomic_store(&memory->users, 1);
    return memory;
}

/* Drop one user of the memory (may be NULL); the last user unmaps it. */
static void release_memory(mls_shm_memory *memory)
{
    if (memory != NULL && atomic_fetch_sub(&memory->users, 1) == 1) {
        munmap(memory->data, memory->bytes);
        mls_free(memory);
    }
}

/* Create a handle of rank `rank`, which has no memory of the group yet. Returns NULL if
 * memory runs out. */
static mls_shm *create_handle(const mls_shm_shape *shape, size_t rank,
                              const mls_kernels *kernels)
{
    mls_shm *g = mls_alloc(1, sizeof *g);
    if (g == NULL) {
        return NULL;
    }
    g->shape = *shape;
    g->rank = rank;
    g->fd = -1;
    g->kernels = kernels;
    g->process = getpid();
    /* with fewer processors than ranks, spinning would delay the rank that is waited
     * for */
    g->spin_nanoseconds = mls_cpu_count() < shape->world ? 0 : SPIN_NANOSECONDS;
    g->piece_bytes =
        shape->slot_bytes / peers_of(shape->world) / MLS_SHM_LINE * MLS_SHM_LINE;
    return g;
}

/* Register this process as rank `g->rank` in the shared memory. The first rank to join
 * records the shape; all others must have the same. MLS_E_VALUE: the shape differs, or
 * the rank is taken. */
static mls_code claim_rank(mls_shm *g, mls_status *st)
{
    uint64_t stored_shape = 0;
    const uint64_t word = shape_word(&g->shape);
    if (!atomic_compare_exchange_strong(&mls_shm_header_of(g)->shape, &stored_shape,
                                        word) &&
        stored_shape != word) {
        return mls_fail(st, MLS_E_VALUE,
                        "the memory is of a group of another shape or version");
    }
    mls_shm_area *area = mls_shm_area_of(g, g->rank);
    uint32_t absent = MLS_SHM_ABSENT;
    if (!atomic_compare_exchange_strong(&area->state, &absent, MLS_SHM_JOINED)) {
        return mls_fail(st, MLS_E_VALUE, "rank %zu is taken", g->rank);
    }
    atomic_store(&area->process, (int64_t)g->process);
    return MLS_OK;
}

/* Check that the file has at least `bytes` bytes, and lock byte `rank` of it without
 * waiting. The lock shows other ranks that this process lives. MLS_E_VALUE: the file is
 * too short, or the rank is taken; MLS_E_IO. */
static mls_code lock_rank_byte(int fd, size_t rank, size_t bytes, mls_status *st)
{
    struct stat about;
    struct flock lock = mls_shm_lock_on(rank);
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

/* Lock the rank's byte, map the file and claim the rank. `fd` is owned from the start, so
 * every failure closes it, which also releases the lock. */
mls_code mls_shm_join(const mls_shm_shape *shape, size_t rank, int fd,
                      const mls_kernels *kernels, mls_shm **out, mls_status *st)
{
    mls_shm_shape full = *shape;
    mls_shm *g = NULL;
    size_t bytes;
    mls_code code = mls_shm_measure(&full, &bytes, st);
    if (code == MLS_OK && rank >= full.world) {
        code = mls_fail(st, MLS_E_VALUE, "rank %zu of %zu ranks", rank, full.world);
    }
    if (code != MLS_OK || (code = lock_rank_byte(fd, rank, bytes, st)) != MLS_OK) {
        goto done;
    }
    g = create_handle(&full, rank, kernels);
    if (g == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for a group");
        goto done;
    }
    g->memory = map_memory(fd, bytes, st);
    code = g->memory == NULL ? st->code : claim_rank(g, st);
done:
    if (code != MLS_OK) {
        release_memory(g == NULL ? NULL : g->memory);
        mls_free(g);
        close(fd);
        return code;
    }
    g->fd = fd;
    *out = g;
    return MLS_OK;
}

/* Create one mapping and `shape->world` handles that share it. On failure everything made
 * so far is freed. */
mls_code mls_shm_threads(const mls_shm_shape *shape, const mls_kernels *kernels,
                         mls_shm **out, mls_status *st)
{
    mls_shm_shape full = *shape;
    mls_shm *handles[MLS_SHM_MAX_RANKS] = {NULL};
    size_t bytes;
    const mls_code code = mls_shm_measure(&full, &bytes, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_shm_memory *memory = map_memory(-1, bytes, st);
    if (memory == NULL) {
        return st->code;
    }
    for (size_t rank = 0; rank < full.world; rank++) {
        handles[rank] = create_handle(&full, rank, kernels);
        if (handles[rank] == NULL) {
            while (rank > 0) {
                mls_free(handles[--rank]);
            }
            release_memory(memory);
            return mls_fail(st, MLS_E_MEMORY, "no memory for a group");
        }
        handles[rank]->memory = memory;
        (void)claim_rank(handles[rank], st); /* cannot fail: the memory is new */
    }
    atomic_store(&memory->users, full.world);
    memcpy(out, handles, full.world * sizeof(mls_shm *));
    return MLS_OK;
}

/* Leave the group and free the handle. A forked child owns neither the lock nor the rank:
 * both stay the parent's. */
void mls_shm_free(mls_shm *g)
{
    if (g == NULL) {
        return;
    }
    if (g->process == getpid()) {
        atomic_store(&mls_shm_area_of(g, g->rank)->state, MLS_SHM_CLOSED);
        mls_shm_wake(g);
    }
    const int fd = g->fd;
    release_memory(g->memory);
    mls_free(g);
    if (fd >= 0) {
        close(fd);
    }
}
