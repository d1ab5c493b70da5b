#include "support/shm_ranks.h"

#include <time.h>

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void differ(rank_case *c)
{
    unsigned char byte = 0, all[RANKS_MOST];
    const bool last = c->rank + 1 == c->world;
    const mls_shm_call call = {.timeout = 20, .text = "of float32 (3,)"};
    const mls_shm_call other = {.timeout = 20, .text = "of int32 (3,)"};
    for (int round = 0; round < 20; round++) {
        mls_code code = last ? mls_shm_barrier(c->g, &quick, &c->st)
                             : mls_shm_broadcast(c->g, &call, &byte, 1, 0, &c->st);
        EXPECT(c, code == MLS_E_PEER);
        EXPECT(c,
               strstr(c->st.text, last ? "this rank called 'barrier', rank 0 'broadcast "
                                         "of float32 (3,)'"
                                       : "this rank called 'broadcast of float32 (3,)', "
                                         "rank ") != NULL);
        code = mls_shm_broadcast(c->g, last ? &other : &call, &byte, 1, 0, &c->st);
        EXPECT(c, code == MLS_E_PEER && strstr(c->st.text, "int32") != NULL);
        const size_t sizes[RANKS_MOST] = {last, 1, 1, 1, 1, 1};
        code = mls_shm_all_gather(c->g, &call, &byte, sizes, all, &c->st);
        EXPECT(c,
               code == MLS_E_PEER && strstr(c->st.text, "other shapes, counts") != NULL);
        EXPECT(c, !mls_shm_is_broken(c->g, NULL, 0));
        EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
    }
}

TEST(calls_that_differ_fail_everywhere_and_the_group_lives_on)
{
    in_threads((mls_shm_shape){.world = 2}, differ);
    in_threads((mls_shm_shape){.world = 4, .depth = 2}, differ);
    in_processes((mls_shm_shape){.world = 3}, differ, -1);
}

static void wait_in_vain(rank_case *c)
{
    unsigned char byte = 0;
    const mls_shm_call hasty = {.timeout = 0.05};
    EXPECT(c, mls_shm_broadcast(c->g, &quick, &byte, 1, 0, &c->st) == MLS_OK);
    if (c->rank == 0) {
        EXPECT(c, mls_shm_barrier(c->g, &hasty, &c->st) == MLS_E_PEER);
        EXPECT(c,
               strstr(c->st.text, "not done after 0.05 s: rank 1 has not called barrier "
                                  "(its last operation was number 1, broadcast; this is "
                                  "number 2)") != NULL);
    } else {
        while (!mls_shm_is_broken(c->g, NULL, 0)) {
            usleep(1000);
        }
    }
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_E_PEER);
    EXPECT(c, strstr(c->st.text, "rank 0 gave up waiting for rank 1 in barrier") != NULL);
}

TEST(a_rank_that_does_not_come_is_named)
{
    in_threads((mls_shm_shape){.world = 2}, wait_in_vain);
    in_processes((mls_shm_shape){.world = 2}, wait_in_vain, -1);
}

static bool stop(void *context)
{
    int *left = context;
    return --*left > 0;
}

static void be_interrupted(rank_case *c)
{
    int left = 2;
    const mls_shm_call call = {.timeout = 20, .poll = stop, .context = &left};
    if (c->rank == 0) {
        EXPECT(c, mls_shm_barrier(c->g, &call, &c->st) == MLS_E_STOPPED);
        EXPECT(c, left == 0);
    } else {
        while (!mls_shm_is_broken(c->g, NULL, 0)) {
            usleep(1000);
        }
        EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_E_PEER);
        EXPECT(c, strstr(c->st.text, "rank 0 was interrupted in barrier") != NULL);
    }
}

TEST(a_caller_may_stop_to_wait)
{
    in_threads((mls_shm_shape){.world = 2}, be_interrupted);
}

static void leave_early(rank_case *c)
{
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
    if (c->rank == 1) {
        return; /* and closes the group */
    }
    const double start = seconds();
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_E_PEER);
    EXPECT(c, strstr(c->st.text, "rank 1 closed the group, and rank ") != NULL);
    EXPECT(c, seconds() - start < 5);
}

TEST(a_rank_that_left_is_named)
{
    in_threads((mls_shm_shape){.world = 3}, leave_early);
    in_processes((mls_shm_shape){.world = 3}, leave_early, -1);
}

static void abort_one(rank_case *c)
{
    if (c->rank == 2) {
        usleep(20000);
        mls_shm_abort(c->g);
        return;
    }
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_E_PEER);
    EXPECT(c, strstr(c->st.text, "rank 2 aborted the group") != NULL);
}

TEST(abort_ends_waiting_ranks)
{
    in_threads((mls_shm_shape){.world = 3}, abort_one);
}

#if !defined(WITHOUT_FORK)
static void die(rank_case *c)
{
    enum { BYTES = 50 * 1000 * 1000 };
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
    unsigned char *data = calloc(BYTES, 1);
    if (c->rank == 1) {
        const mls_shm_call call = {.timeout = 20};
        if (fork() == 0) {
            usleep(10000);
            kill(getppid(), SIGKILL);
            _exit(0);
        }
        for (;;) {
            (void)mls_shm_broadcast(c->g, &call, data, BYTES, 1, &c->st);
        }
    }
    mls_code code = MLS_OK;
    while (code == MLS_OK) {
        code = mls_shm_broadcast(c->g, &quick, data, BYTES, 1, &c->st);
    }
    EXPECT(c, code == MLS_E_PEER);
    EXPECT(c, strstr(c->st.text, "rank 1 is gone: its process, ") != NULL);
    free(data);
}

TEST(a_killed_process_is_named)
{
    in_processes((mls_shm_shape){.world = 3}, die, 1);
}
#endif

/* A small generator, so that ranks agree on the next operation. */
static void stress(rank_case *c)
{
    unsigned state = 7;
    unsigned char *data = malloc(40000);
    unsigned char *all = malloc(40000 * RANKS_MOST);
    size_t wrong = 0;
    for (int round = 0; round < 300; round++) {
        state = state * 1664525U + 1013904223U;
        const size_t n = state >> 16 & 0x7FFF;
        if (state >> 8 & 1) {
            EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
        }
        const size_t sizes[RANKS_MOST] = {n, n / 2, n, n / 3, 0, n};
        memset(data, (int)c->rank + round, n);
        EXPECT(c, mls_shm_all_gather(c->g, &quick, data, sizes, all, &c->st) == MLS_OK);
        size_t at = 0;
        for (size_t r = 0; r < c->world; r++) {
            for (size_t i = 0; i < sizes[r]; i++) {
                wrong += all[at++] != (unsigned char)((int)r + round);
            }
        }
    }
    EXPECT(c, wrong == 0);
    free(data);
    free(all);
}

TEST(ranks_never_see_a_slot_too_early_or_too_late)
{
    in_threads((mls_shm_shape){.world = 2, .slot_bytes = 4096, .depth = 2}, stress);
    in_threads((mls_shm_shape){.world = 5, .slot_bytes = 4096}, stress);
    in_processes((mls_shm_shape){.world = 4, .slot_bytes = 4096}, stress, -1);
}
