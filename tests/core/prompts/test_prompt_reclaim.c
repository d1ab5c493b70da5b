/* Space: pins stay, compaction keeps live records. */
#include "support/prompt_logs.h"

enum { PAYLOAD = 20000 };

static int put_big(mls_prompt_log *log, uint32_t number, uint64_t max_bytes)
{
    const prompt p = prompt_of(number);
    return put_bytes(log, &p, 1, PAYLOAD, max_bytes);
}

static uint64_t prune(mls_prompt_log *log, uint64_t max_bytes)
{
    uint64_t freed = 0;
    bool busy = true;
    CHECK(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_prune(log, max_bytes, NULL, &freed, &status) == MLS_OK);
    mls_prompt_unlock(log);
    return freed;
}

TEST(pins_stay_with_their_ancestors)
{
    mls_prompt_log *log = open_log();
    const prompt p = prompt_of(1);
    size_t changed = 0, tip = 2;
    bool busy = true;
    CHECK(put_bytes(log, &p, 3, PAYLOAD, UINT64_MAX) == 3);
    mls_prompt_match *match = match_tokens(log, &p, 12);
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_mark(log, match, &tip, 1, MLS_PROMPT_PIN, NULL, &changed, &status) ==
          MLS_OK);
    CHECK(changed == 1);
    mls_prompt_unlock(log);
    mls_prompt_match_free(match);
    for (uint32_t i = 2; i <= 6; i++) {
        CHECK(put_big(log, i, UINT64_MAX) == 1);
    }
    (void)prune(log, 1000);
    CHECK(stored_tokens(log, 1) == 12 && log->index.count == 3);
    mls_prompt_log_free(log);
    CHECK(unlink(path_of("log/index")) == 0);
    log = open_log(); /* the copies know that they are pinned */
    (void)prune(log, 1000);
    CHECK(stored_tokens(log, 1) == 12);
    CHECK(mark_all(log, 1, MLS_PROMPT_UNPIN, &changed) && changed == 1);
    (void)prune(log, 1000);
    CHECK(stored_tokens(log, 1) == 0 && log->index.count == 0);
    mls_prompt_log_free(log);
}

TEST(pins_of_a_circular_chain_end)
{
    mls_prompt_log *log = open_log();
    const prompt p = prompt_of(1);
    size_t changed = 0, middle = 1;
    bool busy = true;
    CHECK(put_bytes(log, &p, 3, PAYLOAD, UINT64_MAX) == 3);
    mls_prompt_match *match = match_tokens(log, &p, 12);
    log->index.entries[0].parent = 2; /* forged: the last block */
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_mark(log, match, &middle, 1, MLS_PROMPT_PIN, NULL, &changed,
                          &status) == MLS_OK);
    mls_prompt_unlock(log);
    mls_prompt_match_free(match);
    CHECK(changed == 1);
    (void)prune(log, 1000);
    CHECK(log->index.count == 3);
    mls_prompt_log_free(log);
}

TEST(deleted_records_stay_deleted_without_the_index)
{
    mls_prompt_log *log = open_log();
    size_t changed = 0;
    CHECK(put_big(log, 1, 1 << 20) == 1 && put_blocks(log, 2, 3) == 3);
    CHECK(put_big(log, 3, 1 << 20) == 1 && put_big(log, 4, 1 << 20) == 1);
    CHECK(mark_all(log, 2, MLS_PROMPT_DELETE, &changed) && changed == 3);
    CHECK(mark_all(log, 3, MLS_PROMPT_DELETE, &changed) && changed == 1);
    CHECK(mark_all(log, 4, MLS_PROMPT_DELETE, &changed) && changed == 1);
    (void)prune(log, UINT64_MAX);
    CHECK(unlink(path_of("log/index")) == 0);
    mls_prompt_log_free(log);
    log = open_log();
    CHECK(stored_tokens(log, 1) == 4 && stored_tokens(log, 2) == 0);
    CHECK(stored_tokens(log, 3) == 0 && stored_tokens(log, 4) == 0);
    mls_prompt_log_free(log);
}

TEST(compaction_leaves_out_damaged_records)
{
    mls_prompt_log *log = open_log();
    size_t changed = 0;
    for (uint32_t i = 1; i <= 5; i++) {
        CHECK(put_big(log, i, UINT64_MAX) == 1);
    }
    flip_byte(segment_path(1), mls_prompt_entry_offset(&log->index.entries[0]) + 9000);
    for (uint32_t i = 3; i <= 5; i++) {
        CHECK(mark_all(log, i, MLS_PROMPT_DELETE, &changed) && changed == 1);
    }
    (void)prune(log, UINT64_MAX);
    CHECK(stored_tokens(log, 1) == 0 && stored_tokens(log, 2) == 4);
    CHECK(access(segment_path(1), F_OK) != 0);
    mls_prompt_log_free(log);
}

TEST(a_pin_and_a_compaction_after_the_index_keep_the_times_of_use)
{
    size_t changed = 0;
    mls_prompt_log *log = open_log();
    for (uint32_t i = 1; i <= 16; i++) {
        const prompt stored = prompt_of(i);
        CHECK(put_bytes(log, &stored, 8, 25000, 1 << 24) == 8);
    }
    CHECK(stored_tokens(log, 7) == 32 && stored_tokens(log, 1) == 32); /* used last */
    (void)prune(log, 3150000);
    CHECK(store_index(log));
    CHECK(mark_all(log, 8, MLS_PROMPT_PIN, &changed) && changed == 8);
    for (uint32_t i = 0; i < 3; i++) { /* their segments are compacted */
        const uint32_t deleted[] = {9, 10, 6};
        CHECK(mark_all(log, deleted[i], MLS_PROMPT_DELETE, &changed) && changed == 8);
    }
    mls_prompt_log_free(log);
    log = open_log();
    (void)prune(log, 1400000);
    CHECK(stored_tokens(log, 1) == 32 && stored_tokens(log, 7) == 32);
    mls_prompt_log_free(log);
}

TEST(a_segment_with_notes_only_is_compacted_once)
{
    mls_prompt_log *log = open_log();
    size_t changed = 0;
    bool busy = true;
    CHECK(put_big(log, 1, UINT64_MAX) == 1);
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_segment_create(log, &status) == MLS_OK);
    mls_prompt_unlock(log);
    CHECK(mark_all(log, 1, MLS_PROMPT_PIN, &changed) && changed == 1);
    (void)prune(log, UINT64_MAX);
    CHECK(log->segment_count == 2 && log->highest == 3);
    CHECK((log->index.entries[0].flags & MLS_PROMPT_PINNED) != 0);
    mls_prompt_log_free(log);
    CHECK(unlink(path_of("log/index")) == 0);
    log = open_log();
    CHECK((log->index.entries[0].flags & MLS_PROMPT_PINNED) != 0);
    mls_prompt_log_free(log);
}

TEST(strange_rows_of_uses_are_ignored)
{
    mls_prompt_log *log = open_log();
    CHECK(put_big(log, 1, UINT64_MAX) == 1 && stored_tokens(log, 1) == 4);
    flip_byte(path_of("log/used"), 3);
    FILE *file = fopen(path_of("log/used"), "ab");
    REQUIRE(file != NULL);
    CHECK(fputs("garbage", file) >= 0 && fclose(file) == 0);
    CHECK(put_big(log, 2, 30000) == 1);
    CHECK(file_bytes(path_of("log/used")) == 0);
    mls_prompt_log_free(log);
}
