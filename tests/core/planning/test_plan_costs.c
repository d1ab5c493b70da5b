#include "planning/plan_costs.h"
#include "support/costs.h"

TEST(requests_are_checked)
{
    test_chain c;
    chain_of(&c, 3, 100, 1);
    c.activation[0] = 50;
    CHECK(set_costs(&c.chain, -1, 0, false) == MLS_E_VALUE);
    CHECK(set_costs(&c.chain, 49, 0, false) == MLS_E_CAPACITY);
    CHECK(set_costs(&c.chain, 500, MLS_PLAN_MAX_SLOTS + 1, false) == MLS_E_VALUE);
    c.chain.blocks = MLS_PLAN_MAX_BLOCKS + 1;
    CHECK(set_costs(&c.chain, 500, 0, false) == MLS_E_VALUE);
}

TEST(slots_round_up)
{
    test_chain c;
    chain_of(&c, 3, 100, 1);
    memcpy(c.activation, (int64_t[]){0, 1, 100, 99}, 4 * sizeof(int64_t));
    c.saved[0] = 101;
    REQUIRE(set_costs(&c.chain, 100, 10, false) == MLS_OK);
    CHECK(costs.budget == 10);
    CHECK(costs.activation[0] == 0 && costs.activation[1] == 1);
    CHECK(costs.activation[2] == 10 && costs.activation[3] == 10);
    CHECK(costs.saved[0] == 11); /* more than the device has */
}

/* Products of more than 64 bits: still at least the true number of slots. */
TEST(slots_of_huge_sizes_round_up)
{
    test_chain c;
    const int64_t budget = INT64_C(1) << 61;
    chain_of(&c, 1, 100, 1);
    memcpy(c.activation, (int64_t[]){0, (INT64_C(1) << 60) + 1}, 2 * sizeof(int64_t));
    c.saved[0] = budget;
    REQUIRE(set_costs(&c.chain, budget, 1000, false) == MLS_OK);
    CHECK(costs.activation[1] == 501 && costs.saved[0] >= 1000);
}

static int64_t least_of(const mls_chain *chain, bool offload)
{
    mls_plan_needs needs;
    CHECK(set_costs(chain, chain->activation_bytes[0], 0, offload) == MLS_OK);
    CHECK(mls_plan_least(&costs, nobody, &needs, &status) == MLS_OK);
    const int64_t least =
        needs.memory[mls_plan_cell(chain->blocks, 0, chain->blocks - 1)];
    mls_plan_needs_fini(&needs);
    return least;
}

TEST(the_least_budget_is_the_least)
{
    for (uint64_t seed = 0; seed < 200; seed++) {
        test_chain c;
        const size_t n = 1 + seed % 6, last = n - 1;
        const bool offload = seed % 3 == 0;
        chain_of(&c, n, 60, seed);
        const int64_t least = least_of(&c.chain, offload);
        CHECK(isfinite(judge(&c.chain, 0, last, least, offload)));
        CHECK(!isfinite(judge(&c.chain, 0, last, least - 1, offload)));
    }
}

/* If any schedule fits, the one traced by needs does. */
TEST(what_fits_is_found)
{
    for (uint64_t seed = 0; seed < 60; seed++) {
        test_chain c;
        mls_plan_needs needs;
        mls_schedule schedule = {0};
        mls_totals totals;
        chain_of(&c, 1 + seed % 30, 1000, seed);
        const int64_t budget = c.activation[0] + least_of(&c.chain, false);
        REQUIRE(set_costs(&c.chain, budget, 0, false) == MLS_OK);
        REQUIRE(mls_plan_least(&costs, nobody, &needs, &status) == MLS_OK);
        CHECK(mls_plan_trace(&costs, mls_plan_fits, &needs, nobody, &schedule, &status) ==
              MLS_OK);
        CHECK(mls_chain_simulate(&c.chain, schedule.steps, schedule.count, NULL, &totals,
                                 &status) == MLS_OK);
        CHECK(totals.peak_bytes == budget);
        mls_schedule_fini(&schedule);
        costs.budget--;
        CHECK(mls_plan_trace(&costs, mls_plan_fits, &needs, nobody, &schedule, &status) ==
              MLS_E_CAPACITY);
        mls_plan_needs_fini(&needs);
    }
}

TEST(enough_is_what_a_plain_run_needs)
{
    for (uint64_t seed = 0; seed < 60; seed++) {
        test_chain c;
        mls_step steps[2 * CHAIN_ROOM];
        mls_totals totals;
        const size_t n = 1 + seed % 30;
        chain_of(&c, n, 1000, seed);
        for (size_t i = 0; i < n; i++) {
            steps[i] = (mls_step){MLS_STEP_SAVE, (int32_t)i};
            steps[2 * n - 1 - i] = (mls_step){MLS_STEP_BACKWARD, (int32_t)i};
        }
        REQUIRE(mls_chain_simulate(&c.chain, steps, 2 * n, NULL, &totals, &status) ==
                MLS_OK);
        REQUIRE(set_costs(&c.chain, 1000, 0, false) == MLS_OK);
        CHECK(c.activation[0] + mls_plan_enough(&costs) == totals.peak_bytes);
    }
}

TEST(a_poll_stops_it)
{
    test_chain c;
    mls_plan_needs needs;
    mls_schedule schedule = {0};
    int left = 0, again = 0;
    const mls_poll no = {says_no, &left}, no_again = {says_no, &again};
    chain_of(&c, 3, 100, 1);
    REQUIRE(set_costs(&c.chain, 10000, 0, false) == MLS_OK);
    CHECK(mls_plan_least(&costs, no, &needs, &status) == MLS_E_STOPPED);
    CHECK(needs.memory == NULL);
    REQUIRE(mls_plan_least(&costs, nobody, &needs, &status) == MLS_OK);
    CHECK(mls_plan_trace(&costs, mls_plan_fits, &needs, no_again, &schedule, &status) ==
          MLS_E_STOPPED);
    CHECK(schedule.steps == NULL);
    mls_plan_needs_fini(&needs);
}
