/* The choice of store instructions, with injected timings and with real copies. */
#include "array/copy/copy.h"
#include "crc32c/crc32c.h"
#include "runtime/cpu_features.h"
#include "support/runner.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    ALL = (1U << MLS_STORES) - 1, /* every variant */
    CACHED = 3,                   /* plain stores and the loop */
    MIB = 1 << 20,
    LARGE = 24 * MIB,
    THREADS = 4
};

/* Times of a trial by variant, in nanoseconds; the number of bytes is constant. */
typedef struct trial_times {
    uint64_t plain, loop, stream;
} trial_times;

static uint64_t time_of(const trial_times *times, mls_store store)
{
    const uint64_t all[] = {times->plain, times->loop, times->stream};
    return all[store];
}

static mls_store_choice undecided(void)
{
    mls_store_choices choices;
    mls_status st;
    CHECK(mls_store_choices_init(&choices, NULL, &st) == MLS_OK);
    return choices.choice[MLS_STORING_COPY][MLS_STORING_PAST][0];
}

/* Run trials until the choice is made; every fourth one takes `noise` times as long.
 * Returns the number of trials, or 0 if they do not end. */
static unsigned decide(mls_store_choice *choice, const trial_times *times,
                       unsigned variants, uint64_t noise)
{
    for (unsigned trial = 1; trial < 100; trial++) {
        const mls_store store = mls_store_next(choice, variants);
        const uint64_t slower = trial % 4 == 0 ? noise : 1;
        mls_store_count(choice, variants, store, MIB, time_of(times, store) * slower);
        if (atomic_load(&choice->is_decided)) {
            return trial;
        }
    }
    return 0;
}

TEST(fastest_variant_is_chosen)
{
    static const struct {
        trial_times times;
        uint64_t noise;
        mls_store expected;
    } cases[] = {
        {{50, 100, 100}, 1, MLS_STORE_CACHED},
        {{100, 60, 100}, 1, MLS_STORE_LOOP},
        {{100, 100, 60}, 1, MLS_STORE_STREAM},
        /* a tie selects the simpler variant */
        {{100, 100, 100}, 1, MLS_STORE_CACHED},
        {{100, 96, 96}, 1, MLS_STORE_CACHED},
        {{100, 90, 88}, 1, MLS_STORE_LOOP},
        /* every fourth trial is preempted: it takes a hundred times as long */
        {{100, 110, 60}, 100, MLS_STORE_STREAM},
        /* the clock is stopped */
        {{0, 0, 0}, 1, MLS_STORE_CACHED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mls_store_choice choice = undecided();
        CHECK(decide(&choice, &cases[i].times, ALL, cases[i].noise) > 0);
        CHECK(atomic_load(&choice.chosen) == (int)cases[i].expected);
    }
}

TEST(slow_variant_is_dropped_before_the_others)
{
    const trial_times times = {100, 500, 90};
    mls_store_choice choice = undecided();
    CHECK(decide(&choice, &times, ALL, 1) > 0);
    CHECK(atomic_load(&choice.counted[MLS_STORE_LOOP]) < MLS_STORE_TRIALS);
    CHECK(atomic_load(&choice.chosen) == MLS_STORE_STREAM);
}

/* The first copy went to memory that the system had just cleared, where plain stores win.
 * After some copies the choice is made again. */
TEST(choice_is_repeated_after_some_bytes)
{
    mls_store_choices choices;
    const trial_times cleared = {50, 100, 100}, usual = {100, 100, 60};
    const mls_destination large = {.bytes = SIZE_MAX};
    REQUIRE(mls_store_choices_init(&choices, NULL, &status) == MLS_OK);
    mls_store_choice *choice = &choices.choice[MLS_STORING_COPY][MLS_STORING_PAST][0];
    CHECK(decide(choice, &cleared, ALL, 1) > 0);
    CHECK(atomic_load(&choice->chosen) == MLS_STORE_CACHED);
    mls_store_trial trial;
    for (size_t stored = 0; stored <= MLS_STORE_FIRST_LASTS; stored += MIB) {
        trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, large, MIB);
        CHECK((trial.choice != NULL) == (stored == MLS_STORE_FIRST_LASTS));
    }
    /* a copy too short for a trial uses the previous decision */
    CHECK(mls_store_begin(&choices, MLS_STORING_COPY, ALL, large, 99).choice == NULL);
    CHECK(decide(choice, &usual, ALL, 1) > 0);
    CHECK(atomic_load(&choice->chosen) == MLS_STORE_STREAM);
    trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, large, MLS_STORE_LASTS - 99);
    CHECK(trial.choice == NULL && trial.store == MLS_STORE_STREAM);
    trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, large, 99);
    CHECK(trial.choice == NULL && trial.store == MLS_STORE_STREAM);
    trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, large, MIB);
    CHECK(trial.choice == choice);
}

/* A trial whose thread did not survive a fork never ends; another one replaces it. */
TEST(lost_trials_are_replaced)
{
    const trial_times times = {100, 100, 50};
    mls_store_choice choice = undecided();
    for (int i = 0; i < 40; i++) {
        (void)mls_store_next(&choice, ALL);
    }
    CHECK(decide(&choice, &times, ALL, 1) > 0);
    CHECK(atomic_load(&choice.chosen) == MLS_STORE_STREAM);
}

TEST(the_environment_forces_a_variant)
{
    mls_store_choices choices;
    const mls_destination large = {.bytes = LARGE};
    for (unsigned store = 0; store < MLS_STORES; store++) {
        const char *const name = mls_store_name((mls_store)store);
        REQUIRE(mls_store_choices_init(&choices, name, &status) == MLS_OK);
        for (unsigned variants = 1; variants <= ALL; variants += 2) {
            const mls_store_trial trial =
                mls_store_begin(&choices, MLS_STORING_FILL, variants, large, LARGE);
            const unsigned other = variants & MLS_STORE_BIT(MLS_STORE_LOOP);
            const bool is_offered = (variants & MLS_STORE_BIT(store)) != 0;
            CHECK(trial.choice == NULL && trial.left == SIZE_MAX);
            CHECK(trial.store == (is_offered ? store : other / 2));
        }
    }
    CHECK(mls_store_choices_init(&choices, "stream4", &status) == MLS_OK);
    CHECK(choices.forced == MLS_STORE_STREAM && choices.is_replaced);
    CHECK(mls_store_choices_init(&choices, "auto", &status) == MLS_OK &&
          choices.forced < 0);
    CHECK(mls_store_choices_init(&choices, "", &status) == MLS_OK && choices.forced < 0);
    CHECK_FAILS(mls_store_choices_init(&choices, "streams", &status), MLS_E_VALUE,
                "copy strategy 'streams' does not exist; choose one of: plain, loop, "
                "stream1, auto");
    CHECK(choices.forced < 0 && !choices.is_replaced);
}

/* The same, after the decision expired. */
static unsigned decide_again(mls_store_choice *choice, const trial_times *times,
                             unsigned variants)
{
    atomic_store(&choice->is_decided, false);
    for (int store = 0; store < MLS_STORES; store++) {
        atomic_store(&choice->counted[store], 0);
        atomic_store(&choice->rate[store], 0);
    }
    return decide(choice, times, variants, 1);
}

/* Streaming evicts data that are read next, so within the last level it must win by a
 * quarter, twice in succession.
 */
TEST(stream_needs_two_large_wins_for_cacheable_results)
{
    const trial_times by_a_fifth = {120, 120, 100}, by_a_third = {133, 133, 100};
    mls_store_choices choices;
    REQUIRE(mls_store_choices_init(&choices, NULL, &status) == MLS_OK);
    mls_store_choice(*some)[2] = choices.choice[MLS_STORING_COPY];
    CHECK(decide(&some[MLS_STORING_WITHIN][0], &by_a_fifth, ALL, 1) > 0);
    CHECK(decide(&some[MLS_STORING_WITHIN][1], &by_a_third, ALL, 1) > 0);
    CHECK(decide(&some[MLS_STORING_PAST][0], &by_a_fifth, ALL, 1) > 0);
    CHECK(atomic_load(&some[MLS_STORING_PAST][0].chosen) == MLS_STORE_STREAM);
    CHECK(atomic_load(&some[MLS_STORING_WITHIN][0].chosen) == MLS_STORE_CACHED);
    CHECK(atomic_load(&some[MLS_STORING_WITHIN][1].chosen) == MLS_STORE_CACHED);
    CHECK(decide_again(&some[MLS_STORING_WITHIN][0], &by_a_third, ALL) > 0);
    CHECK(decide_again(&some[MLS_STORING_WITHIN][1], &by_a_third, ALL) > 0);
    CHECK(atomic_load(&some[MLS_STORING_WITHIN][0].chosen) == MLS_STORE_CACHED);
    CHECK(atomic_load(&some[MLS_STORING_WITHIN][1].chosen) == MLS_STORE_STREAM);
    CHECK(decide_again(&some[MLS_STORING_WITHIN][1], &by_a_fifth, ALL) > 0);
    CHECK(atomic_load(&some[MLS_STORING_WITHIN][1].chosen) == MLS_STORE_CACHED);
}

/* Cached stores to lines that streaming evicted do not measure cached stores fairly. */
TEST(in_cache_trials_count_the_second_store)
{
    enum { PAIR = 5 }; /* plain and past the cache, as fills have */
    static const struct {
        mls_store store;
        bool counts;
    } expected[] = {{MLS_STORE_CACHED, false}, {MLS_STORE_CACHED, true},
                    {MLS_STORE_STREAM, false}, {MLS_STORE_STREAM, true},
                    {MLS_STORE_CACHED, false}, {MLS_STORE_CACHED, true}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        bool counts[2];
        CHECK(mls_store_turn(i * MIB, MIB, PAIR, &counts[0]) == expected[i].store);
        CHECK(mls_store_turn(i * MIB + MIB - 1, MIB, PAIR, &counts[1]) ==
              expected[i].store);
        CHECK(counts[0] == expected[i].counts && counts[1] == expected[i].counts);
    }
    mls_store_choices choices;
    REQUIRE(mls_store_choices_init(&choices, NULL, &status) == MLS_OK);
    choices.least[MLS_STORING_WITHIN] = MIB;
    choices.least[MLS_STORING_WITHIN_4X] = 4 * MIB;
    choices.least[MLS_STORING_PAST] = 64 * MIB;
    const mls_destination d = {.bytes = 2 * MIB};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        for (int half = 0; half < 2; half++) {
            mls_store_trial trial =
                mls_store_begin(&choices, MLS_STORING_FILL, PAIR, d, MIB);
            REQUIRE(trial.choice != NULL);
            CHECK(trial.store == expected[i].store && trial.counts == expected[i].counts);
        }
    }
}

/* A last level of 480 MiB, shared with other machines, does not decide alone. */
TEST(a_large_cache_is_measured_too)
{
    mls_store_choices choices;
    REQUIRE(mls_store_choices_init(&choices, NULL, &status) == MLS_OK);
    const size_t past = choices.least[MLS_STORING_PAST];
    const size_t within = choices.least[MLS_STORING_WITHIN];
    CHECK(past == choices.cache_bytes / 2);
    CHECK(within ==
          (4 * mls_cpu_cache_bytes(2) < past ? 4 * mls_cpu_cache_bytes(2) : past));
    for (int size = MLS_STORING_WITHIN_4X; size < MLS_STORING_PAST; size++) {
        const size_t more = 4 * choices.least[size - 1];
        CHECK(choices.least[size] == (more < past ? more : past));
    }
}

TEST(results_are_measured_by_their_size_and_their_pages)
{
    mls_store_choices choices;
    REQUIRE(mls_store_choices_init(&choices, NULL, &status) == MLS_OK);
    choices.least[MLS_STORING_WITHIN] = 2 * MIB;
    choices.least[MLS_STORING_WITHIN_4X] = 4 * MIB;
    choices.least[MLS_STORING_WITHIN_16X] = 4 * MIB;
    choices.least[MLS_STORING_PAST] = 4 * MIB;
    mls_destination d = {.bytes = 4 * MIB - 1};
    CHECK(mls_store_begin(&choices, MLS_STORING_COPY, ALL, d, MIB).choice ==
          &choices.choice[MLS_STORING_COPY][MLS_STORING_WITHIN][0]);
    d.bytes = 2 * MIB - 1;
    mls_store_trial trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, d, MIB);
    CHECK(trial.choice == &choices.choice[MLS_STORING_COPY][MLS_STORING_SMALL_8X][0]);
    d.bytes = 4 * MIB;
    trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, d, MIB);
    CHECK(trial.choice == &choices.choice[MLS_STORING_COPY][MLS_STORING_PAST][0]);
    CHECK(trial.left == MLS_STORE_TRIAL_BYTES);
    d.is_fresh = true;
    trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, d, MIB);
    CHECK(trial.choice == &choices.choice[MLS_STORING_COPY][MLS_STORING_PAST][1]);
    /* too short to be timed, before the first decision */
    trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, d, 4096);
    CHECK(trial.choice == NULL && trial.store == MLS_STORE_LOOP);
    CHECK(mls_store_begin(NULL, MLS_STORING_COPY, ALL, d, MIB).choice == NULL);
    d.bytes = MLS_STORE_LEAST - 1;
    trial = mls_store_begin(&choices, MLS_STORING_COPY, ALL, d, d.bytes);
    CHECK(trial.choice == NULL && trial.store == MLS_STORE_LOOP);
}

/* Fills have one way to store in the cache, copies have two. */
TEST(small_copies_compare_the_loop_with_memcpy)
{
    mls_store_choices choices;
    const mls_destination d = {.bytes = MLS_STORE_LEAST};
    const size_t bytes = MLS_STORE_LEAST;
    REQUIRE(mls_store_choices_init(&choices, NULL, &status) == MLS_OK);
    mls_store_choice *choice = &choices.choice[MLS_STORING_COPY][MLS_STORING_SMALL][0];
    CHECK(mls_store_begin(&choices, MLS_STORING_FILL, 5, d, bytes).choice == NULL);
    CHECK(mls_store_begin(&choices, MLS_STORING_COPY, ALL, d, bytes).choice == choice);
    const trial_times times[] = {{100, 120, 1}, {100, 95, 1}, {100, 80, 1}};
    const mls_store expected[] = {MLS_STORE_CACHED, MLS_STORE_CACHED, MLS_STORE_LOOP};
    for (int i = 0; i < 3; i++) {
        CHECK(decide_again(choice, &times[i], CACHED) > 0);
        CHECK(atomic_load(&choice->chosen) == (int)expected[i]);
        const mls_store_trial trial =
            mls_store_begin(&choices, MLS_STORING_COPY, ALL, d, bytes);
        CHECK(trial.choice == NULL && trial.store == expected[i]);
    }
}

/* Sources that were not cached make the first trials slow. */
TEST(slow_first_trials_do_not_exclude_a_small_copy)
{
    mls_store_choices choices;
    REQUIRE(mls_store_choices_init(&choices, NULL, &status) == MLS_OK);
    mls_store_choice *choice = &choices.choice[MLS_STORING_COPY][MLS_STORING_SMALL][0];
    for (int i = 0; i < 2; i++) {
        mls_store_count(choice, CACHED, MLS_STORE_LOOP, MIB, 900);
        mls_store_count(choice, CACHED, MLS_STORE_CACHED, MIB, 100);
    }
    const trial_times times = {100, 50, 0};
    CHECK(decide(choice, &times, CACHED, 1) > 0);
    CHECK(atomic_load(&choice->chosen) == MLS_STORE_LOOP);
}

/* The copies of several threads at the same time, with one set of choices. */
typedef struct worker {
    const mls_kernels *kernels;
    unsigned char *to;
    const unsigned char *from;
    size_t bytes;
} worker;

static void *copy_part(void *argument)
{
    const worker *w = argument;
    mls_copy_bytes(w->kernels, w->to, w->from, w->bytes,
                   (mls_destination){.bytes = LARGE});
    return NULL;
}

/* Copy by threads to an unaligned address; returns whether the bytes arrived. */
static bool copy_by_threads(const mls_kernels *kernels, unsigned char *to,
                            const unsigned char *from)
{
    pthread_t threads[THREADS];
    worker workers[THREADS];
    const size_t part = (LARGE - 64) / THREADS;
    memset(to, 0xA5, LARGE);
    for (size_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){kernels, to + 13 + i * part, from + i * part, part};
        CHECK(pthread_create(&threads[i], NULL, copy_part, &workers[i]) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    return memcmp(to + 13, from, THREADS * part) == 0 && to[12] == 0xA5 &&
           to[13 + THREADS * part] == 0xA5;
}

TEST(threads_share_a_choice_and_copy_every_byte)
{
    unsigned char *to = malloc(LARGE), *from = malloc(LARGE);
    REQUIRE(to != NULL && from != NULL);
    for (size_t i = 0; i < LARGE; i++) {
        from[i] = (unsigned char)(i * 2654435761U >> 24);
    }
    for (int cpu = 0; cpu < MLS_CPU_COUNT; cpu++) {
        static mls_store_choices choices;
        if (!mls_cpu_offers((mls_cpu)cpu)) {
            continue;
        }
        REQUIRE(mls_store_choices_init(&choices, "auto", &status) == MLS_OK);
        choices.least[MLS_STORING_PAST] = MIB;
        mls_kernels kernels = *mls_kernels_of((mls_cpu)cpu);
        kernels.choices = &choices;
        CHECK(copy_by_threads(&kernels, to, from));
        const int chosen =
            atomic_load(&choices.choice[MLS_STORING_COPY][MLS_STORING_PAST][0].chosen);
        CHECK(kernels.copy_variants == 1 ? chosen < 0
                                         : chosen >= 0 && chosen < MLS_STORES);
        CHECK(copy_by_threads(&kernels, to, from));
    }
    free(to);
    free(from);
}

/* A checksum over several trials equals the checksum of one pass. */
TEST(checksum_continues_across_trials)
{
    unsigned char *to = malloc(LARGE), *from = calloc(LARGE, 1);
    REQUIRE(to != NULL && from != NULL);
    for (size_t i = 0; i < LARGE; i += 11) {
        from[i] = (unsigned char)(i >> 5);
    }
    mls_cpu cpu;
    static mls_store_choices choices;
    REQUIRE(mls_cpu_choose(NULL, &cpu, &status) == MLS_OK);
    REQUIRE(mls_store_choices_init(&choices, NULL, &status) == MLS_OK);
    const mls_crc_kernels *crc = mls_crc_of(cpu);
    const uint32_t expected = crc->update(7, from, LARGE - 3);
    CHECK(mls_crc_copy(crc, &choices, 7, to + 1, from, LARGE - 3,
                       (mls_destination){.bytes = SIZE_MAX}) == expected);
    CHECK(memcmp(to + 1, from, LARGE - 3) == 0);
    CHECK(mls_crc_copy(crc, NULL, 7, to, from, LARGE - 3, mls_cached()) == expected);
    free(to);
    free(from);
}
