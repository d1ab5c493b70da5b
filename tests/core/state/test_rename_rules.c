#include "state/rename_rules.h"

#include "base/memory.h"
#include "support/runner.h"
#include "support/text.h"

#include <stdint.h>
#include <stdlib.h>

static mls_rename_rule rule(mls_str old, mls_str new, bool anywhere)
{
    return (mls_rename_rule){.old = old, .new = new, .anywhere = anywhere};
}

/* Whether `name` becomes `want`, with just enough memory and with plenty. */
static bool becomes(mls_str name, const mls_rename_rule *rules, size_t count,
                    mls_str want)
{
    char plenty[256];
    const size_t length = mls_name_apply(name, rules, count, plenty, sizeof plenty, NULL);
    const size_t enough = mls_name_apply(name, rules, count, NULL, 0, NULL);
    if (length != want.length || memcmp(plenty, want.data, length) != 0 ||
        enough < length) {
        return false;
    }
    /* a separate block, so that a sanitizer detects each byte too many */
    char *exact = mls_alloc(enough, 1);
    const size_t again = mls_name_apply(name, rules, count, exact, enough, NULL);
    const bool same = again == length && memcmp(exact, plenty, length) == 0;
    mls_free(exact);
    return same;
}

static bool one_rule(mls_str name, mls_str old, mls_str new, bool anywhere, mls_str want)
{
    const mls_rename_rule only = rule(old, new, anywhere);
    return becomes(name, &only, 1, want);
}

/* Check a rule whose texts are literals. */
#define RENAMES(name, old, new, anywhere, want)                                          \
    CHECK(one_rule(TEXT(name), TEXT(old), TEXT(new), anywhere, TEXT(want)))

TEST(any_bytes_can_be_renamed)
{
    RENAMES("a\0b.%s", "a\0b.", "\"'.", false, "\"'.%s");
    RENAMES("sch\xC3\xB6n.x", "sch\xC3\xB6n", "\0", true, "\0.x");
}

TEST(required_length_is_returned_without_room)
{
    const mls_rename_rule grow = rule(TEXT("a"), TEXT("bbb"), true);
    char out[9];
    CHECK(mls_name_apply(TEXT("a.a.c"), &grow, 1, out, 9, NULL) == 9);
    CHECK(memcmp(out, "bbb.bbb.c", 9) == 0);
    for (size_t room = 0; room < 9; room++) {
        CHECK(mls_name_apply(TEXT("a.a.c"), &grow, 1, out, room, NULL) >= 9);
    }
    CHECK(mls_name_apply(TEXT("abc"), NULL, 0, NULL, 0, NULL) == 3);
    CHECK(mls_name_apply(TEXT(""), NULL, 0, NULL, 0, NULL) == 0);
}

TEST(exploding_rules_are_refused)
{
    /* each rule makes a hundred segments of one: 100 ** 12 exceeds any memory */
    enum { SEGMENTS = 100, RULES = 12 };
    static char many[2 * SEGMENTS];
    for (size_t i = 0; i < SEGMENTS; i++) {
        memcpy(many + 2 * i, "a.", 2);
    }
    mls_rename_rule rules[RULES];
    for (size_t i = 0; i < RULES; i++) {
        rules[i] = rule(TEXT("a"), (mls_str){many, 2 * SEGMENTS - 1}, true);
    }
    char out[16];
    CHECK(mls_name_apply(TEXT("a"), rules, RULES, out, sizeof out, NULL) == SIZE_MAX);
    CHECK(mls_name_apply(TEXT("a"), rules, 2, NULL, 0, NULL) < 200000);
}

/* The definition for names of any length, a segment at a time. */
static size_t by_definition(const char *name, size_t length, const char *old,
                            const char *new, char *out)
{
    const size_t old_length = strlen(old);
    size_t written = 0;
    for (size_t i = 0; i < length;) {
        const size_t end = i + old_length;
        const bool starts = i == 0 || name[i - 1] == '.';
        if (starts && end <= length && memcmp(name + i, old, old_length) == 0 &&
            (end == length || name[end] == '.' || name[end - 1] == '.')) {
            memcpy(out + written, new, strlen(new));
            written += strlen(new);
            i += old_length;
            if (new[0] == '\0' && old[old_length - 1] != '.' && i < length) {
                i++; /* the dot of a removed prefix */
            }
        } else {
            out[written++] = name[i++];
        }
    }
    return written;
}

TEST(random_names_are_renamed_by_definition)
{
    static const char *const olds[] = {"a", "a.", "b.a", ".", "ab", "a.a."};
    static const char *const news[] = {"", "a", "b.b.", "..", "aaaaaaa", "x"};
    char name[24], want[256];
    srand(11);
    for (int round = 0; round < 20000; round++) {
        const size_t length = (size_t)rand() % sizeof name;
        for (size_t i = 0; i < length; i++) {
            name[i] = "ab.."[rand() % 4];
        }
        const char *old = olds[rand() % 6], *new = news[rand() % 6];
        const size_t want_length = by_definition(name, length, old, new, want);
        REQUIRE(one_rule((mls_str){name, length}, (mls_str){old, strlen(old)},
                         (mls_str){new, strlen(new)}, true,
                         (mls_str){want, want_length}));
    }
}
