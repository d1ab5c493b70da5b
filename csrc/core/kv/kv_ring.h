/* kv_ring: a key-value cache of fixed size that evicts its oldest tokens and keeps its
 * sinks.
 *
 * A ring has `capacity` slots along its sequence axis. The token at position p is stored
 * in slot p while p is below `sinks`, and otherwise in slot
 * sinks + (p - sinks + shift) % (capacity - sinks). `shift` is 0, except in a ring that
 * another library began at another slot. The first `sinks` positions are never evicted
 * (attention sinks); any other token is overwritten by the one that comes capacity -
 * sinks positions later. Slots without a token are zero. Not thread-safe: the caller uses
 * a lock.
 *
 * Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al., 2024.
 */
#ifndef MLS_KV_RING_H
#define MLS_KV_RING_H

#include "array/copy/copy.h"
#include "base/memory.h"

typedef struct mls_kv_ring {
    mls_pages pages;
    mls_tensor slots; /* all slots, C-contiguous; views of it stay valid until fini */
    int axis;         /* the sequence axis of `slots` */
    size_t sinks;     /* positions 0 .. sinks - 1 are never evicted */
    size_t shift;     /* below capacity - sinks; 0 unless borrowed */
    size_t oldest;    /* first position after the sinks that is held; at least `sinks` */
    size_t next;      /* position of the next token */
    size_t evicted;   /* tokens evicted so far; a trim does not change it */
} mls_kv_ring;

/* Reserve an empty ring of zeroed memory. `slots` gives the dtype, the byte order and the
 * shape (its data is not read); its length along `axis` is the capacity. `axis` is 0 ..
 * rank - 1. The caller ends the ring with mls_kv_ring_fini.
 * MLS_E_SHAPE: not 2 to 8 dimensions. MLS_E_CAPACITY: a capacity of 0, or sinks that
 * leave no slot for other tokens. MLS_E_SIZE: the bytes exceed the address space.
 * MLS_E_MEMORY. `*out` is untouched on failure. */
mls_code mls_kv_ring_init(mls_kv_ring *out, const mls_tensor *slots, int axis,
                          size_t sinks, mls_status *st);

void mls_kv_ring_fini(mls_kv_ring *ring); /* accepts a zeroed struct */

/* Describe the caller's memory `slots` as the ring after `length` tokens were appended
 * and none trimmed. The slots after the sinks are rotated by `shift` slots, any number.
 * The ring owns no memory, so it needs no mls_kv_ring_fini. It may have 0 slots.
 * MLS_E_SHAPE, MLS_E_CAPACITY: as for mls_kv_ring_init. */
mls_code mls_kv_ring_borrow(mls_kv_ring *out, const mls_tensor *slots, int axis,
                            size_t sinks, size_t length, size_t shift, mls_status *st);

/* Replace the content of all slots by `slots`, and the counters `oldest`, `next` and
 * `evicted` of the ring by these, for example from a stored ring. The slots must have the
 * shape and the dtype of the ring; either byte order is accepted.
 * MLS_E_SHAPE, MLS_E_DTYPE, MLS_E_OVERLAP: they differ, or share memory with the ring.
 * MLS_E_CAPACITY: no sequence of appends and trims ends with these counters. The ring is
 * unchanged on failure. */
mls_code mls_kv_ring_fill(mls_kv_ring *ring, const mls_kernels *kernels,
                          const mls_tensor *slots, size_t oldest, size_t next,
                          size_t evicted, mls_status *st);

/* Return the number of tokens held. */
size_t mls_kv_ring_length(const mls_kv_ring *ring);

/* Append `tokens`, any number of them along the sequence axis, as if one by one: tokens
 * that later ones would overwrite are counted as evicted and not copied.
 * MLS_E_SHAPE, MLS_E_DTYPE: shape (except the sequence) or dtype differ from the ring's;
 * the byte order may differ. MLS_E_OVERLAP: they share memory with the ring. MLS_E_SIZE:
 * positions exceed 63 bits. The ring is unchanged on failure. */
mls_code mls_kv_ring_append(mls_kv_ring *ring, const mls_kernels *kernels,
                            const mls_tensor *tokens, mls_status *st);

/* Drop the last `count` tokens, which may be all, and zero their slots. The next token
 * takes the position of the first token dropped, unless tokens between it and the sinks
 * were evicted and the trim drops a sink too: then the position of the first sink
 * dropped. MLS_E_CAPACITY: `count` is more than the ring holds; the ring is unchanged. */
mls_code mls_kv_ring_trim(mls_kv_ring *ring, const mls_kernels *kernels, size_t count,
                          mls_status *st);

/* Copy the tokens to `dst` in the order of their positions: the sinks, then the others
 * from oldest to newest. `dst` must have the ring's dtype and shape, but
 * mls_kv_ring_length positions. Cannot fail. */
void mls_kv_ring_copy_ordered(const mls_kv_ring *ring, const mls_kernels *kernels,
                              const mls_tensor *dst);

/* Store the position of each slot's token, or -1 for an empty slot. `out` has room for
 * `capacity` entries. */
void mls_kv_ring_positions(const mls_kv_ring *ring, int64_t *out);

#endif
