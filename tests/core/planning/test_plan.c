#include "planning/plan.h"
#include "support/chains.h"
#include "support/runner.h"

TEST(large_fronts_fall_back_to_slots)
{
    test_chain c;
    mls_plan plan;
    mls_plan_curve curve;
    chain_of(&c, 24, 100000, 3);
    const mls_plan_request request = {.budget_bytes = 1500000, .most_points = 50};
    REQUIRE(mls_plan_make(&c.chain, &request, &plan, &status) == MLS_OK);
    CHECK(plan.method == MLS_PLAN_BY_SLOTS && plan.slots == MLS_PLAN_AUTO_SLOTS);
    mls_plan_fini(&plan);
    REQUIRE(mls_plan_pareto(&c.chain, &request, &curve, &status) == MLS_OK);
    CHECK(curve.method == MLS_PLAN_BY_SLOTS && curve.slots == MLS_PLAN_AUTO_SLOTS);
    mls_plan_curve_fini(&curve);
}

/* Returns the totals of the schedule that recomputes every block but the last. */
static mls_totals recompute_every_block(const mls_chain *chain)
{
    mls_step steps[4 * CHAIN_ROOM];
    mls_totals totals = {0};
    size_t count = 0;
    const size_t last = chain->blocks - 1;
    for (size_t i = 0; i < last; i++) {
        steps[count++] = (mls_step){MLS_STEP_FORWARD, (int32_t)i};
    }
    for (size_t i = chain->blocks; i-- > 0;) {
        if (i < last) {
            steps[count++] = (mls_step){MLS_STEP_DROP, (int32_t)i + 1};
        }
        steps[count++] = (mls_step){MLS_STEP_SAVE, (int32_t)i};
        steps[count++] = (mls_step){MLS_STEP_BACKWARD, (int32_t)i};
    }
    CHECK(mls_chain_simulate(chain, steps, count, NULL, &totals, &status) == MLS_OK);
    return totals;
}

TEST(no_plan_is_slower_than_recomputing_every_block)
{
    uint64_t state = 5;
    for (int k = 0; k < 60; k++) {
        test_chain c;
        mls_plan plan;
        mls_plan_curve curve;
        random_chain_fill(&c, 2 + (size_t)next_number(&state, 20), &state, false);
        const mls_totals every = recompute_every_block(&c.chain);
        const size_t slots = next_number(&state, 30); /* 0: to the byte */
        const mls_plan_request request = {.budget_bytes = every.peak_bytes,
                                          .slots = slots};
        REQUIRE(mls_plan_make(&c.chain, &request, &plan, &status) == MLS_OK);
        mls_totals totals;
        REQUIRE(mls_chain_simulate(&c.chain, plan.schedule.steps, plan.schedule.count,
                                   NULL, &totals, &status) == MLS_OK);
        CHECK(totals.seconds <= every.seconds && totals.peak_bytes <= every.peak_bytes);
        mls_plan_fini(&plan);
        REQUIRE(mls_plan_pareto(&c.chain, &request, &curve, &status) == MLS_OK);
        bool is_covered = false;
        for (size_t i = 0; i < curve.count; i++) {
            const mls_plan_point *p = &curve.points[i];
            CHECK(i == 0 || (p[0].memory > p[-1].memory && p[0].seconds < p[-1].seconds));
            is_covered |= p->memory <= every.peak_bytes && p->seconds <= every.seconds;
        }
        CHECK(is_covered);
        mls_plan_curve_fini(&curve);
    }
}
