#include "local_ranks.h"
#include "local_shared.h"

#include "mem.h"

#include <sys/stat.h>

static int file_of(size_t bytes)
{
    const int fd = shared_file(bytes);
    return fd;
}

static size_t used_bytes(int fd)
{
    struct stat about;
    return fstat(fd, &about) == 0 ? (size_t)about.st_blocks * 512 : 0;
}

static void a_block_is_found_by_every_address_in_it(void)
{
    const int fd = file_of(4096);
    mls_local_blocks *b = mls_local_blocks_new(0, fd);
    mls_status st;
    void *data[3];
    static const size_t sizes[] = {1, 100000, 5000};
    for (size_t i = 0; i < 3; i++) {
        REQUIRE(mls_local_blocks_take(b, sizes[i], &data[i], &st) == MLS_OK);
        memset(data[i], (int)i + 1, sizes[i]);
    }
    const unsigned char *second = data[1];
    const mls_local_spot whole = mls_local_blocks_find(b, second, 100000);
    const mls_local_spot part = mls_local_blocks_find(b, second + 77, 1000);
    CHECK(mls_local_blocks_find(b, second, whole.bytes + 1).start == 0);
    CHECK(mls_local_blocks_find(b, second + 77, whole.bytes).start == 0);
    CHECK(mls_local_blocks_find(b, &st, sizeof st).start == 0);
#if defined(__linux__)
    CHECK(whole.start != 0 && part.start == whole.start && part.at == whole.at + 77);
    CHECK(mls_local_blocks_find(b, data[2], 5000).start != whole.start);
#else
    CHECK(whole.start == 0 && part.start == 0);
#endif
    for (size_t i = 0; i < 3; i++) {
        mls_local_give(b, data[i]);
    }
    mls_local_blocks_leave(b);
    close(fd);
}

static void a_place_is_used_again_and_its_pages_are_not_kept(void)
{
    enum { BYTES = 8 << 20 };
    const int fd = file_of(4096);
    mls_local_blocks *b = mls_local_blocks_new(0, fd);
    mls_status st;
    void *first, *second, *third;
    const size_t before = used_bytes(fd);
    REQUIRE(mls_local_blocks_take(b, BYTES, &first, &st) == MLS_OK);
    memset(first, 7, BYTES);
    mls_local_give(b, first);
    CHECK(used_bytes(fd) <= before + BYTES);
    REQUIRE(mls_local_blocks_take(b, BYTES - 100, &second, &st) == MLS_OK);
    CHECK(second == first);
    CHECK(((unsigned char *)second)[5] == 0 || ((unsigned char *)second)[5] == 7);
    REQUIRE(mls_local_blocks_take(b, 10, &third, &st) == MLS_OK);
    CHECK(third != first); /* far too large for that */
    mls_local_give(b, second);
    mls_local_give(b, third);
    mls_local_blocks_leave(b);
    close(fd);
}

#if defined(__linux__)
/* Arrays that grow find the place again; only what they need is there, and told. */
static void a_place_has_room_for_a_little_more(void)
{
    enum { BYTES = (3 << 20) + 100000, MORE = BYTES + 40000 };
    const int fd = file_of(4096);
    mls_local_blocks *b = mls_local_blocks_new(1, fd);
    mls_local_views views = {0};
    mls_status st;
    void *first = NULL, *second = NULL;
    const unsigned char *seen = NULL;
    const size_t before = used_bytes(fd);
    REQUIRE(mls_local_blocks_take(b, BYTES, &first, &st) == MLS_OK);
    CHECK(used_bytes(fd) <= before + BYTES + 65536);
    mls_local_spot spot = mls_local_blocks_find(b, first, BYTES);
    CHECK(mls_local_views_find(&views, fd, 1, &spot, BYTES, &seen, &st) == MLS_OK);
    mls_local_give(b, first);
    CHECK(mls_local_blocks_find(b, first, BYTES).start == 0);
    REQUIRE(mls_local_blocks_take(b, MORE, &second, &st) == MLS_OK);
    CHECK(second == first);
    memset(second, 4, MORE);
    spot = mls_local_blocks_find(b, second, MORE);
    REQUIRE(mls_local_views_find(&views, fd, 1, &spot, MORE, &seen, &st) == MLS_OK);
    CHECK(views.count == 1 && memcmp(seen, second, MORE) == 0);
    mls_local_views_fini(&views);
    mls_local_give(b, second);
    mls_local_blocks_leave(b);
    close(fd);
}
#else
static void a_place_has_room_for_a_little_more(void)
{
}
#endif

static void an_array_outlives_the_group(void)
{
    mls_local_shape shape = {.world = 1};
    mls_local *g = NULL;
    mls_status st;
    size_t bytes;
    REQUIRE(mls_local_measure(&shape, &bytes, &st) == MLS_OK);
    REQUIRE(mls_local_join(&shape, 0, file_of(bytes), mls_kernels_of(MLS_CPU_SCALAR), &g,
                           &st) == MLS_OK);
    mls_local_blocks *owner;
    void *data = NULL;
    REQUIRE(mls_local_take(g, 100, &data, &owner, &st) == MLS_OK);
    memset(data, 1, 100);
    mls_local_free(g);
    CHECK(((unsigned char *)data)[99] == 1);
    memset(data, 2, 100);
    mls_local_give(owner, data);
}

static void more_than_there_is_is_refused(void)
{
    const int fd = file_of(4096);
    mls_local_blocks *b = mls_local_blocks_new(3, fd);
    mls_status st;
    void *data = NULL, *small = NULL;
    CHECK(mls_local_blocks_take(b, SIZE_MAX, &data, &st) == MLS_E_SIZE);
    CHECK(mls_local_blocks_take(b, SIZE_MAX / 2, &data, &st) != MLS_OK);
    CHECK(data == NULL);
    REQUIRE(mls_local_blocks_take(b, 0, &small, &st) == MLS_OK);
    mls_local_give(b, small);
    mls_local_blocks_leave(b);
    close(fd);
}

#if defined(__linux__)
/* What another rank says is in its part of the file, and in the file. */
static void spots_that_cannot_be_are_refused(void)
{
    const int fd = file_of(4096);
    mls_local_blocks *b = mls_local_blocks_new(1, fd);
    mls_status st;
    void *data;
    REQUIRE(mls_local_blocks_take(b, 10000, &data, &st) == MLS_OK);
    memset(data, 9, 10000);
    const mls_local_spot good = mls_local_blocks_find(b, data, 10000);
    mls_local_views views = {0}, others = {0};
    const unsigned char *out = NULL;
    mls_local_spot wrong[6] = {good, good, good, good, good, good};
    wrong[0].start = 0;
    wrong[1].bytes = 0;
    wrong[2].bytes = (uint64_t)1 << 30; /* behind the end of the file */
    wrong[3].bytes = UINT64_MAX;
    wrong[4].start += 8; /* no page */
    wrong[5].at = good.bytes - 9999;
    for (size_t i = 0; i < 6; i++) {
        CHECK(mls_local_views_find(&views, fd, 1, &wrong[i], 10000, &out, &st) ==
              MLS_E_FORMAT);
    }
    CHECK(mls_local_views_find(&others, fd, 0, &good, 10000, &out, &st) == MLS_E_FORMAT);
    CHECK(out == NULL);
    REQUIRE(mls_local_views_find(&views, fd, 1, &good, 10000, &out, &st) == MLS_OK);
    CHECK(out != data && memcmp(out, data, 10000) == 0);
    const unsigned char *again = NULL;
    REQUIRE(mls_local_views_find(&views, fd, 1, &good, 10, &again, &st) == MLS_OK);
    CHECK(again == out);
    mls_local_views_fini(&views);
    mls_local_views_fini(&others);
    mls_local_give(b, data);
    mls_local_blocks_leave(b);
    close(fd);
}
#else
static void spots_that_cannot_be_are_refused(void)
{
}
#endif

#if !defined(WITHOUT_FORK)
static void a_forked_child_gives_nothing_back(void)
{
    const int fd = file_of(4096);
    mls_local_blocks *b = mls_local_blocks_new(0, fd);
    mls_status st;
    void *data;
    REQUIRE(mls_local_blocks_take(b, 10000, &data, &st) == MLS_OK);
    memset(data, 5, 10000);
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        mls_local_give(b, data);
        mls_local_blocks_leave(b);
        _exit(((unsigned char *)data)[9999] == 5 ? 0 : 1);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(((unsigned char *)data)[9999] == 5);
    mls_local_give(b, data);
    mls_local_blocks_leave(b);
    close(fd);
}
#else
static void a_forked_child_gives_nothing_back(void)
{
}
#endif

static const test_case tests[] = {
    TEST(a_block_is_found_by_every_address_in_it),
    TEST(a_place_is_used_again_and_its_pages_are_not_kept),
    TEST(a_place_has_room_for_a_little_more),
    TEST(an_array_outlives_the_group),
    TEST(more_than_there_is_is_refused),
    TEST(spots_that_cannot_be_are_refused),
    TEST(a_forked_child_gives_nothing_back),
};

int main(void)
{
    return RUN_TESTS(tests);
}
