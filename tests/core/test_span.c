/* Spans are sorted by where they start, and otherwise keep their order. */
#include "runner.h"
#include "span.h"

enum { MOST = 200 };

/* Spans in some order, numbered in it; every second one starts where another does. */
static void fill(mls_span *spans, size_t count, unsigned seed)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1103515245U + 12345U;
        const uintptr_t low = (seed >> 16) % (count / 2 + 1);
        spans[i] = (mls_span){.low = low, .high = low + 1, .owner = i, .written = i % 2};
    }
}

static void all_lengths_are_sorted_and_keep_their_order(void)
{
    static mls_span spans[MOST], spare[MOST];
    for (size_t count = 0; count <= MOST; count++) {
        fill(spans, count, (unsigned)count);
        const mls_span *sorted = mls_spans_sort(spans, spare, count);
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

static void falling_addresses_are_turned_round(void)
{
    mls_span spans[5], spare[5];
    for (size_t i = 0; i < 5; i++) {
        spans[i] = (mls_span){.low = 5 - i, .high = 6 - i, .owner = i};
    }
    const mls_span *sorted = mls_spans_sort(spans, spare, 5);
    for (size_t i = 0; i < 5; i++) {
        CHECK(sorted[i].low == i + 1 && sorted[i].owner == 4 - i);
    }
}

static const test_case tests[] = {
    TEST(all_lengths_are_sorted_and_keep_their_order),
    TEST(falling_addresses_are_turned_round),
};

int main(void)
{
    return RUN_TESTS(tests);
}
