#include "support/shm_ranks.h"

#include <errno.h>
#include <fcntl.h>

TEST(a_shape_is_filled_in)
{
    size_t bytes = 0;
    for (size_t world = 1; world <= MLS_SHM_MAX_RANKS; world++) {
        mls_shm_shape shape = {.world = world};
        REQUIRE(mls_shm_measure(&shape, &bytes, &status) == MLS_OK);
        CHECK(shape.depth >= 2 && shape.slot_bytes >= 4096);
        CHECK(bytes > world * shape.depth * shape.slot_bytes);
        mls_shm_shape again = shape;
        size_t same = 0;
        REQUIRE(mls_shm_measure(&again, &same, &status) == MLS_OK);
        CHECK(same == bytes && again.slot_bytes == shape.slot_bytes);
    }
}

TEST(impossible_shapes_are_refused)
{
    static const mls_shm_shape wrong[] = {
        {.world = 0},
        {.world = MLS_SHM_MAX_RANKS + 1},
        {.world = 2, .slot_bytes = (size_t)1 << 31},
        {.world = 2, .depth = 1},
        {.world = 2, .depth = 17},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        mls_shm_shape shape = wrong[i];
        mls_shm *groups[1] = {NULL};
        size_t bytes = 7;
        CHECK(mls_shm_measure(&shape, &bytes, &status) == MLS_E_VALUE);
        CHECK(bytes == 7 && shape.depth == wrong[i].depth);
        CHECK(mls_shm_threads(&shape, mls_kernels_of(MLS_CPU_SCALAR), groups, &status) ==
              MLS_E_VALUE);
        CHECK(groups[0] == NULL);
    }
}

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0 || errno != EBADF;
}

TEST(invalid_group_file_is_refused_and_closed)
{
    mls_shm_shape shape = {.world = 2};
    mls_shm *g = NULL, *other = NULL;
    size_t bytes = 0;
    REQUIRE(mls_shm_measure(&shape, &bytes, &status) == MLS_OK);
    int fd = shared_file(bytes - 1);
    CHECK(mls_shm_join(&shape, 0, fd, mls_kernels_of(MLS_CPU_SCALAR), &g, &status) ==
          MLS_E_VALUE);
    CHECK(strstr(status.text, "bytes, not") != NULL && !is_open(fd));
    fd = shared_file(bytes);
    CHECK(mls_shm_join(&shape, 2, fd, mls_kernels_of(MLS_CPU_SCALAR), &g, &status) ==
          MLS_E_VALUE);
    CHECK_TEXT(status.text, "rank 2 of 2 ranks");
    CHECK(!is_open(fd));
    CHECK(mls_shm_join(&shape, 0, -1, mls_kernels_of(MLS_CPU_SCALAR), &g, &status) ==
          MLS_E_IO);
    fd = shared_file(bytes);
    const int again = dup(fd), third = dup(fd);
    REQUIRE(mls_shm_join(&shape, 0, fd, mls_kernels_of(MLS_CPU_SCALAR), &g, &status) ==
            MLS_OK);
    CHECK(mls_shm_join(&shape, 0, again, mls_kernels_of(MLS_CPU_SCALAR), &other,
                       &status) == MLS_E_VALUE);
    CHECK_TEXT(status.text, "rank 0 is taken");
    mls_shm_shape deeper = {.world = 1, .slot_bytes = 4096};
    CHECK_FAILS(
        mls_shm_join(&deeper, 0, third, mls_kernels_of(MLS_CPU_SCALAR), &other, &status),
        MLS_E_VALUE, "the memory is of a group of another shape or version");
    CHECK(strstr(status.text, "another shape") != NULL && !is_open(third));
    CHECK(other == NULL);
    mls_shm_free(g);
    CHECK(!is_open(fd));
    mls_shm_free(NULL);
}

TEST(kind_names_match_messages)
{
    CHECK_TEXT(mls_shm_kind_name(MLS_SHM_REDUCE_SCATTER), "reduce_scatter");
    CHECK_TEXT(mls_shm_kind_name(MLS_SHM_KIND_COUNT), "?");
    for (int kind = 0; kind < MLS_SHM_KIND_COUNT; kind++) {
        CHECK(strlen(mls_shm_kind_name((mls_shm_kind)kind)) > 5);
    }
}

TEST(aborted_group_names_the_rank)
{
    mls_shm_shape shape = {.world = 2};
    mls_shm *groups[2];
    char text[MLS_TEXT_BYTES] = "";
    REQUIRE(mls_shm_threads(&shape, mls_kernels_of(MLS_CPU_SCALAR), groups, &status) ==
            MLS_OK);
    CHECK(!mls_shm_is_broken(groups[0], text, sizeof text));
    mls_shm_abort(groups[1]);
    mls_shm_abort(groups[0]); /* the first abort counts */
    for (int r = 0; r < 2; r++) {
        CHECK(mls_shm_is_broken(groups[r], text, sizeof text));
        CHECK_TEXT(text, "rank 1 aborted the group");
        CHECK(mls_shm_is_broken(groups[r], NULL, 0));
        CHECK(mls_shm_barrier(groups[r], &quick, &status) == MLS_E_PEER);
        CHECK(strstr(status.text, "rank 1 aborted the group; the group is unusable") !=
              NULL);
        CHECK_TEXT(status.name, "barrier");
    }
    mls_shm_free(groups[0]);
    mls_shm_free(groups[1]);
}

#if !defined(WITHOUT_FORK)
TEST(a_forked_child_neither_uses_nor_ends_the_group)
{
    mls_shm_shape shape = {.world = 1};
    mls_shm *g = NULL;
    size_t bytes = 0;
    REQUIRE(mls_shm_measure(&shape, &bytes, &status) == MLS_OK);
    REQUIRE(mls_shm_join(&shape, 0, shared_file(bytes), mls_kernels_of(MLS_CPU_SCALAR),
                         &g, &status) == MLS_OK);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        const bool refused = mls_shm_barrier(g, &quick, &status) == MLS_E_PEER &&
                             strstr(status.text, "was forked from the one") != NULL;
        mls_shm_abort(g);
        mls_shm_free(g);
        _exit(refused ? 0 : 1);
    }
    int ended = 1;
    waitpid(pid, &ended, 0);
    CHECK(ended == 0);
    CHECK(mls_shm_barrier(g, &quick, &status) == MLS_OK);
    mls_shm_free(g);
}
#endif
