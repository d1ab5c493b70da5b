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
    static const char *const calls[] = {"broadcast of float32 (3,)", "barrier"};
    char text[MLS_TEXT_BYTES];
    unsigned char byte = 0, all[RANKS_MOST];
    const bool last = c->rank + 1 == c->world;
    const mls_shm_call call = {.timeout = 20, .text = "of float32 (3,)"};
    for (int round = 0; round < 20; round++) {
        EXPECT(c, (last ? mls_shm_barrier(c->g, &quick, &c->st)
                        : mls_shm_broadcast(c->g, &call, &byte, 1, 0, &c->st)) ==
                      MLS_E_PEER);
        snprintf(text, sizeof text,
                 "%s on rank %zu: this rank called '%s', rank %zu '%s'; all ranks must "
                 "make the same call",
                 last ? "barrier" : "broadcast", c->rank, calls[last],
                 last ? 0 : c->world - 1, calls[!last]);
        EXPECT(c, strcmp(c->st.text, text) == 0);
        const size_t sizes[RANKS_MOST] = {last, 1, 1, 1, 1, 1};
        EXPECT(c,
               mls_shm_all_gather(c->g, &call, &byte, sizes, all, &c->st) == MLS_E_PEER);
        snprintf(
            text, sizeof text,
            "all_gather on rank %zu: rank %zu called it with other shapes, counts or "
            "arguments; all ranks must make the same call",
            c->rank, last ? 0 : c->world - 1);
        EXPECT(c, strcmp(c->st.text, text) == 0);
        EXPECT(c, !mls_shm_is_broken(c->g, NULL, 0));
        EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
    }
}

TEST(calls_that_differ_fail_everywhere_and_the_group_lives_on)
{
    in_threads((mls_shm_shape){.world = 2}, differ);
    in_threads((mls_shm_shape){.world = 4, .depth = 2}, differ);
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
