/* What indexes have in common, and the names that they have. */
#include "mem.h"
#include "pattern.h"
#include "runner.h"

#include <stdlib.h>

enum { MOST = 40 };

static const mls_crc_kernels *const crc = &mls_crc_scalar;
static const size_t matrix[] = {8, 6}, hundred[] = {100};

static mls_text text(const char *chars)
{
    return (mls_text){.data = chars, .length = strlen(chars)};
}

static mls_layout cut(int axis, size_t parts)
{
    return (mls_layout){.count = 1, .steps = {{.axis = axis, .parts = parts}}};
}

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

/* Two tensors cut alike, one cut otherwise, one whole: what a rank has of them. */
static mls_index index_of(mls_index_shard *shards, size_t part)
{
    shards[0] = shard_of("a.b", cut(0, 4), part);
    shards[1] = shard_of("a.c", cut(1, 6), part + 1);
    shards[2] = shard_of("a.d", cut(0, 4), part);
    shards[3] = shard_of("e", (mls_layout){0}, 0);
    return (mls_index){.shards = shards, .shard_count = 4};
}

static bool same_text(const mls_index *a, const mls_index *b)
{
    mls_pattern x = {0}, y = {0};
    mls_buffer first = {.most = 1 << 20}, second = {.most = 1 << 20};
    mls_status st;
    CHECK(mls_pattern_init(a, &x, &st) == MLS_OK);
    CHECK(mls_pattern_init(b, &y, &st) == MLS_OK);
    mls_pattern_text(a, &x, &first);
    mls_pattern_text(b, &y, &second);
    const bool same = first.length == second.length && first.length > 0 &&
                      memcmp(first.data, second.data, first.length) == 0;
    mls_buffer_fini(&first);
    mls_buffer_fini(&second);
    mls_pattern_fini(&x);
    mls_pattern_fini(&y);
    return same;
}

static void shards_of_one_layout_and_part_are_a_group(void)
{
    mls_index_shard shards[4];
    const mls_index index = index_of(shards, 2);
    mls_pattern pattern;
    mls_status st;
    REQUIRE(mls_pattern_init(&index, &pattern, &st) == MLS_OK);
    CHECK(pattern.known && pattern.group_count == 3);
    CHECK(pattern.groups[0] == 0 && pattern.groups[1] == 1 && pattern.groups[2] == 0 &&
          pattern.groups[3] == 2);
    CHECK(pattern.parts[0] == 2 && pattern.parts[1] == 3 && pattern.parts[2] == 0);
    mls_pattern_fini(&pattern);
    mls_pattern_fini(&pattern); /* zeroed */
}

static void ranks_differ_in_parts_versions_and_tiers_only(void)
{
    mls_index_shard one[4], other[4];
    const mls_index a = index_of(one, 0), b = index_of(other, 3);
    other[1].version = 7;
    other[2].tier = MLS_TIER_COLD;
    CHECK(same_text(&a, &b));
}

static void all_else_tells_patterns_apart(void)
{
    static const signed char axes[] = {1, 0};
    mls_index_shard one[4], other[4];
    const mls_index a = index_of(one, 0);
    mls_index b;
    for (int change = 0; change < 7; change++) {
        b = index_of(other, 1);
        switch (change) {
        case 0:
            other[0].id.name = text("a.a");
            break;
        case 1:
            other[0].dtype = MLS_F16;
            break;
        case 2:
            other[3].shape = hundred, other[3].rank = 1;
            break;
        case 3:
            other[3].layout = cut(0, 1);
            break;
        case 4:
            other[2].part = 2;
            break; /* two groups in place of one */
        case 5:
            other[3].axes = axes;
            break;
        default:
            b.shard_count = 3;
            break;
        }
        CHECK(!same_text(&a, &b));
    }
    b = index_of(other, 1);
    CHECK(same_text(&a, &b));
}

/* One part of each of many layouts: as many groups as shards. */
static void too_many_groups_are_no_pattern(void)
{
    mls_index_shard shards[MOST];
    mls_index index = {.shards = shards, .shard_count = MLS_PATTERN_GROUPS};
    mls_pattern pattern;
    mls_status st;
    for (size_t i = 0; i < MOST; i++) {
        shards[i] = shard_of("w", cut(0, MOST), i);
    }
    REQUIRE(mls_pattern_init(&index, &pattern, &st) == MLS_OK);
    CHECK(pattern.known && pattern.group_count == MLS_PATTERN_GROUPS);
    mls_pattern_fini(&pattern);
    index.shard_count++;
    REQUIRE(mls_pattern_init(&index, &pattern, &st) == MLS_OK);
    CHECK(!pattern.known && pattern.groups == NULL && pattern.group_count == 0);
    mls_pattern_fini(&pattern);
    index.shard_count = 0;
    REQUIRE(mls_pattern_init(&index, &pattern, &st) == MLS_OK);
    CHECK(pattern.known && pattern.group_count == 0);
    mls_pattern_fini(&pattern);
}

static bool has(const uint32_t *numbers, size_t count, const char *name)
{
    const uint32_t sum = crc->update(0, name, strlen(name));
    size_t i = 0;
    while (i < count && numbers[i] != sum) {
        i++;
    }
    return i < count;
}

static void names_and_what_is_above_them_are_listed(void)
{
    static const char *const there[] = {"model",     "model.3", "model.3.w", "model.4",
                                        "model.4.w", ".x",      ""};
    static const char *const absent[] = {"m", "model.", "model.3.", "model.5", "w", "x"};
    mls_index_shard shards[5];
    const mls_index index = {.shards = shards, .shard_count = 5};
    shards[0] = shard_of(".x", (mls_layout){0}, 0);
    shards[1] = shard_of("model.3.w", (mls_layout){0}, 0);
    shards[2] = shard_of("model.4.w", (mls_layout){0}, 0);
    shards[3] = shard_of("model.4.w", (mls_layout){0}, 0); /* a state */
    shards[3].id.section = MLS_OPTIM_STATE;
    shards[4] = shard_of("model.4.w", (mls_layout){0}, 0);
    uint32_t *numbers;
    size_t count;
    mls_status st;
    REQUIRE(mls_pattern_names(&index, crc, &numbers, &count, &st) == MLS_OK);
    CHECK(count == sizeof there / sizeof there[0]);
    for (size_t i = 1; i < count; i++) {
        CHECK(numbers[i - 1] < numbers[i]);
    }
    for (size_t i = 0; i < sizeof there / sizeof there[0]; i++) {
        CHECK(has(numbers, count, there[i]));
    }
    for (size_t i = 0; i < sizeof absent / sizeof absent[0]; i++) {
        CHECK(!has(numbers, count, absent[i]));
    }
    mls_free(numbers);
}

static const test_case tests[] = {
    TEST(shards_of_one_layout_and_part_are_a_group),
    TEST(ranks_differ_in_parts_versions_and_tiers_only),
    TEST(all_else_tells_patterns_apart),
    TEST(too_many_groups_are_no_pattern),
    TEST(names_and_what_is_above_them_are_listed),
};

int main(void)
{
    return RUN_TESTS(tests);
}
