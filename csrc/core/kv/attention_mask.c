/* attention_mask: which columns of a mask's row are visible (window, sinks) and which get
 * the fill; checks of its numbers.
 *
 * A row has at most four parts: visible sinks, masked positions too far back, visible
 * positions, and masked future positions. Each part is one run of equal elements, so a
 * row takes four fills and no comparison for each column.
 */
#include "kv/attention_mask.h"

#include "base/size.h"

#include <inttypes.h>

/* Fail with MLS_E_CAPACITY if `number`, the value of the caller's parameter `name`, is
 * negative. */
static mls_code check_sign(const char *name, int64_t number, mls_status *st)
{
    if (number >= 0) {
        return MLS_OK;
    }
    return mls_fail(st, MLS_E_CAPACITY, "%s %" PRId64 " is negative", name, number);
}

/* Check the numbers of a request; `names` are the caller's names for them in messages.
 * The checks follow the order of the caller's arguments. */
mls_code mls_mask_check(const mls_mask_request *request, const mls_mask_names *names,
                        mls_status *st)
{
    const int64_t length = request->seq_length, position = request->position;
    const int64_t first = request->first_row, end = request->end_row;
    mls_code code = check_sign(names->seq_length, length, st);
    if (code == MLS_OK) {
        code = check_sign(names->attention_size, request->attention_size, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    if (position < 0 || position > length) {
        mls_fail(st, MLS_E_CAPACITY, "%s %" PRId64 " is outside 0..%" PRId64 ", the %s",
                 names->position, position, length, names->seq_length);
        mls_status_expected(st, "0..%" PRId64, length);
        return mls_status_got(st, "%" PRId64, position);
    }
    code = check_sign(names->sinks, request->sinks, st);
    if (code == MLS_OK && (first < 0 || end < first || end > length)) {
        mls_fail(st, MLS_E_CAPACITY,
                 "%s (%" PRId64 ", %" PRId64 ") must be a start and a stop in 0..%" PRId64
                 ", the %s",
                 names->rows, first, end, length, names->seq_length);
        mls_status_expected(st, "0 <= start <= stop <= %" PRId64, length);
        return mls_status_got(st, "(%" PRId64 ", %" PRId64 ")", first, end);
    }
    return code;
}

/* Store `element` in columns start .. end - 1 of `row`, a view with one index in every
 * axis but the last. Does nothing if `end` is not above `start`. */
static void fill_columns(const mls_kernels *kernels, const mls_tensor *row, size_t start,
                         size_t end, mls_element element)
{
    if (end > start) {
        const mls_tensor part = mls_tensor_slice(row, row->rank - 1, start, end - start);
        mls_fill(kernels, &part, element, mls_cached());
    }
}

/* Fill one row of `dst` for each token: the row of the token at position p gets 0 in the
 * first `sinks` columns and in columns p - attention_size .. p, and `fill` in all others.
 * p may be beyond the last column; the ranges are then clipped to the columns. */
void mls_mask_rows(const mls_kernels *kernels, const mls_tensor *dst, size_t first_row,
                   size_t attention_size, size_t sinks, mls_element fill)
{
    const mls_element zero = {.size = fill.size};
    const size_t columns = dst->shape[dst->rank - 1];
    for (size_t i = 0; i < dst->shape[dst->rank - 2]; i++) {
        const mls_tensor row = mls_tensor_slice(dst, dst->rank - 2, i, 1);
        const size_t position = first_row + i;
        const size_t earliest = position > attention_size ? position - attention_size : 0;
        const size_t start = mls_size_least(earliest, columns);
        const size_t sinks_end = mls_size_least(sinks, start);
        const size_t end = mls_size_least(position + 1, columns);
        fill_columns(kernels, &row, 0, sinks_end, zero);
        fill_columns(kernels, &row, sinks_end, start, fill);
        fill_columns(kernels, &row, start, end, zero);
        fill_columns(kernels, &row, end, columns, fill);
    }
}
