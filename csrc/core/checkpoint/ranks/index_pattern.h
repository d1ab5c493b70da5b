/* index_pattern: the structure that the indexes of several ranks share.
 *
 * The ranks of a job usually store the same tensors with the same layouts. Their indexes
 * differ only in the parts that they list. The shards of an index form groups: shards
 * with the same layout and part. Groups are numbered in the order of their first shards.
 * Two indexes have the same pattern if they list the same tensors (with dtype, shape,
 * layout and axes) in the same groups. So the index of one rank, and the part of every
 * group of each other rank, determine which rank stores each part of each tensor. */
#ifndef MLS_INDEX_PATTERN_H
#define MLS_INDEX_PATTERN_H

#include "checkpoint/index/index.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An index with more groups has no pattern: the list of its parts would be as long as the
 * index. */
enum { MLS_PATTERN_GROUPS = 32 };

typedef struct mls_index_pattern {
    unsigned char *groups;            /* group of each shard */
    size_t parts[MLS_PATTERN_GROUPS]; /* part of each group */
    size_t group_count;
    bool known; /* false: too many groups, and all other members are zero */
} mls_index_pattern;

/* Number the groups of an index. Gives: release with mls_index_pattern_fini.
 * MLS_E_MEMORY. */
mls_code mls_index_pattern_init(const mls_index *index, mls_index_pattern *out,
                                mls_status *st);

void mls_index_pattern_fini(
    mls_index_pattern *pattern); /* accepts a zeroed one; zeroes it */

/* Return the patterns of `count` indexes, or NULL on MLS_E_MEMORY. Gives: free with
 * mls_index_patterns_free, which accepts NULL; `count` is the same there. */
mls_index_pattern *mls_index_patterns_new(const mls_index *indexes, size_t count,
                                          mls_status *st);
void mls_index_patterns_free(mls_index_pattern *patterns, size_t count);

/* Append bytes that are equal for two indexes if and only if their patterns are equal.
 * The pattern must be `known`. The bytes depend on the machine's byte order. The caller
 * checks the writer for errors. */
void mls_index_pattern_bytes(const mls_index *index, const mls_index_pattern *pattern,
                             mls_json_writer *out);

/* An index that lists a tensor, and the group of that shard. */
typedef struct mls_index_pattern_place {
    uint32_t index, group;
} mls_index_pattern_place;

/* Append a mls_index_pattern_place to `out` for every shard of tensor `id` in `count`
 * indexes, ordered by index. `patterns` are the patterns of the indexes; an index without
 * one is skipped. The caller checks the writer for errors. */
void mls_index_pattern_places(const mls_index *indexes, const mls_index_pattern *patterns,
                              size_t count, const mls_tensor_id *id,
                              mls_json_writer *out);

#endif
