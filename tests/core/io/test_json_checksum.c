/* JSON with its own checksum, which is stored in the text that it covers. */
#include "io/json_checksum.h"
#include "support/runner.h"

#include <stdlib.h>

static const mls_crc_kernels *const crc = &mls_crc_scalar;

static const char zeroed_text[] =
    MLS_JSON_CHECKSUM_START ",\n\"a\": [1, 2.5, \"\xc3\xa9\"]}\n";

enum { LENGTH = sizeof zeroed_text - 1, DIGITS_AT = 13 };

/* A copy of the text above with its checksum, for each test. */
static char good_text[sizeof zeroed_text + 1];

BEFORE_EACH
{
    memcpy(good_text, zeroed_text, sizeof zeroed_text);
    (void)mls_json_checksum_set(good_text, LENGTH, crc);
}

TEST(checksum_covers_text_with_zeroed_digits)
{
    char text[sizeof zeroed_text];
    char digits[MLS_CRC_DIGITS];
    memcpy(text, zeroed_text, sizeof zeroed_text);
    const uint32_t sum = mls_json_checksum_set(text, LENGTH, crc);
    CHECK(sum == crc->update(0, zeroed_text, LENGTH));
    mls_crc_to_digits(sum, digits);
    CHECK(memcmp(text + DIGITS_AT, digits, sizeof digits) == 0);
    /* no other byte changed */
    memset(text + DIGITS_AT, '0', MLS_CRC_DIGITS);
    CHECK_TEXT(text, zeroed_text);
}

TEST(checksum_matches_reference_value)
{
    /* computed without this library, as a reference for other implementations */
    char text[] = "{\"checksum\":\"00000000\",\"format\":\"mlstate.index\"}\n";
    CHECK(mls_json_checksum_set(text, strlen(text), crc) == 0x972186f1U);
    CHECK_TEXT(text, "{\"checksum\":\"972186f1\",\"format\":\"mlstate.index\"}\n");
    CHECK(mls_json_checksum_check(text, strlen(text), crc, &status) == MLS_OK);
}

TEST(text_with_its_checksum_is_accepted)
{
    char least[] = MLS_JSON_CHECKSUM_START "}";
    CHECK(mls_json_checksum_check(good_text, LENGTH, crc, &status) == MLS_OK);
    (void)mls_json_checksum_set(least, strlen(least), crc);
    CHECK(mls_json_checksum_check(least, strlen(least), crc, &status) == MLS_OK);
}

TEST(setting_checksum_is_idempotent)
{
    char again[sizeof zeroed_text];
    memcpy(again, good_text, sizeof again);
    (void)mls_json_checksum_set(again, LENGTH, crc);
    CHECK_TEXT(again, good_text);
}

TEST(every_flipped_bit_is_detected)
{
    for (size_t bit = 0; bit < 8 * LENGTH; bit++) {
        good_text[bit / 8] = (char)(good_text[bit / 8] ^ (1 << bit % 8));
        const mls_code code = mls_json_checksum_check(good_text, LENGTH, crc, &status);
        /* a change in the start, apart from the digits, makes it another kind of text */
        const bool start = bit / 8 < sizeof MLS_JSON_CHECKSUM_START - 1;
        CHECK(code == MLS_E_CHECKSUM || (start && code == MLS_E_FORMAT));
        CHECK(code == status.code && status.text[0] != '\0');
        good_text[bit / 8] = (char)(good_text[bit / 8] ^ (1 << bit % 8));
    }
}

TEST(every_other_length_is_detected)
{
    for (size_t length = 0; length < LENGTH; length++) {
        /* memory of exactly that length, so that reads past the end are noticed */
        char *cut = malloc(length + 1);
        REQUIRE(cut != NULL);
        memcpy(cut, good_text, length);
        CHECK(mls_json_checksum_check(cut, length, crc, &status) != MLS_OK);
        free(cut);
    }
    CHECK_FAILS(mls_json_checksum_check(good_text, LENGTH + 1, crc, &status),
                MLS_E_CHECKSUM,
                "the text has changed since it was written (checksum 32c8bac8, expected "
                "76968d91, over 46 bytes): the file is damaged");
}

TEST(a_text_without_a_checksum_is_refused)
{
    static const char *const texts[] = {
        "",
        "{}",
        "{\"checksum\":\"0000000\",\"a\":1}",
        "{\"checksum\":\"000000000\",\"a\":1}",
        "{\"checksum\":\"0000000A\",\"a\":1}",
        "{\"checksum\":\"0x000000\",\"a\":1}",
        "{\"checksum\":\"-0000000\",\"a\":1}",
        "{\"checksum\":\"       0\",\"a\":1}",
        "{\"checksum\":00000000  ,\"a\":1}",
        "{ \"checksum\":\"00000000\",\"a\":1}",
        " {\"checksum\":\"00000000\",\"a\":1}",
        "\xef\xbb\xbf{\"checksum\":\"00000000\",\"a\":1}",
        "{\"Checksum\":\"00000000\",\"a\":1}",
        "{\"a\":1,\"checksum\":\"00000000\"}      ",
        "[\"checksum\",\"00000000\",\"a\",1]     ",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        CHECK_FAILS(mls_json_checksum_check(texts[i], strlen(texts[i]), crc, &status),
                    MLS_E_FORMAT, "the text does not start with its checksum");
        CHECK(status.has_offset && status.offset == 0);
        CHECK_TEXT(status.expected, "{\"checksum\":\"xxxxxxxx\"");
    }
}

TEST(damage_is_reported_with_both_checksums)
{
    char digits[MLS_CRC_DIGITS + 1] = "";
    memcpy(digits, good_text + DIGITS_AT, MLS_CRC_DIGITS);
    good_text[LENGTH - 3] = '!';
    REQUIRE(mls_json_checksum_check(good_text, LENGTH, crc, &status) == MLS_E_CHECKSUM);
    CHECK_TEXT(status.expected, digits);
    CHECK(strlen(status.got) == MLS_CRC_DIGITS && strcmp(status.got, digits) != 0);
}

TEST(checksum_digits_round_trip)
{
    static const uint32_t values[] = {0,          1,          0xf,        0x10,
                                      0x89abcdef, 0x7fffffff, 0x80000000, 0xffffffff};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        char digits[MLS_CRC_DIGITS + 1], expected[MLS_CRC_DIGITS + 1];
        uint32_t value = 77;
        digits[MLS_CRC_DIGITS] = '~';
        mls_crc_to_digits(values[i], digits);
        CHECK(digits[MLS_CRC_DIGITS] == '~');
        snprintf(expected, sizeof expected, "%08lx", (unsigned long)values[i]);
        CHECK(memcmp(digits, expected, MLS_CRC_DIGITS) == 0);
        CHECK(mls_crc_from_digits(digits, &value) && value == values[i]);
    }
}

TEST(upper_case_digits_are_refused)
{
    for (int c = 0; c < 256; c++) {
        for (int at = 0; at < MLS_CRC_DIGITS; at++) {
            char digits[MLS_CRC_DIGITS + 1] = "00000000";
            uint32_t value = 77;
            digits[at] = (char)c;
            const bool good = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
            CHECK(mls_crc_from_digits(digits, &value) == good);
            CHECK(good || value == 77);
        }
    }
}
