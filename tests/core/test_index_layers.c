/* Indexes with sparse shards: there and back, and those that lie about their layers. */
#include "index.h"
#include "runner.h"
#include "seal.h"

#include <stdlib.h>

enum { ROOM = 4096 };

/* Two parts of w with layers, one of them without any, and a plain shard between. */
#define LAYER                                                                            \
    "{\"file\":0,\"offset\":4126,\"bytes\":14,\"crc32c\":\"89abcdef\",\"row\":4,"        \
    "\"rows\":\"1,1,1,1\"}"
static const char good[] = MLS_SEAL_START
    ",\n\"format\":\"mlstate.index\",\"format_version\":2,\n\"generation\":"
    "\"0123456789abcdef\",\"rank\":0,\"world_size\":1,\n\"files\":["
    "\n{\"path\":\"params/w.safetensors\",\"bytes\":4200,\"header_crc32c\":\"01234567\"}]"
    ",\n\"shards\":["
    "\n{\"section\":\"params\",\"name\":\"v\",\"dtype\":\"I16\",\"shape\":[15],"
    "\"layout\":[],\"part\":0,\"version\":1,\"file\":0,\"offset\":4096,\"bytes\":30,"
    "\"crc32c\":\"fedcba98\"},"
    "\n{\"section\":\"params\",\"name\":\"w\",\"dtype\":\"I16\",\"shape\":[6,5],"
    "\"layout\":[[0,2]],\"part\":0,\"version\":2,\"layers\":["
    "{\"file\":0,\"offset\":4146,\"bytes\":30,\"crc32c\":\"00000001\"}," LAYER "]},"
    "\n{\"section\":\"params\",\"name\":\"w\",\"dtype\":\"I16\",\"shape\":[6,5],"
    "\"layout\":[[0,2]],\"part\":1,\"version\":1,\"layers\":[]}]}\n";

static const mls_crc_kernels *const crc = &mls_crc_scalar;

static size_t change(const char *from, const char *to, char out[ROOM])
{
    const char *at = strstr(good, from);
    CHECK(at != NULL); /* the good index has it */
    at = at == NULL ? good : at;
    snprintf(out, ROOM, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
    (void)mls_seal(out, strlen(out), crc);
    return strlen(out);
}

static mls_code parse(const char *from, const char *to, mls_index *out, mls_status *st)
{
    char text[ROOM];
    const size_t length = change(from, to, text);
    mls_status_clear(st);
    return mls_index_parse(text, length, crc, out, st);
}

static bool is(const mls_extent *extent, size_t begin, size_t count, size_t at)
{
    return extent->begin == begin && extent->count == count && extent->at == at;
}

static void layers_go_there_and_back(void)
{
    mls_index index = {0};
    mls_status st;
    mls_buffer text = {0};
    uint32_t sum;
    REQUIRE(parse("\"rank\":0", "\"rank\":0", &index, &st) == MLS_OK);
    REQUIRE(index.shard_count == 3);
    const mls_index_shard *plain = &index.shards[0], *w = &index.shards[1];
    const mls_index_shard *zero = &index.shards[2];
    CHECK(plain->layers == NULL && plain->offset == 4096 && plain->crcs[0] == plain->crc);
    CHECK(w->bytes == 30 && zero->bytes == 30 && mls_index_stored_bytes(w) == 44);
    REQUIRE(w->layers != NULL && w->layers->count == 2 && zero->layers != NULL);
    const mls_layer *full = &w->layers->list[0], *rows = &w->layers->list[1];
    CHECK(full->row == 0 && full->run_count == 0 && full->offset == 4146);
    CHECK(rows->row == 4 && rows->bytes == 14 && rows->crcs[0] == 0x89abcdef);
    REQUIRE(rows->run_count == 2 && rows->visible_count == 2 && full->visible_count == 2);
    CHECK(is(&rows->runs[0], 4, 4, 0) && is(&rows->runs[1], 12, 3, 4));
    CHECK(is(&rows->visible[0], 4, 4, 0) && is(&rows->visible[1], 12, 3, 4));
    CHECK(is(&full->visible[0], 0, 4, 0) && is(&full->visible[1], 8, 4, 8));
    CHECK(w->layers->zero_count == 0 && zero->layers->count == 0);
    REQUIRE(zero->layers->zero_count == 1 && is(zero->layers->zeros, 0, 15, 0));
    /* written again it is the very text */
    CHECK(mls_index_build(&index, crc, &text, &sum, &st) == MLS_OK);
    char expected[ROOM];
    const size_t length = change("\"rank\":0", "\"rank\":0", expected);
    CHECK(text.length == length && memcmp(text.data, expected, length) == 0);
    mls_buffer_fini(&text);
    mls_index_fini(&index);
    CHECK(index.layers == NULL && index.extents == NULL && index.sparse == NULL);
}

static void without_layers_it_is_version_1(void)
{
    mls_index index = {0};
    mls_status st;
    mls_buffer text = {0};
    uint32_t sum;
    /* what is left are the first shard and a version that it does not need */
    char change_to[ROOM];
    const char *second = strstr(good, ",\n{\"section\":\"params\",\"name\":\"w\"");
    REQUIRE(second != NULL);
    snprintf(change_to, sizeof change_to, "%.*s]}\n", (int)(second - good), good);
    (void)mls_seal(change_to, strlen(change_to), crc);
    REQUIRE(mls_index_parse(change_to, strlen(change_to), crc, &index, &st) == MLS_OK);
    CHECK(mls_index_build(&index, crc, &text, &sum, &st) == MLS_OK);
    mls_buffer_put(&text, "", 1);
    CHECK(strstr(text.data, "\"format_version\":1,") != NULL);
    mls_buffer_fini(&text);
    mls_index_fini(&index);
}

typedef struct lie {
    const char *from, *to, *name, *word;
} lie;

static void layers_that_lie_are_refused(void)
{
#define ROWS "\"row\":4,\"rows\":\"1,1,1,1\""
    static const lie lies[] = {
        /* to version 1 layers are nothing, and a place is missing */
        {"\"format_version\":2", "\"format_version\":1", "w", "\"file\" is missing"},
        {"\"layers\":[]", "\"layers\":{}", "w", "not an array"},
        {"\"layers\":[]", "\"layers\":null", "w", "not an array"},
        {"\"layers\":[]", "\"later\":[]", "w", "missing"},
        {"\"layers\":[]", "\"layers\":[],\"file\":0", "w", "beside"},
        {"\"layers\":[]", "\"bytes\":30,\"layers\":[]", "w", "beside"},
        {"\"layers\":[]", "\"layers\":[],\"crc32c\":\"00000000\"", "w", "beside"},
        {"\"layers\":[]", "\"layers\":[],\"blocks\":\"\"", "w", "beside"},
        {"\"layers\":[]", "\"layers\":[[]]", "w", "no object"},
        {"\"layers\":[]", "\"layers\":[7]", "w", "no object"},
        {"\"layers\":[]", "\"layers\":[{}]", "w", "missing"},
        {"\"layers\":[]",
         "\"layers\":[{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}]", "w",
         "too many"},
        {"," ROWS, "", "w", "only the first layer is full"},
        {"\"row\":4,", "", "w", "\"row\" is missing"},
        {",\"rows\":\"1,1,1,1\"", "", "w", "\"rows\" is missing"},
        {"\"row\":4", "\"row\":0", "w", "range"},
        {"\"row\":4", "\"row\":-4", "w", "range"},
        {"\"row\":4", "\"row\":4.0", "w", "range"},
        {"\"row\":4", "\"row\":18446744073709551616", "w", "range"},
        {"\"row\":4", "\"row\":\"4\"", "w", "not a number"},
        {"\"row\":4", "\"row\":5", "w", "\"rows\" are not"}, /* only three of them */
        {"\"row\":4", "\"row\":18446744073709551615", "w", "\"rows\" are not"},
        {"\"row\":4", "\"row\":3", "w", "\"bytes\" are not"},
        {"\"1,1,1,1\"", "\"\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,1,1\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,0,1,1\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,1,0,1\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,1,1,2\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,-1\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,18446744073709551615\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"18446744073709551615,1\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"18446744073709551616,1\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,1.0\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,[1]\"", "w", "\"rows\" are not"},
        {"\"1,1,1,1\"", "\"1,2\"", "w", "\"bytes\" are not"},
        {"\"1,1,1,1\"", "[1,1,1,1]", "w", "not a string"},
        {"\"bytes\":14", "\"bytes\":12", "w", "\"bytes\" are not"},
        {"\"bytes\":14", "\"bytes\":0", "w", "\"bytes\" are not"},
        {"\"offset\":4146", "\"offset\":4171", "w", "end of the file"},
        {"\"offset\":4146", "\"offset\":4139", "w", "another of its layers"},
        {"\"offset\":4146", "\"offset\":4090", "v", "another shard"},
        {"\"file\":0,\"offset\":4126", "\"file\":1,\"offset\":4126", "w", "files"},
        {"\"89abcdef\"", "\"89abcde\"", "w", "8 hex"},
        {"\"89abcdef\"", "\"89abcdef\",\"blocks\":\"89abcdef\"", "w", "no longer"},
        /* no elements: a full layer of them would have no bytes */
        {"\"shape\":[6,5],\"layout\":[[0,2]],\"part\":0",
         "\"shape\":[0],\"layout\":[],"
         "\"part\":0",
         "w", "\"bytes\" are not"},
        {"\"shape\":[6,5],\"layout\":[[0,2]],\"part\":1",
         "\"shape\":[4611686018427387904],\"layout\":[],\"part\":0", "w", "memory"},
    };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        mls_index index = {.rank = 77};
        mls_status st;
        const mls_code code = parse(lies[i].from, lies[i].to, &index, &st);
        const bool refused = code == MLS_E_FORMAT && index.rank == 77 &&
                             strstr(st.text, lies[i].word) != NULL &&
                             strcmp(st.name, lies[i].name) == 0;
        if (!refused) {
            printf("    %s -> %s: %s (%s)\n", lies[i].from, lies[i].to,
                   code == MLS_OK ? "accepted" : st.text, st.name);
        }
        CHECK(refused);
    }
}

/* Any value by any other one: refused, or good; never worse. */
static void every_value_may_be_anything_else(void)
{
    static const char *const values[] = {
        "null", "0",  "1",     "-1",    "3",    "18446744073709551615", "\"\"",
        "[]",   "{}", "[0,1]", "[0,8]", "[{}]", "\"00000000\""};
    size_t refused = 0, all = 0;
    for (const char *at = good + sizeof MLS_SEAL_START; *at != '\0'; at++) {
        const size_t length = strcspn(at, ",:[]{}\n");
        if (strchr(":[,", at[-1]) == NULL || length == 0 || at[length] == ':') {
            continue;
        }
        for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
            char text[ROOM];
            mls_index index = {0};
            mls_status st;
            snprintf(text, ROOM, "%.*s%s%s", (int)(at - good), good, values[i],
                     at + length);
            (void)mls_seal(text, strlen(text), crc);
            all++;
            if (mls_index_parse(text, strlen(text), crc, &index, &st) != MLS_OK) {
                refused++;
            }
            mls_index_fini(&index);
        }
    }
    CHECK(all > 500 && refused > all / 2 && refused < all);
}

static const test_case tests[] = {
    TEST(layers_go_there_and_back),
    TEST(without_layers_it_is_version_1),
    TEST(layers_that_lie_are_refused),
    TEST(every_value_may_be_anything_else),
};

int main(void)
{
    return RUN_TESTS(tests);
}
