/* Extras: their keys are the documented ones, and blocks before them are shared. */
#include "prompts/prompt_extra.h"
#include "support/prompt_logs.h"

#include "base/size.h"

/* Write an extra; every byte of its digest is `digest`. */
static void write_extra(unsigned char *out, uint32_t position, int digest)
{
    mls_store_le32(out, position);
    memset(out + 4, digest, MLS_PROMPT_EXTRA - 4);
}

static mls_prompt_prefix with_extras(const prompt *p, const unsigned char *extras,
                                     size_t count)
{
    mls_prompt_prefix prefix = prefix_of(p, MOST_TOKENS);
    prefix.extras = extras;
    prefix.extra_count = count;
    return prefix;
}

/* Another implementation of SipHash computed the expected values. */
TEST(the_key_of_an_extra_is_the_documented_one)
{
    unsigned char id[MLS_PROMPT_KEY], extras[2 * MLS_PROMPT_EXTRA];
    mls_prompt_key root;
    const unsigned char expected[2][MLS_PROMPT_KEY] = {
        {0xa8, 0x16, 0xc4, 0xf5, 0xb3, 0x7d, 0x36, 0xe4, 0x09, 0xd5, 0x8d, 0xa1, 0x43,
         0xec, 0x8a, 0xac},
        {0xe5, 0x58, 0x55, 0x9d, 0xa7, 0xed, 0x4e, 0x80, 0x09, 0x32, 0xef, 0x00, 0xc0,
         0x9c, 0x08, 0xb2}};
    const unsigned char root_bytes[MLS_PROMPT_KEY] = {0xfd, 0x80, 0x4e, 0x61, 0x8e, 0x49,
                                                      0x58, 0xae, 0x37, 0x53, 0x63, 0x49,
                                                      0x3f, 0x39, 0x98, 0xc1};
    memcpy(root.bytes, root_bytes, sizeof root_bytes);
    for (size_t i = 0; i < sizeof id; i++) {
        id[i] = (unsigned char)i;
    }
    for (size_t i = 0; i < 32; i++) {
        extras[4 + i] = extras[MLS_PROMPT_EXTRA + 4 + i] = (unsigned char)i;
    }
    mls_store_le32(extras, 1);
    mls_store_le32(extras + MLS_PROMPT_EXTRA, 3);
    const prompt p = {.tokens = {9, 8, 7, 6}};
    const mls_prompt_prefix prefix = with_extras(&p, extras, 2);
    mls_prompt_hash hash = mls_prompt_hash_begin(id, &root, 7);
    mls_prompt_hash_range(&hash, id, 7, &prefix, 0, 3);
    mls_prompt_key key = mls_prompt_hash_key(&hash);
    CHECK(memcmp(key.bytes, expected[0], sizeof key.bytes) == 0);
    mls_prompt_hash_extra(&hash, id, 7, extras + MLS_PROMPT_EXTRA + 4);
    key = mls_prompt_hash_key(&hash);
    CHECK(memcmp(key.bytes, expected[1], sizeof key.bytes) == 0);
}

TEST(a_range_has_only_the_extras_of_its_tokens)
{
    unsigned char extras[3 * MLS_PROMPT_EXTRA];
    const prompt p = prompt_of(1);
    const mls_prompt_prefix prefix = with_extras(&p, extras, 3);
    const uint32_t positions[] = {4, 4, 9};
    for (size_t i = 0; i < 3; i++) {
        write_extra(extras + i * MLS_PROMPT_EXTRA, positions[i], (int)i);
    }
    for (size_t start = 0; start < 12; start++) {
        for (size_t end = start; end < 12; end++) {
            size_t expected = 0, count = 0;
            for (size_t i = 0; i < 3; i++) {
                expected += positions[i] >= start && positions[i] < end;
            }
            const unsigned char *found =
                mls_prompt_extras_between(&prefix, start, end, &count);
            CHECK(count == expected && (found == NULL) == (count == 0));
            CHECK(count == 0 || mls_load_le32(found) >= start);
        }
    }
}

TEST(extras_without_a_token_or_out_of_order_are_refused)
{
    unsigned char extras[2 * MLS_PROMPT_EXTRA];
    write_extra(extras, 5, 1);
    write_extra(extras + MLS_PROMPT_EXTRA, 4, 1);
    CHECK(mls_prompt_extras_check(extras, MLS_PROMPT_EXTRA, 6, &status) == MLS_OK);
    CHECK(mls_prompt_extras_check(NULL, 0, 0, &status) == MLS_OK);
    CHECK_FAILS(mls_prompt_extras_check(extras, MLS_PROMPT_EXTRA, 5, &status),
                MLS_E_VALUE,
                "the position of an extra must be at least 0 and less than 5, got 5");
    CHECK_FAILS(mls_prompt_extras_check(extras, sizeof extras, 6, &status), MLS_E_VALUE,
                "the position of an extra must be at least 5 and less than 6, got 4");
    CHECK_FAILS(mls_prompt_extras_check(extras, 35, 6, &status), MLS_E_VALUE,
                "extras have 36 bytes each, got 35 bytes");
}

/* Only the stored extras distinguish two records with one key. */
TEST(a_record_with_other_extras_in_place_of_the_expected_one_is_not_believed)
{
    mls_prompt_log *log = open_log();
    unsigned char extra[MLS_PROMPT_EXTRA];
    mls_prompt_match *match = NULL;
    const prompt p = prompt_of(1);
    write_extra(extra, 2, 7);
    mls_prompt_prefix prefix = with_extras(&p, extra, 1);
    mls_prompt_item item = {.end = BLOCK};
    bool busy = true;
    REQUIRE(mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy);
    CHECK(mls_prompt_put(log, &prefix, &item, 1, UINT64_MAX, NULL, &status) == MLS_OK);
    mls_prompt_unlock(log);
    CHECK(mls_prompt_match_new(log, &prefix, &match, &status) == MLS_OK);
    REQUIRE(match->length == BLOCK && match->hits[0].header.extra_count == 1);
    CHECK(memcmp(match->hits[0].header.extras, extra, sizeof extra) == 0);
    mls_prompt_match_free(match);
    const size_t at = (size_t)mls_prompt_entry_offset(&log->index.entries[0]);
    unsigned char bytes[256];
    FILE *file = fopen(segment_path(1), "r+b");
    REQUIRE(file != NULL && fseek(file, (long)at, SEEK_SET) == 0);
    REQUIRE(fread(bytes, 1, 192, file) == 192);
    bytes[MLS_PROMPT_FIXED + 4 * BLOCK + 4] ^= 1; /* of the digest */
    mls_store_le32(bytes + 4, log->crc->update(0, bytes + 8, 192 - 8));
    CHECK(fseek(file, (long)at, SEEK_SET) == 0 && fwrite(bytes, 1, 192, file) == 192);
    CHECK(fclose(file) == 0);
    CHECK(mls_prompt_match_new(log, &prefix, &match, &status) == MLS_OK);
    CHECK(match->length == 0);
    mls_prompt_match_free(match);
    mls_prompt_log_free(log);
}
