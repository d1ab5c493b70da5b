/* mem: heap blocks and page ranges.
 *
 * Heap blocks are for the core's own small bookkeeping; tensor data belongs to the
 * caller.  Page ranges hold what must grow in place and start as untouched zero pages.
 */
#ifndef MLS_MEM_H
#define MLS_MEM_H

#include "base/status.h"

#include <stddef.h>

/* A block of `count * size` bytes, zeroed, or NULL (overflow counts as failure).
 * Gives: free with mls_free.  A count of 0 gives a block of one byte, never NULL. */
void *mls_alloc(size_t count, size_t size);

/* Resize a block from mls_alloc; new bytes are not zeroed.  NULL leaves it as it was.  A
 * block of NULL is made, of bytes that are anything. */
void *mls_realloc(void *block, size_t count, size_t size);

void mls_free(void *block); /* accepts NULL */

/* A range of whole pages that reads as zeros until written.  `bytes` is what was asked
 * for, `mapped` what the system gave. */
typedef struct mls_pages {
    unsigned char *data;
    size_t bytes;
    size_t mapped;
} mls_pages;

size_t mls_page_bytes(void);

/* Map `bytes` (0 is good) of zero pages.  Gives: free with mls_pages_fini.
 * MLS_E_MEMORY: the system refused; `*out` is untouched. */
mls_code mls_pages_init(mls_pages *out, size_t bytes, mls_status *st);

/* Grow to `bytes`, keeping the content; the range may move, and new bytes are zero.
 * On Linux the pages themselves move (mremap): nothing is copied.  Elsewhere the old
 * content is copied.  MLS_E_MEMORY: `pages` is untouched. */
mls_code mls_pages_grow(mls_pages *pages, size_t bytes, mls_status *st);

void mls_pages_fini(mls_pages *pages); /* accepts a zeroed struct; zeroes it */

/* Advice on huge pages for the whole pages inside [data, data + bytes): a hint, which
 * may be ignored.  `huge` asks for them, else they are declined: a byte written then
 * costs one small page. */
void mls_advise_pages(void *data, size_t bytes, bool huge);

/* Advise huge pages for those that lie wholly inside [data, data + bytes), all of which
 * is about to be written, so that none of them costs memory that is not used. */
void mls_advise_inner_huge_pages(void *data, size_t bytes);

/* Ask for the memory behind the whole pages inside [data, data + bytes), which is about
 * to be written: one request instead of a page fault for each.  A hint, which may be
 * ignored; the content stays as it is. */
void mls_populate_pages(void *data, size_t bytes);

#endif
