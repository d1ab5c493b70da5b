/* index_read_values: members and columns of an index text: how they are described, and
 * how index_read.c reads them.
 *
 * The text contains tables, which are objects of columns. A column of whole numbers is
 * one string, "0,17,4". A column of checksums is also one string, with eight digits for
 * each checksum. So the JSON reader sees one value, regardless of the number of rows.
 * Other columns are arrays.
 *
 * All functions that return mls_code return MLS_OK, or MLS_E_FORMAT with key, offset and
 * the invalid value in the status. Results are untouched on failure, except that of
 * mls_index_read_word. */
#ifndef MLS_INDEX_READ_VALUES_H
#define MLS_INDEX_READ_VALUES_H

#include "base/status.h"
#include "base/string_view.h"
#include "io/json_reader.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A borrowed document, and the status that receives errors. */
typedef struct mls_index_source {
    const mls_json *json;
    mls_str name; /* the current shard; `data` is NULL if there is none */
    mls_status *st;
} mls_index_source;

/* An entry for mls_index_find_members: key (a string literal), type, and whether the
 * member is required. */
#define MLS_INDEX_MEMBER(name, kind, must)                                               \
    {.key = (name), .length = sizeof(name) - 1, .needed = (must), .type = (kind)}

/* Fill the status with "shard of 'x': "key" problem" for the value `node` of the member
 * `key`, with its offset and text. Returns MLS_E_FORMAT. */
mls_code mls_index_fail_value(const mls_index_source *in, mls_json_node node,
                              const char *key, const char *problem);

/* Find the `count` members of `table` in an object, set their nodes, and check their
 * types. Members that are not in the table are ignored; an absent optional member gets
 * MLS_JSON_NONE. */
mls_code mls_index_find_members(const mls_index_source *in, mls_json_node object,
                                mls_json_member *table, size_t count);

/* Read the member `m` as a whole number from `least` to `most`, both included. */
mls_code mls_index_read_number(const mls_index_source *in, const mls_json_member *m,
                               uint64_t least, uint64_t most, uint64_t *out);

/* Read the string `node`, the value of the member `key`. Its bytes belong to the
 * document. */
mls_code mls_index_read_text(const mls_index_source *in, mls_json_node node,
                             const char *key, mls_str *out);

/* Read a string that must be one of the names `name_of(0)` .. `name_of(count - 1)`;
 * `*out` receives its number, and is undefined after a failure. `problem` is the message
 * for any other string. */
mls_code mls_index_read_word(const mls_index_source *in, mls_json_node node,
                             const char *key, const char *(*name_of)(int), int count,
                             const char *problem, int *out);

/* A cursor in a string column. Zeroed except for the key: the column is absent. */
typedef struct mls_index_column {
    const char *key;
    size_t offset; /* offset of `rest` in the text of the document */
    mls_str rest;  /* values that are not read yet */
} mls_index_column;

/* Return a cursor at the first value of the column that mls_index_find_members found in
 * `m`, which may be absent. The cursor's text stays in the document. */
mls_index_column mls_index_open_column(const mls_index_source *in,
                                       const mls_json_member *m);

/* Check that an array, if present, has `rows` values. `*out` receives its first value, or
 * MLS_JSON_NONE if it is absent or has no rows. */
mls_code mls_index_open_array(const mls_index_source *in, const mls_json_member *m,
                              size_t rows, mls_json_node *out);

/* Report the value at the cursor as invalid, for the reason `problem`. Returns
 * MLS_E_FORMAT. */
mls_code mls_index_fail_column(const mls_index_source *in, const mls_index_column *column,
                               const char *problem);

/* Read the next value of a column and move the cursor behind it: a whole number from
 * `least` to `most`, both included, or a checksum of 8 hexadecimal digits. After any
 * failure, including mls_index_fail_column, the cursor must not be used again. */
mls_code mls_index_next_number(const mls_index_source *in, mls_index_column *column,
                               uint64_t least, uint64_t most, uint64_t *out);
mls_code mls_index_next_crc(const mls_index_source *in, mls_index_column *column,
                            uint32_t *out);

/* Check that all values of `count` columns are read: a column with further values has
 * more of them than its table has rows. */
mls_code mls_index_end_columns(const mls_index_source *in,
                               const mls_index_column *columns, size_t count);

#endif
