/* Puts: token ids of all integers, and new records of all kinds only. */
#include "support/prompt_logs.h"
#include "support/tensors.h"

static mls_code put_items(mls_prompt_log *log, const prompt *p, size_t count,
                          mls_prompt_item *items, size_t item_count)
{
    const mls_prompt_prefix prefix = prefix_of(p, count);
    bool busy = true;
    mls_code code = mls_prompt_lock(log, &busy, &status);
    if (code == MLS_OK && !busy) {
        code = mls_prompt_put(log, &prefix, items, item_count, UINT64_MAX, NULL, &status);
        mls_prompt_unlock(log);
    }
    return code;
}

TEST(token_ids_of_all_integers_are_taken_and_others_refused)
{
    int32_t narrow[] = {1, -1};
    int64_t wide[] = {1, (int64_t)UINT32_MAX, -1, (int64_t)UINT32_MAX + 1};
    uint32_t *tokens = NULL;
    float values[] = {1};
    mls_tensor view = vector_of(wide, MLS_I64, 2);
    CHECK(mls_prompt_tokens(&view, &tokens, &status) == MLS_OK);
    CHECK(tokens[0] == 1 && tokens[1] == UINT32_MAX);
    mls_free(tokens);
    view = vector_of(wide + 1, MLS_I64, 2);
    CHECK_FAILS(mls_prompt_tokens(&view, &tokens, &status), MLS_E_VALUE,
                "token 1 is not in 0 .. 2**32 - 1");
    view = vector_of(wide + 3, MLS_U64, 1);
    CHECK(mls_prompt_tokens(&view, &tokens, &status) == MLS_E_VALUE);
    view = vector_of(narrow, MLS_I32, 2);
    CHECK(mls_prompt_tokens(&view, &tokens, &status) == MLS_E_VALUE);
    view = vector_of(narrow, MLS_U32, 2);
    CHECK(mls_prompt_tokens(&view, &tokens, &status) == MLS_OK);
    CHECK(tokens[1] == UINT32_MAX);
    mls_free(tokens);
    view = vector_of(values, MLS_F32, 1);
    CHECK_FAILS(mls_prompt_tokens(&view, &tokens, &status), MLS_E_DTYPE,
                "token ids must be integers of 32 or 64 bits, got float32");
    view = matrix_of(narrow, MLS_U32, 2, 1);
    CHECK_FAILS(mls_prompt_tokens(&view, &tokens, &status), MLS_E_SHAPE,
                "token ids must have one axis, got 2");
}

TEST(records_of_several_kinds_are_listed_by_their_ends)
{
    mls_prompt_log *log = open_log();
    const prompt p = prompt_of(1);
    mls_prompt_item items[] = {{.kind = 3, .end = 0}, {.kind = 3, .end = 3},   {.end = 4},
                               {.kind = 3, .end = 4}, {.kind = 200, .end = 4}, {.end = 8},
                               {.kind = 3, .end = 10}};
    CHECK(put_items(log, &p, 10, items, 7) == MLS_OK);
    mls_prompt_match *match = match_tokens(log, &p, 10);
    REQUIRE(match->count == 7 && match->length == 8);
    for (size_t i = 0; i < 7; i++) {
        CHECK(items[i].result == 1 && match->hits[i].end == items[i].end);
        CHECK(match->hits[i].kind == items[i].kind);
    }
    mls_prompt_match_free(match);
    match = match_tokens(log, &p, 9);
    CHECK(match->count == 6);
    mls_prompt_match_free(match);
    CHECK(put_items(log, &p, 10, items, 7) == MLS_OK);
    for (size_t i = 0; i < 7; i++) {
        CHECK(items[i].result == 0);
    }
    items[0] = (mls_prompt_item){.end = 3};
    CHECK_FAILS(put_items(log, &p, 10, items, 1), MLS_E_VALUE,
                "a block of 4 tokens cannot end at token 3");
    items[0].end = 12;
    CHECK_FAILS(put_items(log, &p, 10, items, 1), MLS_E_VALUE,
                "a record ends at token 12 of a prompt of 10 tokens");
    mls_prompt_log_free(log);
}

TEST(a_record_twice_in_one_put_is_written_once)
{
    mls_prompt_log *log = open_log();
    const prompt p = prompt_of(1);
    mls_prompt_item items[] = {{.end = 4}, {.end = 4}, {.kind = 1, .end = 5}};
    CHECK(put_items(log, &p, 5, items, 3) == MLS_OK);
    CHECK(items[0].result == 1 && items[1].result == 0 && items[2].result == 1);
    mls_prompt_log_free(log);
}

TEST(a_large_put_is_divided_among_segments)
{
    mls_prompt_log *log = open_log();
    const prompt p = prompt_of(1);
    CHECK(put_bytes(log, &p, 8, 30000, 1 << 20) == 8);
    CHECK(log->segment_count >= 4 && stored_tokens(log, 1) == 32);
    mls_prompt_log_free(log);
    log = open_log();
    CHECK(stored_tokens(log, 1) == 32);
    mls_prompt_log_free(log);
}
