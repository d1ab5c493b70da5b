/* rotate_keys: move keys with rotary position embeddings (RoPE) to other positions.
 *
 * RoPE rotates pair i of a key at position p by the angle
 * p * base**(-2i / rotary_dim) / scaling. Rotations add up, so a key moves from position
 * p to p + shift by a rotation with `shift` in place of p.
 *
 * Angles, sines and cosines are computed in double. Products and sums are computed in
 * float for float16, bfloat16 and float32, and in double for float64; the result is
 * rounded to the dtype once.
 *
 * Source: "RoFormer: Enhanced Transformer with Rotary Position Embedding", Su et al.,
 * 2021; `scaling` is the linear position interpolation of Chen et al., 2023.
 */
#ifndef MLS_ROTATE_KEYS_H
#define MLS_ROTATE_KEYS_H

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"

enum {
    MLS_ROTATE_MOST_DIM = 4096 /* a tile on the stack holds at least one position */
};

typedef struct mls_rotation {
    double base, scaling;
    size_t rotary_dim; /* elements of the last axis that are rotated, from the first on */
    bool interleaved;  /* pair i is 2i and 2i + 1; if false, i and i + rotary_dim / 2 */
    int axis;          /* the sequence axis, 0 to rank - 2 */
    const int64_t *shifts; /* borrowed; one for each position, or one for all */
    size_t shift_count;
} mls_rotation;

/* Check the arguments of mls_rotate_keys.
 * MLS_E_SHAPE: not 2 to 8 dimensions, a sequence axis that is the last one, a number of
 * shifts that is neither 1 nor the positions, or a `dst` of another shape. MLS_E_DTYPE:
 * not a float of at least 16 bits, or a `dst` of another dtype. MLS_E_VALUE: base or
 * scaling is not finite and positive, or rotary_dim is odd, below 2, or above the last
 * axis or MLS_ROTATE_MOST_DIM.
 * MLS_E_OVERLAP: `dst` shares memory with `keys` but is not the same view. */
mls_code mls_rotate_keys_check(const mls_tensor *dst, const mls_tensor *keys,
                               const mls_rotation *rotation, mls_status *st);

/* Rotate `keys` into `dst`, which may be the same view. Elements of the last axis from
 * `rotary_dim` on are copied. The arguments must have passed the check. The threads of
 * `pool` (NULL: none) share large keys. Allocates nothing, cannot fail. */
void mls_rotate_keys(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *dst,
                     const mls_tensor *keys, const mls_rotation *rotation);

#endif
