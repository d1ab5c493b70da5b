/* The index file: it saves the scan, and a wrong one is never believed. */
#include "base/size.h"
#include "support/prompt_logs.h"
#include "support/random_bytes.h"

TEST(a_saved_index_replaces_the_scan)
{
    size_t changed = 0;
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 4) == 4 && put_blocks(log, 2, 4) == 4);
    CHECK(mark_all(log, 1, MLS_PROMPT_PIN, &changed) && changed == 4);
    CHECK(mark_all(log, 2, MLS_PROMPT_DELETE, &changed) && changed == 4);
    CHECK(store_index(log) && log->unindexed == 0);
    CHECK(put_blocks(log, 3, 2) == 2); /* behind the index */
    mls_prompt_log_free(log);
    log = open_log();
    CHECK(log->unindexed == 2 && log->index.count == 6);
    CHECK(stored_tokens(log, 1) == 16 && stored_tokens(log, 2) == 0);
    CHECK(stored_tokens(log, 3) == 8);
    CHECK((log->index.entries[0].flags & MLS_PROMPT_PINNED) != 0);
    CHECK(log->index.entries[1].parent == 0);
    mls_prompt_log_free(log);
}

TEST(a_damaged_index_is_ignored)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 3) == 3 && store_index(log));
    mls_prompt_log_free(log);
    const size_t bytes = file_bytes(path_of("log/index"));
    for (size_t at = 0; at < bytes; at += EVERY(7)) {
        if (at >= 36 && at < 64) {
            continue; /* not covered, not used */
        }
        flip_byte(path_of("log/index"), at);
        log = open_log();
        CHECK(log->unindexed == 3 && stored_tokens(log, 1) == 12);
        mls_prompt_log_free(log);
        flip_byte(path_of("log/index"), at);
    }
    CHECK(truncate(path_of("log/index"), 70) == 0);
    log = open_log();
    CHECK(stored_tokens(log, 1) == 12);
    mls_prompt_log_free(log);
}

/* Replace the index by `data`, with the right checksum, as a hostile program would. */
static bool forge(const mls_crc_kernels *crc, unsigned char *data, size_t bytes)
{
    const uint32_t counts = crc->update(0, data + 64, 20);
    mls_store_le32(data + 84, crc->update(counts, data + 88, bytes - 88));
    FILE *file = fopen(path_of("log/index"), "wb");
    if (file == NULL) {
        return false;
    }
    const bool is_written = fwrite(data, bytes, 1, file) == 1;
    return fclose(file) == 0 && is_written;
}

TEST(a_forged_parent_of_a_later_entry_is_not_followed)
{
    enum { ROW = 44, USED = 28, PARENT = 32 };
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 3) == 3 && store_index(log));
    const mls_crc_kernels *crc = log->crc;
    mls_prompt_log_free(log);
    size_t bytes = 0;
    unsigned char *data = read_file(path_of("log/index"), &bytes);
    REQUIRE(data != NULL);
    unsigned char *rows = data + 88 + 24, last[ROW];
    memcpy(last, rows + 2 * ROW, ROW); /* the child comes before its parent */
    memcpy(rows + 2 * ROW, rows, ROW);
    memcpy(rows, last, ROW);
    mls_store_le32(rows + USED, 9);
    mls_store_le32(rows + PARENT, 1);
    mls_store_le32(rows + ROW + USED, 1);
    mls_store_le32(rows + ROW + PARENT, 0x00ffffff);
    CHECK(forge(crc, data, bytes));
    log = open_log();
    CHECK(stored_tokens(log, 1) <= 12);
    mls_prompt_log_free(log);
    mls_free(data);
}

TEST(hostile_entries_cannot_do_harm)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 8) == 8 && store_index(log));
    const mls_crc_kernels *crc = log->crc;
    mls_prompt_log_free(log);
    size_t bytes = 0;
    unsigned char *good = read_file(path_of("log/index"), &bytes);
    REQUIRE(good != NULL);
    unsigned char *data = mls_alloc(bytes, 1);
    for (int i = 0; i < TRIES(2000); i++) {
        memcpy(data, good, bytes);
        fill_random(data + 88 + below(bytes - 88 - 8), 1 + below(8), (uint64_t)i + 1);
        CHECK(forge(crc, data, bytes));
        log = open_log();
        const size_t length = stored_tokens(log, 1);
        CHECK(length != SIZE_MAX && length <= 32);
        mls_prompt_log_free(log);
    }
    mls_free(data);
    mls_free(good);
}

TEST(an_index_of_another_store_is_ignored)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 3) == 3 && store_index(log));
    log->id[3] ^= 1;
    mls_prompt_log_clear(log);
    CHECK(!mls_prompt_index_load(log) && log->index.count == 0);
    log->id[3] ^= 1;
    CHECK(mls_prompt_index_load(log) && log->index.count == 3);
    mls_prompt_log_free(log);
}
