/* mem: heap blocks and page ranges.
 *
 * Heap blocks go through calloc with the product checked first, so that no caller can be
 * handed a block shorter than it asked for.  Page ranges come straight from the system
 * where it has mmap: pages that nobody touches then cost no memory, and Linux can make a
 * range larger by moving its page table entries.  Without mmap the heap stands in: the
 * same contract, at the price of copies.
 */
#include "base/memory.h"

#include "base/size.h"

#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#    define MLS_HAVE_MMAP 0
#else
#    define MLS_HAVE_MMAP 1
#    include <errno.h>
#    include <sys/mman.h>
#    include <unistd.h>
#endif

/* A block of one byte stands for an empty one, so that NULL always means failure. */
void *mls_alloc(size_t count, size_t size)
{
    size_t bytes;
    if (!mls_size_mul(count, size, &bytes)) {
        return NULL;
    }
    return calloc(bytes == 0 ? 1 : bytes, 1);
}

/* Never shrinks to nothing: realloc with 0 bytes may free the block, and be called
 * failure. */
void *mls_realloc(void *block, size_t count, size_t size)
{
    size_t bytes;
    if (!mls_size_mul(count, size, &bytes)) {
        return NULL;
    }
    return realloc(block, bytes == 0 ? 1 : bytes);
}

/* The counterpart of both above, so that the heap has one door. */
void mls_free(void *block)
{
    free(block);
}

/* `bytes` rounded up to whole pages, at least one page. */
static bool whole_pages(size_t bytes, size_t *out)
{
    const size_t page = mls_page_bytes();
    size_t padded;
    if (!mls_size_add(bytes == 0 ? 1 : bytes, page - 1, &padded)) {
        return false;
    }
    *out = padded / page * page;
    return true;
}

/* The one message for memory that is not there, whatever the reason. */
static mls_code no_pages(mls_status *st, size_t bytes)
{
    return mls_fail(st, MLS_E_MEMORY, "cannot map %zu bytes of memory", bytes);
}

#if MLS_HAVE_MMAP

/* Asked each time: a cached value would be a mutable static. */
size_t mls_page_bytes(void)
{
    const long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (size_t)page : 4096;
}

/* Anonymous private memory: the system promises zeros, and gives each page at its first
 * touch. */
mls_code mls_pages_init(mls_pages *out, size_t bytes, mls_status *st)
{
    size_t mapped;
    if (!whole_pages(bytes, &mapped)) {
        return no_pages(st, bytes);
    }
    void *data =
        mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (data == MAP_FAILED) {
        return no_pages(st, bytes);
    }
    *out = (mls_pages){.data = data, .bytes = bytes, .mapped = mapped};
    return MLS_OK;
}

/* Never shrinks: a smaller size is refused like one that cannot be had. */
mls_code mls_pages_grow(mls_pages *pages, size_t bytes, mls_status *st)
{
    size_t mapped;
    if (bytes < pages->bytes || !whole_pages(bytes, &mapped)) {
        return no_pages(st, bytes);
    }
    /* the last page has room left; nobody wrote there, so it still reads as zeros */
    if (mapped == pages->mapped) {
        pages->bytes = bytes;
        return MLS_OK;
    }
#    if defined(__linux__)
    void *data = mremap(pages->data, pages->mapped, mapped, MREMAP_MAYMOVE);
    if (data == MAP_FAILED) {
        return no_pages(st, bytes);
    }
    *pages = (mls_pages){.data = data, .bytes = bytes, .mapped = mapped};
#    else
    mls_pages bigger;
    const mls_code code = mls_pages_init(&bigger, bytes, st);
    if (code != MLS_OK) {
        return code;
    }
    memcpy(bigger.data, pages->data, pages->bytes);
    mls_pages_fini(pages);
    *pages = bigger;
#    endif
    return MLS_OK;
}

/* `mapped` and not `bytes` is what the system gave. */
void mls_pages_fini(mls_pages *pages)
{
    if (pages->data != NULL) {
        munmap(pages->data, pages->mapped);
    }
    *pages = (mls_pages){0};
}

#    if defined(__linux__)
/* Advise on the whole pages, of `page` bytes, inside the range: those at its ends may
 * hold other data. */
static void advise_pages(void *data, size_t bytes, size_t page, int advice)
{
    const uintptr_t start = ((uintptr_t)data + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)data + bytes) / page * page;
    if (end > start) {
        const int saved = errno; /* advice that is refused is no error */
        (void)madvise((void *)start, end - start, advice);
        errno = saved;
    }
}

/* The same for pages of the usual size. */
static void advise(void *data, size_t bytes, int advice)
{
    advise_pages(data, bytes, mls_page_bytes(), advice);
}
#    endif

void mls_advise_inner_huge_pages(void *data, size_t bytes)
{
#    if defined(__linux__)
    /* a page table of 8-byte entries fills one page, so it maps a huge page of this size;
     * advice for another size would do no harm */
    const size_t page = mls_page_bytes();
    advise_pages(data, bytes, page / 8 * page, MADV_HUGEPAGE);
#    else
    (void)data, (void)bytes;
#    endif
}

void mls_advise_pages(void *data, size_t bytes, bool huge)
{
#    if defined(__linux__)
    advise(data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#    else
    (void)data, (void)bytes, (void)huge;
#    endif
}

/* Systems that lack the request clear each page when it is touched. */
void mls_populate_pages(void *data, size_t bytes)
{
#    if defined(MADV_POPULATE_WRITE) /* Linux 5.14 */
    advise(data, bytes, MADV_POPULATE_WRITE);
#    else
    (void)data, (void)bytes;
#    endif
}

#else /* no mmap: the heap serves, and growing copies */

/* Only a unit to round up to: nothing is mapped here. */
size_t mls_page_bytes(void)
{
    return 4096;
}

mls_code mls_pages_init(mls_pages *out, size_t bytes, mls_status *st)
{
    size_t mapped;
    void *data = whole_pages(bytes, &mapped) ? calloc(mapped, 1) : NULL;
    if (data == NULL) {
        return no_pages(st, bytes);
    }
    *out = (mls_pages){.data = data, .bytes = bytes, .mapped = mapped};
    return MLS_OK;
}

/* Both blocks exist for the length of the copy: the price of having no mremap. */
mls_code mls_pages_grow(mls_pages *pages, size_t bytes, mls_status *st)
{
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
    free(pages->data);
    *pages = (mls_pages){0};
}

void mls_advise_inner_huge_pages(void *data, size_t bytes)
{
    (void)data, (void)bytes;
}

void mls_advise_pages(void *data, size_t bytes, bool huge)
{
    (void)data, (void)bytes, (void)huge;
}

void mls_populate_pages(void *data, size_t bytes)
{
    (void)data, (void)bytes;
}

#endif
