/* Lists, statistics, and verification without descriptors. */
#include "support/prompt_logs.h"

#include <errno.h>
#include <sys/resource.h>

static bool count_records(void *context, const mls_prompt_listed *listed)
{
    size_t *count = context;
    CHECK(listed->hit.end - listed->hit.start == BLOCK && !listed->is_pinned);
    CHECK(listed->hit.header.payload_bytes == PART_BYTES);
    return ++*count < 5;
}

TEST(records_are_listed_until_the_visitor_has_enough)
{
    mls_prompt_log *log = open_log();
    size_t count = 0;
    CHECK(put_blocks(log, 1, 3) == 3);
    CHECK(mls_prompt_list(log, count_records, &count, NULL, &status) == MLS_OK &&
          count == 3);
    CHECK(put_blocks(log, 2, 3) == 3);
    count = 0;
    CHECK(mls_prompt_list(log, count_records, &count, NULL, &status) == MLS_OK &&
          count == 5);
    mls_prompt_log_free(log);
}

TEST(statistics_count_the_stored_records)
{
    mls_prompt_log *log = open_log();
    mls_prompt_stats stats;
    size_t changed = 0;
    CHECK(put_blocks(log, 1, 3) == 3 && mark_all(log, 1, MLS_PROMPT_PIN, &changed));
    CHECK(mls_prompt_stats_of(log, &stats, &status) == MLS_OK);
    CHECK(stats.records == 3 && stats.blocks == 3 && stats.pinned == 3);
    CHECK(stats.segments == 1 && stats.live_bytes >= 3 * PART_BYTES);
    CHECK(stats.disk_bytes >= file_bytes(segment_path(1)));
    mls_prompt_log_free(log);
}

/* A writer cut the segment while the records were listed. */
TEST(records_behind_the_end_of_a_segment_are_damaged)
{
    mls_prompt_log *log = open_log();
    mls_prompt_damage *damage = NULL;
    size_t count = 0;
    CHECK(put_blocks(log, 1, 1) == 1);
    log->segments[0].bytes = 10;
    log->is_writing = true; /* the log is not read anew */
    CHECK(mls_prompt_verify(log, false, NULL, &damage, &count, &status) == MLS_OK);
    REQUIRE(count == 1);
    CHECK_TEXT(damage[0].text, "the segment is cut off");
    mls_free(damage);
    log->is_writing = false;
    mls_prompt_log_free(log);
}

/* Verify the log, and return the offset of the only damage; 0: there is none. */
static uint64_t damaged_offset(mls_prompt_log *log, bool repair)
{
    mls_prompt_damage *damage = NULL;
    size_t count = 0;
    CHECK(mls_prompt_verify(log, repair, NULL, &damage, &count, &status) == MLS_OK);
    CHECK(count <= 1);
    const uint64_t offset = count > 0 ? damage[0].offset : 0;
    mls_free(damage);
    return offset;
}

TEST(damaged_headers_without_an_entry_are_found_and_removed)
{
    mls_prompt_log *log = open_log();
    bool busy = true;
    CHECK(put_blocks(log, 1, 3) == 3);
    const uint64_t first = log->index.entries[0].place * (uint64_t)MLS_PROMPT_UNIT;
    mls_prompt_log_free(log);
    flip_byte(segment_path(1), (size_t)first + 40); /* in its key */
    log = open_log();
    CHECK(damaged_offset(log, false) == first && stored_tokens(log, 1) == 0);
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(damaged_offset(log, true) == first); /* a new segment has the others */
    mls_prompt_unlock(log);
    CHECK(damaged_offset(log, false) == 0 && access(segment_path(1), F_OK) != 0);
    CHECK(put_blocks(log, 1, 1) == 1 && stored_tokens(log, 1) == 12);
    mls_prompt_log_free(log);
}

/* The writer cuts what follows the last valid header of the newest segment. */
TEST(a_damaged_last_header_is_found_and_reported_by_the_repair_that_cuts_it)
{
    mls_prompt_log *log = open_log();
    bool busy = true;
    CHECK(put_blocks(log, 1, 2) == 2);
    const uint64_t last = log->index.entries[1].place * (uint64_t)MLS_PROMPT_UNIT;
    mls_prompt_log_free(log);
    flip_byte(segment_path(1), (size_t)last);
    log = open_log();
    CHECK(damaged_offset(log, false) == last && stored_tokens(log, 1) == 4);
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(damaged_offset(log, true) == last && file_bytes(segment_path(1)) == last);
    mls_prompt_unlock(log);
    CHECK(damaged_offset(log, false) == 0);
    mls_prompt_log_free(log);
}

/* Without descriptors, a repair must not remove healthy records. */
TEST(too_many_open_files_are_no_damage)
{
    mls_prompt_log *log = open_log();
    const prompt p = prompt_of(1);
    struct rlimit before;
    mls_prompt_damage *damage = NULL;
    size_t count = 0;
    uint64_t freed = 0;
    bool busy = true;
    CHECK(put_bytes(log, &p, 3, 40000, 1 << 20) == 3 && log->segment_count > 1);
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_prune(log, UINT64_MAX, NULL, &freed, &status) == MLS_OK);
    mls_prompt_unlock(log);
    mls_prompt_log_free(log);
    log = open_log(); /* only the newest segment is open */
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    const int lowest = dup(STDIN_FILENO);
    REQUIRE(lowest >= 0 && close(lowest) == 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
    const struct rlimit none = {.rlim_cur = (rlim_t)lowest, .rlim_max = before.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
    const mls_code code = mls_prompt_verify(log, true, NULL, &damage, &count, &status);
    CHECK(mls_prompt_list(log, count_records, &count, NULL, &status) == MLS_E_IO);
    REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
    mls_prompt_unlock(log);
    CHECK(code == MLS_E_IO && status.os_error == EMFILE);
    CHECK(stored_tokens(log, 1) == 12);
    mls_prompt_log_free(log);
}
