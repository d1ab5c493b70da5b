#include "activation/strategy.h"
#include "support/layer_keys.h"

#include <math.h>
#include <stdio.h>

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
    const mls_layer_question q = {named(name), bytes, index};
    const int chosen = decide(&s, &q, &status);
    CHECK(chosen >= 0);
    return chosen > 0;
}

static void mark(const char *name, mls_layer_choice as)
{
    const mls_layer_key key = named(name);
    CHECK(mls_layer_set_choice(&s.named, &key, as, &status) == MLS_OK);
}

TEST(numbers_above_nought_are_kept)
{
    s.number = 5;
    for (int64_t bad = -3; bad <= 0; bad += 3) {
        CHECK(mls_strategy_init(&s, &bad, "interval", 1, "share", 0, &status) ==
              MLS_E_VALUE);
    }
    CHECK_TEXT(status.text, "interval must be greater than 0, got 0");
    CHECK(s.number == 5);
}

/* ---- interval ---- */

TEST(interval_takes_every_nth)
{
    make(3, 1);
    for (int64_t i = 0; i < 30; i++) {
        CHECK(ask(mls_decide_interval, "", 0, i) == (i % 3 == 0));
    }
    CHECK(s.checkpointed == 10 && s.number == 3);
}

TEST(interval_knows_huge_numbers)
{
    static const int64_t intervals[] = {1,        2, 7, INT64_C(1) << 32, INT64_MAX - 1,
                                        INT64_MAX};
    static const int64_t indexes[] = {
        0,        UINT32_MAX, INT64_C(1) << 32, (INT64_C(1) << 33) + 1, INT64_MAX - 1,
        INT64_MAX};
    for (size_t i = 0; i < 6; i++) {
        for (size_t k = 0; k < 6; k++) {
            make(intervals[i], 1);
            CHECK(ask(mls_decide_interval, "", 0, indexes[k]) ==
                  (indexes[k] % intervals[i] == 0));
        }
    }
}

/* ---- selective ---- */

TEST(selective_takes_what_is_marked)
{
    make(0, 1);
    CHECK(!ask(mls_decide_selective, "a", 0, 0));
    mark("a", MLS_LAYER_CHECKPOINT);
    mark("b", MLS_LAYER_EXCLUDE);
    CHECK(ask(mls_decide_selective, "a", 0, 0) && !ask(mls_decide_selective, "b", 0, 0));
    CHECK(!ask(mls_decide_selective, "c", 0, 0) && s.named.count == 2);
}

/* ---- size based ---- */

TEST(size_based_takes_what_is_large)
{
    make(1000, 1);
    CHECK(!ask(mls_decide_size_based, "a", 0, 0) &&
          !ask(mls_decide_size_based, "a", 999, 0));
    CHECK(ask(mls_decide_size_based, "a", 1000, 0) &&
          ask(mls_decide_size_based, "a", SIZE_MAX, 0));
    CHECK(s.checkpointed == 2);
}

/* ---- memory aware ---- */

TEST(pressure_moves_the_interval)
{
    make(0, 0.8);
    CHECK(s.interval == 2);
    CHECK(!mls_strategy_is_due(&s, SECONDS(110) - 1));
    mls_strategy_adjust(&s, SECONDS(110) - 1, 100, 100);
    CHECK(s.interval == 2 && s.adjusted_at == SECONDS(100));
    CHECK(mls_strategy_is_due(&s, SECONDS(110)));
    mls_strategy_adjust(&s, SECONDS(110), 81, 100); /* high */
    CHECK(s.interval == 1 && s.high == 1 && s.adjusted_at == SECONDS(110));
    mls_strategy_adjust(&s, SECONDS(120), 100, 100); /* at least 1 */
    CHECK(s.interval == 1 && s.high == 2);
    mls_strategy_adjust(&s, SECONDS(130), 63, 100); /* low, too soon after high */
    CHECK(s.interval == 1 && s.high == 2 && s.adjusted_at == SECONDS(130));
    mls_strategy_adjust(&s, SECONDS(160), 63, 100); /* 30 seconds are too short */
    CHECK(s.interval == 1);
    mls_strategy_adjust(&s, SECONDS(190) + 1, 63, 100); /* one more tick suffices */
    CHECK(s.interval == 2 && s.high == 2);
    mls_strategy_adjust(&s, SECONDS(201), 70, 100); /* in between: high is reset */
    CHECK(s.interval == 2 && s.high == 0);
    for (int i = 0; i < 12; i++) {
        mls_strategy_adjust(&s, SECONDS(211 + 10 * i), 1, 100);
    }
    CHECK(s.interval == 10); /* at most 10 */
    mls_strategy_reset(&s, SECONDS(400));
    CHECK(s.interval == 2 && s.high == 0 && s.adjusted_at == SECONDS(400));
}

TEST(the_share_is_a_float)
{
    /* 0.8 as a float32 is greater than 0.8: a pressure of exactly 0.8 does not exceed
     * it */
    make(0, 0.8);
    mls_strategy_adjust(&s, SECONDS(110), 80, 100);
    CHECK(s.interval == 2 && s.high == 0);
    mls_strategy_adjust(&s, SECONDS(120), 800001, 1000000);
    CHECK(s.interval == 1);
    /* a used size that float32 rounds to the total does not exceed the total */
    make(0, 1.0);
    mls_strategy_adjust(&s, SECONDS(110), UINT64_MAX, UINT64_MAX - 1);
    CHECK(s.interval == 2 && s.high == 0);
}

TEST(memory_aware_decides_by_its_interval)
{
    make(0, 0.5);
    CHECK(ask(mls_decide_memory_aware, "", 0, 0) &&
          !ask(mls_decide_memory_aware, "", 0, 1));
    CHECK(!ask(mls_decide_memory_aware, "", 0, INT64_MAX));
    mls_strategy_adjust(&s, SECONDS(110), 60, 100);
    CHECK(ask(mls_decide_memory_aware, "", 0, 1) &&
          ask(mls_decide_memory_aware, "", 0, INT64_MAX));
}

TEST(memory_aware_refuses_no_share)
{
    static const double bad[] = {0, -0.5, 1.001, 1e-60, NAN, INFINITY, -INFINITY};
    s.interval = 77;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(mls_strategy_init(&s, NULL, NULL, bad[i], "share", 0, &status) ==
              MLS_E_VALUE);
    }
    CHECK(mls_strategy_init(&s, NULL, NULL, 1.001, "share", 0, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.text, "share must be above 0 and at most 1, got 1.001");
    CHECK(s.interval == 77);
}

TEST(ticks_are_tenths_of_microseconds)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY, 1e12, -1e12};
    int64_t ticks = 5;
    CHECK(mls_ticks_from_seconds(0.3, &ticks, &status) == MLS_OK && ticks == 3000000);
    CHECK(mls_ticks_from_seconds(-1.5, &ticks, &status) == MLS_OK && ticks == -15000000);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(mls_ticks_from_seconds(bad[i], &ticks, &status) == MLS_E_VALUE);
    }
    CHECK(ticks == -15000000);
    const int64_t before = mls_ticks_now();
    CHECK(mls_ticks_now() >= before);
}

TEST(memory_aware_is_restored)
{
    make(0, 0.8);
    CHECK(mls_strategy_restore(&s, 9, 7, SECONDS(90), 3, &status) == MLS_OK);
    CHECK(s.interval == 7 && s.high == 3 && mls_strategy_is_due(&s, SECONDS(100)));
    CHECK(mls_strategy_restore(&s, 9, 0, 0, 0, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, 9, 11, 0, 0, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, 9, 2, 0, -1, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, 9, 2, INT64_MAX, 0, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, 9, 2, INT64_MIN, 0, &status) == MLS_E_VALUE);
    CHECK(mls_strategy_restore(&s, -1, 2, 0, 0, &status) == MLS_E_VALUE);
    CHECK(s.interval == 7 && s.high == 3 && s.adjusted_at == SECONDS(90));
    CHECK(s.checkpointed == 9);
}

/* If the clock jumps back, nothing is due. */
TEST(time_may_go_back)
{
    make(0, 0.8);
    CHECK(!mls_strategy_is_due(&s, -MLS_MAX_TICKS));
    mls_strategy_adjust(&s, -MLS_MAX_TICKS, 100, 100);
    CHECK(s.interval == 2);
    mls_strategy_reset(&s, -MLS_MAX_TICKS);
    CHECK(mls_strategy_is_due(&s, MLS_MAX_TICKS));
}

/* ---- smart ---- */

TEST(smart_collects_first)
{
    make(0, 1);
    char name[16];
    for (int i = 0; i <= 10; i++) {
        snprintf(name, sizeof name, "l%d", i);
        CHECK(!ask(mls_decide_smart, name, 100, i) && s.collecting);
    }
    CHECK(!ask(mls_decide_smart, "l11", 100, 11) &&
          !s.collecting); /* nor does the call that ends it */
    CHECK(s.seen.count == 12 && s.total_bytes == 1200);
    CHECK(ask(mls_decide_smart, "new", 100, 0)); /* seen once */
}

TEST(smart_has_three_reasons)
{
    make(0, 1);
    CHECK(!ask(mls_decide_smart, "a", 100, 11));
    CHECK(ask(mls_decide_smart, "b", 100, 0)); /* first call: infrequent */
    CHECK(ask(mls_decide_smart, "big", 1000, 0));
    CHECK(ask(mls_decide_smart, "big", 1,
              0)); /* large: the first size counts; average 400 */
    CHECK(s.total_bytes == 1200);
    CHECK(!ask(mls_decide_smart, "a", 100, 2)); /* 2 > 2.1 is false */
    CHECK(ask(mls_decide_smart, "a", 100, 3));  /* late in the network */
    CHECK(ask(mls_decide_smart, "a", 100, INT64_MAX));
    CHECK(!ask(mls_decide_smart, "b", 100, 0));
    mls_strategy_reset(&s, 0);
    CHECK(s.seen.count == 0 && s.total_bytes == 0 && s.collecting);
    CHECK(!ask(mls_decide_smart, "a", 100, 0));
}

TEST(smart_excludes_but_counts)
{
    make(0, 1);
    mark("out", MLS_LAYER_EXCLUDE);
    CHECK(!ask(mls_decide_smart, "out", 1000, 11));
    CHECK(!ask(mls_decide_smart, "out", 1000, 50));
    CHECK(s.seen.count == 1 && s.seen.layers[0].calls == 2 && s.total_bytes == 1000);
    mls_strategy_reset(&s, 0);
    CHECK(!ask(mls_decide_smart, "x", 10, 11) && !ask(mls_decide_smart, "out", 1000, 50));
}

TEST(smart_takes_empty_activations)
{
    make(0, 1);
    CHECK(!ask(mls_decide_smart, "a", 0, 11) && ask(mls_decide_smart, "b", 0, 0));
    CHECK(!ask(mls_decide_smart, "a", 0, 0)); /* 0 > 0 is false */
}

TEST(smart_refuses_a_sum_beyond_memory)
{
    make(0, 1);
    CHECK(!ask(mls_decide_smart, "a", SIZE_MAX, 0));
    const mls_layer_key b = named("b");
    const mls_layer_question q = {b, 1, 99};
    CHECK(mls_decide_smart(&s, &q, &status) == -1 && status.code == MLS_E_SIZE);
    CHECK(s.seen.count == 1 && s.collecting && s.total_bytes == SIZE_MAX);
    CHECK(mls_strategy_restore_layer(&s, &b, 1, 1, &status) == MLS_E_SIZE);
}

TEST(smart_is_restored)
{
    make(0, 1);
    const mls_layer_key a = named("a"), b = named("b");
    CHECK(mls_strategy_restore_layer(&s, &a, 100, 4, &status) == MLS_OK);
    CHECK(mls_strategy_restore_layer(&s, &a, 100, 4, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.name, "a");
    CHECK(mls_strategy_restore_layer(&s, &b, 100, 0, &status) == MLS_E_VALUE);
    CHECK(s.seen.count == 1 && s.total_bytes == 100);
    s.collecting = false;
    CHECK(!ask(mls_decide_smart, "a", 5, 0) && s.seen.layers[0].calls == 5);
}

/* The rules of the source document, with its loops. */
static bool by_the_source(const size_t *sizes, const int *calls, int count, int layer,
                          int64_t index)
{
    long long sum = 0;
    for (int i = 0; i < count; i++) {
        sum += (long long)sizes[i];
    }
    const double average = (double)sum / count;
    return (double)sizes[layer] > average * 1.5 || calls[layer] < 2 ||
           (double)index > count * 0.7;
}

TEST(smart_decides_as_the_source)
{
    enum { LAYERS = 40, TURNS = 4000 };
    size_t sizes[LAYERS] = {0};
    int calls[LAYERS] = {0}, place[LAYERS], count = 0;
    uint32_t random = 1;
    make(0, 1);
    char name[16];
    CHECK(!ask(mls_decide_smart, "first", 50, 11));
    sizes[0] = 50;
    calls[0] = 1;
    count = 1;
    for (int i = 0; i < LAYERS; i++) {
        place[i] = -1;
    }
    for (int turn = 0; turn < TURNS; turn++) {
        random = random * 1664525U + 1013904223U;
        const int layer = (int)(random >> 16) % (LAYERS - 1);
        const size_t bytes = (random >> 8) % 1000;
        const int64_t index = (random >> 4) % 60;
        if (place[layer] < 0) {
            place[layer] = count;
            sizes[count++] = bytes;
        }
        calls[place[layer]]++;
        snprintf(name, sizeof name, "l%d", layer);
        CHECK(ask(mls_decide_smart, name, bytes, index) ==
              by_the_source(sizes, calls, count, place[layer], index));
    }
    CHECK(count == LAYERS);
}
