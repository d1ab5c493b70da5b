/* Indexes: round trips, and other writers' texts. */
#include "checkpoint/index/index.h"
#include "io/json_checksum.h"
#include "safetensors/safetensors.h"
#include "support/runner.h"
#include "support/text.h"

#include <stdlib.h>

static const mls_crc_kernels *const crc = &mls_crc_scalar;

/* ---- round trips ---- */

static bool same_place(const mls_index_shard *a, const mls_index_shard *b)
{
    const size_t blocks = mls_safetensors_blocks(a->bytes);
    return a->version == b->version && a->file == b->file && a->offset == b->offset &&
           a->bytes == b->bytes && a->crc == b->crc &&
           (blocks <= 1 ? b->crcs[0] == a->crc
                        : memcmp(a->crcs, b->crcs, blocks * sizeof *a->crcs) == 0);
}

/* Compare all members of two shards. */
static bool same_shard(const mls_index_shard *a, const mls_index_shard *b)
{
    bool same = mls_index_compare(a, b) == 0 && a->dtype == b->dtype &&
                a->rank == b->rank && a->tier == b->tier &&
                a->layout.count == b->layout.count &&
                (a->rank == 0 || (a->axes == NULL) == (b->axes == NULL));
    for (int i = 0; same && i < a->rank; i++) {
        same =
            a->shape[i] == b->shape[i] && (a->axes == NULL || a->axes[i] == b->axes[i]);
    }
    for (int i = 0; same && i < a->layout.count; i++) {
        same = a->layout.steps[i].axis == b->layout.steps[i].axis &&
               a->layout.steps[i].parts == b->layout.steps[i].parts;
    }
    return same && same_place(a, b);
}

/* Compare all members of two indexes. */
static bool same_index(const mls_index *a, const mls_index *b)
{
    bool same = strcmp(a->generation, b->generation) == 0 && a->rank == b->rank &&
                a->world_size == b->world_size && a->file_count == b->file_count &&
                a->shard_count == b->shard_count;
    for (size_t i = 0; same && i < a->file_count; i++) {
        same = strcmp(a->files[i].path, b->files[i].path) == 0 &&
               a->files[i].bytes == b->files[i].bytes &&
               a->files[i].header_crc == b->files[i].header_crc;
    }
    for (size_t i = 0; same && i < a->shard_count; i++) {
        same = same_shard(&a->shards[i], &b->shards[i]);
    }
    return same;
}

/* Read, compare, and build again: the same text, apart from additions in `b`. */
static void check_read(const mls_index *index, const mls_json_writer *b, size_t length)
{
    mls_json_writer again = {0};
    mls_index back = {0};
    mls_status st = {0};
    uint32_t sum = 0;
    if (mls_index_parse(b->data, b->length, crc, &back, &st) == MLS_OK) {
        CHECK(same_index(index, &back));
        CHECK(mls_index_build(&back, crc, &again, &sum, &st) == MLS_OK);
        CHECK(again.length == length && sum == crc->update(0, again.data, length));
        if (length == b->length) {
            CHECK(memcmp(again.data, b->data, length) == 0);
        }
    } else {
        printf("    refused: %s (%s)\n", st.text, st.name);
        CHECK(false);
    }
    mls_index_fini(&back);
    mls_index_fini(&back);
    mls_json_writer_fini(&again);
}

/* Build, read and build again; then the same with a line feed at the end. */
static void check_round_trip(const mls_index *index)
{
    mls_json_writer b = {0};
    mls_status st = {0};
    uint32_t sum = 0;
    if (mls_index_build(index, crc, &b, &sum, &st) == MLS_OK) {
        const size_t length = b.length;
        CHECK(sum == crc->update(0, b.data, b.length));
        check_read(index, &b, length);
        mls_json_writer_text(&b, "\n");
        (void)mls_json_checksum_set(b.data, b.length, crc);
        check_read(index, &b, length);
    } else {
        printf("    not built: %s (%s)\n", st.text, st.name);
        CHECK(false);
    }
    mls_json_writer_fini(&b);
}

static mls_index one_file(mls_index_file *file, mls_index_shard *shards, size_t count)
{
    static const mls_index_file good = {.path = "params/segment-0.safetensors",
                                        .bytes = 1 << 20};
    *file = good;
    return (mls_index){.generation = "0123456789abcdef",
                       .world_size = 1,
                       .files = file,
                       .file_count = 1,
                       .shards = shards,
                       .shard_count = count};
}

TEST(empty_index_round_trips)
{
    const mls_index empty = {
        .generation = "ffffffffffffffff", .rank = (1U << 24) - 1, .world_size = 1U << 24};
    check_round_trip(&empty);
}

TEST(scalar_empty_and_16d_shards_round_trip)
{
    static const size_t none[] = {7, 0, (size_t)1 << 40};
    static const size_t many[] = {1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 3};
    mls_index_file file;
    mls_index_shard shards[] = {
        {.id = {.name = text("empty")}, .rank = 3, .shape = none, .offset = 1 << 20},
        {.id = {.name = text("many")},
         .dtype = MLS_F64,
         .rank = 16,
         .shape = many,
         .offset = 4096,
         .bytes = 48,
         .crc = 1},
        {.id = {.name = text("scalar")}, .dtype = MLS_I64, .offset = 4144, .bytes = 8},
    };
    for (size_t i = 0; i < 3; i++) {
        shards[i].version = INT64_MAX - i;
    }
    const mls_index index = one_file(&file, shards, 3);
    check_round_trip(&index);
}

TEST(axes_and_tiers_round_trip)
{
    static const size_t column[] = {4, 1}, row[] = {6}, deep[] = {1, 2, 3};
    static const signed char of_column[] = {0, MLS_NO_AXIS}, of_row[] = {15},
                             of_deep[] = {MLS_NO_AXIS, MLS_NO_AXIS, MLS_NO_AXIS};
    mls_index_file file;
    mls_index_shard shards[] = {
        /* "lr" without a parameter; ".m" of the parameter "" */
        {.id = {MLS_OPTIM_STATE, text(""), text("m"), true},
         .tier = MLS_TIER_HOT,
         .bytes = 2,
         .offset = 100},
        {.id = {MLS_OPTIM_STATE, text("a.b"), text(""), true},
         .tier = MLS_TIER_WARM,
         .bytes = 2,
         .offset = 102},
        {.id = {MLS_OPTIM_STATE, text("a.b"), text("column"), true},
         .axes = of_column,
         .rank = 2,
         .shape = column,
         .tier = MLS_TIER_COLD,
         .bytes = 8,
         .offset = 104},
        {.id = {MLS_OPTIM_STATE, text("a.b"), text("deep"), true},
         .axes = of_deep,
         .rank = 3,
         .shape = deep,
         .bytes = 12,
         .offset = 112},
        {.id = {MLS_OPTIM_STATE, text("a.b"), text("row"), true},
         .axes = of_row,
         .rank = 1,
         .shape = row,
         .bytes = 12,
         .offset = 124},
        {.id = {MLS_OPTIM_STATE, text("lr"), {0}, false}, .bytes = 2, .offset = 136},
    };
    for (size_t i = 0; i < sizeof shards / sizeof shards[0]; i++) {
        shards[i].version = 1;
    }
    const mls_index index = one_file(&file, shards, sizeof shards / sizeof shards[0]);
    check_round_trip(&index);
}

TEST(names_may_be_any_utf8)
{
    /* in the order of their bytes */
    static const mls_str names[] = {
        {NULL, 0},
        {"\0", 1},
        {"\0\0", 2},
        {"\x01\x1f\t\n\r\b\f", 7},
        {" ", 1},
        {"\"", 1},
        {"../../etc/passwd", 16},
        {"/", 1},
        {"A", 1},
        {"\\", 1},
        {"\\u0041", 6},
        {"__metadata__", 12},
        {"a", 1},
        {"a\0b", 3},
        {"a.b.c.", 6},
        {"con", 3},
        {"e\xcc\x81", 3},
        {"\x7f", 1},
        {"\xc2\x80", 2},
        {"\xc3\xa9", 2},
        {"\xe2\x80\xa8\xe2\x80\xae", 6},
        {"\xed\x9f\xbf", 3},
        {"\xee\x80\x80", 3},
        {"\xef\xbb\xbf", 3},
        {"\xef\xbf\xbf", 3},
        {"\xf0\x9f\x98\x80", 4},
        {"\xf4\x8f\xbf\xbf", 4},
    };
    enum { COUNT = sizeof names / sizeof names[0] };
    mls_index_file file;
    mls_index_shard shards[2 * COUNT] = {0};
    for (size_t i = 0; i < 2 * COUNT; i++) {
        shards[i].id.name = names[i % COUNT];
        if (i >= COUNT) {
            shards[i].id = (mls_tensor_id){MLS_OPTIM_STATE, names[i % COUNT],
                                           text("\"\\\xf0\x9f\x98\x80"), true};
        }
        shards[i].version = 1;
        shards[i].offset = 4096 + 2 * i;
        shards[i].bytes = 2;
    }
    const mls_index index = one_file(&file, shards, 2 * COUNT);
    check_round_trip(&index);
}

TEST(long_names_and_paths_round_trip)
{
    enum { LONG = 100000 };
    char *name = malloc(LONG);
    mls_index_file file;
    mls_index_shard shard = {.version = 1, .offset = 8, .bytes = 2};
    REQUIRE(name != NULL);
    memset(name, '"', LONG);
    shard.id.name = (mls_str){name, LONG};
    const mls_index index = one_file(&file, &shard, 1);
    memset(file.path, 'x', MLS_PATH_BYTES);
    memcpy(file.path, "optim_state/", 12);
    memcpy(file.path + MLS_PATH_BYTES - 12, ".safetensors", 13);
    file.bytes = INT64_MAX;
    file.header_crc = UINT32_MAX;
    check_round_trip(&index);
    free(name);
}

TEST(each_block_has_its_checksum)
{
    enum { MIB = 1 << 20 };
    static const size_t sizes[] = {MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB + 7};
    static const uint32_t crcs[] = {0xdeadbeef, 0, 1, 0x80000000, 0xffffffff, 0x12345678};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        mls_index_file file;
        mls_index_shard shard = {.id = {.name = text("w")},
                                 .dtype = MLS_U8,
                                 .rank = 1,
                                 .shape = &sizes[i],
                                 .version = 1,
                                 .offset = 4096,
                                 .bytes = sizes[i],
                                 .crc = 0xdeadbeef,
                                 .crcs = crcs};
        const mls_index index = one_file(&file, &shard, 1);
        file.bytes = 4096 + sizes[i];
        check_round_trip(&index);
    }
}

TEST(thousands_of_shards_round_trip)
{
    enum { COUNT = 5000, NAME = 24 };
    static const size_t shape[] = {10};
    mls_index_file *files = calloc(COUNT, sizeof *files);
    mls_index_shard *shards = calloc(COUNT, sizeof *shards);
    char(*names)[NAME] = calloc(COUNT, sizeof *names);
    REQUIRE(files != NULL && shards != NULL && names != NULL);
    for (size_t i = 0; i < COUNT; i++) {
        snprintf(files[i].path, sizeof files[i].path, "params/w%05zu.safetensors", i);
        snprintf(names[i], sizeof names[i], "layer.%05zu.weight", i);
        files[i].bytes = 4136;
        files[i].header_crc = (uint32_t)i * 2654435761U;
        shards[i] = (mls_index_shard){.id = {.name = text(names[i])},
                                      .dtype = MLS_F32,
                                      .rank = 1,
                                      .shape = shape,
                                      .version = i + 1,
                                      .file = COUNT - 1 - i,
                                      .offset = 4096,
                                      .bytes = 40,
                                      .crc = (uint32_t)i};
    }
    const mls_index index = {.generation = "0123456789abcdef",
                             .world_size = 1,
                             .files = files,
                             .file_count = COUNT,
                             .shards = shards,
                             .shard_count = COUNT};
    check_round_trip(&index);
    free(files);
    free(shards);
    free(names);
}

/* Many kinds: each shard has its own, and the text grows in proportion. */
TEST(many_shard_kinds_round_trip)
{
    enum { COUNT = 100 };
    mls_index_file file;
    mls_index_shard shards[COUNT] = {0};
    char states[COUNT][4];
    for (size_t i = 0; i < COUNT; i++) {
        snprintf(states[i], sizeof states[i], "%02zu", i < 50 ? i : i - 50);
        shards[i].id = (mls_tensor_id){MLS_OPTIM_STATE, text(i < 50 ? "a" : "b"),
                                       text(states[i]), true};
        shards[i].version = 1;
        shards[i].offset = 4096 + 2 * i;
        shards[i].bytes = 2;
    }
    const mls_index index = one_file(&file, shards, COUNT);
    check_round_trip(&index);
}

TEST(ids_are_ordered_by_section_name_and_state)
{
    static const mls_tensor_id ordered[] = {
        {.section = MLS_PARAMS, .name = {"a", 1}},
        {.section = MLS_PARAMS, .name = {"a.b", 3}},
        {.section = MLS_PARAMS, .name = {"b", 1}},
        {.section = MLS_OPTIM_STATE, .name = {"a", 1}},
        {MLS_OPTIM_STATE, {"a", 1}, {NULL, 0}, true},
        {MLS_OPTIM_STATE, {"a", 1}, {"m", 1}, true},
        {MLS_OPTIM_STATE, {"a", 1}, {"v", 1}, true},
        {MLS_OPTIM_STATE, {"b", 1}, {"m", 1}, true},
    };
    enum { COUNT = sizeof ordered / sizeof ordered[0] };
    for (int i = 0; i < COUNT; i++) {
        for (int j = 0; j < COUNT; j++) {
            const int order = mls_tensor_id_compare(&ordered[i], &ordered[j]);
            CHECK((order > 0) - (order < 0) == (i > j) - (i < j));
        }
    }
}

/* ---- texts of other writers ---- */

/* `body` after the start of an index, with a correct checksum; the caller frees it. */
static char *text_with_checksum(const char *body)
{
    const size_t room = sizeof MLS_JSON_CHECKSUM_START + strlen(body);
    char *out = malloc(room);
    if (out != NULL) {
        snprintf(out, room, "%s%s", MLS_JSON_CHECKSUM_START, body);
        (void)mls_json_checksum_set(out, strlen(out), crc);
    }
    return out;
}

TEST(reader_accepts_unknown_members_and_any_order)
{
    char *other = text_with_checksum(
        " , "
        "\"later\":[{\"a\":[[[[1e400]]]]}],\n\"layers\":{\"crc32c\":\"0000000100000002\","
        "\"later\":[true],\"bytes\":\"4,4\",\"offset\":\"4100,4096\",\"file\":\"0,"
        "\\u0030\"},"
        "\"shards\":\t{\"version\":\"9,1\",\"part\":\"0,0\",\"kind\":\"1,1\",\"shape\":"
        "\"1;;\","
        "\"layer_count\":\"1,1\",\"device\":null,\"name\":[\"z\" , "
        "\"\\u0061\\/\\ud83d\\ude00\"]},"
        "\"kinds\":[ {\"layout\":[[0,7]],\"dtype\":\"U8\",\"section\":\"params\"},"
        "{\"layout\":[ ],\"device\":1,\"dtype\":\"F32\",\"section\":\"params\"}],"
        "\"files\":{\"device\":\"x\",\"header_crc32c\":\"00000003\",\"bytes\":\"4104\","
        "\"path\":[\"params/a.safetensors\"]},\"rank\":1,\"world_size\":2,"
        "\"generation\":\"00000000000000ff\",\"format_version\":3,"
        "\"format\":\"mlstate.index\"}\r\n ");
    mls_index index;
    REQUIRE(other != NULL);
    REQUIRE(mls_index_parse(other, strlen(other), crc, &index, &status) == MLS_OK);
    free(other); /* it need not outlive the call */
    CHECK(index.shard_count == 2 && index.rank == 1 && index.world_size == 2);
    CHECK(mls_str_is(index.shards[0].id.name, "a/\xf0\x9f\x98\x80"));
    CHECK(mls_str_is(index.shards[1].id.name, "z") && index.shards[1].version == 9);
    CHECK(index.shards[1].crcs[0] == 1 && index.shards[0].crcs[0] == 2);
    CHECK_TEXT(index.files[0].path, "params/a.safetensors");
    mls_index_fini(&index);
}
