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
