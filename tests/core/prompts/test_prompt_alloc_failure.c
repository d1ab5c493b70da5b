/* Every allocation fails once: each call returns MLS_E_MEMORY, and the log is as before.
 * Linked with -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc. */
#include "support/failing_alloc.h"
#include "support/prompt_logs.h"

static mls_prompt_log *log_of_test;

static mls_code open_and_free(mls_status *st)
{
    mls_prompt_log *log = NULL;
    const mls_code code =
        mls_prompt_log_open(path_of("log"), true, mls_kernels_of(best_cpu()), &log, st);
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
