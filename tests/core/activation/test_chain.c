#include "activation/chain.h"
#include "support/chains.h"
#include "support/runner.h"

#include <stdlib.h>

/* Two blocks: activations 10, 20, 5; saved 50, 30. */
static void small_chain(test_chain *c)
{
    memset(c, 0, sizeof *c);
    memcpy(c->forward, (double[]){1, 2}, 2 * sizeof(double));
    memcpy(c->backward, (double[]){2, 4}, 2 * sizeof(double));
    memcpy(c->activation, (int64_t[]){10, 20, 5}, 3 * sizeof(int64_t));
    memcpy(c->gradient, (int64_t[]){10, 20, 5}, 3 * sizeof(int64_t));
    memcpy(c->saved, (int64_t[]){50, 30}, 2 * sizeof(int64_t));
    bind_chain(c, 2, 10);
}

TEST(too_many_blocks_are_refused)
{
    test_chain c;
    small_chain(&c);
    c.chain.blocks = MLS_CHAIN_MAX_BLOCKS + 1;
    CHECK_FAILS(mls_chain_check(&c.chain, &status), MLS_E_VALUE,
                "a chain of 1048577 blocks: choose 1 to 1048576");
}

/* A chain with one change is refused. */
#define WRONG(change, code, text)                                                        \
    do {                                                                                 \
        test_chain c;                                                                    \
        small_chain(&c);                                                                 \
        c.change;                                                                        \
        CHECK_FAILS(mls_chain_check(&c.chain, &status), code, text);                     \
    } while (0)

TEST(wrong_numbers_are_refused)
{
    WRONG(forward[1] = -1, MLS_E_VALUE,
          "forward_seconds[1] is -1: choose a finite number, at least 0");
    WRONG(backward[0] = (double)NAN, MLS_E_VALUE,
          "backward_seconds[0] is nan: choose a finite number, at least 0");
    WRONG(saved[1] = INT64_MAX / 2, MLS_E_SIZE,
          "all bytes together exceed 62 bits at saved_bytes[1]");
    WRONG(
        chain.load_rate = 0, MLS_E_VALUE,
        "the offload rate is 10 and the load rate 0 bytes per second: give both, finite "
        "and above 0, or neither");
}

/* Steps as tests write them. */
#define S(kind, index) {MLS_STEP_##kind, index}

/* A schedule that is refused at its last step. */
static void check_refused(const mls_step *steps, size_t count, const char *text)
{
    mls_totals totals = {-1, -1};
    mls_status st;
    test_chain c;
    small_chain(&c);
    CHECK(mls_chain_simulate(&c.chain, steps, count, NULL, &totals, &st) == MLS_E_VALUE);
    CHECK_TEXT(st.text, text);
    CHECK(totals.peak_bytes == -1);
}

#define REFUSED(text, ...)                                                               \
    do {                                                                                 \
        static const mls_step steps[] = {__VA_ARGS__};                                   \
        check_refused(steps, sizeof steps / sizeof steps[0], text);                      \
    } while (0)

TEST(invalid_steps_name_the_missing_input)
{
    REFUSED("step 0, save 1: activation 1 does not exist", S(SAVE, 1));
    REFUSED("step 1, save 0: activation 1 already exists", S(FORWARD, 0), S(SAVE, 0));
    REFUSED("step 3, forward 1: backward 1 has run already", S(SAVE, 0), S(SAVE, 1),
            S(BACKWARD, 1), S(FORWARD, 1));
    REFUSED("step 1, forward 0: activation 1 already exists", S(SAVE, 0), S(FORWARD, 0));
    REFUSED("step 1, backward 0: gradient 1 does not exist", S(SAVE, 0), S(BACKWARD, 0));
    REFUSED("step 1, backward 1: saved 1 does not exist", S(FORWARD, 0), S(BACKWARD, 1));
    REFUSED("step 0, drop 0: activation 0 is the input and stays", S(DROP, 0));
    REFUSED("step 1, drop 1: activation 1 is not a separate tensor", S(SAVE, 0),
            S(DROP, 1));
    REFUSED("step 0, offload 0: saved 0 is not on the device", S(OFFLOAD, 0));
    REFUSED("step 0, load 0: saved 0 is not on the host", S(LOAD, 0));
    REFUSED("step 2, load 0: activation 1 already exists", S(SAVE, 0), S(OFFLOAD, 0),
            S(LOAD, 0));
    REFUSED("step 3, save 0: saved 0 already exists", S(SAVE, 0), S(OFFLOAD, 0),
            S(DROP, 1), S(SAVE, 0));
    REFUSED("step 3, backward 1: activation 1 does not exist", S(FORWARD, 0), S(SAVE, 1),
            S(DROP, 1), S(BACKWARD, 1));
}

TEST(unknown_steps_and_incomplete_schedules_are_refused)
{
    REFUSED("step 0, save 2: there is no such step in a chain of 2 blocks", S(SAVE, 2));
    REFUSED("step 0, ? 0: there is no such step in a chain of 2 blocks",
            {MLS_STEP_KINDS, 0});
    REFUSED("step 0, save -1: there is no such step in a chain of 2 blocks", S(SAVE, -1));
    REFUSED("the schedule ends after 1 steps with 2 backward passes to go", S(SAVE, 0));
    REFUSED("step 3, backward 1: gradient 2 does not exist", S(SAVE, 0), S(SAVE, 1),
            S(BACKWARD, 1), S(BACKWARD, 1));
}

TEST(schedule_grows_to_1000_steps)
{
    mls_schedule schedule = {0};
    for (size_t i = 0; i < 1000; i++) {
        REQUIRE(mls_schedule_push(&schedule, MLS_STEP_SAVE, i, &status) == MLS_OK);
    }
    CHECK(schedule.count == 1000 && schedule.steps[999].index == 999);
    CHECK_TEXT(mls_step_name(schedule.steps[5].kind), "save");
    CHECK_TEXT(mls_step_name(-1), "?");
    mls_schedule_fini(&schedule);
    mls_schedule_fini(&schedule);
}
