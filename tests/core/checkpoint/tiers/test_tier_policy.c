/* Placement of units: which units move, which stay, and that budgets hold. */
#include "checkpoint/tiers/tier_policy.h"

#include "support/runner.h"

#include <stdlib.h>

static const mls_tier HOT = MLS_TIER_HOT, WARM = MLS_TIER_WARM, COLD = MLS_TIER_COLD;

static mls_tiers t; /* of the current test */
static mls_tier_moves moves;

AFTER_EACH
{
    mls_tier_moves_fini(&moves);
    mls_tiers_fini(&t);
}

static size_t add(uint64_t bytes, mls_tier tier)
{
    size_t unit = SIZE_MAX;
    CHECK(mls_tiers_add(&t, bytes, tier, &unit, &status) == MLS_OK);
    return unit;
}

static void use(size_t unit, int times)
{
    for (int i = 0; i < times; i++) {
        mls_tiers_touch(&t, unit);
    }
}

/* Set `moves` to the moves that make room for a unit; returns their number. */
static size_t make_room(size_t unit, mls_tier tier)
{
    mls_tier_moves_fini(&moves);
    CHECK(mls_tiers_make_room(&t, unit, tier, &moves, &status) == MLS_OK);
    return moves.count;
}

static size_t rebalance(void)
{
    mls_tier_moves_fini(&moves);
    CHECK(mls_tiers_rebalance(&t, &moves, &status) == MLS_OK);
    return moves.count;
}

static bool is_move(size_t at, size_t unit, mls_tier to)
{
    return at < moves.count && moves.list[at].unit == unit && moves.list[at].to == to;
}

/* Carry out the moves, as the caller must. */
static void follow(void)
{
    for (size_t i = 0; i < moves.count; i++) {
        CHECK(mls_tiers_begin(&t, moves.list[i].unit, moves.list[i].to, &status) ==
              MLS_OK);
        mls_tiers_end(&t, moves.list[i].unit, moves.list[i].to, true);
    }
}

TEST(units_count_toward_their_tier)
{
    mls_tiers_init(&t, 100, MLS_TIERS_UNLIMITED);
    const size_t a = add(10, WARM), b = add(20, COLD), c = add(30, HOT);
    CHECK(t.bytes[HOT] == 30 && t.bytes[WARM] == 10 && t.bytes[COLD] == 20);
    CHECK(mls_tiers_resize(&t, a, 15, &status) == MLS_OK && t.bytes[WARM] == 15);
    mls_tiers_remove(&t, b);
    CHECK(!mls_tiers_has(&t, b) && !mls_tiers_has(&t, 3) && mls_tiers_has(&t, c));
    CHECK(t.bytes[COLD] == 0);
    CHECK(add(5, COLD) == b && add(5, COLD) == 3); /* numbers are reused */
    for (int i = 0; i < 40; i++) {
        CHECK(add(1, COLD) == (size_t)(4 + i));
    }
    CHECK(t.bytes[COLD] == 50 && mls_tiers_has(&t, 43));
    mls_tiers_fini(&t);
    CHECK(t.units == NULL && t.count == 0);
}

TEST(sums_beyond_64_bits_are_refused)
{
    size_t unit = 77;
    mls_tiers_init(&t, MLS_TIERS_UNLIMITED, MLS_TIERS_UNLIMITED);
    const size_t a = add(UINT64_MAX - 1, COLD), b = add(2, WARM);
    CHECK(mls_tiers_add(&t, 2, COLD, &unit, &status) == MLS_E_SIZE && unit == 77);
    CHECK(mls_tiers_begin(&t, b, COLD, &status) == MLS_E_SIZE && t.units[b].pins == 0);
    CHECK(mls_tiers_resize(&t, a, UINT64_MAX, &status) == MLS_OK);
    CHECK(add(0, COLD) == 2);
    CHECK(mls_tiers_resize(&t, 2, 1, &status) == MLS_E_SIZE && t.units[2].bytes == 0);
}

TEST(a_move_counts_in_both_tiers_until_it_ends)
{
    mls_tiers_init(&t, 100, 100);
    const size_t a = add(60, WARM);
    REQUIRE(mls_tiers_begin(&t, a, HOT, &status) == MLS_OK);
    CHECK(t.bytes[HOT] == 60 && t.bytes[WARM] == 60 && t.units[a].pins == 1);
    mls_tiers_end(&t, a, HOT, false);
    CHECK(t.bytes[HOT] == 0 && t.bytes[WARM] == 60 && t.units[a].tier == WARM);
    REQUIRE(mls_tiers_begin(&t, a, HOT, &status) == MLS_OK);
    mls_tiers_end(&t, a, HOT, true);
    CHECK(t.bytes[HOT] == 60 && t.bytes[WARM] == 0 && t.units[a].tier == HOT);
    CHECK(t.units[a].pins == 0);
}

TEST(unit_that_does_not_fit_reports_the_reason)
{
    mls_tiers_init(&t, 10, 100);
    (void)add(70, WARM);
    const size_t b = add(40, COLD), c = add(30, COLD);
    CHECK(mls_tiers_fits(&t, c, WARM, &status) == MLS_OK);
    CHECK(mls_tiers_fits(&t, b, COLD, &status) == MLS_OK); /* its present tier */
    CHECK(mls_tiers_fits(&t, b, WARM, &status) == MLS_E_CAPACITY);
    CHECK_TEXT(status.text,
               "a unit of 40 bytes does not fit: of the warm budget of 100 bytes 30 "
               "are left");
    CHECK(mls_tiers_fits(&t, b, HOT, &status) == MLS_E_CAPACITY);
    CHECK_TEXT(status.text,
               "a unit of 40 bytes is more than the whole hot budget of 10 bytes");
}

TEST(eviction_takes_least_used_then_longest_unused)
{
    mls_tiers_init(&t, MLS_TIERS_UNLIMITED, 100);
    const size_t often = add(40, WARM), late = add(30, WARM);
    const size_t early = add(30, WARM), in = add(50, COLD);
    use(often, 2);
    use(early, 1);
    use(late, 1);
    CHECK(make_room(in, WARM) == 2);
    CHECK(is_move(0, early, COLD) && is_move(1, late, COLD));
    follow();
    CHECK(make_room(in, WARM) == 0); /* there is room */
}

TEST(eviction_spares_units_covered_by_a_larger_one)
{
    mls_tiers_init(&t, MLS_TIERS_UNLIMITED, 100);
    const size_t small = add(10, WARM), large = add(90, WARM);
    const size_t in = add(80, COLD);
    use(large, 1);
    CHECK(make_room(in, WARM) == 1 && is_move(0, large, COLD));
    CHECK(t.units[small].tier == WARM);
}

TEST(pinned_units_are_kept_and_reported)
{
    mls_tiers_init(&t, 5, 100);
    const size_t a = add(60, WARM), b = add(40, WARM), in = add(50, COLD);
    mls_tiers_pin(&t, a);
    CHECK(mls_tiers_make_room(&t, in, WARM, &moves, &status) == MLS_E_CAPACITY);
    CHECK_TEXT(status.text,
               "no room for a unit of 50 bytes: units in use or moving occupy "
               "too much of the warm budget of 100 bytes");
    CHECK(moves.list == NULL);
    CHECK(mls_tiers_make_room(&t, in, HOT, &moves, &status) == MLS_E_CAPACITY);
    mls_tiers_unpin(&t, a);
    CHECK(make_room(in, WARM) == 1 && is_move(0, a, COLD) && t.units[b].tier == WARM);
}

TEST(hot_units_are_demoted_to_warm_and_warm_to_cold)
{
    mls_tiers_init(&t, 50, 100);
    const size_t hot = add(50, HOT), in = add(50, WARM), other = add(50, WARM);
    CHECK(make_room(in, HOT) == 1 && is_move(0, hot, WARM)); /* they are exchanged */
    const size_t third = add(50, COLD);
    CHECK(make_room(third, HOT) == 2 && is_move(0, other, COLD));
    CHECK(is_move(1, hot, WARM));
    mls_tiers_pin(&t, in);
    mls_tiers_pin(&t, other);
    CHECK(make_room(third, HOT) == 1 && is_move(0, hot, COLD)); /* too large for warm */
}

TEST(grown_unit_evicts_others_in_its_tier)
{
    mls_tiers_init(&t, MLS_TIERS_UNLIMITED, 100);
    const size_t a = add(50, WARM), b = add(50, WARM);
    REQUIRE(mls_tiers_resize(&t, a, 70, &status) == MLS_OK); /* this exceeds the budget */
    CHECK(make_room(a, WARM) == 1 && is_move(0, b, COLD));
    follow();
    CHECK(t.bytes[WARM] == 70);
}

TEST(most_used_units_move_to_hot)
{
    mls_tiers_init(&t, 10, 20);
    const size_t a = add(10, HOT), b = add(10, WARM), c = add(10, WARM);
    const size_t d = add(10, COLD), e = add(10, COLD);
    use(d, 9);
    use(b, 5);
    use(a, 1);
    CHECK(rebalance() == 3); /* c makes room, a moves to warm, d moves up */
    CHECK(is_move(0, c, COLD) && is_move(1, a, WARM));
    CHECK(is_move(2, d, HOT));
    CHECK(t.units[d].score == 9 * MLS_TIERS_USE / 2 && t.units[d].uses == 9);
    follow();
    CHECK(t.bytes[HOT] == 10 && t.bytes[WARM] == 20 && t.units[e].tier == COLD);
    CHECK(rebalance() == 0); /* stable */
}

TEST(equally_used_units_do_not_swap)
{
    mls_tiers_init(&t, 0, 10);
    const size_t warm = add(10, WARM), cold = add(10, COLD);
    use(warm, 8);
    use(cold, 10); /* exactly a quarter more is not enough */
    CHECK(rebalance() == 0);
    use(cold, 1);
    CHECK(rebalance() == 2 && is_move(0, warm, COLD));
    CHECK(is_move(1, cold, WARM));
}

TEST(unused_units_move_only_over_budget)
{
    mls_tiers_init(&t, MLS_TIERS_UNLIMITED, 25);
    const size_t a = add(10, WARM), b = add(10, WARM), c = add(10, WARM);
    const size_t d = add(10, COLD);
    CHECK(rebalance() == 1 && is_move(0, c, COLD)); /* beyond the budget */
    CHECK(t.units[a].tier == WARM && t.units[b].tier == WARM && t.units[d].tier == COLD);
}

TEST(scores_saturate_and_age)
{
    mls_tiers_init(&t, 0, 0);
    const size_t a = add(1, COLD);
    t.units[a].score = (UINT64_C(1) << 60) - 1;
    use(a, 2);
    CHECK(t.units[a].score == UINT64_C(1) << 60 && t.units[a].used_at == 2);
    for (int i = 0; i < 61; i++) {
        CHECK(rebalance() == 0);
    }
    CHECK(t.units[a].score == 0);
}
