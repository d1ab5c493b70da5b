#include "activation/layer_map.h"
#include "support/layer_keys.h"

/* A key that points into `room`, which may be overwritten after the call. */
static mls_layer_key key_of(char *room, size_t bytes, int number, uint64_t hash)
{
    const int length = snprintf(room, bytes, "layers.%d.attention", number);
    return (mls_layer_key){.name = {room, (size_t)length}, .hash = hash};
}

static mls_layer_map t; /* of the current test */

AFTER_EACH
{
    mls_layer_map_fini(&t);
}

TEST(empty_map_finds_no_layer)
{
    const mls_layer_key key = named("a");
    CHECK(mls_layer_find(&t, &key) == NULL);
    CHECK(mls_layer_mark_of(&t, &key) == MLS_LAYER_UNMARKED);
    mls_layer_map_fini(&t);
}

/* Hashes of a good function, of one with few values, and of a constant one. */
static uint64_t hash_of(int number, int kind)
{
    const uint64_t wide = (uint64_t)number * UINT64_C(0xD1342543DE82EF95);
    return kind == 0 ? wide : kind == 1 ? (uint64_t)(number % 5) << 60 : 3;
}

TEST(layers_with_colliding_hashes_are_distinguished)
{
    enum { LAYERS = 700 };
    char room[64];
    for (int kind = 0; kind < 3; kind++) {
        for (int i = 0; i < LAYERS; i++) {
            mls_table_layer *layer = NULL;
            const mls_layer_key key = key_of(room, sizeof room, i, hash_of(i, kind));
            CHECK(mls_layer_find(&t, &key) == NULL);
            REQUIRE(mls_layer_add(&t, &key, &layer, &status) == MLS_OK);
            layer->bytes = (size_t)i;
            memset(room, 'x', sizeof room); /* names are copied */
        }
        CHECK(t.count == LAYERS && t.slot_count >= 2 * t.count);
        for (int i = 0; i < LAYERS; i++) {
            const mls_layer_key key = key_of(room, sizeof room, i, hash_of(i, kind));
            const mls_table_layer *layer = mls_layer_find(&t, &key);
            REQUIRE(layer != NULL);
            CHECK(layer == &t.layers[i] && layer->bytes == (size_t)i);
            const mls_str name = mls_layer_name(&t, layer);
            CHECK(mls_str_equal(name, key.name));
        }
        mls_layer_map_fini(&t);
        CHECK(t.layers == NULL && t.slots == NULL && t.text == NULL);
    }
}

TEST(adding_a_layer_twice_returns_the_first)
{
    mls_table_layer *first = NULL, *again = NULL;
    const mls_layer_key key = named("layer.1");
    REQUIRE(mls_layer_add(&t, &key, &first, &status) == MLS_OK);
    first->calls = 9;
    REQUIRE(mls_layer_add(&t, &key, &again, &status) == MLS_OK);
    CHECK(again == first && again->calls == 9 && t.count == 1);
}

TEST(names_may_contain_zero_bytes)
{
    mls_table_layer *layer = NULL;
    const mls_layer_key keys[] = {
        {.name = {NULL, 0}, .hash = 1},
        {.name = {"a\0b", 3}, .hash = 1},
        {.name = {"a\0c", 3}, .hash = 1},
        {.name = {"a", 1}, .hash = 1},
    };
    for (size_t i = 0; i < 4; i++) {
        CHECK(mls_layer_find(&t, &keys[i]) == NULL);
        REQUIRE(mls_layer_add(&t, &keys[i], &layer, &status) == MLS_OK);
        CHECK(mls_layer_name(&t, layer).length == keys[i].name.length);
    }
    for (size_t i = 0; i < 4; i++) {
        CHECK(mls_layer_find(&t, &keys[i]) == &t.layers[i]);
    }
}

/* Equal hashes and lengths, and one different byte, at every position of every length. */
TEST(names_that_differ_in_one_byte_are_distinguished)
{
    enum { LONGEST = 40 };
    char name[LONGEST];
    memset(name, 'n', sizeof name);
    for (size_t length = 1; length <= LONGEST; length++) {
        mls_table_layer *layer = NULL;
        const mls_layer_key key = {.name = {name, length}, .hash = 5};
        REQUIRE(mls_layer_add(&t, &key, &layer, &status) == MLS_OK);
        for (size_t at = 0; at < length; at++) {
            name[at] = 'x';
            CHECK(mls_layer_find(&t, &key) == NULL);
            name[at] = 'n';
        }
        CHECK(mls_layer_find(&t, &key) == &t.layers[0]);
        mls_layer_map_fini(&t);
    }
}

TEST(conflicting_choices_are_refused)
{
    const mls_layer_key a = named("a"), b = named("b");
    CHECK(mls_layer_set_mark(&t, &a, MLS_LAYER_EXCLUDE, &status) == MLS_OK);
    CHECK(mls_layer_set_mark(&t, &a, MLS_LAYER_EXCLUDE, &status) == MLS_OK);
    CHECK(mls_layer_mark_of(&t, &a) == MLS_LAYER_EXCLUDE);
    CHECK(mls_layer_mark_of(&t, &b) == MLS_LAYER_UNMARKED);
    CHECK(mls_layer_set_mark(&t, &a, MLS_LAYER_CHECKPOINT, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.name, "a");
    CHECK_TEXT(status.text, "layers cannot be both checkpointed and excluded: a");
    CHECK(mls_layer_mark_of(&t, &a) == MLS_LAYER_EXCLUDE && t.count == 1);
}

TEST(too_many_layers_are_refused)
{
    mls_table_layer *layer = NULL;
    const mls_layer_key key = named("a");
    t.count = (size_t)1 << 31;
    CHECK_FAILS(mls_layer_add(&t, &key, &layer, &status), MLS_E_CAPACITY,
                "more than 2147483648 layers");
    CHECK(layer == NULL);
    t.count = 0;
}
