/* memory: allocates heap blocks, and zeroed pages that can grow; asks the system for huge
 * pages.
 *
 * The size product is checked before calloc, so a block is never shorter than requested.
 * Page ranges come from mmap: untouched pages cost no memory, and Linux can grow a range
 * by moving its page table entries. Other systems copy the range.
 */
#include "base/memory.h"

#include "base/size.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Allocate a zeroed block. A block of one byte represents an empty one, so that NULL
 * always means failure. */
void *mls_alloc(size_t count, size_t size)
{
    size_t bytes;
    if (!mls_size_mul(count, size, &bytes)) {
        return NULL;
    }
    return calloc(bytes == 0 ? 1 : bytes, 1);
}

/* Resize a block. Never asks for 0 bytes: realloc may then free the block and return
 * NULL. */
void *mls_realloc(void *block, size_t count, size_t size)
{
    size_t bytes;
    if (!mls_size_mul(count, size, &bytes)) {
        return NULL;
    }
    return realloc(block, bytes == 0 ? 1 : bytes);
}

/* Double a block of `*room` elements of `size` bytes. `*room` changes only if the block
 * does. */
void *mls_double(void *block, size_t *room, size_t size)
{
    size_t more = 16;
    if (*room > 0 && !mls_size_mul(*room, 2, &more)) {
        return NULL;
    }
    void *grown = mls_realloc(block, more, size);
    *room = grown != NULL ? more : *room;
    return grown;
}

void mls_free(void *block)
{
    free(block);
}

/* Set `*out` to `bytes` rounded up to whole pages, at least one. Returns false on
 * overflow. */
static bool round_to_pages(size_t bytes, size_t *out)
{
    const size_t page = mls_page_bytes();
    size_t padded;
    if (!mls_size_add(bytes == 0 ? 1 : bytes, page - 1, &padded)) {
        return false;
    }
    *out = padded / page * page;
    return true;
}

static mls_code fail_mapping(mls_status *st, size_t bytes)
{
    return mls_fail(st, MLS_E_MEMORY, "cannot map %zu bytes of memory", bytes);
}

/* Asked on each call: a cached value would be a mutable static. */
size_t mls_page_bytes(void)
{
    const long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (size_t)page : 4096;
}

/* Anonymous private memory reads as zeros; the system allocates each page at its first
 * access. Returns NULL if the system refuses. */
static void *map_zeros(size_t bytes)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    return data == MAP_FAILED ? NULL : data;
}

static void unmap_pages(void *data, size_t bytes)
{
    munmap(data, bytes);
}

/* Map zero pages for `bytes` bytes. An empty range still maps one page. */
mls_code mls_pages_init(mls_pages *out, size_t bytes, mls_status *st)
{
    size_t mapped;
    void *data = round_to_pages(bytes, &mapped) ? map_zeros(mapped) : NULL;
    if (data == NULL) {
        return fail_mapping(st, bytes);
    }
    *out = (mls_pages){.data = data, .bytes = bytes, .mapped = mapped};
    return MLS_OK;
}

/* Grow a mapping to `bytes` bytes. Never shrinks: a smaller size fails like one that the
 * system refuses. */
mls_code mls_pages_grow(mls_pages *pages, size_t bytes, mls_status *st)
{
    size_t mapped;
    if (bytes < pages->bytes || !round_to_pages(bytes, &mapped)) {
        return fail_mapping(st, bytes);
    }
    /* the last page has room left; it was never written, so it still reads as zeros */
    if (mapped == pages->mapped) {
        pages->bytes = bytes;
        return MLS_OK;
    }
#if defined(__linux__)
    void *data = mremap(pages->data, pages->mapped, mapped, MREMAP_MAYMOVE);
    if (data != MAP_FAILED) {
        *pages = (mls_pages){.data = data, .bytes = bytes, .mapped = mapped};
        return MLS_OK;
    }
    /* EFAULT: advice for a part split the range, and the kernel cannot join it again */
    if (errno != EFAULT) {
        return fail_mapping(st, bytes);
    }
#endif
    /* both blocks exist during the copy, for lack of mremap */
    mls_pages bigger;
    const mls_code code = mls_pages_init(&bigger, bytes, st);
    if (code != MLS_OK) {
        return code;
    }
    memcpy(bigger.data, pages->data, pages->bytes);
    mls_pages_fini(pages);
    *pages = bigger;
    return MLS_OK;
}

void mls_pages_fini(mls_pages *pages)
{
    if (pages->data != NULL) {
        unmap_pages(pages->data, pages->mapped);
    }
    *pages = (mls_pages){0};
}

#if defined(__linux__)
/* Give `advice` (a constant of madvise) for the whole pages of `page` bytes inside
 * `bytes` bytes at `data`. The partial pages at both ends may hold other data. */
static void advise_pages(void *data, size_t bytes, size_t page, int advice)
{
    const uintptr_t start = ((uintptr_t)data + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)data + bytes) / page * page;
    if (end > start) {
        const int saved = errno; /* refused advice is not an error */
        (void)madvise((void *)start, end - start, advice);
        errno = saved;
    }
}

static void advise_memory(void *data, size_t bytes, int advice)
{
    advise_pages(data, bytes, mls_page_bytes(), advice);
}
#endif

/* Ask for the huge pages that fit wholly inside the range. Does nothing on systems other
 * than Linux. */
void mls_advise_inner_huge_pages(void *data, size_t bytes)
{
#if defined(__linux__)
    /* A page table has 8-byte entries and fills one page, so it maps one huge page of
     * this size. Advice for another size would do no harm. */
    const size_t page = mls_page_bytes();
    advise_pages(data, bytes, page / 8 * page, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

/* Ask for huge pages, or for none, in the range. Does nothing on systems other than
 * Linux. */
void mls_advise_pages(void *data, size_t bytes, bool huge)
{
#if defined(__linux__)
    advise_memory(data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)data, (void)bytes, (void)huge;
#endif
}

/* Ask for the memory of the pages in the range at once. Systems without this request
 * clear each page when it is first accessed. */
void mls_populate_pages(void *data, size_t bytes)
{
#if defined(MADV_POPULATE_WRITE) /* Linux 5.14 */
    advise_memory(data, bytes, MADV_POPULATE_WRITE);
#else
    (void)data, (void)bytes;
#endif
}
