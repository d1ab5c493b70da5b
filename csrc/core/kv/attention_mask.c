/* attention_mask: fill the rows of an attention mask.
 *
 * A row has at most three parts: masked positions too far back, visible positions, and
 * masked future positions. Each part is one run of equal elements, so a row takes three
 * fills and no comparison for each column.
 */
#include "kv/attention_mask.h"

#include <inttypes.h>

/* The checks follow the order of the caller's arguments. */
mls_code mls_mask_check(int64_t seq_length, int64_t attention_size, int64_t position,
                        const mls_mask_names *names, mls_status *st)
{
    if (seq_length < 0) {
        return mls_fail(st, MLS_E_CAPACITY, "%s %" PRId64 " is negative",
                        names->seq_length, seq_length);
    }
    if (attention_size < 0) {
        return mls_fail(st, MLS_E_CAPACITY, "%s %" PRId64 " is negative",
                        names->attention_size, attention_size);
    }
    if (position < 0 || position > seq_length) {
        mls_fail(st, MLS_E_CAPACITY, "%s %" PRId64 " is outside 0..%" PRId64 ", the %s",
                 names->position, position, seq_length, names->seq_length);
        mls_status_expected(st, "0..%" PRId64, seq_length);
        mls_status_got(st, "%" PRId64, position);
        return MLS_E_CAPACITY;
    }
    return MLS_OK;
}

/* Fill columns start .. end-1 of a row. */
static void fill_columns(const mls_kernels *kernels, const mls_tensor *row, size_t start,
                         size_t end, mls_element element)
{
    if (end > start) {
        const mls_tensor part = mls_tensor_slice(row, row->rank - 1, start, end - start);
        mls_fill(kernels, &part, element, mls_cached());
    }
}

/* A row may be beyond the last column; its parts are then clipped to the columns. */
void mls_mask_rows(const mls_kernels *kernels, const mls_tensor *dst, size_t first_row,
                   size_t attention_size, mls_element fill)
{
    const mls_element zero = {.size = fill.size};
    const size_t columns = dst->shape[dst->rank - 1];
    for (size_t i = 0; i < dst->shape[dst->rank - 2]; i++) {
        const mls_tensor row = mls_tensor_slice(dst, dst->rank - 2, i, 1);
        const size_t position = first_row + i;
        const size_t earliest = position > attention_size ? position - attention_size : 0;
        const size_t start = earliest < columns ? earliest : columns;
        const size_t end = position < columns ? position + 1 : columns;
        fill_columns(kernels, &row, 0, start, fill);
        fill_columns(kernels, &row, start, end, zero);
        fill_columns(kernels, &row, end, columns, fill);
    }
}
