/* Queries of an index, and rules that relate several shards. The tests of the reader
 * cover single shards. */
#include "checkpoint/index/index.h"
#include "support/runner.h"
#include "support/text.h"

#include <stdlib.h>

static const size_t shape[] = {100};
static const uint32_t sum;

static mls_index_shard dense_shard(const char *name, size_t file, uint64_t offset,
                                   size_t bytes)
{
    return (mls_index_shard){.id = {.name = text(name)},
                             .dtype = MLS_U8,
                             .rank = 1,
                             .shape = shape,
                             .version = 1,
                             .file = file,
                             .offset = offset,
                             .bytes = bytes,
                             .crc = 5,
                             .crcs = &sum};
}

static mls_index index_of(mls_index_file *files, mls_index_shard *shards, size_t count)
{
    for (size_t i = 0; i < 2; i++) {
        files[i] = (mls_index_file){.bytes = 4096};
        snprintf(files[i].path, sizeof files[i].path, "params/%zu.safetensors", i);
    }
    return (mls_index){.world_size = 1,
                       .files = files,
                       .file_count = 2,
                       .shards = shards,
                       .shard_count = count};
}

TEST(dense_shard_has_one_location)
{
    const mls_index_shard shard = dense_shard("w", 1, 80, 100);
    REQUIRE(mls_index_place_count(&shard) == 1);
    const mls_layer place = mls_index_place(&shard, 0);
    CHECK(place.file == 1 && place.offset == 80 && place.bytes == 100);
    CHECK(place.crc == 5 && place.crcs == &sum && place.row == 0 && place.stored == NULL);
    CHECK(place.visible == NULL && mls_index_stored_bytes(&shard) == 100);
}

TEST(sparse_shard_has_a_location_per_overlay)
{
    mls_layer list[] = {{.file = 1, .offset = 8, .bytes = 60},
                        {.file = 0, .offset = 9, .bytes = 70}};
    mls_layers layers = {.list = list, .count = 2}, none = {0};
    mls_index_shard shard = dense_shard("w", 0, 0, 100);
    shard.layers = &layers;
    CHECK(mls_index_place_count(&shard) == 2 && mls_index_stored_bytes(&shard) == 130);
    CHECK(mls_index_place(&shard, 1).offset == 9);
    shard.layers = &none;
    CHECK(mls_index_place_count(&shard) == 0 && mls_index_stored_bytes(&shard) == 0);
}

TEST(shards_are_sorted_and_duplicates_refused)
{
    mls_index_file files[2];
    mls_index_shard shards[] = {dense_shard("c", 0, 8, 10), dense_shard("a", 0, 28, 10),
                                dense_shard("b", 0, 18, 10), dense_shard("b", 1, 8, 10)};
    shards[3].part = 1;
    mls_index index = index_of(files, shards, 4);
    CHECK(mls_index_arrange(&index, &status) == MLS_OK);
    CHECK(mls_str_is(shards[0].id.name, "a") && mls_str_is(shards[3].id.name, "c"));
    CHECK(shards[1].part == 0 && shards[2].part == 1);
    shards[2].part = 0;
    CHECK(mls_index_arrange(&index, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.name, "b");
    CHECK_TEXT(status.text, "shard of 'b': \"part\" appears twice");
}

TEST(duplicate_paths_are_refused)
{
    mls_index_file files[2];
    mls_index index = index_of(files, NULL, 0);
    CHECK(mls_index_arrange(&index, &status) == MLS_OK);
    files[1] = files[0];
    CHECK(mls_index_arrange(&index, &status) == MLS_E_FORMAT && status.name[0] == '\0');
    CHECK_TEXT(status.text, "\"path\" appears twice among the files");
}

/* Every byte in a name that is otherwise valid. */
TEST(file_names_have_safe_characters_only)
{
    static const char safe[] = "abcdefghijklmnopqrstuvwxyz0123456789-_=~.";
    char path[] = "params/w?.safetensors";
    for (int c = 0; c < 256; c++) {
        path[8] = (char)c;
        const mls_str text = {path, sizeof path - 1};
        CHECK(mls_index_is_path(text) == (memchr(safe, c, sizeof safe - 1) != NULL));
    }
}

/* Two places, of one shard or two, plain or in layers, `apart` bytes apart. */
static mls_code arrange(bool sparse, bool same_shard, uint64_t apart)
{
    mls_index_file files[2];
    mls_layer list[] = {{.offset = 100, .bytes = 50},
                        {.offset = 100 + apart, .bytes = 50}};
    mls_layers both = {.list = list, .count = 2}, newest = {.list = list + 1, .count = 1};
    mls_index_shard shards[] = {dense_shard("a", 0, 100, 50),
                                dense_shard("b", 0, 100 + apart, 50)};
    if (same_shard) {
        shards[0].layers = &both;
    } else if (sparse) {
        shards[1] = dense_shard("b", 1, 0, 50);
        shards[1].layers = &newest;
    }
    mls_index index = index_of(files, shards, same_shard ? 1 : 2);
    return mls_index_arrange(&index, &status);
}

TEST(overlapping_shards_are_refused)
{
    for (uint64_t apart = 0; apart < 60; apart += 7) {
        const mls_code expected = apart < 50 ? MLS_E_FORMAT : MLS_OK;
        CHECK(arrange(false, false, apart) == expected);
        CHECK(arrange(true, false, apart) == expected);
        CHECK(arrange(true, true, apart) == expected);
    }
    CHECK(arrange(true, true, 49) == MLS_E_FORMAT);
    CHECK_TEXT(status.text,
               "shard of 'a': \"offset\" overlaps another layer of the shard");
    CHECK(arrange(true, false, 49) == MLS_E_FORMAT && strcmp(status.name, "b") == 0);
    CHECK_TEXT(status.text,
               "shard of 'b': \"offset\" overlaps another shard in the file");
    CHECK(arrange(true, false, 50) == MLS_OK);
}

TEST(total_size_overflow_is_refused)
{
    mls_index_file files[2];
    mls_layers none = {0};
    mls_index_shard shards[] = {dense_shard("a", 0, 0, (size_t)INT64_MAX),
                                dense_shard("b", 0, 0, 1)};
    shards[0].layers = shards[1].layers = &none;
    mls_index index = index_of(files, shards, 1);
    CHECK(mls_index_arrange(&index, &status) == MLS_OK);
    index.shard_count = 2;
    CHECK(mls_index_arrange(&index, &status) == MLS_E_FORMAT &&
          strcmp(status.name, "b") == 0);
}

/* A key of a section, and its expected parts; `state` NULL: none. */
static void check_key(mls_section section, const char *key, const char *name,
                      const char *state)
{
    const mls_tensor_id id = mls_tensor_id_of(section, text(key));
    CHECK(id.section == section && mls_str_is(id.name, name));
    CHECK(id.has_state == (state != NULL));
    CHECK(state == NULL || mls_str_is(id.state, state));
}

TEST(optimizer_key_ends_with_the_state_name)
{
    check_key(MLS_PARAMS, "layer.0.weight", "layer.0.weight", NULL);
    check_key(MLS_OPTIM_STATE, "layer.0.weight.m", "layer.0.weight", "m");
    check_key(MLS_OPTIM_STATE, "step", "step", NULL);
    check_key(MLS_OPTIM_STATE, ".m", "", "m");
    check_key(MLS_OPTIM_STATE, "w.", "w", "");
    check_key(MLS_OPTIM_STATE, "", "", NULL);
    check_key(MLS_STATES, "critic/layer.0.weight", "critic/layer.0.weight", NULL);
}
