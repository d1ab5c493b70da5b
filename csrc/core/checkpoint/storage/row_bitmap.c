/* row_bitmap: divides a shard into rows, and marks those that are not zero or that
 * changed.
 *
 * A non-zero row usually has a non-zero byte near its start. So the scan costs one cache
 * line for each row of a dense state, and one pass over the memory of an empty one. */
#include "checkpoint/storage/row_bitmap.h"

#include <stdint.h>
#include <string.h>

enum {
    ROW_LEAST = 256,     /* bytes; keeps lists of rows short compared with the rows */
    ROW_MOST = 64 << 10, /* bytes; a small change stores little unchanged data */
    FLAT_ROW = 64,       /* elements of a row for parts without rows */
    STRIDE = 64          /* bytes compared at a time */
};

/* Divide a part into rows of at most 64 KiB; elements have `item_bytes` bytes. The
 * division depends only on shape and dtype, so every save of a shard uses the same rows,
 * and a newer layer hides rows of older layers completely. */
mls_row_cut mls_rows_of(const mls_part *part, size_t item_bytes)
{
    mls_row_cut rows = {
        .row = FLAT_ROW, .elements = mls_part_count(part), .item = item_bytes};
    if (!part->flat && part->rank >= 2) {
        int axis = part->rank - 1;
        rows.row = part->length[axis];
        /* cannot overflow: the products divide the size of the part */
        /* axis 0 stays outside: a row is at most one index of it */
        while (axis > 1 && rows.row * part->length[axis - 1] * item_bytes <= ROW_MOST) {
            rows.row *= part->length[--axis];
        }
    }
    if (rows.row * item_bytes < ROW_LEAST) {
        /* combine short rows: round up to ROW_LEAST */
        rows.row *= (ROW_LEAST - 1) / (rows.row * item_bytes) + 1;
    } else if (rows.row * item_bytes > ROW_MOST) {
        rows.row = ROW_MOST / item_bytes;
    }
    return rows;
}

/* Return whether all bytes are zero. Combines STRIDE bytes without a branch, so that the
 * compiler can use the widest registers, and stops behind the first STRIDE bytes that are
 * not all zero. */
bool mls_rows_are_zero(const unsigned char *data, size_t bytes)
{
    for (; bytes >= STRIDE; data += STRIDE, bytes -= STRIDE) {
        uint64_t words[STRIDE / sizeof(uint64_t)], any = 0;
        memcpy(words, data, STRIDE);
        for (size_t i = 0; i < STRIDE / sizeof *words; i++) {
            any |= words[i];
        }
        if (any != 0) {
            return false;
        }
    }
    unsigned char any = 0;
    for (size_t i = 0; i < bytes; i++) {
        any |= data[i];
    }
    return any == 0;
}

/* Set the bit of a row; returns 1 if it was not set before, else 0. Atomic, because at
 * task boundaries threads set different bits of the same byte. */
static size_t mark_row(unsigned char *bits, size_t row)
{
    const unsigned char bit = (unsigned char)(1U << row % 8);
    return (__atomic_fetch_or(&bits[row / 8], bit, __ATOMIC_RELAXED) & bit) == 0;
}

/* Set the bit of each row of `now` that differs from `before`, or from zeros if that is
 * NULL, and return the number of newly set bits. Both have elements `first` .. `first +
 * count` of the shard. The first and last row may be incomplete here: other threads may
 * process the rest of them. */
static size_t mark_rows(const mls_row_cut *rows, unsigned char *bits, size_t first,
                        size_t count, const unsigned char *now,
                        const unsigned char *before)
{
    size_t marked = 0, at = 0; /* `at`: bytes done */
    while (count > 0) {
        const size_t left = rows->row - first % rows->row;
        const size_t step = count < left ? count : left, bytes = step * rows->item;
        const bool same = before == NULL ? mls_rows_are_zero(now + at, bytes)
                                         : memcmp(now + at, before + at, bytes) == 0;
        marked += same ? 0 : mark_row(bits, first / rows->row);
        first += step;
        count -= step;
        at += bytes;
    }
    return marked;
}

/* Set the bit of each row that has a non-zero byte in `data`, and return the number of
 * newly set bits. */
size_t mls_rows_mark_filled(const mls_row_cut *rows, unsigned char *bits, size_t first,
                            size_t count, const unsigned char *data)
{
    return mark_rows(rows, bits, first, count, data, NULL);
}

/* Set the bit of each row that differs between `now` and `before`, and return the number
 * of newly set bits. The whole range is compared first, then row by row only if it
 * differs, which is rare. */
size_t mls_rows_mark_changed(const mls_row_cut *rows, unsigned char *bits, size_t first,
                             size_t count, const unsigned char *now,
                             const unsigned char *before)
{
    return memcmp(now, before, count * rows->item) == 0
               ? 0
               : mark_rows(rows, bits, first, count, now, before);
}

/* Return the first row in `row` .. `end` whose bit in `bits` equals `set`, or `end`.
 * Skips eight rows at a time. */
static size_t find_row(const unsigned char *bits, size_t row, size_t end, bool set)
{
    const unsigned char none = set ? 0 : UINT8_MAX;
    while (row < end) {
        if (row % 8 == 0 && bits[row / 8] == none) {
            row += 8;
        } else if (((bits[row / 8] >> row % 8 & 1) != 0) == set) {
            return row;
        } else {
            row++;
        }
    }
    return end;
}

/* List the ranges of rows whose bits are set, ascending, and return their number; `out`
 * NULL only counts. Adjacent rows form one range. `at` of a range counts the elements of
 * the ranges before it. */
size_t mls_rows_list_ranges(const mls_row_cut *rows, const unsigned char *bits,
                            mls_row_range *out)
{
    const size_t end = mls_rows_count(rows);
    size_t count = 0, at = 0;
    for (size_t row = find_row(bits, 0, end, true); row < end;) {
        /* rows `row` .. `stop` are set */
        const size_t stop = find_row(bits, row, end, false);
        const size_t begin = row * rows->row;
        const size_t length = (stop == end ? rows->elements : stop * rows->row) - begin;
        if (out != NULL) {
            out[count] = (mls_row_range){.begin = begin, .count = length, .at = at};
        }
        at += length;
        count++;
        row = find_row(bits, stop, end, true);
    }
    return count;
}
