/* rename_rules: rules that rename tensors, and their inference from two lists of names.
 *
 * A rule replaces the start of a name, or the start of any segment: wrappers insert their
 * marks before a whole model and before each of its modules.
 */
#ifndef MLS_RENAME_RULES_H
#define MLS_RENAME_RULES_H

#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>

/* Replaces `old` by `new` at the start of a name or, if `anywhere`, at the start of any
 * segment. `old` must end with a segment: "layers.1" matches "layers.1" and "layers.1.w"
 * but not "layers.10". An empty `old` matches the start of every name. */
typedef struct mls_rename_rule {
    mls_str old, new;
    bool anywhere;
} mls_rename_rule;

/* Creates a rule from two borrowed texts; a star before `old` means anywhere. Returns
 * false if nothing follows the star. */
bool mls_rename_rule_of(mls_str old, mls_str new, mls_rename_rule *out);

/* Applies each rule once, in order, to `name`, and writes the result to `out`, without a
 * NUL. `out` must not overlap `name` or a rule. A rule that does not match changes
 * nothing. `used` may be NULL; otherwise it has an entry for each rule, and entries of
 * matching rules are set to true.
 *
 * Returns the length of the result if it is at most `room`. A larger result means that
 * `room` was too small at some step and that this many bytes are enough (SIZE_MAX:
 * impossible); the contents of `out` are then undefined. Call with `room` 0 to compute
 * the required size.
 */
size_t mls_name_apply(mls_str name, const mls_rename_rule *rules, size_t count, char *out,
                      size_t room, bool *used);

enum { MLS_EXPLAIN_RULES = 8 };

/* Result of mls_name_tree_explain. The texts of the rules are constants or `prefix`. */
typedef struct mls_explanation {
    mls_rename_rule rules[MLS_EXPLAIN_RULES];
    size_t rule_count; /* 0: no explanation was found */
    size_t matched;    /* unexpected names that the rules turn into missing ones */
    char *prefix;      /* owned; NULL if no rule has a prefix */
} mls_explanation;

/* Infers the rules that turn `unexpected` names into `missing` ones: first the marks of
 * wrappers, at any position ("_orig_mod.", "_fsdp_wrapped_module.",
 * "_checkpoint_wrapped_module."), then one prefix to remove or to add ("module.",
 * "model." or any other that ends with a dot). Rules are reported only if they explain
 * more than half of the shorter list and make no two unexpected names equal. The rules
 * that explain most names are chosen, and among these the fewest rules.
 *
 * The rules are correct for these two lists only. If the two sides have further names in
 * common, the caller must check how the rules affect them.
 *
 * Borrows both lists. Free the result with mls_explanation_fini. On failure `*out` is
 * unchanged.
 * - MLS_E_VALUE: a name is repeated within a list.
 * - MLS_E_CAPACITY: as for mls_name_tree_new.
 * - MLS_E_MEMORY.
 */
mls_code mls_name_tree_explain(const mls_str *unexpected, size_t unexpected_count,
                               const mls_str *missing, size_t missing_count,
                               mls_explanation *out, mls_status *st);

void mls_explanation_fini(mls_explanation *explanation); /* accepts a zeroed one */

#endif
