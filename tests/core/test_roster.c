/* The list of indexes in a manifest: read into columns, and what is refused. */
#include "roster.h"
#include "runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GENERATION "0123456789abcdef"
#define HEAD       "{\"generation\":\"" GENERATION "\",\"patterns\":[1,{\"a\":2}],"
#define PATH(rank) "\"path\":\"index/" GENERATION "." #rank ".json\""
#define RECORD(rank, rest)                                                               \
    "{" PATH(rank) ",\"bytes\":7,\"crc32c\":\"0000000a\",\"shards\":3," rest "}"
#define FIRST                                                                            \
    RECORD(0, "\"data_bytes\":9223372036854775807,\"pattern\":1,\"parts\":[5,0]")
#define SECOND                                                                           \
    RECORD(1, "\"data_bytes\":0,\"pattern\":0,\"parts\":[],\"more\":[[\"}]\"]]")
#define THIRD RECORD(2, "\"data_bytes\":1,\"pattern\":1,\"parts\":[6,1]")

#define LIST(records) HEAD "\"indexes\":[" records "]}"

static const char good[] =
    HEAD "\"indexes\": [" FIRST ",\n" SECOND "," THIRD " ] ,\"end\":[\"]\"]}";

static mls_code read_text(const char *text, mls_roster *out)
{
    mls_status st;
    char *copy = malloc(strlen(text)); /* so that reading behind the end is noticed */
    memcpy(copy, text, strlen(text));
    const mls_code code = mls_roster_read(copy, strlen(text), out, &st);
    CHECK(code == MLS_OK || st.text[0] != '\0');
    CHECK(code != MLS_E_FORMAT || (st.has_offset && st.offset <= strlen(text)));
    free(copy);
    return code;
}

static void a_good_list_becomes_columns(void)
{
    mls_roster r;
    REQUIRE(read_text(good, &r) == MLS_OK);
    REQUIRE(r.count == 3 && r.patterns != NULL);
    CHECK(r.bytes[0] == 7 && r.shards[1] == 3 && r.crcs[2] == 10);
    CHECK(r.data_bytes[0] == INT64_MAX && r.data_bytes[1] == 0 && r.data_bytes[2] == 1);
    CHECK(r.patterns[0] == 1 && r.patterns[1] == 0 && r.patterns[2] == 1);
    CHECK(r.part_ends[0] == 2 && r.part_ends[1] == 2 && r.part_ends[2] == 4);
    CHECK(r.parts[0] == 5 && r.parts[1] == 0 && r.parts[2] == 6 && r.parts[3] == 1);
    mls_roster_fini(&r);
}

/* Whoever cuts the list out has the rest, and a JSON text still. */
static void it_says_where_the_list_lies(void)
{
    mls_roster r;
    const char *const list = strstr(good, "[{\"path\"");
    REQUIRE(read_text(good, &r) == MLS_OK);
    CHECK(r.begin == (size_t)(list - good));
    CHECK(strcmp(good + r.end, " ,\"end\":[\"]\"]}") == 0);
    mls_roster_fini(&r);
    static const char last[] = HEAD "\"indexes\":[" FIRST "]}";
    REQUIRE(read_text(last, &r) == MLS_OK);
    CHECK(strcmp(last + r.end, "}") == 0);
    mls_roster_fini(&r);
}

static void without_patterns_there_are_no_parts(void)
{
    mls_roster r;
    REQUIRE(read_text("{\"indexes\":[" FIRST "],\"generation\":\"" GENERATION "\"}",
                      &r) == MLS_OK);
    CHECK(r.count == 1 && r.patterns == NULL && r.part_ends[0] == 0);
    mls_roster_fini(&r);
}

static void a_text_that_is_no_json_is_refused_with_its_place(void)
{
    static const char *const bad[] = {
        "",
        HEAD "\"indexes\":[" FIRST "],\"indexes\":[]}",
        LIST(FIRST) "x",
        LIST(FIRST ","),
        HEAD "\"more\":\"\\ud800\",\"indexes\":[" FIRST "]}",
        HEAD "\"more\":NaN,\"indexes\":[" FIRST "]}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        mls_roster r = {.count = 77};
        CHECK(read_text(bad[i], &r) == MLS_E_FORMAT && r.count == 77);
    }
}

/* What a user noted is nested as deep as that and no deeper, in any Python. */
static void depth_has_a_limit(void)
{
    for (int beyond = 0; beyond < 2; beyond++) {
        const int inner = MLS_MANIFEST_DEPTH - 1 + beyond;
        char open[MLS_MANIFEST_DEPTH + 1], close[sizeof open], text[2000];
        mls_roster r = {0};
        memset(open, '[', sizeof open);
        memset(close, ']', sizeof close);
        (void)snprintf(text, sizeof text,
                       HEAD "\"more\":%.*s%.*s,\"indexes\":[" FIRST "]}", inner, open,
                       inner, close);
        CHECK(read_text(text, &r) == (beyond == 0 ? MLS_OK : MLS_E_FORMAT));
        mls_roster_fini(&r);
    }
}

static void whatever_is_not_as_it_should_be_is_refused(void)
{
    static const char *const bad[] = {
        "[]",
        "{}",
        "{\"generation\":\"" GENERATION "\"}",
        "{\"generation\":\"0123\",\"indexes\":[" FIRST "]}",
        "{\"generation\":5,\"indexes\":[" FIRST "]}",
        "{\"indexes\":[" FIRST "]}",
        HEAD "\"indexes\":{}}",
        "{\"generation\":\"" GENERATION "\",\"patterns\":{},\"indexes\":[" FIRST "]}",
        LIST(""),
        LIST("5"),
        LIST("[]"),
        LIST(SECOND),
        LIST(FIRST "," FIRST),
        LIST(RECORD(0, "\"data_bytes\":9223372036854775808,\"pattern\":1,\"parts\":[]")),
        LIST(RECORD(0, "\"data_bytes\":-1,\"pattern\":1,\"parts\":[]")),
        LIST(RECORD(0, "\"data_bytes\":1.0,\"pattern\":1,\"parts\":[]")),
        LIST(RECORD(0, "\"data_bytes\":\"1\",\"pattern\":1,\"parts\":[]")),
        LIST(RECORD(0, "\"data_bytes\":1,\"pattern\":2,\"parts\":[]")),
        LIST(RECORD(0, "\"data_bytes\":1,\"pattern\":1,\"parts\":5")),
        LIST(RECORD(0, "\"data_bytes\":1,\"pattern\":1,\"parts\":[true]")),
        LIST(RECORD(0, "\"data_bytes\":1,\"pattern\":1,\"parts\":[9223372036854775808]")),
        LIST(RECORD(0, "\"data_bytes\":1,\"pattern\":1")),
        LIST(RECORD(0, "\"data_bytes\":1,\"parts\":[]")),
        LIST(RECORD(0, "\"pattern\":1,\"parts\":[]")),
        LIST("{" PATH(0) ",\"bytes\":0,\"crc32c\":\"0000000a\",\"shards\":3,"
                         "\"data_bytes\":1,\"pattern\":1,\"parts\":[]}"),
        LIST("{" PATH(0) ",\"bytes\":1,\"crc32c\":\"0000000A\",\"shards\":3,"
                         "\"data_bytes\":1,\"pattern\":1,\"parts\":[]}"),
        LIST("{" PATH(0) ",\"bytes\":1,\"crc32c\":\"000000a\",\"shards\":3,"
                         "\"data_bytes\":1,\"pattern\":1,\"parts\":[]}"),
        LIST("{\"path\":\"../x\",\"bytes\":1,\"crc32c\":\"0000000a\",\"shards\":3,"
             "\"data_bytes\":1,\"pattern\":1,\"parts\":[]}"),
        /* ranks of one pattern have equally many parts */
        LIST(FIRST "," RECORD(1, "\"data_bytes\":1,\"pattern\":1,\"parts\":[1]")),
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        mls_roster r = {.count = 77};
        CHECK(read_text(bad[i], &r) == MLS_E_VALUE && r.count == 77);
    }
}

/* More parts than a pattern can have groups. */
static void a_rank_has_32_parts_at_most(void)
{
    char text[1024], parts[256] = "1";
    for (size_t count = 1; count <= 33; count++) {
        mls_roster r;
        snprintf(text, sizeof text,
                 LIST(RECORD(0, "\"data_bytes\":1,\"pattern\":1,\"parts\":[%s]")), parts);
        const mls_code code = read_text(text, &r);
        CHECK(code == (count <= 32 ? MLS_OK : MLS_E_VALUE));
        if (code == MLS_OK) {
            CHECK(r.part_ends[0] == count);
            mls_roster_fini(&r);
        }
        strcat(parts, ",1");
    }
}

static const test_case tests[] = {
    TEST(a_good_list_becomes_columns),
    TEST(it_says_where_the_list_lies),
    TEST(without_patterns_there_are_no_parts),
    TEST(a_text_that_is_no_json_is_refused_with_its_place),
    TEST(depth_has_a_limit),
    TEST(whatever_is_not_as_it_should_be_is_refused),
    TEST(a_rank_has_32_parts_at_most),
};

int main(void)
{
    return RUN_TESTS(tests);
}
