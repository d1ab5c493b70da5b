/* Stops: progress ends each scan, check and compaction at any place, and the log is
 * complete afterwards. */
#include "support/prompt_logs.h"

static bool continues(void *context, uint64_t bytes)
{
    (void)bytes;
    return (*(int *)context)-- > 0;
}

/* Store two blocks of the prompts `first` and `first` + 1, of which the first prompt gets
 * a damaged header: the scan has to search behind it. */
static void put_damaged(mls_prompt_log *writer, uint32_t first)
{
    CHECK(put_blocks(writer, first, 2) == 2);
    const mls_prompt_index *index = &writer->index;
    const mls_prompt_entry damaged = index->entries[index->count - 2];
    CHECK(put_blocks(writer, first + 1, 2) == 2);
    flip_byte(segment_path(damaged.segment), mls_prompt_entry_offset(&damaged) + 30);
}

TEST(a_stopped_match_loses_no_record_of_another_writer)
{
    mls_prompt_log *writer = open_log(), *reader = open_log();
    mls_code code = MLS_E_STOPPED;
    uint32_t number = 1;
    for (int calls = 0; code == MLS_E_STOPPED; calls++, number += 3) {
        int left = calls;
        const mls_progress progress = {continues, &left};
        const prompt p = prompt_of(number + 2), large = prompt_of(500 + number);
        const mls_prompt_prefix prefix = prefix_of(&p, MOST_TOKENS);
        mls_prompt_match *match = NULL;
        CHECK(put_bytes(writer, &large, 1, 40000, 1 << 20) ==
              1); /* often a new segment */
        put_damaged(writer, number);
        CHECK(put_blocks(writer, number + 2, 2) == 2);
        reader->progress = &progress;
        code = mls_prompt_match_new(reader, &prefix, &match, &status);
        reader->progress = NULL;
        CHECK(code == MLS_OK || (code == MLS_E_STOPPED && match == NULL));
        mls_prompt_match_free(match);
        for (uint32_t i = 1; i <= number + 2; i++) {
            CHECK(stored_tokens(reader, i) == stored_tokens(writer, i));
        }
    }
    CHECK(number > 9);
    mls_prompt_log_free(writer);
    mls_prompt_log_free(reader);
}

TEST(a_stopped_lock_keeps_the_log)
{
    int calls = 0;
    for (mls_code code = MLS_E_STOPPED; code == MLS_E_STOPPED; calls++) {
        int left = calls;
        bool busy = true;
        const mls_progress progress = {continues, &left};
        mls_prompt_log *writer = open_log(), *other = open_log();
        put_damaged(writer, 10 + 2 * (uint32_t)calls);
        const size_t bytes = file_bytes(segment_path(1));
        other->progress = &progress;
        code = mls_prompt_lock(other, &busy, &status);
        other->progress = NULL;
        CHECK(code == MLS_OK || code == MLS_E_STOPPED);
        if (code == MLS_OK) {
            mls_prompt_unlock(other);
        } else {
            CHECK(file_bytes(segment_path(1)) == bytes);
        }
        CHECK(put_blocks(other, 1000 + (uint32_t)calls, 1) == 1);
        CHECK(stored_tokens(other, 11 + 2 * (uint32_t)calls) == 8);
        mls_prompt_log_free(writer);
        mls_prompt_log_free(other);
    }
    CHECK(calls > 3);
}

TEST(a_stopped_compaction_keeps_all_records)
{
    mls_code code = MLS_E_STOPPED;
    int calls = 0;
    for (; code == MLS_E_STOPPED; calls++) {
        int left = calls;
        size_t changed = 0;
        uint64_t freed = 0;
        bool busy = true;
        const mls_progress progress = {continues, &left};
        mls_prompt_log *log = open_log();
        const uint32_t first = 1 + 10 * (uint32_t)calls;
        CHECK(put_blocks(log, first, 9) == 9 && put_blocks(log, first + 1, 3) == 3);
        CHECK(mark_all(log, first, MLS_PROMPT_DELETE, &changed) && changed == 9);
        REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
        code = mls_prompt_prune(log, UINT64_MAX, &progress, &freed, &status);
        mls_prompt_unlock(log);
        CHECK(code == MLS_OK || code == MLS_E_STOPPED);
        CHECK(stored_tokens(log, first + 1) == 12 && stored_tokens(log, first) == 0);
        mls_prompt_log_free(log);
        log = open_log();
        for (uint32_t i = 0; i <= (uint32_t)calls; i++) {
            CHECK(stored_tokens(log, 2 + 10 * i) == 12);
        }
        mls_prompt_log_free(log);
    }
    CHECK(calls > 3);
}

static bool visit(void *context, const mls_prompt_listed *listed)
{
    (void)listed;
    (*(int *)context)++;
    return true;
}

TEST(lists_and_verifications_stop_at_each_record)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 3) == 3);
    for (int calls = 0; calls < 3; calls++) {
        int left = calls, listed = 0, verified = 2 * calls;
        size_t count = 0;
        mls_prompt_damage *damage = NULL;
        const mls_progress progress = {continues, &left};
        const mls_progress of_parts = {continues, &verified};
        CHECK(mls_prompt_list(log, visit, &listed, &progress, &status) == MLS_E_STOPPED);
        CHECK(listed == calls);
        CHECK(mls_prompt_verify(log, false, &of_parts, &damage, &count, &status) ==
              MLS_E_STOPPED);
    }
    mls_prompt_log_free(log);
}
