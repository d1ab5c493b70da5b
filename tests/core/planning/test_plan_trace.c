#include "planning/plan_trace.h"
#include "support/costs.h"

/* Return the number of steps of a kind. */
static size_t count_steps(const mls_schedule *schedule, mls_step_kind kind)
{
    size_t count = 0;
    for (size_t i = 0; i < schedule->count; i++) {
        count += schedule->steps[i].kind == (int)kind;
    }
    return count;
}

TEST(a_budget_decides_whether_blocks_run_again)
{
    test_chain c;
    mls_plan_needs needs;
    mls_schedule schedule;
    chain_of(&c, 3, 100, 1);
    REQUIRE(set_costs(&c.chain, 10000, 0, false) == MLS_OK);
    REQUIRE(mls_plan_compute_needs(&costs, no_poll, &needs, &status) == MLS_OK);
    REQUIRE(mls_plan_trace(&costs, mls_plan_needs_value, &needs, no_poll, &schedule,
                           &status) == MLS_OK);
    CHECK(count_steps(&schedule, MLS_STEP_SAVE) == 3);
    CHECK(count_steps(&schedule, MLS_STEP_FORWARD) == 0);
    mls_schedule_fini(&schedule);
    costs.budget = needs.memory[mls_plan_cell(3, 0, 2)]; /* the least */
    REQUIRE(mls_plan_trace(&costs, mls_plan_needs_value, &needs, no_poll, &schedule,
                           &status) == MLS_OK);
    CHECK(count_steps(&schedule, MLS_STEP_BACKWARD) == 3);
    CHECK(count_steps(&schedule, MLS_STEP_FORWARD) > 0);
    mls_schedule_fini(&schedule);
    costs.budget--;
    CHECK_FAILS(
        mls_plan_trace(&costs, mls_plan_needs_value, &needs, no_poll, &schedule, &status),
        MLS_E_CAPACITY, "blocks 0 to 2 do not fit into the budget");
    mls_plan_needs_fini(&needs);
}

TEST(poll_stops_the_trace)
{
    test_chain c;
    mls_plan_needs needs;
    mls_schedule schedule = {0};
    int left = 0;
    const mls_poll no = {stop_after_calls, &left};
    chain_of(&c, 3, 100, 1);
    REQUIRE(set_costs(&c.chain, 10000, 0, false) == MLS_OK);
    REQUIRE(mls_plan_compute_needs(&costs, no_poll, &needs, &status) == MLS_OK);
    CHECK(mls_plan_trace(&costs, mls_plan_needs_value, &needs, no, &schedule, &status) ==
          MLS_E_STOPPED);
    CHECK(schedule.steps == NULL);
    mls_plan_needs_fini(&needs);
}
