/* digest: a 128-bit sum of a tensor's bytes that does not depend on how the tensor is cut
 * into parts.
 *
 * Definition, version 1. The bytes are the elements in C order of the global shape,
 * little-endian; packed types (two values in a byte) as they are stored. Byte o is
 * in word w = o / 4, in block b = w / 1024. Lane l, of two, is the sum of
 *
 *     byte * 2^(8 (o mod 4)) * T_l(w mod 1024) * M_l(b)   modulo 2^64
 *
 * with mix = splitmix64 (its constant is added, then its finalizer runs), T_0(j) and
 * T_1(j) the low and the high 32 bits of mix(j), each | 1, and M_l(b) = mix(2^36 + 2 b +
 * l) | 1. So the digests of parts add up to the digest of the tensor, and no
 * bytes have the digest 0. The keys are odd, so a change of up to 8 adjacent bytes of an
 * element always changes a lane.
 *
 * Not cryptographic: who chooses the bytes can choose the digest.
 */
#ifndef MLS_DIGEST_H
#define MLS_DIGEST_H

#include "array/tensor.h"
#include "runtime/cpu_features.h"
#include "runtime/thread_pool.h"

#include <stddef.h>
#include <stdint.h>

enum { MLS_DIGEST_LANES = 2, MLS_DIGEST_BLOCK = 1024 /* words */ };

typedef struct mls_digest {
    uint64_t lanes[MLS_DIGEST_LANES];
} mls_digest;

/* The keys T of the words of a block. */
typedef struct mls_digest_keys {
    uint32_t of_word[MLS_DIGEST_LANES][MLS_DIGEST_BLOCK];
} mls_digest_keys;

/* Fill the keys: 2,048 numbers, a few microseconds. */
void mls_digest_keys_init(mls_digest_keys *keys);

/* How digests are computed: constant during a call, shared by threads. */
typedef struct mls_digester {
    const mls_digest_keys *keys;
    mls_cpu cpu;    /* every instruction set gives the same digests */
    mls_pool *pool; /* threads for large tensors; NULL: none */
} mls_digester;

/* Add to `*sum` the digest of `bytes` bytes that start at byte `offset` of a tensor. */
void mls_digest_bytes(const mls_digester *digester, uint64_t offset, const void *data,
                      size_t bytes, mls_digest *sum);

/* Add to `*sum` the digest of a part of a tensor: the elements at `starts` to `starts` +
 * `part->shape` (not after the end) of a tensor with the lengths `shape`. Any strides and
 * byte order; copies nothing but packs elements that are not adjacent, some at a time.
 * MLS_E_SIZE: the whole has more than 2^64 - 1 bytes. MLS_E_SHAPE: the part exceeds
 * it. */
mls_code mls_digest_part(const mls_digester *digester, const mls_tensor *part,
                         const size_t *shape, const size_t *starts, mls_digest *sum,
                         mls_status *st);

#endif
