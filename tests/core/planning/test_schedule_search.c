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
    mls_found found;
    mls_status st;
    if (mls_search_least(c, &limits, &found, &st) != MLS_OK || !found.found) {
        return -1;
    }
    mls_schedule_fini(&found.runs);
    return found.least;
}

TEST(search_ends_at_its_limit_of_states)
{
    test_chain r;
    fill_nine(&r, false);
    const mls_search_limits limits = {
        .budget_bytes = least_peak(&r.chain, false), .below = INFINITY, .states = 50};
    mls_found found;
    REQUIRE(mls_search(&r.chain, &limits, &found, &status) == MLS_OK);
    CHECK(!found.found && found.ran_out && found.states == 50 && found.runs.count == 0);
}

/* The search finds only schedules below the bound; the bound itself is excluded. */
TEST(search_excludes_its_bound)
{
    test_chain r;
    fill_nine(&r, false);
    mls_search_limits limits = {.budget_bytes = least_peak(&r.chain, false) + 20,
                                .below = INFINITY};
    mls_found found;
    REQUIRE(mls_search(&r.chain, &limits, &found, &status) == MLS_OK);
    REQUIRE(found.found);
    CHECK(found.extra > 0);
    mls_schedule_fini(&found.runs);
    limits.below = found.extra;
    REQUIRE(mls_search(&r.chain, &limits, &found, &status) == MLS_OK);
    CHECK(!found.found && !found.ran_out);
}

TEST(poll_stops_the_search)
{
    test_chain r;
    uint64_t seed = 7;
    random_chain_fill(&r, 12, &seed, true);
    int left = 2;
    const mls_search_limits limits = {.offload = true,
                                      .poll = {.go_on = says_no, .context = &left}};
    mls_found found = {.states = 77};
    CHECK(mls_search_least(&r.chain, &limits, &found, &status) == MLS_E_STOPPED);
    CHECK(found.states == 77 && left == -1);
}
