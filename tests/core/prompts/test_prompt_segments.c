/* Segments: only files of this log count, and open ones stay readable. */
#include "support/prompt_logs.h"

#include <errno.h>

static void touch(const char *name)
{
    FILE *file = fopen(path_of(name), "wb");
    REQUIRE(file != NULL);
    CHECK(fclose(file) == 0);
}

TEST(limits_of_segments_follow_the_budget)
{
    CHECK(mls_prompt_segment_limit(UINT64_MAX) == 256 << 20);
    CHECK(mls_prompt_segment_limit(0) == 64 << 10);
    CHECK(mls_prompt_segment_limit(160 << 20) == 10 << 20);
}

TEST(only_exact_names_are_segments)
{
    static const char *const others[] = {"segment-1",         "segment-000000001",
                                         "segment-0000000x",  "segment-00000000",
                                         "segment-99999999x", "segmentx-00000001"};
    mls_prompt_log *log = open_log();
    uint32_t *numbers = NULL;
    size_t count = 9;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "log/%s", others[i]);
        touch(name);
    }
    CHECK(mls_prompt_segments_list(log, false, &numbers, &count, &status) == MLS_OK);
    CHECK(count == 0);
    mls_free(numbers);
    touch("log/segment-00000017");
    touch("log/segment-00000003");
    CHECK(mls_prompt_segments_list(log, false, &numbers, &count, &status) == MLS_OK);
    CHECK(count == 2 && numbers[0] == 3 && numbers[1] == 17);
    mls_free(numbers);
    mls_prompt_log_free(log);
}

TEST(a_new_segment_skips_names_that_exist)
{
    mls_prompt_log *log = open_log();
    touch("log/segment-00000001");
    CHECK(mls_prompt_segment_create(log, &status) == MLS_OK);
    CHECK(log->highest == 2 && mls_prompt_segment_find(log, 2) != NULL);
    CHECK(mls_prompt_segment_find(log, 1) == NULL);
    log->highest = 99999999; /* the last number */
    CHECK_FAILS(mls_prompt_segment_create(log, &status), MLS_E_SIZE,
                "the store has no segment numbers left");
    mls_prompt_log_free(log);
}

TEST(links_fifos_and_segments_of_other_stores_are_refused)
{
    mls_prompt_log *log = open_log();
    mls_prompt_file *file = NULL;
    CHECK(put_blocks(log, 1, 2) == 2);
    CHECK(symlink("segment-00000001", path_of("log/segment-00000002")) == 0);
    CHECK(mkfifo(path_of("log/segment-00000003"), 0600) == 0);
    char first[2 * PATH_ROOM];
    snprintf(first, sizeof first, "%s", segment_path(1));
    CHECK(link(first, path_of("log/segment-00000004")) == 0);
    for (uint32_t number = 2; number <= 5; number++) {
        mls_prompt_segment segment = {.number = number};
        const mls_code code = mls_prompt_segment_hold(log, &segment, &file, &status);
        CHECK(code == (number < 5 ? MLS_E_FORMAT : MLS_E_IO));
        CHECK(number < 5 || status.os_error == ENOENT);
        CHECK(number != 4 ||
              strcmp(status.text, "the segment belongs to another place") == 0);
    }
    mls_prompt_log_free(log);
    log = NULL;
    CHECK(unlink(segment_path(3)) == 0); /* folders are listed in any order */
    CHECK_FAILS(mls_prompt_log_open(path_of("log"), false, mls_kernels_of(best_cpu()),
                                    NULL, &log, &status),
                MLS_E_FORMAT, "segment-00000002 is not a regular file: delete it");
    CHECK(unlink(segment_path(2)) == 0 && mkfifo(segment_path(3), 0600) == 0);
    CHECK_FAILS(mls_prompt_log_open(path_of("log"), false, mls_kernels_of(best_cpu()),
                                    NULL, &log, &status),
                MLS_E_FORMAT, "segment-00000003 is not a regular file: delete it");
    CHECK(unlink(segment_path(3)) == 0);
    log = open_log(); /* without the copy of a segment in another place */
    CHECK(log->segment_count == 1 && stored_tokens(log, 1) == 8);
    CHECK(put_blocks(log, 1, 3) == 1);
    mls_prompt_log_free(log);
}

TEST(an_open_file_is_readable_after_its_segment_is_forgotten)
{
    mls_prompt_log *log = open_log();
    mls_prompt_file *file = NULL;
    char byte;
    CHECK(put_blocks(log, 1, 2) == 2);
    REQUIRE(mls_prompt_segment_hold(log, &log->segments[0], &file, &status) == MLS_OK);
    CHECK(unlink(segment_path(1)) == 0);
    mls_prompt_log_free(log);
    CHECK(pread(file->fd, &byte, 1, 100) == 1);
    mls_prompt_file_release(file);
    mls_prompt_file_release(NULL);
}

TEST(only_strays_of_this_store_are_deleted)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 1) == 1);
    CHECK(mls_prompt_segment_create(log, &status) == MLS_OK);
    mls_prompt_segment_forget(log, 1);
    mls_prompt_segment_remove_stray(log, 1);
    CHECK(access(segment_path(1), F_OK) != 0);
    CHECK(symlink("store", segment_path(7)) == 0);
    mls_prompt_segment_remove_stray(log, 7);
    CHECK(access(segment_path(7), F_OK) == 0);
    mls_prompt_log_free(log);
}
