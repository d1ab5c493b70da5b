/* memory: heap blocks for bookkeeping, and page ranges that grow in place and start as
 * zeros.
 *
 * Heap blocks are for the core's own bookkeeping; tensor data belongs to the caller. Page
 * ranges are for memory that grows in place and starts as untouched zero pages.
 */
#ifndef MLS_MEMORY_H
#define MLS_MEMORY_H

#include "base/status.h"

#include <stddef.h>

/* Allocate a zeroed block of `count * size` bytes. Returns NULL if memory runs out or the
 * product overflows. The caller frees the block with mls_free. An empty block has one
 * byte, so NULL always means failure. */
void *mls_alloc(size_t count, size_t size);

/* Resize a block from mls_alloc to `count * size` bytes, or allocate one if `block` is
 * NULL. New bytes are not initialised. Returns NULL on failure, and the old block stays
 * valid. */
void *mls_realloc(void *block, size_t count, size_t size);

/* Resize a block of `*room` elements of `size` bytes to twice as many (16 if `*room` is
 * 0), and set `*room` to their number, so that n appends copy O(n) elements. `block` may
 * be NULL if `*room` is 0. Returns NULL on failure; the old block and `*room` stay
 * valid. */
void *mls_double(void *block, size_t *room, size_t size);

/* Return a block that holds the `count` elements of `block` and has room for one more:
 * mls_double is called if it is full (`count` equals `*room`). Returns NULL on failure;
 * the old block and `*room` stay valid. */
static inline void *mls_grow(void *block, size_t count, size_t *room, size_t size)
{
    return count < *room ? block : mls_double(block, room, size);
}

void mls_free(void *block); /* accepts NULL */

/* A range of whole pages that reads as zeros until written. `bytes` is the requested
 * size, `mapped` the size that the system mapped. */
typedef struct mls_pages {
    unsigned char *data;
    size_t bytes;
    size_t mapped;
} mls_pages;

/* Return the size of a (small) page of the system in bytes. */
size_t mls_page_bytes(void);

/* Map `bytes` (may be 0) of zero pages. The caller frees them with mls_pages_fini.
 * MLS_E_MEMORY: the system refused; `*out` is untouched. */
mls_code mls_pages_init(mls_pages *out, size_t bytes, mls_status *st);

/* Grow to `bytes` and keep the content; new bytes are zero. The range may move. On Linux
 * the kernel moves the pages (mremap) without a copy, unless advice for a part split the
 * range; other systems copy the content.
 * MLS_E_MEMORY: the system refused, or `bytes` is below the current size (not checked on
 * systems without mmap); `pages` is untouched. */
mls_code mls_pages_grow(mls_pages *pages, size_t bytes, mls_status *st);

void mls_pages_fini(mls_pages *pages); /* accepts a zeroed struct; zeroes it */

/* Advise the system about huge pages for the whole pages inside [data, data + bytes). The
 * system may ignore this hint. If `huge` is true, it should use huge pages; if not, it
 * should not, so that a byte written costs one small page only. */
void mls_advise_pages(void *data, size_t bytes, bool huge);

/* Advise the system to use those huge pages that fit wholly inside [data, data + bytes).
 * The caller must be about to write the whole range, so that no huge page costs memory
 * that stays unused. */
void mls_advise_inner_huge_pages(void *data, size_t bytes);

/* Ask the system to provide the memory of the whole pages inside [data, data + bytes),
 * which the caller is about to write. One request replaces a page fault for each page.
 * The system may ignore this hint; the content does not change. */
void mls_populate_pages(void *data, size_t bytes);

#endif
