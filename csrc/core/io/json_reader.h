/* json_reader: a reader for small JSON documents from untrusted files.
 *
 * The whole document is checked before the caller sees any part of it: RFC 8259 grammar,
 * UTF-8, no duplicate keys, no lone surrogates, limits on length, depth and node count.
 * Numbers are kept as text; the accessors convert them.
 */
#ifndef MLS_JSON_READER_H
#define MLS_JSON_READER_H

#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mls_json mls_json;

typedef enum mls_json_type {
    MLS_JSON_NULL,
    MLS_JSON_FALSE,
    MLS_JSON_TRUE,
    MLS_JSON_NUMBER,
    MLS_JSON_STRING,
    MLS_JSON_ARRAY,
    MLS_JSON_OBJECT
} mls_json_type;

typedef struct mls_json_limits {
    size_t depth; /* nesting of arrays and objects, at most */
    size_t nodes; /* number of values, at most */
} mls_json_limits;

/* A value in a document; the root is node 0. */
typedef uint32_t mls_json_node;
#define MLS_JSON_NONE UINT32_MAX

/* Parse `length` bytes of `text`, which need not outlive the call, and set `*out` to the
 * document. The caller frees it with mls_json_free. Memory: a copy of the text and 20 to
 * 30 bytes for each value. Time: n log n at worst, for any text. `*out` is untouched on
 * failure.
 * MLS_E_FORMAT: not JSON, a duplicate key, a limit exceeded, or more than 512 MiB. The
 * status has the byte offset from the start of `text`; the message does not repeat it,
 * because callers add the text's position in the file. MLS_E_MEMORY. */
mls_code mls_json_parse(const char *text, size_t length, mls_json_limits limits,
                        mls_json **out, mls_status *st);

void mls_json_free(mls_json *doc); /* accepts NULL */

/* Free all memory except the text. Strings obtained before stay valid. Afterwards only
 * mls_json_free may be called. */
void mls_json_forget(mls_json *doc);

/* Return the type of a value, which must not be MLS_JSON_NONE. */
mls_json_type mls_json_type_of(const mls_json *doc, mls_json_node node);

/* Return the byte offset of a value in the parsed text (for a member, of its value, not
 * its key), for error messages. */
size_t mls_json_offset(const mls_json *doc, mls_json_node node);

/* Iterate over the members of an object or array in file order: mls_json_first and
 * mls_json_next return the first and the next member, or MLS_JSON_NONE; mls_json_size
 * returns their number, 0 for any other value. */
mls_json_node mls_json_first(const mls_json *doc, mls_json_node parent);
mls_json_node mls_json_next(const mls_json *doc, mls_json_node node);
size_t mls_json_size(const mls_json *doc, mls_json_node parent);

/* Return the member of `object` with this key, or MLS_JSON_NONE, also if `object` is not
 * an object. The search is linear: iterate over objects with many members instead. */
mls_json_node mls_json_find(const mls_json *doc, mls_json_node object, const char *key);

/* A member that an object may have, for mls_json_members. */
typedef struct mls_json_member {
    const char *key; /* without NUL characters; `length` is its length in bytes */
    size_t length;
    mls_json_type type; /* required type */
    bool needed;
    mls_json_node node; /* the member found, or MLS_JSON_NONE */
} mls_json_member;

/* Set the node of each of the `count` entries of `table` to the member of `object` with
 * its key, in one pass; other members are ignored. Fastest if members occur in the order
 * of the table. Returns the index of the first entry that is needed and missing, or has
 * another type; `count` if all are good. */
size_t mls_json_members(const mls_json *doc, mls_json_node object, mls_json_member *table,
                        size_t count);

/* Return the key of an object's member (mls_json_key), or the text of a string or number
 * (mls_json_text). Borrowed from the document. Empty for any other node. */
mls_str mls_json_key(const mls_json *doc, mls_json_node node);
mls_str mls_json_text(const mls_json *doc, mls_json_node node);

/* Set `*out` to a number that is a non-negative integer below 2**64, written without
 * fraction or exponent. Returns false for any other value. */
bool mls_json_u64(const mls_json *doc, mls_json_node node, uint64_t *out);

#endif
