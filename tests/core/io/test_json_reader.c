/* The JSON reader: the grammar of RFC 8259, and invalid documents. */
#include "base/memory.h"
#include "io/json_reader.h"
#include "support/runner.h"

#include <stdlib.h>

static const mls_json_limits roomy = {.depth = 64, .nodes = 1 << 20};

static mls_json *doc; /* of the current test */

AFTER_EACH
{
    mls_json_free(doc);
    doc = NULL;
}

static mls_code parse(const char *text)
{
    mls_json_free(doc);
    doc = NULL;
    return mls_json_parse(text, strlen(text), roomy, &doc, &status);
}

static bool accepts(const char *text, size_t length)
{
    mls_json *read = NULL;
    mls_status st;
    const mls_code code = mls_json_parse(text, length, roomy, &read, &st);
    mls_json_free(read);
    return code == MLS_OK;
}

static bool text_is(mls_json_node node, const char *expected)
{
    return mls_str_is(mls_json_text(doc, node), expected);
}

TEST(every_kind_of_value_is_read)
{
    REQUIRE(parse(" { \"a\" : [1, -2.5e+3 ,true,false,null,\"x\"], \"b\":{} }\n") ==
            MLS_OK);
    CHECK(mls_json_type_of(doc, 0) == MLS_JSON_OBJECT);
    CHECK(mls_json_size(doc, 0) == 2);
    mls_json_node list = mls_json_find(doc, 0, "a");
    REQUIRE(list != MLS_JSON_NONE);
    CHECK(mls_json_offset(doc, list) == 9);
    CHECK(mls_json_size(doc, list) == 6);
    static const mls_json_type types[] = {MLS_JSON_NUMBER, MLS_JSON_NUMBER,
                                          MLS_JSON_TRUE,   MLS_JSON_FALSE,
                                          MLS_JSON_NULL,   MLS_JSON_STRING};
    mls_json_node item = mls_json_first(doc, list);
    for (size_t i = 0; i < 6; i++, item = mls_json_next(doc, item)) {
        REQUIRE(item != MLS_JSON_NONE);
        CHECK(mls_json_type_of(doc, item) == types[i]);
        CHECK(mls_json_key(doc, item).length == 0);
        CHECK(mls_json_size(doc, item) == 0);
    }
    CHECK(item == MLS_JSON_NONE);
    CHECK(text_is(mls_json_first(doc, list), "1"));
    CHECK(text_is(mls_json_next(doc, mls_json_first(doc, list)), "-2.5e+3"));
    mls_json_node empty = mls_json_find(doc, 0, "b");
    CHECK(mls_json_type_of(doc, empty) == MLS_JSON_OBJECT);
    CHECK(mls_json_first(doc, empty) == MLS_JSON_NONE);
    CHECK(mls_json_next(doc, empty) == MLS_JSON_NONE);
    CHECK(mls_json_find(doc, list, "a") == MLS_JSON_NONE);
    CHECK(mls_json_find(doc, 0, "c") == MLS_JSON_NONE);
    CHECK(mls_json_text(doc, list).length == 0);
    mls_json_free(NULL);
}

TEST(members_follow_nested_containers)
{
    REQUIRE(parse("[[1,[2,{\"k\":[3]}]],4,{\"z\":5}]") == MLS_OK);
    CHECK(mls_json_size(doc, 0) == 3);
    mls_json_node second = mls_json_next(doc, mls_json_first(doc, 0));
    CHECK(text_is(second, "4"));
    mls_json_node third = mls_json_next(doc, second);
    CHECK(text_is(mls_json_find(doc, third, "z"), "5"));
    CHECK(mls_json_next(doc, third) == MLS_JSON_NONE);
}

/* Strings are scanned eight bytes at a time: every byte value counts at every
 * position. */
TEST(every_byte_is_checked_at_every_string_position)
{
    for (int byte = 0; byte < 256; byte++) {
        const bool is_printable =
            byte >= ' ' && byte < 0x80 && byte != '"' && byte != '\\';
        for (size_t place = 1; place < 20; place++) {
            char text[] = "\"~~~~~~~~~~~~~~~~~~~\"";
            text[place] = (char)byte;
            CHECK(accepts(text, sizeof text - 1) == is_printable);
        }
    }
}

TEST(escapes_are_decoded_to_utf8)
{
    REQUIRE(
        parse("[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\", \"\\u0041\\u00e9\\u20AC\\ud83d\\ude00\", "
              "\"a\\u0000b\", \"\xC3\xA9\xF0\x9F\x98\x80\"]") == MLS_OK);
    mls_json_node node = mls_json_first(doc, 0);
    CHECK(text_is(node, "\"\\/\b\f\n\r\t"));
    node = mls_json_next(doc, node);
    CHECK(text_is(node, "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"));
    node = mls_json_next(doc, node);
    const mls_str with_nul = mls_json_text(doc, node);
    CHECK(with_nul.length == 3 && memcmp(with_nul.data, "a\0b", 3) == 0);
    node = mls_json_next(doc, node);
    CHECK(text_is(node, "\xC3\xA9\xF0\x9F\x98\x80"));
}

TEST(integers_are_read_up_to_two_to_the_64)
{
    static const struct {
        const char *text;
        bool good;
        uint64_t value;
    } cases[] = {{"0", true, 0},
                 {"18446744073709551615", true, UINT64_MAX},
                 {"18446744073709551616", false, 0},
                 {"99999999999999999999999", false, 0},
                 {"-1", false, 0},
                 {"-0", false, 0},
                 {"1.0", false, 0},
                 {"1e3", false, 0},
                 {"\"1\"", false, 0},
                 {"true", false, 0},
                 {"[]", false, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint64_t value = 77;
        REQUIRE(parse(cases[i].text) == MLS_OK);
        CHECK(mls_json_u64(doc, 0, &value) == cases[i].good);
        CHECK(value == (cases[i].good ? cases[i].value : 77));
    }
}

TEST(invalid_json_reports_its_offset)
{
    static const struct {
        const char *text;
        uint64_t offset;
    } cases[] = {{"", 0},
                 {"  ", 2},
                 {"\xEF\xBB\xBF{}", 0},
                 {"{} x", 3},
                 {"[1,]", 3},
                 {"[,1]", 1},
                 {"[1 2]", 3},
                 {"[1}", 2},
                 {"]", 0},
                 {"{\"a\"}", 4},
                 {"{\"a\":}", 5},
                 {"{\"a\":1,}", 7},
                 {"{a:1}", 1},
                 {"{1:1}", 1},
                 {"{\"a\" 1}", 5},
                 {"[1", 2},
                 {"{\"a\":1", 6},
                 {"01", 1},
                 {"-", 1},
                 {"+1", 0},
                 {"1.", 2},
                 {".5", 0},
                 {"1e", 2},
                 {"1e+", 3},
                 {"0x10", 1},
                 {"NaN", 0},
                 {"Infinity", 0},
                 {"tru", 3},
                 {"nulL", 3},
                 {"'a'", 0},
                 {"\"a", 2},
                 {"\"\\", 2},
                 {"\"\\x\"", 2},
                 {"\"\\u12g4\"", 5},
                 {"\"a\nb\"", 2},
                 {"\"a\x7F\x01\"", 3},
                 {"[1] // no", 4},
                 {"\"\\ud800\"", 1},
                 {"\"\\udc00\"", 1},
                 {"\"\\ud800\\u0041\"", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const mls_code code = parse(cases[i].text);
        CHECK(code == MLS_E_FORMAT && doc == NULL);
        CHECK(status.has_offset && status.offset == cases[i].offset);
        if (status.offset != cases[i].offset) {
            printf("    %s: offset %d: %s\n", cases[i].text, (int)status.offset,
                   status.text);
        }
    }
}

TEST(bad_utf8_is_refused)
{
    static const char *const bad[] = {
        "\x80",         "\xC0\x80",         "\xC1\xBF",         "\xC3",
        "\xE0\x80\x80", "\xE0\x9F\xBF",     "\xED\xA0\x80",     "\xED\xBF\xBF",
        "\xE2\x82",     "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80",
        "\xFF",         "\xE2(\xA1",        "\xF0\x9F\x98"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[16];
        snprintf(text, sizeof text, "\"%s\"", bad[i]);
        CHECK(!accepts(text, strlen(text)));
    }
}

TEST(text_with_a_nul_byte_is_refused)
{
    CHECK(!accepts("[1\0]", 4));
    CHECK(!accepts("\"a\0b\"", 5));
    CHECK(!accepts("[1]\0", 4));
}

TEST(duplicate_keys_are_refused_however_they_are_spelled)
{
    CHECK_FAILS(parse("{\"a\":1,\"b\":2,\"\\u0061\":3}"), MLS_E_FORMAT,
                "JSON has the key 'a' twice in one object");
    CHECK(status.offset == 13);
    CHECK_TEXT(status.name, "a");
    CHECK(!accepts("[{\"x\":{\"\":1,\"\":2}}]", 19));
    CHECK(accepts("[{\"x\":1},{\"x\":1,\"xx\":{\"x\":2}}]", 30));
}

/* A document of `count` different keys, and one more that repeats the first. */
TEST(duplicate_is_detected_among_20000_keys)
{
    enum { COUNT = 20000 };
    char *text = malloc(COUNT * 16);
    REQUIRE(text != NULL);
    size_t used = (size_t)sprintf(text, "{");
    for (int i = 0; i < COUNT; i++) {
        used += (size_t)sprintf(text + used, "\"k%d\":%d,", (i * 7919) % COUNT, i);
    }
    text[used - 1] = '}';
    CHECK(accepts(text, used));
    used += (size_t)sprintf(text + used - 1, ",\"k0\":0}") - 1;
    CHECK(!accepts(text, used));
    free(text);
}

/* The reader tries the previous object's keys first; the result must be the same. */
TEST(cached_keys_do_not_leak_into_the_next_object)
{
    static const struct {
        const char *text;
        bool good;
    } cases[] = {
        {"[{\"a\":1,\"b\":2},{\"a\":3,\"b\":4},{\"b\":5,\"a\":6},{\"a\":7}]", true},
        {"[{\"a\":1,\"b\":2},{\"a\":3,\"b\":4,\"c\":5},{\"a\":6,\"ab\":7}]", true},
        {"[{\"a\":1,\"b\":2},{\"a\" :3, \"b\": 4},{\"a\":5,\"b\":6}]", true},
        {"[{\"a\":1,\"b\":2},{\"a\":{\"a\":3,\"b\":4},\"b\":5}]", true},
        {"[{\"a\":1,\"b\":2},{\"a\":[{\"a\":3,\"b\":4}],\"a\":5}]", false},
        {"[{\"a\":1,\"b\":2},{\"a\":3,\"b\":4,\"a\":5}]", false},
        {"[{\"a\":1,\"b\":2},{\"a\":3,\"a\":4}]", false},
        {"[{\"a\":1,\"b\":2},{\"b\":3,\"b\":4}]", false},
        {"[{\"a\":1,\"b\":2},{\"a\":3,\"b\"}]", false},
        {"[{\"a\":1,\"b\":2},{\"a\":3,\"b\":}]", false},
        {"[{\"a\":1,\"b\":2},{\"a\":3,\"b\":", false},
        {"[{\"a\":1,\"b\":2},{\"a\":3,\"b\"", false},
        {"[{\"a\\\":\":1,\"b\":2},{\"a\":\":1,\"b\":2}]", false},
        {"[{\"a\\u0022:\":1,\"b\":2},{\"a\\u0022:\":1,\"b\":2}]", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK(accepts(cases[i].text, strlen(cases[i].text)) == cases[i].good);
    }
    REQUIRE(parse(cases[0].text) == MLS_OK);
    static const char *const expected[][2] = {
        {"1", "2"}, {"3", "4"}, {"6", "5"}, {"7", NULL}};
    mls_json_node object = mls_json_first(doc, 0);
    for (size_t i = 0; i < 4; i++, object = mls_json_next(doc, object)) {
        CHECK(text_is(mls_json_find(doc, object, "a"), expected[i][0]));
        const mls_json_node b = mls_json_find(doc, object, "b");
        CHECK(expected[i][1] == NULL ? b == MLS_JSON_NONE : text_is(b, expected[i][1]));
    }
}

/* Members found in an object: returns the first bad entry, and checks the texts of all
 * members found. */
static size_t members_of(const char *text, mls_json_node *nodes)
{
    mls_json_member table[] = {
        {.key = "a", .length = 1, .type = MLS_JSON_NUMBER, .needed = true},
        {.key = "four", .length = 4, .type = MLS_JSON_STRING},
        {.key = "has_eight", .length = 9, .type = MLS_JSON_NUMBER, .needed = true},
        {.key = "longer_than_sixteen", .length = 19, .type = MLS_JSON_ARRAY}};
    const size_t count = sizeof table / sizeof *table;
    if (parse(text) != MLS_OK) {
        CHECK(false);
        return SIZE_MAX;
    }
    const size_t bad = mls_json_members(doc, 0, table, count);
    for (size_t i = 0; i < count; i++) {
        nodes[i] = table[i].node;
        CHECK(mls_json_find(doc, 0, table[i].key) == table[i].node);
    }
    return bad;
}

TEST(member_table_finds_members_in_any_order)
{
    mls_json_node n[4];
    CHECK(members_of("{\"a\":1,\"four\":\"x\",\"has_eight\":2,"
                     "\"longer_than_sixteen\":[]}",
                     n) == 4);
    CHECK(n[0] == 1 && n[1] == 2 && n[2] == 3 && n[3] == 4);
    /* another order, unknown members in between, and optional members missing */
    CHECK(members_of("{\"has_eight\":2,\"b\":0,\"a\":1,\"c\":{\"a\":\"\"}}", n) == 4);
    CHECK(n[1] == MLS_JSON_NONE && n[3] == MLS_JSON_NONE);
    /* keys that differ in one character, at any position */
    CHECK(members_of("{\"a\":1,\"foul\":1,\"gour\":1,\"has_eighu\":2,\"ias_eight\":1,"
                     "\"has_fight\":1,\"longer_than_sixteem\":1}",
                     n) == 2);
    /* the first bad one in the order of the table, not of the text */
    CHECK(members_of("{\"has_eight\":null,\"four\":4,\"a\":1}", n) == 1);
    CHECK(members_of("{\"has_eight\":[],\"a\":1}", n) == 2);
    CHECK(members_of("{}", n) == 0);
    CHECK(members_of("[1,2]", n) == 0);
    CHECK(members_of("7", n) == 0);
}

TEST(nesting_depth_is_bounded_without_recursion)
{
    enum { DEPTH = 1000000 };
    char *text = malloc(2 * DEPTH);
    REQUIRE(text != NULL);
    memset(text, '[', DEPTH);
    memset(text + DEPTH, ']', DEPTH);
    const mls_json_limits few = {.depth = 5, .nodes = 100};
    CHECK(mls_json_parse(text, 2 * DEPTH, few, &doc, &status) == MLS_E_FORMAT);
    CHECK(status.offset == 5);
    CHECK(mls_json_parse(text + DEPTH - 5, 10, few, &doc, &status) == MLS_OK);
    mls_json_free(doc);
    doc = NULL;
    const mls_json_limits all = {.depth = DEPTH, .nodes = DEPTH};
    CHECK(mls_json_parse(text, 2 * DEPTH, all, &doc, &status) == MLS_OK);
    free(text);
}

TEST(the_number_of_values_is_bounded)
{
    const mls_json_limits few = {.depth = 5, .nodes = 3};
    CHECK(mls_json_parse("[1,2]", 5, few, &doc, &status) == MLS_OK);
    mls_json_free(doc);
    doc = NULL;
    CHECK_FAILS(mls_json_parse("[1,2,3]", 7, few, &doc, &status), MLS_E_FORMAT,
                "JSON has more than 3 values");
    CHECK(status.offset == 5 && doc == NULL);
}

TEST(truncated_documents_are_refused)
{
    const char *text = "{\"a\":[1.5e3,\"\\u00e9\xC3\xA9\",true],\"b\":{\"c\":null}}";
    for (size_t length = 0; length < strlen(text); length++) {
        CHECK(!accepts(text, length));
    }
    CHECK(accepts(text, strlen(text)));
}
