/* merged_index: the shards of all indexes, sorted by tensor and part.
 *
 * The merged index stores pointers only; all data stays in the parsed indexes. Any rank
 * may have stored any part of any tensor, so shards are matched by sorting all of them.
 *
 * A place is a byte range of a file that stores a shard or one of its layers, or the
 * zeros of a shard that are not stored. A piece is what a requested part needs of one
 * place.
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

/* Return whether a shard, which stores part `a` of its tensor, has any element of part
 * `b`. */
static bool intersects_part(const mls_index_shard *shard, const mls_part *a,
                            const mls_part *b)
{
    mls_overlap overlap;
    /* the shard is the whole tensor */
    if (shard->layout.count == 0) {
        return mls_part_count(b) > 0;
    }
    mls_run run;
    mls_overlap_init(&overlap, a, b);
    return mls_overlap_next(&overlap, &run);
}

/* Return the number of elements that two parts of a tensor share. This iterates over
 * runs, not elements, so it costs no more than planning the read. */
static size_t count_common(const mls_part *a, const mls_part *b)
{
    size_t count = 0;
    mls_overlap overlap;
    mls_run run;
    mls_overlap_init(&overlap, a, b);
    while (mls_overlap_next(&overlap, &run)) {
        count += run.count;
    }
    return count;
}

/* Check that the shards of `tensor` contain all elements of its part `to`; elements
 * outside `to` may be missing. MLS_E_FORMAT: some are not stored. Stored elements are
 * counted because an index bounds their number, whereas a layout may claim any number of
 * missing parts. */
static mls_code check_missing(const mls_merged_index *merged,
                              const mls_merged_index_tensor *tensor, const mls_part *to,
                              mls_status *st)
{
    size_t parts = 1, stored = 0;
    mls_status ignored; /* cannot fail: the layout was checked by the parser */
    (void)mls_layout_parts(&tensor->any_shard->layout, &parts, &ignored);
    /* the usual case: every part is stored */
    if (tensor->count == parts) {
        return MLS_OK;
    }
    for (size_t i = 0; i < tensor->count; i++) {
        const mls_part part = mls_index_part(merged->shards[tensor->from + i].shard);
        stored += count_common(&part, to);
    }
    if (stored == mls_part_count(to)) {
        return MLS_OK;
    }
    mls_fail(st, MLS_E_FORMAT,
             "the tensor is incomplete: %zu of its %zu parts are stored, with %zu of the "
             "%zu requested elements",
             tensor->count, parts, stored, mls_part_count(to));
    return mls_status_tensor(st, &tensor->any_shard->id);
}

typedef struct piece_list {
    const mls_merged_index_shard *from; /* the current shard */
    const mls_part *part;               /* part of the shard */
    const mls_part *to;                 /* the requested part, packed at `data` */
    unsigned char *data;
    mls_read_scratch arrays; /* output arrays; `count` elements of each are filled */
    size_t count;            /* places listed so far */
} piece_list;

/* Append a stored place of the current shard and the piece that reads it; `place` NULL:
 * elements that are zero and not stored. `visible` has the `visible_count` ranges that no
 * later layer hides, or is NULL if all elements are visible. */
static void list_place(piece_list *l, const mls_layer *place,
                       const mls_row_range *visible, size_t visible_count)
{
    const mls_index_shard *shard = l->from->shard;
    mls_stored_shard *next = &l->arrays.stored[l->count];
    /* sets every member: the memory is uninitialized */
    next->file = NULL;
    next->file_bytes = next->offset = 0;
    next->crcs = NULL;
    next->frames = NULL;
    next->bytes = shard->bytes;
    if (place != NULL) {
        const mls_index_file *file = &l->from->index->files[place->file];
        next->file = file->path;
        next->file_bytes = file->bytes;
        next->offset = place->offset;
        next->crcs = place->crcs;
        next->frames = place->frames;
        next->bytes = place->frames == NULL ? place->bytes : place->frames->bytes;
    }
    next->item_bytes = mls_dtype_of(shard->dtype)->item_bytes;
    next->name = shard->id.name;
    next->state = shard->id.has_state ? shard->id.state : (mls_str){0};
    next->visible = visible;
    next->visible_count = visible_count;
    next->part = l->to;
    if (!mls_part_equal(l->part, l->to)) { /* do not touch memory that is not needed */
        mls_part_copy(&l->arrays.parts[l->count], l->part);
        next->part = &l->arrays.parts[l->count];
    }
    l->arrays.pieces[l->count] =
        (mls_read_piece){.shard = next, .to = l->to, .data = l->data};
    l->count++;
}

/* List each layer of the current shard that has visible elements of `to`, and the shard's
 * zeros, if `to` needs some. */
static void list_layers(piece_list *l)
{
    const mls_layers *layers = l->from->shard->layers;
    mls_stored_range range;
    for (size_t i = 0; i <= layers->count; i++) {
        /* the last round lists the zeros */
        const mls_layer *layer = i < layers->count ? &layers->list[i] : NULL;
        const mls_row_range *visible = layer == NULL ? layers->zeros : layer->visible;
        const size_t count = layer == NULL ? layers->zero_count : layer->visible_count;
        if (count > 0) {
            list_place(l, layer, visible, count);
            /* checked on the appended place, which is removed again if nothing of it is
             * needed */
            if (!mls_stored_range_of(&l->arrays.stored[l->count - 1], l->to, &range)) {
                l->count--;
            }
        }
    }
}

/* List the places that have elements of `to`, and the pieces that read them. Places
 * without such an element are skipped, so their files need not exist: a rank of a large
 * world reads few of them. `*count` is the number of pieces, 0 after a failure. */
mls_code mls_merged_index_pieces(const mls_merged_index *merged,
                                 const mls_merged_index_tensor *tensor,
                                 const mls_part *to, unsigned char *data,
                                 const mls_read_scratch *arrays, size_t *count,
                                 mls_status *st)
{
    const mls_code code = check_missing(merged, tensor, to, st);
    piece_list l = {.to = to, .data = data, .arrays = *arrays};
    for (size_t i = 0; code == MLS_OK && i < tensor->count; i++) {
        const mls_index_shard *shard = merged->shards[tensor->from + i].shard;
        mls_part part;
        mls_status ignored; /* cannot fail: the part was checked by the parser */
        l.from = &merged->shards[tensor->from + i];
        l.part = &part;
        (void)mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part,
                              &part, &ignored);
        if (shard->layers != NULL) {
            list_layers(&l);
        } else if (intersects_part(shard, &part, to)) {
            const mls_layer place = mls_index_place(shard, 0);
            list_place(&l, &place, NULL, 0);
        }
    }
    *count = l.count;
    return code;
}

/* Find the first shard that has an element of `to`. Parts of one layout do not overlap,
 * so either this shard contains all of `to`, or no shard does. `*offset` may be set even
 * if NULL is returned. */
const mls_merged_index_shard *mls_merged_index_run(const mls_merged_index *merged,
                                                   const mls_merged_index_tensor *tensor,
                                                   const mls_part *to, uint64_t *offset)
{
    for (size_t i = 0; i < tensor->count; i++) {
        const mls_merged_index_shard *from = &merged->shards[tensor->from + i];
        const mls_part part = mls_index_part(from->shard);
        mls_overlap overlap;
        mls_run run;
        mls_overlap_init(&overlap, &part, to);
        if (mls_overlap_next(&overlap, &run)) {
            *offset = from->shard->offset +
                      run.a * mls_dtype_of(from->shard->dtype)->item_bytes;
            return run.count == mls_part_count(to) && from->shard->layers == NULL ? from
                                                                                  : NULL;
        }
    }
    return NULL;
}
