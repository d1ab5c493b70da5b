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
#ifndef MLS_PROTOBUF_H
#define MLS_PROTOBUF_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* Wire types, as numbered by the format.  3 and 4, the groups of old files, are refused.
 */
typedef enum mls_pb_wire {
    MLS_PB_VARINT = 0,
    MLS_PB_FIXED64 = 1,
    MLS_PB_BYTES = 2, /* text, bytes, a sub-message or packed numbers */
    MLS_PB_FIXED32 = 5
} mls_pb_wire;

enum {
    MLS_PB_VARINT_BYTES = 10, /* the longest number that the format knows */
    MLS_PB_HEADER_BYTES = 20  /* the longest tag and length together */
};

/* A message, or what is left of it.  Borrows the bytes. */
typedef struct mls_pb {
    const unsigned char *data;
    size_t length;
    size_t at;     /* the next unread byte */
    uint64_t base; /* offset of data[0] in the file */
} mls_pb;

typedef struct mls_pb_field {
    uint32_t number; /* 1 to 2**29 - 1 */
    mls_pb_wire wire;
    uint64_t value;  /* of a number; the length of MLS_PB_BYTES */
    mls_pb bytes;    /* the payload of MLS_PB_BYTES, else empty; shares the memory */
    uint64_t offset; /* of the field's tag in the file */
} mls_pb_field;

/* As mls_fail_at, with "byte <offset>: " before the text. */
mls_code mls_pb_fail(mls_status *st, uint64_t offset, const char *format, ...)
    MLS_PRINTF(3, 4);

/* A message over `length` borrowed bytes that lie at `base` in their file. */
mls_pb mls_pb_init(const unsigned char *data, size_t length, uint64_t base);

/* Whether every byte was read. */
bool mls_pb_done(const mls_pb *message);

/* Offset in the file of the next unread byte. */
uint64_t mls_pb_offset(const mls_pb *message);

/* Read one number, as packed fields hold them.
 * MLS_E_FORMAT: cut off, longer than 10 bytes, or over 64 bits. */
mls_code mls_pb_varint(mls_pb *message, uint64_t *out, mls_status *st);

/* Read a field's tag and, for a number, its value; for MLS_PB_BYTES only the length, so
 * that the payload need not be in memory.  `out->bytes` is empty.
 * MLS_E_FORMAT: cut off, a group or an unknown wire type, field number 0 or too large. */
mls_code mls_pb_header(mls_pb *message, mls_pb_field *out, mls_status *st);

/* Read a whole field; the message must not be done.  Besides the faults of mls_pb_header,
 * MLS_E_FORMAT: a payload longer than what is left of the message. */
mls_code mls_pb_next(mls_pb *message, mls_pb_field *out, mls_status *st);

/* Find the only field `number` of a message, which must be MLS_PB_BYTES.  Every field of
 * the message is checked on the way.  `*found` says whether there is one; `out` is
 * untouched where not.  `what` names the field in errors.
 * MLS_E_FORMAT: a fault of mls_pb_next, another wire type, or the field appears twice. */
mls_code mls_pb_only(mls_pb message, uint32_t number, const char *what, mls_pb *out,
                     bool *found, mls_status *st);

#endif
