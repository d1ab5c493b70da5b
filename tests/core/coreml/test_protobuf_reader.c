/* Reading protobuf's wire format: valid messages, and errors at the first invalid
 * byte. */
#include "coreml/protobuf_reader.h"

#include "support/runner.h"

#include <stdlib.h>

/* A message over the bytes of a string literal. */
#define MESSAGE(text)                                                                    \
    mls_protobuf_init((const unsigned char *)(text), sizeof(text) - 1, 100)

TEST(reads_numbers_of_every_length)
{
    mls_protobuf message = MESSAGE("\x05");
    mls_protobuf two = MESSAGE("\xAC\x02");
    mls_protobuf ten = MESSAGE("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01");
    mls_protobuf padded = MESSAGE("\x85\x80\x00");
    uint64_t value = 0;
    CHECK(mls_protobuf_varint(&message, &value, &status) == MLS_OK && value == 5);
    CHECK(mls_protobuf_varint(&two, &value, &status) == MLS_OK && value == 300);
    CHECK(mls_protobuf_varint(&ten, &value, &status) == MLS_OK && value == UINT64_MAX);
    CHECK(mls_protobuf_varint(&padded, &value, &status) == MLS_OK && value == 5);
    CHECK(mls_protobuf_done(&message) && mls_protobuf_done(&two) &&
          mls_protobuf_done(&ten));
}

TEST(refuses_a_number_cut_off_anywhere)
{
    static const unsigned char bytes[9] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                           0xFF, 0xFF, 0xFF, 0xFF};
    for (size_t length = 0; length <= sizeof bytes; length++) {
        mls_protobuf message = mls_protobuf_init(bytes, length, 100);
        uint64_t value = 7;
        CHECK(mls_protobuf_varint(&message, &value, &status) == MLS_E_FORMAT);
        CHECK(value == 7 && message.at == 0);
        CHECK(status.has_offset && status.offset == 100);
    }
    CHECK_TEXT(status.text, "byte 100: the data ends inside a number");
}

TEST(refuses_a_number_over_64_bits)
{
    mls_protobuf eleven = MESSAGE("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01");
    mls_protobuf large = MESSAGE("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02");
    uint64_t value;
    CHECK(mls_protobuf_varint(&eleven, &value, &status) == MLS_E_FORMAT);
    CHECK(mls_protobuf_varint(&large, &value, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "byte 100: a number of more than 64 bits");
}

TEST(reads_every_field_type)
{
    mls_protobuf message = MESSAGE("\x08\x2A"
                                   "\x11\x01\x02\x03\x04\x05\x06\x07\x08"
                                   "\x1A\x03xyz"
                                   "\x25\x01\x00\x00\x80");
    mls_protobuf_field field;
    REQUIRE(mls_protobuf_next(&message, &field, &status) == MLS_OK);
    CHECK(field.number == 1 && field.wire_type == MLS_PROTOBUF_VARINT &&
          field.value == 42);
    CHECK(field.offset == 100);
    REQUIRE(mls_protobuf_next(&message, &field, &status) == MLS_OK);
    CHECK(field.number == 2 && field.wire_type == MLS_PROTOBUF_FIXED64);
    CHECK(field.value == 0x0807060504030201U && field.offset == 102);
    REQUIRE(mls_protobuf_next(&message, &field, &status) == MLS_OK);
    CHECK(field.number == 3 && field.wire_type == MLS_PROTOBUF_BYTES && field.value == 3);
    CHECK(field.bytes.length == 3 && memcmp(field.bytes.data, "xyz", 3) == 0);
    CHECK(mls_protobuf_offset(&field.bytes) == 113);
    REQUIRE(mls_protobuf_next(&message, &field, &status) == MLS_OK);
    CHECK(field.number == 4 && field.wire_type == MLS_PROTOBUF_FIXED32 &&
          field.value == 0x80000001U);
    CHECK(mls_protobuf_done(&message));
}

TEST(refuses_groups_and_unknown_field_types)
{
    static const unsigned char tags[] = {0x0B, 0x0C, 0x0E, 0x0F};
    for (size_t i = 0; i < sizeof tags; i++) {
        const unsigned char bytes[2] = {tags[i], 0};
        mls_protobuf message = mls_protobuf_init(bytes, sizeof bytes, 0);
        mls_protobuf_field field;
        CHECK(mls_protobuf_next(&message, &field, &status) == MLS_E_FORMAT);
        CHECK(strstr(status.text, "wire type") != NULL && message.at == 0);
    }
    mls_protobuf group = MESSAGE("\x0B\x0C");
    mls_protobuf_field field;
    CHECK(mls_protobuf_next(&group, &field, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text,
               "byte 100: field 1 has wire type 3 (a group), which a Core ML "
               "specification does not use");
}

TEST(refuses_impossible_tags)
{
    mls_protobuf zero = MESSAGE("\x00\x00");
    mls_protobuf large = MESSAGE("\xF8\xFF\xFF\xFF\x10\x00");
    mls_protobuf_field field;
    CHECK(mls_protobuf_next(&zero, &field, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "byte 100: no field can have the tag 0");
    CHECK(mls_protobuf_next(&large, &field, &status) == MLS_E_FORMAT);
}

TEST(refuses_a_payload_beyond_its_message)
{
    mls_protobuf longer = MESSAGE("\x0A\x04xyz");
    mls_protobuf huge = MESSAGE("\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01xyz");
    mls_protobuf_field field = {.number = 9};
    CHECK(mls_protobuf_next(&longer, &field, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "byte 100: field 1 claims 4 bytes, but 3 are left");
    CHECK_TEXT(status.expected, "at most 3 bytes");
    CHECK_TEXT(status.got, "4 bytes");
    CHECK(field.number == 9 && longer.at == 0);
    CHECK(mls_protobuf_next(&huge, &field, &status) == MLS_E_FORMAT);
}

/* The inner message must not extend beyond the outer one. */
TEST(keeps_a_sub_message_inside_its_bounds)
{
    mls_protobuf outer = MESSAGE("\x0A\x02\x0A\x03zzz");
    mls_protobuf_field field;
    REQUIRE(mls_protobuf_next(&outer, &field, &status) == MLS_OK);
    mls_protobuf inner = field.bytes;
    CHECK(mls_protobuf_next(&inner, &field, &status) == MLS_E_FORMAT);
    CHECK(status.offset == 102);
}

TEST(refuses_fixed_numbers_cut_off)
{
    mls_protobuf eight = MESSAGE("\x09\x01\x02\x03\x04\x05\x06\x07");
    mls_protobuf four = MESSAGE("\x0D\x01\x02\x03");
    mls_protobuf_field field;
    CHECK(mls_protobuf_next(&eight, &field, &status) == MLS_E_FORMAT);
    CHECK(mls_protobuf_next(&four, &field, &status) == MLS_E_FORMAT);
}

/* A header may end where the memory ends: the payload is not in it. */
TEST(reads_a_header_without_its_payload)
{
    mls_protobuf message = MESSAGE("\xB2\x1F\x80\x80\x80\x80\x04");
    mls_protobuf_field field;
    REQUIRE(mls_protobuf_header(&message, &field, &status) == MLS_OK);
    CHECK(field.number == 502 && field.value == (uint64_t)1 << 30);
    CHECK(field.bytes.length == 0 && mls_protobuf_offset(&message) == 107);
}

TEST(finds_the_only_field_of_a_number)
{
    const mls_protobuf message = MESSAGE("\x08\x01\x12\x02hi\x18\x01");
    mls_protobuf out = {0};
    bool is_present = false;
    CHECK(mls_protobuf_only(message, 2, "a name", &out, &is_present, &status) == MLS_OK);
    CHECK(is_present && out.length == 2 && memcmp(out.data, "hi", 2) == 0);
    mls_protobuf untouched = {.length = 77};
    CHECK(mls_protobuf_only(message, 5, "a name", &untouched, &is_present, &status) ==
          MLS_OK);
    CHECK(!is_present && untouched.length == 77);
}

TEST(refuses_a_second_field_of_a_number)
{
    mls_protobuf out = {0};
    bool is_present = false;
    CHECK(mls_protobuf_only(MESSAGE("\x12\x01h\x12\x01i"), 2, "a name", &out, &is_present,
                            &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "byte 103: a name appears twice");
    CHECK(mls_protobuf_only(MESSAGE("\x10\x01"), 2, "a name", &out, &is_present,
                            &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "byte 100: a name is not of its type");
    CHECK(mls_protobuf_only(MESSAGE("\x12\x01h\x12"), 2, "a name", &out, &is_present,
                            &status) == MLS_E_FORMAT);
    CHECK(!is_present && out.length == 0);
}
