/* change_table: checks the table of a version, row by row: names, shapes, parts, ranges
 * of the streams.
 *
 * A cursor has the numbers of names, lengths and bytes that earlier rows used; each row
 * may only use what is left, so no sum can overflow. */
#include "follow/change_table.h"

#include "base/size.h"

#include <inttypes.h>

/* What earlier rows used. */
typedef struct cursor {
    size_t names, shapes, gaps, values;
} cursor;

static uint64_t number_of(const mls_change_table *table, mls_change_column column,
                          size_t row)
{
    return table->columns[(size_t)column * table->rows + row];
}

/* Fail unless `number` is at most `limit`; `label` says what it counts. */
static mls_code require_at_most(uint64_t number, uint64_t limit, const char *label,
                                mls_status *st)
{
    if (number <= limit) {
        return MLS_OK;
    }
    return mls_fail(st, MLS_E_FORMAT, "%s: %" PRIu64 ", but at most %" PRIu64, label,
                    number, limit);
}

/* Set `*begin` and `*bytes` to the range of `number` items after `*used` of `total`; move
 * `*used` after it. */
static mls_code use_range(uint64_t number, size_t *used, size_t total, const char *label,
                          size_t *begin, size_t *bytes, mls_status *st)
{
    const mls_code code = require_at_most(number, total - *used, label, st);
    if (code == MLS_OK) {
        *begin = *used;
        *bytes = (size_t)number;
        *used += *bytes;
    }
    return code;
}

static mls_code read_name(const mls_change_table *table, size_t number, cursor *used,
                          mls_change_row *row, mls_status *st)
{
    size_t begin, bytes;
    const mls_code code =
        use_range(number_of(table, MLS_CHANGE_NAME_BYTES, number), &used->names,
                  table->names_bytes, "bytes of a name", &begin, &bytes, st);
    if (code != MLS_OK) {
        return code;
    }
    if (!mls_utf8_valid(table->names + begin, bytes)) {
        return mls_fail(st, MLS_E_FORMAT, "the name of row %zu is not UTF-8", number);
    }
    row->name = (mls_str){table->names + begin, bytes};
    return MLS_OK;
}

/* Read dtype, shape and number of elements of the part. */
static mls_code read_part(const mls_change_table *table, size_t number, cursor *used,
                          mls_change_row *row, mls_status *st)
{
    const uint64_t dtype = number_of(table, MLS_CHANGE_DTYPE, number),
                   layout = number_of(table, MLS_CHANGE_LAYOUT, number),
                   part_number = number_of(table, MLS_CHANGE_PART, number);
    size_t shape[MLS_LAYOUT_RANK], begin, rank, bytes;
    mls_part part;
    if (dtype >= table->dtype_count || layout >= table->layout_count) {
        return mls_fail(st, MLS_E_FORMAT,
                        "dtype %" PRIu64 " of %zu and layout %" PRIu64 " of %zu", dtype,
                        table->dtype_count, layout, table->layout_count);
    }
    const uint64_t dimensions = number_of(table, MLS_CHANGE_RANK, number);
    if (require_at_most(dimensions, MLS_LAYOUT_RANK, "dimensions", st) != MLS_OK ||
        use_range(dimensions, &used->shapes, table->shapes_count, "lengths of a shape",
                  &begin, &rank, st) != MLS_OK ||
        require_at_most(part_number, SIZE_MAX, "number of a part", st) != MLS_OK) {
        return st->code;
    }
    row->shape = table->shapes + begin;
    for (size_t axis = 0; axis < rank; axis++) {
        if (require_at_most(row->shape[axis], PTRDIFF_MAX, "length of an axis", st) !=
            MLS_OK) {
            return st->code;
        }
        shape[axis] = (size_t)row->shape[axis];
    }
    row->rank = (int)rank;
    row->dtype = table->dtypes[dtype];
    if (mls_layout_part(&table->layouts[layout], row->rank, shape, (size_t)part_number,
                        &part, st) != MLS_OK) {
        st->code = MLS_E_FORMAT;
        return st->code;
    }
    row->elements = mls_part_count(&part);
    if (!mls_size_mul(row->elements, mls_dtype_of(row->dtype)->item_bytes, &bytes)) {
        return mls_fail(st, MLS_E_FORMAT, "an array of %zu elements exceeds the memory",
                        row->elements);
    }
    return MLS_OK;
}

static mls_code read_streams(const mls_change_table *table, size_t number, cursor *used,
                             mls_change_row *row, mls_status *st)
{
    const uint64_t unit = number_of(table, MLS_CHANGE_UNIT, number),
                   crc32c = number_of(table, MLS_CHANGE_CRC32C, number);
    const size_t item = mls_dtype_of(row->dtype)->item_bytes;
    if (require_at_most(crc32c, UINT32_MAX, "crc32c", st) != MLS_OK ||
        require_at_most(unit, 2, "bytes of a unit of the gaps", st) != MLS_OK ||
        use_range(number_of(table, MLS_CHANGE_GAPS_BYTES, number), &used->gaps,
                  table->gaps_bytes, "bytes of gaps", &row->gaps_at, &row->gaps_bytes,
                  st) != MLS_OK ||
        use_range(number_of(table, MLS_CHANGE_VALUES_BYTES, number), &used->values,
                  table->values_bytes, "bytes of values", &row->values_at,
                  &row->values_bytes, st) != MLS_OK) {
        return st->code;
    }
    row->unit = (size_t)unit;
    if (unit == 0 && (row->gaps_bytes > 0 || row->values_bytes > 0)) {
        return mls_fail(st, MLS_E_FORMAT,
                        "%zu bytes of gaps and %zu of values without a unit",
                        row->gaps_bytes, row->values_bytes);
    }
    if (unit > 0 && (row->gaps_bytes % row->unit != 0 || row->values_bytes % item != 0)) {
        return mls_fail(st, MLS_E_FORMAT,
                        "%zu bytes of gaps in units of %zu and %zu of values in items "
                        "of %zu: the delta is cut",
                        row->gaps_bytes, row->unit, row->values_bytes, item);
    }
    return MLS_OK;
}

mls_code mls_change_table_read(const mls_change_table *table, mls_change_row *rows,
                               mls_status *st)
{
    cursor used = {0};
    for (size_t number = 0; number < table->rows; number++) {
        mls_change_row *row = &rows[number];
        *row = (mls_change_row){.rank = 0};
        if (read_name(table, number, &used, row, st) != MLS_OK) {
            return st->code;
        }
        if (read_part(table, number, &used, row, st) != MLS_OK ||
            read_streams(table, number, &used, row, st) != MLS_OK) {
            return mls_status_name(st, row->name.data, row->name.length);
        }
    }
    if (used.names != table->names_bytes || used.shapes != table->shapes_count ||
        used.gaps != table->gaps_bytes || used.values != table->values_bytes) {
        return mls_fail(st, MLS_E_FORMAT,
                        "%zu rows use %zu of %zu bytes of names, %zu of %zu lengths, %zu "
                        "of %zu bytes of gaps and %zu of %zu of values",
                        table->rows, used.names, table->names_bytes, used.shapes,
                        table->shapes_count, used.gaps, table->gaps_bytes, used.values,
                        table->values_bytes);
    }
    return MLS_OK;
}
