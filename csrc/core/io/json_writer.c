/* json_writer: appends texts, numbers and escaped JSON strings to a growing buffer.
 *
 * A text grows by half of its length, so that it is copied only a few times.
 */
#include "io/json_writer.h"

#include "base/memory.h"
#include "base/size.h"

#include <stdio.h>
#include <string.h>

enum { NUMBER_ROOM = 24 }; /* more than the digits of the largest number */

/* Also clears a failure: the writer is as new. */
void mls_json_writer_fini(mls_json_writer *json)
{
    mls_free(json->data);
    *json = (mls_json_writer){0};
}

/* Append bytes, unless an earlier call failed. Check the limit before the memory, so that
 * a text that is too long always fails in the same way. */
void mls_json_writer_put(mls_json_writer *json, const char *bytes, size_t length)
{
    size_t needed;
    if (json->code != MLS_OK || length == 0) {
        return;
    }
    if (!mls_size_add(json->length, length, &needed) || needed > json->most) {
        json->code = MLS_E_SIZE;
        return;
    }
    if (needed > json->room) {
        const size_t room = needed + needed / 2 + 256;
        char *data = mls_realloc(json->data, room, 1);
        if (data == NULL) {
            json->code = MLS_E_MEMORY;
            return;
        }
        json->data = data;
        json->room = room;
    }
    memcpy(json->data + json->length, bytes, length);
    json->length = needed;
}

/* For the constant parts of a text. */
void mls_json_writer_text(mls_json_writer *json, const char *text)
{
    mls_json_writer_put(json, text, strlen(text));
}

/* Append a number in decimal digits. Faster than snprintf: an index has several numbers
 * for each shard. */
void mls_json_writer_number(mls_json_writer *json, uint64_t number)
{
    char text[NUMBER_ROOM];
    size_t at = sizeof text;
    do {
        text[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    mls_json_writer_put(json, text + at, sizeof text - at);
}

/* Append a JSON string with its quotes. Escape quotes, backslashes and control
 * characters; copy the bytes between them at once. */
void mls_json_writer_json(mls_json_writer *json, mls_str text)
{
    size_t unescaped = 0; /* start of the bytes not yet appended */
    mls_json_writer_text(json, "\"");
    for (size_t i = 0; i < text.length; i++) {
        const unsigned char c = (unsigned char)text.data[i];
        if (c >= ' ' && c != '"' && c != '\\') {
            continue;
        }
        mls_json_writer_put(json, text.data + unescaped, i - unescaped);
        unescaped = i + 1;
        if (c >= ' ') { /* the quote itself is appended with the bytes after it */
            mls_json_writer_put(json, "\\", 1);
            unescaped = i;
        } else {
            char escape[8];
            snprintf(escape, sizeof escape, "\\u%04x", c);
            mls_json_writer_text(json, escape);
        }
    }
    if (unescaped < text.length) { /* otherwise `data` may be NULL */
        mls_json_writer_put(json, text.data + unescaped, text.length - unescaped);
    }
    mls_json_writer_text(json, "\"");
}
