/* rows: bits for rows, and runs from bits.
 *
 * A row that holds something mostly shows it in its first bytes, so looking for zeros
 * costs a dense state one line of the cache for each row, and an empty one a single pass
 * over its memory.
 */
#include "checkpoint/storage/row_bitmap.h"

#include <stdint.h>
#include <string.h>

enum {
    ROW_LEAST = 256,     /* bytes: so lists of rows stay short beside what they list */
    ROW_MOST = 64 << 10, /* and what changes a little is not stored as a whole */
    FLAT_ROW = 64,       /* elements, where there are no rows */
    STRIDE = 64          /* bytes that are looked at in one go */
};

/* Rows of one shard are the same whenever it is saved: so what one save stores of it lies
 * in rows of the next one, and layers hide each other as a whole. */
mls_row_cut mls_rows_of(const mls_part *part, size_t item_bytes)
{
    mls_row_cut rows = {
        .row = FLAT_ROW, .elements = mls_part_count(part), .item = item_bytes};
    if (!part->flat && part->rank >= 2) {
        int axis = part->rank - 1;
        rows.row = part->length[axis];
        /* outwards as long as they are small enough: products are below those of a part
         */
        while (axis > 1 && rows.row * part->length[axis - 1] * item_bytes <= ROW_MOST) {
            rows.row *= part->length[--axis];
        }
    }
    if (rows.row * item_bytes < ROW_LEAST) {
        rows.row *= (ROW_LEAST - 1) / (rows.row * item_bytes) + 1;
    } else if (rows.row * item_bytes > ROW_MOST) {
        rows.row = ROW_MOST / item_bytes;
    }
    return rows;
}

/* Eight words at a time, without a branch among them: the compiler takes registers that
 * are as wide as there are.  What is not zero ends it at the next multiple of a line. */
bool mls_rows_zero(const unsigned char *data, size_t bytes)
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

/* Bits of one byte belong to different threads where tasks meet, so it is one step. */
static size_t mark(unsigned char *bits, size_t row)
{
    const unsigned char bit = (unsigned char)(1U << row % 8);
    return (__atomic_fetch_or(&bits[row / 8], bit, __ATOMIC_RELAXED) & bit) == 0;
}

/* Row by row, the first and the last of which may be in part somebody else's. */
size_t mls_rows_mark_filled(const mls_row_cut *rows, unsigned char *bits, size_t first,
                            size_t count, const unsigned char *data)
{
    size_t marked = 0;
    while (count > 0) {
        const size_t left = rows->row - first % rows->row;
        const size_t n = count < left ? count : left;
        if (!mls_rows_zero(data, n * rows->item)) {
            marked += mark(bits, first / rows->row);
        }
        first += n;
        count -= n;
        data += n * rows->item;
    }
    return marked;
}

/* First as a whole, then row by row where there is a difference to be found. */
size_t mls_rows_mark_changed(const mls_row_cut *rows, unsigned char *bits, size_t first,
                             size_t count, const unsigned char *now,
                             const unsigned char *before)
{
    size_t marked = 0;
    if (memcmp(now, before, count * rows->item) == 0) {
        return 0; /* the most of what is compared */
    }
    while (count > 0) {
        const size_t left = rows->row - first % rows->row;
        const size_t n = count < left ? count : left;
        if (memcmp(now, before, n * rows->item) != 0) {
            marked += mark(bits, first / rows->row);
        }
        first += n;
        count -= n;
        now += n * rows->item;
        before += n * rows->item;
    }
    return marked;
}

/* The first row from `row` on whose bit is `set`, or `end`: eight at a time where none of
 * them is. */
static size_t next_row(const unsigned char *bits, size_t row, size_t end, bool set)
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

/* Rows that follow each other make one run: what is between two runs is one row at least,
 * which costs more bytes than naming it. */
size_t mls_rows_runs(const mls_row_cut *rows, const unsigned char *bits, mls_extent *out)
{
    const size_t end = mls_rows_count(rows);
    size_t count = 0, at = 0;
    for (size_t row = next_row(bits, 0, end, true); row < end;) {
        /* up to here all are set; of the last row there may be less than of others */
        const size_t stop = next_row(bits, row, end, false);
        const size_t begin = row * rows->row;
        const size_t length = (stop == end ? rows->elements : stop * rows->row) -
                              begin; /* the last is short */
        if (out != NULL) {
            out[count] = (mls_extent){.begin = begin, .count = length, .at = at};
        }
        at += length;
        count++;
        row = next_row(bits, stop, end, true);
    }
    return count;
}
