/* rows: which rows of a shard are worth storing.
 *
 * A row is what is stored or left out as a whole: some elements that follow each other in
 * the shard's packed order, from 256 bytes to 64 KiB of them.  What is found out of rows
 * is a bit for each: they are set by several threads, and become a layer's runs
 * (shard_layers.h).
 */
#ifndef MLS_ROWS_H
#define MLS_ROWS_H

#include "checkpoint/storage/shard_layers.h"
#include "sharding/layout.h"

#include <stdbool.h>
#include <stddef.h>

/* How one shard is cut into rows.  These are counted from 0, and the last may be shorter.
 */
typedef struct mls_row_cut {
    size_t row;      /* elements of a row */
    size_t elements; /* of the shard, at least 1 */
    size_t item;     /* bytes of an element */
} mls_row_cut;

/* Cut a part into rows: those of its first axis, where they are of a good size; else as
 * many as make 256 bytes, or as few of the axes behind as make 64 KiB at most.  A flat
 * part, or one of a single axis, has rows of 64 elements or more. */
mls_row_cut mls_rows_of(const mls_part *part, size_t item_bytes);

/* How many there are. */
static inline size_t mls_rows_count(const mls_row_cut *rows)
{
    return (rows->elements - 1) / rows->row + 1;
}

/* Bytes that their bits take; row i is bit i % 8 of byte i / 8. */
static inline size_t mls_rows_bits(const mls_row_cut *rows)
{
    return (mls_rows_count(rows) - 1) / 8 + 1;
}

/* Whether all bytes are 0.  A -0.0 has one that is not. */
bool mls_rows_zero(const unsigned char *data, size_t bytes);

/* Set the bits of rows that have a byte that is not 0, of which `data` is one: elements
 * `first` .. `first + count`.  Returns how many bits were not set before.  Threads may
 * work on different elements of one row, and of rows whose bits share a byte. */
size_t mls_rows_mark_filled(const mls_row_cut *rows, unsigned char *bits, size_t first,
                            size_t count, const unsigned char *data);

/* The same of rows in which a byte of `now` is not that of `before`. */
size_t mls_rows_mark_changed(const mls_row_cut *rows, unsigned char *bits, size_t first,
                             size_t count, const unsigned char *now,
                             const unsigned char *before);

/* The runs of all rows whose bit is set, ascending; `out` NULL: only how many. */
size_t mls_rows_runs(const mls_row_cut *rows, const unsigned char *bits, mls_extent *out);

#endif
