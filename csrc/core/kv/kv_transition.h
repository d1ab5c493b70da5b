/* kv: moving the key-value cache of a language model to another sequence length.
 *
 * A cache is (layers, heads, sequence, head_dim).  Positions 0 .. position-1 of the
 * sequence hold tokens; a transition copies those and pads the rest of the target.
 */
#ifndef MLS_KV_H
#define MLS_KV_H

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"

#include <stdint.h>

enum { MLS_KV_RANK = 4, MLS_KV_AXIS = 2 }; /* dimensions of a cache; its sequence axis */

typedef enum mls_kv_kind {
    MLS_KV_EXPAND, /* the target is at least as long as the source */
    MLS_KV_COMPACT /* the target may be shorter, as long as the tokens fit */
} mls_kv_kind;

/* What the caller's users call the parts of a request, for messages. */
typedef struct mls_kv_names {
    const char *source, *target, *target_length, *position;
    const char *if_shorter; /* what to do if the target is shorter than the source */
    const char *if_shared;  /* what to do if both share memory */
} mls_kv_names;

/* What a transition is asked to do, before any memory is touched. */
typedef struct mls_kv_request {
    mls_kv_kind kind;
    int64_t target_length;     /* positions of the target */
    int64_t position;          /* tokens in the source */
    const mls_kv_names *names; /* borrowed; NULL: the core's own words */
} mls_kv_request;

/* Check a request against the source's shape.
 * MLS_E_SHAPE: not four dimensions.  MLS_E_CAPACITY: a target shorter than the source
 * (expand) or than the tokens (compact), a position or length that is negative or beyond
 * the source. */
mls_code mls_kv_check(int rank, const size_t *shape, mls_kv_request request,
                      mls_status *st);

/* Check that a cache of `target` shape can take the content of one of `source` shape:
 * same layers, heads and head dimension, and no shorter unless `kind` is compact.
 * MLS_E_SHAPE, MLS_E_CAPACITY. */
mls_code mls_kv_check_shapes(int source_rank, const size_t *source, int target_rank,
                             const size_t *target, mls_kv_kind kind, mls_status *st);

/* Check an output against the source and a request that mls_kv_check passed.
 * MLS_E_SHAPE: not the source's shape with the target's length.  MLS_E_DTYPE: no such
 * conversion.  MLS_E_OVERLAP: shares memory with the source. */
mls_code mls_kv_check_target(const mls_tensor *dst, const mls_tensor *src,
                             mls_kv_request request, mls_status *st);

/* What is known of the target's memory. */
typedef enum mls_kv_memory {
    MLS_KV_TOUCHED, /* it was used before */
    MLS_KV_FRESH,   /* just allocated: the system clears each page when it is touched */
    MLS_KV_SPARSE /* the same in small pages, C-contiguous: the pages of tokens are asked
                   * for head by head, which is cheaper than a fault for each; huge pages
                   * that tokens fill are huge again */
} mls_kv_memory;

/* Copy the first `position` positions of `src` to `dst` and put `pad` into the others, or
 * leave those alone where `pad` is NULL.  `memory` only steers the speed.  Both views
 * passed the checks.  Cannot fail. */
void mls_kv_move(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *dst,
                 const mls_tensor *src, size_t position, const mls_element *pad,
                 mls_kv_memory memory);

#endif
