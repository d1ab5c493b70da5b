/* attention_mask: the positions that a token may attend to, as numbers to add to
 * attention scores.
 *
 * Row `i` is 0 at columns max(0, i - attention_size) .. i, and at the first `sinks`
 * columns up to i. It is `fill` elsewhere: a token attends to itself, to
 * `attention_size` earlier tokens and to the sinks.
 */
#ifndef MLS_ATTENTION_MASK_H
#define MLS_ATTENTION_MASK_H

#include "array/copy/copy.h"

/* The caller's parameter names, for messages. */
typedef struct mls_mask_names {
    const char *seq_length, *attention_size, *sinks, *position, *rows;
} mls_mask_names;

/* The numbers of a mask. `position`, of the current token, is only checked: the caller
 * chooses the rows. */
typedef struct mls_mask_request {
    int64_t seq_length, attention_size, sinks, position;
    int64_t first_row, end_row; /* the rows to write */
} mls_mask_request;

/* Check the numbers of a request.
 * MLS_E_CAPACITY: a negative number, a position outside 0..seq_length, or rows that are
 * not in 0..seq_length or end before their first one. */
mls_code mls_mask_check(const mls_mask_request *request, const mls_mask_names *names,
                        mls_status *st);

/* Fill rows first_row, first_row + 1, ... of a mask, one for each index of the second
 * last axis of `dst`. The last axis is the sequence; all other axes must have length 1.
 * `fill` must be encoded for `dst`, which must have a float dtype. */
void mls_mask_rows(const mls_kernels *kernels, const mls_tensor *dst, size_t first_row,
                   size_t attention_size, size_t sinks, mls_element fill);

#endif
