/* rename_rules: rules that rename tensors: at the start of a name, or at any segment
 * (with a star).
 *
 * A rule replaces the start of a name, or the start of any segment: wrappers insert their
 * marks before a whole model and before each of its modules.
 */
#ifndef MLS_RENAME_RULES_H
#define MLS_RENAME_RULES_H

#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>

/* Replaces `old` by `new` at the start of a name or, if `anywhere`, at the start of any
 * segment. `old` must end with a segment: "layers.1" matches "layers.1" and "layers.1.w"
 * but not "layers.10". An empty `old` matches the start of every name. An empty `new`
 * also removes the dot after a match that does not end with one. */
typedef struct mls_rename_rule {
    mls_str old, new;
    bool anywhere;
} mls_rename_rule;

/* Creates a rule from two borrowed texts, which replaces `old` by `new`; a star before
 * `old` means anywhere. Returns false if nothing follows the star. */
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

/* Returns whether a name starts or ends with a dot, has two in a row, or is empty. */
bool mls_name_has_empty_part(mls_str name);

#endif
