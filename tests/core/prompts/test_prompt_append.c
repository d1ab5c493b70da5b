/* Appends: any strides, and after a failure the segment is as before. */
#include "support/prompt_logs.h"
#include "support/random_bytes.h"
#include "support/tensors.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>

/* Limit the size of files, as a full disk would. */
static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    limit.rlim_cur = bytes;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

TEST(a_full_disk_leaves_the_log_unchanged)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 2) == 2);
    const size_t bytes = file_bytes(segment_path(1));
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    for (size_t room = 0; room < 5000; room += 500) {
        limit_files(bytes + room);
        CHECK(put_blocks(log, 2, 4) == -1);
        CHECK(status.code == MLS_E_IO && status.os_error == EFBIG);
        CHECK(file_bytes(segment_path(1)) == bytes && stored_tokens(log, 2) == 0);
    }
    limit_files(RLIM_INFINITY);
    CHECK(put_blocks(log, 2, 4) == 4 && stored_tokens(log, 2) == 16);
    mls_prompt_log_free(log);
}

/* Append one record with a part, and compare the stored bytes with the packed ones. */
static void check_part(mls_prompt_log *log, uint32_t number, const mls_tensor *part,
                       const unsigned char *expected, size_t bytes)
{
    const prompt p = prompt_of(number);
    const mls_prompt_prefix prefix = prefix_of(&p, BLOCK);
    mls_prompt_item item = {.end = BLOCK, .parts = part, .part_count = 1};
    bool busy = true;
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_put(log, &prefix, &item, 1, UINT64_MAX, NULL, &status) == MLS_OK);
    mls_prompt_unlock(log);
    mls_prompt_match *match = match_tokens(log, &p, BLOCK);
    REQUIRE(match->count == 1 && match->hits[0].payload_bytes == bytes);
    unsigned char *into = mls_alloc(bytes, 1);
    mls_prompt_request request = {.into = vector_of(into, MLS_U8, bytes)};
    CHECK(mls_prompt_read(match, &request, 1, log->kernels, log->crc, NULL, NULL,
                          &status) == MLS_OK);
    CHECK(request.code == MLS_OK && memcmp(into, expected, bytes) == 0);
    mls_free(into);
    mls_prompt_match_free(match);
}

TEST(strided_parts_are_stored_in_c_order)
{
    enum { ROWS = 70, COLUMNS = 1100 };
    static uint16_t data[ROWS * COLUMNS], packed[ROWS * COLUMNS];
    mls_prompt_log *log = open_log();
    fill_random((unsigned char *)data, sizeof data, 5);
    const mls_tensor all = matrix_of(data, MLS_U16, ROWS, COLUMNS);
    check_part(log, 1, &all, (unsigned char *)data, sizeof data);
    const mls_tensor wide = mls_tensor_slice(&all, 1, 100, 1000);
    for (size_t i = 0; i < ROWS; i++) {
        memcpy(packed + 1000 * i, data + COLUMNS * i + 100, 2000);
    }
    check_part(log, 2, &wide, (unsigned char *)packed, 2000 * ROWS);
    const mls_tensor turned = transposed_of(data, MLS_U16, COLUMNS, ROWS);
    for (size_t i = 0; i < COLUMNS; i++) {
        for (size_t j = 0; j < ROWS; j++) {
            packed[i * ROWS + j] = data[j * COLUMNS + i];
        }
    }
    check_part(log, 3, &turned, (unsigned char *)packed, sizeof packed);
    mls_prompt_log_free(log);
}

static bool stop(void *context, uint64_t bytes)
{
    (void)context;
    return bytes == 0;
}

TEST(a_stopped_put_leaves_the_log_unchanged)
{
    mls_prompt_log *log = open_log();
    const prompt p = prompt_of(1);
    const mls_prompt_prefix prefix = prefix_of(&p, BLOCK);
    unsigned char data[100] = {0};
    const mls_tensor part = vector_of(data, MLS_U8, sizeof data);
    mls_prompt_item item = {.end = BLOCK, .parts = &part, .part_count = 1};
    const mls_progress progress = {stop, NULL};
    bool busy = true;
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_put(log, &prefix, &item, 1, UINT64_MAX, &progress, &status) ==
          MLS_E_STOPPED);
    mls_prompt_unlock(log);
    CHECK(stored_tokens(log, 1) == 0 && file_bytes(segment_path(1)) == 64);
    mls_prompt_log_free(log);
}

static bool fetch_bytes(void *context, const mls_tensor *part, mls_tensor *out)
{
    static unsigned char bytes[1000]; /* the next part replaces this one */
    int *count = context;
    memset(bytes, 'a' + *count, sizeof bytes);
    *out = vector_of(bytes, MLS_U8, part->shape[0]);
    return ++*count < 4;
}

TEST(parts_are_fetched_one_by_one_and_a_refusal_stops_the_put)
{
    mls_prompt_log *log = open_log();
    const prompt p = prompt_of(1);
    const mls_prompt_prefix prefix = prefix_of(&p, 2 * BLOCK);
    int count = 0;
    const mls_prompt_source source = {fetch_bytes, &count};
    mls_tensor parts[4];
    unsigned char into[1000];
    for (size_t i = 0; i < 4; i++) {
        parts[i] = vector_of(NULL, MLS_U8, i == 1 ? 0 : 900);
    }
    mls_prompt_item items[2] = {
        {.end = BLOCK, .parts = parts, .part_count = 4, .source = &source},
        {.end = 2 * BLOCK, .parts = parts, .part_count = 4, .source = &source}};
    bool busy = true;
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_put(log, &prefix, items, 1, UINT64_MAX, NULL, &status) == MLS_OK);
    CHECK(count == 3);
    CHECK(mls_prompt_put(log, &prefix, items, 2, UINT64_MAX, NULL, &status) ==
          MLS_E_STOPPED);
    CHECK(count == 4 && items[0].result == 0);
    mls_prompt_unlock(log);
    mls_prompt_match *match = match_tokens(log, &p, MOST_TOKENS);
    CHECK(match->length == BLOCK);
    for (size_t i = 0; i < 4; i++) {
        const size_t bytes = i == 1 ? 0 : 900;
        mls_prompt_request request = {.part = i, .into = vector_of(into, MLS_U8, bytes)};
        CHECK(mls_prompt_read(match, &request, 1, log->kernels, log->crc, NULL, NULL,
                              &status) == MLS_OK);
        CHECK(request.code == MLS_OK);
        CHECK(bytes == 0 || (into[0] == "a bc"[i] && into[899] == into[0]));
    }
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
}
