/* merged_index: sorts the shards of all ranks by tensor and part; refuses ranks that
 * disagree on a tensor or a file.
 *
 * The merged index stores pointers only; all data stays in the parsed indexes. Any rank
 * may have stored any part of any tensor, so shards are matched by sorting all of them.
 */
#include "checkpoint/ranks/merged_index.h"

#include "base/memory.h"
#include "base/search.h"
#include "base/size.h"

#include <stdlib.h>
#include <string.h>

static int compare_ranks(const mls_index *a, const mls_index *b)
{
    return a->rank < b->rank ? -1 : a->rank > b->rank;
}

/* For qsort: by id, part and rank, so that the lowest rank comes first among equal
 * parts. */
static int compare_shards(const void *a, const void *b)
{
    const mls_merged_index_shard *x = a, *y = b;
    const int parts = mls_index_compare(x->shard, y->shard);
    return parts != 0 ? parts : compare_ranks(x->index, y->index);
}

/* Append the next shard, in the order of compare_shards, to the last tensor, or start a
 * new tensor; the arrays have room. Several ranks may have stored the same part with the
 * same data: only the first, of the lowest rank, is kept. MLS_E_FORMAT: the shard
 * disagrees with its tensor. */
static mls_code add_shard(mls_merged_index *merged, const mls_merged_index_shard *next,
                          mls_status *st)
{
    mls_merged_index_tensor *tensor =
        merged->tensor_count == 0 ? NULL : &merged->tensors[merged->tensor_count - 1];
    if (tensor == NULL ||
        mls_tensor_id_compare(&tensor->any_shard->id, &next->shard->id) != 0) {
        tensor = &merged->tensors[merged->tensor_count++];
        *tensor = (mls_merged_index_tensor){.any_shard = next->shard,
                                            .from = merged->shard_count};
    } else if (!mls_index_same_tensor(tensor->any_shard, next->shard)) {
        mls_fail(st, MLS_E_FORMAT,
                 "the dtype, shape or layout of a tensor differs between a shard of rank "
                 "%llu and one of rank %llu",
                 (unsigned long long)merged->shards[tensor->from].index->rank,
                 (unsigned long long)next->index->rank);
        return mls_status_tensor(st, &next->shard->id);
    }
    if (tensor->count == 0 ||
        merged->shards[merged->shard_count - 1].shard->part != next->shard->part) {
        const mls_layers *layers = next->shard->layers;
        merged->shards[merged->shard_count++] = *next;
        tensor->count++;
        tensor->places +=
            layers == NULL ? 1 : layers->count + (layers->zero_count > 0 ? 1 : 0);
    }
    return MLS_OK;
}

/* A file as listed by one index, and the number of its bytes that this index uses. */
typedef struct file_listing {
    const mls_index *index;
    const mls_index_file *file;
    uint64_t used;
} file_listing;

/* For qsort: the entries for one file become neighbours, the lowest rank first. */
static int compare_listings(const void *a, const void *b)
{
    const file_listing *x = a, *y = b;
    const int paths = strcmp(x->file->path, y->file->path);
    return paths != 0 ? paths : compare_ranks(x->index, y->index);
}

/* Check that indexes that share a file agree on its size and checksum, and that their
 * shards together fit the file. `files`, `count` of them, are sorted by path. Shards of
 * one index do not overlap, but several indexes could claim the same bytes, and so claim
 * more data than the files contain. MLS_E_FORMAT: `*failed` receives the later one
 * of two indexes that disagree. */
static mls_code check_sharing(const file_listing *files, size_t count,
                              const mls_index **failed, mls_status *st)
{
    uint64_t used = 0;
    for (size_t i = 0; i < count; i++) {
        const mls_index_file *file = files[i].file;
        const bool is_repeated =
            i > 0 && strcmp(files[i - 1].file->path, file->path) == 0;
        const file_listing *before = is_repeated ? &files[i - 1] : &files[i];
        used = is_repeated ? used : 0; /* of this file, by the ranks so far */
        if (file->bytes != before->file->bytes ||
            file->header_crc != before->file->header_crc ||
            !mls_u64_add(used, files[i].used, &used) || used > file->bytes) {
            *failed = files[i].index;
            return mls_fail(st, MLS_E_FORMAT,
                            "ranks %llu and %llu have different records of the file "
                            "%.150s",
                            (unsigned long long)before->index->rank,
                            (unsigned long long)files[i].index->rank, file->path);
        }
    }
    return MLS_OK;
}

/* Check that the `count` indexes agree on the files that they share. Each index was
 * checked for itself when it was parsed. MLS_E_FORMAT: they disagree, see check_sharing;
 * MLS_E_MEMORY. */
static mls_code check_files(const mls_index *const *indexes, size_t count,
                            const mls_index **failed, mls_status *st)
{
    size_t total = 0, first = 0;
    for (size_t i = 0; i < count; i++) {
        total += indexes[i]->file_count; /* cannot overflow: they are in memory */
    }
    file_listing *files = mls_alloc(total, sizeof *files);
    if (files == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a merged index of %zu files",
                        total);
    }
    for (size_t i = 0; i < count; i++) {
        const mls_index *index = indexes[i];
        for (size_t j = 0; j < index->file_count; j++) {
            files[first + j] = (file_listing){.index = index, .file = &index->files[j]};
        }
        for (size_t j = 0; j < index->shard_count; j++) {
            const size_t places = mls_index_place_count(&index->shards[j]);
            for (size_t k = 0; k < places; k++) {
                const mls_layer place = mls_index_place(&index->shards[j], k);
                /* at most the file's size, since no byte is in two places */
                files[first + place.file].used += place.bytes;
            }
        }
        first += index->file_count;
    }
    qsort(files, total, sizeof *files, compare_listings);
    const mls_code code = check_sharing(files, total, failed, st);
    mls_free(files);
    return code;
}

/* Collect pointers to all shards, sort them by tensor, part and rank, and group them. A
 * single index is sorted already. */
mls_code mls_merged_index_init(mls_merged_index *out, const mls_index *const *indexes,
                               size_t count, const mls_index **failed, mls_status *st)
{
    mls_merged_index merged = {0};
    *failed = NULL;
    mls_code code = MLS_OK;
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        total += indexes[i]->shard_count; /* cannot overflow: they are in memory */
        merged.links = merged.links || indexes[i]->links;
    }
    /* as many tensors as shards, in case each tensor has one shard */
    mls_merged_index_shard *sorted = mls_alloc(total, sizeof *sorted);
    merged.shards = mls_alloc(total, sizeof *merged.shards);
    merged.tensors = mls_alloc(total, sizeof *merged.tensors);
    if (sorted == NULL || merged.shards == NULL || merged.tensors == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for a merged index of %zu shards",
                        total);
        goto done;
    }
    if (count > 1 && (code = check_files(indexes, count, failed, st)) != MLS_OK) {
        goto done;
    }
    total = 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < indexes[i]->shard_count; j++) {
            sorted[total++] =
                (mls_merged_index_shard){indexes[i], &indexes[i]->shards[j]};
        }
    }
    /* a single index is already sorted */
    if (count > 1) {
        qsort(sorted, total, sizeof *sorted, compare_shards);
    }
    for (size_t i = 0; code == MLS_OK && i < total; i++) {
        code = add_shard(&merged, &sorted[i], st);
        *failed = code == MLS_OK ? NULL : sorted[i].index;
    }
done:
    mls_free(sorted);
    if (code != MLS_OK) {
        mls_merged_index_fini(&merged);
        return code;
    }
    *out = merged;
    return MLS_OK;
}

/* Free the arrays; the shards and the indexes belong to the caller. */
void mls_merged_index_fini(mls_merged_index *merged)
{
    mls_free(merged->tensors);
    mls_free(merged->shards);
    *merged = (mls_merged_index){0};
}

/* Find a tensor by binary search; tensors are sorted by id. Each loaded tensor is looked
 * up once, so a hash table would not pay off. */
size_t mls_merged_index_find(const mls_merged_index *merged, const mls_tensor_id *id)
{
    size_t at;
    MLS_FIND_FIRST(at, merged->tensor_count,
                   mls_tensor_id_compare(&merged->tensors[at].any_shard->id, id) >= 0);
    const bool exists =
        at < merged->tensor_count &&
        mls_tensor_id_compare(&merged->tensors[at].any_shard->id, id) == 0;
    return exists ? at : SIZE_MAX;
}

bool mls_merged_index_digest(const mls_merged_index *merged,
                             const mls_merged_index_tensor *tensor, mls_digest *out)
{
    mls_digest sum = {{0}};
    mls_status ignored; /* cannot fail: the index is valid */
    size_t parts = 0;
    (void)mls_layout_parts(&tensor->any_shard->layout, &parts, &ignored);
    for (size_t i = 0; i < tensor->count; i++) {
        const mls_index_shard *shard = merged->shards[tensor->from + i].shard;
        if (!shard->has_digest) {
            return false;
        }
        for (int lane = 0; lane < MLS_DIGEST_LANES; lane++) {
            sum.lanes[lane] += shard->digest.lanes[lane];
        }
    }
    if (tensor->count != parts) {
        return false;
    }
    *out = sum;
    return true;
}
