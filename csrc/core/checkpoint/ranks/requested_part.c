/* requested_part: which stored shards, layers and zeros have elements of a requested
 * part; refuses a part that lacks some.
 *
 * A place is a byte range of a file that stores a shard or one of its layers, or the
 * zeros of a shard that are not stored. A piece is what a requested part needs of one
 * place.
 */
#include "checkpoint/ranks/requested_part.h"

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
mls_code mls_requested_part_pieces(const mls_merged_index *merged,
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
const mls_merged_index_shard *
mls_requested_part_run(const mls_merged_index *merged,
                       const mls_merged_index_tensor *tensor, const mls_part *to,
                       uint64_t *offset)
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
