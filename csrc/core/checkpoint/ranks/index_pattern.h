/* pattern: what the indexes of several ranks have in common.
 *
 * The ranks of a job mostly store the same tensors, cut alike.  Their indexes differ in
 * the parts that they list.  The shards of an index form groups: shards of one layout and
 * one part.  Groups are numbered in the order of their first shards.  Two indexes have
 * the same pattern if they list the same tensors (with dtype, shape, layout and axes) in
 * the same groups.  So the index of one rank, and the part of every group for each other
 * rank, say which rank stores which part of which tensor.
 */
#ifndef MLS_PATTERN_H
#define MLS_PATTERN_H

#include "checkpoint/index/index.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An index of more groups has no pattern: its parts would be as long as the index. */
enum { MLS_PATTERN_GROUPS = 32 };

typedef struct mls_pattern {
    unsigned char *groups;            /* of each shard */
    size_t parts[MLS_PATTERN_GROUPS]; /* of each group */
    size_t group_count;
    bool known; /* false: too many groups, and all else is zero */
} mls_pattern;

/* Number the groups.  Gives: release with mls_pattern_fini.  MLS_E_MEMORY. */
mls_code mls_pattern_init(const mls_index *index, mls_pattern *out, mls_status *st);

void mls_pattern_fini(mls_pattern *pattern); /* accepts a zeroed one; zeroes it */

/* Append bytes that are equal for two indexes if, and only if, their patterns are.  They
 * depend on the machine's byte order.  The caller checks the buffer for a failure. */
void mls_pattern_bytes(const mls_index *index, const mls_pattern *pattern,
                       mls_buffer *out);

/* Where an index lists one part of a tensor. */
typedef struct mls_pattern_place {
    uint32_t index, group;
} mls_pattern_place;

/* Append every place of a tensor in `count` indexes, by index.  An index without a
 * pattern has none.  The caller checks the buffer for a failure. */
void mls_pattern_places(const mls_index *indexes, const mls_pattern *patterns,
                        size_t count, const mls_tensor_id *id, mls_buffer *out);

#endif
