#include "planning/plan_dp_fronts.h"
#include "support/costs.h"

enum { MANY = 1 << 20 };

/* Every segment of a chain at every memory size, compared with the plain recursion. */
static void check_all(const mls_chain *chain, int64_t budget, bool offload)
{
    mls_plan_fronts fronts;
    const size_t n = chain->blocks;
    REQUIRE(set_costs(chain, budget, 0, offload) == MLS_OK);
    REQUIRE(mls_plan_dp_fronts(&costs, MANY, NULL, nobody, &fronts, &status) == MLS_OK);
    for (int64_t memory = 0; memory <= costs.budget; memory++) {
        const double got = mls_plan_dp_fronts_value(&fronts, 0, n - 1, memory);
        const double want = judge(chain, 0, n - 1, memory, offload);
        CHECK(isfinite(got) ? is_near(got, want, 1e-9) : !isfinite(want));
    }
    CHECK(!isfinite(mls_plan_dp_fronts_value(&fronts, 0, n - 1, -1)));
    mls_plan_fronts_fini(&fronts);
}

TEST(values_are_those_of_the_recursion)
{
    for (uint64_t seed = 0; seed < 60; seed++) {
        test_chain c;
        chain_of(&c, 1 + seed % 5, 1 + seed % 40, seed);
        check_all(&c.chain, c.activation[0] + 150 + (int64_t)(seed % 7), seed % 3 == 0);
    }
}

TEST(blocks_without_bytes_are_free)
{
    test_chain c;
    chain_of(&c, 4, 1, 5);
    c.chain.offload_rate = c.chain.load_rate = 0;
    check_all(&c.chain, 0, false);
}

static void front_is_a_front(const mls_plan_front *front)
{
    for (size_t i = 1; i < front->count; i++) {
        CHECK(front->points[i - 1].memory < front->points[i].memory);
        CHECK(front->points[i - 1].seconds > front->points[i].seconds);
    }
}

/* Threads divide the segments; the fronts are the same. */
TEST(threads_change_nothing)
{
    enum { BLOCKS = 40 };
    static test_chain c;
    mls_pool *pool = NULL;
    mls_plan_fronts one, three;
    chain_of(&c, BLOCKS, 100000, 8);
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    REQUIRE(set_costs(&c.chain, 2000000, 0, false) == MLS_OK);
    REQUIRE(mls_plan_dp_fronts(&costs, MANY, NULL, nobody, &one, &status) == MLS_OK);
    REQUIRE(mls_plan_dp_fronts(&costs, MANY, pool, nobody, &three, &status) == MLS_OK);
    CHECK(one.points == three.points && one.points > 1000);
    for (size_t i = 0; i < BLOCKS * (BLOCKS + 1) / 2; i++) {
        const size_t count = one.fronts[i].count;
        front_is_a_front(&one.fronts[i]);
        CHECK(count == three.fronts[i].count);
        CHECK(count == 0 || memcmp(one.fronts[i].points, three.fronts[i].points,
                                   count * sizeof(mls_plan_point)) == 0);
    }
    mls_plan_fronts_fini(&one);
    mls_plan_fronts_fini(&three);
    mls_pool_free(pool);
}

TEST(too_much_is_refused_and_a_poll_stops_it)
{
    test_chain c;
    mls_plan_fronts fronts;
    int left = 20;
    const mls_poll soon = {says_no, &left};
    chain_of(&c, 20, 100000, 9);
    REQUIRE(set_costs(&c.chain, 2000000, 0, false) == MLS_OK);
    CHECK(mls_plan_dp_fronts(&costs, 100, NULL, nobody, &fronts, &status) == MLS_E_SIZE);
    CHECK(fronts.fronts == NULL);
    CHECK(mls_plan_dp_fronts(&costs, MANY, NULL, soon, &fronts, &status) ==
          MLS_E_STOPPED);
    CHECK(fronts.fronts == NULL);
}
