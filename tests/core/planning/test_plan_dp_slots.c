#include "planning/plan_dp_slots.h"
#include "support/costs.h"
#include "support/cpus.h"

static bool same_table(const mls_plan_table *a, const mls_plan_table *b, size_t n,
                       size_t entries)
{
    for (size_t s = 0; s < n; s++) {
        for (size_t t = s; t < n; t++) {
            const size_t at = a->rows[s] + t * a->stride;
            if (memcmp(a->values + at, b->values + at, entries * sizeof(float)) != 0) {
                return false;
            }
        }
    }
    return true;
}

/* Long enough for all kinds of tiles; every instruction set gives the same bits. */
TEST(kernels_and_threads_compute_the_same_table)
{
    static test_chain c;
    mls_pool *pool = NULL;
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    for (size_t blocks = 29; blocks < CHAIN_ROOM; blocks += 47) {
        enum { SLOTS = 203 };
        mls_plan_table oracle, table;
        chain_of(&c, blocks, 100000, blocks);
        const int64_t budget = (int64_t)blocks * 60000;
        REQUIRE(set_costs(&c.chain, budget, SLOTS, true) == MLS_OK);
        REQUIRE(mls_plan_dp_slots(&costs, MLS_CPU_SCALAR, NULL, no_poll, &oracle,
                                  &status) == MLS_OK);
        EACH_CPU (cpu) {
            REQUIRE(mls_plan_dp_slots(&costs, cpu, pool, no_poll, &table, &status) ==
                    MLS_OK);
            CHECK(same_table(&oracle, &table, blocks, SLOTS + 1));
            mls_plan_table_fini(&table);
        }
        CHECK(isfinite(mls_plan_dp_slots_value(&oracle, 0, blocks - 1, SLOTS)));
        mls_plan_table_fini(&oracle);
    }
    mls_pool_free(pool);
}

/* The recursion over the costs, as a table without tiles. */
static float plainly(const mls_plan_costs *c, float *const *table, size_t s, size_t t,
                     int64_t m)
{
    const size_t n = c->blocks;
    float best = INFINITY;
    if (mls_plan_save_need(c, s, t) <= m) {
        best = s == t            ? 0
               : m < c->saved[s] ? INFINITY
                                 : table[(s + 1) * n + t][m - c->saved[s]];
    }
    int64_t sweep = 0;
    for (size_t k = s + 1; k <= t; k++) {
        sweep = mls_plan_sweep(c, s, k, sweep);
        if (sweep + c->hold[t] <= m && c->activation[k] <= m) {
            const float sum = (float)(c->before[k] - c->before[s]) +
                              table[s * n + k - 1][m] +
                              table[k * n + t][m - c->activation[k]];
            best = sum < best ? sum : best;
        }
    }
    return best;
}

TEST(tiles_compute_every_cell)
{
    enum { BLOCKS = 45, SLOTS = 61 };
    static float values[BLOCKS * BLOCKS][SLOTS + 1];
    static float *rows[BLOCKS * BLOCKS];
    static test_chain c;
    mls_plan_table table;
    chain_of(&c, BLOCKS, 1000, 4);
    REQUIRE(set_costs(&c.chain, 20000, SLOTS, false) == MLS_OK);
    REQUIRE(mls_plan_dp_slots(&costs, MLS_CPU_SCALAR, NULL, no_poll, &table, &status) ==
            MLS_OK);
    for (size_t i = 0; i < BLOCKS * BLOCKS; i++) {
        rows[i] = values[i];
    }
    for (size_t s = BLOCKS; s-- > 0;) {
        for (size_t t = s; t < BLOCKS; t++) {
            for (int64_t m = 0; m <= SLOTS; m++) {
                const float want = plainly(&costs, rows, s, t, m);
                const double got = mls_plan_dp_slots_value(&table, s, t, m);
                values[s * BLOCKS + t][m] = want;
                CHECK(isfinite(got) ? is_near(got, (double)want, 1e-5) : !isfinite(want));
            }
        }
    }
    mls_plan_table_fini(&table);
}

TEST(poll_stops_the_planner)
{
    static test_chain c;
    mls_plan_table table;
    int left = 3;
    const mls_poll soon = {stop_after_calls, &left};
    chain_of(&c, 100, 1000, 4);
    REQUIRE(set_costs(&c.chain, 20000, 50, false) == MLS_OK);
    CHECK(mls_plan_dp_slots(&costs, MLS_CPU_SCALAR, NULL, soon, &table, &status) ==
          MLS_E_STOPPED);
    CHECK(table.values == NULL);
}

TEST(table_bytes_include_padding)
{
    CHECK(mls_plan_table_bytes(4, 15) == 10 * 16 * sizeof(float));
    CHECK(mls_plan_table_bytes(5, 16) == 36 * 48 * sizeof(float));
    CHECK(mls_plan_table_bytes(SIZE_MAX / 8, 500) == SIZE_MAX);
}
