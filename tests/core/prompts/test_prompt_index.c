/* The index: it finds each added entry, within its memory, and chains are
 * circular only in a forged index, where every loop ends.
 */
#include "prompts/prompt_index.h"
#include "support/random_bytes.h"
#include "support/runner.h"

static mls_prompt_key key_of(uint64_t number)
{
    mls_prompt_key key;
    fill_random(key.bytes, sizeof key.bytes, number * 2654435761U + 1);
    return key;
}

static uint32_t add(mls_prompt_index *index, uint64_t number, unsigned kind, uint32_t end,
                    uint32_t parent)
{
    const mls_prompt_entry entry = {
        .key = key_of(number), .kind = (uint8_t)kind, .end = end, .parent = parent};
    CHECK(mls_prompt_index_reserve(index, 1, &status) == MLS_OK);
    return mls_prompt_index_add(index, &entry);
}

TEST(entries_are_found_until_they_are_removed)
{
    enum { COUNT = 5000 };
    mls_prompt_index index = {0};
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK(add(&index, i, 0, i + 1, MLS_PROMPT_NONE) == i);
    }
    for (uint32_t i = 0; i < COUNT; i += 3) {
        mls_prompt_index_remove(&index, i);
    }
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < COUNT; i++) {
            const mls_prompt_key key = key_of(i);
            const uint32_t number = mls_prompt_index_find(&index, &key);
            CHECK((number == MLS_PROMPT_NONE) == (i % 3 == 0));
            CHECK(number == MLS_PROMPT_NONE || index.entries[number].end == i + 1);
        }
        CHECK(mls_prompt_index_pack(&index, &status) == MLS_OK);
        CHECK(index.removed == 0 && index.count == COUNT - (COUNT + 2) / 3);
    }
    mls_prompt_index_fini(&index);
}

TEST(an_entry_takes_at_most_100_bytes)
{
    mls_prompt_index index = {0};
    for (uint32_t i = 0; i < 200000 / EVERY(8); i++) {
        (void)add(&index, i, 0, 1, MLS_PROMPT_NONE);
        CHECK(i < 100 || mls_prompt_index_bytes(&index) <= 100 * index.count);
    }
    mls_prompt_index_fini(&index);
}

TEST(a_chain_is_never_circular)
{
    mls_prompt_index index = {0};
    const uint32_t a = add(&index, 1, 0, 4, MLS_PROMPT_NONE);
    const uint32_t b = add(&index, 2, 0, 8, a);
    const uint32_t tail = add(&index, 3, 5, 8, b);
    mls_prompt_index_link(&index, a, b);    /* ends later */
    mls_prompt_index_link(&index, a, a);    /* itself */
    mls_prompt_index_link(&index, b, tail); /* not a block */
    mls_prompt_index_link(&index, b, 99);   /* no entry */
    CHECK(index.entries[a].parent == MLS_PROMPT_NONE && index.entries[b].parent == a);
    CHECK(index.entries[tail].parent == b);
    CHECK((index.entries[b].flags & MLS_PROMPT_BRANCHES) != 0);
    CHECK((index.entries[a].flags & MLS_PROMPT_BRANCHES) == 0);
    CHECK(index.kinds[0] == 32 && !index.root_branches);
    mls_prompt_index_touch(&index, tail, 9);
    CHECK(index.entries[a].used == 9);
    mls_prompt_index_remove(&index, a);
    CHECK(mls_prompt_index_pack(&index, &status) == MLS_OK);
    CHECK(index.entries[0].parent == MLS_PROMPT_NONE && index.entries[1].parent == 0);
    mls_prompt_index_fini(&index);
}

TEST(a_parent_that_is_added_again_has_its_children)
{
    mls_prompt_index index = {0};
    const uint32_t a = add(&index, 1, 0, 4, MLS_PROMPT_NONE);
    (void)add(&index, 2, 0, 4, MLS_PROMPT_NONE);
    const uint32_t tail = add(&index, 3, 5, 6, a);
    mls_prompt_index_remove(&index, a);
    mls_prompt_index_remove(&index, 1);
    CHECK(mls_prompt_index_pack(&index, &status) == MLS_OK);
    CHECK(index.count == 2 && index.removed == 1);
    CHECK(add(&index, 1, 0, 4, MLS_PROMPT_NONE) == a && index.removed == 0);
    CHECK((index.entries[a].flags & MLS_PROMPT_BRANCHES) != 0);
    CHECK(index.entries[tail - 1].parent == a);
    mls_prompt_index_fini(&index);
}

TEST(ancestors_are_as_recent_as_a_child_that_came_before_its_parent)
{
    mls_prompt_index index = {0};
    const mls_prompt_key key = key_of(2);
    const uint32_t root = add(&index, 1, 0, 4, MLS_PROMPT_NONE);
    CHECK(mls_prompt_index_reserve(&index, 2, &status) == MLS_OK);
    const uint32_t parent = mls_prompt_index_require(&index, &key, 8);
    mls_prompt_index_touch(&index, add(&index, 3, 0, 12, parent), 9);
    CHECK(index.entries[parent].used == 9 && index.entries[root].used == 0);
    CHECK(add(&index, 2, 0, 8, root) == parent);
    CHECK(index.entries[parent].used == 9 && index.entries[root].used == 9);
    mls_prompt_index_fini(&index);
}

TEST(an_empty_index_has_no_entry)
{
    mls_prompt_index index = {0};
    const mls_prompt_key key = key_of(1);
    CHECK(mls_prompt_index_find(&index, &key) == MLS_PROMPT_NONE);
    CHECK_FAILS(mls_prompt_index_reserve(&index, SIZE_MAX, &status), MLS_E_SIZE,
                "a prompt store has too many records");
    CHECK(mls_prompt_index_pack(&index, &status) == MLS_OK);
    mls_prompt_index_fini(&index);
}
