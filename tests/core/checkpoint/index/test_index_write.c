#include "checkpoint/index/index.h"
#include "support/runner.h"
#include "support/text.h"

static const mls_crc_kernels *crc(void)
{
    return mls_crc_of(MLS_CPU_SCALAR);
}

TEST(index_bytes_match_the_reference)
{
    static const char expected[] =
        "{\"checksum\":\"00000000\",\n"
        "\"format\":\"mlstate.index\",\"format_version\":3,\n"
        "\"generation\":\"0123456789abcdef\",\"rank\":1,\"world_size\":4,\n"
        "\"files\":{\n"
        "\"path\":[\"optim_state/w=2em.1-4.0123456789abcdef-1.safetensors\"],\n"
        "\"bytes\":\"2101280\",\n"
        "\"header_crc32c\":\"00c0ffee\"},\n"
        "\"kinds\":[\n"
        "{\"section\":\"optim_state\",\"state\":\"m\",\"dtype\":\"BF16\","
        "\"layout\":[[0,4],[\"flat\",1]],\"axes\":[0,null],\"tier\":\"cold\"}],\n"
        "\"shards\":{\n"
        "\"name\":[\"w\"],\n"
        "\"kind\":\"0\",\n"
        "\"shape\":\"4194432,1;\",\n"
        "\"part\":\"1\",\n"
        "\"version\":\"7\"},\n"
        "\"layers\":{\n"
        "\"file\":\"0\",\n"
        "\"offset\":\"4096\",\n"
        "\"bytes\":\"2097216\",\n"
        "\"crc32c\":\"12345678\",\n"
        "\"blocks\":\"000000010000000200000003\"}}\n";
    const size_t shape[] = {4194432, 1};
    const signed char axes[] = {0, MLS_NO_AXIS};
    const uint32_t crcs[] = {1, 2, 3};
    mls_index_file file = {.path = "optim_state/w=2em.1-4.0123456789abcdef-1.safetensors",
                           .bytes = 2101280,
                           .header_crc = 0xc0ffee};
    mls_index_shard shard = {
        .id = {MLS_OPTIM_STATE, text("w"), text("m"), true},
        .dtype = MLS_BF16,
        .rank = 2,
        .shape = shape,
        .layout = {.count = 2, .steps = {{0, 4}, {MLS_LAYOUT_FLAT, 1}}},
        .part = 1,
        .axes = axes,
        .tier = MLS_TIER_COLD,
        .version = 7,
        .offset = 4096,
        .bytes = 2097216,
        .crc = 0x12345678,
        .crcs = crcs};
    mls_index index = {.generation = "0123456789abcdef",
                       .rank = 1,
                       .world_size = 4,
                       .files = &file,
                       .file_count = 1,
                       .shards = &shard,
                       .shard_count = 1};
    mls_json_writer text = {0};
    uint32_t checksum = 0;
    REQUIRE(mls_index_build(&index, crc(), &text, &checksum, &status) == MLS_OK);
    CHECK(checksum == crc()->update(0, text.data, text.length));
    CHECK(text.length == sizeof expected - 1);
    memset(text.data + 13, '0', 8); /* the digits of the checksum */
    CHECK(text.length == sizeof expected - 1 &&
          memcmp(text.data, expected, text.length) == 0);
    mls_json_writer_fini(&text);
}

TEST(shard_description_omits_the_location)
{
    mls_index_shard shard = {.id = {.section = MLS_PARAMS, .name = text("a\"b")},
                             .dtype = MLS_F32,
                             .version = 1,
                             .offset = 99};
    mls_json_writer text = {.most = 1000};
    mls_index_put_shard(&text, &shard);
    mls_json_writer_put(&text, "", 1);
    REQUIRE(text.code == MLS_OK);
    CHECK_TEXT(text.data, "{\"section\":\"params\",\"name\":\"a\\\"b\",\"dtype\":\"F32\","
                          "\"shape\":[],\"layout\":[],\"part\":0,\"version\":1");
    mls_json_writer_fini(&text);
}
