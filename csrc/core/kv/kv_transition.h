/* kv_transition: the request to move a key-value cache to another sequence length; its
 * tokens and its rows.
 *
 * A cache has 2 to 8 axes, and one is the sequence: often (layers, heads, sequence,
 * head_dim). Positions 0 .. position-1 of the sequence hold tokens; a transition copies
 * those and pads the rest of the target.
 */
#ifndef MLS_KV_TRANSITION_H
#define MLS_KV_TRANSITION_H

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"

#include <stdint.h>

enum { MLS_KV_MIN_RANK = 2, MLS_KV_MAX_RANK = 8 };

typedef enum mls_kv_kind {
    MLS_KV_EXPAND, /* the target is at least as long as the source */
    MLS_KV_COMPACT /* the target may be shorter if the tokens fit */
} mls_kv_kind;

/* The caller's parameter names, for messages. */
typedef struct mls_kv_names {
    const char *source, *target, *target_length, *position, *seq_axis;
    const char *if_shorter; /* advice if the target is shorter than the source */
    const char *if_shared;  /* advice if both share memory */
} mls_kv_names;

/* State of the target's memory. A row is the part of a cache at one index of the axes
 * before the sequence. For MLS_KV_SPARSE the pages of each row's tokens are requested at
 * once, which is cheaper than a fault for each, and huge pages are used where tokens fill
 * them. */
typedef enum mls_kv_memory {
    MLS_KV_TOUCHED, /* already used */
    MLS_KV_FRESH,   /* newly allocated: the system clears each page at its first access */
    MLS_KV_SPARSE   /* newly allocated, packed rows in C order at equal distances, advised
                       to use small pages */
} mls_kv_memory;

/* The parameters of a transition. The checks read all but `pad` and `memory`, and the
 * move reads only `position`, `axis`, `pad` and `memory`. */
typedef struct mls_kv_request {
    mls_kv_kind kind;
    int64_t target_length;     /* positions of the target */
    int64_t position;          /* tokens in the source */
    int axis;                  /* the sequence axis, from mls_kv_find_axis */
    const mls_kv_names *names; /* borrowed */
    const mls_element *pad;    /* of positions without a token; NULL: leave them */
    mls_kv_memory memory;      /* affects only the speed */
} mls_kv_request;

/* Return the number of bytes of the elements of `t`. Their memory must exist, so the
 * product of the lengths cannot overflow. */
static inline size_t mls_kv_bytes(const mls_tensor *t)
{
    size_t bytes = 0;
    (void)mls_tensor_bytes(t, &bytes);
    return bytes;
}

/* Return the number of rows of the cache `t`: the product of the lengths of all axes
 * before `seq_axis`. Its memory must exist, so that the product cannot overflow. */
static inline size_t mls_kv_rows(const mls_tensor *t, int seq_axis)
{
    size_t rows = 1;
    for (int axis = 0; axis < seq_axis; axis++) {
        rows *= t->shape[axis]; /* at most the bytes of the cache */
    }
    return rows;
}

/* Check that a cache may have `rank` axes, and set `*axis` to the sequence axis as 0 ..
 * rank - 1; `seq_axis` may count from the end (-1 is the last). Messages call the cache
 * `label` and the axis `axis_name`.
 * MLS_E_SHAPE: the rank is not 2 to 8, or the cache has no such axis. */
mls_code mls_kv_find_axis(const char *label, int rank, const size_t *shape,
                          const char *axis_name, int64_t seq_axis, int *axis,
                          mls_status *st);

/* Check the numbers of `request`, whose axis is one of `shape`, against `shape`, the
 * `rank` lengths of the source.
 * MLS_E_CAPACITY: the target is shorter than the source (MLS_KV_EXPAND) or than the
 * tokens (MLS_KV_COMPACT), a position or length is negative, or the position is beyond
 * the source. */
mls_code mls_kv_check(int rank, const size_t *shape, mls_kv_request request,
                      mls_status *st);

/* Check that a cache of shape `source` can expand to one of shape `target`: the same rank
 * and the same lengths of all axes but the sequence, which must not be shorter.
 * `axis_name` and `seq_axis` as in mls_kv_find_axis.
 * MLS_E_CAPACITY: the target's sequence is shorter. MLS_E_SHAPE: any other difference, or
 * an error of mls_kv_find_axis. */
mls_code mls_kv_check_shapes(int source_rank, const size_t *source, int target_rank,
                             const size_t *target, const char *axis_name,
                             int64_t seq_axis, mls_status *st);

/* Check an existing output `dst` against the source `src` and a request that passed
 * mls_kv_check.
 * MLS_E_SHAPE: not the source's shape with the target's length. MLS_E_DTYPE: the dtypes
 * do not convert. MLS_E_OVERLAP: the output shares memory with the source. */
mls_code mls_kv_check_target(const mls_tensor *dst, const mls_tensor *src,
                             mls_kv_request request, mls_status *st);

/* Carry out `request`: copy the first `position` positions along its axis from `src` to
 * `dst`, and fill the others of `dst` with `pad` (NULL: leave them). The request has
 * passed mls_kv_check, and `dst` has passed mls_kv_check_target or was made for it. The
 * threads of `pool` (NULL: none) share a large cache. Cannot fail. */
void mls_kv_move(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *dst,
                 const mls_tensor *src, const mls_kv_request *request);

#endif
