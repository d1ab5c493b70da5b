/* protobuf_reader: read the protobuf wire format, one field at a time.
 *
 * Invariant of a message: `at` never exceeds `length`, and both are inside the caller's
 * memory. Every function reads from a copy or checks first, and moves `at` only if all
 * the bytes that it reads are present.
 */
#include "coreml/protobuf_reader.h"

#include <stdarg.h>
#include <stdio.h>

/* The text is printed first and then appended to its offset, because the two formats are
 * independent. */
mls_code mls_protobuf_fail(mls_status *st, uint64_t offset, const char *format, ...)
{
    char text[MLS_TEXT_BYTES - 32]; /* room for "byte " and the largest offset */
    va_list args;
    va_start(args, format);
    if (vsnprintf(text, sizeof text, format, args) < 0) {
        text[0] = '\0';
    }
    va_end(args);
    return mls_fail_at(st, offset, "byte %llu: %s", (unsigned long long)offset, text);
}

/* Errors add `base`, so that they report offsets in the file. */
mls_protobuf mls_protobuf_init(const unsigned char *data, size_t length, uint64_t base)
{
    return (mls_protobuf){.data = data, .length = length, .at = 0, .base = base};
}

/* `at` cannot exceed `length`; >= makes a bug end the loop instead of reading on. */
bool mls_protobuf_done(const mls_protobuf *message)
{
    return message->at >= message->length;
}

uint64_t mls_protobuf_offset(const mls_protobuf *message)
{
    return message->base + message->at;
}

/* Seven bits per byte, lowest first; the top bit means that another byte follows. The
 * tenth byte has room for one bit only. */
mls_code mls_protobuf_varint(mls_protobuf *message, uint64_t *out, mls_status *st)
{
    uint64_t value = 0;
    for (size_t i = 0; i < MLS_PROTOBUF_VARINT_BYTES; i++) {
        if (message->length - message->at <= i) {
            return mls_protobuf_fail(st, mls_protobuf_offset(message),
                                     "the data ends inside a number");
        }
        /* `at` moves only when the number is complete */
        const unsigned char byte = message->data[message->at + i];
        /* overlong forms are allowed: writers reserve room with them */
        if (i == MLS_PROTOBUF_VARINT_BYTES - 1 && byte > 1) {
            break;
        }
        value |= (uint64_t)(byte & 0x7FU) << (7 * i);
        if ((byte & 0x80U) == 0) {
            message->at += i + 1;
            *out = value;
            return MLS_OK;
        }
    }
    return mls_protobuf_fail(st, mls_protobuf_offset(message),
                             "a number of more than 64 bits");
}

/* Read a little-endian number of `width` bytes, 4 or 8. `message` moves only if all of
 * them are present. */
static mls_code read_fixed(mls_protobuf *message, size_t width, uint64_t *out,
                           mls_status *st)
{
    if (message->length - message->at < width) {
        return mls_protobuf_fail(st, mls_protobuf_offset(message),
                                 "the data ends inside a number");
    }
    uint64_t value = 0;
    for (size_t i = 0; i < width; i++) {
        value |= (uint64_t)message->data[message->at + i] << (8 * i);
    }
    message->at += width;
    *out = value;
    return MLS_OK;
}

/* Read the tag: field number and wire type in one number of at most 32 bits. Field number
 * 0 is invalid, so a run of zeros (a hole in a file) is refused at once. */
static mls_code read_tag(mls_protobuf *message, mls_protobuf_field *field, mls_status *st)
{
    uint64_t tag;
    const mls_code code = mls_protobuf_varint(message, &tag, st);
    if (code != MLS_OK) {
        return code;
    }
    if (tag > UINT32_MAX || tag >> 3 == 0) {
        return mls_protobuf_fail(st, field->offset, "no field can have the tag %llu",
                                 (unsigned long long)tag);
    }
    field->number = (uint32_t)(tag >> 3);
    field->wire_type = (mls_protobuf_wire_type)(tag & 7U);
    return MLS_OK;
}

/* Fail for an unsupported wire type. Groups are unsupported because they end at a
 * matching tag: skipping one would need a stack. */
static mls_code refuse_wire_type(const mls_protobuf_field *field, mls_status *st)
{
    const unsigned wire_type = (unsigned)field->wire_type;
    return mls_protobuf_fail(st, field->offset,
                             "field %u has wire type %u%s, which a Core ML specification "
                             "does not use",
                             (unsigned)field->number, wire_type,
                             wire_type == 3 || wire_type == 4 ? " (a group)" : "");
}

/* Reads from a copy, so that a failure leaves the message unchanged. */
mls_code mls_protobuf_header(mls_protobuf *message, mls_protobuf_field *out,
                             mls_status *st)
{
    mls_protobuf rest = *message;
    mls_protobuf_field field = {.offset = mls_protobuf_offset(message)};
    mls_code code = read_tag(&rest, &field, st);
    if (code != MLS_OK) {
        return code;
    }
    /* the wire type comes from the file and can have any of eight values */
    switch (field.wire_type) {
    case MLS_PROTOBUF_VARINT:
    case MLS_PROTOBUF_BYTES:
        code = mls_protobuf_varint(&rest, &field.value, st);
        break;
    case MLS_PROTOBUF_FIXED64:
        code = read_fixed(&rest, 8, &field.value, st);
        break;
    case MLS_PROTOBUF_FIXED32:
        code = read_fixed(&rest, 4, &field.value, st);
        break;
    default:
        return refuse_wire_type(&field, st);
    }
    if (code == MLS_OK) {
        *message = rest;
        *out = field;
    }
    return code;
}

/* As mls_protobuf_header, on a copy. Checks the bounds of the payload. */
mls_code mls_protobuf_next(mls_protobuf *message, mls_protobuf_field *out, mls_status *st)
{
    mls_protobuf rest = *message;
    mls_protobuf_field field;
    const mls_code code = mls_protobuf_header(&rest, &field, st);
    if (code != MLS_OK) {
        return code;
    }
    if (field.wire_type == MLS_PROTOBUF_BYTES) {
        /* compared with the rest, not added to a pointer, so that nothing overflows */
        const size_t left = rest.length - rest.at;
        if (field.value > left) {
            mls_protobuf_fail(
                st, field.offset, "field %u claims %llu bytes, but %zu are left",
                (unsigned)field.number, (unsigned long long)field.value, left);
            mls_status_expected(st, "at most %zu bytes", left);
            return mls_status_got(st, "%llu bytes", (unsigned long long)field.value);
        }
        field.bytes = mls_protobuf_init(rest.data + rest.at, (size_t)field.value,
                                        mls_protobuf_offset(&rest));
        rest.at += (size_t)field.value;
    }
    *message = rest;
    *out = field;
    return MLS_OK;
}

/* Continues to the end after the first match. Other readers would use a second one, and
 * attackers exploit readers that disagree about a file. */
mls_code mls_protobuf_only(mls_protobuf message, uint32_t number, const char *label,
                           mls_protobuf *out, bool *is_present, mls_status *st)
{
    bool seen = false;
    mls_protobuf bytes = {0};
    while (!mls_protobuf_done(&message)) {
        mls_protobuf_field field;
        const mls_code code = mls_protobuf_next(&message, &field, st);
        if (code != MLS_OK) {
            return code;
        }
        if (field.number != number) {
            continue; /* unknown fields are allowed: they are how the format grows */
        }
        if (field.wire_type != MLS_PROTOBUF_BYTES || seen) {
            return mls_protobuf_fail(st, field.offset, "%s %s", label,
                                     seen ? "appears twice" : "is not of its type");
        }
        seen = true;
        bytes = field.bytes;
    }
    if (seen) {
        *out = bytes;
    }
    *is_present = seen;
    return MLS_OK;
}
