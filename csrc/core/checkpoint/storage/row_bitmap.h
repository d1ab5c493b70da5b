/* row_bitmap: one bit for each row of a shard: whether a save needs to store the row.
 *
 * A row is the unit that is stored or omitted: consecutive elements in the shard's packed
 * order, 256 bytes to 64 KiB long. The bitmap has one bit for each row. Several threads
 * may set bits. The result becomes the row ranges of a layer (shard_layers.h). */
#ifndef MLS_ROW_BITMAP_H
#define MLS_ROW_BITMAP_H

#include "checkpoint/storage/shard_layers.h"
#include "sharding/layout.h"

#include <stdbool.h>
#include <stddef.h>

/* How one shard is divided into rows. Rows are numbered from 0, and the last row may be
 * shorter. */
typedef struct mls_row_cut {
    size_t row;      /* elements of a row */
    size_t elements; /* elements of the shard, at least 1 */
    size_t item;     /* bytes of an element */
} mls_row_cut;

/* Divide a part into rows. `item_bytes` is the size of an element. A row spans as many of
 * the last axes as fit into 64 KiB, never the first axis. Shorter rows are combined until
 * they have 256 bytes; longer ones are split at 64 KiB. A flat part, or a part with one
 * axis, has rows of 64 or more elements. */
mls_row_cut mls_rows_of(const mls_part *part, size_t item_bytes);

/* Number of rows. */
static inline size_t mls_rows_count(const mls_row_cut *rows)
{
    return (rows->elements - 1) / rows->row + 1;
}

/* Bytes of the bitmap. Row i is bit i % 8 of byte i / 8. */
static inline size_t mls_rows_bitmap_bytes(const mls_row_cut *rows)
{
    return (mls_rows_count(rows) - 1) / 8 + 1;
}

/* Return whether all `bytes` bytes of `data` are 0. A -0.0 has a non-zero byte. */
bool mls_rows_are_zero(const unsigned char *data, size_t bytes);

/* Set the bit of each row that has a non-zero byte in `data`, which contains elements
 * `first` .. `first + count`. Returns the number of newly set bits. Several threads may
 * process different elements of one row, and rows whose bits share a byte. */
size_t mls_rows_mark_filled(const mls_row_cut *rows, unsigned char *bits, size_t first,
                            size_t count, const unsigned char *data);

/* The same for rows that differ between `now` and `before`, which both contain elements
 * `first` .. `first + count`. */
size_t mls_rows_mark_changed(const mls_row_cut *rows, unsigned char *bits, size_t first,
                             size_t count, const unsigned char *now,
                             const unsigned char *before);

/* List the ranges of rows whose bits are set, ascending, as elements of the shard;
 * returns their number. If `out` is NULL they are only counted. */
size_t mls_rows_list_ranges(const mls_row_cut *rows, const unsigned char *bits,
                            mls_row_range *out);

#endif
