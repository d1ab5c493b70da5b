/* buffer: text under construction, JSON in particular.
 *
 * After a failure every further call does nothing, so that whoever builds a long text
 * asks once, at its end.
 */
#ifndef MLS_BUFFER_H
#define MLS_BUFFER_H

#include "base/status.h"
#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

/* Starts zeroed but for `most`.  The text is not terminated. */
typedef struct mls_buffer {
    char *data;
    size_t length, room;
    size_t most;   /* bytes that the text may have */
    mls_code code; /* the first failure: MLS_E_SIZE (over `most`) or MLS_E_MEMORY */
} mls_buffer;

void mls_buffer_fini(mls_buffer *b); /* accepts a zeroed struct; zeroes it */

/* Append bytes, a C string, a number in decimal digits. */
void mls_buffer_put(mls_buffer *b, const char *bytes, size_t length);
void mls_buffer_text(mls_buffer *b, const char *text);
void mls_buffer_number(mls_buffer *b, uint64_t number);

/* Append a JSON string, with its quotes.  What must be escaped is, all else stays as it
 * is: `text` must be UTF-8. */
void mls_buffer_json(mls_buffer *b, mls_text text);

#endif
