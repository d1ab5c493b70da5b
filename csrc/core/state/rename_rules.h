/* rename: rules that change the names of tensors, and finding the rules that would help.
 *
 * A rule replaces the start of a name, or what stands wherever a segment starts: wrappers
 * put their marks in front of a whole model, and in front of each module in it.
 */
#ifndef MLS_RENAME_H
#define MLS_RENAME_H

#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>

/* Replace `old` by `new` at the start of a name or, if `anywhere`, wherever a segment
 * starts.  `old` ends where a segment ends: "layers.1" matches "layers.1" and
 * "layers.1.w", not "layers.10".  An empty `old` matches the start of each name. */
typedef struct mls_rename_rule {
    mls_text old, new;
    bool anywhere;
} mls_rename_rule;

/* A rule of two texts, which it borrows: a star in front of `old` means anywhere.  False:
 * there is nothing behind the star. */
bool mls_rename_rule_of(mls_text old, mls_text new, mls_rename_rule *out);

/* Apply each rule once, in order, to `name`, and write the result to `out` (no NUL at its
 * end), which must not be the memory of `name` or of a rule.  A rule that does not match
 * changes nothing.  `used` is NULL or has an entry for each rule: those that match are
 * set, the others stay as they are.
 *
 * Returns the length of the result where that is at most `room`.  A larger number says
 * that more room was needed on the way, and that this many bytes are enough (SIZE_MAX:
 * more than there can be); what is in `out` then means nothing.  With `room` 0 this asks
 * how much to bring. */
size_t mls_name_apply(mls_text name, const mls_rename_rule *rules, size_t count,
                      char *out, size_t room, bool *used);

enum { MLS_EXPLAIN_RULES = 8 };

/* What mls_names_explain found.  The texts of the rules are constants, or `prefix`. */
typedef struct mls_explanation {
    mls_rename_rule rules[MLS_EXPLAIN_RULES];
    size_t rule_count; /* 0: nothing explains them */
    size_t matched;    /* unexpected names that become missing ones under the rules */
    char *prefix;      /* owned; NULL where no rule has one */
} mls_explanation;

/* Find the rules that turn `unexpected` names into `missing` ones: the marks of wrappers
 * ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module." wherever they
 * stand), then one prefix to take away or to put in front ("module.", "model." or any
 * other that ends with a dot).  Rules are given only where they explain more than half of
 * the shorter list and no two unexpected names become the same; of several, those that
 * explain most, and of these the fewest.
 *
 * The rules are right for these names.  Names that are in neither list, since both sides
 * have them, are not known here: where there are such names, the caller must see what the
 * rules do to them.
 *
 * Borrows both lists, in which no name may occur twice: MLS_E_VALUE.  MLS_E_CAPACITY as
 * for mls_names_new.  MLS_E_MEMORY.  `*out` is untouched on failure.  Gives: free with
 * mls_explanation_fini. */
mls_code mls_names_explain(const mls_text *unexpected, size_t unexpected_count,
                           const mls_text *missing, size_t missing_count,
                           mls_explanation *out, mls_status *st);

void mls_explanation_fini(mls_explanation *explanation); /* accepts a zeroed one */

#endif
