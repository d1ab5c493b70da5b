#include "io/safe_filename.h"
#include "support/runner.h"

static const char *encoded(const char *name)
{
    static char out[MLS_FILENAME_BYTES + 1];
    const size_t length =
        mls_filename_encode((mls_str){.data = name, .length = strlen(name)}, 7, out);
    CHECK(strlen(out) == length && length <= MLS_FILENAME_BYTES);
    return out;
}

static bool becomes(const char *name, const char *expected)
{
    const char *got = encoded(name);
    if (strcmp(got, expected) != 0) {
        printf("'%s' became '%s', not '%s'\n", name, got, expected);
    }
    return strcmp(got, expected) == 0;
}

TEST(common_names_are_not_escaped)
{
    CHECK(becomes("model.layers.0.attn.q_proj.weight",
                  "model.layers.0.attn.q_proj.weight"));
    CHECK(becomes("h-1", "h-1"));
    CHECK(becomes("Block", "=42lock"));
}

TEST(path_separators_and_dots_are_escaped)
{
    CHECK(becomes("", "="));
    CHECK(becomes(".", "=2e"));
    CHECK(becomes("..", "=2e=2e"));
    CHECK(becomes("../x", "=2e=2e=2fx"));
    CHECK(becomes("a..b", "a.=2eb"));
    CHECK(becomes("/abs", "=2fabs"));
    CHECK(becomes("a\\b", "a=5cb"));
    CHECK(becomes("a:b c\n", "a=3ab=20c=0a"));
    CHECK(becomes("-rf", "=2drf"));
    CHECK(becomes(".tmp", "=2etmp"));
    CHECK(becomes("\xE2\x80\xAE", "=e2=80=ae"));
}

TEST(escape_character_is_escaped)
{
    CHECK(becomes("=2f", "=3d2f"));
    CHECK(becomes("%2f", "=252f"));
}

TEST(windows_device_names_are_escaped)
{
    CHECK(becomes("con", "=63on"));
    CHECK(becomes("nul.weight", "=6eul.weight"));
    CHECK(becomes("com1.x", "=63om1.x"));
    CHECK(becomes("com", "com"));
    CHECK(becomes("console", "console"));
    CHECK(becomes("x.con", "x.con"));
}

/* Decode a file name: the definition of its meaning. */
static size_t decoded(const char *text, char *out)
{
    size_t length = 0;
    if (strcmp(text, "=") == 0) {
        return 0;
    }
    for (size_t i = 0; text[i] != '\0'; i++) {
        unsigned byte = (unsigned char)text[i];
        if (text[i] == '=') {
            CHECK(sscanf(text + i + 1, "%2x", &byte) == 1);
            i += 2;
        }
        out[length++] = (char)byte;
    }
    return length;
}

TEST(encoding_is_injective)
{
    /* all names of up to two bytes: each can be decoded from its file name */
    for (unsigned first = 0; first < 256; first++) {
        for (unsigned second = 0; second < 256; second++) {
            const char name[] = {(char)first, (char)second};
            char out[MLS_FILENAME_BYTES + 1], back[8];
            mls_filename_encode((mls_str){.data = name, .length = 2}, 0, out);
            CHECK(decoded(out, back) == 2 && memcmp(back, name, 2) == 0);
            for (const char *c = out; *c != '\0'; c++) {
                CHECK((*c >= 'a' && *c <= 'z') || (*c >= '0' && *c <= '9') ||
                      strchr("_-.=", *c) != NULL);
            }
        }
    }
}

TEST(truncated_names_differ_by_number)
{
    char name[5000], first[MLS_FILENAME_BYTES + 1], second[MLS_FILENAME_BYTES + 1];
    memset(name, 'X', sizeof name);
    const mls_str text = {.data = name, .length = sizeof name};
    CHECK(mls_filename_encode(text, 1, first) <= MLS_FILENAME_BYTES);
    CHECK(mls_filename_encode(text, UINT64_MAX, second) <= MLS_FILENAME_BYTES);
    CHECK(strcmp(first, second) != 0 && strstr(first, "=~1") != NULL);
    /* the longest name that fits is not truncated, and the mark never is */
    memset(name, 'x', sizeof name);
    const mls_str fits = {.data = name, .length = MLS_FILENAME_BYTES};
    CHECK(mls_filename_encode(fits, 1, first) == MLS_FILENAME_BYTES);
    CHECK(strchr(first, '=') == NULL);
    CHECK(strcmp(second + strlen(second) - 18, "=~ffffffffffffffff") == 0);
}
