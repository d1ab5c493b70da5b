/* Patterns: the common content of indexes, and the places of a tensor in them. */
#include "checkpoint/ranks/index_pattern.h"
#include "support/parts.h"
#include "support/text.h"

#include <stdlib.h>

enum { MOST = 40 };

static const size_t matrix[] = {8, 6}, hundred[] = {100};

static mls_index_shard shard_of(const char *name, mls_layout layout, size_t part)
{
    return (mls_index_shard){.id = {.name = text(name)},
                             .dtype = MLS_F32,
                             .rank = 2,
                             .shape = matrix,
                             .layout = layout,
                             .part = part,
                             .version = 1};
}

/* A rank's parts of two tensors with one layout, one with another, and one whole
 * tensor. */
static mls_index index_of(mls_index_shard *shards, size_t part)
{
    shards[0] = shard_of("a.b", cut(0, 4), part);
    shards[1] = shard_of("a.c", cut(1, 6), part + 1);
    shards[2] = shard_of("a.d", cut(0, 4), part);
    shards[3] = shard_of("e", (mls_layout){0}, 0);
    return (mls_index){.shards = shards, .shard_count = 4};
}

static bool same_bytes(const mls_index *a, const mls_index *b)
{
    mls_index_pattern x = {0}, y = {0};
    mls_json_writer first = {.most = 1 << 20}, second = {.most = 1 << 20};
    mls_status st;
    CHECK(mls_index_pattern_init(a, &x, &st) == MLS_OK);
    CHECK(mls_index_pattern_init(b, &y, &st) == MLS_OK);
    mls_index_pattern_bytes(a, &x, &first);
    mls_index_pattern_bytes(b, &y, &second);
    const bool same = first.length == second.length && first.length > 0 &&
                      memcmp(first.data, second.data, first.length) == 0;
    mls_json_writer_fini(&first);
    mls_json_writer_fini(&second);
    mls_index_pattern_fini(&x);
    mls_index_pattern_fini(&y);
    return same;
}

TEST(shards_of_one_layout_and_part_are_a_group)
{
    mls_index_shard shards[4];
    const mls_index index = index_of(shards, 2);
    mls_index_pattern pattern;
    REQUIRE(mls_index_pattern_init(&index, &pattern, &status) == MLS_OK);
    CHECK(pattern.known && pattern.group_count == 3);
    CHECK(pattern.groups[0] == 0 && pattern.groups[1] == 1 && pattern.groups[2] == 0 &&
          pattern.groups[3] == 2);
    CHECK(pattern.parts[0] == 2 && pattern.parts[1] == 3 && pattern.parts[2] == 0);
    mls_index_pattern_fini(&pattern);
    mls_index_pattern_fini(&pattern); /* zeroed */
}

TEST(ranks_differ_in_parts_versions_and_tiers_only)
{
    mls_index_shard first[4], second[4];
    const mls_index a = index_of(first, 0), b = index_of(second, 3);
    second[1].version = 7;
    second[2].tier = MLS_TIER_COLD;
    CHECK(same_bytes(&a, &b));
}

TEST(any_other_difference_changes_the_pattern)
{
    enum { CHANGES = 6 };
    static const signed char axes[] = {1, 0};
    static const size_t at[CHANGES] = {0, 0, 3, 3, 2, 3};
    mls_index_shard first[4], second[4], changed[CHANGES];
    const mls_index a = index_of(first, 0);
    mls_index b = index_of(second, 1);
    CHECK(same_bytes(&a, &b));
    for (size_t i = 0; i < CHANGES; i++) {
        changed[i] = second[at[i]];
    }
    changed[0].id.name = text("a.a");
    changed[1].dtype = MLS_F16;
    changed[2].shape = hundred, changed[2].rank = 1;
    changed[3].layout = cut(0, 1);
    changed[4].part = 2; /* two groups instead of one */
    changed[5].axes = axes;
    for (size_t i = 0; i < CHANGES; i++) {
        b = index_of(second, 1);
        second[at[i]] = changed[i];
        CHECK(!same_bytes(&a, &b));
    }
    b = index_of(second, 1);
    b.shard_count = 3;
    CHECK(!same_bytes(&a, &b));
}

/* One part of each of many layouts: as many groups as shards. */
TEST(more_groups_than_the_limit_disable_patterns)
{
    mls_index_shard shards[MOST];
    mls_index index = {.shards = shards, .shard_count = MLS_PATTERN_GROUPS};
    mls_index_pattern pattern;
    for (size_t i = 0; i < MOST; i++) {
        shards[i] = shard_of("w", cut(0, MOST), i);
    }
    REQUIRE(mls_index_pattern_init(&index, &pattern, &status) == MLS_OK);
    CHECK(pattern.known && pattern.group_count == MLS_PATTERN_GROUPS);
    mls_index_pattern_fini(&pattern);
    index.shard_count++;
    REQUIRE(mls_index_pattern_init(&index, &pattern, &status) == MLS_OK);
    CHECK(!pattern.known && pattern.groups == NULL && pattern.group_count == 0);
    mls_index_pattern_fini(&pattern);
    index.shard_count = 0;
    REQUIRE(mls_index_pattern_init(&index, &pattern, &status) == MLS_OK);
    CHECK(pattern.known && pattern.group_count == 0);
    mls_index_pattern_fini(&pattern);
}

/* The groups of a tensor in three indexes, the second has too many groups. */
TEST(places_are_the_groups_that_list_a_tensor)
{
    mls_index_shard first[4], second[MOST], third[4];
    mls_index indexes[3] = {
        index_of(first, 0), {.shards = second, .shard_count = MOST}, index_of(third, 2)};
    for (size_t i = 0; i < MOST; i++) {
        second[i] = shard_of("a.c", cut(0, MOST), i);
    }
    third[0] = shard_of("a.c", cut(1, 6), 1); /* two parts of "a.c" */
    mls_index_pattern *patterns = mls_index_patterns_new(indexes, 3, &status);
    REQUIRE(patterns != NULL);
    static const char *const names[] = {"a", "a.b", "a.c", "e", "f"};
    static const mls_index_pattern_place expected[5][3] = {
        {{0}}, {{0, 0}}, {{0, 1}, {2, 0}, {2, 1}}, {{0, 2}, {2, 3}}, {{0}}};
    static const size_t counts[] = {0, 1, 3, 2, 0};
    for (size_t i = 0; i < 5; i++) {
        const mls_tensor_id id = {.name = text(names[i])};
        mls_json_writer places = {.most = 1 << 20};
        mls_index_pattern_places(indexes, patterns, 3, &id, &places);
        REQUIRE(places.code == MLS_OK &&
                places.length == counts[i] * sizeof expected[0][0]);
        CHECK(counts[i] == 0 || memcmp(places.data, expected[i], places.length) == 0);
        mls_json_writer_fini(&places);
    }
    mls_index_patterns_free(patterns, 3);
}
