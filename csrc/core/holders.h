/* holders: which ranks have stored the parts that are wanted.
 *
 * Of the ranks that have one pattern (pattern.h) a single index is read; which of them
 * has which part follows from a few numbers for each.
 */
#ifndef MLS_HOLDERS_H
#define MLS_HOLDERS_H

#include "catalog.h"
#include "pattern.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The ranks of one pattern.  Borrowed. */
typedef struct mls_pattern_ranks {
    const mls_index *index; /* of one of them */
    const uint64_t *ranks;
    const uint64_t *parts; /* of the first rank in each group, of the second, ... */
    size_t count;          /* of ranks */
    size_t group_count;
} mls_pattern_ranks;

/* Set `needed[rank]` for ranks whose indexes, together, list all that is stored of
 * `wanted`, which has a part for each tensor of the catalog, or NULL where none is
 * wanted. The catalog is that of the indexes of `patterns`.  Where several ranks have
 * stored the same part it is `own`, else the first of them.  A tensor of which nobody has
 * what is wanted counts with the index that it was read from.  `needed` is false all over
 * at the start and has `world_size` places. MLS_E_FORMAT: an index has other groups than
 * `group_count`, or ranks are not below `world_size`.  MLS_E_MEMORY. */
mls_code mls_holders_find(const mls_catalog *catalog, const mls_pattern_ranks *patterns,
                          size_t count, const mls_part *const *wanted, uint64_t own,
                          bool *needed, uint64_t world_size, mls_status *st);

/* Whether ranks that saved together have stored every part that has elements of every
 * tensor of the catalog, which is that of the indexes of `patterns` or, where `patterns`
 * is NULL, has the indexes of all ranks.  Takes time for each rank and group once, and
 * for the tensors that no group has all of, for each of their parts.
 * MLS_E_FORMAT: a part is missing; the status names the tensor, the text the part and
 * ranks that have the same one.  As mls_holders_find besides. */
mls_code mls_holders_check(const mls_catalog *catalog, const mls_pattern_ranks *patterns,
                           size_t count, uint64_t world_size, mls_status *st);

#endif
