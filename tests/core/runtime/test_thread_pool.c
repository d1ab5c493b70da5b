#include "runtime/thread_pool.h"
#include "support/runner.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MANY = 1000 };

static mls_pool *pool; /* of the current test */

AFTER_EACH
{
    mls_pool_free(pool);
    pool = NULL;
}

static void count_one(void *context, size_t index)
{
    atomic_int *counts = context;
    atomic_fetch_add(&counts[index], 1);
}

static bool all_once(mls_pool *of)
{
    static atomic_int counts[MANY];
    for (int i = 0; i < MANY; i++) {
        atomic_store(&counts[i], 0);
    }
    mls_pool_run(of, count_one, counts, MANY);
    for (int i = 0; i < MANY; i++) {
        if (atomic_load(&counts[i]) != 1) {
            return false;
        }
    }
    return true;
}

TEST(every_index_runs_once_at_any_size)
{
    static const size_t sizes[] = {1, 2, 5, 3, 1, MLS_POOL_MAX_THREADS};
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        CHECK(mls_pool_resize(pool, sizes[i], &status) == MLS_OK);
        CHECK(mls_pool_threads(pool) == sizes[i]);
        for (int round = 0; round < 20; round++) {
            CHECK(all_once(pool));
        }
    }
}

TEST(missing_pool_and_empty_work_are_accepted)
{
    CHECK(all_once(NULL));
    REQUIRE(mls_pool_new(2, &pool, &status) == MLS_OK);
    mls_pool_run(pool, count_one, NULL, 0);
    mls_pool_free(NULL);
}

TEST(impossible_thread_counts_are_refused)
{
    CHECK_FAILS(mls_pool_new(0, &pool, &status), MLS_E_VALUE,
                "0 threads: choose 1 to 64");
    CHECK(mls_pool_new(MLS_POOL_MAX_THREADS + 1, &pool, &status) == MLS_E_VALUE);
    CHECK(pool == NULL);
    REQUIRE(mls_pool_new(2, &pool, &status) == MLS_OK);
    CHECK(mls_pool_resize(pool, 0, &status) == MLS_E_VALUE);
    CHECK(mls_pool_threads(pool) == 2);
}

typedef struct shared_run {
    mls_pool *pool;
    atomic_int *total;
} shared_run;

static void add_to_total(void *context, size_t index)
{
    (void)index;
    atomic_fetch_add((atomic_int *)context, 1);
}

static void *run_often(void *argument)
{
    const shared_run *shared = argument;
    for (int i = 0; i < 50; i++) {
        mls_pool_run(shared->pool, add_to_total, shared->total, 100);
    }
    return NULL;
}

TEST(default_number_of_threads_is_small)
{
    CHECK(mls_pool_default_threads() >= 1 && mls_pool_default_threads() <= 4);
}

TEST(threads_may_share_a_pool)
{
    atomic_int total = 0;
    pthread_t threads[8];
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    shared_run shared = {pool, &total};
    for (int i = 0; i < 8; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, run_often, &shared) == 0);
    }
    for (int i = 0; i < 8; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK(atomic_load(&total) == 8 * 50 * 100);
}

/* The calling thread's own work, with or without helpers at work. */
typedef struct beside {
    pthread_t caller;
    bool waits; /* for a helper */
    atomic_int owns, tasks, early;
} beside;

static void own_work(void *context)
{
    beside *b = context;
    CHECK(pthread_equal(pthread_self(), b->caller));
    for (int i = 0; b->waits && i < 5000 && atomic_load(&b->tasks) == 0; i++) {
        usleep(1000);
    }
    atomic_store(&b->early, atomic_load(&b->tasks));
    atomic_fetch_add(&b->owns, 1);
}

static void count_task(void *context, size_t index)
{
    beside *b = context;
    (void)index;
    CHECK(atomic_load(&b->owns) == 1 || !pthread_equal(pthread_self(), b->caller));
    atomic_fetch_add(&b->tasks, 1);
}

TEST(workers_run_during_the_callers_function)
{
    static const size_t counts[] = {0, 1, MANY};
    REQUIRE(mls_pool_new(2, &pool, &status) == MLS_OK);
    for (size_t i = 0; i < 6; i++) {
        const size_t count = counts[i % 3];
        beside b = {.caller = pthread_self(), .waits = i < 3 && count > 1};
        mls_pool_run_helped(i < 3 ? pool : NULL, own_work, count_task, &b, count);
        CHECK(atomic_load(&b.owns) == 1 && (size_t)atomic_load(&b.tasks) == count);
        CHECK((atomic_load(&b.early) > 0) == b.waits); /* alone: own work first */
    }
}

#if !defined(WITHOUT_FORK) /* TSan and qemu crash if a forked child starts a thread */
/* A fork while the parent's threads sleep: the child must neither hang nor join them. */
TEST(a_forked_child_works_and_can_end)
{
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    CHECK(all_once(pool));
    for (int child = 0; child < 3; child++) {
        const pid_t pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            alarm(20); /* turns a hang into a failure */
            bool good = child == 2 || all_once(pool);
            if (child == 1) {
                good =
                    good && mls_pool_resize(pool, 2, &status) == MLS_OK && all_once(pool);
            }
            mls_pool_free(pool);
            _exit(good ? 0 : 1);
        }
        int ended = -1;
        waitpid(pid, &ended, 0);
        CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
        CHECK(all_once(pool));
    }
}
#endif
