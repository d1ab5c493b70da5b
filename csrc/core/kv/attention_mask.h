/* attention_mask: the positions that a token may attend to, as numbers to add to
 * attention scores.
 *
 * Row `i` is 0 at columns max(0, i - attention_size) .. i and `fill` elsewhere: a token
 * attends to itself and to `attention_size` earlier tokens.
 */
#ifndef MLS_ATTENTION_MASK_H
#define MLS_ATTENTION_MASK_H

#include "array/copy/copy.h"

/* The caller's parameter names, for messages. */
typedef struct mls_mask_names {
    const char *seq_length, *attention_size, *position;
} mls_mask_names;

/* Check the numbers of a mask request.
 * MLS_E_CAPACITY: a negative length or size, or a position outside 0..seq_length. */
mls_code mls_mask_check(int64_t seq_length, int64_t attention_size, int64_t position,
                        const mls_mask_names *names, mls_status *st);

/* Fill rows first_row, first_row + 1, ... of a mask, one for each index of the second
 * last axis of `dst`. The last axis is the sequence; all other axes must have length 1.
 * `fill` must be encoded for `dst`, which must have a float dtype. */
void mls_mask_rows(const mls_kernels *kernels, const mls_tensor *dst, size_t first_row,
                   size_t attention_size, mls_element fill);

#endif
