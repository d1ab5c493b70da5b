#include "planning/plan.h"
#include "support/chains.h"
#include "support/runner.h"

#include <stdlib.h>

static mls_plan_request request_of(int64_t budget, size_t slots, bool offload)
{
    return (mls_plan_request){.budget_bytes = budget, .slots = slots, .offload = offload};
}

/* A plan is valid, within the budget, and as fast as the recursion finds. */
static void check_plan(const test_chain *c, const mls_plan_request *request, double best)
{
    mls_status st;
    mls_plan plan = {0};
    mls_totals totals;
    const mls_code code = mls_plan_make(&c->chain, request, &plan, &st);
    if (!isfinite(best)) {
        CHECK(code == MLS_E_CAPACITY);
        return;
    }
    REQUIRE(code == MLS_OK);
    REQUIRE(mls_chain_simulate(&c->chain, plan.schedule.steps, plan.schedule.count, NULL,
                               &totals, &st) == MLS_OK);
    CHECK(totals.peak_bytes <= request->budget_bytes);
    if (request->slots == 0) {
        CHECK(plan.method == MLS_PLAN_BY_BYTES && plan.slots == 0);
        CHECK(is_near(totals.seconds, best, 1e-9));
    } else {
        CHECK(totals.seconds >= best - 1e-9);
    }
    mls_plan_fini(&plan);
}

TEST(plans_are_the_fastest_of_their_class)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        test_chain c;
        const size_t n = 1 + seed % 6;
        const bool offload = seed % 3 == 0;
        chain_of(&c, n, 50, seed);
        for (int64_t budget = c.activation[0]; budget < 700; budget += 23) {
            const int64_t memory = budget - c.activation[0];
            const double best =
                plain_of(&c.chain) + judge(&c.chain, 0, n - 1, memory, offload);
            mls_plan_request request = request_of(budget, 0, offload);
            check_plan(&c, &request, best);
            request.slots = 20;
            check_plan(&c, &request, best);
        }
    }
}

TEST(the_least_budget_is_named)
{
    test_chain c;
    mls_plan plan = {0};
    int64_t least;
    chain_of(&c, 12, 1000, 7);
    REQUIRE(mls_plan_least_bytes(&c.chain, false, (mls_poll){0}, &least, &status) ==
            MLS_OK);
    for (size_t slots = 0; slots <= 500; slots += 100) {
        mls_plan_request request = request_of(least - 1, slots, false);
        CHECK(mls_plan_make(&c.chain, &request, &plan, &status) == MLS_E_CAPACITY);
        CHECK(strtoll(status.expected, NULL, 10) == least);
        request.budget_bytes = least;
        REQUIRE(mls_plan_make(&c.chain, &request, &plan, &status) == MLS_OK);
        mls_plan_fini(&plan);
    }
    mls_plan_request nothing = request_of(0, 0, false);
    CHECK(mls_plan_make(&c.chain, &nothing, &plan, &status) == MLS_E_CAPACITY);
    CHECK(strtoll(status.expected, NULL, 10) == least);
    nothing.budget_bytes = -1;
    CHECK(mls_plan_make(&c.chain, &nothing, &plan, &status) == MLS_E_VALUE);
}

TEST(a_large_budget_needs_no_recomputation)
{
    static test_chain c;
    mls_plan plan;
    chain_of(&c, 100, 100000, 3);
    for (size_t slots = 0; slots <= 64; slots += 64) {
        const mls_plan_request request = request_of(INT64_MAX, slots, false);
        REQUIRE(mls_plan_make(&c.chain, &request, &plan, &status) == MLS_OK);
        CHECK(plan.schedule.count == 200);
        mls_plan_fini(&plan);
    }
}

TEST(too_many_points_mean_slots)
{
    test_chain c;
    mls_plan plan;
    mls_plan_curve curve;
    chain_of(&c, 24, 100000, 3);
    mls_plan_request request = request_of(1500000, 0, false);
    request.most_points = 50;
    REQUIRE(mls_plan_make(&c.chain, &request, &plan, &status) == MLS_OK);
    CHECK(plan.method == MLS_PLAN_BY_SLOTS && plan.slots == MLS_PLAN_AUTO_SLOTS);
    mls_plan_fini(&plan);
    REQUIRE(mls_plan_pareto(&c.chain, &request, &curve, &status) == MLS_OK);
    CHECK(curve.method == MLS_PLAN_BY_SLOTS && curve.slots == MLS_PLAN_AUTO_SLOTS);
    mls_plan_curve_fini(&curve);
}

TEST(tables_that_are_too_large_are_refused)
{
    enum { BLOCKS = 4000 };
    mls_plan plan;
    double *seconds = calloc(BLOCKS, sizeof *seconds);
    int64_t *bytes = calloc(BLOCKS + 1, sizeof *bytes);
    REQUIRE(seconds != NULL && bytes != NULL);
    for (size_t i = 0; i <= BLOCKS; i++) {
        bytes[i] = 1;
    }
    const mls_chain chain = {BLOCKS, seconds, seconds, bytes, bytes, bytes,
                             bytes,  bytes,   bytes,   0,     0};
    const mls_plan_request request = request_of(10, 100000, false);
    CHECK(mls_plan_make(&chain, &request, &plan, &status) == MLS_E_SIZE);
    CHECK(strstr(status.text, "choose at most") != NULL);
    free(seconds);
    free(bytes);
}

/* Each point's budget achieves its time, and a byte less does not. */
TEST(the_curve_has_all_plans)
{
    for (uint64_t seed = 0; seed < 20; seed++) {
        test_chain c;
        mls_plan_curve curve;
        const size_t n = 1 + seed % 5;
        chain_of(&c, n, 50, seed);
        const mls_plan_request request = request_of(0, 0, false);
        const double plain = plain_of(&c.chain);
        REQUIRE(mls_plan_pareto(&c.chain, &request, &curve, &status) == MLS_OK);
        REQUIRE(curve.count > 0 && curve.method == MLS_PLAN_BY_BYTES);
        CHECK(is_near(curve.points[curve.count - 1].seconds, plain, 1e-12));
        for (size_t i = 0; i < curve.count; i++) {
            const int64_t memory = curve.points[i].memory - c.activation[0];
            const double seconds = curve.points[i].seconds;
            CHECK(
                is_near(plain + judge(&c.chain, 0, n - 1, memory, false), seconds, 1e-9));
            CHECK(plain + judge(&c.chain, 0, n - 1, memory - 1, false) > seconds);
        }
        mls_plan_curve_fini(&curve);
    }
}

/* By slots: budgets that fit, in increasing order. */
TEST(the_curve_by_slots_can_be_planned)
{
    test_chain c;
    mls_plan plan;
    mls_plan_curve curve;
    mls_totals totals;
    chain_of(&c, 15, 100000, 2);
    mls_plan_request request = request_of(0, 40, false);
    REQUIRE(mls_plan_pareto(&c.chain, &request, &curve, &status) == MLS_OK);
    REQUIRE(curve.count > 3);
    request.slots = 0;
    for (size_t i = 0; i < curve.count; i++) {
        request.budget_bytes = curve.points[i].memory;
        REQUIRE(mls_plan_make(&c.chain, &request, &plan, &status) == MLS_OK);
        REQUIRE(mls_chain_simulate(&c.chain, plan.schedule.steps, plan.schedule.count,
                                   NULL, &totals, &status) == MLS_OK);
        CHECK(totals.seconds <= curve.points[i].seconds * (1 + 1e-5));
        mls_plan_fini(&plan);
    }
    mls_plan_curve_fini(&curve);
}
