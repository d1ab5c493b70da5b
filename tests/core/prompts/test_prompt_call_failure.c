/* Every call of the system fails once: the error is reported, or harmless. */
#include "support/failing_calls.h"
#include "support/prompt_logs.h"

static mls_prompt_log *log_of_test;

/* Open the log of the test, which is made if it is missing. */
static mls_code open_and_free(mls_status *st)
{
    mls_prompt_log *log = NULL;
    const mls_code code = mls_prompt_log_open(path_of("log"), true,
                                              mls_kernels_of(best_cpu()), NULL, &log, st);
    mls_prompt_log_free(log);
    return code;
}

static mls_code make_new(mls_status *st)
{
    (void)unlink(path_of("log/store"));
    return open_and_free(st);
}

TEST(failing_calls_are_reported_by_an_opening)
{
    check_call("getentropy", make_new, "cannot get random bytes");
    check_call("openat", make_new, "cannot list the folder");
    check_call("fstat", open_and_free, "cannot examine `store`");
    check_call("openat", open_and_free, "cannot open `store`");
    mls_prompt_log_free(open_log());
    log_of_test = open_log();
    CHECK(put_blocks(log_of_test, 1, 1) == 1);
    check_call("fstatat", open_and_free, "cannot examine segment-00000001");
    mls_prompt_log_free(log_of_test);
}

static mls_code match_and_free(mls_status *st)
{
    const prompt p = prompt_of(1);
    const mls_prompt_prefix prefix = prefix_of(&p, 12);
    mls_prompt_match *match = NULL;
    const mls_code code = mls_prompt_match_new(log_of_test, &prefix, &match, st);
    mls_prompt_match_free(match);
    return code;
}

/* Put a prompt that is not stored yet. */
static mls_code put_once(mls_status *st)
{
    static uint32_t number = 1;
    const prompt p = prompt_of(++number);
    const mls_prompt_prefix prefix = prefix_of(&p, 8);
    mls_prompt_item items[] = {{.end = 4}, {.end = 8}};
    bool busy = false;
    mls_code code = mls_prompt_lock(log_of_test, &busy, st);
    if (code == MLS_OK) {
        code = mls_prompt_put(log_of_test, &prefix, items, 2, UINT64_MAX, NULL, st);
        mls_prompt_unlock(log_of_test);
    }
    return code;
}

static mls_code create_segment(mls_status *st)
{
    return mls_prompt_segment_create(log_of_test, st);
}

TEST(failing_calls_are_reported_by_matches_and_writers)
{
    log_of_test = open_log();
    check_call("openat", create_segment, "cannot create segment-00000001");
    mls_prompt_log_free(log_of_test);
    log_of_test = open_log();
    CHECK(put_blocks(log_of_test, 1, 3) == 3);
    check_call("fstat", match_and_free, "cannot examine a segment");
    check_call("fstat", match_and_free, "cannot examine the segment");
    check_call("pread", match_and_free,
               "cannot read the record at offset 64 of segment-00000001");
    check_call("openat", put_once, "cannot repair segment-00000001");
    check_call("openat", put_once, "cannot append to segment-00000001");
    mls_prompt_log_free(log_of_test);
}

static mls_code sync_records(mls_status *st)
{
    return mls_prompt_sync(log_of_test, st);
}

TEST(records_of_another_process_are_synced)
{
    log_of_test = open_log();
    CHECK(sync_records(&status) == MLS_OK); /* there are none */
    mls_prompt_log *other = open_log();
    CHECK(put_blocks(other, 1, 1) == 1 && stored_tokens(log_of_test, 1) == 4);
    check_call("fsync", sync_records, "cannot make stored prompts durable");
    CHECK(log_of_test->synced_segment == 1); /* and not once more */
    mls_prompt_log_free(other);
    mls_prompt_log_free(log_of_test);
}
