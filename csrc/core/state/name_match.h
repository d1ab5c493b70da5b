/* name_match: two lists of names paired up by equality. */
#ifndef MLS_NAME_MATCH_H
#define MLS_NAME_MATCH_H

#include "base/status.h"
#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

#define MLS_NO_PARTNER SIZE_MAX

/* For each name of `a`, store in `partners` the position of the same name in `b`, or
 * MLS_NO_PARTNER.  Store in `rest` the positions of the names of `b` without a partner,
 * rising, and their number in `*rest_count`.  `partners` has room for `a_count` numbers,
 * `rest` for `b_count`.
 *
 * No name has two partners: of equal names in one list, each is paired with another one
 * of the other list, if there are as many.  Lists in the same order take one comparison
 * for each name; from the first difference on a hash table is used.
 *
 * MLS_E_MEMORY: the results are undefined. */
mls_code mls_names_match(const mls_text *a, size_t a_count, const mls_text *b,
                         size_t b_count, size_t *partners, size_t *rest,
                         size_t *rest_count, mls_status *st);

#endif
