/* Reading: into any strides, by any number of threads, and damage is flagged. */
#include "support/prompt_logs.h"
#include "support/tensors.h"

enum { BYTES = 100000, BLOCKS = 6 };

static mls_prompt_match *stored_match(mls_prompt_log *log)
{
    const prompt p = prompt_of(1);
    CHECK(put_bytes(log, &p, BLOCKS, BYTES, UINT64_MAX) == BLOCKS);
    return match_tokens(log, &p, MOST_TOKENS);
}

TEST(threads_fill_rows_of_a_cache)
{
    static unsigned char cache[100][BLOCKS][1500], part[BYTES];
    const prompt p = prompt_of(1);
    mls_prompt_log *log = open_log();
    mls_prompt_match *match = stored_match(log);
    mls_pool *pool = NULL;
    mls_prompt_request requests[BLOCKS];
    REQUIRE(match->count == BLOCKS && mls_pool_new(3, &pool, &status) == MLS_OK);
    for (size_t i = 0; i < BLOCKS; i++) {
        requests[i] = (mls_prompt_request){.hit = i};
        requests[i].into = matrix_of(cache[0][i], MLS_U8, 100, 1000);
        requests[i].into.strides[0] = sizeof cache[0];
    }
    CHECK(mls_prompt_read(match, requests, BLOCKS, log->kernels, log->crc, pool, NULL,
                          &status) == MLS_OK);
    for (size_t i = 0; i < BLOCKS; i++) {
        fill_part(part, BYTES, &p, match->hits[i].end);
        CHECK(requests[i].code == MLS_OK);
        for (size_t row = 0; row < 100; row++) {
            CHECK(memcmp(cache[row][i], part + 1000 * row, 1000) == 0);
            CHECK(cache[row][i][1000] == 0);
        }
    }
    mls_pool_free(pool);
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
}

TEST(a_damaged_part_is_flagged_and_the_others_are_read)
{
    static unsigned char into[2][BYTES];
    mls_prompt_log *log = open_log();
    mls_prompt_match *match = stored_match(log);
    mls_prompt_request requests[2] = {{.hit = 0}, {.hit = 1}};
    flip_byte(segment_path(1), match->hits[1].offset + 50000);
    for (size_t i = 0; i < 2; i++) {
        requests[i].into = vector_of(into[i], MLS_U8, BYTES);
    }
    CHECK(mls_prompt_read(match, requests, 2, log->kernels, log->crc, NULL, NULL,
                          &status) == MLS_OK);
    CHECK(requests[0].code == MLS_OK && requests[1].code == MLS_E_CHECKSUM);
    CHECK(strstr(requests[1].text, "damaged") != NULL);
    CHECK(truncate(segment_path(1), 50000) == 0);
    CHECK(mls_prompt_read(match, requests, 2, log->kernels, log->crc, NULL, NULL,
                          &status) == MLS_OK);
    CHECK(requests[0].code == MLS_E_FORMAT &&
          strstr(requests[0].text, "shorter") != NULL);
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
}

static bool stop(void *context, uint64_t bytes)
{
    (void)context, (void)bytes;
    return false;
}

TEST(reading_can_be_stopped)
{
    static unsigned char into[BYTES];
    mls_prompt_log *log = open_log();
    mls_prompt_match *match = stored_match(log);
    mls_prompt_request request = {.into = vector_of(into, MLS_U8, BYTES)};
    const mls_progress progress = {stop, NULL};
    CHECK(mls_prompt_read(match, &request, 1, log->kernels, log->crc, NULL, &progress,
                          &status) == MLS_E_STOPPED);
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
}

TEST(a_part_is_read_in_pieces_and_the_last_one_is_compared)
{
    static unsigned char into[BYTES], part[BYTES];
    const prompt p = prompt_of(1);
    mls_prompt_log *log = open_log();
    mls_prompt_match *match = stored_match(log);
    mls_prompt_request request = {.hit = 1};
    for (int damaged = 0; damaged < 2; damaged++) {
        uint32_t sum = 0;
        mls_code code = MLS_OK;
        for (size_t at = 0; at < BYTES; at += 30000) {
            const size_t bytes = at + 30000 < BYTES ? 30000 : BYTES - at;
            CHECK(code == MLS_OK);
            request.into = vector_of(into + at, MLS_U8, bytes);
            code = mls_prompt_read_piece(match, &request, at, log->kernels, log->crc,
                                         &sum, &status);
        }
        CHECK(code == (damaged != 0 ? MLS_E_CHECKSUM : MLS_OK));
        fill_part(part, BYTES, &p, match->hits[1].end);
        CHECK((memcmp(into, part, BYTES) == 0) == (damaged == 0));
        flip_byte(segment_path(1), match->hits[1].offset + 5000);
    }
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
}

TEST(a_part_that_cannot_be_read_is_not_damaged)
{
    static unsigned char into[BYTES];
    mls_prompt_log *log = open_log();
    mls_prompt_match *match = stored_match(log);
    mls_prompt_request request = {.into = vector_of(into, MLS_U8, BYTES)};
    struct mls_prompt_file *file = match->hits[0].file;
    const int fd = file->fd;
    file->fd = -1;
    CHECK_FAILS(
        mls_prompt_read(match, &request, 1, log->kernels, log->crc, NULL, NULL, &status),
        MLS_E_IO,
        "cannot read the record at offset 64 of segment-00000001: Bad file "
        "descriptor");
    file->fd = fd;
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
}
