/* Stored records: long headers, the search behind damage, payload checks. */
#include "base/size.h"
#include "support/prompt_logs.h"

#include <fcntl.h>

static int open_segment(void)
{
    const int fd = open(segment_path(1), O_RDONLY);
    CHECK(fd >= 0);
    return fd;
}

/* Store a record with long meta, so that its header does not fit the first read. */
static void put_long(mls_prompt_log *log, size_t meta_bytes)
{
    const prompt p = prompt_of(1);
    const mls_prompt_prefix prefix = prefix_of(&p, BLOCK);
    bool busy = true;
    unsigned char *meta = mls_alloc(meta_bytes, 1);
    mls_prompt_item item = {.end = BLOCK, .meta = meta, .meta_bytes = meta_bytes};
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_put(log, &prefix, &item, 1, UINT64_MAX, NULL, &status) == MLS_OK);
    CHECK(item.result == 1);
    mls_prompt_unlock(log);
    mls_free(meta);
}

TEST(a_long_header_is_read_to_other_memory)
{
    mls_prompt_log *log = open_log();
    put_long(log, 10000);
    unsigned char header_buffer[MLS_PROMPT_HEAD_READ], *bytes = NULL;
    mls_prompt_header header;
    const int fd = open_segment();
    const size_t length = file_bytes(segment_path(1)) - 64;
    CHECK(mls_prompt_header_read(fd, 64, length, log->crc, header_buffer,
                                 MLS_PROMPT_HEAD_READ, &bytes, &header,
                                 &status) == MLS_OK);
    CHECK(bytes != header_buffer && header.meta_bytes == 10000);
    mls_free(bytes);
    CHECK_FAILS(mls_prompt_header_read(fd, 64, 5000, log->crc, header_buffer,
                                       MLS_PROMPT_HEAD_READ, &bytes, &header, &status),
                MLS_E_FORMAT, "the header of a record is cut off");
    CHECK(mls_prompt_header_read(fd, 128, length - 64, log->crc, header_buffer,
                                 MLS_PROMPT_HEAD_READ, &bytes, &header,
                                 &status) == MLS_E_CHECKSUM);
    close(fd);
    const prompt p = prompt_of(1);
    mls_prompt_match *match = match_tokens(log, &p, BLOCK);
    CHECK(match->count == 1 && match->hits[0].header.meta_bytes == 10000);
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
    log = open_log(); /* the scan reads it as well */
    CHECK(log->index.count == 1);
    mls_prompt_log_free(log);
}

static uint64_t search(int fd, uint64_t from, uint64_t end, const mls_crc_kernels *crc)
{
    uint64_t effort = mls_prompt_effort(end), result = 1;
    CHECK(mls_prompt_header_search(fd, from, end, crc, &effort, NULL, &result, &status) ==
          MLS_OK);
    return result;
}

TEST(the_search_finds_the_next_header)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 4) == 4);
    const int fd = open_segment();
    const uint64_t end = file_bytes(segment_path(1));
    const uint64_t second = mls_prompt_entry_offset(&log->index.entries[1]);
    CHECK(search(fd, 64, end, log->crc) == 64);
    CHECK(search(fd, 128, end, log->crc) == second);
    CHECK(search(fd, end - 64, end, log->crc) == 0);
    CHECK(search(fd, 128, second + 64, log->crc) == 0);
    close(fd);
    mls_prompt_log_free(log);
}

/* Copy the first record of segment 1 to `offset` of the file `path`, behind zeros. */
static void copy_record(const char *path, size_t offset, const unsigned char *record,
                        size_t bytes)
{
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    CHECK(fseek(file, (long)offset, SEEK_SET) == 0);
    CHECK(fwrite(record, 1, bytes, file) == bytes && fclose(file) == 0);
}

TEST(the_search_finds_a_header_at_every_place_of_its_windows)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 1) == 1);
    size_t bytes = 0;
    unsigned char *data = read_file(segment_path(1), &bytes);
    for (size_t offset = 3584; offset < 30000; offset += 64) {
        copy_record(path_of("copy"), offset, data + 64, bytes - 64);
        const int fd = open(path_of("copy"), O_RDONLY);
        CHECK(search(fd, 64, offset + bytes - 64, log->crc) == offset);
        close(fd);
    }
    mls_free(data);
    mls_prompt_log_free(log);
}

TEST(an_error_of_the_system_ends_the_search)
{
    mls_prompt_log *log = open_log();
    uint64_t effort = 1 << 20, result;
    CHECK(mls_prompt_header_search(-1, 64, 1000, log->crc, &effort, NULL, &result,
                                   &status) == MLS_E_IO);
    mls_prompt_log_free(log);
}

static uint64_t checksummed; /* bytes */

static uint32_t count_bytes(uint32_t crc, const void *data, size_t bytes)
{
    (void)data;
    checksummed += bytes;
    return crc;
}

TEST(the_work_on_a_file_of_false_headers_grows_with_its_length)
{
    mls_prompt_log *log = open_log();
    const mls_crc_kernels counting = {.update = count_bytes};
    enum { BYTES = 16 << 20, META = 1 << 20 };
    unsigned char *data = mls_alloc(BYTES, 1);
    mls_prompt_header header = {.meta_bytes = META};
    CHECK(mls_prompt_header_sizes(&header, 0, &status) == MLS_OK);
    for (size_t at = 0; at < BYTES; at += MLS_PROMPT_UNIT * 2) {
        memcpy(data + at, "mspR", 4); /* and a wrong checksum */
        mls_store_le32(data + at + 4, 1);
        mls_store_le32(data + at + 8, (uint32_t)header.header_bytes);
        mls_store_le32(data + at + 112, META);
    }
    copy_record(path_of("copy"), 0, data, BYTES);
    const int fd = open(path_of("copy"), O_RDONLY);
    CHECK(search(fd, 0, BYTES, &counting) == 0);
    CHECK(checksummed > BYTES && checksummed <= 2 * mls_prompt_effort(BYTES));
    close(fd);
    mls_free(data);
    mls_prompt_log_free(log);
}

static bool continues(void *context, uint64_t bytes)
{
    (void)bytes;
    return --*(int *)context > 0;
}

TEST(payload_checks_find_each_damaged_byte_and_can_be_stopped)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 1) == 1);
    unsigned char header_buffer[MLS_PROMPT_HEAD_READ], *bytes = NULL, buffer[100];
    mls_prompt_header header;
    const int fd = open_segment();
    REQUIRE(mls_prompt_header_read(fd, 64, file_bytes(segment_path(1)) - 64, log->crc,
                                   header_buffer, MLS_PROMPT_HEAD_READ, &bytes, &header,
                                   &status) == MLS_OK);
    CHECK(mls_prompt_payload_check(fd, 64, &header, log->crc, buffer, sizeof buffer, NULL,
                                   &status) == MLS_OK);
    int left = 3;
    const mls_progress progress = {continues, &left};
    CHECK(mls_prompt_payload_check(fd, 64, &header, log->crc, buffer, sizeof buffer,
                                   &progress, &status) == MLS_E_STOPPED);
    for (size_t i = 0; i < PART_BYTES; i += 111) {
        const size_t at = 64 + header.header_bytes + i;
        flip_byte(segment_path(1), at);
        CHECK_FAILS(mls_prompt_payload_check(fd, 64, &header, log->crc, buffer,
                                             sizeof buffer, NULL, &status),
                    MLS_E_CHECKSUM, "part 0 of a record is damaged");
        flip_byte(segment_path(1), at);
    }
    CHECK(truncate(segment_path(1), 300) == 0);
    CHECK(mls_prompt_payload_check(fd, 64, &header, log->crc, buffer, sizeof buffer, NULL,
                                   &status) == MLS_E_FORMAT);
    close(fd);
    mls_prompt_log_free(log);
}

TEST(a_cut_segment_lacks_its_last_record)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 2) == 2);
    const int fd = open_segment();
    mls_prompt_segment segment = log->segments[0];
    CHECK(mls_prompt_last_is_same(&segment, fd));
    segment.last_crc ^= 1;
    CHECK(!mls_prompt_last_is_same(&segment, fd));
    segment.last = 0; /* no record is known */
    CHECK(mls_prompt_last_is_same(&segment, fd));
    close(fd);
    mls_prompt_log_free(log);
}
