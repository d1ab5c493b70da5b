/* Keys and headers: equal on every machine, and hostile bytes are refused. */
#include "prompts/prompt_record.h"

#include "base/size.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/runner.h"

static const unsigned char id[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                     8, 9, 10, 11, 12, 13, 14, 15};

static mls_prompt_key root_key(void)
{
    const unsigned char fingerprint[MLS_PROMPT_FINGERPRINT] = "model";
    const mls_prompt_hash hash = mls_prompt_hash_root(id, fingerprint, 5);
    return mls_prompt_hash_key(&hash);
}

static void check_key(mls_prompt_key key, const char *expected)
{
    char text[2 * MLS_PROMPT_KEY + 1];
    for (int i = 0; i < MLS_PROMPT_KEY; i++) {
        snprintf(text + 2 * i, 3, "%02x", (unsigned)key.bytes[i]);
    }
    CHECK_TEXT(text, expected);
}

/* Another implementation computed the expected values of SipHash-2-4 with 128 bits.
 */
TEST(keys_are_siphash_values)
{
    const uint32_t four[] = {1, 2, 3, 4}, three[] = {9, 8, 7};
    const mls_prompt_key root = root_key();
    check_key(root, "fd804e618e4958ae375363493f3998c1");
    mls_prompt_hash hash = mls_prompt_hash_begin(id, &root, 0);
    mls_prompt_hash_tokens(&hash, four, 4);
    check_key(mls_prompt_hash_key(&hash), "166a9f2c2fde93f2fd0af66978459879");
    hash = mls_prompt_hash_begin(id, &root, 7);
    mls_prompt_hash_tokens(&hash, three, 1);
    (void)mls_prompt_hash_key(&hash); /* the hash continues */
    mls_prompt_hash_tokens(&hash, three + 1, 2);
    check_key(mls_prompt_hash_key(&hash), "f4ef3bf3255538e2aad7ae0c51e23e4f");
    hash = mls_prompt_hash_begin(id, &root, 1);
    check_key(mls_prompt_hash_key(&hash), "a82c9deb25db644af1b017e435846213");
}

enum { TOKENS = 3, PARTS = 2, PAYLOAD = 100 };

static const unsigned char extra[MLS_PROMPT_EXTRA] = "position and digest";

static mls_prompt_header sample(void)
{
    mls_prompt_header header = {.kind = 9,
                                .key = root_key(),
                                .fingerprint = "abc",
                                .fingerprint_bytes = 3,
                                .put = 77,
                                .end = 259,
                                .token_count = TOKENS,
                                .extra_count = 1,
                                .extras = extra,
                                .part_count = PARTS,
                                .meta = (const unsigned char *)"hello",
                                .meta_bytes = 5};
    CHECK(mls_prompt_header_sizes(&header, PAYLOAD, &status) == MLS_OK);
    return header;
}

static size_t write_sample(unsigned char *out, mls_prompt_header *header)
{
    const uint32_t tokens[TOKENS] = {5, 6, 4000000000U};
    const mls_prompt_part parts[PARTS] = {{60, 123}, {40, 456}};
    *header = sample();
    mls_prompt_header_write(header, tokens, parts, mls_crc_of(best_cpu()), out);
    return header->header_bytes;
}

TEST(a_written_header_is_read_back)
{
    unsigned char bytes[512];
    mls_prompt_header written, header = {0};
    const size_t length = write_sample(bytes, &written);
    CHECK(length == 256 && written.record_bytes == 384);
    const mls_crc_kernels *crc = mls_crc_of(best_cpu());
    REQUIRE(mls_prompt_header_parse(bytes, length, 384, crc, &header, &status) == MLS_OK);
    CHECK(header.kind == 9 && header.end == 259 && header.put == 77);
    CHECK(mls_prompt_header_token(&header, 2) == 4000000000U);
    CHECK(header.token_count == TOKENS && header.extra_count == 1);
    CHECK(memcmp(header.extras, extra, sizeof extra) == 0);
    CHECK(mls_prompt_header_part(&header, 1).bytes == 40);
    CHECK(mls_prompt_header_part(&header, 1).crc == 456);
    CHECK(header.meta_bytes == 5 && memcmp(header.meta, "hello", 5) == 0);
    CHECK(mls_prompt_key_equal(&header.key, &written.key) && header.crc == written.crc);
}

TEST(every_flipped_bit_of_a_header_is_found)
{
    unsigned char bytes[512];
    mls_prompt_header header;
    const size_t length = write_sample(bytes, &header);
    for (size_t bit = 0; bit < 8 * length; bit++) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK(mls_prompt_header_parse(bytes, length, 384, mls_crc_of(best_cpu()), &header,
                                      &status) != MLS_OK);
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    bytes[length - 1] ^= 1;
    CHECK_FAILS(mls_prompt_header_parse(bytes, length, 384, mls_crc_of(best_cpu()),
                                        &header, &status),
                MLS_E_CHECKSUM, "the header of a record is damaged");
}

/* The checksum does not protect: a hostile file has the right one. */
TEST(hostile_lengths_with_a_right_checksum_are_refused)
{
    unsigned char bytes[512], good[512];
    mls_prompt_header header;
    const mls_crc_kernels *crc = mls_crc_of(best_cpu());
    const size_t length = write_sample(good, &header);
    for (int i = 0; i < TRIES(20000); i++) {
        memcpy(bytes, good, sizeof bytes);
        const size_t at = 8 + below(200);
        fill_random(bytes + at, 1 + below(8), (uint64_t)i + 1);
        mls_store_le32(bytes + 4, crc->update(0, bytes + 8, length - 8));
        if (mls_prompt_header_parse(bytes, length, 384, crc, &header, &status) ==
            MLS_OK) {
            uint64_t sum = header.header_bytes;
            for (size_t p = 0; p < header.part_count; p++) {
                sum += mls_prompt_header_part(&header, p).bytes;
            }
            CHECK(sum <= header.record_bytes && header.record_bytes <= 384);
            CHECK(header.meta + header.meta_bytes <= bytes + length);
        }
    }
}

TEST(the_length_of_a_header_longer_than_the_bytes_is_known)
{
    unsigned char bytes[512];
    mls_prompt_header header;
    const size_t length = write_sample(bytes, &header);
    const mls_crc_kernels *crc = mls_crc_of(best_cpu());
    CHECK_FAILS(mls_prompt_header_parse(bytes, 130, 384, crc, &header, &status),
                MLS_E_CAPACITY, "the header is longer");
    CHECK(header.header_bytes == length);
    CHECK_FAILS(mls_prompt_header_parse(bytes, 100, 384, crc, &header, &status),
                MLS_E_CHECKSUM, "no record starts here");
    CHECK_FAILS(mls_prompt_header_parse(bytes, length, 320, crc, &header, &status),
                MLS_E_FORMAT, "the lengths of a record are invalid");
}

TEST(counts_beyond_the_limits_are_refused)
{
    mls_prompt_header header = {.token_count = MLS_PROMPT_MAX_TOKENS + 1};
    CHECK_FAILS(mls_prompt_header_sizes(&header, 0, &status), MLS_E_VALUE,
                "a record has 65537 tokens, 0 extras, 0 parts and 0 bytes of meta: more "
                "than a header can hold");
    header = (mls_prompt_header){.token_count = 60000, .extra_count = 60000};
    CHECK(mls_prompt_header_sizes(&header, 0, &status) == MLS_E_VALUE);
    header = (mls_prompt_header){.meta_bytes = MLS_PROMPT_MAX_META + 1};
    CHECK(mls_prompt_header_sizes(&header, 0, &status) == MLS_E_VALUE);
    header = (mls_prompt_header){.part_count = MLS_PROMPT_MAX_PARTS + 1};
    CHECK(mls_prompt_header_sizes(&header, 0, &status) == MLS_E_VALUE);
    header = (mls_prompt_header){0};
    CHECK_FAILS(mls_prompt_header_sizes(&header, UINT64_MAX, &status), MLS_E_SIZE,
                "a record of 18446744073709551615 bytes is too large");
    CHECK(mls_prompt_header_sizes(&header, (uint64_t)1 << 39, &status) == MLS_E_SIZE);
}

TEST(a_copied_header_has_another_put_and_flags)
{
    unsigned char bytes[512], copy[512];
    mls_prompt_header header;
    const size_t length = write_sample(bytes, &header);
    const mls_crc_kernels *crc = mls_crc_of(best_cpu());
    header.put = 99;
    header.flags = MLS_PROMPT_MOVED;
    mls_prompt_header_copy(&header, bytes, crc, copy);
    REQUIRE(mls_prompt_header_parse(copy, length, 384, crc, &header, &status) == MLS_OK);
    CHECK(header.put == 99 && header.flags == MLS_PROMPT_MOVED && header.end == 259);
}

TEST(heads_of_newer_versions_and_other_files_are_refused)
{
    unsigned char bytes[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head = {.number = 12}, out = {0};
    const mls_crc_kernels *crc = mls_crc_of(best_cpu());
    memcpy(head.id, id, sizeof id);
    mls_prompt_head_write(bytes, "abcdefgh", &head, crc);
    CHECK(mls_prompt_head_parse(bytes, "abcdefgh", crc, &out, &status) == MLS_OK);
    CHECK(out.number == 12 && memcmp(out.id, id, sizeof id) == 0);
    CHECK_FAILS(mls_prompt_head_parse(bytes, "abcdefgx", crc, &out, &status),
                MLS_E_FORMAT, "not a file of a prompt store");
    bytes[40] = 1; /* the hint has no checksum */
    CHECK(mls_prompt_head_parse(bytes, "abcdefgh", crc, &out, &status) == MLS_OK);
    bytes[20] ^= 1;
    CHECK_FAILS(mls_prompt_head_parse(bytes, "abcdefgh", crc, &out, &status),
                MLS_E_FORMAT, "the head of the file is damaged");
    bytes[8] = MLS_PROMPT_VERSION + 1;
    CHECK_FAILS(mls_prompt_head_parse(bytes, "abcdefgh", crc, &out, &status),
                MLS_E_FORMAT,
                "version 2 of the format of prompt stores is newer than this program, "
                "which reads version 1: update mlstate");
}

TEST(notes_are_read_back)
{
    unsigned char bytes[MLS_PROMPT_NOTE];
    const mls_prompt_note note = {root_key(), MLS_PROMPT_UNPIN, 17};
    mls_prompt_note_write(bytes, &note);
    const mls_prompt_note read = mls_prompt_note_read(bytes);
    CHECK(read.operation == MLS_PROMPT_UNPIN && read.segment == 17);
    CHECK(mls_prompt_key_equal(&read.key, &note.key));
}
