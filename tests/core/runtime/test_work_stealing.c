/* Work queues: which thread gets which item, and that each item is done once. */
#include "runtime/work_stealing.h"
#include "support/runner.h"

#include <pthread.h>
#include <stdint.h>

enum { STRETCHES = 40, THREADS = 4 };

TEST(thread_takes_its_queue_in_order)
{
    static const size_t starts[] = {0, 3, 6};
    static const size_t expected[][2] = {{0, 0}, {1, 3}, {0, 1}, {1, 4}, {1, 5}, {0, 2}};
    mls_work_queues all;
    size_t queues[2] = {SIZE_MAX, SIZE_MAX}, item;
    REQUIRE(mls_work_queues_init(&all, starts, 2));
    for (size_t i = 0; i < 6; i++) {
        CHECK(mls_work_queues_take(&all, &queues[expected[i][0]], &item));
        CHECK(item == expected[i][1]);
    }
    CHECK(!mls_work_queues_take(&all, &queues[0], &item));
    CHECK(!mls_work_queues_take(&all, &queues[1], &item));
    mls_work_queues_fini(&all);
}

TEST(idle_thread_steals_work)
{
    static const size_t starts[] = {0, 4, 4, 5};
    mls_work_queues all;
    size_t first = SIZE_MAX, second = SIZE_MAX, item;
    REQUIRE(mls_work_queues_init(&all, starts, 3));
    CHECK(mls_work_queues_take(&all, &first, &item) && item == 0);
    CHECK(mls_work_queues_take(&all, &second, &item) &&
          item == 4); /* not the empty queue */
    CHECK(mls_work_queues_take(&all, &second, &item) && item == 1 && second == 0);
    CHECK(mls_work_queues_take(&all, &first, &item) && item == 2);
    CHECK(mls_work_queues_take(&all, &second, &item) && item == 3);
    CHECK(!mls_work_queues_take(&all, &first, &item));
    mls_work_queues_fini(&all);
}

TEST(empty_queues_have_no_work)
{
    static const size_t starts[] = {0, 0, 0};
    for (size_t count = 0; count < 3; count++) {
        mls_work_queues all;
        size_t queue = SIZE_MAX, item;
        REQUIRE(mls_work_queues_init(&all, starts, count));
        CHECK(!mls_work_queues_take(&all, &queue, &item));
        CHECK(!mls_work_queues_take(&all, &queue, &item));
        mls_work_queues_fini(&all);
    }
}

/* Plain memory: ThreadSanitizer reports an item that is handed out twice. */
typedef struct stealing_case {
    mls_work_queues all;
    int done[STRETCHES * (STRETCHES - 1) / 2];
} stealing_case;

static void *work(void *argument)
{
    stealing_case *y = argument;
    size_t queue = SIZE_MAX, item;
    while (mls_work_queues_take(&y->all, &queue, &item)) {
        y->done[item]++;
    }
    return NULL;
}

TEST(each_item_is_taken_once)
{
    static stealing_case y;
    size_t starts[STRETCHES + 1] = {0};
    pthread_t threads[THREADS];
    for (size_t i = 0; i < STRETCHES; i++) {
        starts[i + 1] = starts[i] + i;
    }
    REQUIRE(mls_work_queues_init(&y.all, starts, STRETCHES));
    for (size_t i = 0; i < THREADS; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, work, &y) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    for (size_t i = 0; i < starts[STRETCHES]; i++) {
        CHECK(y.done[i] == 1);
    }
    mls_work_queues_fini(&y.all);
}
