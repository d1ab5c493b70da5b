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
    size_t there;   /* bytes of it that an array has, whose pages are there */
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

/* Have the pages of a range of the file there, or say that they cannot be.  Piece by
 * piece: some systems begin a piece anew after a signal, and would never end with all. */
static mls_code reserve(int fd, uint64_t start, size_t bytes, mls_status *st)
{
    int error = 0;
#    if defined(__linux__)
    enum { PIECE = 16 << 20 };
    const long pages = sysconf(_SC_PHYS_PAGES);
    /* the system would look for them at the cost of others' memory */
    if (pages > 0 && bytes / mls_page_bytes() >= (size_t)pages) {
        error = ENOMEM;
    }
    for (size_t at = 0; at < bytes && error == 0;) {
        const size_t step = bytes - at < PIECE ? bytes - at : PIECE;
        error = posix_fallocate(fd, (off_t)(start + at), (off_t)step);
        at += error == 0 ? step : 0;
        error = error == EINTR ? 0 : error;
    }
#    else
    (void)fd, (void)start; /* not called: see shares() */
#    endif
    if (error != 0) {
        /* it is a file to the system, and memory to the caller */
        (void)mls_fail_os(st, error, "no memory for %zu bytes that all ranks can read",
                          bytes);
        st->code = MLS_E_MEMORY;
        return st->code;
    }
    return MLS_OK;
}

/* Give the pages of a block back.  Where they are locked in memory (mlockall), advice is
 * refused, and the file is asked. */
static void forget_pages(const block *one, int fd)
{
#    if defined(__linux__)
    const int advice = one->start != 0 ? MADV_REMOVE : MADV_DONTNEED;
    if (madvise(one->data, one->bytes, advice) != 0 && one->start != 0 && fd >= 0) {
        (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)one->start,
                        (off_t)one->bytes);
    }
#    else
    (void)one, (void)fd;
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

/* Addresses and offsets for arrays of about one size, an eighth more at most: arrays that
 * grow find a place that was given back.  Only what an array needs is ever there. */
static size_t roomy(size_t bytes)
{
    size_t step = mls_page_bytes();
    while (bytes / step >= 16) {
        step *= 2;
    }
    return (bytes + step - 1) / step * step;
}

/* Map a block that is in no list yet. */
static mls_code map_block(const mls_local_blocks *b, block *one, mls_status *st)
{
    const bool shared = one->start != 0;
    void *data = mmap(NULL, one->bytes, PROT_READ | PROT_WRITE,
                      shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS,
                      shared ? b->fd : -1, (off_t)one->start);
    if (data == MAP_FAILED) {
        (void)mls_fail_os(st, errno, "%zu bytes of memory cannot be mapped", one->bytes);
        st->code = MLS_E_MEMORY;
        return st->code;
    }
    one->data = data;
    mls_advise_pages(data, one->bytes, true);
    return MLS_OK;
}

/* Take a place that was given back, or claim offsets for a new one, and count an array
 * that will be there.  Nothing slow is done under the lock: operations wait for it. */
static mls_code claim(mls_local_blocks *b, size_t bytes, block *one, bool *fresh,
                      mls_status *st)
{
    mls_code code = MLS_OK;
    pthread_mutex_lock(&b->lock);
    block *found = unused_block(b, bytes);
    *fresh = found == NULL;
    *one = (block){.bytes = roomy(bytes), .used = true};
    if (found != NULL) {
        found->used = true;
        *one = *found;
    } else if (shares(b) && one->bytes > b->end - b->start) {
        code =
            mls_fail(st, MLS_E_MEMORY, "%zu bytes are more than a rank can share", bytes);
    } else if (shares(b)) {
        one->start = b->start;
        b->start += one->bytes;
    }
    b->arrays += code == MLS_OK;
    pthread_mutex_unlock(&b->lock);
    return code;
}

/* Have the memory of a claimed block there, and a new one in the list. */
static mls_code settle_in(mls_local_blocks *b, block *one, bool fresh, size_t bytes,
                          mls_status *st)
{
    mls_code code = fresh ? map_block(b, one, st) : MLS_OK;
    if (code == MLS_OK && one->start != 0) {
        code = reserve(b->fd, one->start, bytes, st);
    }
    pthread_mutex_lock(&b->lock);
    if (code == MLS_OK && fresh) {
        block *list = with_room(b->list, b->count, &b->room, sizeof *list);
        if (list == NULL) {
            code = mls_fail(st, MLS_E_MEMORY, "no memory for a block");
        } else {
            b->list = list;
            b->list[b->count++] = *one;
        }
    }
    for (size_t i = 0; i < b->count; i++) {
        if (b->list[i].data == one->data && one->data != NULL) {
            b->list[i].used = code == MLS_OK;
            b->list[i].there = code == MLS_OK ? bytes : 0;
        }
    }
    b->arrays -= code != MLS_OK;
    pthread_mutex_unlock(&b->lock);
    return code;
}

/* Whole pages, one at least, so that every array has an address. */
mls_code mls_local_blocks_take(mls_local_blocks *b, size_t bytes, void **out,
                               mls_status *st)
{
    const size_t page = mls_page_bytes();
    block one;
    bool fresh;
    if (bytes > SIZE_MAX / 4) {
        return mls_fail(st, MLS_E_SIZE, "%zu bytes are more than memory has", bytes);
    }
    const size_t whole = (bytes == 0 ? 1 : bytes) + page - 1;
    const size_t needed = whole - whole % page;
    mls_code code = claim(b, needed, &one, &fresh, st);
    if (code != MLS_OK) {
        return code;
    }
    code = settle_in(b, &one, fresh, needed, st);
    if (code == MLS_OK) {
        *out = one.data;
        return MLS_OK;
    }
    if (one.data != NULL) {
        forget_pages(&one, b->fd); /* what was reserved so far */
    }
    if (fresh && one.data != NULL) {
        munmap(one.data, one.bytes);
    }
    return code;
}

/* Called when an array ends, from any thread.  The block is nobody else's until its pages
 * are gone. */
void mls_local_give(mls_local_blocks *owner, void *data)
{
    if (owner->process != getpid()) {
        return; /* the pages are the parent's */
    }
    block one = {0};
    pthread_mutex_lock(&owner->lock);
    for (size_t i = 0; i < owner->count; i++) {
        if (owner->list[i].data == data) {
            one = owner->list[i];
            owner->list[i].there = 0;
        }
    }
    const int fd = owner->fd;
    pthread_mutex_unlock(&owner->lock);
    forget_pages(&one, fd);
    pthread_mutex_lock(&owner->lock);
    for (size_t i = 0; i < owner->count; i++) {
        if (owner->list[i].data == data) {
            owner->list[i].used = false;
        }
    }
    owner->arrays--;
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
        if (address >= first && address - first <= one->there &&
            bytes <= one->there - (address - first)) {
            spot = (mls_local_spot){
                .start = one->start, .bytes = one->there, .at = address - first};
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

/* Map a block that was not read before, or not so far: its place is used again for
 * arrays of other sizes. */
static mls_code map_view(mls_local_views *v, size_t at, int fd, size_t rank,
                         const mls_local_spot *spot, mls_status *st)
{
    const size_t bytes = (size_t)spot->bytes;
    mls_code code = check_spot(fd, rank, spot, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_local_view *list = with_room(v->list, at, &v->room, sizeof *list);
    if (list == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a block of rank %zu", rank);
    }
    v->list = list;
    void *data = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, (off_t)spot->start);
    if (data == MAP_FAILED) {
        return mls_fail_os(st, errno, "%zu bytes of rank %zu cannot be mapped", bytes,
                           rank);
    }
    mls_advise_pages(data, bytes, true);
    if (at < v->count) {
        munmap((void *)(uintptr_t)v->list[at].data, v->list[at].bytes);
    } else {
        v->count++;
    }
    v->list[at] = (mls_local_view){.start = spot->start, .bytes = bytes, .data = data};
    return MLS_OK;
}

/* The view of a block that starts there; `v->count` for none. */
static size_t view_at(const mls_local_views *v, uint64_t start)
{
    for (size_t i = 0; i < v->count; i++) {
        const size_t at = (v->next + i) % v->count;
        if (v->list[at].start == start) {
            return at;
        }
    }
    return v->count;
}

/* The same arrays are asked for in the same order again and again. */
mls_code mls_local_views_find(mls_local_views *v, int fd, size_t rank,
                              const mls_local_spot *spot, size_t bytes,
                              const unsigned char **out, mls_status *st)
{
    if (spot->at > spot->bytes || bytes > spot->bytes - spot->at) {
        return mls_fail(st, MLS_E_FORMAT,
                        "rank %zu tells of %zu bytes at offset %llu of a block of %llu",
                        rank, bytes, (unsigned long long)spot->at,
                        (unsigned long long)spot->bytes);
    }
    const size_t at = view_at(v, spot->start);
    if (at == v->count || v->list[at].bytes < spot->at + bytes) {
        const mls_code code = map_view(v, at, fd, rank, spot, st);
        if (code != MLS_OK) {
            return code;
        }
    }
    v->next = at;
    *out = v->list[at].data + spot->at;
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
