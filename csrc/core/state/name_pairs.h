/* name_pairs: pairs two lists of names by equality. */
#ifndef MLS_NAME_PAIRS_H
#define MLS_NAME_PAIRS_H

#include "base/status.h"
#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

#define MLS_NO_PARTNER SIZE_MAX

/* Stores in `partners`, for each name of `a`, the position of the equal name in `b`, or
 * MLS_NO_PARTNER. Stores in `rest` the positions of the unmatched names of `b` in
 * ascending order, and their number in `*rest_count`. `partners` has room for `a_count`
 * entries, `rest` for `b_count`.
 *
 * Each name has at most one partner: if a list repeats a name, each copy is matched with
 * a different copy in the other list, as far as there are enough. While both lists agree,
 * each name takes one comparison; a hash table is used from the first difference on.
 *
 * MLS_E_MEMORY: the results are undefined.
 */
mls_code mls_pair_names(const mls_str *a, size_t a_count, const mls_str *b,
                        size_t b_count, size_t *partners, size_t *rest,
                        size_t *rest_count, mls_status *st);

#endif
