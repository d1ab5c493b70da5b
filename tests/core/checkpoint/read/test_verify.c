/* Verify finds each problem of a checkpoint's files at its place, and reports no
 * others. */
#include "base/size.h"
#include "checkpoint/read/verify.h"
#include "safetensors/safetensors.h"
#include "support/shards.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/uio.h>

enum { BLOCK = MLS_SAFETENSORS_BLOCK, LARGE = 19 * BLOCK + 777, PAYLOAD = 4096 };

/* ---- pread, which fails on request ---- */

static atomic_int reads_until_failure = -1; /* below 0: none fails */

/* The byte in the middle of the failed read: later reads of it fail as well. */
static struct {
    ino_t file;
    off_t at;
} bad;

ssize_t pread(int fd, void *data, size_t bytes, off_t offset);

/* Tests that request a failure use one thread. */
ssize_t pread(int fd, void *data, size_t bytes, off_t offset)
{
    struct stat info = {0};
    const struct iovec place = {.iov_base = data, .iov_len = bytes};
    if (fstat(fd, &info) != 0) {
        return -1;
    }
    if (atomic_load(&reads_until_failure) >= 0 &&
        atomic_fetch_sub(&reads_until_failure, 1) == 0) {
        bad.file = info.st_ino;
        bad.at = offset + (off_t)bytes / 2;
    }
    if (bad.file == info.st_ino && offset <= bad.at && bad.at < offset + (off_t)bytes) {
        errno = EIO;
        return -1;
    }
    return preadv(fd, &place, 1, offset);
}

/* ---- a checkpoint ---- */

/* A large tensor, others with their own files, and three small ones that share a file. */
typedef struct stored {
    unsigned char *data;
    size_t shapes[5][1];
    mls_shard_item items[5];
    mls_index index;
} stored;

enum { A, B, C, D, E }; /* shards of the index */

static stored s; /* of the current test */

static void store(size_t large)
{
    static const size_t sizes[] = {0, 5000, 40, 24, 3};
    static const char *const names[] = {"a", "b", "c", "d", "e"};
    mls_shards_written written;
    s.data = noise(large + 5000);
    for (size_t i = 0; i < 5; i++) {
        s.shapes[i][0] = i == 0 ? large : sizes[i];
        s.items[i] = item_of(names[i], NULL, MLS_U8, 1, s.shapes[i], s.data + i);
    }
    mls_shard_job job = job_of(s.items, 5, generations[0], NULL);
    job.pack_below = 1000;
    s.index = write_all(&job, &written);
    CHECK(s.index.shard_count == 5 && s.index.file_count == 3);
}

AFTER_EACH
{
    empty_pool();
    mls_index_fini(&s.index);
    free(s.data);
    s = (stored){0};
}

static const mls_index_file *file_of(size_t shard)
{
    return &s.index.files[s.index.shards[shard].file];
}

/* The problems found; checks that no file stays open. */
static mls_problems verify_with(mls_pool *pool)
{
    mls_problems problems = {0};
    mls_status st;
    const int before = next_descriptor();
    CHECK(mls_index_verify(pool_fd, &s.index, crc, pool, NULL, &problems, &st) == MLS_OK);
    CHECK(next_descriptor() == before); /* no file stayed open */
    return problems;
}

/* Whether one thread and several threads find exactly this problem. */
static bool only(mls_problem_kind kind, size_t file, size_t shard, uint64_t offset,
                 uint64_t bytes)
{
    bool good = true;
    for (int several = 0; several < 2; several++) {
        mls_problems problems = verify_with(several ? four_threads : NULL);
        const mls_problem *p = problems.list;
        good = good && problems.count == 1 && p->kind == kind && p->file == file &&
               p->shard == shard && p->offset == offset && p->bytes == bytes &&
               p->text[0] != '\0';
        mls_problems_fini(&problems);
    }
    return good;
}

static bool has_no_problems(void)
{
    mls_problems problems = verify_with(four_threads);
    const bool good = problems.count == 0;
    mls_problems_fini(&problems);
    return good;
}

/* ---- tests ---- */

TEST(good_files_have_no_problems)
{
    uint64_t bytes = 0;
    store(LARGE);
    for (size_t i = 0; i < s.index.file_count; i++) {
        bytes += s.index.files[i].bytes;
    }
    for (int several = 0; several < 2; several++) {
        mls_problems problems = verify_with(several ? four_threads : NULL);
        CHECK(problems.count == 0 &&
              problems.bytes_read == bytes); /* all bytes of all files */
        mls_problems_fini(&problems);
    }
}

TEST(index_without_shards_verifies)
{
    s.index.world_size = 1;
    mls_problems problems = verify_with(four_threads);
    CHECK(problems.count == 0 && problems.bytes_read == 0);
    mls_problems_fini(&problems);
    mls_problems_fini(&problems); /* zeroed */
}

TEST(damage_is_reported_per_block)
{
    static const size_t places[] = {
        0, BLOCK - 1, BLOCK, 8 * BLOCK - 1, 8 * BLOCK, 16 * BLOCK + 12345, LARGE - 1};
    store(LARGE);
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const size_t start = places[i] / BLOCK * BLOCK;
        const size_t bytes = LARGE - start < BLOCK ? LARGE - start : BLOCK;
        CHECK(flip(file_of(A)->path, PAYLOAD + places[i], 0x80));
        CHECK(
            only(MLS_PROBLEM_ALTERED, s.index.shards[A].file, A, PAYLOAD + start, bytes));
        CHECK(flip(file_of(A)->path, PAYLOAD + places[i], 0x80));
    }
    CHECK(has_no_problems());
}

TEST(problems_are_sorted_by_file_and_offset)
{
    store(LARGE);
    CHECK(flip(file_of(A)->path, PAYLOAD + 17 * BLOCK, 1));
    CHECK(flip(file_of(A)->path, PAYLOAD + 2 * BLOCK, 1));
    CHECK(flip(file_of(A)->path, 100, 1));
    CHECK(unlinkat(pool_fd, file_of(B)->path, 0) == 0);
    CHECK(flip(file_of(C)->path, s.index.shards[E].offset, 1));
    for (int round = 0; round < 10; round++) {
        mls_problems problems = verify_with(four_threads);
        size_t kinds[MLS_PROBLEM_COUNT] = {0};
        CHECK(problems.count == 5);
        for (size_t i = 0; i < problems.count; i++) {
            const mls_problem *p = &problems.list[i];
            kinds[p->kind]++;
            CHECK(i == 0 || p[-1].file < p->file ||
                  (p[-1].file == p->file && p[-1].offset < p->offset));
        }
        CHECK(kinds[MLS_PROBLEM_ALTERED] == 3 && kinds[MLS_PROBLEM_MISSING] == 1);
        CHECK(kinds[MLS_PROBLEM_HEADER] + kinds[MLS_PROBLEM_FOREIGN] == 1);
        mls_problems_fini(&problems);
    }
}

TEST(impossible_header_length_is_reported)
{
    store(2000);
    CHECK(flip(file_of(B)->path, 7, 1));
    mls_problems problems = verify_with(NULL);
    REQUIRE(problems.count == 1 && problems.list[0].kind == MLS_PROBLEM_HEADER);
    CHECK_TEXT(problems.list[0].text, "its header's length changed");
    mls_problems_fini(&problems);
}

TEST(missing_file_is_reported_once)
{
    store(2000);
    CHECK(unlinkat(pool_fd, file_of(C)->path, 0) == 0); /* three tensors */
    CHECK(only(MLS_PROBLEM_MISSING, s.index.shards[C].file, SIZE_MAX, 0, PAYLOAD + 67));
}

TEST(wrong_length_is_reported_at_its_offset)
{
    store(2000);
    const size_t file = s.index.shards[B].file;
    CHECK(set_length(file_of(B)->path, PAYLOAD + 4900));
    CHECK(only(MLS_PROBLEM_LENGTH, file, SIZE_MAX, PAYLOAD + 4900, 100));
    CHECK(set_length(file_of(B)->path, 0));
    CHECK(only(MLS_PROBLEM_LENGTH, file, SIZE_MAX, 0, PAYLOAD + 5000));
    CHECK(set_length(file_of(B)->path, PAYLOAD + 5003));
    CHECK(only(MLS_PROBLEM_LENGTH, file, SIZE_MAX, PAYLOAD + 5000, 3));
}

TEST(non_regular_file_is_foreign)
{
    store(2000);
    const size_t file = s.index.shards[B].file;
    const char *path = file_of(B)->path;
    CHECK(unlinkat(pool_fd, path, 0) == 0 && mkdirat(pool_fd, path, 0700) == 0);
    CHECK(only(MLS_PROBLEM_FOREIGN, file, SIZE_MAX, 0, PAYLOAD + 5000));
    CHECK(unlinkat(pool_fd, path, AT_REMOVEDIR) == 0);
    CHECK(symlinkat("a", pool_fd, path) == 0);
    CHECK(only(MLS_PROBLEM_FOREIGN, file, SIZE_MAX, 0, PAYLOAD + 5000));
    CHECK(unlinkat(pool_fd, path, 0) == 0 && mkfifoat(pool_fd, path, 0600) == 0);
    CHECK(only(MLS_PROBLEM_FOREIGN, file, SIZE_MAX, 0, PAYLOAD + 5000));
}

/* The same tensor from another save: a good file that the index does not describe. */
TEST(swapped_files_are_foreign)
{
    store(2000);
    mls_shards_written written;
    s.items[B].data = s.data + 100;
    mls_shard_job job = job_of(&s.items[B], 1, generations[1], NULL);
    job.pack_below = 0;
    mls_index other = write_all(&job, &written);
    REQUIRE(other.file_count == 1 && other.files[0].bytes == file_of(B)->bytes);
    CHECK(renameat(pool_fd, other.files[0].path, pool_fd, file_of(B)->path) == 0);
    mls_problems problems = verify_with(four_threads);
    REQUIRE(problems.count == 2);
    CHECK(problems.list[0].kind == MLS_PROBLEM_FOREIGN && problems.list[0].offset == 0);
    CHECK(problems.list[1].kind == MLS_PROBLEM_ALTERED && problems.list[1].shard == B);
    mls_problems_fini(&problems);
    mls_index_fini(&other);
}

/* The right bytes, in a file of another writer. */
TEST(a_file_without_checksums_is_foreign)
{
    char head[PAYLOAD];
    store(2000);
    memset(head, ' ', sizeof head);
    mls_store_le64((unsigned char *)head, PAYLOAD - 8);
    static const char json[] =
        "{\"b\":{\"dtype\":\"U8\",\"shape\":[5000],\"data_offsets\":[0,5000]}}";
    memcpy(head + 8, json, sizeof json - 1);
    const int fd = openat(pool_fd, file_of(B)->path, O_WRONLY);
    CHECK(pwrite(fd, head, sizeof head, 0) == PAYLOAD);
    close(fd);
    CHECK(only(MLS_PROBLEM_FOREIGN, s.index.shards[B].file, SIZE_MAX, 0, PAYLOAD));
}

/* An index built around a file's own checksum. */
TEST(a_record_that_the_header_contradicts_is_foreign)
{
    store(2000);
    const size_t file = s.index.shards[C].file;
    mls_index_shard *shard = &s.index.shards[D];
    shard->dtype = MLS_I8; /* of the same size */
    CHECK(only(MLS_PROBLEM_FOREIGN, file, SIZE_MAX, 0, PAYLOAD));
    shard->dtype = MLS_U8;
    CHECK(has_no_problems());
    shard->offset++;
    mls_problems problems = verify_with(NULL);
    CHECK(problems.count == 2 && problems.list[0].kind == MLS_PROBLEM_FOREIGN);
    mls_problems_fini(&problems);
}

/* All of them have the same offset, that of the next tensor. */
TEST(empty_tensors_of_different_dtypes_are_distinguished)
{
    static const size_t none[] = {0}, three[] = {3};
    static const mls_dtype dtypes[] = {MLS_U8, MLS_F64, MLS_F32, MLS_I8};
    static const char *const names[] = {"a", "b", "c", "d"};
    mls_shard_item items[5];
    mls_shards_written written;
    mls_problems problems = {0};
    for (size_t i = 0; i < 4; i++) {
        items[i] = item_of(names[i], NULL, dtypes[i], 1, none, "");
    }
    items[4] = item_of("e", NULL, MLS_U8, 1, three, "abc");
    const mls_shard_job job = job_of(items, 5, generations[0], NULL);
    mls_index index = write_all(&job, &written);
    CHECK(mls_index_verify(pool_fd, &index, crc, NULL, NULL, &problems, &status) ==
          MLS_OK);
    CHECK(index.shard_count == 5 && index.file_count == 1 && problems.count == 0);
    mls_problems_fini(&problems);
    mls_index_fini(&index);
}

TEST(failed_reads_are_reported_as_unreadable)
{
    store(2000);
    /* files are read in turn: length, header, then the shards, small ones together */
    for (int reads = 0; reads < 7; reads++) {
        bad.file = 0;
        atomic_store(&reads_until_failure, reads);
        mls_problems problems = verify_with(NULL);
        CHECK(atomic_load(&reads_until_failure) < 0 && problems.count == 1);
        if (problems.count == 1) {
            const mls_problem *p = problems.list;
            CHECK(p->kind == MLS_PROBLEM_UNREADABLE && strchr(p->text, ':') != NULL);
            CHECK(p->shard == SIZE_MAX ? p->offset == 0
                                       : p->bytes == s.index.shards[p->shard].bytes);
        }
        mls_problems_fini(&problems);
    }
    bad.file = 0;
    atomic_store(&reads_until_failure, -1);
}

/* A pool that was deleted entirely. */
TEST(problem_list_is_bounded)
{
    enum { MANY = MLS_PROBLEMS_MOST + 1000 };
    const size_t shape[] = {1};
    const uint32_t sum = 0;
    mls_index_file *files = calloc(MANY, sizeof *files);
    mls_index_shard *shards = calloc(MANY, sizeof *shards);
    REQUIRE(files != NULL && shards != NULL);
    for (size_t i = 0; i < MANY; i++) {
        snprintf(files[i].path, sizeof files[i].path, "params/%zu.safetensors", i);
        files[i].bytes = PAYLOAD + 1;
        shards[i] = (mls_index_shard){.dtype = MLS_U8,
                                      .rank = 1,
                                      .shape = shape,
                                      .file = i,
                                      .offset = PAYLOAD,
                                      .bytes = 1,
                                      .crcs = &sum};
    }
    s.index = (mls_index){
        .files = files, .file_count = MANY, .shards = shards, .shard_count = MANY};
    mls_problems problems = verify_with(four_threads);
    CHECK(problems.count == MLS_PROBLEMS_MOST && problems.bytes_read == 0);
    for (size_t i = 0; i < problems.count; i++) {
        CHECK(problems.list[i].kind == MLS_PROBLEM_MISSING);
    }
    mls_problems_fini(&problems);
    free(files);
    free(shards);
    s.index = (mls_index){0};
}

TEST(progress_counts_all_bytes_and_stops)
{
    store(LARGE);
    for (int allowed = 1; allowed <= 5; allowed++) {
        for (int several = 0; several < 2; several++) {
            watcher seen = {.allowed = allowed == 5 ? 1 << 30 : allowed};
            const mls_progress progress = {.report = watch, .context = &seen};
            mls_problems problems = {.count = 77};
            const mls_code code =
                mls_index_verify(pool_fd, &s.index, crc, several ? four_threads : NULL,
                                 &progress, &problems, &status);
            CHECK(code == (allowed == 5 ? MLS_OK : MLS_E_STOPPED));
            CHECK(problems.count == (allowed == 5 ? 0U : 77U));
            CHECK(allowed == 5 || atomic_load(&seen.calls) < allowed + 4);
            CHECK(allowed < 5 || atomic_load(&seen.bytes) == problems.bytes_read);
            if (code == MLS_OK) {
                mls_problems_fini(&problems);
            }
        }
    }
}

TEST(each_kind_has_a_name)
{
    CHECK_TEXT(mls_problem_name(MLS_PROBLEM_MISSING), "missing");
    CHECK_TEXT(mls_problem_name(MLS_PROBLEM_UNREADABLE), "unreadable");
    CHECK_TEXT(mls_problem_name(MLS_PROBLEM_LENGTH), "length");
    CHECK_TEXT(mls_problem_name(MLS_PROBLEM_FOREIGN), "foreign");
    CHECK_TEXT(mls_problem_name(MLS_PROBLEM_HEADER), "header");
    CHECK_TEXT(mls_problem_name(MLS_PROBLEM_ALTERED), "altered");
}
