/* Every allocation fails once: each call returns MLS_E_MEMORY, and the log is as before.
 * Linked with -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc. */
#include "support/failing_alloc.h"
#include "support/prompt_logs.h"
#include "support/tensors.h"

static mls_prompt_log *log_of_test;

static mls_code open_and_free(mls_status *st)
{
    mls_prompt_log *log = NULL;
    const mls_code code = mls_prompt_log_open(path_of("log"), true,
                                              mls_kernels_of(best_cpu()), NULL, &log, st);
    mls_prompt_log_free(log);
    return code;
}

TEST(opening_survives_every_failure)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 3) == 3);
    mls_prompt_log_free(log);
    CHECK(fail_each(open_and_free) >= 4);
}

static mls_code match_and_free(mls_status *st)
{
    const prompt p = prompt_of(1);
    const mls_prompt_prefix prefix = prefix_of(&p, 12);
    mls_prompt_match *match = NULL;
    const mls_code code = mls_prompt_match_new(log_of_test, &prefix, &match, st);
    CHECK((code == MLS_OK) == (match != NULL));
    CHECK(match == NULL || match->length == 12);
    mls_prompt_match_free(match);
    return code;
}

TEST(matching_survives_every_failure)
{
    log_of_test = open_log();
    CHECK(put_blocks(log_of_test, 1, 3) == 3);
    CHECK(fail_each(match_and_free) >= 5);
    mls_prompt_log_free(log_of_test);
}

static mls_code put_once(mls_status *st)
{
    static uint32_t number;
    const prompt p = prompt_of(++number);
    const mls_prompt_prefix prefix = prefix_of(&p, 8);
    mls_prompt_item items[] = {{.end = 4}, {.end = 8}};
    bool busy = false;
    mls_code code = mls_prompt_lock(log_of_test, &busy, st);
    if (code == MLS_OK) {
        code = mls_prompt_put(log_of_test, &prefix, items, 2, UINT64_MAX, NULL, st);
        mls_prompt_unlock(log_of_test);
    }
    const long left = countdown;
    countdown = 0;
    CHECK(stored_tokens(log_of_test, number) == (code == MLS_OK ? 8 : 0));
    countdown = left;
    return code;
}

TEST(putting_survives_every_failure)
{
    log_of_test = open_log();
    CHECK(fail_each(put_once) >= 5);
    mls_prompt_log_free(log_of_test);
}

static mls_code save_index(mls_status *st)
{
    return mls_prompt_index_save(log_of_test, st);
}

TEST(saving_the_index_survives_every_failure)
{
    log_of_test = open_log();
    CHECK(put_blocks(log_of_test, 1, 3) == 3);
    CHECK(fail_each(save_index) >= 3);
    mls_prompt_log_free(log_of_test);
}

/* Add entries one by one, as puts do. */
static void add_entries(mls_prompt_log *log, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        mls_prompt_entry entry = {
            .segment = 1, .place = 1, .units = 1, .end = 1, .parent = MLS_PROMPT_NONE};
        const uint64_t hash = i * UINT64_C(0x9e3779b97f4a7c15);
        memcpy(entry.key.bytes, &hash, sizeof hash);
        REQUIRE(mls_prompt_index_reserve(&log->index, 1, &status) == MLS_OK);
        CHECK(mls_prompt_index_add(&log->index, &entry) == i);
    }
}

TEST(the_index_needs_at_most_100_bytes_a_record_also_while_it_is_saved_or_loaded)
{
    static const uint32_t counts[] = {10000, 49153, 100000, 196609};
    enum { FIXED = 128 << 10 };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        mls_prompt_log *log = open_log();
        if (i == 0) {
            CHECK(put_blocks(log, 1, 1) == 1);
        }
        mls_prompt_index_fini(&log->index);
        add_entries(log, counts[i]);
        const size_t most = (size_t)100 * counts[i];
        (void)take_requested();
        REQUIRE(mls_prompt_index_save(log, &status) == MLS_OK);
        CHECK(mls_prompt_index_bytes(&log->index) + take_requested() <= most + FIXED);
        mls_prompt_log_clear(log);
        (void)take_requested();
        CHECK(mls_prompt_index_load(log) && log->index.count == counts[i]);
        CHECK(take_requested() <= most + FIXED);
        mls_prompt_log_free(log);
    }
}

TEST(a_scattered_read_needs_no_copy_of_the_part)
{
    enum { BYTES = 4 << 20 };
    static unsigned char into[BYTES], part[BYTES];
    const prompt p = prompt_of(1);
    mls_prompt_log *log = open_log();
    CHECK(put_bytes(log, &p, 1, BYTES, UINT64_MAX) == 1);
    mls_prompt_match *match = match_tokens(log, &p, BLOCK);
    mls_prompt_request request = {.into = transposed_of(into, MLS_U8, 2048, 2048)};
    (void)take_requested();
    CHECK(mls_prompt_read(match, &request, 1, log->kernels, log->crc, NULL, NULL,
                          &status) == MLS_OK);
    CHECK(request.code == MLS_OK && take_requested() <= 512 << 10);
    fill_part(part, BYTES, &p, BLOCK);
    for (size_t i = 0; i < BYTES; i += 4001) {
        CHECK(into[i % 2048 * 2048 + i / 2048] == part[i]);
    }
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
}
