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
    static const struct {
        mls_shm_shape shape;
        const char *text;
    } wrong[] = {
        {{.world = 0}, "0 ranks: a group on one host has 1 to 64"},
        {{.world = 65}, "65 ranks: a group on one host has 1 to 64"},
        {{.world = 2, .slot_bytes = (size_t)1 << 31},
         "slots of 2147483648 bytes: choose at most 1073741824"},
        {{.world = 2, .depth = 1}, "1 slots for each rank: choose 2 to 16"},
        {{.world = 2, .depth = 17}, "17 slots for each rank: choose 2 to 16"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        mls_shm_shape shape = wrong[i].shape;
        mls_shm *groups[1] = {NULL};
        size_t bytes = 7;
        CHECK_FAILS(mls_shm_measure(&shape, &bytes, &status), MLS_E_VALUE, wrong[i].text);
        CHECK(bytes == 7 && shape.depth == wrong[i].shape.depth);
        CHECK(mls_shm_threads(&shape, mls_kernels_of(MLS_CPU_SCALAR), groups, &status) ==
              MLS_E_VALUE);
        CHECK(groups[0] == NULL);
    }
}

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0 || errno != EBADF;
}

/* Join as this rank; a group is left again. */
static mls_code join(const mls_shm_shape *shape, size_t rank, int fd)
{
    mls_shm *g = NULL;
    const mls_code code =
        mls_shm_join(shape, rank, fd, mls_kernels_of(MLS_CPU_SCALAR), &g, &status);
    CHECK((code == MLS_OK) == (g != NULL));
    mls_shm_free(g);
    CHECK(!is_open(fd));
    return code;
}

TEST(invalid_group_file_is_refused_and_closed)
{
    mls_shm_shape shape = {.world = 2}, deeper = {.world = 1, .slot_bytes = 4096};
    mls_shm *g = NULL;
    size_t bytes = 0;
    char text[MLS_TEXT_BYTES], path[40] = "/tmp/mlstate-local-XXXXXX";
    REQUIRE(mls_shm_measure(&shape, &bytes, &status) == MLS_OK);
    snprintf(text, sizeof text, "the memory of a group has %zu bytes, not %zu", bytes - 1,
             bytes);
    CHECK_FAILS(join(&shape, 0, shared_file(bytes - 1)), MLS_E_VALUE, text);
    CHECK_FAILS(join(&shape, 2, shared_file(bytes)), MLS_E_VALUE, "rank 2 of 2 ranks");
    CHECK_FAILS(join(&shape, 0, -1), MLS_E_IO,
                "the memory of a group: Bad file descriptor");
    const int writable = mkstemp(path);
    REQUIRE(writable >= 0 && ftruncate(writable, (off_t)bytes) == 0);
    CHECK_FAILS(join(&shape, 1, open(path, O_RDONLY)), MLS_E_IO,
                "the lock of rank 1: Bad file descriptor");
    CHECK(close(writable) == 0 && unlink(path) == 0);
    const int fd = shared_file(bytes), again = dup(fd), third = dup(fd);
    REQUIRE(mls_shm_join(&shape, 0, fd, mls_kernels_of(MLS_CPU_SCALAR), &g, &status) ==
            MLS_OK);
    CHECK_FAILS(join(&shape, 0, again), MLS_E_VALUE, "rank 0 is taken");
    CHECK_FAILS(join(&deeper, 0, third), MLS_E_VALUE,
                "the memory is of a group of another shape or version");
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
