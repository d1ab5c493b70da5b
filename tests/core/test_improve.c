/* The best schedule that can be found: through all, or by changes for the better. */
#include "improve.h"

#include "mem.h"
#include "random_chain.h"
#include "runner.h"

/* Keep every `distance`-th activation and nothing else: valid, whatever the chain. */
static mls_code every(const mls_chain *c, size_t distance, mls_schedule *out,
                      mls_status *st)
{
    mls_code code = MLS_OK;
    const size_t n = c->blocks;
    for (size_t i = 0; i + 1 < n && code == MLS_OK; i++) {
        code = mls_schedule_push(out, MLS_STEP_FORWARD, i, st);
        if (code == MLS_OK && i % distance != 0) {
            code = mls_schedule_push(out, MLS_STEP_DROP, i, st);
        }
    }
    for (size_t i = n; i-- > 0 && code == MLS_OK;) {
        const size_t from = i - i % distance;
        for (size_t j = from; j < i && i + 1 < n && code == MLS_OK; j++) {
            code = mls_schedule_push(out, MLS_STEP_FORWARD, j, st);
            if (code == MLS_OK && j > from) {
                code = mls_schedule_push(out, MLS_STEP_DROP, j, st);
            }
        }
        code = code == MLS_OK ? mls_schedule_push(out, MLS_STEP_SAVE, i, st) : code;
        code = code == MLS_OK ? mls_schedule_push(out, MLS_STEP_BACKWARD, i, st) : code;
        if (code == MLS_OK && i > 0) {
            code = mls_schedule_push(out, MLS_STEP_DROP, i, st);
        }
    }
    return code;
}

/* From a bad schedule: never worse, always valid, within its peak, and the same again. */
static void check_improved(const mls_chain *c, bool offload)
{
    mls_status st;
    mls_schedule start = {0};
    mls_totals before;
    mls_best best, again;
    REQUIRE(every(c, 5, &start, &st) == MLS_OK);
    REQUIRE(mls_chain_simulate(c, start.steps, start.count, NULL, &before, &st) ==
            MLS_OK);
    const mls_best_options options = {.budget_bytes = before.peak_bytes,
                                      .offload = offload,
                                      .start = start.steps,
                                      .start_count = start.count};
    REQUIRE(mls_best_schedule(c, &options, &best, &st) == MLS_OK);
    REQUIRE(mls_best_schedule(c, &options, &again, &st) == MLS_OK);
    CHECK(best.totals.peak_bytes <= before.peak_bytes);
    CHECK(best.totals.seconds < before.seconds);
    CHECK(best.schedule.count == again.schedule.count);
    CHECK(memcmp(best.schedule.steps, again.schedule.steps,
                 best.schedule.count * sizeof *best.schedule.steps) == 0);
    CHECK(best.optimal || c->blocks > 10);
    mls_schedule_fini(&best.schedule);
    mls_schedule_fini(&again.schedule);
    mls_schedule_fini(&start);
}

static void a_bad_schedule_gets_better(void)
{
    uint64_t seed = 5;
    static const size_t lengths[] = {24, 8, 40};
    for (size_t i = 0; i < TRIES(sizeof lengths / sizeof lengths[0]); i++) {
        random_chain r;
        random_chain_fill(&r, lengths[i], &seed, true);
        check_improved(&r.chain, false);
        check_improved(&r.chain, true);
    }
}

/* With memory for all, each block runs once. */
static void with_enough_memory_nothing_runs_twice(void)
{
    uint64_t seed = 6;
    mls_status st;
    random_chain r;
    mls_schedule start = {0};
    mls_best best;
    random_chain_fill(&r, 30, &seed, false);
    REQUIRE(every(&r.chain, 4, &start, &st) == MLS_OK);
    const mls_best_options options = {
        .budget_bytes = 1 << 20, .start = start.steps, .start_count = start.count};
    REQUIRE(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_OK);
    CHECK(best.schedule.count == 60);
    for (size_t i = 0; i < best.schedule.count; i++) {
        CHECK(best.schedule.steps[i].kind != MLS_STEP_FORWARD);
    }
    mls_schedule_fini(&best.schedule);
    mls_schedule_fini(&start);
}

static void a_budget_that_nothing_fits_is_refused(void)
{
    uint64_t seed = 8;
    mls_status st;
    random_chain r;
    mls_best best = {.states = 77};
    random_chain_fill(&r, 6, &seed, false);
    mls_best_options options = {.budget_bytes = 0};
    CHECK(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_E_CAPACITY);
    CHECK(best.states == 77 && st.expected[0] != '\0');
    /* the figure that it names is the least that works */
    long long least = 0;
    REQUIRE(sscanf(st.expected, "at least %lld", &least) == 1);
    options.budget_bytes = least - 1;
    CHECK(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_E_CAPACITY);
    options.budget_bytes = least;
    REQUIRE(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_OK);
    CHECK(best.totals.peak_bytes == least && best.optimal);
    mls_schedule_fini(&best.schedule);
}

static void a_start_is_needed_or_must_be_good(void)
{
    uint64_t seed = 9;
    mls_status st;
    random_chain r;
    mls_best best;
    random_chain_fill(&r, 40, &seed, false);
    mls_best_options options = {.budget_bytes = 100};
    CHECK(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_E_CAPACITY);
    CHECK(strstr(st.text, "a persistent one") != NULL);
    const mls_step wrong[] = {{MLS_STEP_SAVE, 1}};
    options.start = wrong;
    options.start_count = 1;
    CHECK(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_E_VALUE);
    mls_schedule start = {0};
    REQUIRE(every(&r.chain, 4, &start, &st) == MLS_OK);
    options = (mls_best_options){
        .budget_bytes = 1, .start = start.steps, .start_count = start.count};
    CHECK(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_E_VALUE);
    mls_schedule_fini(&start);
}

static bool never(void *context)
{
    (void)context;
    return false;
}

static void improving_can_be_stopped(void)
{
    uint64_t seed = 10;
    mls_status st;
    random_chain r;
    mls_schedule start = {0};
    mls_best best;
    const mls_poll poll = {.go_on = never};
    random_chain_fill(&r, 40, &seed, false);
    REQUIRE(every(&r.chain, 4, &start, &st) == MLS_OK);
    const mls_best_options options = {.budget_bytes = 1 << 20,
                                      .start = start.steps,
                                      .start_count = start.count,
                                      .poll = poll};
    CHECK(mls_best_schedule(&r.chain, &options, &best, &st) == MLS_E_STOPPED);
    mls_schedule_fini(&start);
}

int main(void)
{
    static const test_case tests[] = {
        TEST(a_bad_schedule_gets_better),
        TEST(with_enough_memory_nothing_runs_twice),
        TEST(a_budget_that_nothing_fits_is_refused),
        TEST(a_start_is_needed_or_must_be_good),
        TEST(improving_can_be_stopped),
    };
    return RUN_TESTS(tests);
}
