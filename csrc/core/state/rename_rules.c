/* rename_rules: applies rename rules to names, and infers rules by comparing two lists of
 * names.
 *
 * Names are rewritten in the caller's buffer, one rule after the other, so renaming ten
 * thousand names needs no allocation.
 *
 * Rules are inferred by guessing and checking. A few names of the shorter list are
 * compared with all names of the other list, and each prefix that would make two names
 * equal gets a vote. The guesses with the most votes are checked against all names with a
 * tree (name_tree.h). A wrong guess costs time but never gives a wrong rule: only checked
 * rules are reported.
 */
#include "state/rename_rules.h"

#include "base/memory.h"
#include "base/size.h"
#include "state/name_tree.h"

#include <stdint.h>
#include <string.h>

/* ---- applying rules ---- */

/* Instead of a position; no name is that long. */
#define NO_HIT SIZE_MAX

/* Returns whether a rule applies at every segment. An empty `old` applies only at the
 * start. */
static bool is_anywhere(const mls_rename_rule *rule)
{
    return rule->anywhere && rule->old.length > 0;
}

/* Returns the start of the segment after the one at `from`, or NO_HIT. */
static size_t next_start(mls_str name, size_t from)
{
    const char *dot =
        from < name.length ? memchr(name.data + from, '.', name.length - from) : NULL;
    return dot == NULL ? NO_HIT : (size_t)(dot - name.data) + 1;
}

/* Returns whether `old` is at `at` and ends with a segment: with its own dot, before a
 * dot, or at the end of the name. An empty `old` always matches. */
static bool matches_at(mls_str name, mls_str old, size_t at)
{
    if (old.length == 0) {
        return true;
    }
    if (name.length - at < old.length ||
        memcmp(name.data + at, old.data, old.length) != 0) {
        return false;
    }
    const size_t end = at + old.length;
    return end == name.length || name.data[end - 1] == '.' || name.data[end] == '.';
}

/* Returns the first segment start from `from` on at which the rule matches, or NO_HIT. A
 * rule for the start of a name checks only `from`, which is then 0. */
static size_t next_hit(mls_str name, const mls_rename_rule *rule, size_t from)
{
    for (size_t at = from; at != NO_HIT; at = next_start(name, at)) {
        if (matches_at(name, rule->old, at)) {
            return at;
        }
        if (!is_anywhere(rule)) {
            break;
        }
    }
    return NO_HIT;
}

/* Returns the first segment start after a match. Reads only bytes after the match: the
 * bytes before it may be overwritten already. */
static size_t start_after(mls_str name, const mls_rename_rule *rule, size_t hit)
{
    if (!is_anywhere(rule)) {
        return NO_HIT;
    }
    const size_t end = hit + rule->old.length;
    return rule->old.data[rule->old.length - 1] == '.' ? end : next_start(name, end);
}

/* Returns how often the rule matches. Counted before anything is written, because the new
 * length decides whether the buffer is large enough and how far the name moves first. */
static size_t count_hits(mls_str name, const mls_rename_rule *rule)
{
    size_t hits = 0;
    size_t at = next_hit(name, rule, 0);
    while (at != NO_HIT) {
        hits++;
        const size_t from = start_after(name, rule, at);
        at = from == NO_HIT ? NO_HIT : next_hit(name, rule, from);
    }
    return hits;
}

static bool length_after(size_t length, size_t hits, const mls_rename_rule *rule,
                         size_t *out)
{
    size_t added;
    /* matches do not overlap, so the removed bytes are part of the name */
    return mls_size_mul(hits, rule->new.length, &added) &&
           mls_size_add(length - hits * rule->old.length, added, out);
}

/* Returns a sufficient buffer size for a name under all rules: assumes that no rule
 * shrinks the name, and that every possible segment matches. */
static size_t bound_length(mls_str name, const mls_rename_rule *rules, size_t count)
{
    size_t length = name.length;
    size_t segments = mls_str_count(name, '.') + 1;
    for (size_t i = 0; i < count; i++) {
        const mls_rename_rule *rule = &rules[i];
        const size_t hits = is_anywhere(rule) ? segments : 1;
        const size_t old = rule->old.length, new = rule->new.length;
        size_t added, dots;
        if (!mls_size_mul(hits, new > old ? new - old : 0, &added) ||
            !mls_size_add(length, added, &length) ||
            !mls_size_mul(hits, mls_str_count(rule->new, '.'), &dots) ||
            !mls_size_add(segments, dots, &segments)) {
            return SIZE_MAX;
        }
    }
    return length;
}

/* Rewrites the name of `length` bytes in `out`. A name that grows is first moved to the
 * end of its new range, so the write position never passes the read position. */
static void replace_hits(char *out, size_t length, size_t new_length, size_t hits,
                         const mls_rename_rule *rule)
{
    const size_t shift = new_length > length ? new_length - length : 0;
    const mls_str name = {.data = out + shift, .length = length};
    memmove(out + shift, out, length);
    size_t written = 0, read = 0, from = 0;
    for (; hits > 0; hits--) {
        const size_t hit = next_hit(name, rule, from);
        from = start_after(name, rule, hit);
        memmove(out + written, name.data + read, hit - read);
        written += hit - read;
        if (rule->new.length > 0) {
            memcpy(out + written, rule->new.data, rule->new.length);
        }
        written += rule->new.length;
        read = hit + rule->old.length;
    }
    memmove(out + written, name.data + read, length - read);
}

/* Without a star `old` may be empty: it matches the start of every name. */
bool mls_rename_rule_of(mls_str old, mls_str new, mls_rename_rule *out)
{
    *out = (mls_rename_rule){.old = old, .new = new};
    if (old.length > 0 && old.data[0] == '*') {
        out->anywhere = true;
        out->old = (mls_str){old.data + 1, old.length - 1};
    }
    return !out->anywhere || out->old.length > 0;
}

/* A name that no rule matches costs one copy and one check for each rule. If the buffer
 * is too small at rule i, the result covers the remaining rules. */
size_t mls_name_apply(mls_str name, const mls_rename_rule *rules, size_t count, char *out,
                      size_t room, bool *used)
{
    if (name.length > room) {
        return bound_length(name, rules, count);
    }
    if (name.length > 0) {
        memcpy(out, name.data, name.length);
    }
    mls_str now = {.data = name.length > 0 ? out : "", .length = name.length};
    for (size_t i = 0; i < count; i++) {
        const size_t hits = count_hits(now, &rules[i]);
        size_t length;
        if (!length_after(now.length, hits, &rules[i], &length) || length > room) {
            return bound_length(now, rules + i, count - i);
        }
        if (hits > 0 && used != NULL) {
            used[i] = true;
        }
        if (hits > 0 && room > 0) {
            replace_hits(out, now.length, length, hits, &rules[i]);
            now = (mls_str){.data = out, .length = length};
        }
    }
    return now.length;
}

/* ---- inferring rules ---- */

#define LITERAL(text) {.data = (text), .length = sizeof(text) - 1}

enum {
    MARKS = 3,       /* number of wrapper marks */
    SEEDS = 4,       /* predefined guesses; first, so that they win ties */
    SAMPLES = 16,    /* names of the shorter list to compare with all others */
    NEW_GUESSES = 4, /* per sample: a name such as "weight" would fill the table */
    TRIES = 4        /* guesses to check against all names */
};

/* Marks that torch.compile, FSDP and activation checkpointing insert before module names.
 */
static const mls_rename_rule marks[MARKS] = {
    {.old = LITERAL("_orig_mod."), .anywhere = true},
    {.old = LITERAL("_fsdp_wrapped_module."), .anywhere = true},
    {.old = LITERAL("_checkpoint_wrapped_module."), .anywhere = true},
};

/* A prefix to remove or to add (`in_front`), and its votes. */
typedef struct prefix_guess {
    mls_str prefix;
    bool in_front;
    int votes;
} prefix_guess;

/* Usual prefixes of wrappers and training scripts; each still needs a vote. */
static const prefix_guess seeds[SEEDS] = {
    {.prefix = LITERAL("module.")},
    {.prefix = LITERAL("model.")},
    {.prefix = LITERAL("module."), .in_front = true},
    {.prefix = LITERAL("model."), .in_front = true},
};

/* State of the inference. Owns the trees, `plain`, `chars` and `best`. The texts of
 * guesses are in `chars` or in the caller's names, or are constants; keep_best copies the
 * prefix of the best guess. */
typedef struct explainer {
    const mls_str *unexpected, *missing;
    size_t unexpected_count, missing_count;
    mls_name_tree *wanted; /* tree of `missing` */
    mls_str *plain;        /* `unexpected` without the current set of marks */
    char *chars;           /* buffer of the names without marks */
    mls_name_tree *kept;   /* tree of `plain` */
    prefix_guess guesses[SEEDS + SAMPLES * NEW_GUESSES];
    size_t guess_count;
    mls_explanation best;
} explainer;

/* Returns the marks that occur in any name, one bit each. */
static unsigned find_marks(const explainer *e)
{
    unsigned found = 0;
    for (unsigned mark = 0; mark < MARKS; mark++) {
        for (size_t i = 0; i < e->unexpected_count && (found & 1U << mark) == 0; i++) {
            if (next_hit(e->unexpected[i], &marks[mark], 0) != NO_HIT) {
                found |= 1U << mark;
            }
        }
    }
    return found;
}

static size_t rules_of(unsigned set, mls_rename_rule *out)
{
    size_t count = 0;
    for (unsigned mark = 0; mark < MARKS; mark++) {
        if ((set & 1U << mark) != 0) {
            out[count++] = marks[mark];
        }
    }
    return count;
}

/* Removes a set of marks from all names, and builds the tree of the results. If two names
 * become equal, or one becomes empty, the set is not an answer: `kept` is NULL, without
 * an error. With an empty set, duplicates are the caller's error. */
static mls_code strip_marks(explainer *e, unsigned set, mls_status *st)
{
    mls_rename_rule rules[MARKS];
    const size_t count = rules_of(set, rules);
    char *out = e->chars;
    mls_name_tree_free(e->kept);
    e->kept = NULL;
    for (size_t i = 0; i < e->unexpected_count; i++) {
        const mls_str name = e->unexpected[i];
        /* names only get shorter, so each fits in the bytes of the original */
        const size_t length = mls_name_apply(name, rules, count, out, name.length, NULL);
        e->plain[i] =
            length == name.length ? name : (mls_str){.data = out, .length = length};
        out += name.length;
        if (length == 0 && name.length > 0) {
            return MLS_OK;
        }
    }
    const mls_code code = mls_name_tree_new(e->plain, e->unexpected_count, &e->kept, st);
    return code == MLS_E_VALUE && set != 0 ? MLS_OK : code;
}

/* Returns the length of the prefix, with its dot, that `longer` has before `shorter`; 0
 * if `longer` does not end with `shorter`. */
static size_t prefix_length(mls_str longer, mls_str shorter)
{
    if (shorter.length == 0 || longer.length <= shorter.length) {
        return 0;
    }
    const size_t length = longer.length - shorter.length;
    const bool ends = longer.data[length - 1] == '.' &&
                      memcmp(longer.data + length, shorter.data, shorter.length) == 0;
    return ends ? length : 0;
}

/* Adds a vote; adds a new guess if needed and `may_add`. Returns whether the guess is
 * new. */
static bool add_vote(explainer *e, mls_str prefix, bool in_front, bool may_add)
{
    for (size_t i = 0; i < e->guess_count; i++) {
        prefix_guess *guess = &e->guesses[i];
        if (guess->in_front == in_front && mls_str_equal(guess->prefix, prefix)) {
            guess->votes++;
            return false;
        }
    }
    if (may_add) {
        e->guesses[e->guess_count++] =
            (prefix_guess){.prefix = prefix, .in_front = in_front, .votes = 1};
    }
    return may_add;
}

/* Compares one sample with all names of the other list. `is_unexpected`: the sample is an
 * unexpected name, so its extra prefix is removed rather than added. */
static void compare_sample(explainer *e, mls_str sample, bool is_unexpected)
{
    const mls_str *others = is_unexpected ? e->missing : e->plain;
    const size_t count = is_unexpected ? e->missing_count : e->unexpected_count;
    int room = NEW_GUESSES;
    for (size_t i = 0; i < count; i++) {
        const mls_str other = others[i];
        const bool is_longer = sample.length > other.length;
        const mls_str longer = is_longer ? sample : other;
        const size_t length = prefix_length(longer, is_longer ? other : sample);
        if (length > 0) {
            const mls_str prefix = {.data = longer.data, .length = length};
            room -= add_vote(e, prefix, is_longer != is_unexpected, room > 0);
        }
    }
}

/* Collects guesses from samples of the shorter list. A prefix that explains more than
 * half of that list gets votes from about half of the samples. */
static void collect_guesses(explainer *e)
{
    memcpy(e->guesses, seeds, sizeof seeds);
    e->guess_count = SEEDS;
    const bool is_unexpected = e->unexpected_count <= e->missing_count;
    const mls_str *names = is_unexpected ? e->plain : e->missing;
    const size_t count = is_unexpected ? e->unexpected_count : e->missing_count;
    /* a short list is compared whole */
    const size_t samples = count < SAMPLES ? count : SAMPLES;
    for (size_t i = 0; i < samples; i++) {
        /* scattered, because names repeat at regular distances */
        const size_t part = count / samples;
        compare_sample(e, names[i * part + i * 7919 % part], is_unexpected);
    }
}

/* Returns the guess with the most votes (the first of several) and clears its votes; NULL
 * if none is left. */
static const prefix_guess *best_guess(explainer *e)
{
    prefix_guess *best = NULL;
    for (size_t i = 0; i < e->guess_count; i++) {
        if (e->guesses[i].votes > (best == NULL ? 0 : best->votes)) {
            best = &e->guesses[i];
        }
    }
    if (best != NULL) {
        best->votes = 0;
    }
    return best;
}

/* Counts the names that become missing names if `prefix` is removed from those that have
 * it. Returns 0 if two become equal or one becomes empty. */
static size_t count_without_prefix(const explainer *e, mls_str prefix)
{
    size_t matched = 0;
    for (size_t i = 0; i < e->unexpected_count; i++) {
        mls_str name = e->plain[i];
        if (prefix.length > 0 && mls_str_starts(name, prefix)) {
            name = (mls_str){.data = name.data + prefix.length,
                             .length = name.length - prefix.length};
            const uint32_t same = mls_name_tree_position(e->kept, name);
            /* not a conflict if the other name loses the prefix too */
            if (name.length == 0 ||
                (same != MLS_NAME_NONE && !mls_str_starts(e->plain[same], prefix))) {
                return 0;
            }
        }
        matched += mls_name_tree_position(e->wanted, name) != MLS_NAME_NONE;
    }
    return matched;
}

/* Counts the names that become missing names if `prefix` is added to all of them.
 * Searches from the missing names, so that no name has to be built. */
static size_t count_with_prefix(const explainer *e, mls_str prefix)
{
    size_t matched = 0;
    for (size_t i = 0; i < e->missing_count; i++) {
        if (mls_str_starts(e->missing[i], prefix)) {
            const mls_str rest = {.data = e->missing[i].data + prefix.length,
                                  .length = e->missing[i].length - prefix.length};
            matched += mls_name_tree_position(e->kept, rest) != MLS_NAME_NONE;
        }
    }
    return matched;
}

/* Keeps these rules if they are the best so far. Copies the prefix: part of a name
 * without marks may not be contiguous in any of the caller's names. */
static mls_code keep_best(explainer *e, unsigned set, const prefix_guess *guess,
                          size_t matched, mls_status *st)
{
    mls_explanation found = {.matched = matched};
    found.rule_count = rules_of(set, found.rules);
    const size_t rule_count = found.rule_count + (guess != NULL);
    if (matched < e->best.matched ||
        (matched == e->best.matched && rule_count >= e->best.rule_count)) {
        return MLS_OK;
    }
    /* marks are constants; only a prefix needs its own memory */
    if (guess != NULL) {
        found.prefix = mls_alloc(guess->prefix.length, 1);
        if (found.prefix == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for a prefix of names");
        }
        memcpy(found.prefix, guess->prefix.data, guess->prefix.length);
        mls_rename_rule *rule = &found.rules[found.rule_count++];
        *(guess->in_front ? &rule->new : &rule->old) =
            (mls_str){.data = found.prefix, .length = guess->prefix.length};
    }
    mls_explanation_fini(&e->best);
    e->best = found;
    return MLS_OK;
}

static mls_code try_marks(explainer *e, unsigned set, mls_status *st)
{
    mls_code code = strip_marks(e, set, st);
    if (code != MLS_OK || e->kept == NULL) {
        return code;
    }
    code = keep_best(e, set, NULL, count_without_prefix(e, (mls_str){0}), st);
    collect_guesses(e);
    /* each check visits all names, so only a few guesses are checked */
    for (int i = 0; i < TRIES && code == MLS_OK; i++) {
        const prefix_guess *guess = best_guess(e);
        if (guess == NULL) {
            break;
        }
        const size_t matched = guess->in_front ? count_with_prefix(e, guess->prefix)
                                               : count_without_prefix(e, guess->prefix);
        code = keep_best(e, set, guess, matched, st);
    }
    return code;
}

/* Allocates memory for the names without marks, and builds the tree of the missing names.
 * Allocated once for the longest case: every set of marks overwrites the previous one. */
static mls_code explainer_init(explainer *e, mls_status *st)
{
    size_t bytes = 0;
    for (size_t i = 0; i < e->unexpected_count; i++) {
        if (!mls_size_add(bytes, e->unexpected[i].length, &bytes)) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for the names");
        }
    }
    e->chars = mls_alloc(bytes, 1);
    e->plain = mls_alloc(e->unexpected_count, sizeof *e->plain);
    if (e->chars == NULL || e->plain == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the names");
    }
    return mls_name_tree_new(e->missing, e->missing_count, &e->wanted, st);
}

/* Tries every subset of the marks that occur (at most eight): a mark that both sides have
 * must stay. Rules that explain at most half of the shorter list may be a coincidence and
 * are not reported. */
mls_code mls_name_tree_explain(const mls_str *unexpected, size_t unexpected_count,
                               const mls_str *missing, size_t missing_count,
                               mls_explanation *out, mls_status *st)
{
    explainer e = {.unexpected = unexpected,
                   .unexpected_count = unexpected_count,
                   .missing = missing,
                   .missing_count = missing_count,
                   .best = {.rule_count = MLS_EXPLAIN_RULES}};
    mls_code code = explainer_init(&e, st);
    const unsigned present = find_marks(&e);
    for (unsigned set = 0; set < 1U << MARKS && code == MLS_OK; set++) {
        if ((set & ~present) == 0) {
            code = try_marks(&e, set, st);
        }
    }
    if (code == MLS_OK) {
        const size_t shorter =
            unexpected_count < missing_count ? unexpected_count : missing_count;
        if (e.best.rule_count == 0 || e.best.matched <= shorter / 2) {
            mls_explanation_fini(&e.best);
        }
        *out = e.best;
        e.best.prefix = NULL; /* ownership moves to the caller */
    }
    mls_explanation_fini(&e.best);
    mls_name_tree_free(e.kept);
    mls_name_tree_free(e.wanted);
    mls_free(e.plain);
    mls_free(e.chars);
    return code;
}

void mls_explanation_fini(mls_explanation *explanation)
{
    mls_free(explanation->prefix);
    *explanation = (mls_explanation){0};
}
