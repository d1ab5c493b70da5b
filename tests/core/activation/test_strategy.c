#include "activation/strategy.h"
#include "support/layer_keys.h"

/* A new strategy, at time `SECONDS(100)`. */
#define SECONDS(n) ((int64_t)((n) * 1e7))

static mls_strategy s; /* of the current test */

AFTER_EACH
{
    mls_strategy_fini(&s);
    s = (mls_strategy){0};
}

static void make(int64_t number, double share)
{
    CHECK(mls_strategy_init(&s, number == 0 ? NULL : &number, "n", share, "share",
                            SECONDS(100), &status) == MLS_OK);
}

/* The strategy's decision, which must not fail. */
static bool ask(mls_decide *decide, const char *name, size_t bytes, int64_t index)
{
    const mls_decide_args args = {named(name), bytes, index};
    const int chosen = decide(&s, &args, &status);
    CHECK(chosen >= 0);
    return chosen > 0;
}

/* ---- memory aware ---- */

TEST(share_is_rounded_to_float32)
{
    /* a used size that float32 rounds to the total does not exceed the total */
    make(0, 1.0);
    mls_strategy_adjust(&s, SECONDS(110), UINT64_MAX, UINT64_MAX - 1);
    CHECK(s.interval == 2 && s.high_count == 0);
}

TEST(memory_aware_restores_valid_states_only)
{
    make(0, 0.8);
    CHECK(mls_strategy_restore(&s, 9, 7, SECONDS(90), 3, &status) == MLS_OK);
    CHECK(s.interval == 7 && s.high_count == 3 && mls_strategy_is_due(&s, SECONDS(100)));
    CHECK_FAILS(mls_strategy_restore(&s, 9, 0, 0, 0, &status), MLS_E_VALUE,
                "no state of a strategy: 9 layers, interval 0, 0 times high pressure");
    CHECK(mls_strategy_restore(&s, 9, 11, 0, 0, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, 9, 2, 0, -1, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, 9, 2, INT64_MAX, 0, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, 9, 2, INT64_MIN, 0, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, -1, 2, 0, 0, &status) == MLS_E_VALUE);
    CHECK(s.interval == 7 && s.high_count == 3 && s.adjusted_at == SECONDS(90));
    CHECK(s.checkpointed == 9);
}

/* If the clock jumps back, nothing is due. */
TEST(backward_clock_leaves_the_strategy_unchanged)
{
    make(0, 0.8);
    CHECK(!mls_strategy_is_due(&s, -MLS_MAX_TICKS));
    mls_strategy_adjust(&s, -MLS_MAX_TICKS, 100, 100);
    CHECK(s.interval == 2);
    mls_strategy_reset(&s, -MLS_MAX_TICKS);
    CHECK(mls_strategy_is_due(&s, MLS_MAX_TICKS));
}

/* ---- smart ---- */

TEST(smart_accepts_empty_activations)
{
    make(0, 1);
    CHECK(!ask(mls_decide_smart, "a", 0, 11) && ask(mls_decide_smart, "b", 0, 0));
    CHECK(!ask(mls_decide_smart, "a", 0, 0)); /* 0 > 0 is false */
}

TEST(smart_refuses_sums_beyond_64_bits)
{
    make(0, 1);
    CHECK(!ask(mls_decide_smart, "a", SIZE_MAX, 0));
    const mls_layer_key b = named("b");
    const mls_decide_args args = {b, 1, 99};
    CHECK(mls_decide_smart(&s, &args, &status) == -1 && status.code == MLS_E_SIZE);
    CHECK(s.seen.count == 1 && s.collecting && s.total_bytes == SIZE_MAX);
    CHECK_FAILS(mls_strategy_restore_layer(&s, &b, 1, 1, &status), MLS_E_SIZE,
                "the activations of all layers have more bytes than memory can");
    CHECK_FAILS(mls_strategy_restore_layer(&s, &b, 1, 0, &status), MLS_E_VALUE,
                "the state of a strategy has a layer that was never called");
    const mls_layer_key a = named("a");
    CHECK_FAILS(mls_strategy_restore_layer(&s, &a, 1, 1, &status), MLS_E_VALUE,
                "the state of a strategy has a layer twice");
    CHECK_TEXT(status.name, "a");
}
