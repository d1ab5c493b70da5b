/* Address ranges are sorted by their start; the sort is stable. */
#include "base/address_ranges.h"
#include "support/runner.h"

enum { MOST = 200 };

/* Address ranges in some order, numbered in that order; every second one has the same
 * start as another. */
static void fill(mls_address_range *spans, size_t count, unsigned seed)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1103515245U + 12345U;
        const uintptr_t low = (seed >> 16) % (count / 2 + 1);
        spans[i] = (mls_address_range){
            .low = low, .high = low + 1, .owner = i, .written = i % 2};
    }
}

TEST(sort_is_stable_at_every_length)
{
    static mls_address_range spans[MOST], spare[MOST];
    for (size_t count = 0; count <= MOST; count++) {
        fill(spans, count, (unsigned)count);
        const mls_address_range *sorted = mls_address_ranges_sort(spans, spare, count);
        size_t owners = 0;
        CHECK(sorted == spans || sorted == spare);
        for (size_t i = 0; i < count; i++) {
            owners += sorted[i].owner;
            CHECK(sorted[i].written == (sorted[i].owner % 2 == 1));
            CHECK(i == 0 || sorted[i - 1].low < sorted[i].low ||
                  (sorted[i - 1].low == sorted[i].low &&
                   sorted[i - 1].owner < sorted[i].owner));
        }
        CHECK(owners == (count == 0 ? 0 : count * (count - 1) / 2));
    }
}

TEST(descending_addresses_are_sorted)
{
    mls_address_range spans[5], spare[5];
    for (size_t i = 0; i < 5; i++) {
        spans[i] = (mls_address_range){.low = 5 - i, .high = 6 - i, .owner = i};
    }
    const mls_address_range *sorted = mls_address_ranges_sort(spans, spare, 5);
    for (size_t i = 0; i < 5; i++) {
        CHECK(sorted[i].low == i + 1 && sorted[i].owner == 4 - i);
    }
}

/* Owners with the same letter are tied, a capital letter interleaves with all others. */
static mls_sharing compare_letters(const void *data, size_t a, size_t b)
{
    const char *letters = data;
    return letters[a] < 'a' || letters[b] < 'a' ? MLS_APART
           : letters[a] == letters[b]           ? MLS_TIED
                                                : MLS_MIXED;
}

TEST(equal_memory_of_one_kind_is_tied)
{
    const mls_address_range sorted[] = {{.low = 10, .high = 20, .owner = 1},
                                        {.low = 10, .high = 20, .owner = 3},
                                        {.low = 20, .high = 30, .owner = 2},
                                        {.low = 40, .high = 40, .owner = 0}};
    bool tied[4] = {false};
    size_t pair[2];
    CHECK(mls_address_ranges_tied(sorted, 4, compare_letters, "axbx", tied, pair));
    CHECK(tied[1] && !tied[3] && !tied[2] && !tied[0]);
    CHECK(mls_address_ranges_tied(sorted, 0, compare_letters, "", tied, pair));
}

TEST(partial_overlaps_are_reported)
{
    const mls_address_range kind[] = {{.low = 10, .high = 20, .owner = 0},
                                      {.low = 10, .high = 20, .owner = 2}};
    const mls_address_range part[] = {{.low = 1, .high = 5, .owner = 2},
                                      {.low = 10, .high = 20, .owner = 1},
                                      {.low = 19, .high = 20, .owner = 0}};
    bool tied[3] = {false};
    size_t pair[2];
    CHECK(!mls_address_ranges_tied(kind, 2, compare_letters, "aab", tied, pair) &&
          pair[0] == 0 && pair[1] == 2);
    CHECK(!mls_address_ranges_tied(part, 3, compare_letters, "abc", tied, pair) &&
          pair[0] == 1 && pair[1] == 0);
}

/* The range of owner 0 contains the others; only the last one shares an element with
 * it. */
TEST(overlap_is_detected_behind_interleaved_ranges)
{
    const mls_address_range sorted[] = {{.low = 10, .high = 90, .owner = 0},
                                        {.low = 11, .high = 30, .owner = 1},
                                        {.low = 40, .high = 50, .owner = 2},
                                        {.low = 60, .high = 70, .owner = 3}};
    bool tied[4] = {false};
    size_t pair[2];
    CHECK(mls_address_ranges_tied(sorted, 4, compare_letters, "aBCD", tied, pair));
    CHECK(!mls_address_ranges_tied(sorted, 4, compare_letters, "aBCd", tied, pair) &&
          pair[0] == 0 && pair[1] == 3);
}
