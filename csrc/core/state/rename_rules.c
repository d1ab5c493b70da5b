/* rename: rules applied to names, and rules found by comparing two lists of names.
 *
 * Names are changed in place in the caller's memory, one rule after the other, so that
 * renaming ten thousand of them takes no allocation but the caller's own.
 *
 * Rules are found by guessing and checking: a few names of the shorter list are compared
 * with all of the other one, what would make them equal gets a vote, and the guesses with
 * the most votes are checked against all names by means of a tree (name_tree.h).  A wrong
 * guess costs time and never gives a wrong rule: only what was checked is reported.
 */
#include "state/rename_rules.h"

#include "base/memory.h"
#include "state/name_tree.h"
#include "base/size.h"

#include <stdint.h>
#include <string.h>

/* ---- applying rules ---- */

/* In place of a position: no name is that long. */
#define NO_HIT SIZE_MAX

/* Whether a rule looks at all segments.  An empty `old` would be at all of them. */
static bool is_anywhere(const mls_rename_rule *rule)
{
    return rule->anywhere && rule->old.length > 0;
}

/* Where the segment after the one at `from` starts, or NO_HIT. */
static size_t next_start(mls_text name, size_t from)
{
    const char *dot =
        from < name.length ? memchr(name.data + from, '.', name.length - from) : NULL;
    return dot == NULL ? NO_HIT : (size_t)(dot - name.data) + 1;
}

/* Whether `old` is at `at` and ends where a segment ends: with its own dot, in front of
 * a dot, or with the name.  An empty `old` is everywhere. */
static bool is_at(mls_text name, mls_text old, size_t at)
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

/* The first place from `from` on, where a segment starts, that the rule replaces.  A rule
 * for the start looks at `from` alone, which is 0 then. */
static size_t next_hit(mls_text name, const mls_rename_rule *rule, size_t from)
{
    for (size_t at = from; at != NO_HIT; at = next_start(name, at)) {
        if (is_at(name, rule->old, at)) {
            return at;
        }
        if (!is_anywhere(rule)) {
            break;
        }
    }
    return NO_HIT;
}

/* The first segment start after a hit.  Only what lies behind the hit is read: what is in
 * front of it may be overwritten already. */
static size_t start_after(mls_text name, const mls_rename_rule *rule, size_t hit)
{
    if (!is_anywhere(rule)) {
        return NO_HIT;
    }
    const size_t end = hit + rule->old.length;
    return rule->old.data[rule->old.length - 1] == '.' ? end : next_start(name, end);
}

/* How often the rule replaces something.  Counted before anything is written: the new
 * length decides whether there is room, and where the name must move first. */
static size_t count_hits(mls_text name, const mls_rename_rule *rule)
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

/* Dots in a text. */
static size_t count_dots(mls_text text)
{
    size_t dots = 0;
    for (size_t i = 0; i < text.length; i++) {
        dots += text.data[i] == '.';
    }
    return dots;
}

/* Length of a name after `hits` replacements; false where size_t cannot say it. */
static bool length_after(size_t length, size_t hits, const mls_rename_rule *rule,
                         size_t *out)
{
    size_t added;
    /* hits do not overlap, so what they take away is part of the name */
    return mls_size_mul(hits, rule->new.length, &added) &&
           mls_size_add(length - hits * rule->old.length, added, out);
}

/* Bytes that are enough for a name under all rules, whatever they do to each other:
 * nothing shrinks, and every segment there can be is hit. */
static size_t enough_room(mls_text name, const mls_rename_rule *rules, size_t count)
{
    size_t length = name.length;
    size_t segments = count_dots(name) + 1;
    for (size_t i = 0; i < count; i++) {
        const mls_rename_rule *rule = &rules[i];
        const size_t hits = is_anywhere(rule) ? segments : 1;
        const size_t old = rule->old.length, new = rule->new.length;
        size_t added, dots;
        if (!mls_size_mul(hits, new > old ? new - old : 0, &added) ||
            !mls_size_add(length, added, &length) ||
            !mls_size_mul(hits, count_dots(rule->new), &dots) ||
            !mls_size_add(segments, dots, &segments)) {
            return SIZE_MAX;
        }
    }
    return length;
}

/* Rewrite the name of `length` bytes in `out` to its new length.  A name that grows moves
 * to the end of its new place first: what is written then never overtakes what is read.
 */
static void replace_hits(char *out, size_t length, size_t new_length, size_t hits,
                         const mls_rename_rule *rule)
{
    const size_t shift = new_length > length ? new_length - length : 0;
    const mls_text name = {.data = out + shift, .length = length};
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

/* Without a star the old part may be empty: it then matches the start of each name. */
bool mls_rename_rule_of(mls_text old, mls_text new, mls_rename_rule *out)
{
    *out = (mls_rename_rule){.old = old, .new = new};
    if (old.length > 0 && old.data[0] == '*') {
        out->anywhere = true;
        out->old = (mls_text){old.data + 1, old.length - 1};
    }
    return !out->anywhere || out->old.length > 0;
}

/* A name that no rule hits costs one copy and one look for each rule.  Where the room
 * ends on the way, what is asked for covers the rules that are still to come. */
size_t mls_name_apply(mls_text name, const mls_rename_rule *rules, size_t count,
                      char *out, size_t room, bool *used)
{
    if (name.length > room) {
        return enough_room(name, rules, count);
    }
    if (name.length > 0) {
        memcpy(out, name.data, name.length);
    }
    mls_text now = {.data = name.length > 0 ? out : "", .length = name.length};
    for (size_t i = 0; i < count; i++) {
        const size_t hits = count_hits(now, &rules[i]);
        size_t length;
        if (!length_after(now.length, hits, &rules[i], &length) || length > room) {
            return enough_room(now, rules + i, count - i);
        }
        if (hits > 0 && used != NULL) {
            used[i] = true;
        }
        if (hits > 0 && room > 0) {
            replace_hits(out, now.length, length, hits, &rules[i]);
            now = (mls_text){.data = out, .length = length};
        }
    }
    return now.length;
}

/* ---- finding rules ---- */

#define LITERAL(text) {.data = (text), .length = sizeof(text) - 1}

enum {
    MARKS = 3,       /* of wrappers */
    SEEDS = 4,       /* guesses that are always there, so that they win a tie */
    SAMPLES = 16,    /* names of the shorter list that are compared with all others */
    NEW_GUESSES = 4, /* per sample: a name like "weight" would otherwise fill the table */
    TRIES = 4        /* guesses that are checked against all names */
};

/* What torch.compile, FSDP and activation checkpoints put in front of a module. */
static const mls_rename_rule marks[MARKS] = {
    {.old = LITERAL("_orig_mod."), .anywhere = true},
    {.old = LITERAL("_fsdp_wrapped_module."), .anywhere = true},
    {.old = LITERAL("_checkpoint_wrapped_module."), .anywhere = true},
};

/* A prefix to take away or to put in front, and how many samples ask for it. */
typedef struct prefix_guess {
    mls_text prefix;
    bool in_front;
    int votes;
} prefix_guess;

/* What wrappers and training scripts mostly put in front; each still needs a vote. */
static const prefix_guess seeds[SEEDS] = {
    {.prefix = LITERAL("module.")},
    {.prefix = LITERAL("model.")},
    {.prefix = LITERAL("module."), .in_front = true},
    {.prefix = LITERAL("model."), .in_front = true},
};

/* What is known while rules are looked for.  Owns the trees, `plain`, `chars` and `best`;
 * the texts of guesses lie in `chars` or in the caller's names, or are constants;
 * keep_best copies the one that leads. */
typedef struct explainer {
    const mls_text *unexpected, *missing;
    size_t unexpected_count, missing_count;
    mls_names *wanted; /* tree of `missing` */
    mls_text *plain;   /* `unexpected` without some marks */
    char *chars;       /* memory for those that had marks */
    mls_names *kept;   /* tree of `plain` */
    prefix_guess guesses[SEEDS + SAMPLES * NEW_GUESSES];
    size_t guess_count;
    mls_explanation best;
} explainer;

/* Which marks stand in a name: a bit for each. */
static unsigned marks_in(const explainer *e)
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

/* The rules for a set of marks; how many. */
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

/* Take a set of marks away from all names, and make the tree of what is left.  `kept` is
 * NULL where two names become the same, or one becomes empty: such a set is no answer,
 * but no error.  Where no marks are taken away, twins are the caller's: an error. */
static mls_code strip_marks(explainer *e, unsigned set, mls_status *st)
{
    mls_rename_rule rules[MARKS];
    const size_t count = rules_of(set, rules);
    char *out = e->chars;
    mls_names_free(e->kept);
    e->kept = NULL;
    for (size_t i = 0; i < e->unexpected_count; i++) {
        const mls_text name = e->unexpected[i];
        /* names only get shorter, so that each fits where its own bytes do */
        const size_t length = mls_name_apply(name, rules, count, out, name.length, NULL);
        e->plain[i] =
            length == name.length ? name : (mls_text){.data = out, .length = length};
        out += name.length;
        if (length == 0 && name.length > 0) {
            return MLS_OK;
        }
    }
    const mls_code code = mls_names_new(e->plain, e->unexpected_count, &e->kept, st);
    return code == MLS_E_VALUE && set != 0 ? MLS_OK : code;
}

/* Length of what `longer` has in front of `shorter`, up to a dot; 0 where the one does
 * not end with the other. */
static size_t prefix_length(mls_text longer, mls_text shorter)
{
    if (shorter.length == 0 || longer.length <= shorter.length) {
        return 0;
    }
    const size_t length = longer.length - shorter.length;
    const bool ends = longer.data[length - 1] == '.' &&
                      memcmp(longer.data + length, shorter.data, shorter.length) == 0;
    return ends ? length : 0;
}

/* Count a vote, if need be for a new guess where `may_add`.  Returns whether it is new.
 */
static bool vote(explainer *e, mls_text prefix, bool in_front, bool may_add)
{
    for (size_t i = 0; i < e->guess_count; i++) {
        prefix_guess *guess = &e->guesses[i];
        if (guess->in_front == in_front && mls_text_equal(guess->prefix, prefix)) {
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

/* Compare one sample with all names of the other list.  `is_unexpected`: the sample is an
 * unexpected name, so that what it has too much is taken away. */
static void compare_sample(explainer *e, mls_text sample, bool is_unexpected)
{
    const mls_text *others = is_unexpected ? e->missing : e->plain;
    const size_t count = is_unexpected ? e->missing_count : e->unexpected_count;
    int room = NEW_GUESSES;
    for (size_t i = 0; i < count; i++) {
        const mls_text other = others[i];
        const bool is_longer = sample.length > other.length;
        const mls_text longer = is_longer ? sample : other;
        const size_t length = prefix_length(longer, is_longer ? other : sample);
        if (length > 0) {
            const mls_text prefix = {.data = longer.data, .length = length};
            room -= vote(e, prefix, is_longer != is_unexpected, room > 0);
        }
    }
}

/* Collect guesses from samples of the shorter list: what explains more than half of it
 * is what about half of the samples ask for. */
static void collect_guesses(explainer *e)
{
    memcpy(e->guesses, seeds, sizeof seeds);
    e->guess_count = SEEDS;
    const bool is_unexpected = e->unexpected_count <= e->missing_count;
    const mls_text *names = is_unexpected ? e->plain : e->missing;
    const size_t count = is_unexpected ? e->unexpected_count : e->missing_count;
    /* a short list is compared whole */
    const size_t samples = count < SAMPLES ? count : SAMPLES;
    for (size_t i = 0; i < samples; i++) {
        /* scattered, since names repeat themselves at regular distances */
        const size_t part = count / samples;
        compare_sample(e, names[i * part + i * 7919 % part], is_unexpected);
    }
}

/* The guess with the most votes (of several, the first), which are then spent; NULL where
 * none is left. */
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

/* How many names become missing ones once `prefix` is taken away from those that have it;
 * 0 where two become the same, or one becomes empty. */
static size_t count_without(const explainer *e, mls_text prefix)
{
    size_t matched = 0;
    for (size_t i = 0; i < e->unexpected_count; i++) {
        mls_text name = e->plain[i];
        if (prefix.length > 0 && mls_text_starts(name, prefix)) {
            name = (mls_text){.data = name.data + prefix.length,
                              .length = name.length - prefix.length};
            const uint32_t same = mls_names_position(e->kept, name);
            /* another name that has the prefix makes way for this one */
            if (name.length == 0 ||
                (same != MLS_NAME_NONE && !mls_text_starts(e->plain[same], prefix))) {
                return 0;
            }
        }
        matched += mls_names_position(e->wanted, name) != MLS_NAME_NONE;
    }
    return matched;
}

/* How many names become missing ones once `prefix` stands in front of all of them.  Seen
 * from the other side, so that no name need be put together. */
static size_t count_behind(const explainer *e, mls_text prefix)
{
    size_t matched = 0;
    for (size_t i = 0; i < e->missing_count; i++) {
        if (mls_text_starts(e->missing[i], prefix)) {
            const mls_text rest = {.data = e->missing[i].data + prefix.length,
                                   .length = e->missing[i].length - prefix.length};
            matched += mls_names_position(e->kept, rest) != MLS_NAME_NONE;
        }
    }
    return matched;
}

/* Keep these rules if they are the best so far.  The prefix is copied: a part of a name
 * without its marks may be part of no name that the caller has. */
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
    /* the marks are constants; only a prefix has to be kept alive */
    if (guess != NULL) {
        found.prefix = mls_alloc(guess->prefix.length, 1);
        if (found.prefix == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for a prefix of names");
        }
        memcpy(found.prefix, guess->prefix.data, guess->prefix.length);
        mls_rename_rule *rule = &found.rules[found.rule_count++];
        *(guess->in_front ? &rule->new : &rule->old) =
            (mls_text){.data = found.prefix, .length = guess->prefix.length};
    }
    mls_explanation_fini(&e->best);
    e->best = found;
    return MLS_OK;
}

/* Try a set of marks alone, and with each of the likeliest prefixes. */
static mls_code try_marks(explainer *e, unsigned set, mls_status *st)
{
    mls_code code = strip_marks(e, set, st);
    if (code != MLS_OK || e->kept == NULL) {
        return code;
    }
    code = keep_best(e, set, NULL, count_without(e, (mls_text){0}), st);
    collect_guesses(e);
    /* checking costs a look at each name, so only a few guesses are worth it */
    for (int i = 0; i < TRIES && code == MLS_OK; i++) {
        const prefix_guess *guess = best_guess(e);
        if (guess == NULL) {
            break;
        }
        const size_t matched = guess->in_front ? count_behind(e, guess->prefix)
                                               : count_without(e, guess->prefix);
        code = keep_best(e, set, guess, matched, st);
    }
    return code;
}

/* Memory for the names without marks, and the tree of the missing ones.  Taken once, for
 * the longest case: every set of marks writes over the one before. */
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
    return mls_names_new(e->missing, e->missing_count, &e->wanted, st);
}

/* Every set of the marks that occur is tried: one that both sides have must stay.  There
 * are at most eight.  What explains no more than half of the shorter list may be chance,
 * and is not given. */
mls_code mls_names_explain(const mls_text *unexpected, size_t unexpected_count,
                           const mls_text *missing, size_t missing_count,
                           mls_explanation *out, mls_status *st)
{
    explainer e = {.unexpected = unexpected,
                   .unexpected_count = unexpected_count,
                   .missing = missing,
                   .missing_count = missing_count,
                   .best = {.rule_count = MLS_EXPLAIN_RULES}};
    mls_code code = explainer_init(&e, st);
    const unsigned present = marks_in(&e);
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
        e.best.prefix = NULL; /* the caller's now */
    }
    mls_explanation_fini(&e.best);
    mls_names_free(e.kept);
    mls_names_free(e.wanted);
    mls_free(e.plain);
    mls_free(e.chars);
    return code;
}

/* Leaves nothing that could be freed again. */
void mls_explanation_fini(mls_explanation *explanation)
{
    mls_free(explanation->prefix);
    *explanation = (mls_explanation){0};
}
