#include "runner.h"
#include "strategy.h"

#include <math.h>
#include <stdio.h>

static mls_layer_key named(const char *name)
{
    uint64_t hash = 7;
    for (const char *at = name; *at != '\0'; at++) {
        hash = hash * 31 + (unsigned char)*at;
    }
    return (mls_layer_key){.name = {name, strlen(name)}, .hash = hash};
}

/* ---- interval ---- */

static void interval_takes_every_nth(void)
{
    mls_interval s;
    mls_status st;
    REQUIRE(mls_interval_init(&s, 3, &st) == MLS_OK);
    for (int64_t i = 0; i < 30; i++) {
        CHECK(mls_interval_decide(&s, i) == (i % 3 == 0));
    }
    CHECK(s.checkpointed == 10 && s.interval == 3);
}

static void interval_knows_huge_numbers(void)
{
    static const int64_t intervals[] = {1,        2, 7, INT64_C(1) << 32, INT64_MAX - 1,
                                        INT64_MAX};
    static const int64_t indexes[] = {
        0,        UINT32_MAX, INT64_C(1) << 32, (INT64_C(1) << 33) + 1, INT64_MAX - 1,
        INT64_MAX};
    mls_status st;
    for (size_t i = 0; i < 6; i++) {
        for (size_t k = 0; k < 6; k++) {
            mls_interval s;
            REQUIRE(mls_interval_init(&s, intervals[i], &st) == MLS_OK);
            CHECK(mls_interval_decide(&s, indexes[k]) ==
                  (indexes[k] % intervals[i] == 0));
        }
    }
}

static void interval_refuses_nought_and_less(void)
{
    mls_interval s = {.interval = 5};
    mls_status st;
    CHECK(mls_interval_init(&s, 0, &st) == MLS_E_VALUE);
    CHECK_TEXT(st.text, "interval must be greater than 0, got 0");
    CHECK(mls_interval_init(&s, INT64_MIN, &st) == MLS_E_VALUE);
    CHECK(s.interval == 5);
}

/* ---- selective ---- */

static void selective_takes_what_is_marked(void)
{
    mls_selective s = {0};
    mls_status st;
    const mls_layer_key a = named("a"), b = named("b"), c = named("c");
    CHECK(!mls_selective_decide(&s, &a));
    REQUIRE(mls_layer_set_mark(&s.layers, &a, MLS_LAYER_CHECKPOINT, &st) == MLS_OK);
    REQUIRE(mls_layer_set_mark(&s.layers, &b, MLS_LAYER_EXCLUDE, &st) == MLS_OK);
    CHECK(mls_selective_decide(&s, &a));
    CHECK(!mls_selective_decide(&s, &b));
    CHECK(!mls_selective_decide(&s, &c) && s.layers.count == 2);
    mls_layer_table_fini(&s.layers);
}

/* ---- size based ---- */

static void size_based_takes_what_is_large(void)
{
    mls_size_based s;
    mls_status st;
    const mls_layer_key a = named("a"), b = named("b");
    REQUIRE(mls_size_based_init(&s, 1000, &st) == MLS_OK);
    REQUIRE(mls_layer_set_mark(&s.excluded, &b, MLS_LAYER_EXCLUDE, &st) == MLS_OK);
    CHECK(!mls_size_based_excludes(&s, &a) && mls_size_based_excludes(&s, &b));
    CHECK(!mls_size_based_decide(&s, 0) && !mls_size_based_decide(&s, 999));
    CHECK(mls_size_based_decide(&s, 1000) && mls_size_based_decide(&s, SIZE_MAX));
    CHECK(s.checkpointed == 2);
    mls_layer_table_fini(&s.excluded);
}

static void size_based_refuses_nought_and_less(void)
{
    mls_size_based s = {.min_bytes = 5};
    mls_status st;
    CHECK(mls_size_based_init(&s, 0, &st) == MLS_E_VALUE);
    CHECK(mls_size_based_init(&s, -3, &st) == MLS_E_VALUE);
    CHECK_TEXT(st.text, "min_size_bytes must be greater than 0, got -3");
    CHECK(s.min_bytes == 5);
}

/* ---- memory aware ---- */

#define SECONDS(n) ((int64_t)((n) * 1e7))

static mls_memory_aware aware(double share)
{
    mls_memory_aware s = {0};
    mls_status st;
    CHECK(mls_memory_aware_init(&s, share, SECONDS(100), &st) == MLS_OK);
    return s;
}

static void pressure_moves_the_interval(void)
{
    mls_memory_aware s = aware(0.8);
    CHECK(s.interval == 2);
    CHECK(!mls_memory_aware_is_due(&s, SECONDS(110) - 1));
    mls_memory_aware_adjust(&s, SECONDS(110) - 1, 100, 100);
    CHECK(s.interval == 2 && s.adjusted_at == SECONDS(100));
    CHECK(mls_memory_aware_is_due(&s, SECONDS(110)));
    mls_memory_aware_adjust(&s, SECONDS(110), 81, 100); /* high */
    CHECK(s.interval == 1 && s.high == 1 && s.adjusted_at == SECONDS(110));
    mls_memory_aware_adjust(&s, SECONDS(120), 100, 100); /* no lower than 1 */
    CHECK(s.interval == 1 && s.high == 2);
    mls_memory_aware_adjust(&s, SECONDS(130), 63, 100); /* low, too soon after high */
    CHECK(s.interval == 1 && s.high == 2 && s.adjusted_at == SECONDS(130));
    mls_memory_aware_adjust(&s, SECONDS(160), 63, 100); /* 30 seconds are not enough */
    CHECK(s.interval == 1);
    mls_memory_aware_adjust(&s, SECONDS(190) + 1, 63, 100); /* and one tick more is */
    CHECK(s.interval == 2 && s.high == 2);
    mls_memory_aware_adjust(&s, SECONDS(201), 70, 100); /* between: calm again */
    CHECK(s.interval == 2 && s.high == 0);
    for (int i = 0; i < 12; i++) {
        mls_memory_aware_adjust(&s, SECONDS(211 + 10 * i), 1, 100);
    }
    CHECK(s.interval == 10); /* no higher */
    mls_memory_aware_reset(&s, SECONDS(400));
    CHECK(s.interval == 2 && s.high == 0 && s.adjusted_at == SECONDS(400));
}

static void the_share_is_a_float(void)
{
    /* 0.8 as a float32 lies above 0.8: a pressure of exactly 0.8 is not above it */
    mls_memory_aware s = aware(0.8);
    mls_memory_aware_adjust(&s, SECONDS(110), 80, 100);
    CHECK(s.interval == 2 && s.high == 0);
    mls_memory_aware_adjust(&s, SECONDS(120), 800001, 1000000);
    CHECK(s.interval == 1);
    /* a used size that float32 rounds to the total is no more than all of it */
    s = aware(1.0);
    mls_memory_aware_adjust(&s, SECONDS(110), UINT64_MAX, UINT64_MAX - 1);
    CHECK(s.interval == 2 && s.high == 0);
}

static void memory_aware_decides_by_its_interval(void)
{
    mls_memory_aware s = aware(0.5);
    CHECK(mls_memory_aware_decide(&s, 0) && !mls_memory_aware_decide(&s, 1));
    CHECK(!mls_memory_aware_decide(&s, INT64_MAX));
    mls_memory_aware_adjust(&s, SECONDS(110), 60, 100);
    CHECK(mls_memory_aware_decide(&s, 1) && mls_memory_aware_decide(&s, INT64_MAX));
}

static void memory_aware_refuses_no_share(void)
{
    static const double bad[] = {0, -0.5, 1.001, 1e-60, NAN, INFINITY, -INFINITY};
    mls_memory_aware s = {.interval = 77};
    mls_status st;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(mls_memory_aware_init(&s, bad[i], 0, &st) == MLS_E_VALUE);
    }
    CHECK(mls_memory_aware_init(&s, 1.001, 0, &st) == MLS_E_VALUE);
    CHECK_TEXT(st.text, "max_memory_percentage must be above 0 and at most 1, got 1.001");
    CHECK(s.interval == 77);
}

static void ticks_are_tenths_of_microseconds(void)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY, 1e12, -1e12};
    int64_t ticks = 5;
    mls_status st;
    CHECK(mls_ticks_from_seconds(0.3, &ticks, &st) == MLS_OK && ticks == 3000000);
    CHECK(mls_ticks_from_seconds(-1.5, &ticks, &st) == MLS_OK && ticks == -15000000);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(mls_ticks_from_seconds(bad[i], &ticks, &st) == MLS_E_VALUE);
    }
    CHECK(ticks == -15000000);
    const int64_t before = mls_ticks_now();
    CHECK(mls_ticks_now() >= before);
}

static void memory_aware_is_restored(void)
{
    mls_memory_aware s = aware(0.8);
    mls_status st;
    CHECK(mls_memory_aware_restore(&s, 7, SECONDS(90), 3, &st) == MLS_OK);
    CHECK(s.interval == 7 && s.high == 3 && mls_memory_aware_is_due(&s, SECONDS(100)));
    CHECK(mls_memory_aware_restore(&s, 0, 0, 0, &st) == MLS_E_VALUE);
    CHECK(mls_memory_aware_restore(&s, 11, 0, 0, &st) == MLS_E_VALUE);
    CHECK(mls_memory_aware_restore(&s, 2, 0, -1, &st) == MLS_E_VALUE);
    CHECK(mls_memory_aware_restore(&s, 2, INT64_MAX, 0, &st) == MLS_E_VALUE);
    CHECK(mls_memory_aware_restore(&s, 2, INT64_MIN, 0, &st) == MLS_E_VALUE);
    CHECK(s.interval == 7 && s.high == 3 && s.adjusted_at == SECONDS(90));
}

/* A clock that goes back is a clock by which nothing is due. */
static void time_may_go_back(void)
{
    mls_memory_aware s = aware(0.8);
    CHECK(!mls_memory_aware_is_due(&s, -MLS_MAX_TICKS));
    mls_memory_aware_adjust(&s, -MLS_MAX_TICKS, 100, 100);
    CHECK(s.interval == 2);
    mls_memory_aware_reset(&s, -MLS_MAX_TICKS);
    CHECK(mls_memory_aware_is_due(&s, MLS_MAX_TICKS));
}

/* ---- smart ---- */

static bool ask(mls_smart *s, const char *name, size_t bytes, int64_t index)
{
    mls_status st;
    bool chosen = false;
    const mls_layer_key key = named(name);
    CHECK(mls_smart_decide(s, &key, bytes, index, &chosen, &st) == MLS_OK);
    return chosen;
}

static void smart_collects_first(void)
{
    mls_smart s = {0};
    char name[16];
    for (int i = 0; i <= 10; i++) {
        snprintf(name, sizeof name, "l%d", i);
        CHECK(!ask(&s, name, 100, i) && !s.ready);
    }
    CHECK(!ask(&s, "l11", 100, 11) && s.ready); /* the one that ends it neither */
    CHECK(s.layers.count == 12 && s.total_bytes == 1200);
    CHECK(ask(&s, "new", 100, 0)); /* seen once */
    mls_smart_fini(&s);
}

static void smart_has_three_reasons(void)
{
    mls_smart s = {0};
    CHECK(!ask(&s, "a", 100, 11));
    CHECK(ask(&s, "b", 100, 0)); /* first call: infrequent */
    CHECK(ask(&s, "big", 1000, 0));
    CHECK(ask(&s, "big", 1, 0)); /* large: the first size counts; average 400 */
    CHECK(s.total_bytes == 1200);
    CHECK(!ask(&s, "a", 100, 2)); /* 2 > 2.1 is false */
    CHECK(ask(&s, "a", 100, 3));  /* late in the network */
    CHECK(ask(&s, "a", 100, INT64_MAX));
    CHECK(!ask(&s, "b", 100, 0));
    mls_smart_reset(&s);
    CHECK(s.layers.count == 0 && s.total_bytes == 0 && !s.ready);
    CHECK(!ask(&s, "a", 100, 0));
    mls_smart_fini(&s);
}

static void smart_excludes_but_counts(void)
{
    mls_smart s = {0};
    mls_status st;
    const mls_layer_key out = named("out");
    REQUIRE(mls_layer_set_mark(&s.excluded, &out, MLS_LAYER_EXCLUDE, &st) == MLS_OK);
    CHECK(!ask(&s, "out", 1000, 11));
    CHECK(!ask(&s, "out", 1000, 50));
    CHECK(s.layers.count == 1 && s.layers.layers[0].calls == 2 && s.total_bytes == 1000);
    mls_smart_reset(&s);
    CHECK(!ask(&s, "x", 10, 11) && !ask(&s, "out", 1000, 50));
    mls_smart_fini(&s);
}

static void smart_takes_empty_activations(void)
{
    mls_smart s = {0};
    CHECK(!ask(&s, "a", 0, 11) && ask(&s, "b", 0, 0));
    CHECK(!ask(&s, "a", 0, 0)); /* 0 > 0 is false */
    mls_smart_fini(&s);
}

static void smart_refuses_a_sum_beyond_memory(void)
{
    mls_smart s = {0};
    mls_status st;
    bool chosen = true;
    CHECK(!ask(&s, "a", SIZE_MAX, 0));
    const mls_layer_key b = named("b");
    CHECK(mls_smart_decide(&s, &b, 1, 99, &chosen, &st) == MLS_E_SIZE);
    CHECK(chosen && s.layers.count == 1 && !s.ready && s.total_bytes == SIZE_MAX);
    CHECK(mls_smart_restore(&s, &b, 1, 1, &st) == MLS_E_SIZE);
    mls_smart_fini(&s);
}

static void smart_is_restored(void)
{
    mls_smart s = {0};
    mls_status st;
    const mls_layer_key a = named("a"), b = named("b");
    CHECK(mls_smart_restore(&s, &a, 100, 4, &st) == MLS_OK);
    CHECK(mls_smart_restore(&s, &a, 100, 4, &st) == MLS_E_VALUE);
    CHECK_TEXT(st.name, "a");
    CHECK(mls_smart_restore(&s, &b, 100, 0, &st) == MLS_E_VALUE);
    CHECK(s.layers.count == 1 && s.total_bytes == 100);
    s.ready = true;
    CHECK(!ask(&s, "a", 5, 0) && s.layers.layers[0].calls == 5);
    mls_smart_fini(&s);
}

/* The rules as the source has them, with its loops. */
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

static void smart_decides_as_the_source(void)
{
    enum { LAYERS = 40, TURNS = 4000 };
    size_t sizes[LAYERS] = {0};
    int calls[LAYERS] = {0}, place[LAYERS], count = 0;
    uint32_t random = 1;
    mls_smart s = {0};
    char name[16];
    CHECK(!ask(&s, "first", 50, 11));
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
        CHECK(ask(&s, name, bytes, index) ==
              by_the_source(sizes, calls, count, place[layer], index));
    }
    CHECK(count == LAYERS);
    mls_smart_fini(&s);
}

static const test_case tests[] = {
    TEST(interval_takes_every_nth),
    TEST(interval_knows_huge_numbers),
    TEST(interval_refuses_nought_and_less),
    TEST(selective_takes_what_is_marked),
    TEST(size_based_takes_what_is_large),
    TEST(size_based_refuses_nought_and_less),
    TEST(pressure_moves_the_interval),
    TEST(the_share_is_a_float),
    TEST(memory_aware_decides_by_its_interval),
    TEST(memory_aware_refuses_no_share),
    TEST(ticks_are_tenths_of_microseconds),
    TEST(memory_aware_is_restored),
    TEST(time_may_go_back),
    TEST(smart_collects_first),
    TEST(smart_has_three_reasons),
    TEST(smart_excludes_but_counts),
    TEST(smart_takes_empty_activations),
    TEST(smart_refuses_a_sum_beyond_memory),
    TEST(smart_is_restored),
    TEST(smart_decides_as_the_source),
};

int main(void)
{
    return RUN_TESTS(tests);
}
