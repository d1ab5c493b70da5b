/* The limits of the search through all schedules of a chain.
 * tests/activation/test_plan_search.py compares its results with an exhaustive search. */
#include "planning/schedule_search.h"

#include "support/chains.h"
#include "support/runner.h"

static void fill_nine(test_chain *r, bool rates)
{
    uint64_t seed = 7;
    random_chain_fill(r, 9, &seed, rates);
}

static int64_t least_peak(const mls_chain *c, bool offload)
{
    const mls_search_limits limits = {.offload = offload};
    mls_search_result search_result;
    mls_status st;
    if (mls_search_least(c, &limits, &search_result, &st) != MLS_OK ||
        !search_result.has_schedule) {
        return -1;
    }
    mls_schedule_fini(&search_result.runs);
    return search_result.least;
}

TEST(search_ends_at_its_limit_of_states)
{
    test_chain r;
    fill_nine(&r, false);
    const mls_search_limits limits = {
        .budget_bytes = least_peak(&r.chain, false), .below = INFINITY, .states = 50};
    mls_search_result search_result;
    REQUIRE(mls_search(&r.chain, &limits, &search_result, &status) == MLS_OK);
    CHECK(!search_result.has_schedule && search_result.ran_out &&
          search_result.states == 50 && search_result.runs.count == 0);
}

/* The search finds only schedules below the bound; the bound itself is excluded. */
TEST(search_excludes_its_bound)
{
    test_chain r;
    fill_nine(&r, false);
    mls_search_limits limits = {.budget_bytes = least_peak(&r.chain, false) + 20,
                                .below = INFINITY};
    mls_search_result search_result;
    REQUIRE(mls_search(&r.chain, &limits, &search_result, &status) == MLS_OK);
    REQUIRE(search_result.has_schedule);
    CHECK(search_result.extra > 0);
    mls_schedule_fini(&search_result.runs);
    limits.below = search_result.extra;
    REQUIRE(mls_search(&r.chain, &limits, &search_result, &status) == MLS_OK);
    CHECK(!search_result.has_schedule && !search_result.ran_out);
}

TEST(poll_stops_the_search)
{
    test_chain r;
    uint64_t seed = 7;
    random_chain_fill(&r, 12, &seed, true);
    int left = 2;
    const mls_search_limits limits = {
        .offload = true, .poll = {.go_on = stop_after_calls, .context = &left}};
    mls_search_result search_result = {.states = 77};
    CHECK_FAILS(mls_search_least(&r.chain, &limits, &search_result, &status),
                MLS_E_STOPPED, "the search was stopped");
    CHECK(search_result.states == 77 && left == -1);
}

TEST(a_start_above_the_budget_is_refused)
{
    static const mls_step start[] = {{MLS_STEP_SAVE, 0}, {MLS_STEP_BACKWARD, 0}};
    test_chain r;
    mls_best best;
    chain_of(&r, 1, 1, 1);
    r.saved[0] = 30;
    const mls_best_options options = {
        .budget_bytes = 20, .start = start, .start_count = 2};
    CHECK_FAILS(mls_best_schedule(&r.chain, &options, &best, &status), MLS_E_VALUE,
                "the schedule to start from has a peak of 30 bytes, above the budget of "
                "20");
}
