/* staging: copies of a save's arrays within a memory budget, so that these may change
 * while it is written.
 *
 * Items that exceed the budget are written directly from their arrays, before all others,
 * while the caller waits; see mls_shard_job.freed. So a fast heuristic keeps their bytes
 * low, and also their number: every write of an item has the same overhead, even for a
 * small item. */
#ifndef MLS_STAGING_H
#define MLS_STAGING_H

#include "array/copy/copy.h"
#include "base/status.h"
#include "checkpoint/write/shard_write.h"
#include "runtime/thread_pool.h"

#include <stddef.h>

/* Destination of the copies. Everything is borrowed; the memory must outlive the
 * items. */
typedef struct mls_staging {
    unsigned char *memory;
    size_t bytes;
    const mls_kernels *kernels;
    mls_pool *pool;
} mls_staging;

/* Result of staging. */
typedef struct mls_staged {
    size_t bytes; /* used bytes at the start of the memory */
    size_t lent;  /* number of items that were not copied */
} mls_staged;

/* Compute the total bytes of all items, which is the memory needed to stage them all.
 * Checks every item. MLS_E_VALUE, MLS_E_SHAPE: invalid layout or part; MLS_E_SIZE. `*out`
 * is untouched on failure. */
mls_code mls_staging_need(const mls_shard_item *items, size_t count, size_t *out,
                          mls_status *st);

/* Compute the most memory that the writer itself takes for these items: write buffers of
 * `threads` threads, records of the items, and with `compress` the compressed data of the
 * largest items. `*out` receives bytes. Errors as above. */
mls_code mls_staging_overhead(const mls_shard_item *items, size_t count, size_t threads,
                              bool compress, size_t *out, mls_status *st);

/* Set `staged` for exactly the items whose memory is in the first `bytes` bytes of
 * `memory`, which are copies that the caller made. */
void mls_staging_note(mls_shard_item *items, size_t count, const void *memory,
                      size_t bytes);

/* Copy as many items as fit, adjacent and packed. The omitted items are the largest ones
 * until one more is enough, and then the smallest one that is enough. A copied item
 * points to its copy and is `staged`; items that are already staged do not change. `*out`
 * receives the used bytes and the number of items that still use their own memory. Errors
 * as above, and MLS_E_MEMORY (24 temporary bytes for each item); on failure no item
 * changed. */
mls_code mls_stage(const mls_staging *to, mls_shard_item *items, size_t count,
                   mls_staged *out, mls_status *st);

/* Write to every page of `memory`, so that the system allocates it in advance: first
 * touching a page costs more than copying to it. The contents are lost. */
void mls_staging_touch(const mls_staging *staging);

#endif
