/* Detecting unchanged shards, by bytes and by versions. */
#include "checkpoint/write/write_plan.h"
#include "support/shards.h"
#include "support/tensors.h"

#include <errno.h>
#include <sys/uio.h>

enum { BYTES = 700001, COUNT = 5 };

/* ---- pread, which fails on request ---- */

static atomic_int reads_until_failure = -1; /* below 0: none fails */

ssize_t pread(int fd, void *data, size_t bytes, off_t offset);

ssize_t pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (atomic_load(&reads_until_failure) >= 0 &&
        atomic_fetch_sub(&reads_until_failure, 1) == 0) {
        errno = EIO;
        return -1;
    }
    const struct iovec place = {.iov_base = data, .iov_len = bytes};
    return preadv(fd, &place, 1, offset);
}

/* ---- a committed state ---- */

/* A large tensor, a small one, a part, an empty one, a scalar. */
typedef struct state {
    unsigned char *data;
    size_t shapes[COUNT][1];
    mls_shard_item items[COUNT];
    mls_shards_written written;
    mls_index index; /* as committed */
} state;

static state s; /* of the current test */

static void commit(void)
{
    static const size_t sizes[COUNT] = {BYTES, 100, 8 * 1000, 0, 1};
    static const char *const names[COUNT] = {"a", "b", "c", "d", "e"};
    s.data = noise(BYTES);
    for (size_t i = 0; i < COUNT; i++) {
        s.shapes[i][0] = i == 2 ? sizes[i] / 8 : sizes[i];
        s.items[i] = item_of(names[i], i == 1 ? "m" : NULL, i == 2 ? MLS_F64 : MLS_U8,
                             i == 4 ? 0 : 1, s.shapes[i], s.data);
    }
    s.items[2] = part_of(s.items[2], 0, 4, 1);
    const mls_shard_job job = job_of(s.items, COUNT, generations[0], NULL);
    s.index = write_all(&job, &s.written);
}

static void drop(void)
{
    empty_pool();
    mls_index_fini(&s.index);
    free(s.data);
}

static mls_write_plan plan; /* of the current test */

BEFORE_EACH
{
    commit();
}

AFTER_EACH
{
    mls_write_plan_fini(&plan);
    drop();
}

/* Set `plan` to the comparison of a job's items with its committed state. */
static mls_code compare(const mls_shard_job *job)
{
    mls_write_plan_fini(&plan);
    const mls_code code = mls_write_plan_init(&plan, job, &status);
    return code != MLS_OK ? code : mls_write_plan_unchanged(&plan, &status);
}

/* Compare with the committed state: a bit for each item, set if it is unchanged. */
static unsigned same_items(size_t threads)
{
    unsigned same = 0;
    mls_shard_job job = job_of(s.items, COUNT, generations[1], &s.index);
    job.pool = threads == 1 ? NULL : four_threads;
    if (compare(&job) != MLS_OK) {
        return UINT32_MAX;
    }
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(plan.planned[i].before != NULL);
        same |= plan.planned[i].is_unchanged ? 1U << (plan.planned[i].item - s.items) : 0;
    }
    return same;
}

enum { ALL = (1 << COUNT) - 1 };

TEST(equal_bytes_count_as_unchanged)
{
    CHECK(same_items(1) == ALL && same_items(4) == ALL);
    unsigned char *elsewhere = malloc(BYTES);
    REQUIRE(elsewhere != NULL);
    memcpy(elsewhere, s.data, BYTES);
    for (size_t i = 0; i < COUNT; i++) {
        s.items[i].data = elsewhere;
    }
    CHECK(same_items(4) == ALL);
    free(elsewhere);
}

/* At the ends of the tensor and of the blocks that are read. */
TEST(single_changed_byte_is_detected)
{
    static const size_t places[] = {0,     1,      16383,  16384,  16385,
                                    99999, 278527, 278528, 540672, BYTES - 1};
    unsigned char *changed = malloc(BYTES);
    REQUIRE(changed != NULL);
    memcpy(changed, s.data, BYTES);
    s.items[0].data = changed;
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        changed[places[i]] ^= 1;
        CHECK(same_items(1) == (ALL & ~1U) && same_items(4) == (ALL & ~1U));
        changed[places[i]] ^= 1;
    }
    CHECK(same_items(4) == ALL);
    free(changed);
}

TEST(comparison_starts_at_the_first_element)
{
    unsigned char *all = malloc(BYTES + 16);
    REQUIRE(all != NULL);
    memcpy(all + 16, s.data, BYTES); /* two elements before it */
    s.items[2].data = all;
    s.items[2].first = 2;
    CHECK(same_items(4) == ALL);
    all[15] ^= 1; /* not part of the shard */
    all[16 + 2000] ^= 1;
    CHECK(same_items(4) == ALL);
    all[16 + 1999] ^= 1;
    CHECK(same_items(4) == (ALL & ~4U));
    free(all);
}

TEST(strided_and_swapped_memory_is_compared)
{
    enum { ROWS = 300, COLUMNS = 500 };
    const size_t shape[] = {ROWS, COLUMNS};
    uint32_t *numbers = (uint32_t *)(void *)noise(4 * ROWS * COLUMNS);
    uint32_t *turned = malloc(4 * ROWS * COLUMNS);
    mls_tensor view = transposed_of(turned, MLS_U32, ROWS, COLUMNS);
    mls_shards_written written;
    REQUIRE(numbers != NULL && turned != NULL);
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        turned[i % COLUMNS * ROWS + i / COLUMNS] = __builtin_bswap32(numbers[i]);
    }
    view.swapped = true;
    mls_shard_item item =
        part_of(item_of("w", NULL, MLS_U32, 2, shape, numbers), 0, 2, 1);
    item.first = ROWS * COLUMNS / 2;
    const mls_shard_job job = job_of(&item, 1, generations[2], NULL);
    mls_index index = write_all(&job, &written);
    item.data = NULL;
    item.strided = &view;
    for (size_t round = 0; round < 3; round++) {
        const mls_shard_job again = job_of(&item, 1, generations[1], &index);
        REQUIRE(compare(&again) == MLS_OK);
        CHECK(plan.planned[0].is_unchanged == (round < 2));
        /* an element of the other part, then the last one */
        turned[round == 0 ? 0 : ROWS * COLUMNS - 1] ^= 1;
    }
    mls_index_fini(&index);
    free(numbers);
    free(turned);
    empty_pool();
}

/* ---- files that differ from the index ---- */

static const char *path_of(const char *name)
{
    for (size_t i = 0; i < s.index.shard_count; i++) {
        if (mls_str_is(s.index.shards[i].id.name, name)) {
            return s.index.files[s.index.shards[i].file].path;
        }
    }
    return "";
}

TEST(a_file_that_is_gone_counts_as_changed)
{
    CHECK(unlinkat(pool_fd, path_of("a"), 0) == 0);
    CHECK(same_items(4) == (ALL & ~1U));
    CHECK(unlinkat(pool_fd, path_of("c"), 0) == 0); /* d and e share its file */
    CHECK(same_items(4) == 2);
}

TEST(a_file_of_another_length_counts_as_changed)
{
    CHECK(set_length(path_of("a"), 4096 + BYTES - 1));
    CHECK(same_items(1) == (ALL & ~1U));
    CHECK(set_length(path_of("a"), 4096 + BYTES));
    CHECK(flip(path_of("a"), 4096 + BYTES - 1, s.data[BYTES - 1]));
    CHECK(same_items(1) == ALL);
    CHECK(set_length(path_of("a"), 4096 + BYTES + 1));
    CHECK(same_items(1) == (ALL & ~1U));
}

TEST(non_regular_file_counts_as_changed)
{
    CHECK(unlinkat(pool_fd, path_of("a"), 0) == 0);
    CHECK(symlinkat("elsewhere", pool_fd, path_of("a")) == 0);
    CHECK(same_items(4) == (ALL & ~1U));
    CHECK(unlinkat(pool_fd, path_of("a"), 0) == 0);
    CHECK(mkdirat(pool_fd, path_of("a"), 0700) == 0);
    CHECK(same_items(4) == (ALL & ~1U));
    CHECK(unlinkat(pool_fd, path_of("a"), AT_REMOVEDIR) == 0);
}

TEST(unreadable_shard_counts_as_changed)
{
    atomic_store(&reads_until_failure, 4); /* in the middle of the large one */
    CHECK(same_items(1) == (ALL & ~1U));
    CHECK(atomic_load(&reads_until_failure) < 0);
}

/* ---- versions ---- */

TEST(caller_version_decides_without_reading_tensors)
{
    for (size_t i = 0; i < COUNT; i++) {
        s.items[i].version = i == 1 ? 2 : 1;
    }
    s.data[5] ^= 1;                        /* ignored: the version is unchanged */
    atomic_store(&reads_until_failure, 4); /* the headers of two files */
    CHECK(same_items(1) == (ALL & ~2U));
    CHECK(atomic_load(&reads_until_failure) == 0);
    atomic_store(&reads_until_failure, -1);
}

/* Otherwise the save would commit an index that refers to a missing file. */
TEST(equal_version_with_missing_file_counts_as_changed)
{
    for (size_t i = 0; i < COUNT; i++) {
        s.items[i].version = 1;
    }
    CHECK(same_items(4) == ALL);
    CHECK(set_length(path_of("b"), 4000));
    CHECK(same_items(4) == (ALL & ~2U));
    CHECK(unlinkat(pool_fd, path_of("a"), 0) == 0);
    CHECK(same_items(4) == (ALL & ~3U));
}

TEST(decreasing_version_is_refused)
{
    s.index.shards[0].version = 7; /* "a" */
    s.items[0].version = 6;
    const mls_shard_job job = job_of(s.items, COUNT, generations[1], &s.index);
    CHECK_FAILS(compare(&job), MLS_E_VALUE,
                "version 6 is not allowed: the stored version of the shard is 7");
    CHECK_TEXT(status.name, "a");
    CHECK_TEXT(status.expected, "7 or more");
    CHECK_TEXT(status.got, "6");
    s.items[0].version = 7;
    CHECK(same_items(4) == ALL);
    s.items[0].version = 8;
    CHECK(same_items(4) == (ALL & ~1U));
}

TEST(version_above_int64_is_refused)
{
    mls_shard_item item = item_of("w", NULL, MLS_U8, 0, NULL, "x");
    item.version = (uint64_t)INT64_MAX + 1;
    const mls_shard_job job = job_of(&item, 1, generations[2], NULL);
    REQUIRE(compare(&job) == MLS_E_VALUE);
    CHECK_TEXT(status.name, "w");
    CHECK_TEXT(status.expected, "at most 9223372036854775807");
}

/* ---- progress ---- */

TEST(progress_counts_compared_bytes_and_stops)
{
    for (int allowed = 0; allowed <= 2; allowed++) {
        watcher seen = {.allowed = allowed == 2 ? 1 << 30 : allowed + 1};
        const mls_progress progress = {.report = watch, .context = &seen};
        mls_shard_job job = job_of(s.items, COUNT, generations[1], &s.index);
        job.progress = &progress;
        const mls_code code = compare(&job);
        CHECK(code == (allowed == 2 ? MLS_OK : MLS_E_STOPPED));
        CHECK(allowed < 2 || atomic_load(&seen.bytes) == s.written.data_bytes);
        CHECK(allowed == 2 || atomic_load(&seen.calls) == allowed + 1);
    }
}

/* Enough shards for many batches: several threads get the result of one. */
TEST(several_threads_compare_like_one_thread)
{
    enum { MANY = 300, EACH = 100000 };
    static char names[MANY][8];
    static mls_shard_item items[MANY];
    const size_t shape[] = {EACH};
    unsigned char *data = noise(MANY * 64 + EACH);
    mls_shards_written written;
    REQUIRE(data != NULL);
    for (size_t i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "%03zu", i);
        items[i] = item_of(names[i], NULL, MLS_U8, 1, shape, data + 64 * i);
    }
    const mls_shard_job job = job_of(items, MANY, generations[2], NULL);
    mls_index index = write_all(&job, &written);
    for (size_t i = 0; i < MANY; i += 7) {
        items[i].data = data + 64 * i + 1;
    }
    const mls_shard_job again = job_of(items, MANY, generations[1], &index);
    REQUIRE(compare(&again) == MLS_OK);
    for (size_t i = 0; i < MANY; i++) {
        CHECK(plan.planned[i].is_unchanged == (i % 7 != 0));
    }
    mls_index_fini(&index);
    free(data);
    empty_pool();
}
