/* pattern: the shards of an index, grouped by which part they are.
 *
 * A rank has few groups: one for each way in which tensors are cut, and one for those
 * that are not.  So a new shard is compared with the groups one by one, from the one of
 * the shard before it on.
 */
#include "pattern.h"

#include "mem.h"
#include "size.h"

#include <stdlib.h>
#include <string.h>

/* Whether a shard is of the group that `other` is of: cut in the same way, and the same
 * part.  Shapes do not matter, so that tensors of any sizes that are cut alike are one
 * group, however many there are. */
static bool same_group(const mls_index_shard *shard, const mls_index_shard *other)
{
    bool same = shard->part == other->part && shard->layout.count == other->layout.count;
    for (int i = 0; same && i < shard->layout.count; i++) {
        same = shard->layout.steps[i].axis == other->layout.steps[i].axis &&
               shard->layout.steps[i].parts == other->layout.steps[i].parts;
    }
    return same;
}

/* The group of a shard among those there are, or their number. */
static size_t find_group(const mls_index_shard *shard,
                         const mls_index_shard *const *firsts, size_t count, size_t hint)
{
    if (hint < count && same_group(shard, firsts[hint])) {
        return hint;
    }
    size_t group = 0;
    while (group < count && !same_group(shard, firsts[group])) {
        group++;
    }
    return group;
}

/* Layouts are compared, not parts of tensors: two tensors of one layout need not have one
 * shape. */
mls_code mls_pattern_init(const mls_index *index, mls_pattern *out, mls_status *st)
{
    const mls_index_shard *firsts[MLS_PATTERN_GROUPS];
    mls_pattern made = {.known = true};
    size_t group = 0;
    made.groups = mls_alloc(index->shard_count, 1);
    if (made.groups == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the pattern of %zu shards",
                        index->shard_count);
    }
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_index_shard *shard = &index->shards[i];
        group = find_group(shard, firsts, made.group_count, group);
        if (group == MLS_PATTERN_GROUPS) {
            mls_pattern_fini(&made);
            break;
        }
        if (group == made.group_count) {
            firsts[group] = shard;
            made.parts[made.group_count++] = shard->part;
        }
        made.groups[i] = (unsigned char)group;
    }
    *out = made;
    return MLS_OK;
}

/* Nothing but the groups lies elsewhere. */
void mls_pattern_fini(mls_pattern *pattern)
{
    mls_free(pattern->groups);
    *pattern = (mls_pattern){0};
}

/* A shard says the same as in the index, but for what is the rank's own: part, version
 * and tier are put aside, and the group takes their place. */
void mls_pattern_text(const mls_index *index, const mls_pattern *pattern,
                      mls_buffer *text)
{
    for (size_t i = 0; i < index->shard_count; i++) {
        mls_index_shard shard = index->shards[i];
        shard.part = pattern->groups[i];
        shard.version = 1;
        shard.tier = MLS_TIER_NONE;
        mls_index_put_shard(text, &shard);
        mls_buffer_text(text, "}\n");
    }
}

/* For qsort: rising, so that equal ones are neighbours, and whoever reads the list can
 * look things up in it by halves. */
static int compare_numbers(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorted, each once; returns how many that are. */
static size_t sort_unique(uint32_t *numbers, size_t count)
{
    size_t kept = 0;
    qsort(numbers, count, sizeof *numbers, compare_numbers);
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || numbers[i] != numbers[kept - 1]) {
            numbers[kept++] = numbers[i];
        }
    }
    return kept;
}

/* Names that an index may have: one for each shard and for each dot.  Shards of one
 * parameter are counted each, which is more room than is used and costs a walk less. */
static size_t most_names(const mls_index *index)
{
    size_t most = 0;
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_text name = index->shards[i].id.name;
        most++; /* no more than there are bytes in the index */
        for (size_t j = 0; j < name.length; j++) {
            most += name.data[j] == '.' ? 1 : 0;
        }
    }
    return most;
}

/* The checksum goes on from dot to dot, so that a name is read once.  The shards of one
 * parameter are neighbours within a section. */
mls_code mls_pattern_names(const mls_index *index, const mls_crc_kernels *crc,
                           uint32_t **out, size_t *count, mls_status *st)
{
    uint32_t *numbers = mls_alloc(most_names(index), sizeof *numbers);
    size_t used = 0;
    if (numbers == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the names of %zu shards",
                        index->shard_count);
    }
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_text name = index->shards[i].id.name;
        if (i > 0 && mls_text_equal(name, index->shards[i - 1].id.name)) {
            continue;
        }
        uint32_t sum = 0;
        size_t from = 0;
        for (size_t j = 0; j < name.length; j++) {
            if (name.data[j] == '.') {
                sum = crc->update(sum, name.data + from, j - from);
                numbers[used++] = sum;
                from = j;
            }
        }
        numbers[used++] =
            name.length == 0 ? 0 : crc->update(sum, name.data + from, name.length - from);
    }
    *count = sort_unique(numbers, used);
    *out = numbers;
    return MLS_OK;
}
