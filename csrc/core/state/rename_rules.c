/* rename_rules: finds the segments of a name that a rename rule matches, and writes the
 * new name.
 *
 * Names are rewritten in the caller's buffer, one rule after the other, so renaming ten
 * thousand names needs no allocation.
 */
#include "state/rename_rules.h"

#include "base/size.h"

#include <stdint.h>
#include <string.h>

/* Instead of a position; no name is that long. */
#define NO_HIT SIZE_MAX

/* Return whether a rule applies at every segment. An empty `old` applies only at the
 * start of a name. */
static bool is_anywhere(const mls_rename_rule *rule)
{
    return rule->anywhere && rule->old.length > 0;
}

/* Return where the first segment after byte `from` of the name starts, or NO_HIT. */
static size_t next_start(mls_str name, size_t from)
{
    const char *dot =
        from < name.length ? memchr(name.data + from, '.', name.length - from) : NULL;
    return dot == NULL ? NO_HIT : (size_t)(dot - name.data) + 1;
}

/* Return whether `old` is at byte `at` of the name and ends with a segment: with its own
 * dot, before a dot, or at the end of the name. An empty `old` always matches. */
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

/* Return the first segment start from byte `from` on at which the rule matches, or
 * NO_HIT. A rule for the start of a name looks only at `from`, which is then 0. */
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

/* Return the first segment start behind the match at byte `hit`, or NO_HIT if the rule
 * applies no further. Reads only bytes behind the match: replace_hits may have
 * overwritten those before it. */
static size_t start_after(mls_str name, const mls_rename_rule *rule, size_t hit)
{
    if (!is_anywhere(rule)) {
        return NO_HIT;
    }
    const size_t end = hit + rule->old.length;
    return rule->old.data[rule->old.length - 1] == '.' ? end : next_start(name, end);
}

/* Return how many bytes of the name the match at byte `hit` removes: `old`, and with an
 * empty `new` also the dot behind it. */
static size_t match_length(mls_str name, const mls_rename_rule *rule, size_t hit)
{
    const size_t length = rule->old.length, end = hit + length;
    const bool takes_dot = length > 0 && rule->new.length == 0 &&
                           rule->old.data[length - 1] != '.' && end < name.length;
    return takes_dot ? length + 1 : length;
}

/* Return how often the rule matches, and in `*removed` the bytes that the matches remove.
 * Counted before anything is written, because the new length decides whether the buffer
 * is large enough and how far the name moves first. */
static size_t count_hits(mls_str name, const mls_rename_rule *rule, size_t *removed)
{
    size_t hits = 0;
    size_t at = next_hit(name, rule, 0);
    *removed = 0;
    while (at != NO_HIT) {
        hits++;
        *removed += match_length(name, rule, at);
        const size_t from = start_after(name, rule, at);
        at = from == NO_HIT ? NO_HIT : next_hit(name, rule, from);
    }
    return hits;
}

/* Set `*out` to the length of a name of `length` bytes after `hits` replacements that
 * remove `removed` bytes. Returns false on overflow. */
static bool length_after(size_t length, size_t hits, size_t removed,
                         const mls_rename_rule *rule, size_t *out)
{
    size_t added;
    /* matches do not overlap, so the removed bytes are part of the name */
    return mls_size_mul(hits, rule->new.length, &added) &&
           mls_size_add(length - removed, added, out);
}

/* Return a buffer size that is enough for a name under `count` rules; SIZE_MAX on
 * overflow. Assumes that no rule shrinks the name, and that every possible segment
 * matches. */
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

/* Apply a rule that matches `hits` times to the name of `length` bytes in `out`, in
 * place; `out` has room for `new_length`. A name that grows is first moved to the end of
 * its new range, so that the write position never passes the read position. `copied` is
 * the end of the old bytes that are done. */
static void replace_hits(char *out, size_t length, size_t new_length, size_t hits,
                         const mls_rename_rule *rule)
{
    const size_t shift = new_length > length ? new_length - length : 0;
    const mls_str name = {.data = out + shift, .length = length};
    memmove(out + shift, out, length);
    size_t written = 0, copied = 0, from = 0;
    for (; hits > 0; hits--) {
        const size_t hit = next_hit(name, rule, from);
        from = start_after(name, rule, hit);
        memmove(out + written, name.data + copied, hit - copied);
        written += hit - copied;
        if (rule->new.length > 0) {
            memcpy(out + written, rule->new.data, rule->new.length);
        }
        written += rule->new.length;
        copied = hit + match_length(name, rule, hit);
    }
    memmove(out + written, name.data + copied, length - copied);
}

/* Create a rule; false: nothing follows the star. Without a star `old` may be empty: it
 * matches the start of every name. */
bool mls_rename_rule_of(mls_str old, mls_str new, mls_rename_rule *out)
{
    *out = (mls_rename_rule){.old = old, .new = new};
    if (old.length > 0 && old.data[0] == '*') {
        out->anywhere = true;
        out->old = (mls_str){old.data + 1, old.length - 1};
    }
    return !out->anywhere || out->old.length > 0;
}

/* Return whether a segment of the name is empty; the empty name has one empty segment. */
bool mls_name_has_empty_part(mls_str name)
{
    bool starts_part = true;
    for (size_t i = 0; i < name.length; i++) {
        const bool is_dot = name.data[i] == '.';
        if (is_dot && starts_part) {
            return true;
        }
        starts_part = is_dot;
    }
    return starts_part;
}

/* Apply the rules one after the other, in `out`. A name that no rule matches costs one
 * copy and one check for each rule. If the buffer is too small at rule i, the bound
 * covers the name so far and the remaining rules. */
size_t mls_name_apply(mls_str name, const mls_rename_rule *rules, size_t count, char *out,
                      size_t room, bool *used)
{
    if (name.length > room) {
        return bound_length(name, rules, count);
    }
    if (name.length > 0) {
        memcpy(out, name.data, name.length);
    }
    mls_str current = {.data = name.length > 0 ? out : "", .length = name.length};
    for (size_t i = 0; i < count; i++) {
        size_t removed, length;
        const size_t hits = count_hits(current, &rules[i], &removed);
        if (!length_after(current.length, hits, removed, &rules[i], &length) ||
            length > room) {
            return bound_length(current, rules + i, count - i);
        }
        if (hits > 0 && used != NULL) {
            used[i] = true;
        }
        if (hits > 0 && room > 0) {
            replace_hits(out, current.length, length, hits, &rules[i]);
            current = (mls_str){.data = out, .length = length};
        }
    }
    return current.length;
}
