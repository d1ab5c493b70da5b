/* Shard files: valid, equal for any number of threads, and deleted if the write fails. */
#include "safetensors/safetensors.h"
#include "support/shards.h"
#include "support/tensors.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>

enum { MIB = 1 << 20, LARGE = 19 * MIB + 12344 }; /* three tasks, a partial block */

/* ---- helpers ---- */

/* Whether a file is valid: its header, and the checksum of every block. */
static bool file_is_good(const mls_index_file *record)
{
    char path[sizeof pool_path + MLS_PATH_BYTES + 2];
    int fd = -1;
    mls_safetensors file = {0};
    mls_status st;
    snprintf(path, sizeof path, "%s/%s", pool_path, record->path);
    if (mls_safetensors_open(path, crc, true, &fd, &file, &st) != MLS_OK) {
        printf("    %s\n", st.text);
        return false;
    }
    bool good = file.has_crc && file.header_crc == record->header_crc;
    good = good && lseek(fd, 0, SEEK_END) == (off_t)record->bytes;
    void **places = calloc(file.count + 1, sizeof *places);
    for (size_t i = 0; i < file.count; i++) {
        places[i] = malloc(file.tensors[i].bytes + 1);
        good = good && (i > 0 || file.tensors[i].offset % 4096 == 0);
    }
    good = good && mls_safetensors_read(fd, &file, places, crc, NULL, &st) == MLS_OK;
    for (size_t i = 0; i < file.count; i++) {
        free(places[i]);
    }
    free(places);
    (void)close(fd);
    mls_safetensors_fini(&file);
    return good;
}

static bool files_are_good(const mls_index *index)
{
    bool good = true;
    for (size_t i = 0; i < index->file_count; i++) {
        good = file_is_good(&index->files[i]) && good;
    }
    return good;
}

/* ---- of the current test ---- */

static unsigned char *data;
static mls_shards_written written;
static struct {
    size_t shape[1];
    char names[10][4];
    mls_shard_item items[10];
} ten;

AFTER_EACH
{
    free(data);
    data = NULL;
    empty_pool();
}

/* ---- good files ---- */

/* All kinds: several sections, sizes on both sides of every limit, no element, one
 * element. */
TEST(written_shards_read_back)
{
    static const size_t sizes[] = {LARGE,  4 * MIB, MIB, MIB - 1,     300000,  262144,
                                   262143, 5000,    0,   8 * MIB + 1, 2 * MIB, 77};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    static char names[COUNT][8];
    data = noise(LARGE + COUNT);
    mls_shard_item items[COUNT];
    uint64_t bytes = 0;
    REQUIRE(data != NULL);
    for (size_t i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "%zu.W", i);
        items[i] =
            item_of(names[i], i % 3 == 2 ? "m" : NULL, MLS_U8, 1, &sizes[i], data + i);
        bytes += sizes[i];
    }
    const mls_shard_job job = job_of(items, COUNT, generations[0], NULL);
    mls_index index = write_all(&job, &written);
    REQUIRE(index.shard_count == COUNT);
    CHECK(files_are_good(&index));
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(reads_back(&index, &items[i], items[i].data, NULL));
    }
    CHECK_TEXT(written.path, "index/0123456789abcdef.0.json");
    CHECK(written.shard_count == COUNT && written.new_shards == COUNT);
    CHECK(written.data_bytes == bytes && written.new_bytes == bytes);
    CHECK(written.new_files == index.file_count && pool_files() == index.file_count + 1);
    mls_index_fini(&index);
}

TEST(reported_checksums_match_the_files)
{
    data = noise(3 * MIB);
    const size_t shape[] = {3 * MIB - 5};
    const mls_shard_item item = item_of("w", NULL, MLS_U8, 1, shape, data);
    const mls_shard_job job = job_of(&item, 1, generations[0], NULL);
    mls_index index = write_all(&job, &written);
    size_t length = 0;
    unsigned char *all = read_pool_file(written.path, &length);
    REQUIRE(data != NULL && all != NULL && index.shard_count == 1);
    CHECK(written.bytes == length && written.crc == crc->update(0, all, length));
    CHECK(index.shards[0].crc == crc->update(0, data, 3 * MIB - 5));
    CHECK(index.shards[0].crcs[2] == crc->update(0, data + 2 * MIB, MIB - 5));
    mls_free(all);
    mls_index_fini(&index);
}

/* So that a folder of shard files without indexes is not lost. */
TEST(shard_file_lists_its_shards)
{
    const size_t shape[] = {10};
    const mls_shard_item items[] = {
        part_of(item_of("w", NULL, MLS_U8, 1, shape, "0123456789"), 0, 2, 1),
        item_of("\"", NULL, MLS_U8, 1, shape, "0123456789")};
    const mls_shard_job job = job_of(items, 2, generations[0], NULL);
    mls_index index = write_all(&job, &written);
    size_t length = 0;
    REQUIRE(index.file_count == 1);
    char *all = (char *)read_pool_file(index.files[0].path, &length);
    REQUIRE(all != NULL);
    all[4095] = '\0';
    CHECK(strstr(all + 8, "\"mlstate.shards\":\"{") != NULL);
    CHECK(strstr(all + 8, "\\\"part\\\":1") != NULL);
    mls_free(all);
    mls_index_fini(&index);
}

/* A checksum over all files of a pool, in the index's order. */
static uint32_t fingerprint(const mls_index *index, const char *index_path)
{
    uint32_t sum = 0;
    for (size_t i = 0; i <= index->file_count; i++) {
        size_t length = 0;
        unsigned char *all = read_pool_file(
            i < index->file_count ? index->files[i].path : index_path, &length);
        CHECK(all != NULL);
        sum = crc->update(sum, all, length);
        mls_free(all);
    }
    return sum;
}

/* A strided, byte-swapped and transposed view, and a packed one, each in two parts. */
static void check_strided(size_t rows, size_t columns)
{
    const size_t shape[] = {rows, columns};
    const size_t count = rows * columns;
    uint32_t *numbers = (uint32_t *)(void *)noise(4 * count), *turned = malloc(4 * count);
    mls_tensor view = transposed_of(turned, MLS_U32, rows, columns);
    mls_status st;
    mls_shard_item items[5];
    uint32_t sum = 0; /* of the first round */
    REQUIRE(numbers != NULL && turned != NULL);
    for (size_t i = 0; i < count; i++) {
        turned[i % columns * rows + i / columns] = __builtin_bswap32(numbers[i]);
    }
    view.swapped = true;
    for (size_t i = 0; i < 5; i++) {
        items[i] = item_of(i < 2   ? "a"
                           : i < 4 ? "b"
                                   : "c",
                           NULL, MLS_U32, 2, shape, i < 2 ? NULL : numbers);
        items[i].strided = i < 2 ? &view : NULL;
        if (i < 4) {
            items[i] = part_of(items[i], MLS_LAYOUT_FLAT, 2, i % 2);
            items[i].first = i % 2 == 0 ? 0 : (count + 1) / 2;
        }
    }
    for (size_t i = 0; i < 3; i += EVERY(2)) {
        mls_pool *two = NULL;
        CHECK(mls_pool_new(2, &two, &st) == MLS_OK);
        mls_shard_job job = job_of(items, 5, generations[0], NULL);
        job.pool = i == 0 ? NULL : i == 1 ? two : four_threads;
        mls_index index = write_all(&job, &written);
        CHECK(files_are_good(&index));
        CHECK(reads_back(&index, &items[0], numbers, NULL));
        CHECK(reads_back(&index, &items[2], numbers, NULL));
        CHECK(reads_back(&index, &items[4], numbers, NULL));
        const uint32_t fingerprint_of_files = fingerprint(&index, written.path);
        sum = i == 0 ? fingerprint_of_files : sum;
        CHECK(fingerprint_of_files == sum);
        mls_index_fini(&index);
        mls_pool_free(two);
        empty_pool();
    }
    free(numbers);
    free(turned);
}

TEST(strided_memory_is_packed_while_writing)
{
    check_strided(3, 5);       /* segments */
    check_strided(233, 1021);  /* through the page cache */
    check_strided(1733, 2999); /* by direct I/O, in several tasks */
}

/* The same on a file system in memory, which may not support direct I/O. */
TEST(a_file_system_in_memory_is_written_too)
{
    char saved_path[sizeof pool_path];
    const int kept_fd = pool_fd;
    if (access("/dev/shm", W_OK) != 0) {
        return;
    }
    memcpy(saved_path, pool_path, sizeof saved_path);
    enter_pool("/dev/shm");
    check_strided(3, 5);
    check_strided(733, 2999);
    written_shards_read_back();
    leave_pool();
    memcpy(pool_path, saved_path, sizeof saved_path);
    pool_fd = kept_fd;
}

TEST(empty_lists_and_empty_shards_are_written)
{
    const size_t none[] = {0, 3}, two[] = {2};
    const mls_shard_item items[] = {
        item_of("none", NULL, MLS_F32, 2, none, NULL),
        part_of(item_of("two", NULL, MLS_U8, 1, two, "xy"), 0, 3, 2),
        item_of("none", "m", MLS_F64, 2, none, NULL)};
    for (uint64_t pack_below = 0; pack_below < 2; pack_below++) {
        mls_shard_job job = job_of(items, 3, generations[0], NULL);
        job.pack_below = pack_below;
        mls_index index = write_all(&job, &written);
        CHECK(index.shard_count == 3 && written.data_bytes == 0);
        CHECK(index.file_count == (pack_below == 0 ? 3U : 2U) && files_are_good(&index));
        CHECK(reads_back(&index, &items[0], "", NULL));
        mls_index_fini(&index);
        empty_pool();
    }
    const mls_shard_job job = job_of(NULL, 0, generations[0], NULL);
    mls_index index = write_all(&job, &written);
    CHECK(index.shard_count == 0 && written.new_files == 0 && pool_files() == 1);
    mls_index_fini(&index);
}

/* ---- failures ---- */

/* Ten files, so that some are complete when others fail. */
static void make_ten(size_t bytes)
{
    free(data);
    data = noise(bytes + 10);
    ten.shape[0] = bytes;
    for (size_t i = 0; i < 10; i++) {
        snprintf(ten.names[i], sizeof ten.names[i], "%zu", i);
        ten.items[i] =
            item_of(ten.names[i], i < 5 ? NULL : "m", MLS_U8, 1, ten.shape, data + i);
    }
}

/* A write that fails leaves no file and no descriptor. */
static mls_code fails(const mls_shard_job *job, mls_status *st)
{
    written.shard_count = 77;
    const size_t files = pool_files();
    const int before = next_descriptor();
    const mls_code code = mls_shards_write(job, &written, st);
    CHECK(next_descriptor() == before); /* no file stayed open */
    CHECK(code != MLS_OK && written.shard_count == 77 && pool_files() == files);
    return code;
}

TEST(missing_folder_leaves_no_files)
{
    make_ten(300000);
    const mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
    for (size_t i = 0; i < 3; i++) {
        CHECK(unlinkat(pool_fd, pool_folders[i], AT_REMOVEDIR) == 0);
        CHECK(fails(&job, &status) == MLS_E_IO && status.os_error == ENOENT);
        CHECK(strstr(status.text, pool_folders[i]) != NULL);
        CHECK(mkdirat(pool_fd, pool_folders[i], 0700) == 0);
    }
}

/* The target of a link may belong to another checkpoint. */
TEST(a_folder_that_is_a_link_is_refused)
{
    make_ten(300000);
    const mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
    CHECK(mkdirat(pool_fd, "other", 0700) == 0);
    for (size_t i = 0; i < 3; i++) {
        CHECK(unlinkat(pool_fd, pool_folders[i], AT_REMOVEDIR) == 0);
        CHECK(symlinkat("other", pool_fd, pool_folders[i]) == 0);
        CHECK(fails(&job, &status) == MLS_E_IO);
        CHECK(status.os_error == ENOTDIR || status.os_error == ELOOP);
        CHECK(strstr(status.text, pool_folders[i]) != NULL);
        CHECK(unlinkat(pool_fd, pool_folders[i], 0) == 0);
        CHECK(mkdirat(pool_fd, pool_folders[i], 0700) == 0);
    }
    CHECK(unlinkat(pool_fd, "other", AT_REMOVEDIR) == 0); /* it is empty */
}

TEST(read_only_folder_leaves_no_files)
{
    if (geteuid() == 0) {
        return; /* root may write everywhere */
    }
    make_ten(300000);
    const mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
    CHECK(fchmodat(pool_fd, "optim_state", 0500, 0) == 0);
    CHECK(fails(&job, &status) == MLS_E_IO && status.os_error == EACCES);
    CHECK(fchmodat(pool_fd, "optim_state", 0700, 0) == 0);
}

/* Committed files are changed neither by a write nor by its rollback. */
TEST(a_generation_is_written_only_once)
{
    make_ten(300000);
    mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
    mls_index index = write_all(&job, &written);
    const uint32_t sum = fingerprint(&index, written.path);
    data[0] ^= 1;
    CHECK(fails(&job, &status) == MLS_E_IO && status.os_error == EEXIST);
    job.count = 0; /* now only the index is in the way */
    CHECK(fails(&job, &status) == MLS_E_IO && status.os_error == EEXIST);
    job.count = 10;
    for (size_t i = 0; i < 10; i++) {
        ten.items[i].id.section = MLS_PARAMS;
        ten.names[i][0] = (char)('a' + i); /* only the index has its name */
    }
    CHECK(fails(&job, &status) == MLS_E_IO && status.os_error == EEXIST);
    CHECK(fingerprint(&index, written.path) == sum && files_are_good(&index));
    mls_index_fini(&index);
}

TEST(full_disk_leaves_no_files)
{
    struct rlimit limit, small;
    void (*const action)(int) = signal(SIGXFSZ, SIG_IGN);
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    /* when the space is reserved, during the writes, and at the last bytes */
    static const size_t bytes[] = {3 * MIB, 600000, 300000};
    static const rlim_t most[] = {2 * MIB, 500000, 303000};
    for (size_t i = 0; i < 3; i++) {
        make_ten(bytes[i]);
        const mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
        small = limit;
        small.rlim_cur = most[i];
        CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
        CHECK(fails(&job, &status) == MLS_E_IO && status.os_error == EFBIG);
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    }
    (void)signal(SIGXFSZ, action);
}

TEST(first_failed_tensor_is_reported)
{
    make_ten(300000);
    mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
    job.pool = NULL;
    CHECK(close(openat(pool_fd, "params/3.0-1.0123456789abcdef-0.safetensors.tmp",
                       O_CREAT | O_WRONLY, 0600)) == 0);
    CHECK(fails(&job, &status) == MLS_E_IO && status.os_error == EEXIST);
    CHECK_TEXT(status.name, "3");
    CHECK(pool_files() == 1); /* the file of another writer stays */
}

/* Tasks that wait for a file when its creation fails try it again. Only a sanitizer
 * notices a leak there, and not in every run. */
TEST(waiting_tasks_of_a_failed_file_free_its_layout)
{
    enum { TASKS = 8, TRIES = 100 };
    static const size_t shape[] = {(size_t)TASKS * 8 * MIB};
    data = calloc(shape[0], 1);
    const mls_shard_item item = item_of("w", NULL, MLS_U8, 1, shape, data);
    const mls_shard_job job = job_of(&item, 1, generations[0], NULL);
    CHECK(close(openat(pool_fd, "params/w.0-1.0123456789abcdef-0.safetensors.tmp",
                       O_CREAT | O_WRONLY, 0600)) == 0);
    for (size_t i = 0; i < TRIES; i++) {
        CHECK(mls_shards_write(&job, &written, &status) == MLS_E_IO);
    }
}

TEST(progress_counts_every_byte_once)
{
    for (size_t i = 0; i < 3; i++) {
        static const size_t sizes[] = {1000, 300000, 9 * MIB};
        watcher seen = {.allowed = 1 << 30};
        const mls_progress progress = {.report = watch, .context = &seen};
        make_ten(sizes[i]);
        mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
        job.progress = &progress;
        mls_index index = write_all(&job, &written);
        CHECK(atomic_load(&seen.bytes) == written.data_bytes);
        mls_index_fini(&index);
        empty_pool();
    }
}

TEST(stopped_write_leaves_no_files)
{
    make_ten(3 * MIB);
    for (int allowed = 1; allowed < 12; allowed += 3) {
        for (int is_single_threaded = 0; is_single_threaded < 2; is_single_threaded++) {
            watcher seen = {.allowed = allowed};
            const mls_progress progress = {.report = watch, .context = &seen};
            mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
            job.progress = &progress;
            job.pool = is_single_threaded == 1 ? NULL : four_threads;
            CHECK(fails(&job, &status) == MLS_E_STOPPED && status.code == MLS_E_STOPPED);
            CHECK(atomic_load(&seen.calls) < allowed + 4);
        }
    }
}

TEST(refused_plan_writes_no_files)
{
    make_ten(1000);
    ten.items[9].id.state = text("a.b");
    const mls_shard_job job = job_of(ten.items, 10, generations[0], NULL);
    CHECK(fails(&job, &status) == MLS_E_VALUE);
}
