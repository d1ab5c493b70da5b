/* Items made in order, while other threads use them. */
#include "runtime/ready_counter.h"
#include "support/runner.h"

#include <pthread.h>
#include <stdint.h>

enum { THINGS = 2000, READERS = 4 };

/* Plain memory: ThreadSanitizer reports any use before the counter allows it. */
typedef struct factory {
    mls_ready_counter counter;
    size_t things[THINGS];
    size_t sums[READERS];
} factory;

typedef struct reader {
    factory *from;
    size_t number;
} reader;

static void *add_up(void *argument)
{
    const reader *r = argument;
    for (size_t i = 0; i < THINGS; i++) {
        mls_ready_counter_wait(&r->from->counter, i + 1);
        r->from->sums[r->number] += r->from->things[i];
    }
    return NULL;
}

TEST(wait_returns_after_items_are_ready)
{
    static factory f;
    pthread_t threads[READERS];
    reader readers[READERS];
    mls_ready_counter_init(&f.counter);
    for (size_t i = 0; i < READERS; i++) {
        readers[i] = (reader){&f, i};
        REQUIRE(pthread_create(&threads[i], NULL, add_up, &readers[i]) == 0);
    }
    for (size_t i = 0; i < THINGS; i++) {
        f.things[i] = i + 1;
        if (i % 16 == 15) {
            mls_ready_counter_advance(&f.counter, i + 1);
        }
    }
    mls_ready_counter_advance(&f.counter, THINGS);
    for (size_t i = 0; i < READERS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(f.sums[i] == (size_t)THINGS * (THINGS + 1) / 2);
    }
    mls_ready_counter_fini(&f.counter);
}

TEST(wait_for_zero_or_finished_counter_returns_at_once)
{
    mls_ready_counter counter;
    mls_ready_counter_init(&counter);
    mls_ready_counter_wait(&counter, 0);
    mls_ready_counter_advance(&counter, SIZE_MAX);
    mls_ready_counter_wait(&counter, THINGS);
    mls_ready_counter_wait(&counter, SIZE_MAX);
    mls_ready_counter_fini(&counter);
    CHECK(atomic_load(&counter.produced) == SIZE_MAX);
}
