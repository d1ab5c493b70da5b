/* local_shared: blocks of the group's file, taken, given back, and found again.
 *
 * An array may be let go by any thread, so blocks have a lock.  Pages are reserved when a
 * block is taken: where memory is short that is an error then, and no signal later, when
 * the array is written to.  A forked child has its parent's blocks in its memory, and
 * leaves them as they are.
 */
#if !defined(_WIN32)

#    include "local_shared.h"

#    include "mem.h"
#    include "size.h"

#    include <errno.h>
#    include <fcntl.h>
#    include <pthread.h>
#    include <string.h>
#    include <sys/mman.h>
#    include <sys/stat.h>
#    include <unistd.h>

/* A block, whether an array is in it or not.  Its address and its offset are the same as
 * long as there is one: other ranks have mapped it. */
typedef struct block {
    unsigned char *data;
    size_t bytes;
    uint64_t start; /* offset into the file; 0 for ordinary memory */
    bool used;
} block;

/* Who lives longest, the group or the last array in a block, frees it all.  The list only
 * grows: a block that is given back stays mapped, and waits. */
struct mls_local_blocks {
    pthread_mutex_t lock;
    pid_t process;
    int fd;              /* borrowed; -1 for ordinary memory */
    bool grouped;        /* whether the group is there still */
    size_t arrays;       /* that are in blocks now */
    uint64_t start, end; /* offsets that are free */
    block *list;
    size_t count, room; /* used and free or not; places in the list */
    size_t next;        /* the block that is likely to be asked for */
};

/* ---- offsets ---- */

/* Each rank has a terabyte of offsets, which cost nothing as long as nothing is there.
 * The first two are for the slots: more they cannot be. */
enum { SPAN_BITS = 40 };

/* Where a rank's offsets begin. */
static uint64_t offsets_of(size_t rank)
{
    return (uint64_t)(rank + 2) << SPAN_BITS;
}

/* Room for one more of `item` bytes each; NULL: no memory, and nothing was changed. */
static void *with_room(void *list, size_t count, size_t *room, size_t item)
{
    if (count < *room) {
        return list;
    }
    const size_t more = *room == 0 ? 8 : 2 * *room;
    void *moved = mls_realloc(list, more, item);
    if (moved != NULL) {
        *room = more;
    }
    return moved;
}

/* ---- a rank's own blocks ---- */

/* Nothing is mapped before somebody asks for memory. */
mls_local_blocks *mls_local_blocks_new(size_t rank, int fd)
{
    mls_local_blocks *b = mls_alloc(1, sizeof *b);
    if (b != NULL) {
        pthread_mutex_init(&b->lock, NULL);
        b->process = getpid();
        b->fd = fd;
        b->grouped = true;
        b->start = offsets_of(rank);
        b->end = offsets_of(rank + 1);
    }
    return b;
}

/* When neither the group nor an array is left.  A forked child unmaps what is its own. */
static void unmap_all(mls_local_blocks *b)
{
    for (size_t i = 0; i < b->count; i++) {
        munmap(b->list[i].data, b->list[i].bytes);
    }
    pthread_mutex_destroy(&b->lock);
    mls_free(b->list);
    mls_free(b);
}

/* The descriptor is the group's, and is closed after this. */
void mls_local_blocks_leave(mls_local_blocks *b)
{
    if (b == NULL || b->process != getpid()) {
        return;
    }
    pthread_mutex_lock(&b->lock);
    b->grouped = false;
    b->fd = -1;
    const bool last = b->arrays == 0;
    pthread_mutex_unlock(&b->lock);
    if (last) {
        unmap_all(b);
    }
}

/* The smallest unused block that is large enough, and not twice as large as need be. */
static block *unused_block(mls_local_blocks *b, size_t bytes)
{
    block *found = NULL;
    for (size_t i = 0; i < b->count; i++) {
        block *one = &b->list[i];
        if (!one->used && one->bytes >= bytes && one->bytes / 2 <= bytes &&
            (found == NULL || one->bytes < found->bytes)) {
            found = one;
        }
    }
    return found;
}

/* Have the pages of a range of the file there, or say that they cannot be. */
static mls_code reserve(int fd, uint64_t start, size_t bytes, mls_status *st)
{
#    if defined(__linux__)
    /* the system would look for them at the cost of others' memory */
    const long pages = sysconf(_SC_PHYS_PAGES);
    int error = pages > 0 && bytes / mls_page_bytes() >= (size_t)pages ? ENOMEM : EINTR;
    while (error == EINTR) {
        error = posix_fallocate(fd, (off_t)start, (off_t)bytes);
    }
    if (error != 0) {
        /* it is a file to the system, and memory to the caller */
        (void)mls_fail_os(st, error, "no memory for %zu bytes that all ranks can read",
                          bytes);
        st->code = MLS_E_MEMORY;
        return st->code;
    }
    return MLS_OK;
#    else
    (void)fd, (void)start, (void)bytes, (void)st;
    return MLS_OK; /* not called: see shares() */
#    endif
}

/* Whether new blocks lie in the file. */
static bool shares(const mls_local_blocks *b)
{
#    if defined(__linux__)
    return b->fd >= 0 && sizeof(off_t) >= sizeof(uint64_t);
#    else
    (void)b;
    return false;
#    endif
}

/* Map a new block at the end of the list.  Offsets are not used twice, whatever fails. */
static mls_code add_block(mls_local_blocks *b, size_t bytes, mls_status *st)
{
    const bool shared = shares(b);
    block *list = with_room(b->list, b->count, &b->room, sizeof *list);
    if (list == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a block");
    }
    b->list = list;
    uint64_t start = 0;
    if (shared) {
        if (bytes > b->end - b->start) {
            return mls_fail(st, MLS_E_MEMORY, "%zu bytes are more than a rank can share",
                            bytes);
        }
        start = b->start;
        b->start += bytes;
        const mls_code code = reserve(b->fd, start, bytes, st);
        if (code != MLS_OK) {
            return code;
        }
    }
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS,
                      shared ? b->fd : -1, (off_t)start);
    if (data == MAP_FAILED) {
        return mls_fail_os(st, errno, "%zu bytes of memory cannot be mapped", bytes);
    }
    mls_advise_pages(data, bytes, true);
    b->list[b->count++] = (block){.data = data, .bytes = bytes, .start = start};
    return MLS_OK;
}

/* Whole pages, one at least, so that every array has an address. */
mls_code mls_local_blocks_take(mls_local_blocks *b, size_t bytes, void **out,
                               mls_status *st)
{
    const size_t page = mls_page_bytes();
    size_t whole;
    if (!mls_size_add(bytes == 0 ? 1 : bytes, page - 1, &whole)) {
        return mls_fail(st, MLS_E_SIZE, "%zu bytes are more than memory has", bytes);
    }
    whole -= whole % page;
    pthread_mutex_lock(&b->lock);
    block *found = unused_block(b, whole);
    mls_code code = MLS_OK;
    if (found == NULL) {
        code = add_block(b, whole, st);
        found = code == MLS_OK ? &b->list[b->count - 1] : NULL;
    } else if (found->start != 0) {
        code = reserve(b->fd, found->start, found->bytes, st);
    }
    if (code == MLS_OK) {
        found->used = true;
        b->arrays++;
        *out = found->data;
    }
    pthread_mutex_unlock(&b->lock);
    return code;
}

/* Pages that nobody needs any more are the system's; the next array finds zeros. */
static void forget_pages(const block *one)
{
#    if defined(__linux__)
    const int advice = one->start != 0 ? MADV_REMOVE : MADV_DONTNEED;
    (void)madvise(one->data, one->bytes, advice);
#    else
    (void)one;
#    endif
}

/* Called when an array ends, from any thread. */
void mls_local_give(mls_local_blocks *owner, void *data)
{
    if (owner->process != getpid()) {
        return; /* the pages are the parent's */
    }
    pthread_mutex_lock(&owner->lock);
    for (size_t i = 0; i < owner->count; i++) {
        if (owner->list[i].data == data) {
            forget_pages(&owner->list[i]);
            owner->list[i].used = false;
            owner->arrays--;
        }
    }
    const bool last = owner->arrays == 0 && !owner->grouped;
    pthread_mutex_unlock(&owner->lock);
    if (last) {
        unmap_all(owner);
    }
}

/* Arrays come in the order in which they were made, mostly, or lie in one block. */
mls_local_spot mls_local_blocks_find(mls_local_blocks *b, const void *data, size_t bytes)
{
    mls_local_spot spot = {0};
    const uintptr_t address = (uintptr_t)data;
    pthread_mutex_lock(&b->lock);
    for (size_t i = 0; i < b->count; i++) {
        const size_t at = (b->next + i) % b->count;
        const block *one = &b->list[at];
        const uintptr_t first = (uintptr_t)one->data;
        if (address >= first && address - first <= one->bytes &&
            bytes <= one->bytes - (address - first)) {
            spot = (mls_local_spot){
                .start = one->start, .bytes = one->bytes, .at = address - first};
            b->next = at;
            break;
        }
    }
    pthread_mutex_unlock(&b->lock);
    return spot;
}

/* ---- blocks of another rank ---- */

/* What a rank says is believed as far as it can do no harm: its block lies in its own
 * offsets, and in the file, which cannot shrink. */
static mls_code check_spot(int fd, size_t rank, const mls_local_spot *spot,
                           mls_status *st)
{
    struct stat about;
    const uint64_t first = offsets_of(rank), end = offsets_of(rank + 1);
    if (fstat(fd, &about) < 0) {
        return mls_fail_os(st, errno, "the memory of a group");
    }
    if (spot->start < first || spot->start >= end || spot->bytes > end - spot->start ||
        spot->bytes == 0 || spot->start % mls_page_bytes() != 0 ||
        spot->start + spot->bytes > (uint64_t)about.st_size) {
        return mls_fail(st, MLS_E_FORMAT,
                        "rank %zu tells of %llu bytes at offset %llu, which it has not",
                        rank, (unsigned long long)spot->bytes,
                        (unsigned long long)spot->start);
    }
    return MLS_OK;
}

/* Map a block that was not read before. */
static mls_code add_view(mls_local_views *v, int fd, size_t rank,
                         const mls_local_spot *spot, mls_status *st)
{
    mls_code code = check_spot(fd, rank, spot, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_local_view *list = with_room(v->list, v->count, &v->room, sizeof *list);
    if (list == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a block of rank %zu", rank);
    }
    v->list = list;
    const size_t bytes = (size_t)spot->bytes;
    void *data = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, (off_t)spot->start);
    if (data == MAP_FAILED) {
        return mls_fail_os(st, errno, "%zu bytes of rank %zu cannot be mapped", bytes,
                           rank);
    }
    mls_advise_pages(data, bytes, true);
    v->list[v->count++] =
        (mls_local_view){.start = spot->start, .bytes = bytes, .data = data};
    return MLS_OK;
}

/* The same arrays are asked for in the same order again and again. */
mls_code mls_local_views_find(mls_local_views *v, int fd, size_t rank,
                              const mls_local_spot *spot, size_t bytes,
                              const unsigned char **out, mls_status *st)
{
    size_t at = 0;
    for (size_t i = 0; i < v->count; i++) {
        at = (v->next + i) % v->count;
        if (v->list[at].start == spot->start) {
            break;
        }
        at = v->count;
    }
    if (at == v->count) {
        const mls_code code = add_view(v, fd, rank, spot, st);
        if (code != MLS_OK) {
            return code;
        }
    }
    const mls_local_view *view = &v->list[at];
    if (spot->at > view->bytes || bytes > view->bytes - spot->at) {
        return mls_fail(st, MLS_E_FORMAT,
                        "rank %zu tells of %zu bytes at offset %llu of a block of %zu",
                        rank, bytes, (unsigned long long)spot->at, view->bytes);
    }
    v->next = at;
    *out = view->data + spot->at;
    return MLS_OK;
}

/* The blocks are their rank's. */
void mls_local_views_fini(mls_local_views *v)
{
    for (size_t i = 0; i < v->count; i++) {
        munmap((void *)(uintptr_t)v->list[i].data, v->list[i].bytes);
    }
    mls_free(v->list);
    *v = (mls_local_views){0};
}

#else
/* See local.c. */
typedef int mls_local_shared_unused;
#endif
