/* pattern: what an index lists, whichever parts its rank has.
 *
 * The ranks of a job mostly store the same tensors, cut alike: their indexes differ in
 * which parts they list, and where those lie.  A pattern is what they have in common;
 * with it and a few numbers for each rank, whoever has read one index of many knows what
 * the others hold.
 *
 * The shards of an index fall into groups: those with one layout and one part.  Groups
 * are numbered as they first come in the order of the index.  Two indexes have the same
 * pattern if they list the same tensors (with dtype, shape, layout and axes), in the same
 * groups.
 */
#ifndef MLS_PATTERN_H
#define MLS_PATTERN_H

#include "index.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An index of more groups has no pattern: it would say as much as the index does. */
enum { MLS_PATTERN_GROUPS = 32 };

typedef struct mls_pattern {
    unsigned char *groups;            /* of each shard: its group */
    size_t parts[MLS_PATTERN_GROUPS]; /* of each group: the part that the rank has */
    size_t group_count;
    bool known; /* false: too many groups; then there is nothing else */
} mls_pattern;

/* Give the shards their groups.  Gives: release with mls_pattern_fini.  MLS_E_MEMORY. */
mls_code mls_pattern_init(const mls_index *index, mls_pattern *out, mls_status *st);

void mls_pattern_fini(mls_pattern *pattern); /* accepts a zeroed one; zeroes it */

/* Append a text that two indexes share if, and only if, they have the same pattern.  The
 * caller looks for a failure of the buffer. */
void mls_pattern_text(const mls_index *index, const mls_pattern *pattern,
                      mls_buffer *text);

/* CRC32C of the names of all tensors of an index (of parameters, without states), and of
 * what stands in front of each dot in them: rising, none twice.  An index that lacks one
 * has neither a tensor of that name nor any below it.  Gives: release with mls_free.
 * MLS_E_MEMORY. */
mls_code mls_pattern_names(const mls_index *index, const mls_crc_kernels *crc,
                           uint32_t **out, size_t *count, mls_status *st);

#endif
