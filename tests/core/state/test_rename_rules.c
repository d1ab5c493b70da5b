#include "state/rename_rules.h"

#include "base/memory.h"
#include "support/runner.h"
#include "support/text.h"

#include <stdint.h>
#include <stdlib.h>

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

/* ---- applying ---- */

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

TEST(a_prefix_is_replaced_at_the_start_only)
{
    RENAMES("module.a.b", "module.", "", false, "a.b");
    RENAMES("a.module.b", "module.", "", false, "a.module.b");
    RENAMES("module.module.b", "module.", "", false, "module.b");
    RENAMES("a", "", "model.", false, "model.a");
    RENAMES("enc.w", "enc.", "encoder.", false, "encoder.w");
    RENAMES("enc", "enc.", "x", false, "enc");
    RENAMES("enc.", "enc.", "", false, "");
    RENAMES("", "", "a", false, "a");
    RENAMES("", "a", "b", true, "");
}

TEST(anywhere_means_wherever_a_segment_starts)
{
    RENAMES("_orig_mod.a._orig_mod.b", "_orig_mod.", "", true, "a.b");
    RENAMES("a._orig_mod._orig_mod.b", "_orig_mod.", "", true, "a.b");
    RENAMES("x_orig_mod.b", "_orig_mod.", "", true, "x_orig_mod.b");
    RENAMES("a.x_orig_mod._orig_mod.b", "_orig_mod.", "", true, "a.x_orig_mod.b");
    RENAMES("a._orig_mod", "_orig_mod.", "", true, "a._orig_mod");
    RENAMES("a._orig_mod.", "_orig_mod.", "", true, "a.");
    /* an old text without a dot at its end: the next start is after the next dot */
    RENAMES("a.aaa.a", "a", "xyz", true, "xyz.aaa.xyz");
    RENAMES("aa.a", "a", ".", true, "aa..");
    RENAMES("a.b.a.b.a", "a.b", "c", true, "c.c.a");
    RENAMES("a.b.a", "a", "c", true, "c.b.c");
    RENAMES(".a", ".", "x", true, "xa");
    RENAMES("a.b", "", "x.", true, "x.a.b");
}

TEST(a_prefix_ends_where_a_segment_ends)
{
    RENAMES("layers.1.w", "layers.1", "layers.0", false, "layers.0.w");
    RENAMES("layers.1", "layers.1", "layers.0", false, "layers.0");
    RENAMES("layers.10.w", "layers.1", "layers.0", false, "layers.10.w");
    RENAMES("fc2.w", "fc", "head", false, "fc2.w");
    RENAMES("fc2.fc.w", "fc", "head", true, "fc2.head.w");
}

TEST(rules_that_match_are_marked)
{
    const mls_rename_rule rules[] = {rule(TEXT("a."), TEXT("b."), false),
                                     rule(TEXT("b"), TEXT("c"), false),
                                     rule(TEXT("a."), TEXT(""), false)};
    bool used[3] = {false};
    char out[8];
    CHECK(mls_name_apply(TEXT("a.w"), rules, 3, out, sizeof out, used) == 3);
    CHECK(used[0] && used[1] && !used[2]);
    CHECK(mls_name_apply(TEXT("x"), rules, 3, out, sizeof out, used) == 1);
    CHECK(used[0] && used[1] && !used[2]);
}

TEST(rules_see_what_the_rules_before_them_made)
{
    const mls_rename_rule unwrap[] = {rule(TEXT("_orig_mod."), TEXT(""), true),
                                      rule(TEXT("module."), TEXT("model."), false)};
    CHECK(becomes(TEXT("_orig_mod.module.a._orig_mod.b"), unwrap, 2, TEXT("model.a.b")));
    /* longer in between, short at the end */
    const mls_rename_rule there_and_back[] = {rule(TEXT("a"), TEXT("a.a.a.a.a.a"), true),
                                              rule(TEXT("a.a.a.a.a.a"), TEXT("b"), true),
                                              rule(TEXT("b."), TEXT(""), true)};
    CHECK(becomes(TEXT("a.a"), there_and_back, 3, TEXT("b")));
    CHECK(becomes(TEXT("a.a"), there_and_back, 0, TEXT("a.a")));
}

TEST(any_bytes_can_be_renamed)
{
    RENAMES("a\0b.%s", "a\0b.", "\"'.", false, "\"'.%s");
    RENAMES("sch\xC3\xB6n.x", "sch\xC3\xB6n", "\0", true, "\0.x");
}

TEST(without_room_it_says_what_is_enough)
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

TEST(endless_growth_is_told_and_not_tried)
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

/* ---- explaining ---- */

static mls_explanation found; /* of the current test */

AFTER_EACH
{
    mls_explanation_fini(&found);
}

static void explain(const mls_str *unexpected, size_t unexpected_count,
                    const mls_str *missing, size_t missing_count)
{
    mls_explanation_fini(&found);
    CHECK(mls_name_tree_explain(unexpected, unexpected_count, missing, missing_count,
                                &found, &status) == MLS_OK);
}

static bool rule_is(size_t at, const char *old, const char *new, bool anywhere)
{
    return at < found.rule_count && mls_str_is(found.rules[at].old, old) &&
           mls_str_is(found.rules[at].new, new) && found.rules[at].anywhere == anywhere;
}

TEST(a_prefix_too_much_is_found)
{
    const mls_str unexpected[] = {TEXT("module.a.w"), TEXT("module.a.b"),
                                  TEXT("module.c")};
    const mls_str missing[] = {TEXT("a.w"), TEXT("a.b"), TEXT("c")};
    explain(unexpected, 3, missing, 3);
    CHECK(found.rule_count == 1 && found.matched == 3);
    CHECK(rule_is(0, "module.", "", false));
    mls_explanation_fini(&found);
    CHECK(found.rule_count == 0 && found.prefix == NULL);
}

TEST(a_prefix_too_little_is_found)
{
    const mls_str unexpected[] = {TEXT("a.w"), TEXT("a.b"), TEXT("c"), TEXT("d")};
    const mls_str missing[] = {TEXT("net.inner.a.w"), TEXT("net.inner.a.b"),
                               TEXT("net.inner.c")};
    explain(unexpected, 4, missing, 3);
    CHECK(found.rule_count == 1 && found.matched == 3);
    CHECK(rule_is(0, "", "net.inner.", false));
}

TEST(marks_of_wrappers_are_found_wherever_they_stand)
{
    const mls_str unexpected[] = {
        TEXT("_fsdp_wrapped_module.a._fsdp_wrapped_module.w"),
        TEXT("_fsdp_wrapped_module.b._checkpoint_wrapped_module.w"),
        TEXT("_fsdp_wrapped_module.c._fsdp_wrapped_module._checkpoint_wrapped_module.w")};
    const mls_str missing[] = {TEXT("a.w"), TEXT("b.w"), TEXT("c.w")};
    explain(unexpected, 3, missing, 3);
    CHECK(found.rule_count == 2 && found.matched == 3);
    CHECK(rule_is(0, "_fsdp_wrapped_module.", "", true));
    CHECK(rule_is(1, "_checkpoint_wrapped_module.", "", true));
}

TEST(marks_and_a_prefix_are_found_together)
{
    /* no name contains the part "module.model." */
    const mls_str unexpected[] = {TEXT("module._orig_mod.model.a"),
                                  TEXT("module._orig_mod.model.b._orig_mod.w")};
    const mls_str missing[] = {TEXT("a"), TEXT("b.w"), TEXT("z")};
    explain(unexpected, 2, missing, 3);
    CHECK(found.rule_count == 2 && found.matched == 2);
    CHECK(rule_is(0, "_orig_mod.", "", true));
    CHECK(rule_is(1, "module.model.", "", false));
    char out[64];
    CHECK(mls_name_apply(unexpected[1], found.rules, found.rule_count, out, 64, NULL) ==
          3);
    CHECK(memcmp(out, "b.w", 3) == 0);
}

TEST(the_fewest_rules_are_given)
{
    /* a mark at the front alone is a prefix; a mark in both lists is kept */
    const mls_str front[] = {TEXT("_orig_mod.a"), TEXT("_orig_mod.b")};
    const mls_str plain[] = {TEXT("a"), TEXT("b")};
    explain(front, 2, plain, 2);
    CHECK(found.rule_count == 1 && rule_is(0, "_orig_mod.", "", false));
    const mls_str both[] = {TEXT("module.a._fsdp_wrapped_module.w"),
                            TEXT("module.b._fsdp_wrapped_module.w")};
    const mls_str still[] = {TEXT("a._fsdp_wrapped_module.w"),
                             TEXT("b._fsdp_wrapped_module.w")};
    explain(both, 2, still, 2);
    CHECK(found.rule_count == 1 && rule_is(0, "module.", "", false));
    explain(plain, 2, front, 2);
    CHECK(found.rule_count == 1 && rule_is(0, "", "_orig_mod.", false));
}

TEST(what_explains_too_little_is_not_given)
{
    const mls_str unexpected[] = {TEXT("module.a"), TEXT("module.b"), TEXT("x"),
                                  TEXT("y")};
    const mls_str half[] = {TEXT("a"), TEXT("b"), TEXT("p"), TEXT("q"), TEXT("r")};
    explain(unexpected, 4, half, 5);
    CHECK(found.rule_count == 0 && found.matched == 0 && found.prefix == NULL);
    explain(unexpected, 4, half, 3); /* two of three */
    CHECK(found.rule_count == 1 && found.matched == 2);
    explain(unexpected + 2, 2, half + 2, 3);
    CHECK(found.rule_count == 0);
}

TEST(nothing_explains_empty_lists)
{
    const mls_str names[] = {TEXT("module.a"), TEXT("_orig_mod.b")};
    explain(NULL, 0, names, 2);
    CHECK(found.rule_count == 0 && found.matched == 0);
    explain(names, 2, NULL, 0);
    CHECK(found.rule_count == 0);
    explain(NULL, 0, NULL, 0);
    CHECK(found.rule_count == 0);
    /* names that match already need no rules */
    explain(names, 2, names, 2);
    CHECK(found.rule_count == 0 && found.matched == 0);
}

TEST(rules_that_make_names_one_are_not_given)
{
    /* "module.a" would become "a", which exists */
    const mls_str prefix[] = {TEXT("module.a"), TEXT("module.b"), TEXT("a")};
    const mls_str b[] = {TEXT("b")};
    explain(prefix, 3, b, 1);
    CHECK(found.rule_count == 0);
    explain(prefix, 2, b, 1);
    CHECK(found.rule_count == 1 && found.matched == 1);
    /* without the mark one name would equal another */
    const mls_str marked[] = {TEXT("x._orig_mod.a"), TEXT("x.a"), TEXT("y._orig_mod.b")};
    const mls_str missing[] = {TEXT("y.b")};
    explain(marked, 3, missing, 1);
    CHECK(found.rule_count == 0);
    /* a renamed name makes way for the next one */
    const mls_str twice[] = {TEXT("m.m.a"), TEXT("m.a"), TEXT("m.b")};
    const mls_str once[] = {TEXT("a"), TEXT("b"), TEXT("c")};
    explain(twice, 3, once, 3);
    CHECK(found.rule_count == 1 && found.matched == 2);
    CHECK(rule_is(0, "m.", "", false));
}

TEST(rules_that_leave_nothing_of_a_name_are_not_given)
{
    const mls_str unexpected[] = {TEXT("module."), TEXT("module.a")};
    const mls_str missing[] = {TEXT("a"), TEXT("z")};
    explain(unexpected, 2, missing, 1);
    CHECK(found.rule_count == 0);
    const mls_str marked[] = {TEXT("_orig_mod."), TEXT("x._orig_mod.a")};
    const mls_str plain[] = {TEXT("x.a")};
    explain(marked, 2, plain, 1);
    CHECK(found.rule_count == 0);
}

TEST(a_prefix_is_whole_segments)
{
    const mls_str unexpected[] = {TEXT("xa"), TEXT("xb")};
    const mls_str missing[] = {TEXT("a"), TEXT("b")};
    explain(unexpected, 2, missing, 2);
    CHECK(found.rule_count == 0);
    const mls_str inside[] = {TEXT("x_orig_mod.a"), TEXT("y_orig_mod.b")};
    const mls_str without[] = {TEXT("xa"), TEXT("yb")};
    explain(inside, 2, without, 2);
    CHECK(found.rule_count == 0);
}

TEST(well_known_prefixes_win_a_tie)
{
    const mls_str unexpected[] = {TEXT("aux.w"), TEXT("aux.b"), TEXT("model.w"),
                                  TEXT("model.b")};
    const mls_str missing[] = {TEXT("w"), TEXT("b")};
    explain(unexpected, 4, missing, 2);
    CHECK(found.rule_count == 1 && rule_is(0, "model.", "", false));
}

TEST(a_name_that_occurs_twice_is_refused)
{
    const mls_str twice[] = {TEXT("a"), TEXT("b"), TEXT("a")};
    const mls_str once[] = {TEXT("m.a"), TEXT("m.b")};
    mls_explanation untouched = {.matched = 77};
    CHECK(mls_name_tree_explain(twice, 3, once, 2, &untouched, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.name, "a");
    CHECK(mls_name_tree_explain(once, 2, twice, 3, &untouched, &status) == MLS_E_VALUE);
    CHECK(untouched.matched == 77);
}

TEST(long_and_strange_names_are_explained)
{
    enum { LONG = 5000 };
    static char chars[2][LONG + 2];
    for (size_t i = 0; i < 2; i++) {
        for (size_t j = 0; j < LONG; j++) {
            chars[i][j] = j % 2 == 1 ? '.' : 'a';
        }
        chars[i][LONG] = (char)('b' + (char)i);
    }
    const mls_str unexpected[] = {{chars[0], LONG + 1}, {chars[1], LONG + 1}};
    const mls_str missing[] = {{chars[0] + 200, LONG - 199},
                               {chars[1] + 200, LONG - 199}};
    explain(unexpected, 2, missing, 2);
    CHECK(found.rule_count == 1 && found.matched == 2);
    CHECK(found.rules[0].old.length == 200 && found.rules[0].new.length == 0);
    const mls_str strange[] = {TEXT("%n\"\0.a"), TEXT("%n\"\0.\xC3\xB6")};
    const mls_str rest[] = {TEXT("a"), TEXT("\xC3\xB6")};
    explain(strange, 2, rest, 2);
    CHECK(found.rule_count == 1 && mls_str_equal(found.rules[0].old, TEXT("%n\"\0.")));
}

enum { MANY = 3000 };

/* A model's names, with a text at the front and in the middle of each. */
static void model_names(const char *front, const char *middle, char (*chars)[96],
                        mls_str *list)
{
    static const char *const leaves[] = {"attn.q.weight", "attn.q.bias", "norm.weight"};
    for (size_t i = 0; i < MANY; i++) {
        const int length = snprintf(chars[i], sizeof chars[i], "%slayers.%zu.%s%s", front,
                                    i / 3, middle, leaves[i % 3]);
        list[i] = (mls_str){chars[i], (size_t)length};
    }
}

TEST(a_whole_model_is_explained_from_both_sides)
{
    static char chars[2][MANY][96];
    static mls_str wrapped[MANY], plain[MANY];
    model_names("_orig_mod.net.", "_checkpoint_wrapped_module.", chars[0], wrapped);
    model_names("", "", chars[1], plain);
    /* each list in turn is the longer one */
    for (size_t fewer = 0; fewer <= 400; fewer += 400) {
        explain(wrapped, MANY - fewer, plain, MANY - 200);
        CHECK(found.matched == MANY - (fewer > 200 ? fewer : 200));
        CHECK(found.rule_count == 2);
        CHECK(rule_is(0, "_checkpoint_wrapped_module.", "", true));
        CHECK(rule_is(1, "_orig_mod.net.", "", false));
    }
    model_names("", "", chars[0], wrapped);
    model_names("transformer.", "", chars[1], plain);
    for (size_t fewer = 0; fewer <= 400; fewer += 400) {
        explain(wrapped, MANY - fewer, plain, MANY - 200);
        CHECK(found.rule_count == 1 && rule_is(0, "", "transformer.", false));
    }
}

TEST(a_few_names_among_many_others_are_explained)
{
    enum { FEW = 30 };
    static char chars[2][MANY][96];
    static mls_str many[MANY], few[MANY];
    model_names("model.", "", chars[0], many);
    model_names("", "", chars[1], few);
    explain(many, MANY, few + MANY / 2, FEW);
    CHECK(found.matched == FEW && rule_is(0, "model.", "", false));
    explain(few + MANY / 2, FEW, many, MANY);
    CHECK(found.matched == FEW && rule_is(0, "", "model.", false));
}

TEST(a_star_means_anywhere)
{
    mls_rename_rule r;
    CHECK(mls_rename_rule_of(TEXT("*a."), TEXT("b"), &r) && r.anywhere);
    CHECK(mls_str_is(r.old, "a.") && mls_str_is(r.new, "b"));
    CHECK(mls_rename_rule_of(TEXT("a*"), TEXT(""), &r) && !r.anywhere);
    CHECK(mls_str_is(r.old, "a*"));
    CHECK(mls_rename_rule_of(TEXT(""), TEXT("model."), &r) && !r.anywhere);
    CHECK(!mls_rename_rule_of(TEXT("*"), TEXT("b"), &r));
}
