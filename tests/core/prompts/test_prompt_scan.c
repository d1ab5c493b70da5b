/* Scans: readers ignore incomplete records, and skip damage. */
#include "support/prompt_logs.h"

static void append_bytes(const char *path, size_t count)
{
    FILE *file = fopen(path, "ab");
    REQUIRE(file != NULL);
    for (size_t i = 0; i < count; i++) {
        CHECK(fputc(7, file) == 7);
    }
    CHECK(fclose(file) == 0);
}

/* A file that stays open keeps its space, although the folder is within its budget. */
TEST(a_reader_closes_segments_that_a_writer_removed)
{
    mls_prompt_log *writer = open_log(), *reader = open_log();
    struct stat info;
    for (uint32_t i = 1; i <= 12; i++) {
        const prompt p = prompt_of(i);
        CHECK(put_bytes(writer, &p, 1, 50000, 200000) == 1);
        CHECK(stored_tokens(reader, i) == 4);
    }
    CHECK(writer->segments[0].number > 1);
    for (size_t i = 0; i < reader->segment_count; i++) {
        const mls_prompt_file *file = reader->segments[i].file;
        CHECK(file == NULL || (fstat(file->fd, &info) == 0 && info.st_nlink == 1));
    }
    CHECK(reader->segment_count == writer->segment_count);
    mls_prompt_log_free(writer);
    mls_prompt_log_free(reader);
}

TEST(an_entry_is_removed_once)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 2) == 2);
    const uint64_t live = log->segments[0].live;
    mls_prompt_forget_record(log, 0);
    mls_prompt_forget_record(log, 0);
    CHECK(log->index.removed == 1 && log->segments[0].live * 2 == live);
    mls_prompt_log_free(log);
}

TEST(an_incomplete_record_is_ignored_and_then_cut)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 2) == 2);
    const size_t bytes = file_bytes(segment_path(1));
    append_bytes(segment_path(1), 777);
    CHECK(stored_tokens(log, 1) == 8 && file_bytes(segment_path(1)) == bytes + 777);
    CHECK(put_blocks(log, 1, 2) == 0);
    CHECK(file_bytes(segment_path(1)) == bytes);
    mls_prompt_log_free(log);
}

TEST(a_damaged_header_hides_one_record_only)
{
    mls_prompt_log *log = open_log();
    for (uint32_t i = 1; i <= 4; i++) {
        CHECK(put_blocks(log, i, 1) == 1);
    }
    const uint64_t second = mls_prompt_entry_offset(&log->index.entries[1]);
    const size_t bytes = file_bytes(segment_path(1));
    mls_prompt_log_free(log);
    flip_byte(segment_path(1), second + 30);
    log = open_log();
    CHECK(stored_tokens(log, 1) == 4 && stored_tokens(log, 2) == 0);
    CHECK(stored_tokens(log, 3) == 4 && stored_tokens(log, 4) == 4);
    CHECK(put_blocks(log, 2, 1) == 1 && stored_tokens(log, 2) == 4);
    CHECK(file_bytes(segment_path(1)) > bytes);
    mls_prompt_log_free(log);
}

/* The second writer finds only a damaged header behind the known records, and must not
 * cut.
 */
TEST(records_behind_a_damaged_header_are_not_cut)
{
    mls_prompt_log *writer = open_log(), *other = open_log();
    CHECK(put_blocks(writer, 1, 1) == 1 && stored_tokens(other, 1) == 4);
    CHECK(put_blocks(writer, 2, 1) == 1 && put_blocks(writer, 3, 1) == 1);
    flip_byte(segment_path(1), mls_prompt_entry_offset(&writer->index.entries[1]) + 30);
    CHECK(put_blocks(other, 4, 1) == 1);
    CHECK(stored_tokens(other, 3) == 4 && stored_tokens(other, 4) == 4);
    mls_prompt_log_free(writer);
    mls_prompt_log_free(other);
}

/* The reader still has the removed file open. */
TEST(a_reader_notices_that_the_newest_segment_was_removed)
{
    mls_prompt_log *reader = open_log(), *writer = open_log();
    CHECK(put_blocks(writer, 1, 1) == 1 && stored_tokens(reader, 1) == 4);
    mls_prompt_log_free(writer);
    CHECK(unlink(segment_path(1)) == 0);
    CHECK(stored_tokens(reader, 1) == 0);
    mls_prompt_log_free(reader);
}

/* As a restored backup, or a synchronised folder, replaces files. */
TEST(a_reader_and_a_writer_follow_a_file_that_replaced_the_newest_segment)
{
    mls_prompt_log *reader = open_log(), *other = open_log();
    size_t bytes = 0;
    CHECK(put_blocks(other, 1, 1) == 1 && stored_tokens(reader, 1) == 4);
    unsigned char *copy = read_file(segment_path(1), &bytes);
    CHECK(unlink(segment_path(1)) == 0);
    FILE *file = fopen(segment_path(1), "wb");
    REQUIRE(copy != NULL && file != NULL);
    CHECK(fwrite(copy, 1, bytes, file) == bytes && fclose(file) == 0);
    mls_free(copy);
    CHECK(put_blocks(other, 2, 1) == 1);
    CHECK(file_bytes(segment_path(1)) > bytes);
    CHECK(stored_tokens(reader, 2) == 4 && stored_tokens(reader, 1) == 4);
    mls_prompt_log_free(other);
    mls_prompt_log_free(reader);
}

TEST(a_reader_notices_that_the_segment_was_cut_and_written_again)
{
    mls_prompt_log *reader = open_log(), *writer = open_log();
    CHECK(put_blocks(writer, 1, 1) == 1);
    const size_t bytes = file_bytes(segment_path(1));
    CHECK(put_blocks(writer, 2, 1) == 1 && stored_tokens(reader, 2) == 4);
    mls_prompt_log_free(writer);
    CHECK(truncate(segment_path(1), (off_t)bytes) == 0); /* a failed put of a writer */
    writer = open_log();
    CHECK(put_blocks(writer, 3, 3) == 3);
    CHECK(stored_tokens(reader, 3) == 12 && stored_tokens(reader, 2) == 0);
    CHECK(stored_tokens(reader, 1) == 4);
    mls_prompt_log_free(writer);
    mls_prompt_log_free(reader);
}
