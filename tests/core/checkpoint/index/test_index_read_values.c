/* Values and columns of an index: valid ones are read, and others give a message. */
#include "checkpoint/index/index_read_values.h"
#include "support/runner.h"

static mls_json *document;

/* Parse an object, and find its member "x". */
static mls_index_source open_text(const char *text, mls_json_member *m)
{
    mls_json_free(document);
    document = NULL;
    mls_status_clear(&status);
    CHECK(mls_json_parse(text, strlen(text), (mls_json_limits){4, 100}, &document,
                         &status) == MLS_OK);
    *m = (mls_json_member)MLS_INDEX_MEMBER("x", MLS_JSON_STRING, false);
    (void)mls_json_members(document, 0, m, 1);
    return (mls_index_source){.json = document, .st = &status};
}

TEST(numbers_are_read_sequentially)
{
    mls_json_member m;
    const mls_index_source in = open_text("{\"x\":\"0,17,9999999999999999999\"}", &m);
    mls_index_column c = mls_index_open_column(&in, &m);
    uint64_t value = 1;
    CHECK(mls_index_next_number(&in, &c, 0, 9, &value) == MLS_OK && value == 0);
    CHECK(mls_index_end_columns(&in, &c, 1) == MLS_E_FORMAT && status.offset == 8);
    CHECK_TEXT(status.text, "\"x\" has more values than its table has rows");
    CHECK(mls_index_next_number(&in, &c, 17, 17, &value) == MLS_OK && value == 17);
    CHECK(mls_index_next_number(&in, &c, 0, UINT64_MAX, &value) == MLS_OK);
    CHECK(value == 9999999999999999999U && mls_index_end_columns(&in, &c, 1) == MLS_OK);
    CHECK(mls_index_next_number(&in, &c, 0, 9, &value) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "\"x\" must have one value for each row of its table");
}

TEST(other_numbers_are_refused)
{
    static const char *const texts[] = {"01",
                                        "1.0",
                                        "1e0",
                                        "-1",
                                        "+1",
                                        " 1",
                                        "1 ",
                                        "x",
                                        "1;2",
                                        ",1",
                                        ",",
                                        "12",
                                        "0",
                                        "11",
                                        "1x",
                                        "18446744073709551617",
                                        "00000000000000000001"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        char text[64];
        mls_json_member m;
        uint64_t value = 77;
        snprintf(text, sizeof text, "{\"x\":\"%s\"}", texts[i]);
        mls_index_source in = open_text(text, &m);
        in.name = (mls_str){"w", 1};
        mls_index_column c = mls_index_open_column(&in, &m);
        CHECK(mls_index_next_number(&in, &c, 1, 10, &value) == MLS_E_FORMAT);
        CHECK(value == 77 && status.offset == 6);
        CHECK_TEXT(status.text, "shard of 'w': \"x\" is not a whole number in its range");
        CHECK_TEXT(status.expected, "1 to 10");
        CHECK_TEXT(status.name, "w");
        CHECK(strncmp(status.got, texts[i], strcspn(texts[i], ",")) == 0);
    }
}

TEST(checksums_have_eight_digits)
{
    mls_json_member m;
    const mls_index_source in = open_text("{\"x\":\"0000000a89abcdeX0\"}", &m);
    mls_index_column c = mls_index_open_column(&in, &m);
    uint32_t crc = 0;
    CHECK(mls_index_next_crc(&in, &c, &crc) == MLS_OK && crc == 10);
    CHECK(mls_index_next_crc(&in, &c, &crc) == MLS_E_FORMAT && crc == 10);
    CHECK(status.offset == 14);
    CHECK_TEXT(status.got, "89abcdeX");
    const mls_index_source other = open_text("{\"x\":\"0000000\"}", &m);
    c = mls_index_open_column(&other, &m);
    CHECK(mls_index_next_crc(&other, &c, &crc) == MLS_E_FORMAT);
}

TEST(a_column_that_is_absent_is_empty)
{
    mls_json_member m;
    const mls_index_source in = open_text("{\"y\":1}", &m);
    const mls_index_column c = mls_index_open_column(&in, &m);
    mls_json_node node = 7;
    CHECK(c.rest.data == NULL && mls_index_end_columns(&in, &c, 1) == MLS_OK);
    CHECK(mls_index_open_array(&in, &m, 3, &node) == MLS_OK && node == MLS_JSON_NONE);
    m.needed = true;
    CHECK(mls_index_find_members(&in, 0, &m, 1) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "\"x\" is missing");
}

TEST(arrays_have_a_value_for_each_row)
{
    mls_json_member m;
    mls_json_node node;
    const mls_index_source in = open_text("{\"x\":[1,null]}", &m);
    CHECK(mls_index_open_array(&in, &m, 2, &node) == MLS_OK);
    CHECK(mls_json_offset(document, node) == 6);
    CHECK(mls_index_open_array(&in, &m, 3, &node) == MLS_E_FORMAT && status.offset == 5);
    CHECK_TEXT(status.expected, "3");
    CHECK_TEXT(status.got, "2");
    CHECK(mls_index_find_members(&in, 0, &m, 1) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "\"x\" is not a string");
    CHECK_TEXT(status.got, "an array");
}

static const char *color_of(int i)
{
    return i == 0 ? "red" : "blue";
}

TEST(words_come_from_a_fixed_set)
{
    mls_json_member m;
    int color = 7;
    const mls_index_source in = open_text("{\"x\":\"blue\"}", &m);
    CHECK(mls_index_read_word(&in, m.node, "x", color_of, 2, "is no color", &color) ==
          MLS_OK);
    CHECK(color == 1);
    const mls_index_source other = open_text("{\"x\":\"blu\"}", &m);
    CHECK(mls_index_read_word(&other, m.node, "x", color_of, 2, "is no color", &color) ==
          MLS_E_FORMAT);
    CHECK_TEXT(status.text, "\"x\" is no color");
    CHECK_TEXT(status.got, "\"blu\"");
    mls_json_free(document);
    document = NULL;
}
