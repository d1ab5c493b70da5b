/* json: a reader for small JSON documents from files that nobody vouches for.
 *
 * The whole document is checked before the caller sees any of it: RFC 8259 grammar,
 * UTF-8, no duplicate keys, no lone surrogates, bounded length, depth and node count.
 * Numbers are kept as text; the accessors convert those that fit.
 */
#ifndef MLS_JSON_H
#define MLS_JSON_H

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
    size_t depth; /* nested arrays and objects, at most */
    size_t nodes; /* values, at most */
} mls_json_limits;

/* A value inside a document; the root is node 0. */
typedef uint32_t mls_json_node;
#define MLS_JSON_NONE UINT32_MAX

/* Parse `length` bytes, which need not outlive the call.  Gives: free with mls_json_free.
 * Costs a copy of the text and 20 to 30 bytes a value, and time that grows as n log n at
 * worst, whatever the text.
 * MLS_E_FORMAT with the byte offset, from the start of `text`, of a fault (the message
 * does not repeat the offset: callers put the text's own place in the file before it):
 * not JSON, a duplicate key, a limit passed, more than 512 MiB.  MLS_E_MEMORY.
 * `*out` is untouched on failure. */
mls_code mls_json_parse(const char *text, size_t length, mls_json_limits limits,
                        mls_json **out, mls_status *st);

void mls_json_free(mls_json *doc); /* accepts NULL */

/* Give back all memory but that of the texts: of the functions of this file only
 * mls_json_free may be called from now on, and texts that were asked for before stay
 * good. */
void mls_json_forget(mls_json *doc);

mls_json_type mls_json_type_of(const mls_json *doc, mls_json_node node);

/* Byte offset of a value in the parsed text, for error messages. */
size_t mls_json_offset(const mls_json *doc, mls_json_node node);

/* Members of an object or array, in file order: the first one and the one after, or
 * MLS_JSON_NONE.  Number of members. */
mls_json_node mls_json_first(const mls_json *doc, mls_json_node parent);
mls_json_node mls_json_next(const mls_json *doc, mls_json_node node);
size_t mls_json_size(const mls_json *doc, mls_json_node parent);

/* Member of an object by key, or MLS_JSON_NONE (also where `object` is no object).  Looks
 * at one member after the other: for objects of many members, walk them instead. */
mls_json_node mls_json_find(const mls_json *doc, mls_json_node object, const char *key);

/* A member that an object may have. */
typedef struct mls_json_member {
    const char *key; /* without NUL characters, and its length in bytes */
    size_t length;
    mls_json_type type; /* that it must have */
    bool needed;
    mls_json_node node; /* where it was found, or MLS_JSON_NONE */
} mls_json_member;

/* Find the members of an object that are in a table, all in one walk; others are passed
 * over.  Quickest where they come in the order of the table.  Returns the number of the
 * first that is needed and not there, or not of its type; `count`: all are good. */
size_t mls_json_members(const mls_json *doc, mls_json_node object, mls_json_member *table,
                        size_t count);

/* Key of an object's member; text of a string or number.  Shares the document's memory.
 * Empty for any other node. */
mls_text mls_json_key(const mls_json *doc, mls_json_node node);
mls_text mls_json_text(const mls_json *doc, mls_json_node node);

/* A number that is a non-negative integer below 2**64, written without fraction or
 * exponent; false otherwise. */
bool mls_json_u64(const mls_json *doc, mls_json_node node, uint64_t *out);

#endif
