/* Selection within a budget: compared with exhaustive search, and invalid arguments. */
#include "planning/knapsack.h"

#include "support/chains.h"
#include "support/runner.h"

#include <math.h>

/* The fewest seconds that any of the 2^n choices leaves to recompute. */
static double fewest(const mls_knapsack_items *items, int64_t budget)
{
    double best = INFINITY;
    for (unsigned choice = 0; choice < 1u << items->count; choice++) {
        int64_t bytes = 0;
        double seconds = 0;
        for (size_t i = 0; i < items->count; i++) {
            if ((choice >> i & 1u) != 0) {
                bytes += items->bytes[i];
            } else {
                seconds += items->seconds[i];
            }
        }
        best = bytes <= budget && seconds < best ? seconds : best;
    }
    return best;
}

/* The result describes its choice correctly. */
static void check_choice(const mls_knapsack_items *items, int64_t budget,
                         const unsigned char *kept, const mls_knapsack_result *result)
{
    int64_t bytes = 0;
    double seconds = 0;
    for (size_t i = 0; i < items->count; i++) {
        bytes += kept[i] ? items->bytes[i] : 0;
        seconds += kept[i] ? 0 : items->seconds[i];
    }
    CHECK(bytes == result->bytes && bytes <= budget);
    CHECK(!(seconds < result->seconds) && !(seconds > result->seconds));
    CHECK(result->least <= result->seconds);
}

enum { MANY = 400 };

typedef struct random_items {
    double seconds[MANY];
    int64_t bytes[MANY];
} random_items;

/* `alike`: as many seconds as bytes, which makes the problem hard. */
static mls_knapsack_items fill(random_items *r, size_t count, uint64_t *seed, bool alike)
{
    for (size_t i = 0; i < count; i++) {
        r->bytes[i] = random_below(seed, 100);
        r->seconds[i] = (double)(alike ? r->bytes[i] : random_below(seed, 50));
    }
    return (mls_knapsack_items){.seconds = r->seconds, .bytes = r->bytes, .count = count};
}

TEST(no_choice_is_better)
{
    uint64_t seed = 1;
    for (int round = 0; round < 200; round++) {
        random_items r;
        unsigned char kept[MANY];
        mls_knapsack_result result;
        const mls_knapsack_items items =
            fill(&r, (size_t)round % 12, &seed, round % 3 == 0);
        const int64_t budget = random_below(&seed, 500);
        REQUIRE(mls_knapsack(&items, budget, 0, nobody, kept, &result, &status) ==
                MLS_OK);
        check_choice(&items, budget, kept, &result);
        CHECK((long)result.seconds == (long)fewest(&items, budget));
        CHECK(result.optimal && (long)result.least == (long)result.seconds);
    }
}

TEST(few_states_give_a_bound)
{
    uint64_t seed = 2;
    random_items r;
    unsigned char kept[MANY];
    mls_knapsack_result best, quick;
    int short_of_states = 0;
    for (int round = 0; round < 20; round++) {
        const mls_knapsack_items items = fill(&r, MANY, &seed, false);
        REQUIRE(mls_knapsack(&items, 5003, 0, nobody, kept, &best, &status) == MLS_OK);
        CHECK(best.optimal);
        REQUIRE(mls_knapsack(&items, 5003, 3, nobody, kept, &quick, &status) == MLS_OK);
        check_choice(&items, 5003, kept, &quick);
        CHECK(quick.least <= best.seconds && best.seconds <= quick.seconds);
        CHECK(quick.states <= 3 || quick.optimal);
        short_of_states += quick.optimal ? 0 : 1;
    }
    CHECK(short_of_states > 0);
}

TEST(what_decides_itself_does)
{
    const double seconds[] = {1, 0, 5, 0};
    const int64_t bytes[] = {0, 10, 1000, 0};
    const mls_knapsack_items items = {.seconds = seconds, .bytes = bytes, .count = 4};
    unsigned char kept[4];
    mls_knapsack_result result;
    REQUIRE(mls_knapsack(&items, 0, 0, nobody, kept, &result, &status) == MLS_OK);
    CHECK(kept[0] == 1 && kept[1] == 0 && kept[2] == 0 && kept[3] == 1);
    CHECK(result.bytes == 0 && (int)result.seconds == 5 && result.optimal);
    REQUIRE(mls_knapsack(&items, INT64_MAX, 0, nobody, kept, &result, &status) == MLS_OK);
    CHECK(kept[2] == 1 && kept[1] == 0 && (int)result.seconds == 0);
    const mls_knapsack_items none = {0};
    REQUIRE(mls_knapsack(&none, 7, 0, nobody, kept, &result, &status) == MLS_OK);
    CHECK(result.bytes == 0 && result.optimal);
}

static mls_code refusal(double seconds, int64_t bytes, int64_t budget, mls_status *st)
{
    const double all_seconds[] = {1, seconds};
    const int64_t all_bytes[] = {INT64_MAX / 2 - 100, bytes};
    const mls_knapsack_items items = {
        .seconds = all_seconds, .bytes = all_bytes, .count = 2};
    unsigned char kept[2];
    mls_knapsack_result result;
    return mls_knapsack(&items, budget, 0, nobody, kept, &result, st);
}

TEST(numbers_without_sense_are_refused)
{
    CHECK(refusal(1, 1, 1, &status) == MLS_OK);
    CHECK(refusal(NAN, 1, 1, &status) == MLS_E_VALUE);
    CHECK(strstr(status.text, "seconds[1] is") != NULL);
    CHECK(refusal(-1, 1, 1, &status) == MLS_E_VALUE);
    CHECK(refusal(INFINITY, 1, 1, &status) == MLS_E_VALUE);
    CHECK(refusal(1, -7, 1, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.text, "bytes[1] is -7: expected 0 or more");
    CHECK(refusal(1, 1, -1, &status) == MLS_E_VALUE);
    CHECK(refusal(1, 200, 1, &status) == MLS_E_SIZE);
    CHECK(refusal(1, INT64_MAX, 1, &status) == MLS_E_SIZE);
    const mls_knapsack_items huge = {.count = MLS_KNAPSACK_ITEMS + 1};
    CHECK(mls_knapsack(&huge, 1, 0, nobody, NULL, NULL, &status) == MLS_E_VALUE);
    const double most[] = {1e308, 1e308};
    const int64_t one[] = {1, 1};
    const mls_knapsack_items endless = {.seconds = most, .bytes = one, .count = 2};
    CHECK(mls_knapsack(&endless, 1, 0, nobody, NULL, NULL, &status) == MLS_E_SIZE);
}

static bool never(void *context)
{
    (void)context;
    return false;
}

TEST(choosing_can_be_stopped)
{
    uint64_t seed = 3;
    random_items r;
    const mls_knapsack_items items = fill(&r, MANY, &seed, false);
    const mls_poll poll = {.go_on = never};
    unsigned char kept[MANY];
    mls_knapsack_result result;
    CHECK(mls_knapsack(&items, 5000, 0, poll, kept, &result, &status) == MLS_E_STOPPED);
}
