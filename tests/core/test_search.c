/* The search between two moments of a chain.  That what it finds is the best there is,
 * tests/test_plan_search.py compares with an exhaustive search in Python; here it is
 * compared with every order of steps on the shortest chains, and its limits are tried. */
#include "search.h"

#include "random_chain.h"
#include "runner.h"

#include <math.h>

/* ---- every schedule, by trying each step that can be run ---- */

enum { TINY = 3 };

/* What is held, as bits; activation 0 is always there. */
typedef struct spot {
    unsigned alone, saved;
    size_t left;
    int64_t held;
} spot;

static double least_extra(const mls_chain *c, spot at, int64_t budget, double so_far,
                          double best);

/* Go on after a step that makes `peak`. */
static double after(const mls_chain *c, spot at, int64_t peak, int64_t budget,
                    double so_far, double best)
{
    return peak > budget ? best : least_extra(c, at, budget, so_far, best);
}

static bool there(spot at, size_t k)
{
    return ((at.alone | at.saved << 1 | 1u) >> k & 1u) != 0;
}

static double try_block(const mls_chain *c, spot at, size_t i, int64_t budget,
                        double so_far, double best)
{
    if (at.alone >> (i + 1) & 1u) {
        spot next = at;
        next.alone &= ~(2u << i);
        next.held -= c->activation_bytes[i + 1];
        best = least_extra(c, next, budget, so_far, best);
    }
    if (!there(at, i) || there(at, i + 1)) {
        return best;
    }
    spot forward = at, save = at;
    forward.alone |= 2u << i;
    forward.held += c->activation_bytes[i + 1];
    best = after(c, forward, forward.held + c->forward_temporary_bytes[i], budget,
                 so_far + c->forward_seconds[i], best);
    save.saved |= 1u << i;
    save.held += c->saved_bytes[i];
    return after(c, save, save.held + c->saving_temporary_bytes[i], budget, so_far, best);
}

/* No recursion on states that went before without paying for it: a forward costs at least
 * a second, saves and backwards come to an end, drops too.  `best` prunes. */
static double least_extra(const mls_chain *c, spot at, int64_t budget, double so_far,
                          double best)
{
    if (so_far >= best) {
        return best;
    }
    if (at.left == 0) {
        return so_far;
    }
    const size_t i = at.left - 1;
    if (there(at, i) && (at.saved >> i & 1u) != 0) {
        spot next = at;
        const int64_t peak = at.held + mls_backward_makes(c, i);
        next.held +=
            c->gradient_bytes[i] - mls_held_gradient(c, at.left) - c->saved_bytes[i];
        next.saved &= ~(1u << i);
        next.left = i;
        best = after(c, next, peak, budget, so_far, best);
    }
    for (size_t j = 0; j < at.left; j++) {
        best = try_block(c, at, j, budget, so_far, best);
    }
    return best;
}

static void nothing_is_better_on_the_shortest_chains(void)
{
    uint64_t seed = 42;
    int found_some = 0;
    for (int round = 0; round < TRIES(40); round++) {
        random_chain r;
        random_chain_fill(&r, 1 + (size_t)round % TINY, &seed, false);
        const mls_chain *c = &r.chain;
        double most = 1; /* more than any way of the persistent kind takes */
        for (size_t i = 0; i + 1 < c->blocks; i++) {
            r.forward[i] += 200; /* no more than a few forwards come into question */
            most += 1.5 * (double)(c->blocks - 1 - i) * r.forward[i];
        }
        const mls_stretch whole = mls_stretch_whole(c, false);
        for (int64_t budget = 100; budget < 600; budget += 41) {
            const spot begin = {.left = c->blocks, .held = c->activation_bytes[0]};
            const double expected = least_extra(c, begin, budget, 0, most);
            mls_found found;
            mls_status st;
            const mls_search_limits limits = {.budget_bytes = budget, .below = INFINITY};
            REQUIRE(mls_search(&whole, &limits, &found, &st) == MLS_OK);
            CHECK(found.found == (expected < most) && !found.ran_out);
            CHECK(!found.found || (long)found.extra == (long)expected);
            found_some += found.found ? 1 : 0;
            mls_schedule_fini(&found.runs);
        }
    }
    CHECK(found_some > TRIES(100));
}

/* ---- limits ---- */

static void fill_nine(random_chain *r, bool rates)
{
    uint64_t seed = 7;
    random_chain_fill(r, 9, &seed, rates);
}

static int64_t least_peak(const mls_chain *c, bool offload)
{
    const mls_stretch whole = mls_stretch_whole(c, offload);
    const mls_search_limits limits = {0};
    mls_found found;
    mls_status st;
    if (mls_search_least(&whole, &limits, &found, &st) != MLS_OK || !found.found) {
        return -1;
    }
    mls_schedule_fini(&found.runs);
    return found.least;
}

static void the_least_peak_is_where_schedules_begin(void)
{
    random_chain r;
    fill_nine(&r, true);
    for (int offload = 0; offload < 2; offload++) {
        const mls_stretch whole = mls_stretch_whole(&r.chain, offload != 0);
        const int64_t least = least_peak(&r.chain, offload != 0);
        REQUIRE(least > 0);
        for (int64_t budget = least - 1; budget <= least; budget++) {
            mls_found found;
            mls_status st;
            const mls_search_limits limits = {.budget_bytes = budget, .below = INFINITY};
            REQUIRE(mls_search(&whole, &limits, &found, &st) == MLS_OK);
            CHECK(found.found == (budget == least) || found.ran_out);
            mls_schedule_fini(&found.runs);
        }
    }
    CHECK(least_peak(&r.chain, true) <= least_peak(&r.chain, false));
}

static void few_states_are_too_few(void)
{
    random_chain r;
    fill_nine(&r, false);
    const mls_stretch whole = mls_stretch_whole(&r.chain, false);
    const mls_search_limits limits = {
        .budget_bytes = least_peak(&r.chain, false), .below = INFINITY, .states = 50};
    mls_found found;
    mls_status st;
    REQUIRE(mls_search(&whole, &limits, &found, &st) == MLS_OK);
    CHECK(!found.found && found.ran_out && found.states == 50 && found.runs.count == 0);
}

/* Only what is below a bound is looked for, and the bound itself is not below it. */
static void nothing_below_the_best_is_found(void)
{
    random_chain r;
    fill_nine(&r, false);
    const mls_stretch whole = mls_stretch_whole(&r.chain, false);
    mls_search_limits limits = {.budget_bytes = least_peak(&r.chain, false) + 20,
                                .below = INFINITY};
    mls_found found;
    mls_status st;
    REQUIRE(mls_search(&whole, &limits, &found, &st) == MLS_OK);
    REQUIRE(found.found);
    CHECK(found.extra > 0);
    mls_schedule_fini(&found.runs);
    limits.below = found.extra;
    REQUIRE(mls_search(&whole, &limits, &found, &st) == MLS_OK);
    CHECK(!found.found && !found.ran_out);
}

static bool count_down(void *context)
{
    int *left = context;
    return (*left)-- > 0;
}

static void a_search_can_be_stopped(void)
{
    random_chain r;
    uint64_t seed = 7;
    random_chain_fill(&r, 12, &seed, true);
    const mls_stretch whole = mls_stretch_whole(&r.chain, true);
    int left = 2;
    const mls_search_limits limits = {.poll = {.go_on = count_down, .context = &left}};
    mls_found found = {.states = 77};
    mls_status st;
    CHECK(mls_search_least(&whole, &limits, &found, &st) == MLS_E_STOPPED);
    CHECK(found.states == 77 && left == -1);
}

int main(void)
{
    static const test_case tests[] = {
        TEST(nothing_is_better_on_the_shortest_chains),
        TEST(the_least_peak_is_where_schedules_begin),
        TEST(few_states_are_too_few),
        TEST(nothing_below_the_best_is_found),
        TEST(a_search_can_be_stopped),
    };
    return RUN_TESTS(tests);
}
