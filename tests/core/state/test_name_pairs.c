/* Matching of names, compared with a search through both lists. */
#include "state/name_pairs.h"
#include "support/runner.h"
#include "support/text.h"

#include <stdlib.h>

enum { MOST = 40 };

/* Match, and check the promises of the header. */
static void check(const mls_str *a, size_t a_count, const mls_str *b, size_t b_count)
{
    size_t partners[MOST], rest[MOST], rest_count = 0;
    bool taken[MOST] = {false};
    mls_status st;
    REQUIRE(mls_pair_names(a, a_count, b, b_count, partners, rest, &rest_count, &st) ==
            MLS_OK);
    for (size_t i = 0; i < a_count; i++) {
        if (partners[i] != MLS_NO_PARTNER) {
            REQUIRE(partners[i] < b_count && !taken[partners[i]]);
            CHECK(mls_str_equal(a[i], b[partners[i]]));
            taken[partners[i]] = true;
        }
    }
    size_t left = 0;
    for (size_t j = 0; j < b_count; j++) {
        if (!taken[j]) {
            CHECK(left < rest_count && rest[left] == j);
            left++;
        }
    }
    CHECK(left == rest_count);
    /* no name is left out that could have a partner */
    for (size_t i = 0; i < a_count; i++) {
        for (size_t j = 0; partners[i] == MLS_NO_PARTNER && j < b_count; j++) {
            CHECK(taken[j] || !mls_str_equal(a[i], b[j]));
        }
    }
}

TEST(lists_in_one_order_are_matched_in_step)
{
    const mls_str names[] = {text("a"), text("b.c"), text(""), text("b")};
    size_t partners[4], rest[4], rest_count = 9;
    REQUIRE(mls_pair_names(names, 4, names, 4, partners, rest, &rest_count, &status) ==
            MLS_OK);
    CHECK(rest_count == 0);
    for (size_t i = 0; i < 4; i++) {
        CHECK(partners[i] == i);
    }
    check(names, 4, names, 2);
    check(names, 2, names, 4);
    check(names, 0, names, 4);
    check(names, 4, names, 0);
    check(names, 0, names, 0);
}

TEST(a_name_is_compared_as_bytes_with_its_length)
{
    const mls_str a[] = {{"x\0y", 3}, {"x\0z", 3}, {"x", 1}};
    const mls_str b[] = {{"x", 1}, {"x\0z", 3}, {"x\0y", 3}};
    check(a, 3, b, 3);
}

TEST(equal_names_of_a_list_get_one_partner_each)
{
    const mls_str a[] = {text("w"), text("w"), text("v"), text("w")};
    const mls_str b[] = {text("v"), text("w"), text("w")};
    check(a, 4, b, 3);
    check(b, 3, a, 4);
}

TEST(any_two_lists_are_matched)
{
    static char chars[MOST][4];
    mls_str pool[MOST], a[MOST], b[MOST];
    srand(7);
    for (size_t i = 0; i < MOST; i++) {
        snprintf(chars[i], sizeof chars[i], "n%d", (int)i % 23); /* some twice */
        pool[i] = text(chars[i]);
    }
    for (int round = 0; round < TRIES(400); round++) {
        const size_t a_count = (size_t)rand() % MOST, b_count = (size_t)rand() % MOST;
        const size_t same = (size_t)rand() % MOST; /* the same number begin alike */
        for (size_t i = 0; i < MOST; i++) {
            a[i] = pool[rand() % MOST];
            b[i] = i < same ? a[i] : pool[rand() % MOST];
        }
        check(a, a_count, b, b_count);
    }
}
