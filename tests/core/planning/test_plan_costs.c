#include "planning/plan_costs.h"
#include "support/costs.h"

TEST(invalid_requests_are_refused)
{
    test_chain c;
    chain_of(&c, 3, 100, 1);
    c.activation[0] = 50;
    CHECK_FAILS(set_costs(&c.chain, -1, 0, false), MLS_E_VALUE,
                "a budget of -1 bytes is negative");
    CHECK_FAILS(set_costs(&c.chain, 49, 0, false), MLS_E_CAPACITY,
                "a budget of 49 bytes does not hold the input of 50");
    CHECK_FAILS(set_costs(&c.chain, 500, MLS_PLAN_MAX_SLOTS + 1, false), MLS_E_VALUE,
                "1048577 slots: choose 1 to 1048576");
    c.chain.blocks = MLS_PLAN_MAX_BLOCKS + 1;
    CHECK_FAILS(set_costs(&c.chain, 500, 0, false), MLS_E_VALUE,
                "a chain of 8193 blocks: plans are made for at most 8192; take several "
                "blocks as one");
}

TEST(sizes_round_up_to_slots)
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
TEST(sizes_near_64_bits_round_up_to_slots)
{
    test_chain c;
    const int64_t budget = INT64_C(1) << 61;
    chain_of(&c, 1, 100, 1);
    memcpy(c.activation, (int64_t[]){0, (INT64_C(1) << 60) + 1}, 2 * sizeof(int64_t));
    c.saved[0] = budget;
    REQUIRE(set_costs(&c.chain, budget, 1000, false) == MLS_OK);
    CHECK(costs.activation[1] == 501 && costs.saved[0] >= 1000);
}

TEST(poll_stops_the_planner)
{
    test_chain c;
    mls_plan_needs needs;
    int left = 0;
    const mls_poll no = {stop_after_calls, &left};
    chain_of(&c, 3, 100, 1);
    REQUIRE(set_costs(&c.chain, 10000, 0, false) == MLS_OK);
    CHECK_FAILS(mls_plan_compute_needs(&costs, no, &needs, &status), MLS_E_STOPPED,
                "planning was stopped");
    CHECK(needs.memory == NULL);
}
