/* index_values: values of the text of an index, with a message for each that is wrong.
 *
 * The text holds tables, which are objects with columns.  A column of whole numbers is a
 * string, "0,17,4", and so is one of checksums, eight digits each: to the JSON reader
 * that is one value, however many rows the table has.  Other columns are arrays.
 *
 * All functions that return mls_code return MLS_OK, or MLS_E_FORMAT with key, offset and
 * the value that was got in the status; results are untouched then.
 */
#ifndef MLS_INDEX_VALUES_H
#define MLS_INDEX_VALUES_H

#include "io/json_reader.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A document, borrowed, and where messages are written to. */
typedef struct mls_index_source {
    const mls_json *json;
    mls_text name; /* of the shard that is being read; `data` NULL: none is */
    mls_status *st;
} mls_index_source;

/* A member of an object before it was looked for: its key, a literal; its type; whether
 * the object must have it. */
#define MLS_INDEX_MEMBER(name, kind, must)                                               \
    {.key = (name), .length = sizeof(name) - 1, .needed = (must), .type = (kind)}

/* Fill the status: "shard of 'x': "key" what".  The first takes an offset of the text,
 * the second a value.  Both return MLS_E_FORMAT. */
mls_code mls_index_fail_at(const mls_index_source *in, size_t at, const char *key,
                           const char *what);
mls_code mls_index_fail_value(const mls_index_source *in, mls_json_node node,
                              const char *key, const char *what);

/* Find the members of an object and check their types.  Members that are not in the table
 * are passed over. */
mls_code mls_index_find_members(const mls_index_source *in, mls_json_node object,
                                mls_json_member *table, size_t count);

/* A whole number from `least` to `most`. */
mls_code mls_index_read_number(const mls_index_source *in, const mls_json_member *m,
                               uint64_t least, uint64_t most, uint64_t *out);

/* A string, whose bytes belong to the document. */
mls_code mls_index_read_text(const mls_index_source *in, mls_json_node node,
                             const char *key, mls_text *out);

/* A string that is one of `count` names: its number.  `what` is the message if it is
 * another one. */
mls_code mls_index_read_word(const mls_index_source *in, mls_json_node node,
                             const char *key, const char *(*name_of)(int), int count,
                             const char *what, int *out);

/* A cursor in a column that is a string.  Zeroed: the column was not found. */
typedef struct mls_index_column {
    const char *key;
    size_t offset; /* of `rest` in the text of the document */
    mls_text rest; /* values that were not read yet */
} mls_index_column;

/* A cursor at the first value of a column that was found or not. */
mls_index_column mls_index_open_column(const mls_index_source *in,
                                       const mls_json_member *m);

/* Check that an array, if it was found, has a value for each of `rows` rows; its first
 * one, or MLS_JSON_NONE. */
mls_code mls_index_open_array(const mls_index_source *in, const mls_json_member *m,
                              size_t rows, mls_json_node *out);

/* Fill the status with the value at the cursor, which is wrong; returns MLS_E_FORMAT. */
mls_code mls_index_fail_column(const mls_index_source *in, const mls_index_column *column,
                               const char *what);

/* The next value: a whole number from `least` to `most`; a checksum.  After a failure,
 * also one of mls_index_fail_column, the cursor is of no more use. */
mls_code mls_index_next_number(const mls_index_source *in, mls_index_column *column,
                               uint64_t least, uint64_t most, uint64_t *out);
mls_code mls_index_next_crc(const mls_index_source *in, mls_index_column *column,
                            uint32_t *out);

/* Check that all values of columns were read. */
mls_code mls_index_end_columns(const mls_index_source *in,
                               const mls_index_column *columns, size_t count);

#endif
