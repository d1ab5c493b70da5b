/* json_writer: build text, in particular JSON, in a growing buffer.
 *
 * After a failure every further call does nothing, so the caller checks `code` once, at
 * the end.
 */
#ifndef MLS_JSON_WRITER_H
#define MLS_JSON_WRITER_H

#include "base/status.h"
#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

/* Initialise with zeros, except `most`. The text is not NUL-terminated. */
typedef struct mls_json_writer {
    char *data;
    size_t length, room;
    size_t most;   /* largest length of the text in bytes */
    mls_code code; /* the first failure: MLS_E_SIZE (over `most`) or MLS_E_MEMORY */
} mls_json_writer;

void mls_json_writer_fini(mls_json_writer *json); /* accepts a zeroed struct; zeroes it */

/* Append `length` bytes, a C string, or a number in decimal digits. */
void mls_json_writer_put(mls_json_writer *json, const char *bytes, size_t length);
void mls_json_writer_text(mls_json_writer *json, const char *text);
void mls_json_writer_number(mls_json_writer *json, uint64_t number);

/* Append a JSON string with its quotes. Escapes only what JSON requires. `text` must be
 * UTF-8. */
void mls_json_writer_json(mls_json_writer *json, mls_str text);

#endif
