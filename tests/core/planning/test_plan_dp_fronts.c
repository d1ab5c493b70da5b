#include "planning/plan_dp_fronts.h"
#include "support/costs.h"

enum { MANY = 1 << 20 };

static void front_is_a_front(const mls_plan_front *front)
{
    for (size_t i = 1; i < front->count; i++) {
        CHECK(front->points[i - 1].memory < front->points[i].memory);
        CHECK(front->points[i - 1].seconds > front->points[i].seconds);
    }
}

/* Threads divide the segments; the fronts are the same. */
TEST(threads_compute_the_same_fronts)
{
    enum { BLOCKS = 40 };
    static test_chain c;
    mls_pool *pool = NULL;
    mls_plan_fronts single_threaded, three;
    chain_of(&c, BLOCKS, 100000, 8);
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    REQUIRE(set_costs(&c.chain, 2000000, 0, false) == MLS_OK);
    REQUIRE(mls_plan_dp_fronts(&costs, MANY, NULL, no_poll, &single_threaded, &status) ==
            MLS_OK);
    REQUIRE(mls_plan_dp_fronts(&costs, MANY, pool, no_poll, &three, &status) == MLS_OK);
    CHECK(single_threaded.points == three.points && single_threaded.points > 1000);
    for (size_t i = 0; i < BLOCKS * (BLOCKS + 1) / 2; i++) {
        const size_t count = single_threaded.fronts[i].count;
        front_is_a_front(&single_threaded.fronts[i]);
        CHECK(count == three.fronts[i].count);
        CHECK(count == 0 ||
              memcmp(single_threaded.fronts[i].points, three.fronts[i].points,
                     count * sizeof(mls_plan_point)) == 0);
    }
    mls_plan_fronts_fini(&single_threaded);
    mls_plan_fronts_fini(&three);
    mls_pool_free(pool);
}

TEST(size_limit_and_poll_stop_the_fronts)
{
    test_chain c;
    mls_plan_fronts fronts;
    int left = 20;
    const mls_poll soon = {stop_after_calls, &left};
    chain_of(&c, 20, 100000, 9);
    REQUIRE(set_costs(&c.chain, 2000000, 0, false) == MLS_OK);
    CHECK_FAILS(mls_plan_dp_fronts(&costs, 100, NULL, no_poll, &fronts, &status),
                MLS_E_SIZE,
                "a plan of 20 blocks to the byte needs more than 100 points: choose a "
                "number of slots");
    CHECK(fronts.fronts == NULL);
    CHECK(mls_plan_dp_fronts(&costs, MANY, NULL, soon, &fronts, &status) ==
          MLS_E_STOPPED);
    CHECK(fronts.fronts == NULL);
}
