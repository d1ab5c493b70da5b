/* protobuf: a reader of the protobuf wire format, one field at a time.
 *
 * A message is a bounded range of bytes.  Nothing is allocated, nothing is decoded ahead:
 * the caller asks for the next field, looks at its number, and opens the sub-messages
 * that it knows as messages of their own.  A length never reaches beyond the message that
 * holds it, so depth is the caller's own and no input can make it grow.
 *
 * The bytes come from files that nobody vouches for: every failure is MLS_E_FORMAT with
 * the offset of the fault in the file.
 */
#ifndef MLS_PROTOBUF_READER_H
#define MLS_PROTOBUF_READER_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* Wire types, as numbered by the format.  3 and 4, the groups of old files, are refused.
 */
typedef enum mls_protobuf_wire {
    MLS_PROTOBUF_VARINT = 0,
    MLS_PROTOBUF_FIXED64 = 1,
    MLS_PROTOBUF_BYTES = 2, /* text, bytes, a sub-message or packed numbers */
    MLS_PROTOBUF_FIXED32 = 5
} mls_protobuf_wire;

enum {
    MLS_PROTOBUF_VARINT_BYTES = 10, /* the longest number that the format knows */
    MLS_PROTOBUF_HEADER_BYTES = 20  /* the longest tag and length together */
};

/* A message, or what is left of it.  Borrows the bytes. */
typedef struct mls_protobuf {
    const unsigned char *data;
    size_t length;
    size_t at;     /* the next unread byte */
    uint64_t base; /* offset of data[0] in the file */
} mls_protobuf;

typedef struct mls_protobuf_field {
    uint32_t number; /* 1 to 2**29 - 1 */
    mls_protobuf_wire wire;
    uint64_t value; /* of a number; the length of MLS_PROTOBUF_BYTES */
    mls_protobuf
        bytes; /* the payload of MLS_PROTOBUF_BYTES, else empty; shares the memory */
    uint64_t offset; /* of the field's tag in the file */
} mls_protobuf_field;

/* As mls_fail_at, with "byte <offset>: " before the text. */
mls_code mls_protobuf_fail(mls_status *st, uint64_t offset, const char *format, ...)
    MLS_PRINTF(3, 4);

/* A message over `length` borrowed bytes that lie at `base` in their file. */
mls_protobuf mls_protobuf_init(const unsigned char *data, size_t length, uint64_t base);

/* Whether every byte was read. */
bool mls_protobuf_done(const mls_protobuf *message);

/* Offset in the file of the next unread byte. */
uint64_t mls_protobuf_offset(const mls_protobuf *message);

/* Read one number, as packed fields hold them.
 * MLS_E_FORMAT: cut off, longer than 10 bytes, or over 64 bits. */
mls_code mls_protobuf_varint(mls_protobuf *message, uint64_t *out, mls_status *st);

/* Read a field's tag and, for a number, its value; for MLS_PROTOBUF_BYTES only the
 * length, so that the payload need not be in memory.  `out->bytes` is empty.
 * MLS_E_FORMAT: cut off, a group or an unknown wire type, field number 0 or too large. */
mls_code mls_protobuf_header(mls_protobuf *message, mls_protobuf_field *out,
                             mls_status *st);

/* Read a whole field; the message must not be done.  Besides the faults of
 * mls_protobuf_header, MLS_E_FORMAT: a payload longer than what is left of the message.
 */
mls_code mls_protobuf_next(mls_protobuf *message, mls_protobuf_field *out,
                           mls_status *st);

/* Find the only field `number` of a message, which must be MLS_PROTOBUF_BYTES.  Every
 * field of the message is checked on the way.  `*found` says whether there is one; `out`
 * is untouched where not.  `what` names the field in errors. MLS_E_FORMAT: a fault of
 * mls_protobuf_next, another wire type, or the field appears twice. */
mls_code mls_protobuf_only(mls_protobuf message, uint32_t number, const char *what,
                           mls_protobuf *out, bool *found, mls_status *st);

#endif
