/* The writer: one at a time, and it repairs the traces of the last one. */
#include "support/prompt_logs.h"

#include <errno.h>

TEST(a_second_writer_finds_the_log_busy)
{
    mls_prompt_log *log = open_log(), *other = open_log();
    bool busy = true;
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_lock(log, &busy, &status) == MLS_OK && busy);
    CHECK(mls_prompt_lock(other, &busy, &status) == MLS_OK && busy);
    mls_prompt_unlock(log);
    CHECK(mls_prompt_lock(other, &busy, &status) == MLS_OK && !busy);
    mls_prompt_unlock(other);
    mls_prompt_log_free(log);
    mls_prompt_log_free(other);
}

TEST(a_log_opened_for_reading_is_not_written)
{
    mls_prompt_log *log = open_log();
    bool busy = false;
    log->refused = EACCES;
    CHECK(mls_prompt_lock(log, &busy, &status) == MLS_E_IO);
    CHECK(status.os_error == EACCES);
    mls_prompt_log_free(log);
}

/* As after a power failure: the header survived, and its payload did not. */
TEST(the_damaged_part_of_the_last_put_is_stored_again)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 2) == 2 && put_blocks(log, 2, 3) == 3);
    const uint64_t middle = mls_prompt_entry_offset(&log->index.entries[3]);
    mls_prompt_log_free(log);
    flip_byte(segment_path(1), middle + 500);
    log = open_log();
    CHECK(stored_tokens(log, 2) == SIZE_MAX); /* a reader finds the damage too */
    CHECK(put_blocks(log, 2, 3) == 1);
    CHECK(stored_tokens(log, 2) == 12 && stored_tokens(log, 1) == 8);
    mls_prompt_log_free(log);
}

/* Nothing reads the damaged record before the put: the writer looks for it. */
TEST(a_writer_that_opens_a_log_checks_the_records_of_the_last_put)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 2) == 2 && put_blocks(log, 2, 3) == 3);
    const uint64_t first = mls_prompt_entry_offset(&log->index.entries[2]);
    const uint64_t last = mls_prompt_entry_offset(&log->index.entries[4]);
    mls_prompt_log_free(log);
    flip_byte(segment_path(1), first + 500);
    flip_byte(segment_path(1), last + 500);
    log = open_log();
    CHECK(put_blocks(log, 2, 3) == 2);
    CHECK(stored_tokens(log, 2) == 12 && stored_tokens(log, 1) == 8);
    mls_prompt_log_free(log);
}

/* A put that finds its records stored by a killed writer returns that they are
 * durable. */
TEST(records_of_another_writer_are_synced)
{
    mls_prompt_log *log = open_log(), *other = open_log();
    CHECK(put_blocks(log, 1, 2) == 2);
    CHECK(log->synced_bytes == log->segments[0].bytes);
    CHECK(other->synced_bytes == 0 && put_blocks(other, 1, 2) == 0);
    CHECK(other->synced_segment == 1 && other->synced_bytes == log->synced_bytes);
    CHECK(put_blocks(other, 2, 2) == 2 && put_blocks(log, 2, 2) == 0);
    CHECK(log->synced_bytes == other->synced_bytes);
    mls_prompt_log_free(log);
    mls_prompt_log_free(other);
}

TEST(a_segment_that_another_writer_created_is_used)
{
    mls_prompt_log *log = open_log(), *other = open_log();
    CHECK(put_blocks(log, 1, 2) == 2 && stored_tokens(other, 1) == 8);
    const uint32_t highest = log->highest;
    CHECK(mls_prompt_segment_create(log, &status) == MLS_OK);
    CHECK(pwrite(log->store, &highest, 4, MLS_PROMPT_HINT) == 4); /* as if killed there */
    CHECK(put_blocks(other, 2, 2) == 2);
    CHECK(other->highest == 2 && file_bytes(segment_path(2)) > 64);
    mls_prompt_log_free(other);
    CHECK(stored_tokens(log, 2) == 8);
    mls_prompt_log_free(log);
}

TEST(the_index_is_saved_at_the_end_if_it_saves_work)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 4) == 4);
    mls_prompt_log_save_index(log);
    CHECK(access(path_of("log/index"), F_OK) != 0);
    for (uint32_t i = 2; i < 80; i++) {
        CHECK(put_blocks(log, i, 4) == 4);
    }
    mls_prompt_log_save_index(log);
    CHECK(access(path_of("log/index"), F_OK) == 0 && log->unindexed == 0);
    mls_prompt_log_free(log);
}
