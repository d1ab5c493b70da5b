/* staging: items of a save copied aside, within a budget, so that their arrays may be
 * changed while the copies are written.
 *
 * The smallest items are copied first: each of them costs a write as many operations as a
 * large one.  What does not fit is written from where it lies, before all else; see
 * mls_shard_job.freed.
 */
#ifndef MLS_STAGING_H
#define MLS_STAGING_H

#include "copy.h"
#include "pool.h"
#include "shard_write.h"
#include "status.h"

#include <stddef.h>

/* Where copies go.  All is borrowed; the memory must outlive the items. */
typedef struct mls_staging {
    unsigned char *memory;
    size_t bytes;
    const mls_kernels *kernels;
    mls_pool *pool;
} mls_staging;

/* What came of it. */
typedef struct mls_staged {
    size_t bytes; /* of the memory that are in use, from its start on */
    size_t lent;  /* items that were not copied */
} mls_staged;

/* Bytes of all items together, each of which is looked at: what staging all would take.
 * MLS_E_VALUE, MLS_E_SHAPE: a layout or part that cannot be; MLS_E_SIZE. `*out` is
 * untouched on failure. */
mls_code mls_staging_need(const mls_shard_item *items, size_t count, size_t *out,
                          mls_status *st);

/* Copy as many items as there is room for, the smallest first, one behind the other and
 * packed; each that was copied points to its copy and is `staged`.  Items that are staged
 * already stay as they are.  Errors as above, and MLS_E_MEMORY (24 bytes an item are
 * taken meanwhile); then no item was changed. */
mls_code mls_stage(const mls_staging *to, mls_shard_item *items, size_t count,
                   mls_staged *out, mls_status *st);

/* Write to every page of `memory`, so that the system has given it before it is needed:
 * first touching it costs more than the copying.  Its content is lost. */
void mls_staging_touch(const mls_staging *staging);

#endif
