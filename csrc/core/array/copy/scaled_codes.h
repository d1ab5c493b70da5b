/* scaled_codes: quantized weights: float8, int8 or 4-bit codes with a scale for each
 * block of a matrix (kv_quantize.h: of caches).
 *
 * value = code * scale, computed in float and rounded once to the dtype of the values, to
 * nearest, ties to even. Bytes have the formats of float_convert.h; MLS_F4 is E2M1 of the
 * OCP Microscaling Formats Specification 1.0, with the first of two codes in the lower
 * half of a byte.
 */
#ifndef MLS_SCALED_CODES_H
#define MLS_SCALED_CODES_H

#include "array/copy/copy.h"
#include "runtime/thread_pool.h"

/* The codes and scales of some columns of some rows of matrices.
 * The memory is borrowed. */
typedef struct mls_scaled_codes {
    mls_dtype dtype;  /* an 8-bit float, MLS_I8 or MLS_F4 */
    mls_tensor codes; /* items of one byte: matrices, rows, bytes of a row without gaps */
    mls_tensor
        scales;  /* float32: matrices, rows and columns of blocks; data NULL: none */
    size_t skip; /* codes of each row before the first value */
    size_t block_rows, block_columns; /* values of a block; at least 1 */
    size_t first_row, first_column;   /* of the values, in the matrix of the scales */
} mls_scaled_codes;

/* Check that the views belong together; mls_scaled_codes_decode requires it.
 * MLS_E_DTYPE: the values are not floats, the codes have no supported dtype or items of
 * more than a byte, or scales are not float32. MLS_E_SHAPE: a view has not 3 axes, or not
 * the elements for all values; or neither rows nor columns of the values are without gaps
 * and in the byte order of this machine. */
mls_code mls_scaled_codes_check(const mls_tensor *values, const mls_scaled_codes *codes,
                                mls_status *st);

/* Write code * scale of each value to `values`, whose axes are matrices, rows and
 * columns. `values` and `codes` must have passed the check and must not overlap. The
 * threads of `pool` (NULL: none) share a large result. Allocates nothing, cannot fail. */
void mls_scaled_codes_decode(const mls_kernels *kernels, mls_pool *pool,
                             const mls_tensor *values, const mls_scaled_codes *codes);

#endif
