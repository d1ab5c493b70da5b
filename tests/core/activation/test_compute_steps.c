/* Compute steps: where drops belong, and which steps are superfluous. */
#include "activation/compute_steps.h"

#include "support/runner.h"

/* Blocks of equal costs, except for the rates. */
enum { N = 3 };
static const double forward[N] = {1, 2, 4}, backward[N] = {8, 16, 32};
static const int64_t activation[N + 1] = {10, 20, 30, 5}, saved[N] = {50, 60, 15};
static const int64_t temporary[N] = {1, 2, 3}, more[N] = {4, 5, 6}, most[N] = {7, 8, 9};

static const mls_chain chain = {.blocks = N,
                                .forward_seconds = forward,
                                .backward_seconds = backward,
                                .activation_bytes = activation,
                                .gradient_bytes = activation,
                                .saved_bytes = saved,
                                .forward_temporary_bytes = temporary,
                                .saving_temporary_bytes = more,
                                .backward_temporary_bytes = most,
                                .offload_rate = 10,
                                .load_rate = 20};

static const mls_step keep_nothing[] = {
    {MLS_STEP_FORWARD, 0}, {MLS_STEP_FORWARD, 1},  {MLS_STEP_DROP, 1},
    {MLS_STEP_SAVE, 2},    {MLS_STEP_BACKWARD, 2}, {MLS_STEP_DROP, 2},
    {MLS_STEP_FORWARD, 0}, {MLS_STEP_SAVE, 1},     {MLS_STEP_BACKWARD, 1},
    {MLS_STEP_DROP, 1},    {MLS_STEP_SAVE, 0},     {MLS_STEP_BACKWARD, 0},
};
enum { STEPS = sizeof keep_nothing / sizeof keep_nothing[0] };

static const mls_step to_the_host[] = {
    {MLS_STEP_SAVE, 0}, {MLS_STEP_OFFLOAD, 0},  {MLS_STEP_FORWARD, 1},
    {MLS_STEP_SAVE, 2}, {MLS_STEP_BACKWARD, 2}, {MLS_STEP_DROP, 2},
    {MLS_STEP_SAVE, 1}, {MLS_STEP_BACKWARD, 1}, {MLS_STEP_DROP, 1},
    {MLS_STEP_LOAD, 0}, {MLS_STEP_BACKWARD, 0},
};
enum { HOST_STEPS = sizeof to_the_host / sizeof to_the_host[0] };

/* The schedule that `count` compute steps stand for equals `steps`. */
static void check_written(const mls_compute_step *runs, size_t count,
                          const mls_step *steps, size_t expected)
{
    mls_status st;
    mls_schedule schedule = {0};
    CHECK(mls_compute_steps_write(runs, count, &schedule, &st) == MLS_OK);
    CHECK(schedule.count == expected);
    for (size_t i = 0; i < schedule.count && i < expected; i++) {
        CHECK(schedule.steps[i].kind == steps[i].kind);
        CHECK(schedule.steps[i].index == steps[i].index);
    }
    mls_schedule_fini(&schedule);
}

TEST(tidy_drops_each_activation_at_its_last_use)
{
    mls_compute_step runs[STEPS];
    unsigned char scratch[2 * (N + 1)];
    size_t count = mls_compute_steps_of(keep_nothing, STEPS, runs);
    CHECK(count == STEPS - 3);
    CHECK(mls_compute_steps_tidy(&chain, runs, &count, scratch));
    check_written(runs, count, keep_nothing, STEPS);
    count = mls_compute_steps_of(to_the_host, HOST_STEPS, runs);
    CHECK(mls_compute_steps_tidy(&chain, runs, &count, scratch));
    check_written(runs, count, to_the_host, HOST_STEPS);
}

/* An output is dropped too if nothing reads it while its block is offloaded. */
TEST(offload_drops_an_unread_output)
{
    static const mls_step steps[] = {
        {MLS_STEP_SAVE, 0}, {MLS_STEP_SAVE, 1},     {MLS_STEP_OFFLOAD, 0},
        {MLS_STEP_DROP, 1}, {MLS_STEP_SAVE, 2},     {MLS_STEP_BACKWARD, 2},
        {MLS_STEP_LOAD, 0}, {MLS_STEP_BACKWARD, 1}, {MLS_STEP_BACKWARD, 0},
    };
    enum { COUNT = sizeof steps / sizeof steps[0] };
    mls_compute_step runs[COUNT];
    mls_totals totals;
    unsigned char scratch[2 * (N + 1)];
    REQUIRE(mls_chain_simulate(&chain, steps, COUNT, NULL, &totals, &status) == MLS_OK);
    size_t count = mls_compute_steps_of(steps, COUNT, runs);
    CHECK(mls_compute_steps_tidy(&chain, runs, &count, scratch));
    check_written(runs, count, steps, COUNT);
}

TEST(tidy_removes_unused_forwards)
{
    /* activation 1 exists when it is recomputed; activation 3 is never read */
    mls_compute_step runs[] = {
        {.kind = MLS_STEP_SAVE, .index = 0},     {.kind = MLS_STEP_FORWARD, .index = 0},
        {.kind = MLS_STEP_SAVE, .index = 1},     {.kind = MLS_STEP_FORWARD, .index = 2},
        {.kind = MLS_STEP_SAVE, .index = 2},     {.kind = MLS_STEP_BACKWARD, .index = 2},
        {.kind = MLS_STEP_BACKWARD, .index = 1}, {.kind = MLS_STEP_BACKWARD, .index = 0}};
    unsigned char scratch[2 * (N + 1)];
    size_t count = sizeof runs / sizeof runs[0];
    CHECK(mls_compute_steps_tidy(&chain, runs, &count, scratch));
    CHECK(count == 6);
    for (size_t i = 0; i < count; i++) {
        CHECK(runs[i].kind != MLS_STEP_FORWARD && !runs[i].drops);
    }
}

TEST(tidy_fails_if_an_activation_is_missing)
{
    mls_compute_step runs[] = {{.kind = MLS_STEP_SAVE, .index = 2},
                               {.kind = MLS_STEP_BACKWARD, .index = 2}};
    unsigned char scratch[2 * (N + 1)];
    size_t count = 2;
    CHECK(!mls_compute_steps_tidy(&chain, runs, &count, scratch));
}

/* Forwards, and both transfers of offloaded blocks; all schedules share the other
 * steps. */
TEST(extra_seconds_exclude_common_steps)
{
    const mls_compute_step run = {.kind = MLS_STEP_FORWARD, .index = 2};
    const mls_compute_step save = {.kind = MLS_STEP_SAVE, .index = 2};
    const mls_compute_step away = {.kind = MLS_STEP_OFFLOAD, .index = 1};
    const mls_compute_step back = {.kind = MLS_STEP_LOAD, .index = 1};
    CHECK((int)mls_step_extra(&chain, &run) == 4);
    CHECK((int)(mls_step_extra(&chain, &save) + mls_step_extra(&chain, &back)) == 0);
    CHECK((int)mls_step_extra(&chain, &away) == 9);
}
