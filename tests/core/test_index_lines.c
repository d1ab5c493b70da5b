/* Our own words: read as the reader of any JSON reads them, or left to it. */
#include "index_lines.h"
#include "runner.h"
#include "seal.h"

#include <stdlib.h>

enum { ROOM = 8192 };

static const mls_crc_kernels *const crc = &mls_crc_scalar;

/* Shards of every kind that are read by lines, as mls_index_build would write them. */
static const char good[] = MLS_SEAL_START
    ",\n\"format\":\"mlstate.index\",\"format_version\":1,"
    "\n\"generation\":\"0123456789abcdef\",\"rank\":3,\"world_size\":16,"
    "\n\"files\":["
    "\n{\"path\":\"params/"
    "w.safetensors\",\"bytes\":1052724,\"header_crc32c\":\"01234567\"}"
    ",\n{\"path\":\"optim_state/w.safetensors\",\"bytes\":4122,\"header_crc32c\":"
    "\"89abcdef\"}],"
    "\n\"shards\":["
    "\n{\"section\":\"params\",\"name\":\"\",\"dtype\":\"U8\",\"shape\":[],"
    "\"layout\":[],\"part\":0,\"version\":1,\"file\":0,\"offset\":1052719,"
    "\"bytes\":1,\"crc32c\":\"0000000a\"},"
    "\n{\"section\":\"params\",\"name\":\"long\",\"dtype\":\"U8\",\"shape\":[1048577],"
    "\"layout\":[],\"part\":0,\"version\":1,\"file\":0,\"offset\":4096,"
    "\"bytes\":1048577,\"crc32c\":\"11111111\",\"blocks\":\"2222222233333333\"},"
    "\n{\"section\":\"params\",\"name\":\"w\",\"dtype\":\"F32\",\"shape\":[4,6],"
    "\"layout\":[[0,2],[\"flat\",3]],\"part\":5,\"version\":7,\"file\":0,"
    "\"offset\":1052680,\"bytes\":16,\"crc32c\":\"fedcba98\"},"
    "\n{\"section\":\"optim_state\",\"name\":\"step\",\"dtype\":\"F16\",\"shape\":[1],"
    "\"layout\":[],\"part\":0,\"version\":1,\"file\":1,\"offset\":4120,\"bytes\":2,"
    "\"crc32c\":\"00000000\"},"
    "\n{\"section\":\"optim_state\",\"name\":\"w\",\"state\":\"col\",\"dtype\":\"F16\","
    "\"shape\":[1,12],\"layout\":[],\"part\":0,\"axes\":[null,1],\"tier\":\"cold\","
    "\"version\":2,\"file\":1,\"offset\":4096,\"bytes\":24,\"crc32c\":\"00000001\"},"
    "\n{\"section\":\"optim_state\",\"name\":\"x.y\",\"state\":\"m\",\"dtype\":\"F64\","
    "\"shape\":[2],\"layout\":[[0,3]],\"part\":2,\"version\":1,\"file\":1,"
    "\"offset\":4120,\"bytes\":0,\"crc32c\":\"00000000\"}]}\n";

/* What mls_index_build makes of an index, with nothing lost. */
static void check_same(const mls_index *a, const mls_index *b)
{
    mls_buffer first = {0}, second = {0};
    mls_status st;
    uint32_t sum = 0, again = 1;
    CHECK(mls_index_build(a, crc, &first, &sum, &st) == MLS_OK);
    CHECK(mls_index_build(b, crc, &second, &again, &st) == MLS_OK);
    CHECK(sum == again && first.length == second.length &&
          memcmp(first.data, second.data, first.length) == 0);
    for (size_t i = 0; i < a->shard_count && i < b->shard_count; i++) {
        CHECK(a->shards[i].crcs[0] == b->shards[i].crcs[0]); /* of one block too */
    }
    mls_buffer_fini(&first);
    mls_buffer_fini(&second);
}

/* Whether lines are what the text is read by; then any reader must read the same.  What
 * is wrong is told in the same words either way.  A space behind the seal makes it a text
 * that is none of ours, whose members lie one byte later. */
static bool read_by_lines(const char *text, size_t length)
{
    mls_index lines = {.rank = 77}, any = {0}, both = {0};
    mls_status st = {0}, st_any = {0}, st_both = {0};
    char *exact = malloc(length + 1); /* so that reading behind the end is noticed */
    char *spaced = malloc(length + 2);
    const size_t start = sizeof MLS_SEAL_START - 1;
    bool ours = false;
    CHECK(exact != NULL && spaced != NULL);
    if (exact != NULL && spaced != NULL) {
        memcpy(exact, text, length);
        (void)mls_seal(exact, length, crc);
        memcpy(spaced, text, length);
        memmove(spaced + start + 1, spaced + start, length - start);
        spaced[start] = ' ';
        (void)mls_seal(spaced, length + 1, crc);
        ours = mls_index_lines_read(exact, length, &lines, &st) == MLS_OK;
        const mls_code code = mls_index_parse(spaced, length + 1, crc, &any, &st_any);
        CHECK(mls_index_parse(exact, length, crc, &both, &st_both) == code);
        CHECK(ours ? code == MLS_OK : lines.rank == 77 && st.text[0] == '\0');
        CHECK(code == MLS_OK ||
              (strcmp(st_any.text, st_both.text) == 0 &&
               strcmp(st_any.name, st_both.name) == 0 &&
               st_any.offset == st_both.offset + (st_both.offset > 0 ? 1 : 0)));
    }
    if (ours) {
        check_same(&lines, &any);
        check_same(&lines, &both);
        mls_index_fini(&lines);
    }
    mls_index_fini(&any);
    mls_index_fini(&both);
    free(exact);
    free(spaced);
    return ours;
}

static bool good_is_read(void)
{
    return read_by_lines(good, sizeof good - 1);
}

/* The good index with `to` in place of the first `from`. */
static bool changed_is_read(const char *from, const char *to)
{
    char text[ROOM];
    const char *at = strstr(good, from);
    CHECK(at != NULL);
    if (at == NULL) {
        return false;
    }
    const int length = snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, to,
                                at + strlen(from));
    return read_by_lines(text, (size_t)length);
}

static void what_we_write_is_read(void)
{
    CHECK(good_is_read());
    CHECK(changed_is_read("\"name\":\"w\"", "\"name\":\"w/~ {}[]:,0\""));
    CHECK(changed_is_read("\"version\":7", "\"version\":999999999999999999"));
    CHECK(
        changed_is_read("\"shape\":[1]", "\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"));
    CHECK(changed_is_read("\"tier\":\"cold\"", "\"tier\":\"warm\""));
    CHECK(changed_is_read("\"tier\":\"cold\"", "\"tier\":\"hot\""));
    CHECK(changed_is_read("\"axes\":[null,1]", "\"axes\":[15,null]"));
    CHECK(changed_is_read("[[0,2],[\"flat\",3]]", "[[1,1],[0,2],[1,1],[\"flat\",3]]"));
}

static void what_is_good_otherwise_is_left_to_the_other_reader(void)
{
    static const struct {
        const char *from, *to;
    } changes[] = {
        {"\"format_version\":1", "\"format_version\":2"},
        {"\"name\":\"w\"", "\"name\":\"\\u0077\""},
        {"\"name\":\"w\"", "\"name\":\"\xc3\xa9\""},
        {"\"name\":\"w\"", "\"name\":\"\x7f\""},
        {"\"part\":5", "\"part\": 5"},
        {"]}\n", "],\"later\":1}\n"},
        {"\"part\":5,\"version\":7", "\"version\":7,\"part\":5"},
        {"\"version\":7", "\"version\":9223372036854775807"},
        {"\"crc32c\":\"fedcba98\"", "\"crc32c\":\"fedcba98\",\"later\":1"},
        {"\"shape\":[],", "\"shape\":[],\"axes\":[],"},
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        CHECK(!changed_is_read(changes[i].from, changes[i].to));
    }
}

static void what_is_wrong_is_left_to_the_other_reader(void)
{
    static const struct {
        const char *from, *to;
    } changes[] = {
        {"\"rank\":3", "\"rank\":16"},
        {"\"rank\":3", "\"rank\":03"},
        {"\"world_size\":16", "\"world_size\":16777217"},
        {"params/w.", "params/../w."},
        {"\"optim_state/w.safetensors\"", "\"params/w.safetensors\""},
        {"\"bytes\":4122", "\"bytes\":4121"},
        {"\"bytes\":4122", "\"bytes\":7"},
        {"\"dtype\":\"U8\"", "\"dtype\":\"U9\""},
        {"[4,6]", "[4,9]"},
        {"[4,6]", "[4,4611686018427387904]"},
        {"\"shape\":[1]", "\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"},
        {"[\"flat\",3]]", "[\"flat\",3],[0,1],[0,1],[0,1]]"},
        {"[0,2]", "[16,2]"},
        {"[0,2]", "[0,0]"},
        {"\"part\":5", "\"part\":6"},
        {"\"axes\":[null,1]", "\"axes\":[null,16]"},
        {"\"axes\":[null,1]", "\"axes\":[null]"},
        {"\"axes\":[null,1]", "\"axes\":[null,1,1]"},
        {"\"tier\":\"cold\"", "\"tier\":\"\""},
        {"\"version\":7", "\"version\":0"},
        {"\"version\":7", "\"version\":18446744073709551617"},
        {"\"file\":1", "\"file\":2"},
        {"\"offset\":4096", "\"offset\":7"},
        {"\"offset\":4120,\"bytes\":2", "\"offset\":4119,\"bytes\":2"},
        {"\"bytes\":1048577", "\"bytes\":1048578"},
        {"\"blocks\":\"2222222233333333\"", "\"blocks\":\"22222222333333\""},
        {"\"blocks\":\"2222222233333333\"", "\"blocks\":\"222222223333333344444444\""},
        {",\"blocks\":\"2222222233333333\"", ""},
        {"\"crc32c\":\"fedcba98\"", "\"crc32c\":\"fedcba98\",\"blocks\":\"fedcba98\""},
        {"\"crc32c\":\"fedcba98\"", "\"crc32c\":\"fedcbA98\""},
        {"\"bytes\":0,\"crc32c\":\"00000000\"", "\"bytes\":0,\"crc32c\":\"00000001\""},
        {"\"state\":\"m\"", "\"state\":\"m.n\""},
        {"\"name\":\"step\"", "\"name\":\"st.ep\""},
        {"\"name\":\"w\",", "\"name\":\"w\",\"state\":\"m\","},
        {"\"name\":\"w\"", "\"name\":\"long\",\"part\":0"},
        {"\"section\":\"params\"", "\"section\":\"param\""},
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        CHECK(!changed_is_read(changes[i].from, changes[i].to));
    }
}

/* Each byte replaced, left out and doubled: whatever comes of it, both readers agree. */
static void no_slip_of_a_pen_is_read_in_two_ways(void)
{
    static const char others[] = "09-.\"[]{},:aF\\ \n\x01\x80";
    const size_t length = sizeof good - 1;
    size_t read = 0;
    char text[sizeof good + 1];
    for (size_t at = sizeof MLS_SEAL_START - 1; at < length; at += EVERY(7)) {
        for (size_t i = 0; i < sizeof others - 1; i++) {
            memcpy(text, good, length);
            text[at] = others[i];
            read += read_by_lines(text, length);
        }
        memcpy(text, good, at);
        memcpy(text + at, good + at + 1, length - at - 1);
        read += read_by_lines(text, length - 1);
        memcpy(text, good, at + 1);
        memcpy(text + at + 1, good + at, length - at);
        read += read_by_lines(text, length + 1);
    }
    CHECK(read >= 40); /* other names, checksums, ... */
}

static void no_beginning_of_an_index_is_read(void)
{
    for (size_t length = sizeof MLS_SEAL_START; length < sizeof good - 1; length++) {
        CHECK(!read_by_lines(good, length));
    }
}

/* Room is made by the length of the text: lines that are as short as can be, with as many
 * dimensions and axes as may be, and hardly anything but checksums. */
static void there_is_room_for_any_lines(void)
{
    enum { SHORT = 34, LINE = 400 };
    char *text = malloc((SHORT + 5) * LINE);
    REQUIRE(text != NULL);
    for (int kind = 0; kind < 2; kind++) {
        const char *first = strstr(good, "\n{\"section\"");
        size_t length = (size_t)(first - good);
        memcpy(text, good, length);
        for (int i = 0; i < SHORT; i++) {
            const char *const form =
                kind == 0
                    ? "\n{\"section\":\"params\",\"name\":\"%c\",\"dtype\":\"U8\","
                      "\"shape\":[],\"layout\":[],\"part\":0,\"version\":1,"
                      "\"file\":0,\"offset\":%d,\"bytes\":1,\"crc32c\":"
                      "\"00000000\"}%s"
                    : "\n{\"section\":\"optim_state\",\"name\":\"\",\"state\":\"%c\","
                      "\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"
                      ",\"layout\":[],\"part\":0,\"axes\":[0,0,0,0,0,0,0,0,0,0,0,0,"
                      "0,0,0,0],\"version\":1,\"file\":0,\"offset\":%d,\"bytes\":1,"
                      "\"crc32c\":\"00000000\"}%s";
            length += (size_t)snprintf(text + length, LINE, form, '\\' + 1 + i, 8 + i,
                                       i == SHORT - 1 ? "]}\n" : ",");
        }
        CHECK(read_by_lines(text, length));
    }
    free(text);
}

static void as_many_blocks_as_the_text_has_find_room(void)
{
    enum { BLOCKS = 3000, MIB = 1 << 20 };
    static uint32_t crcs[BLOCKS];
    static const size_t shape[] = {(size_t)BLOCKS * MIB};
    mls_index_file file = {.path = "params/w.safetensors",
                           .bytes = 4096 + (uint64_t)BLOCKS * MIB};
    mls_index_shard shard = {.id = {.name = {"w", 1}},
                             .dtype = MLS_U8,
                             .rank = 1,
                             .shape = shape,
                             .version = 1,
                             .offset = 4096,
                             .bytes = shape[0],
                             .crcs = crcs};
    const mls_index index = {.generation = "0123456789abcdef",
                             .world_size = 1,
                             .files = &file,
                             .file_count = 1,
                             .shards = &shard,
                             .shard_count = 1};
    mls_buffer b = {0};
    mls_status st;
    uint32_t sum;
    for (size_t i = 0; i < BLOCKS; i++) {
        crcs[i] = (uint32_t)i * 2654435761U;
    }
    REQUIRE(mls_index_build(&index, crc, &b, &sum, &st) == MLS_OK);
    CHECK(read_by_lines(b.data, b.length));
    mls_buffer_fini(&b);
}

static const test_case tests[] = {
    TEST(what_we_write_is_read),
    TEST(what_is_good_otherwise_is_left_to_the_other_reader),
    TEST(what_is_wrong_is_left_to_the_other_reader),
    TEST(no_slip_of_a_pen_is_read_in_two_ways),
    TEST(no_beginning_of_an_index_is_read),
    TEST(there_is_room_for_any_lines),
    TEST(as_many_blocks_as_the_text_has_find_room),
};

int main(void)
{
    return RUN_TESTS(tests);
}
