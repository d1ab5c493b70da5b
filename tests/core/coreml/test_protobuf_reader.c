/* test_protobuf: the wire format is read as far as it is sound, and no further. */
#include "coreml/protobuf_reader.h"

#include "support/runner.h"

#include <stdlib.h>

static mls_status st;

/* A message over the bytes of a string literal. */
#define MESSAGE(text) mls_pb_init((const unsigned char *)(text), sizeof(text) - 1, 100)

static void reads_numbers_of_every_length(void)
{
    mls_pb one = MESSAGE("\x05");
    mls_pb two = MESSAGE("\xAC\x02");
    mls_pb ten = MESSAGE("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01");
    mls_pb padded = MESSAGE("\x85\x80\x00");
    uint64_t value = 0;
    CHECK(mls_pb_varint(&one, &value, &st) == MLS_OK && value == 5);
    CHECK(mls_pb_varint(&two, &value, &st) == MLS_OK && value == 300);
    CHECK(mls_pb_varint(&ten, &value, &st) == MLS_OK && value == UINT64_MAX);
    CHECK(mls_pb_varint(&padded, &value, &st) == MLS_OK && value == 5);
    CHECK(mls_pb_done(&one) && mls_pb_done(&two) && mls_pb_done(&ten));
}

static void refuses_a_number_cut_off_anywhere(void)
{
    static const unsigned char bytes[9] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                           0xFF, 0xFF, 0xFF, 0xFF};
    for (size_t length = 0; length <= sizeof bytes; length++) {
        mls_pb message = mls_pb_init(bytes, length, 100);
        uint64_t value = 7;
        CHECK(mls_pb_varint(&message, &value, &st) == MLS_E_FORMAT);
        CHECK(value == 7 && message.at == 0);
        CHECK(st.has_offset && st.offset == 100);
    }
    CHECK_TEXT(st.text, "byte 100: the data ends inside a number");
}

static void refuses_a_number_over_64_bits(void)
{
    mls_pb eleven = MESSAGE("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01");
    mls_pb large = MESSAGE("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02");
    uint64_t value;
    CHECK(mls_pb_varint(&eleven, &value, &st) == MLS_E_FORMAT);
    CHECK(mls_pb_varint(&large, &value, &st) == MLS_E_FORMAT);
    CHECK_TEXT(st.text, "byte 100: a number of more than 64 bits");
}

static void reads_every_wire_type(void)
{
    mls_pb message = MESSAGE("\x08\x2A"
                             "\x11\x01\x02\x03\x04\x05\x06\x07\x08"
                             "\x1A\x03xyz"
                             "\x25\x01\x00\x00\x80");
    mls_pb_field field;
    REQUIRE(mls_pb_next(&message, &field, &st) == MLS_OK);
    CHECK(field.number == 1 && field.wire == MLS_PB_VARINT && field.value == 42);
    CHECK(field.offset == 100);
    REQUIRE(mls_pb_next(&message, &field, &st) == MLS_OK);
    CHECK(field.number == 2 && field.wire == MLS_PB_FIXED64);
    CHECK(field.value == 0x0807060504030201U && field.offset == 102);
    REQUIRE(mls_pb_next(&message, &field, &st) == MLS_OK);
    CHECK(field.number == 3 && field.wire == MLS_PB_BYTES && field.value == 3);
    CHECK(field.bytes.length == 3 && memcmp(field.bytes.data, "xyz", 3) == 0);
    CHECK(mls_pb_offset(&field.bytes) == 113);
    REQUIRE(mls_pb_next(&message, &field, &st) == MLS_OK);
    CHECK(field.number == 4 && field.wire == MLS_PB_FIXED32 &&
          field.value == 0x80000001U);
    CHECK(mls_pb_done(&message));
}

static void refuses_groups_and_unknown_wire_types(void)
{
    static const unsigned char tags[] = {0x0B, 0x0C, 0x0E, 0x0F};
    for (size_t i = 0; i < sizeof tags; i++) {
        const unsigned char bytes[2] = {tags[i], 0};
        mls_pb message = mls_pb_init(bytes, sizeof bytes, 0);
        mls_pb_field field;
        CHECK(mls_pb_next(&message, &field, &st) == MLS_E_FORMAT);
        CHECK(strstr(st.text, "wire type") != NULL && message.at == 0);
    }
    mls_pb group = MESSAGE("\x0B\x0C");
    mls_pb_field field;
    CHECK(mls_pb_next(&group, &field, &st) == MLS_E_FORMAT);
    CHECK_TEXT(st.text,
               "byte 100: field 1 has wire type 3 (a group), which is not read here");
}

static void refuses_impossible_tags(void)
{
    mls_pb zero = MESSAGE("\x00\x00");
    mls_pb large = MESSAGE("\xF8\xFF\xFF\xFF\x10\x00");
    mls_pb_field field;
    CHECK(mls_pb_next(&zero, &field, &st) == MLS_E_FORMAT);
    CHECK_TEXT(st.text, "byte 100: no field can have the tag 0");
    CHECK(mls_pb_next(&large, &field, &st) == MLS_E_FORMAT);
}

static void refuses_a_payload_beyond_its_message(void)
{
    mls_pb longer = MESSAGE("\x0A\x04xyz");
    mls_pb huge = MESSAGE("\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01xyz");
    mls_pb_field field = {.number = 9};
    CHECK(mls_pb_next(&longer, &field, &st) == MLS_E_FORMAT);
    CHECK_TEXT(st.text, "byte 100: field 1 claims 4 bytes, but 3 are left");
    CHECK_TEXT(st.expected, "at most 3 bytes");
    CHECK_TEXT(st.got, "4 bytes");
    CHECK(field.number == 9 && longer.at == 0);
    CHECK(mls_pb_next(&huge, &field, &st) == MLS_E_FORMAT);
}

/* The inner message may not read on into the outer one. */
static void keeps_a_sub_message_inside_its_bounds(void)
{
    mls_pb outer = MESSAGE("\x0A\x02\x0A\x03zzz");
    mls_pb_field field;
    REQUIRE(mls_pb_next(&outer, &field, &st) == MLS_OK);
    mls_pb inner = field.bytes;
    CHECK(mls_pb_next(&inner, &field, &st) == MLS_E_FORMAT);
    CHECK(st.offset == 102);
}

static void refuses_fixed_numbers_cut_off(void)
{
    mls_pb eight = MESSAGE("\x09\x01\x02\x03\x04\x05\x06\x07");
    mls_pb four = MESSAGE("\x0D\x01\x02\x03");
    mls_pb_field field;
    CHECK(mls_pb_next(&eight, &field, &st) == MLS_E_FORMAT);
    CHECK(mls_pb_next(&four, &field, &st) == MLS_E_FORMAT);
}

/* A header may end where the memory does: the payload is somewhere else. */
static void reads_a_header_without_its_payload(void)
{
    mls_pb message = MESSAGE("\xB2\x1F\x80\x80\x80\x80\x04");
    mls_pb_field field;
    REQUIRE(mls_pb_header(&message, &field, &st) == MLS_OK);
    CHECK(field.number == 502 && field.value == (uint64_t)1 << 30);
    CHECK(field.bytes.length == 0 && mls_pb_offset(&message) == 107);
}

static void finds_the_only_field_of_a_number(void)
{
    const mls_pb message = MESSAGE("\x08\x01\x12\x02hi\x18\x01");
    mls_pb out = {0};
    bool found = false;
    CHECK(mls_pb_only(message, 2, "a name", &out, &found, &st) == MLS_OK);
    CHECK(found && out.length == 2 && memcmp(out.data, "hi", 2) == 0);
    mls_pb untouched = {.length = 77};
    CHECK(mls_pb_only(message, 5, "a name", &untouched, &found, &st) == MLS_OK);
    CHECK(!found && untouched.length == 77);
}

static void refuses_a_second_field_of_a_number(void)
{
    mls_pb out = {0};
    bool found = false;
    CHECK(mls_pb_only(MESSAGE("\x12\x01h\x12\x01i"), 2, "a name", &out, &found, &st) ==
          MLS_E_FORMAT);
    CHECK_TEXT(st.text, "byte 103: a name appears twice");
    CHECK(mls_pb_only(MESSAGE("\x10\x01"), 2, "a name", &out, &found, &st) ==
          MLS_E_FORMAT);
    CHECK_TEXT(st.text, "byte 100: a name is not of its type");
    CHECK(mls_pb_only(MESSAGE("\x12\x01h\x12"), 2, "a name", &out, &found, &st) ==
          MLS_E_FORMAT);
    CHECK(!found && out.length == 0);
}

int main(void)
{
    static const test_case tests[] = {
        TEST(reads_numbers_of_every_length),
        TEST(refuses_a_number_cut_off_anywhere),
        TEST(refuses_a_number_over_64_bits),
        TEST(reads_every_wire_type),
        TEST(refuses_groups_and_unknown_wire_types),
        TEST(refuses_impossible_tags),
        TEST(refuses_a_payload_beyond_its_message),
        TEST(keeps_a_sub_message_inside_its_bounds),
        TEST(refuses_fixed_numbers_cut_off),
        TEST(reads_a_header_without_its_payload),
        TEST(finds_the_only_field_of_a_number),
        TEST(refuses_a_second_field_of_a_number),
    };
    return RUN_TESTS(tests);
}
