/* Matches are compared with the stored ids; threads share a log. */
#include "support/prompt_logs.h"
#include "support/random_bytes.h"

#include <pthread.h>

TEST(a_damaged_header_shortens_the_match_and_is_named)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 6) == 6);
    const uint64_t third = mls_prompt_entry_offset(&log->index.entries[2]);
    flip_byte(segment_path(1), third + 130);
    const prompt p = prompt_of(1);
    mls_prompt_match *match = match_tokens(log, &p, 24);
    CHECK(match->length == 8 && match->count == 2);
    mls_prompt_match_free(match);
    match = match_tokens(log, &p, 24); /* the record is known to be lost */
    CHECK(match->length == 8);
    mls_prompt_match_free(match);
    CHECK(put_blocks(log, 1, 6) == 1 && stored_tokens(log, 1) == 24);
    mls_prompt_log_free(log);
}

/* Tokens that collide with the stored key are distinguished by the stored ids. */
TEST(another_record_in_place_of_the_expected_one_is_not_believed)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 1) == 1 && put_blocks(log, 2, 1) == 1);
    mls_prompt_entry *entries = log->index.entries;
    entries[0].place = entries[1].place; /* of the same length */
    log->is_writing = true;              /* the log is not read anew */
    const prompt p = prompt_of(1);
    mls_prompt_match *match = match_tokens(log, &p, 4);
    CHECK(match->length == 0 && match->damage_count <= 1);
    mls_prompt_match_free(match);
    log->is_writing = false;
    mls_prompt_log_free(log);
}

TEST(a_cut_segment_shortens_the_match)
{
    mls_prompt_log *log = open_log();
    CHECK(put_blocks(log, 1, 1) == 1 && truncate(segment_path(1), 10) == 0);
    log->is_writing = true; /* the log is not read anew */
    const prompt p = prompt_of(1);
    mls_prompt_match *match = match_tokens(log, &p, 4);
    CHECK(match->length == 0 && match->count == 0);
    mls_prompt_match_free(match);
    log->is_writing = false;
    mls_prompt_log_free(log);
}

enum { THREADS = 4, ROUNDS = 60 };

static mls_prompt_log *shared;
static size_t wrong;

static void *work(void *context)
{
    uint64_t seed = (uint64_t)(size_t)context + 1;
    for (int i = 0; i < TRIES(ROUNDS); i++) {
        const uint32_t number = (uint32_t)(random_next(&seed) % 8);
        const prompt p = prompt_of(number);
        const mls_prompt_prefix prefix = prefix_of(&p, 12);
        mls_prompt_item items[] = {{.end = 4}, {.end = 8}, {.end = 12}};
        mls_prompt_match *match = NULL;
        mls_status st;
        bool busy = false;
        uint64_t freed;
        if (i % 3 == 0 && mls_prompt_lock(shared, &busy, &st) == MLS_OK && !busy) {
            mls_code code =
                i % 15 == 0
                    ? mls_prompt_prune(shared, 4000, NULL, &freed, &st)
                    : mls_prompt_put(shared, &prefix, items, 3, UINT64_MAX, NULL, &st);
            __atomic_add_fetch(&wrong, code != MLS_OK, __ATOMIC_RELAXED);
            mls_prompt_unlock(shared);
        }
        if (mls_prompt_match_new(shared, &prefix, &match, &st) != MLS_OK ||
            match->length % 4 != 0) {
            __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
        }
        mls_prompt_match_free(match);
    }
    return NULL;
}

TEST(threads_match_and_put_at_the_same_time)
{
    pthread_t threads[THREADS];
    shared = open_log();
    for (size_t i = 0; i < THREADS; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(wrong == 0);
    mls_prompt_log_free(shared);
}
