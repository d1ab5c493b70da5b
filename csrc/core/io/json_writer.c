/* buffer: text that grows by half of itself, so that a long one is copied a few times
 * only.
 */
#include "io/json_writer.h"

#include "base/memory.h"
#include "base/size.h"

#include <stdio.h>
#include <string.h>

enum { NUMBER_ROOM = 24 }; /* digits of the largest number, and more */

/* Also forgets a failure: the buffer is as new. */
void mls_buffer_fini(mls_buffer *b)
{
    mls_free(b->data);
    *b = (mls_buffer){0};
}

/* The limit is checked first: a text that is too long is that, however much memory there
 * is. */
void mls_buffer_put(mls_buffer *b, const char *bytes, size_t length)
{
    size_t needed;
    if (b->code != MLS_OK || length == 0) {
        return;
    }
    if (!mls_size_add(b->length, length, &needed) || needed > b->most) {
        b->code = MLS_E_SIZE;
        return;
    }
    if (needed > b->room) {
        const size_t room = needed + needed / 2 + 256;
        char *data = mls_realloc(b->data, room, 1);
        if (data == NULL) {
            b->code = MLS_E_MEMORY;
            return;
        }
        b->data = data;
        b->room = room;
    }
    memcpy(b->data + b->length, bytes, length);
    b->length = needed;
}

/* For the constant pieces between what is put in. */
void mls_buffer_text(mls_buffer *b, const char *text)
{
    mls_buffer_put(b, text, strlen(text));
}

/* Not by snprintf: an index has some numbers for each of its shards. */
void mls_buffer_number(mls_buffer *b, uint64_t number)
{
    char text[NUMBER_ROOM];
    size_t at = sizeof text;
    do {
        text[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    mls_buffer_put(b, text + at, sizeof text - at);
}

/* Quotes, backslashes and control characters are escaped; runs of others go as one. */
void mls_buffer_json(mls_buffer *b, mls_text text)
{
    size_t plain = 0; /* start of what was not put yet */
    mls_buffer_text(b, "\"");
    for (size_t i = 0; i < text.length; i++) {
        const unsigned char c = (unsigned char)text.data[i];
        if (c >= ' ' && c != '"' && c != '\\') {
            continue;
        }
        mls_buffer_put(b, text.data + plain, i - plain);
        plain = i + 1;
        if (c >= ' ') { /* a quote goes with what follows, behind its backslash */
            mls_buffer_put(b, "\\", 1);
            plain = i;
        } else {
            char escape[8];
            snprintf(escape, sizeof escape, "\\u%04x", c);
            mls_buffer_text(b, escape);
        }
    }
    if (plain < text.length) { /* else there may be no data at all */
        mls_buffer_put(b, text.data + plain, text.length - plain);
    }
    mls_buffer_text(b, "\"");
}
