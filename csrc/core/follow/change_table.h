/* change_table: the table of a version's changes, one row for each part of a tensor.
 *
 * The table is stored by columns and untrusted: mls_change_table_read checks it and
 * returns the rows. Names, gaps and values of all rows are concatenated, and a row has
 * the number of its bytes, so ranges cannot overlap. docs/follow_format.md specifies
 * the bytes for other programs.
 */
#ifndef MLS_CHANGE_TABLE_H
#define MLS_CHANGE_TABLE_H

#include "array/dtype.h"
#include "base/status.h"
#include "base/string_view.h"
#include "sharding/layout.h"

#include <stddef.h>
#include <stdint.h>

/* The columns, in the order of the file. */
typedef enum mls_change_column {
    MLS_CHANGE_NAME_BYTES,
    MLS_CHANGE_DTYPE,  /* index in `dtypes` */
    MLS_CHANGE_RANK,   /* dimensions of the whole tensor */
    MLS_CHANGE_LAYOUT, /* index in `layouts` */
    MLS_CHANGE_PART,   /* number of the part in the layout */
    MLS_CHANGE_CRC32C, /* of the part's elements */
    MLS_CHANGE_UNIT,   /* bytes of a unit of the gaps, 1 or 2; 0: the row has no delta */
    MLS_CHANGE_GAPS_BYTES,
    MLS_CHANGE_VALUES_BYTES,
    MLS_CHANGE_COLUMNS /* their number */
} mls_change_column;

/* Borrows all memory. */
typedef struct mls_change_table {
    size_t rows;
    const uint64_t *columns; /* MLS_CHANGE_COLUMNS times `rows` numbers */
    const mls_dtype *dtypes;
    size_t dtype_count;
    const mls_layout *layouts; /* valid ones */
    size_t layout_count;
    const char *names;
    size_t names_bytes;
    const uint64_t *shapes; /* the lengths of all tensors, one after another */
    size_t shapes_count;
    size_t gaps_bytes, values_bytes; /* of the concatenated streams */
} mls_change_table;

/* A row; the offsets are within the table's names, shapes and streams. */
typedef struct mls_change_row {
    mls_str name;
    mls_dtype dtype;
    int rank;
    const uint64_t *shape; /* of the whole tensor; each length fits size_t */
    size_t elements;       /* of the part */
    size_t unit;           /* 0: no delta */
    size_t gaps_at, gaps_bytes;
    size_t values_at, values_bytes;
} mls_change_row;

/* Check a table, and set `rows`, which has room for `table->rows` of them. The content of
 * the gaps is left to mls_delta_check, and equal names to the caller. On failure `rows`
 * are undefined.
 * MLS_E_FORMAT: a number is out of range, a name is not UTF-8, a part does not exist, a
 * stream has a broken item, or the rows use more or fewer bytes than the table has. The
 * status has the name of the tensor, if it is known. */
mls_code mls_change_table_read(const mls_change_table *table, mls_change_row *rows,
                               mls_status *st);

#endif
