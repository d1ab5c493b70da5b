/* Indexes with sparse shards: round trips, and false layers. */
#include "support/index_text.h"

/* A plain shard, and two parts of w with layers, the second without any. */
#define FROM_SHAPE_TO_BYTES                                                              \
    ",\n\"part\":\"0,0,1\",\n\"version\":\"1,2,1\",\n\"layer_count\":\"1,2,0\"}"         \
    ",\n\"layers\":{\n\"file\":\"0,0,0\",\n\"offset\":\"4096,4146,4126\",\n\"bytes\":"
static const char good[] = MLS_JSON_CHECKSUM_START
    ",\n\"format\":\"mlstate.index\",\"format_version\":3,\n\"generation\":"
    "\"0123456789abcdef\",\"rank\":0,\"world_size\":1"
    ",\n\"files\":{\n\"path\":[\"params/w.safetensors\"],\n\"bytes\":\"4200\","
    "\n\"header_crc32c\":\"01234567\"}"
    ",\n\"kinds\":[\n{\"section\":\"params\",\"dtype\":\"I16\",\"layout\":[]},"
    "\n{\"section\":\"params\",\"dtype\":\"I16\",\"layout\":[[0,2]]}]"
    ",\n\"shards\":{\n\"name\":[\"v\",\"w\",\"w\"],\n\"kind\":\"0,1,1\","
    "\n\"shape\":\"15;6,5;6,5;\"" FROM_SHAPE_TO_BYTES
    "\"30,30,14\",\n\"crc32c\":\"fedcba980000000189abcdef\","
    "\n\"row\":\"0,0,4\",\n\"rows\":[null,null,\"1,1,1,1\"]}}\n";

static bool is(const mls_row_range *extent, size_t begin, size_t count, size_t at)
{
    return extent->begin == begin && extent->count == count && extent->at == at;
}

TEST(overlays_round_trip)
{
    mls_index index = {0};
    mls_json_writer text = {0};
    uint32_t sum;
    char expected[INDEX_ROOM];
    const size_t length = change_index(good, "", "", expected);
    REQUIRE(mls_index_parse(expected, length, &mls_crc_scalar, &index, &status) ==
            MLS_OK);
    REQUIRE(index.shard_count == 3);
    const mls_index_shard *dense = &index.shards[0], *w = &index.shards[1];
    const mls_index_shard *zero = &index.shards[2];
    CHECK(dense->layers == NULL && dense->offset == 4096 && dense->crcs[0] == dense->crc);
    CHECK(w->bytes == 30 && zero->bytes == 30 && mls_index_stored_bytes(w) == 44);
    REQUIRE(w->layers != NULL && w->layers->count == 2 && zero->layers != NULL);
    const mls_layer *full = &w->layers->list[0], *rows = &w->layers->list[1];
    CHECK(full->row == 0 && full->stored_count == 0 && full->offset == 4146);
    CHECK(rows->row == 4 && rows->bytes == 14 && rows->crcs[0] == 0x89abcdef);
    REQUIRE(rows->stored_count == 2 && rows->visible_count == 2 &&
            full->visible_count == 2);
    CHECK(is(&rows->stored[0], 4, 4, 0) && is(&rows->stored[1], 12, 3, 4));
    CHECK(is(&rows->visible[0], 4, 4, 0) && is(&rows->visible[1], 12, 3, 4));
    CHECK(is(&full->visible[0], 0, 4, 0) && is(&full->visible[1], 8, 4, 8));
    CHECK(w->layers->zero_count == 0 && zero->layers->count == 0);
    REQUIRE(zero->layers->zero_count == 1 && is(zero->layers->zeros, 0, 15, 0));
    /* writing it again gives the same text */
    CHECK(mls_index_build(&index, &mls_crc_scalar, &text, &sum, &status) == MLS_OK);
    CHECK(text.length == length && memcmp(text.data, expected, length) == 0);
    mls_json_writer_fini(&text);
    mls_index_fini(&index);
    CHECK(index.layers == NULL && index.row_ranges == NULL && index.layer_lists == NULL);
}

TEST(inconsistent_overlays_are_refused)
{
#define ROWS_ALTERNATE                                                                   \
    "\"rows\" must alternate numbers of skipped and stored rows, at most as many "       \
    "as the shard has"
#define ROWS "[null,null,\"1,1,1,1\"]"
    static const lie lies[] = {
        {"\"part\":\"0,0,1\"", "\"part\":\"0,0,0\"", "w", "\"part\" appears twice"},
        {"1,2,0", "1,2,1", "w", "\"layer_count\" has too few layers for the shards"},
        {"1,2,0", "1,1,0", "", EXTRA("file")},
        {"1,2,0", "1,17,0", "w", OUT_OF_RANGE("layer_count")},
        {"1,2,0", "1,2", "w", TOO_FEW("layer_count")},
        {"0,0,4", "0,0,0", "w", "\"rows\" is not allowed in a layer without \"row\""},
        {"0,0,4", "0,4,4", "w", "\"row\" is not allowed in a layer without \"rows\""},
        {ROWS, "[null,null]", "", TOO_FEW("rows")},
        {",\n\"row\":\"0,0,4\",\n\"rows\":" ROWS, "", "w",
         "\"row\" is missing: only the first layer is full"},
        {"0,0,4", "0,0,5", "w", ROWS_ALTERNATE}, /* there are only three of them */
        {"\"1,1,1,1\"", "\"1,1,1\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "\"1,1,0,1\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "\"1,1,1,2\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "\"18446744073709551615,2\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "\"18446744073709551616,1\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "\"1,1,-1,1\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "\"1, 1,1,1\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "\"4,1\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "\"\"", "w", ROWS_ALTERNATE},
        {"\"1,1,1,1\"", "[1,1,1,1]", "w", "\"rows\" is not a string"},
        {"30,30,14", "30,30,12", "w",
         "\"bytes\" does not match the elements or frames of the layer"},
        {"4096,4146,4126", "4096,4171,4126", "w", BEYOND_FILE},
        {"4096,4146,4126", "4096,4139,4126", "w",
         "\"offset\" overlaps another layer of the shard"},
        {"4096,4146,4126", "4096,4090,4126", "v",
         "\"offset\" overlaps another shard in the file"},
        {"0189abcdef\"", "0189abcde\"", "", TOO_FEW("rows")},
        /* compressed in part, or by an unknown codec */
        {ROWS, ROWS ",\"codec\":[null,null,\"zlib\"]", "w",
         "\"codec\" is not allowed in a layer without \"frames\""},
        {ROWS, ROWS ",\"frames\":[null,null,\"14\"]", "w",
         "\"frames\" is not allowed in a layer without \"codec\""},
        {ROWS, ROWS ",\"codec\":[null,null,\"\"],\"frames\":[null,null,\"14\"]", "w",
         "\"codec\" is unknown to this version of mlstate: use a newer one"},
        {ROWS, ROWS ",\"codec\":[null,null,\"ZLIB\"],\"frames\":[null,null,\"14\"]", "w",
         "\"codec\" is unknown to this version of mlstate: use a newer one"},
        {ROWS, ROWS ",\"codec\":[null,null,1],\"frames\":[null,null,\"14\"]", "w",
         "\"codec\" is not a string"},
        {ROWS, ROWS ",\"codec\":[null,null,\"zlib\"],\"frames\":[null,null,14]", "w",
         "\"frames\" is not a string"},
        {ROWS, ROWS ",\"codec\":[null,null,\"zlib\"],\"frames\":[null,null,\"7,7\"]", "w",
         "\"frames\" must have a length for each MiB of the layer's elements"},
        {ROWS, ROWS ",\"codec\":[null,null,\"zap\"],\"frames\":[null,null,\"14\"]", "w",
         "\"codec\" is unknown to this version of mlstate: use a newer one"},
        {ROWS, ROWS ",\"codec\":[null,null,\"zlib\"],\"frames\":[null,null,\"15\"]", "w",
         "\"frames\" must have a length for each MiB of the layer's elements"},
        {ROWS, ROWS ",\"codec\":[null,null,\"zlib\"],\"frames\":[null,null,\"13\"]", "w",
         "\"bytes\" does not match the elements or frames of the layer"},
        /* without elements, a full layer among several would have no bytes */
        {"6,5;6,5;\"" FROM_SHAPE_TO_BYTES "\"30,30,14\",\n\"crc32c\":\"fedcba9800000001",
         "0,5;6,5;\"" FROM_SHAPE_TO_BYTES "\"30,0,14\",\n\"crc32c\":\"fedcba9800000000",
         "w", "\"bytes\" must not be 0 in one of several layers"},
        {"15;6,5;6,5;", "15;0,5;6,5;", "w", WRONG_BYTES},
    };
    CHECK_LIES(lies);
}

TEST(any_replaced_value_is_refused_or_harmless)
{
    static const char *const values[] = {
        "null", "0",  "1",     "-1",    "3",    "18446744073709551615", "\"\"",
        "[]",   "{}", "[0,1]", "[0,8]", "[{}]", "\"00000000\""};
    size_t refused;
    const size_t all =
        replace_every_value(good, values, sizeof values / sizeof values[0], &refused);
    CHECK(all > 500 && refused > all / 2 && refused < all);
}
