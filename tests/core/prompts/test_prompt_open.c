/* Opening: only regular and undamaged stores are opened. */
#include "support/prompt_logs.h"

#include <sys/wait.h>

static mls_code open_path(const char *path, bool create)
{
    mls_prompt_log *log = NULL;
    const mls_code code = mls_prompt_log_open(path, create, mls_kernels_of(best_cpu()),
                                              NULL, &log, &status);
    CHECK((code == MLS_OK) == (log != NULL));
    mls_prompt_log_free(log);
    return code;
}

TEST(links_and_fifos_in_place_of_the_store_are_refused)
{
    CHECK(mkdir(path_of("log"), 0700) == 0);
    CHECK(mkfifo(path_of("log/store"), 0600) == 0);
    CHECK(open_path(path_of("log"), true) == MLS_E_FORMAT);
    CHECK(unlink(path_of("log/store")) == 0);
    CHECK(symlink("/dev/zero", path_of("log/store")) == 0);
    CHECK(open_path(path_of("log"), true) == MLS_E_FORMAT);
    CHECK(unlink(path_of("log/store")) == 0);
    CHECK(mkdir(path_of("log/store"), 0700) == 0);
    CHECK(open_path(path_of("log"), true) == MLS_E_FORMAT);
}

TEST(a_damaged_or_newer_store_is_refused)
{
    CHECK(open_path(path_of("log"), true) == MLS_OK);
    for (size_t at = 0; at < 36; at++) {
        flip_byte(path_of("log/store"), at);
        CHECK(open_path(path_of("log"), true) == MLS_E_FORMAT);
        flip_byte(path_of("log/store"), at);
    }
    CHECK(open_path(path_of("log"), true) == MLS_OK);
    CHECK(truncate(path_of("log/store"), 20) == 0);
    CHECK(open_path(path_of("log"), true) == MLS_E_FORMAT);
    CHECK_FAILS(open_path(path_of("none"), false), MLS_E_IO,
                "cannot open the folder: No such file or directory");
    CHECK_FAILS(open_path(path_of("none/log"), true), MLS_E_IO,
                "cannot create the folder: No such file or directory");
}

static bool stop_at_call(void *context, uint64_t bytes)
{
    int *left = context;
    (void)bytes;
    return (*left)-- > 0;
}

TEST(progress_stops_an_opening_at_any_window)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 8) == 8);
    mls_prompt_log_free(log);
    (void)unlink(path_of("log/index"));
    flip_byte(segment_path(1), 70); /* the scan searches behind the first record */
    int calls = 0;
    for (mls_code code = MLS_E_STOPPED; code == MLS_E_STOPPED; calls++) {
        int left = calls;
        const mls_progress progress = {stop_at_call, &left};
        log = NULL;
        code = mls_prompt_log_open(path_of("log"), false, mls_kernels_of(best_cpu()),
                                   &progress, &log, &status);
        CHECK((code == MLS_OK) == (log != NULL) &&
              (code == MLS_OK || code == MLS_E_STOPPED));
        mls_prompt_log_free(log);
    }
    CHECK(calls > 3);
}

TEST(links_and_fifos_in_place_of_segment_and_index_are_refused)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 2) == 2);
    mls_prompt_log_free(log);
    const char *names[] = {"log/index", "log/segment-00000002"};
    for (size_t i = 0; i < 2; i++) {
        (void)unlink(path_of(names[i]));
        CHECK(symlink("/dev/zero", path_of(names[i])) == 0);
        CHECK(open_path(path_of("log"), false) == MLS_E_FORMAT);
        CHECK(unlink(path_of(names[i])) == 0);
        CHECK(mkfifo(path_of(names[i]), 0600) == 0);
        CHECK(open_path(path_of("log"), false) == MLS_E_FORMAT);
        CHECK(unlink(path_of(names[i])) == 0);
    }
    CHECK(open_path(path_of("log"), false) == MLS_OK);
}

TEST(the_child_of_a_fork_does_not_share_the_lock)
{
    mls_prompt_log *log = open_log();
    bool busy = false;
    CHECK(put_blocks(log, 1, 2) == 2);
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    const pid_t child = fork();
    if (child == 0) {
        bool child_busy = false;
        mls_status st;
        const bool good = stored_tokens(log, 1) == 8 &&
                          mls_prompt_lock(log, &child_busy, &st) == MLS_OK && child_busy;
        _exit(good ? 0 : 1);
    }
    int end = 1;
    CHECK(waitpid(child, &end, 0) == child && end == 0);
    mls_prompt_unlock(log);
    CHECK(put_blocks(log, 2, 2) == 2);
    mls_prompt_log_free(log);
}
