/* Which ranks have what is wanted, from the index of one and a few numbers of the others:
 * against looking at all indexes. */
#include "holders.h"
#include "runner.h"

#include <stdint.h>

enum { WORLD = 24, MOST = 4 };

static const size_t matrix[] = {23, 10}, cube[] = {6, 8, 5};

static mls_text text(const char *chars)
{
    return (mls_text){.data = chars, .length = strlen(chars)};
}

/* What one rank has stored; shards are added in order. */
typedef struct rank {
    mls_index index;
    mls_index_file file;
    mls_index_shard shards[MOST];
} rank;

static rank rank_of(uint64_t number)
{
    rank r = {.index = {.rank = number, .world_size = WORLD, .file_count = 1}};
    snprintf(r.file.path, sizeof r.file.path, "params/%d.safetensors", (int)number);
    r.file.bytes = 1 << 20;
    return r;
}

/* The index of a rank that stays where it is. */
static const mls_index *index_of(rank *r)
{
    r->index.files = &r->file;
    r->index.shards = r->shards;
    return &r->index;
}

static void add(rank *r, const char *name, int dims, const size_t *shape,
                mls_layout layout, size_t part)
{
    r->shards[r->index.shard_count++] = (mls_index_shard){.id = {.name = text(name)},
                                                          .dtype = MLS_U8,
                                                          .rank = dims,
                                                          .shape = shape,
                                                          .layout = layout,
                                                          .part = part,
                                                          .version = 1};
}

/* A mixture of experts in small: "dense" is everybody's, cut flat; "experts" are cut
 * along two axes; "last" is whole, and the last rank's alone.  So there are two patterns.
 */
static void train(rank *ranks)
{
    const mls_layout flat = {1, {{MLS_LAYOUT_FLAT, WORLD}}};
    const mls_layout both = {2, {{0, 6}, {1, 4}}};
    for (size_t i = 0; i < WORLD; i++) {
        ranks[i] = rank_of(i);
        add(&ranks[i], "dense", 2, matrix, flat, (i * 5) % WORLD);
        add(&ranks[i], "experts", 3, cube, both, i);
        if (i == WORLD - 1) {
            add(&ranks[i], "last", 2, matrix, (mls_layout){0}, 0);
        }
        (void)index_of(&ranks[i]);
    }
}

/* The two patterns, read from ranks `reader` and the last. */
typedef struct known {
    const mls_index *indexes[2];
    mls_pattern_ranks patterns[2];
    uint64_t numbers[WORLD], parts[3 * WORLD];
    mls_catalog catalog;
} known;

static void know(const rank *ranks, size_t reader, known *k)
{
    mls_status st;
    *k = (known){.indexes = {&ranks[reader].index, &ranks[WORLD - 1].index}};
    for (size_t i = 0; i < WORLD; i++) {
        const size_t count = i == WORLD - 1 ? 3 : 2;
        k->numbers[i] = i;
        for (size_t j = 0; j < count; j++) {
            k->parts[2 * i + j] = ranks[i].shards[j].part;
        }
    }
    k->patterns[0] =
        (mls_pattern_ranks){k->indexes[0], k->numbers, k->parts, WORLD - 1, 2};
    k->patterns[1] = (mls_pattern_ranks){k->indexes[1], k->numbers + WORLD - 1,
                                         k->parts + 2 * (WORLD - 1), 1, 3};
    CHECK(mls_catalog_init(&k->catalog, k->indexes, 2, &st) == MLS_OK);
}

static mls_part part_of(const mls_layout *layout, int dims, const size_t *shape, size_t i)
{
    mls_part part = {0};
    mls_status st;
    CHECK(mls_layout_part(layout, dims, shape, i, &part, &st) == MLS_OK);
    return part;
}

static bool meet(const mls_part *a, const mls_part *b)
{
    mls_overlap overlap;
    mls_run run;
    mls_overlap_init(&overlap, a, b);
    return mls_overlap_next(&overlap, &run);
}

/* The tensors in the order of the catalog, cut for a new world. */
static void want(size_t world, size_t index, mls_part *parts)
{
    const mls_layout flat = {1, {{MLS_LAYOUT_FLAT, world}}};
    const mls_layout both = {2, {{0, 3}, {1, world / 3}}};
    parts[0] = part_of(&flat, 2, matrix, index);
    parts[1] = part_of(&both, 3, cube, index);
    parts[2] = part_of(&flat, 2, matrix, index);
}

static void those_who_have_something_of_it_are_found(void)
{
    rank ranks[WORLD];
    train(ranks);
    for (size_t world = 3; world <= 36; world += 3) {
        for (size_t index = 0; index < world; index++) {
            known k;
            mls_part parts[3];
            bool needed[WORLD] = {false};
            mls_status st;
            know(ranks, index % (WORLD - 1), &k);
            want(world, index, parts);
            const mls_part *wanted[] = {&parts[0], &parts[1], &parts[2]};
            REQUIRE(mls_holders_find(&k.catalog, k.patterns, 2, wanted, index, needed,
                                     WORLD, &st) == MLS_OK);
            for (size_t i = 0; i < WORLD; i++) {
                bool has = false;
                for (size_t j = 0; j < ranks[i].index.shard_count; j++) {
                    const mls_part part = mls_index_part(&ranks[i].shards[j]);
                    has = has || meet(&part, &parts[j]);
                }
                /* a tensor of which nothing is wanted comes from where it was read */
                const bool extra = mls_part_count(&parts[0]) == 0 ||
                                   mls_part_count(&parts[1]) == 0 ||
                                   mls_part_count(&parts[2]) == 0;
                CHECK(needed[i] == has || (extra && needed[i]));
            }
            mls_catalog_fini(&k.catalog);
        }
    }
}

static void only_what_is_wanted_counts(void)
{
    rank ranks[WORLD];
    known k;
    mls_part parts[3];
    mls_status st;
    train(ranks);
    know(ranks, 0, &k);
    want(24, 7, parts);
    for (size_t tensor = 0; tensor < 3; tensor++) {
        const mls_part *wanted[3] = {NULL};
        bool needed[WORLD] = {false};
        size_t count = 0;
        wanted[tensor] = &parts[tensor];
        REQUIRE(mls_holders_find(&k.catalog, k.patterns, 2, wanted, 7, needed, WORLD,
                                 &st) == MLS_OK);
        for (size_t i = 0; i < WORLD; i++) {
            count += needed[i];
        }
        /* "dense" is cut as it was; "experts" now in 3 x 8, of 6 x 4; "last" is one's */
        CHECK(count == (tensor == 1 ? 2U : 1U));
        CHECK(tensor != 2 || needed[WORLD - 1]);
    }
    mls_catalog_fini(&k.catalog);
}

/* Replicas that nobody marked: everyone has stored the same. */
static void of_many_copies_one_is_taken(void)
{
    rank ranks[WORLD];
    uint64_t numbers[WORLD], parts[WORLD] = {0};
    for (size_t i = 0; i < WORLD; i++) {
        ranks[i] = rank_of(i);
        add(&ranks[i], "w", 2, matrix, (mls_layout){0}, 0);
        (void)index_of(&ranks[i]);
        numbers[i] = WORLD - 1 - i; /* in any order */
    }
    const mls_index *indexes[] = {&ranks[5].index};
    const mls_pattern_ranks pattern = {&ranks[5].index, numbers, parts, WORLD, 1};
    mls_catalog catalog;
    mls_status st;
    REQUIRE(mls_catalog_init(&catalog, indexes, 1, &st) == MLS_OK);
    const mls_layout whole = {0};
    const mls_part part = part_of(&whole, 2, matrix, 0);
    const mls_part *wanted[] = {&part};
    for (uint64_t own = 0; own < WORLD + 3; own++) {
        bool needed[WORLD] = {false};
        REQUIRE(mls_holders_find(&catalog, &pattern, 1, wanted, own, needed, WORLD,
                                 &st) == MLS_OK);
        for (uint64_t i = 0; i < WORLD; i++) {
            CHECK(needed[i] == (i == (own < WORLD ? own : 0)));
        }
    }
    mls_catalog_fini(&catalog);
}

/* Parts that nobody stored, or that are empty: whoever loads is to find the tensor. */
static void a_tensor_always_has_an_index(void)
{
    rank ranks[WORLD];
    known k;
    mls_status st;
    train(ranks);
    know(ranks, 3, &k);
    const mls_layout flat = {1, {{MLS_LAYOUT_FLAT, 1000}}};
    const mls_part empty = part_of(&flat, 2, matrix, 999);
    const mls_part *wanted[3] = {&empty};
    bool needed[WORLD] = {false};
    REQUIRE(mls_holders_find(&k.catalog, k.patterns, 2, wanted, 0, needed, WORLD, &st) ==
            MLS_OK);
    for (size_t i = 0; i < WORLD; i++) {
        CHECK(needed[i] == (i == 3));
    }
    mls_catalog_fini(&k.catalog);
}

static void manifests_that_say_something_else_are_refused(void)
{
    rank ranks[WORLD];
    known k;
    mls_part parts[3];
    mls_status st;
    bool needed[WORLD] = {false};
    train(ranks);
    know(ranks, 0, &k);
    want(24, 0, parts);
    const mls_part *wanted[] = {&parts[0], &parts[1], &parts[2]};
    k.numbers[4] = WORLD;
    CHECK(mls_holders_find(&k.catalog, k.patterns, 2, wanted, 0, needed, WORLD, &st) ==
          MLS_E_FORMAT);
    k.numbers[4] = 4;
    k.patterns[0].group_count = 1;
    CHECK(mls_holders_find(&k.catalog, k.patterns, 2, wanted, 0, needed, WORLD, &st) ==
          MLS_E_FORMAT);
    k.patterns[0].group_count = 2;
    CHECK(mls_holders_find(&k.catalog, k.patterns, 2, wanted, 0, needed, WORLD - 1,
                           &st) == MLS_E_FORMAT);
    CHECK(mls_holders_find(&k.catalog, k.patterns, 2, wanted, 0, needed, WORLD, &st) ==
          MLS_OK);
    mls_catalog_fini(&k.catalog);
}

/* Whether the two patterns of `train` make whole tensors; by its error, the part that is
 * missing and who has another's. */
static bool whole(known *k, const char *name, const char *text_wanted)
{
    mls_status st;
    const mls_code code = mls_holders_check(&k->catalog, k->patterns, 2, WORLD, &st);
    if (text_wanted != NULL) {
        CHECK(code == MLS_E_FORMAT && strcmp(st.text, text_wanted) == 0);
        CHECK(strcmp(st.name, name) == 0);
    }
    return code == MLS_OK;
}

static void a_part_that_no_rank_gives_is_missed(void)
{
    rank ranks[WORLD];
    known k;
    train(ranks);
    know(ranks, 0, &k);
    CHECK(whole(&k, NULL, NULL));
    k.parts[2 * 7] = 10; /* of "dense", as rank 2 has it; it was part 11 */
    CHECK(!whole(&k, "dense",
                 "part 11 of 24 is missing: no rank gives it as replica 0; ranks 2 and 7 "
                 "both give part 10"));
    k.parts[2 * 7] = 11;
    k.parts[2 * 9 + 1] = 23; /* of "experts", as the last rank's, of the other pattern */
    CHECK(!whole(&k, "experts",
                 "part 9 of 24 is missing: no rank gives it as replica 0; ranks 9 and 23 "
                 "both give part 23"));
    k.parts[2 * 9 + 1] = 9;
    CHECK(whole(&k, NULL, NULL));
    k.patterns[1].group_count = 2;
    CHECK(!whole(&k, NULL, NULL)); /* the manifest's fault */
    mls_catalog_fini(&k.catalog);
}

/* Five elements in 24 parts: the last ones have nothing, and need not be there.  A state
 * is told by its name. */
static void parts_without_elements_need_not_be_there(void)
{
    static const size_t five[] = {5};
    const mls_layout rows = {1, {{0, WORLD}}};
    rank ranks[WORLD];
    const mls_index *indexes[WORLD];
    uint64_t numbers[WORLD], parts[WORLD];
    mls_catalog catalog;
    mls_status st;
    for (size_t i = 0; i < WORLD; i++) {
        ranks[i] = rank_of(i);
        add(&ranks[i], "b", 1, five, rows, i);
        add(&ranks[i], "c", 1, five, rows, i);
        ranks[i].shards[1].id.state = text("m");
        ranks[i].shards[1].id.has_state = true;
        indexes[i] = index_of(&ranks[i]);
        numbers[i] = parts[i] = i;
    }
    for (size_t there = 1; there <= WORLD; there++) {
        /* by one pattern, and by all indexes */
        const mls_pattern_ranks pattern = {indexes[0], numbers, parts, there, 1};
        REQUIRE(mls_catalog_init(&catalog, indexes, 1, &st) == MLS_OK);
        CHECK(mls_holders_check(&catalog, &pattern, 1, WORLD, &st) ==
              (there < 5 ? MLS_E_FORMAT : MLS_OK));
        mls_catalog_fini(&catalog);
        REQUIRE(mls_catalog_init(&catalog, indexes, there, &st) == MLS_OK);
        CHECK(mls_holders_check(&catalog, NULL, 0, WORLD, &st) ==
              (there < 5 ? MLS_E_FORMAT : MLS_OK));
        mls_catalog_fini(&catalog);
    }
    ranks[2].index.shard_count = 1;
    REQUIRE(mls_catalog_init(&catalog, indexes, WORLD, &st) == MLS_OK);
    CHECK(mls_holders_check(&catalog, NULL, 0, WORLD, &st) == MLS_E_FORMAT);
    CHECK(strcmp(st.name, "c") == 0);
    CHECK(strcmp(st.text, "state 'm': part 2 of 24 is missing: no rank gives it as "
                          "replica 0") == 0);
    mls_catalog_fini(&catalog);
}

/* Each rank has two parts of each tensor, so that no group has all of them. */
static void groups_make_a_tensor_together(void)
{
    const mls_layout rows = {1, {{0, 2 * WORLD}}};
    static const char *const names[] = {"a", "b"};
    rank ranks[WORLD];
    uint64_t numbers[WORLD], parts[2 * WORLD];
    mls_catalog catalog;
    mls_status st;
    static const size_t shape[] = {2 * WORLD};
    for (size_t i = 0; i < WORLD; i++) {
        ranks[i] = rank_of(i);
        for (size_t j = 0; j < 4; j++) {
            add(&ranks[i], names[j / 2], 1, shape, rows, i + j % 2 * WORLD);
        }
        numbers[i] = i;
        parts[2 * i] = i;
        parts[2 * i + 1] = i + WORLD;
    }
    const mls_index *indexes[] = {index_of(&ranks[3])};
    const mls_pattern_ranks pattern = {indexes[0], numbers, parts, WORLD, 2};
    REQUIRE(mls_catalog_init(&catalog, indexes, 1, &st) == MLS_OK);
    CHECK(mls_holders_check(&catalog, &pattern, 1, WORLD, &st) == MLS_OK);
    parts[2 * 5 + 1] = 0;
    CHECK(mls_holders_check(&catalog, &pattern, 1, WORLD, &st) == MLS_E_FORMAT);
    CHECK(strcmp(st.name, "a") == 0);
    CHECK(strcmp(st.text, "part 29 of 48 is missing: no rank gives it as replica 0; "
                          "ranks 0 and 5 both give part 0") == 0);
    mls_catalog_fini(&catalog);
}

static const test_case tests[] = {
    TEST(those_who_have_something_of_it_are_found),
    TEST(only_what_is_wanted_counts),
    TEST(of_many_copies_one_is_taken),
    TEST(a_tensor_always_has_an_index),
    TEST(manifests_that_say_something_else_are_refused),
    TEST(a_part_that_no_rank_gives_is_missed),
    TEST(parts_without_elements_need_not_be_there),
    TEST(groups_make_a_tensor_together),
};

int main(void)
{
    return RUN_TESTS(tests);
}
