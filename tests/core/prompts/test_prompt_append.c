/* Appends: after a failure the segment is as before. */
#include "support/prompt_logs.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>

/* Limit the size of files, as a full disk would. */
static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    limit.rlim_cur = bytes;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

TEST(a_full_disk_leaves_the_log_unchanged)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 2) == 2);
    const size_t bytes = file_bytes(segment_path(1));
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    for (size_t room = 0; room < 5000; room += 500) {
        limit_files(bytes + room);
        CHECK(put_blocks(log, 2, 4) == -1);
        CHECK(status.code == MLS_E_IO && status.os_error == EFBIG);
        CHECK(file_bytes(segment_path(1)) == bytes && stored_tokens(log, 2) == 0);
    }
    limit_files(RLIM_INFINITY);
    CHECK(put_blocks(log, 2, 4) == 4 && stored_tokens(log, 2) == 16);
    mls_prompt_log_free(log);
}
