/* protobuf: a reader of the protobuf wire format, one field at a time.
 *
 * A message keeps one promise: `at` never exceeds `length`, and both lie inside memory
 * that the caller vouched for.  Every function reads from a copy or checks first, and
 * moves `at` only when all of what it reads is there.
 */
#include "coreml/protobuf_reader.h"

#include <stdarg.h>
#include <stdio.h>

/* The text is printed first, then put behind its offset: the two formats know nothing of
 * each other. */
mls_code mls_pb_fail(mls_status *st, uint64_t offset, const char *format, ...)
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

/* `base` is where the message lies in its file, so that errors name places in that. */
mls_pb mls_pb_init(const unsigned char *data, size_t length, uint64_t base)
{
    return (mls_pb){.data = data, .length = length, .at = 0, .base = base};
}

/* `at` cannot pass `length`; >= all the same, so that a bug ends a loop instead of a
 * page. */
bool mls_pb_done(const mls_pb *message)
{
    return message->at >= message->length;
}

uint64_t mls_pb_offset(const mls_pb *message)
{
    return message->base + message->at;
}

/* Seven bits a byte, lowest first; the top bit says that another byte follows.  The tenth
 * byte has room for one bit only. */
mls_code mls_pb_varint(mls_pb *message, uint64_t *out, mls_status *st)
{
    uint64_t value = 0;
    for (size_t i = 0; i < MLS_PB_VARINT_BYTES; i++) {
        if (message->length - message->at <= i) {
            return mls_pb_fail(st, mls_pb_offset(message),
                               "the data ends inside a number");
        }
        /* looked at in place: `at` moves only when the number is whole */
        const unsigned char byte = message->data[message->at + i];
        /* overlong forms of small numbers are allowed: writers reserve room with them */
        if (i == MLS_PB_VARINT_BYTES - 1 && byte > 1) {
            break;
        }
        value |= (uint64_t)(byte & 0x7FU) << (7 * i);
        if ((byte & 0x80U) == 0) {
            message->at += i + 1;
            *out = value;
            return MLS_OK;
        }
    }
    return mls_pb_fail(st, mls_pb_offset(message), "a number of more than 64 bits");
}

/* A little-endian number of `width` bytes, 4 or 8; `message` moves only where all are
 * there. */
static mls_code read_fixed(mls_pb *message, size_t width, uint64_t *out, mls_status *st)
{
    if (message->length - message->at < width) {
        return mls_pb_fail(st, mls_pb_offset(message), "the data ends inside a number");
    }
    uint64_t value = 0;
    for (size_t i = 0; i < width; i++) {
        value |= (uint64_t)message->data[message->at + i] << (8 * i);
    }
    message->at += width;
    *out = value;
    return MLS_OK;
}

/* The tag: field number and wire type in one number of at most 32 bits.  No field has the
 * number 0, so a run of zeros (a hole in a file) is refused at once. */
static mls_code read_tag(mls_pb *message, mls_pb_field *field, mls_status *st)
{
    uint64_t tag;
    const mls_code code = mls_pb_varint(message, &tag, st);
    if (code != MLS_OK) {
        return code;
    }
    if (tag > UINT32_MAX || tag >> 3 == 0) {
        return mls_pb_fail(st, field->offset, "no field can have the tag %llu",
                           (unsigned long long)tag);
    }
    field->number = (uint32_t)(tag >> 3);
    field->wire = (mls_pb_wire)(tag & 7U);
    return MLS_OK;
}

/* The failure for a wire type that is not read.  Groups end where a matching tag says so:
 * skipping one would need a stack. */
static mls_code refuse_wire(const mls_pb_field *field, mls_status *st)
{
    const unsigned wire = (unsigned)field->wire;
    return mls_pb_fail(
        st, field->offset, "field %u has wire type %u%s, which is not read here",
        (unsigned)field->number, wire, wire == 3 || wire == 4 ? " (a group)" : "");
}

/* Reads from a copy, so that a failure leaves the message where it was. */
mls_code mls_pb_header(mls_pb *message, mls_pb_field *out, mls_status *st)
{
    mls_pb rest = *message;
    mls_pb_field field = {.offset = mls_pb_offset(message)};
    mls_code code = read_tag(&rest, &field, st);
    if (code != MLS_OK) {
        return code;
    }
    /* the enum was read from the file: any of eight values */
    switch (field.wire) {
    case MLS_PB_VARINT:
    case MLS_PB_BYTES:
        code = mls_pb_varint(&rest, &field.value, st);
        break;
    case MLS_PB_FIXED64:
        code = read_fixed(&rest, 8, &field.value, st);
        break;
    case MLS_PB_FIXED32:
        code = read_fixed(&rest, 4, &field.value, st);
        break;
    default:
        return refuse_wire(&field, st);
    }
    if (code == MLS_OK) {
        *message = rest;
        *out = field;
    }
    return code;
}

/* As mls_pb_header, on a copy; the payload is bounded here, before anyone may look at it.
 */
mls_code mls_pb_next(mls_pb *message, mls_pb_field *out, mls_status *st)
{
    mls_pb rest = *message;
    mls_pb_field field;
    const mls_code code = mls_pb_header(&rest, &field, st);
    if (code != MLS_OK) {
        return code;
    }
    if (field.wire == MLS_PB_BYTES) {
        /* compared with what is left, never added to a pointer first */
        const size_t left = rest.length - rest.at;
        if (field.value > left) {
            mls_pb_fail(st, field.offset, "field %u claims %llu bytes, but %zu are left",
                        (unsigned)field.number, (unsigned long long)field.value, left);
            mls_status_expected(st, "at most %zu bytes", left);
            mls_status_got(st, "%llu bytes", (unsigned long long)field.value);
            return st->code;
        }
        field.bytes =
            mls_pb_init(rest.data + rest.at, (size_t)field.value, mls_pb_offset(&rest));
        rest.at += (size_t)field.value;
    }
    *message = rest;
    *out = field;
    return MLS_OK;
}

/* Goes on to the end after a find: a second one would win elsewhere, and two readers
 * that disagree about a file are what an attacker looks for. */
mls_code mls_pb_only(mls_pb message, uint32_t number, const char *what, mls_pb *out,
                     bool *found, mls_status *st)
{
    bool seen = false;
    mls_pb bytes = {0};
    while (!mls_pb_done(&message)) {
        mls_pb_field field;
        const mls_code code = mls_pb_next(&message, &field, st);
        if (code != MLS_OK) {
            return code;
        }
        if (field.number != number) {
            continue; /* unknown fields are the format's way to grow */
        }
        if (field.wire != MLS_PB_BYTES || seen) {
            return mls_pb_fail(st, field.offset, "%s %s", what,
                               seen ? "appears twice" : "is not of its type");
        }
        seen = true;
        bytes = field.bytes;
    }
    if (seen) {
        *out = bytes;
    }
    *found = seen;
    return MLS_OK;
}
