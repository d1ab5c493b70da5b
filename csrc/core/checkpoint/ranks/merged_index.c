/* catalog: shards of all indexes sorted by tensor and part.
 *
 * Pointers only: what an index says stays where it was parsed.  Ranks may each have
 * stored any part of any tensor, so nothing is known of who has what before all of them
 * are sorted together.
 */
#include "checkpoint/ranks/merged_index.h"

#include "base/memory.h"
#include "base/size.h"

#include <stdlib.h>
#include <string.h>

/* For qsort: by id, part and rank, so that of equal parts the first rank's comes first.
 */
static int compare_shards(const void *a, const void *b)
{
    const mls_catalog_shard *x = a, *y = b;
    const int parts = mls_index_compare(x->shard, y->shard);
    return parts != 0                        ? parts
           : x->index->rank < y->index->rank ? -1
                                             : x->index->rank > y->index->rank;
}

/* Put the next shard to its tensor, or to a new one.  A part that the shard before it is
 * as well was stored by several ranks, which held the same of it: one is enough to
 * read. */
static mls_code add(mls_catalog *c, const mls_catalog_shard *next, mls_status *st)
{
    mls_catalog_tensor *tensor =
        c->tensor_count == 0 ? NULL : &c->tensors[c->tensor_count - 1];
    if (tensor == NULL ||
        mls_tensor_id_compare(&tensor->facts->id, &next->shard->id) != 0) {
        tensor = &c->tensors[c->tensor_count++];
        *tensor = (mls_catalog_tensor){.facts = next->shard, .from = c->shard_count};
    } else if (!mls_index_same_tensor(tensor->facts, next->shard)) {
        const mls_text name = next->shard->id.name;
        mls_fail(st, MLS_E_FORMAT,
                 "the ranks do not agree on a tensor's dtype, shape or layout");
        mls_status_name(st, name.data, name.length);
        return MLS_E_FORMAT;
    }
    if (tensor->count == 0 ||
        c->shards[c->shard_count - 1].shard->part != next->shard->part) {
        const mls_layers *layers = next->shard->layers;
        c->shards[c->shard_count++] = *next;
        tensor->count++;
        tensor->places +=
            layers == NULL ? 1 : layers->count + (layers->zero_count > 0 ? 1 : 0);
    }
    return MLS_OK;
}

/* A file as one index lists it, and the bytes that this index has shards in. */
typedef struct listed {
    const mls_index_file *file;
    uint64_t used;
} listed;

/* For qsort: so that what several indexes say of one file comes together. */
static int compare_listed(const void *a, const void *b)
{
    const listed *x = a, *y = b;
    return strcmp(x->file->path, y->file->path);
}

/* Whether indexes that list the same file agree on it, and leave each other room in it:
 * within an index shards do not overlap, but any number of indexes might claim one file,
 * and what they list be far larger than all there is. */
static mls_code check_sharing(const listed *files, size_t count, mls_status *st)
{
    uint64_t used = 0;
    for (size_t i = 0; i < count; i++) {
        const mls_index_file *file = files[i].file;
        const bool again = i > 0 && compare_listed(&files[i - 1], &files[i]) == 0;
        const mls_index_file *before = again ? files[i - 1].file : file;
        used = again ? used : 0;
        if (file->bytes != before->bytes || file->header_crc != before->header_crc ||
            !mls_u64_add(used, files[i].used, &used) || used > file->bytes) {
            mls_fail(st, MLS_E_FORMAT, "the ranks do not agree on the file %.150s",
                     file->path);
            return MLS_E_FORMAT;
        }
    }
    return MLS_OK;
}

/* The files of all indexes; a single one was looked at when it was parsed. */
static mls_code check_files(const mls_index *const *indexes, size_t count, mls_status *st)
{
    size_t all = 0, first = 0;
    for (size_t i = 0; i < count; i++) {
        all += indexes[i]->file_count; /* all of them lie in memory */
    }
    listed *files = mls_alloc(all, sizeof *files);
    if (files == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a catalog of %zu files", all);
    }
    for (size_t i = 0; i < count; i++) {
        const mls_index *index = indexes[i];
        for (size_t j = 0; j < index->file_count; j++) {
            files[first + j].file = &index->files[j];
        }
        for (size_t j = 0; j < index->shard_count; j++) {
            const size_t places = mls_index_place_count(&index->shards[j]);
            for (size_t k = 0; k < places; k++) {
                const mls_layer place = mls_index_place(&index->shards[j], k);
                /* no more than the file has, since no byte is in two places */
                files[first + place.file].used += place.bytes;
            }
        }
        first += index->file_count;
    }
    qsort(files, all, sizeof *files, compare_listed);
    const mls_code code = check_sharing(files, all, st);
    mls_free(files);
    return code;
}

/* An index is sorted already: one alone needs no more than to be grouped.  Room is made
 * for as many tensors as there are shards, since each shard may be the only one. */
mls_code mls_catalog_init(mls_catalog *out, const mls_index *const *indexes, size_t count,
                          mls_status *st)
{
    mls_catalog c = {0};
    mls_code code = MLS_OK;
    size_t all = 0;
    for (size_t i = 0; i < count; i++) {
        all += indexes[i]->shard_count; /* all of them lie in memory */
    }
    /* as many as there are shards, should no two be of one tensor or part */
    mls_catalog_shard *sorted = mls_alloc(all, sizeof *sorted);
    c.shards = mls_alloc(all, sizeof *c.shards);
    c.tensors = mls_alloc(all, sizeof *c.tensors);
    if (sorted == NULL || c.shards == NULL || c.tensors == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for a catalog of %zu shards", all);
        goto done;
    }
    if (count > 1 && (code = check_files(indexes, count, st)) != MLS_OK) {
        goto done;
    }
    all = 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < indexes[i]->shard_count; j++) {
            sorted[all++] = (mls_catalog_shard){indexes[i], &indexes[i]->shards[j]};
        }
    }
    /* one index is in order by itself, which spares a single rank the sorting */
    if (count > 1) {
        qsort(sorted, all, sizeof *sorted, compare_shards);
    }
    for (size_t i = 0; code == MLS_OK && i < all; i++) {
        code = add(&c, &sorted[i], st);
    }
done:
    mls_free(sorted);
    if (code != MLS_OK) {
        mls_catalog_fini(&c);
        return code;
    }
    *out = c;
    return MLS_OK;
}

/* The indexes stay: whoever made them frees them. */
void mls_catalog_fini(mls_catalog *catalog)
{
    mls_free(catalog->tensors);
    mls_free(catalog->shards);
    *catalog = (mls_catalog){0};
}

/* By halves: tensors are in the order of their ids.  A name is looked up once for each
 * tensor that is loaded, so a table of hashes would not pay for itself. */
size_t mls_catalog_find(const mls_catalog *catalog, const mls_tensor_id *id)
{
    size_t low = 0, high = catalog->tensor_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = mls_tensor_id_compare(&catalog->tensors[middle].facts->id, id);
        if (order == 0) {
            return middle;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return SIZE_MAX;
}

/* Whether a shard, which is part `a`, has an element of `b`: the first run of what they
 * share is enough to know.  One that is the whole tensor has all of them. */
static bool meet(const mls_index_shard *shard, const mls_part *a, const mls_part *b)
{
    mls_overlap overlap;
    if (shard->layout.count == 0) {
        return mls_part_count(b) > 0;
    }
    mls_run run;
    mls_overlap_init(&overlap, a, b);
    return mls_overlap_next(&overlap, &run);
}

/* How many elements two parts have in common.  Runs are counted, not elements, so this
 * costs no more than planning what to read. */
static size_t common(const mls_part *a, const mls_part *b)
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

/* Parts that nobody stored do not matter where nothing of them is wanted.  What is stored
 * is counted, rather than what is missing looked for: a file may claim any number of
 * parts. */
static mls_code check_missing(const mls_catalog *catalog,
                              const mls_catalog_tensor *tensor, const mls_part *to,
                              mls_status *st)
{
    size_t parts = 1, there = 0;
    mls_status ignored; /* a good index has good layouts */
    (void)mls_layout_parts(&tensor->facts->layout, &parts, &ignored);
    /* the usual case, for which nothing needs to be counted */
    if (tensor->count == parts) {
        return MLS_OK;
    }
    for (size_t i = 0; i < tensor->count; i++) {
        const mls_part part = mls_index_part(catalog->shards[tensor->from + i].shard);
        there += common(&part, to);
    }
    if (there == mls_part_count(to)) {
        return MLS_OK;
    }
    const mls_text name = tensor->facts->id.name;
    mls_fail(st, MLS_E_FORMAT,
             "a tensor is not all there: %zu of its %zu parts were stored, and with them "
             "%zu of %zu elements that are wanted",
             tensor->count, parts, there, mls_part_count(to));
    mls_status_name(st, name.data, name.length);
    return MLS_E_FORMAT;
}

/* What is being listed: the places that have something of `to`. */
typedef struct listing {
    const mls_catalog_shard *from;
    const mls_part *part; /* that the shard is */
    const mls_part *to;
    unsigned char *data;
    mls_piece_room room;
    size_t count;
} listing;

/* A place more, of a file or of none.  Visible are extents of it, or all where there are
 * none to name. */
static void list_place(listing *l, const mls_layer *place, const mls_extent *visible,
                       size_t visible_count)
{
    const mls_index_shard *shard = l->from->shard;
    mls_stored_shard *next = &l->room.stored[l->count];
    /* all of it: nothing was there before */
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
    next->visible = visible;
    next->visible_count = visible_count;
    next->part = l->to;
    if (!mls_part_equal(l->part, l->to)) { /* memory that is not used is not touched */
        mls_part_copy(&l->room.parts[l->count], l->part);
        next->part = &l->room.parts[l->count];
    }
    l->room.pieces[l->count] = (mls_piece){.shard = next, .to = l->to, .data = l->data};
    l->count++;
}

/* Of a sparse shard each layer that shows something of what is wanted, and the zeros. */
static void list_layers(listing *l)
{
    const mls_layers *layers = l->from->shard->layers;
    mls_stored_range range;
    for (size_t i = 0; i <= layers->count; i++) {
        const mls_layer *layer = i < layers->count ? &layers->list[i] : NULL;
        const mls_extent *visible = layer == NULL ? layers->zeros : layer->visible;
        const size_t count = layer == NULL ? layers->zero_count : layer->visible_count;
        if (count > 0) {
            list_place(l, layer, visible, count);
            /* asked of what was listed, which is taken back where nothing is wanted */
            if (!mls_stored_range_of(&l->room.stored[l->count - 1], l->to, &range)) {
                l->count--;
            }
        }
    }
}

/* Places without an element in common are left out here, so that their files need not
 * even be there: a rank of a large world looks at few of them. */
mls_code mls_catalog_pieces(const mls_catalog *catalog, const mls_catalog_tensor *tensor,
                            const mls_part *to, unsigned char *data,
                            const mls_piece_room *room, size_t *count, mls_status *st)
{
    const mls_code code = check_missing(catalog, tensor, to, st);
    listing l = {.to = to, .data = data, .room = *room};
    for (size_t i = 0; code == MLS_OK && i < tensor->count; i++) {
        const mls_index_shard *shard = catalog->shards[tensor->from + i].shard;
        mls_part part;
        mls_status ignored; /* a good index has good parts */
        l.from = &catalog->shards[tensor->from + i];
        l.part = &part;
        (void)mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part,
                              &part, &ignored);
        if (shard->layers != NULL) {
            list_layers(&l);
        } else if (meet(shard, &part, to)) {
            const mls_layer place = mls_index_place(shard, 0);
            list_place(&l, &place, NULL, 0);
        }
    }
    *count = l.count;
    return code;
}

/* The first shard that has any of it has all of it, or no shard has: parts of one layout
 * do not overlap. */
const mls_catalog_shard *mls_catalog_run(const mls_catalog *catalog,
                                         const mls_catalog_tensor *tensor,
                                         const mls_part *to, uint64_t *offset)
{
    for (size_t i = 0; i < tensor->count; i++) {
        const mls_catalog_shard *from = &catalog->shards[tensor->from + i];
        const mls_part part = mls_index_part(from->shard);
        mls_overlap overlap;
        mls_run run;
        mls_overlap_init(&overlap, &part, to);
        /* the first shard that has some of it has all of it, or none does */
        if (mls_overlap_next(&overlap, &run)) {
            *offset = from->shard->offset +
                      run.a * mls_dtype_of(from->shard->dtype)->item_bytes;
            return run.count == mls_part_count(to) && from->shard->layers == NULL ? from
                                                                                  : NULL;
        }
    }
    return NULL;
}
