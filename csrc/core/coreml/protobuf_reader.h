/* protobuf_reader: read the protobuf wire format, one field at a time.
 *
 * A message is a bounded range of bytes. Nothing is allocated or decoded ahead: the
 * caller reads the next field, checks its number, and opens known sub-messages as
 * messages. A length never exceeds the enclosing message, and the caller controls the
 * depth, so no input can increase it.
 *
 * The bytes come from untrusted files: every failure is MLS_E_FORMAT with the offset of
 * the fault in the file.
 */
#ifndef MLS_PROTOBUF_READER_H
#define MLS_PROTOBUF_READER_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* Wire types with the format's numbers. 3 and 4, the groups of old files, are refused. */
typedef enum mls_protobuf_wire_type {
    MLS_PROTOBUF_VARINT = 0,
    MLS_PROTOBUF_FIXED64 = 1,
    MLS_PROTOBUF_BYTES = 2, /* text, bytes, a sub-message or packed numbers */
    MLS_PROTOBUF_FIXED32 = 5
} mls_protobuf_wire_type;

enum {
    MLS_PROTOBUF_VARINT_BYTES = 10, /* the longest number in the format */
    MLS_PROTOBUF_HEADER_BYTES = 20  /* the longest tag and length together */
};

/* A message or its unread rest. Borrows the bytes. */
typedef struct mls_protobuf {
    const unsigned char *data;
    size_t length;
    size_t at;     /* the next unread byte */
    uint64_t base; /* offset of data[0] in the file */
} mls_protobuf;

typedef struct mls_protobuf_field {
    uint32_t number; /* 1 to 2**29 - 1 */
    mls_protobuf_wire_type wire_type;
    uint64_t value;     /* of a number; for MLS_PROTOBUF_BYTES the length */
    mls_protobuf bytes; /* the payload of MLS_PROTOBUF_BYTES, else empty; borrowed */
    uint64_t offset;    /* of the field's tag in the file */
} mls_protobuf_field;

/* As mls_fail_at, with "byte <offset>: " before the text. */
mls_code mls_protobuf_fail(mls_status *st, uint64_t offset, const char *format, ...)
    MLS_PRINTF(3, 4);

/* Make a message of `length` borrowed bytes, which start at offset `base` of their file.
 */
mls_protobuf mls_protobuf_init(const unsigned char *data, size_t length, uint64_t base);

/* Return whether every byte was read. */
bool mls_protobuf_done(const mls_protobuf *message);

/* Return the file offset of the next unread byte. */
uint64_t mls_protobuf_offset(const mls_protobuf *message);

/* Read one number of a packed field. MLS_E_FORMAT: truncated, longer than 10 bytes, or
 * over 64 bits. */
mls_code mls_protobuf_varint(mls_protobuf *message, uint64_t *out, mls_status *st);

/* Read a field's tag and, for a number, its value. For MLS_PROTOBUF_BYTES, read the
 * length only, so that the payload need not be in memory; `out->bytes` is then empty.
 * MLS_E_FORMAT: truncated, a group or an unknown wire type, field number 0 or too large.
 */
mls_code mls_protobuf_header(mls_protobuf *message, mls_protobuf_field *out,
                             mls_status *st);

/* Read a whole field; bytes must be left. MLS_E_FORMAT: a fault of mls_protobuf_header,
 * or a payload longer than the rest of the message. */
mls_code mls_protobuf_next(mls_protobuf *message, mls_protobuf_field *out,
                           mls_status *st);

/* Find the only field `number` of a message, which must be MLS_PROTOBUF_BYTES. Checks
 * every field of the message. Sets `*found`; if the field is missing, `out` is untouched.
 * `what` names the field in errors. MLS_E_FORMAT: a fault of mls_protobuf_next, another
 * wire type, or a repeated field. */
mls_code mls_protobuf_only(mls_protobuf message, uint32_t number, const char *label,
                           mls_protobuf *out, bool *is_present, mls_status *st);

#endif
