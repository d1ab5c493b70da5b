#include "base/string_view.h"
#include "support/runner.h"
#include "support/text.h"

TEST(invalid_utf8_is_rejected)
{
    static const char *const bad[] = {
        "\x80",         "\xC0\x80",         "\xC1\xBF",         "\xC3",
        "\xE0\x80\x80", "\xE0\x9F\xBF",     "\xED\xA0\x80",     "\xED\xBF\xBF",
        "\xE2\x82",     "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80",
        "\xFF",         "\xE2(\xA1",        "\xF0\x9F\x98"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(!mls_utf8_valid(bad[i], strlen(bad[i])));
    }
    static const char *const good[] = {"\x7F",
                                       "\xC2\x80",
                                       "\xED\x9F\xBF",
                                       "\xEE\x80\x80",
                                       "\xF0\x90\x80\x80",
                                       "\xF4\x8F\xBF\xBF",
                                       ""};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        CHECK(mls_utf8_valid(good[i], strlen(good[i])));
    }
}

TEST(a_code_point_becomes_the_character_of_its_length)
{
    static const unsigned long ends[] = {0,      0x7F,   0x80,   0x7FF,   0x800,
                                         0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF};
    static const size_t lengths[] = {1, 1, 2, 2, 3, 3, 3, 3, 4, 4};
    char out[4];
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        REQUIRE(mls_utf8_put(out, ends[i]) == lengths[i]);
        CHECK(mls_utf8_length((const unsigned char *)out, lengths[i]) == lengths[i]);
    }
    CHECK(mls_utf8_put(out, 0x20AC) == 3 && memcmp(out, "\xE2\x82\xAC", 3) == 0);
    CHECK(mls_utf8_put(out, 0x1F600) == 4 && memcmp(out, "\xF0\x9F\x98\x80", 4) == 0);
}

TEST(string_view_equal_compares_whole_length)
{
    const mls_str nul = {.data = "a\0b", .length = 3};
    CHECK(mls_str_is(text("ab"), "ab") && !mls_str_is(text("ab"), "abc"));
    CHECK(!mls_str_is(nul, "a"));
    CHECK(mls_str_equal(text("ab"), text("ab")));
    CHECK(!mls_str_equal(nul, text("a")));
    CHECK(mls_str_equal((mls_str){0}, text("")));
    CHECK(!mls_str_equal(text("ab"), text("ac")));
}

TEST(prefix_longer_than_text_does_not_match)
{
    CHECK(mls_str_starts(text("module.w"), text("module.")));
    CHECK(mls_str_starts(text("w"), (mls_str){0}));
    CHECK(mls_str_starts((mls_str){0}, (mls_str){0}));
    CHECK(!mls_str_starts(text("mod"), text("module.")));
    CHECK(!mls_str_starts(text("Module.w"), text("module.")));
}

TEST(strings_compare_by_unsigned_bytes)
{
    CHECK(mls_str_compare(text("a"), text("b")) < 0);
    CHECK(mls_str_compare(text("b"), text("aa")) > 0);
    CHECK(mls_str_compare(text("a"), text("aa")) < 0);
    CHECK(mls_str_compare(text("\xC3\xA9"), text("z")) > 0);
    CHECK(mls_str_compare((mls_str){0}, text("")) == 0);
}

/* The ASCII characters that RFC 8259 allows unescaped in a string, one by one. */
static size_t printable_length(const char *text)
{
    size_t at = 0;
    while (at < 8 && text[at] >= ' ' && text[at] < 0x7F && text[at] != '"' &&
           text[at] != '\\') {
        at++;
    }
    return at;
}

TEST(printable_prefix_matches_bytewise_count)
{
    static const char fillers[] = " !#[]~a0";
    for (size_t place = 0; place < 8; place++) {
        for (int c = 0; c < 256; c++) {
            for (int d = 0; d < 256; d += EVERY(7)) {
                char text[8];
                memcpy(text, fillers, sizeof text);
                text[(place + 1) % 8] = (char)(unsigned char)d;
                text[place] = (char)(unsigned char)c;
                CHECK(mls_str_eight_printable(text) == printable_length(text));
            }
        }
    }
}
