/* Every call of the system fails once, the n-th one for every n: in replacing and reading
 * files, and in writing and reading shards.  The error is reported, or harmless. */
#include "support/failing_calls.h"
#include "support/shards.h"
#include "support/temporary_folder.h"

/* ---- files ---- */

static mls_code replace(mls_status *st)
{
    return mls_file_replace(file_path, 0666, "new", 3, st);
}

static mls_code read_start(mls_status *st)
{
    int fd = -1;
    char start[3];
    uint64_t bytes;
    mls_code code = mls_file_open(file_path, &fd, &bytes, st);
    if (code == MLS_OK) {
        code = mls_file_read_at(fd, start, sizeof start, 0, st);
        close(fd);
    }
    return code;
}

TEST(failing_calls_are_reported_for_files)
{
    write_text(file_path, "old");
    check_call("close", replace, "cannot close the file");
    check_call("faccessat", replace, "the old file may not be replaced");
    check_call("fstatat", replace, "cannot examine the old file");
    check_call("getentropy", replace, "cannot get random bytes");
    check_call("openat", replace,
               "cannot create a temporary file in the folder of the target");
    check_call("renameat", replace, "cannot rename the new file over the old one");
    check_call("fstat", read_start, "cannot examine the file");
    check_call("pread", read_start, "cannot read 3 bytes at offset 0");
    if (geteuid() == 0) { /* others cannot make a file of another owner */
        REQUIRE(chown(file_path, 1, 1) == 0);
        check_call("fchown", replace, "cannot keep the old file's owner");
    }
}

/* ---- shards ---- */

static unsigned char bytes[2 << 20];

/* A large shard, and a small one; a failure leaves no file. */
static mls_code write_shards(mls_status *st)
{
    static const size_t large[] = {sizeof bytes}, small[] = {1000};
    const mls_shard_item items[] = {item_of("a", NULL, MLS_U8, 1, large, bytes),
                                    item_of("b", NULL, MLS_U8, 1, small, bytes)};
    const mls_shard_job job = job_of(items, 2, generations[0], NULL);
    mls_shards_written written;
    const mls_code code = mls_shards_write(&job, &written, st);
    CHECK(pool_files() == (code == MLS_OK ? 3 : 0));
    empty_pool();
    return code;
}

TEST(failing_calls_are_reported_for_written_shards)
{
    use_one_thread();
    check_call("close", write_shards, "cannot close a file");
    check_call("close", write_shards, "cannot close the index");
    check_call("fallocate", write_shards, "no room for a file of 2101248 bytes");
    check_call("openat", write_shards, "cannot open the folder optim_state");
    check_call("openat", write_shards, "cannot create a file");
    check_call("openat", write_shards, "cannot create the index");
    check_call("renameat", write_shards, "cannot rename the temporary file");
    check_call("renameat", write_shards, "cannot rename the temporary index");
    const int direct = openat(pool_fd, "direct", O_CREAT | O_WRONLY | O_DIRECT, 0600);
    if (direct >= 0) { /* not every file system has direct writes, which are padded */
        check_call("ftruncate", write_shards, "cannot set the length of a file");
        CHECK(close(direct) == 0);
    }
    (void)unlinkat(pool_fd, "direct", 0);
}

/* The file of `replace`, as a shard. */
static mls_code read_shard(mls_status *st)
{
    const mls_part all = {.rank = 1, .length = {3}, .end = 3};
    const mls_stored_shard shard = {.file = file_path,
                                    .file_bytes = 3,
                                    .item_bytes = 1,
                                    .part = &all,
                                    .name = text("x")};
    unsigned char got[3];
    size_t failed;
    const mls_read_piece piece = {.shard = &shard, .to = &all, .data = got};
    return mls_shards_read(
        &(mls_read_request){.folder = -1, .pieces = &piece, .count = 1}, &failed, st);
}

TEST(failing_calls_are_reported_for_read_shards)
{
    char text[MLS_TEXT_BYTES];
    write_text(file_path, "old");
    snprintf(text, sizeof text, "tensor 'x', file '%s': cannot examine the file",
             file_path);
    check_call("fstat", read_shard, text);
}
