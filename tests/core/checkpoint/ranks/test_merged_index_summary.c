/* Totals over shards and layers. */
#include "checkpoint/ranks/merged_index_summary.h"
#include "support/runner.h"

static const size_t shape[] = {40};

/* Two shards of a tensor: one plain, one of two layers, the second of them compressed. */
TEST(a_tensor_is_summed_over_its_shards)
{
    const mls_compressed_frames frames = {.codec = MLS_ZSTD, .bytes = 12};
    mls_layer list[] = {{.bytes = 20, .row = 1},
                        {.bytes = 5, .row = 1, .frames = &frames}};
    mls_layers layers = {.list = list, .count = 2};
    const mls_index_shard shards[] = {
        {.dtype = MLS_U8, .rank = 1, .shape = shape, .bytes = 40, .version = 9},
        {.dtype = MLS_U8,
         .rank = 1,
         .shape = shape,
         .bytes = 40,
         .version = 3,
         .layers = &layers}};
    mls_merged_index_shard places[] = {{.shard = &shards[0]}, {.shard = &shards[1]}};
    const mls_merged_index merged = {.shards = places, .shard_count = 2};
    const mls_merged_index_tensor both = {.from = 0, .count = 2},
                                  group = {.from = 0, .count = 1};
    const mls_tensor_summary sum = mls_tensor_summarize(&merged, &both);
    CHECK(sum.bytes == 80 && sum.stored_bytes == 40 + 20 + 5);
    CHECK(sum.version == 9 && sum.sparse == 1);
    REQUIRE(sum.codec != NULL);
    CHECK_TEXT(sum.codec, "zstd");
    const mls_tensor_summary dense = mls_tensor_summarize(&merged, &group);
    CHECK(dense.codec == NULL && dense.sparse == 0 && dense.stored_bytes == 40);
    CHECK(mls_layer_element_bytes(&list[0]) == 20);
    CHECK(mls_layer_element_bytes(&list[1]) == 12);
}

TEST(an_index_is_summed_over_its_shards)
{
    mls_layers none = {0};
    mls_index_shard shards[] = {
        {.dtype = MLS_U8, .rank = 1, .shape = shape, .bytes = 40},
        {.dtype = MLS_U8, .rank = 1, .shape = shape, .bytes = 40, .layers = &none}};
    const mls_index index = {.shards = shards, .shard_count = 2};
    const mls_index_summary sum = mls_index_summarize(&index);
    CHECK(sum.bytes == 80 && sum.stored_bytes == 40);
}

TEST(visible_elements_are_counted)
{
    const mls_row_range row_ranges[] = {{.begin = 0, .count = 3},
                                        {.begin = 9, .count = 4}};
    const mls_layer layer = {.visible = row_ranges, .visible_count = 2};
    CHECK(mls_layer_visible_bytes(&layer, 8) == 7 * 8);
}
