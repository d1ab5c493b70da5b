/* staging: items of a save copied aside, within a budget, so that their arrays may be
 * changed while the copies are written.
 *
 * What does not fit is written from where it lies, before all else, while somebody waits;
 * see mls_shard_job.freed.  So as few bytes as can be found quickly are left out, and few
 * items: each costs a write as many operations, however small it is.
 */
#ifndef MLS_STAGING_H
#define MLS_STAGING_H

#include "array/copy/copy.h"
#include "base/status.h"
#include "checkpoint/write/shard_write.h"
#include "runtime/thread_pool.h"

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

/* What a save of these items takes besides, at most: what `threads` have on its way to
 * the disk, records of the items, and with `compress` what the largest of them become.
 * Errors as above. */
mls_code mls_staging_besides(const mls_shard_item *items, size_t count, size_t threads,
                             bool compress, size_t *out, mls_status *st);

/* Mark as `staged` exactly the items whose memory is in the first `bytes` bytes of
 * `memory`: copies that the caller made. */
void mls_staging_note(mls_shard_item *items, size_t count, const void *memory,
                      size_t bytes);

/* Copy what there is room for, one behind the other and packed.  Left out are the largest
 * items, until one will do; then the smallest that does.  Each that was copied points to
 * its copy and is `staged`.  Items that are staged
 * already stay as they are.  Errors as above, and MLS_E_MEMORY (24 bytes an item are
 * taken meanwhile); then no item was changed. */
mls_code mls_stage(const mls_staging *to, mls_shard_item *items, size_t count,
                   mls_staged *out, mls_status *st);

/* Write to every page of `memory`, so that the system has given it before it is needed:
 * first touching it costs more than the copying.  Its content is lost. */
void mls_staging_touch(const mls_staging *staging);

#endif
