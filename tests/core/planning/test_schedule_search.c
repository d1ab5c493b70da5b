/* The search through all schedules of a chain.  tests/activation/test_plan_search.py
 * compares its results with an exhaustive search in Python. This file compares it with
 * every order of steps on the shortest chains, and tests its limits. */
#include "planning/schedule_search.h"

#include "support/chains.h"
#include "support/runner.h"

/* ---- exhaustive search ---- */

enum { TINY = 3 };

/* The memory in use, as bits; activation 0 is always in memory. */
typedef struct spot {
    unsigned alone, saved;
    size_t left;
    int64_t held;
} spot;

static double least_extra(const mls_chain *c, spot at, int64_t budget, double so_far,
                          double best);

/* Continue after a step whose memory peak is `peak`. */
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

/* The recursion ends, because no state returns for free: a forward costs at least a
 * second, and the numbers of saves, backwards and drops are limited.  `best` prunes. */
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

TEST(nothing_is_better_on_the_shortest_chains)
{
    uint64_t seed = 42;
    int found_some = 0;
    for (int round = 0; round < TRIES(40); round++) {
        test_chain r;
        random_chain_fill(&r, 1 + (size_t)round % TINY, &seed, false);
        const mls_chain *c = &r.chain;
        double most = 1; /* more than any persistent schedule takes */
        for (size_t i = 0; i + 1 < c->blocks; i++) {
            r.forward[i] += 200; /* so that only a few forwards are worth trying */
            most += 1.5 * (double)(c->blocks - 1 - i) * r.forward[i];
        }
        for (int64_t budget = 100; budget < 600; budget += 41) {
            const spot begin = {.left = c->blocks, .held = c->activation_bytes[0]};
            const double expected = least_extra(c, begin, budget, 0, most);
            mls_found found;
            const mls_search_limits limits = {.budget_bytes = budget, .below = INFINITY};
            REQUIRE(mls_search(c, &limits, &found, &status) == MLS_OK);
            CHECK(found.found == (expected < most) && !found.ran_out);
            CHECK(!found.found || (long)found.extra == (long)expected);
            found_some += found.found ? 1 : 0;
            mls_schedule_fini(&found.runs);
        }
    }
    CHECK(found_some > TRIES(100));
}

/* ---- limits ---- */

static void fill_nine(test_chain *r, bool rates)
{
    uint64_t seed = 7;
    random_chain_fill(r, 9, &seed, rates);
}

static int64_t least_peak(const mls_chain *c, bool offload)
{
    const mls_search_limits limits = {.offload = offload};
    mls_found found;
    mls_status st;
    if (mls_search_least(c, &limits, &found, &st) != MLS_OK || !found.found) {
        return -1;
    }
    mls_schedule_fini(&found.runs);
    return found.least;
}

TEST(the_least_peak_is_where_schedules_begin)
{
    test_chain r;
    fill_nine(&r, true);
    for (int offload = 0; offload < 2; offload++) {
        const int64_t least = least_peak(&r.chain, offload != 0);
        REQUIRE(least > 0);
        for (int64_t budget = least - 1; budget <= least; budget++) {
            mls_found found;
            const mls_search_limits limits = {
                .offload = offload != 0, .budget_bytes = budget, .below = INFINITY};
            REQUIRE(mls_search(&r.chain, &limits, &found, &status) == MLS_OK);
            CHECK(found.found == (budget == least) || found.ran_out);
            mls_schedule_fini(&found.runs);
        }
    }
    CHECK(least_peak(&r.chain, true) <= least_peak(&r.chain, false));
}

TEST(few_states_are_too_few)
{
    test_chain r;
    fill_nine(&r, false);
    const mls_search_limits limits = {
        .budget_bytes = least_peak(&r.chain, false), .below = INFINITY, .states = 50};
    mls_found found;
    REQUIRE(mls_search(&r.chain, &limits, &found, &status) == MLS_OK);
    CHECK(!found.found && found.ran_out && found.states == 50 && found.runs.count == 0);
}

/* The search finds only schedules below the bound; the bound itself is excluded. */
TEST(nothing_below_the_best_is_found)
{
    test_chain r;
    fill_nine(&r, false);
    mls_search_limits limits = {.budget_bytes = least_peak(&r.chain, false) + 20,
                                .below = INFINITY};
    mls_found found;
    REQUIRE(mls_search(&r.chain, &limits, &found, &status) == MLS_OK);
    REQUIRE(found.found);
    CHECK(found.extra > 0);
    mls_schedule_fini(&found.runs);
    limits.below = found.extra;
    REQUIRE(mls_search(&r.chain, &limits, &found, &status) == MLS_OK);
    CHECK(!found.found && !found.ran_out);
}

TEST(a_search_can_be_stopped)
{
    test_chain r;
    uint64_t seed = 7;
    random_chain_fill(&r, 12, &seed, true);
    int left = 2;
    const mls_search_limits limits = {.offload = true,
                                      .poll = {.go_on = says_no, .context = &left}};
    mls_found found = {.states = 77};
    CHECK(mls_search_least(&r.chain, &limits, &found, &status) == MLS_E_STOPPED);
    CHECK(found.states == 77 && left == -1);
}

/* ---- the best schedule ---- */

/* Recompute all blocks for each backward pass: valid for every chain. */
static mls_code keep_nothing(const mls_chain *c, mls_schedule *out, mls_status *st)
{
    mls_code code = MLS_OK;
    for (size_t i = c->blocks; i-- > 0;) {
        for (size_t j = 0; j <= i && code == MLS_OK; j++) {
            const mls_step_kind kind = j < i ? MLS_STEP_FORWARD : MLS_STEP_SAVE;
            code = mls_schedule_push(out, kind, j, st);
            if (code == MLS_OK && j > 0 && j < i) {
                code = mls_schedule_push(out, MLS_STEP_DROP, j, st);
            }
        }
        code = code == MLS_OK ? mls_schedule_push(out, MLS_STEP_BACKWARD, i, st) : code;
        if (code == MLS_OK && i > 0) {
            code = mls_schedule_push(out, MLS_STEP_DROP, i, st);
        }
    }
    return code;
}

/* A chain of `blocks`, a start, and the best schedule at the start's peak. */
static mls_best best_from_start(size_t blocks, size_t states, double *before)
{
    uint64_t seed = 5;
    mls_status st;
    test_chain r;
    mls_schedule start = {0};
    mls_totals totals;
    mls_best best = {0};
    random_chain_fill(&r, blocks, &seed, true);
    CHECK(keep_nothing(&r.chain, &start, &st) == MLS_OK);
    CHECK(mls_chain_simulate(&r.chain, start.steps, start.count, NULL, &totals, &st) ==
          MLS_OK);
    const mls_best_options options = {.budget_bytes = totals.peak_bytes,
                                      .start = start.steps,
                                      .start_count = start.count,
                                      .states = states};
    CHECK(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_OK);
    CHECK(best.totals.peak_bytes <= totals.peak_bytes);
    *before = totals.seconds;
    mls_schedule_fini(&start);
    return best;
}

TEST(a_short_chain_is_searched_through)
{
    double before;
    mls_best best = best_from_start(8, 0, &before);
    CHECK(best.optimal && best.states > 0 && best.totals.seconds < before);
    mls_schedule_fini(&best.schedule);
}

/* The start is the result if the chain is too long, or the states are too few. */
TEST(what_is_not_searched_through_is_the_start)
{
    double before;
    mls_best best = best_from_start(MLS_SEARCH_BLOCKS + 1, 0, &before);
    CHECK(!best.optimal && best.states == 0);
    CHECK(!(best.totals.seconds < before) && !(best.totals.seconds > before));
    mls_schedule_fini(&best.schedule);
    best = best_from_start(MLS_SEARCH_BLOCKS, 10, &before);
    CHECK(!best.optimal && best.states == 10);
    CHECK(!(best.totals.seconds < before) && !(best.totals.seconds > before));
    mls_schedule_fini(&best.schedule);
}

TEST(a_budget_that_nothing_fits_is_refused)
{
    uint64_t seed = 8;
    test_chain r;
    mls_best best = {.states = 77};
    random_chain_fill(&r, 6, &seed, false);
    mls_best_options options = {.budget_bytes = 0};
    CHECK(mls_best_schedule(&r.chain, &options, &best, &status) == MLS_E_CAPACITY);
    CHECK(best.states == 77 && status.expected[0] != '\0');
    /* the budget named by the error is the least that works */
    long long least = 0;
    REQUIRE(sscanf(status.expected, "at least %lld", &least) == 1);
    options.budget_bytes = least - 1;
    CHECK(mls_best_schedule(&r.chain, &options, &best, &status) == MLS_E_CAPACITY);
    options.budget_bytes = least;
    REQUIRE(mls_best_schedule(&r.chain, &options, &best, &status) == MLS_OK);
    CHECK(best.totals.peak_bytes == least && best.optimal);
    mls_schedule_fini(&best.schedule);
}

TEST(a_start_is_needed_or_must_be_good)
{
    uint64_t seed = 9;
    test_chain r;
    mls_best best;
    random_chain_fill(&r, 40, &seed, false);
    mls_best_options options = {.budget_bytes = 100};
    CHECK(mls_best_schedule(&r.chain, &options, &best, &status) == MLS_E_CAPACITY);
    CHECK(strstr(status.text, "a persistent one") != NULL);
    const mls_step wrong[] = {{MLS_STEP_SAVE, 1}};
    options.start = wrong;
    options.start_count = 1;
    CHECK(mls_best_schedule(&r.chain, &options, &best, &status) == MLS_E_VALUE);
    mls_schedule start = {0};
    REQUIRE(keep_nothing(&r.chain, &start, &status) == MLS_OK);
    options = (mls_best_options){
        .budget_bytes = 1, .start = start.steps, .start_count = start.count};
    CHECK(mls_best_schedule(&r.chain, &options, &best, &status) == MLS_E_VALUE);
    mls_schedule_fini(&start);
}
