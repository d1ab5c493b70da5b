/* index_pattern: finds ranks whose indexes differ only in the parts they list: groups
 * shards by layout and part.
 *
 * The pattern of an index is its tensors and layouts and the group of each shard, without
 * the numbers of parts: equal for ranks that store the same tensors in the same way. An
 * index has few groups: one for each way of cutting tensors, and one for whole tensors.
 * So each shard is compared with all groups, starting with the previous shard's group. */
#include "checkpoint/ranks/index_pattern.h"

#include "base/memory.h"
#include "base/search.h"

/* Return whether two shards have the same layout and part. Shapes may differ, so tensors
 * of all sizes with the same layout form one group. */
static bool is_same_group(const mls_index_shard *shard, const mls_index_shard *other)
{
    return shard->part == other->part && mls_layout_equal(&shard->layout, &other->layout);
}

/* Return the group of a shard, from 0, or `count` if it needs a new one. `firsts` has the
 * first shard of each of the `count` groups; group `hint` is tried first. */
static size_t find_group(const mls_index_shard *shard,
                         const mls_index_shard *const *firsts, size_t count, size_t hint)
{
    if (hint < count && is_same_group(shard, firsts[hint])) {
        return hint;
    }
    size_t group = 0;
    while (group < count && !is_same_group(shard, firsts[group])) {
        group++;
    }
    return group;
}

/* Give each shard the number of its group. An index with more than MLS_PATTERN_GROUPS
 * groups gets a zeroed pattern, which is not `known`; that is not an error. */
mls_code mls_index_pattern_init(const mls_index *index, mls_index_pattern *out,
                                mls_status *st)
{
    const mls_index_shard *firsts[MLS_PATTERN_GROUPS];
    mls_index_pattern pattern = {.known = true};
    size_t group = 0;
    pattern.groups = mls_alloc(index->shard_count, 1);
    if (pattern.groups == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the pattern of %zu shards",
                        index->shard_count);
    }
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_index_shard *shard = &index->shards[i];
        group = find_group(shard, firsts, pattern.group_count, group);
        if (group == MLS_PATTERN_GROUPS) {
            mls_index_pattern_fini(&pattern);
            break;
        }
        if (group == pattern.group_count) {
            firsts[group] = shard;
            pattern.parts[pattern.group_count++] = shard->part;
        }
        pattern.groups[i] = (unsigned char)group;
    }
    *out = pattern;
    return MLS_OK;
}

void mls_index_pattern_fini(mls_index_pattern *pattern)
{
    mls_free(pattern->groups);
    *pattern = (mls_index_pattern){0};
}

/* Number the groups of each of `count` indexes. Returns NULL if memory runs out;
 * everything made so far is freed then. */
mls_index_pattern *mls_index_patterns_new(const mls_index *indexes, size_t count,
                                          mls_status *st)
{
    mls_index_pattern *patterns = mls_alloc(count, sizeof *patterns);
    if (patterns == NULL) {
        mls_fail(st, MLS_E_MEMORY, "no memory for the patterns of %zu indexes", count);
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        if (mls_index_pattern_init(&indexes[i], &patterns[i], st) != MLS_OK) {
            mls_index_patterns_free(patterns, i);
            return NULL;
        }
    }
    return patterns;
}

/* Free the patterns of `count` indexes; `patterns` may be NULL. */
void mls_index_patterns_free(mls_index_pattern *patterns, size_t count)
{
    for (size_t i = 0; patterns != NULL && i < count; i++) {
        mls_index_pattern_fini(&patterns[i]);
    }
    mls_free(patterns);
}

/* Append the bytes of `count` numbers, in the machine's byte order. */
static void put_numbers(mls_json_writer *json, const size_t *numbers, size_t count)
{
    mls_json_writer_put(json, (const char *)numbers, count * sizeof *numbers);
}

/* Append the identity of a pattern: tensors, layouts and the group of each shard, but no
 * part numbers, which differ between ranks. Lengths come before the bytes that they
 * count, so that different lists of shards have different bytes. */
void mls_index_pattern_bytes(const mls_index *index, const mls_index_pattern *pattern,
                             mls_json_writer *out)
{
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_index_shard *s = &index->shards[i];
        const size_t head[] = {
            s->id.section,           s->id.name.length, s->id.has_state,
            s->id.state.length,      s->dtype,          (size_t)s->rank,
            (size_t)s->layout.count, s->axes != NULL,   pattern->groups[i]};
        put_numbers(out, head, sizeof head / sizeof head[0]);
        mls_json_writer_put(out, s->id.name.data, s->id.name.length);
        mls_json_writer_put(out, s->id.state.data, s->id.state.length);
        put_numbers(out, s->shape, (size_t)s->rank);
        for (int j = 0; j < s->layout.count; j++) {
            const size_t step[] = {(size_t)s->layout.steps[j].axis,
                                   s->layout.steps[j].parts};
            put_numbers(out, step, 2);
        }
        if (s->axes != NULL) {
            mls_json_writer_put(out, (const char *)s->axes, (size_t)s->rank);
        }
    }
}

/* Return the index of the first shard of tensor `id`; if there is none, of the first
 * shard of a later tensor, or `shard_count`. */
static size_t find_shard(const mls_index *index, const mls_tensor_id *id)
{
    size_t at;
    MLS_FIND_FIRST(at, index->shard_count,
                   mls_tensor_id_compare(&index->shards[at].id, id) >= 0);
    return at;
}

/* Append a mls_index_pattern_place for each shard of a tensor in the indexes. Shards of
 * one tensor are neighbours in an index, and belong to different groups. */
void mls_index_pattern_places(const mls_index *indexes, const mls_index_pattern *patterns,
                              size_t count, const mls_tensor_id *id, mls_json_writer *out)
{
    for (size_t i = 0; i < count; i++) {
        const mls_index *index = &indexes[i];
        size_t j = patterns[i].known ? find_shard(index, id) : index->shard_count;
        for (; j < index->shard_count; j++) {
            if (mls_tensor_id_compare(&index->shards[j].id, id) != 0) {
                break;
            }
            /* indexes in memory are fewer than 2**32 */
            const mls_index_pattern_place place = {(uint32_t)i, patterns[i].groups[j]};
            mls_json_writer_put(out, (const char *)&place, sizeof place);
        }
    }
}
