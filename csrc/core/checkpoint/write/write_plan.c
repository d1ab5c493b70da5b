/* shard_plan: items sorted, matched with what was committed, and laid out in files.
 *
 * Items and the index of before are in one order, so they are matched in one walk.  Small
 * shards share segments: files of a bounded size, so that several threads write them and
 * so that what is not needed any more can go without much being written again.
 */
#include "checkpoint/write/write_plan.h"

#include "io/safe_filename.h"
#include "base/memory.h"
#include "checkpoint/index/shard_header.h"
#include "base/size.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEGMENT_BYTES = 32 << 20, /* no more small shards than that in one file */
    PARTS_MOST = 1000000000   /* of a tensor, so that file names stay short */
};

/* ---- items in order ---- */

/* All tables of a plan grow with its shards, so one message serves for each of them. */
static mls_code no_memory(const mls_shard_plan *plan, mls_status *st)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory to save %zu shards", plan->job->count);
}

/* Name the tensor concerned in `st`, which holds a failure.  Its parameter's name says
 * enough: a state is where its parameter is. */
static mls_code about(const mls_shard_item *item, mls_status *st)
{
    mls_status_name(st, item->id.name.data, item->id.name.length);
    return st->code;
}

/* For qsort, over pointers to items: these are large, and the caller's array stays as it
 * is. */
static int compare_items(const void *a, const void *b)
{
    const mls_shard_item *x = *(const mls_shard_item *const *)a;
    const mls_shard_item *y = *(const mls_shard_item *const *)b;
    const int ids = mls_tensor_id_compare(&x->id, &y->id);
    return ids != 0 ? ids : x->part < y->part ? -1 : x->part > y->part;
}

/* Dimensions that the shape of any part of the tensor may have: a flat part has one, even
 * where the tensor has none. */
static size_t dims_of(const mls_shard_item *item)
{
    return item->rank > 0 ? (size_t)item->rank : 1;
}

/* Room for everything that has its size from the items.  Each sum is below that of what
 * the items themselves take in memory. */
static mls_code allocate(mls_shard_plan *plan, mls_status *st)
{
    const mls_shard_job *job = plan->job;
    size_t dims = 0, keys = 0;
    for (size_t i = 0; i < job->count; i++) {
        /* asked here already, since the sums below rely on it */
        if (job->items[i].rank < 0 || job->items[i].rank > MLS_LAYOUT_RANK) {
            mls_fail(st, MLS_E_SHAPE, "%d dimensions: at most %d can be stored",
                     job->items[i].rank, (int)MLS_LAYOUT_RANK);
            return about(&job->items[i], st);
        }
        dims += dims_of(&job->items[i]);
        keys += mls_shard_key_length(&job->items[i].id);
    }
    /* axes are those of the shapes, so their number bounds both */
    plan->index.shards = mls_alloc(job->count, sizeof *plan->index.shards);
    plan->planned = mls_alloc(job->count, sizeof *plan->planned);
    plan->dims = mls_alloc(dims, sizeof *plan->dims);
    plan->axes = mls_alloc(dims, sizeof *plan->axes);
    plan->keys = mls_alloc(keys, 1);
    return plan->index.shards == NULL || plan->planned == NULL || plan->dims == NULL ||
                   plan->axes == NULL || plan->keys == NULL
               ? no_memory(plan, st)
               : MLS_OK;
}

/* What a shard is, from its item; `dims` is room for its part's shape.  Layout and shape
 * are looked at here, once: everything behind relies on parts that can be made. */
static mls_code describe(const mls_shard_item *item, mls_index_shard *shard,
                         mls_planned *planned, size_t *dims, mls_status *st)
{
    mls_part part;
    size_t parts;
    *shard = (mls_index_shard){.id = item->id,
                               .dtype = item->dtype,
                               .rank = item->rank,
                               .shape = item->shape,
                               .axes = item->axes,
                               .layout = item->layout,
                               .part = item->part,
                               .tier = item->tier};
    if (mls_layout_parts(&item->layout, &parts, st) != MLS_OK ||
        mls_layout_part(&item->layout, item->rank, item->shape, item->part, &part, st) !=
            MLS_OK) {
        return about(item, st);
    }
    if (parts > PARTS_MOST || !mls_index_fits(item->dtype, item->rank, item->shape) ||
        !mls_size_mul(mls_part_count(&part), mls_dtype_of(item->dtype)->item_bytes,
                      &shard->bytes)) {
        mls_fail(st, MLS_E_SIZE, "the tensor has more parts or bytes than can be stored");
        return about(item, st);
    }
    planned->item = item;
    planned->shape = dims;
    planned->rank = part.flat ? 1 : part.rank;
    for (int i = 0; i < planned->rank; i++) {
        dims[i] = part.flat ? mls_part_count(&part) : part.length[i];
    }
    return MLS_OK;
}

/* What a file cannot say, or what the reader would refuse. */
static mls_code check_id(const mls_shard_item *item, mls_text key, mls_status *st)
{
    const mls_tensor_id *id = &item->id;
    /* what stands behind the key's last dot: of a tensor without state the whole name */
    const mls_text undivided = id->has_state ? id->state : id->name;
    if (!mls_utf8_valid(key.data, key.length)) {
        mls_fail(st, MLS_E_VALUE, "a name is not valid UTF-8");
    } else if (mls_text_is(key, "__metadata__")) {
        mls_fail(st, MLS_E_VALUE, "the name '__metadata__' is reserved by the format");
    } else if (id->section == MLS_OPTIM_STATE && undivided.length > 0 &&
               memchr(undivided.data, '.', undivided.length) != NULL) {
        mls_fail(st, MLS_E_VALUE, "the name of a state has a dot");
    } else {
        return MLS_OK;
    }
    return about(item, st);
}

/* Fill in shards and planned, in order.  `sorted` are the items: in the order of an
 * index, so that duplicates are neighbours, and so that what is written is sorted
 * already. */
static mls_code describe_all(mls_shard_plan *plan, const mls_shard_item **sorted,
                             mls_status *st)
{
    size_t *dims = plan->dims;
    char *keys = plan->keys;
    for (size_t i = 0; i < plan->job->count; i++) {
        mls_planned *planned = &plan->planned[i];
        planned->key = (mls_text){keys, mls_shard_key_length(&sorted[i]->id)};
        mls_shard_write_key(&sorted[i]->id, keys);
        mls_code code = check_id(sorted[i], planned->key, st);
        if (code == MLS_OK) {
            code = describe(sorted[i], &plan->index.shards[i], planned, dims, st);
        }
        if (code != MLS_OK) {
            return code;
        }
        if (i > 0 && compare_items(&sorted[i - 1], &sorted[i]) == 0) {
            mls_fail(st, MLS_E_VALUE, "part %zu of one tensor appears twice",
                     sorted[i]->part);
            return about(sorted[i], st);
        }
        dims += dims_of(sorted[i]);
        keys += planned->key.length;
        plan->index.shard_count++;
    }
    return MLS_OK;
}

/* Where a state's axes are not its parameter's own, say which they are, unless the caller
 * did.  Parameters come first and both are sorted by name, so one walk finds them. */
static void align_states(mls_shard_plan *plan)
{
    mls_index_shard *shards = plan->index.shards;
    signed char *axes = plan->axes;
    size_t parameter = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        mls_index_shard *s = &shards[i];
        if (s->id.section == MLS_PARAMS) {
            continue;
        }
        /* ends at the latest at the first state, which is no parameter */
        while (shards[parameter].id.section == MLS_PARAMS &&
               mls_text_compare(shards[parameter].id.name, s->id.name) < 0) {
            parameter++;
        }
        const mls_index_shard *p = &shards[parameter];
        if (s->axes == NULL && p->id.section == MLS_PARAMS &&
            mls_text_equal(p->id.name, s->id.name) &&
            mls_align(s->id.state, s->rank, s->shape, p->rank, p->shape, axes)) {
            s->axes = axes;
            axes += s->rank;
        }
    }
}

/* Both lists are sorted alike, so one walk pairs them.  A shard that is another one now,
 * by shape, dtype or layout, has no predecessor: its versions start anew. */
static void match_before(mls_shard_plan *plan)
{
    const mls_index *before = plan->job->before;
    size_t old = 0;
    for (size_t i = 0; before != NULL && i < plan->index.shard_count; i++) {
        const mls_index_shard *shard = &plan->index.shards[i];
        while (old < before->shard_count &&
               mls_index_compare(&before->shards[old], shard) < 0) {
            old++;
        }
        if (old < before->shard_count &&
            mls_index_compare(&before->shards[old], shard) == 0 &&
            mls_index_same_tensor(&before->shards[old], shard)) {
            plan->planned[i].before = &before->shards[old];
        }
    }
}

/* The items are the caller's and stay as they are: only pointers to them are sorted. */
mls_code mls_shard_plan_init(mls_shard_plan *plan, const mls_shard_job *job,
                             mls_status *st)
{
    *plan = (mls_shard_plan){.job = job};
    plan->index.rank = job->rank;
    plan->index.world_size = job->world_size;
    memcpy(plan->index.generation, job->generation, MLS_GENERATION_DIGITS);
    mls_code code = allocate(plan, st);
    const mls_shard_item **sorted =
        code == MLS_OK ? mls_alloc(job->count, sizeof *sorted) : NULL;
    if (code == MLS_OK && sorted == NULL) {
        code = no_memory(plan, st);
    }
    for (size_t i = 0; code == MLS_OK && i < job->count; i++) {
        sorted[i] = &job->items[i];
    }
    if (code == MLS_OK) {
        qsort(sorted, job->count, sizeof *sorted, compare_items);
        code = describe_all(plan, sorted, st);
    }
    mls_free(sorted);
    if (code != MLS_OK) {
        mls_shard_plan_fini(plan);
        return code;
    }
    align_states(plan);
    match_before(plan);
    return MLS_OK;
}

/* The index shares everything that it points to with the items and with this plan, so
 * there is nothing more of it to free. */
void mls_shard_plan_fini(mls_shard_plan *plan)
{
    for (size_t i = 0; i < plan->file_count; i++) {
        mls_header_fini(&plan->files[i].header);
        mls_free(plan->files[i].tensors);
    }
    mls_free(plan->files);
    mls_free(plan->written);
    for (size_t i = 0; plan->planned != NULL && i < plan->index.shard_count; i++) {
        mls_planned_drop_layers(&plan->planned[i]);
    }
    mls_free(plan->planned);
    mls_free(plan->dims);
    mls_free(plan->axes);
    mls_free(plan->keys);
    mls_index_fini(&plan->index);
    *plan = (mls_shard_plan){0};
}

/* ---- layers of a shard ---- */

/* The new layer and its runs are in the same block. */
void mls_planned_drop_layers(mls_planned *planned)
{
    mls_free(planned->layers);
    mls_free(planned->frames);
    planned->layers = NULL;
    planned->frames = NULL;
    planned->fresh = NULL;
}

/* Of a layer that nobody sees any more nothing is read: leaving it out gives its file up,
 * as soon as nothing else lives there. */
static size_t keep_layers(const mls_index_shard *before, mls_layer *out)
{
    size_t kept = 0;
    for (size_t i = 0; i < mls_index_place_count(before); i++) {
        const mls_layer layer = mls_index_place(before, i);
        if (before->layers == NULL || layer.visible_count > 0) {
            out[kept++] = layer;
        }
    }
    return kept;
}

/* The block has the list and the new layer's runs behind its head: all of it is there as
 * long as the plan, and goes with one call. */
mls_code mls_planned_set_layers(mls_planned *planned, bool keep, const mls_row_cut *rows,
                                const unsigned char *bits, mls_status *st)
{
    const size_t old = keep ? mls_index_place_count(planned->before) : 0;
    const size_t runs = bits == NULL ? 0 : mls_rows_runs(rows, bits, NULL);
    mls_layers *layers =
        mls_alloc(1, sizeof *layers + (old + 1) * sizeof(mls_layer) +
                         runs * sizeof(mls_extent)); /* less than the shard itself */
    if (layers == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a layer of %zu runs", runs);
    }
    layers->list = (mls_layer *)(layers + 1);
    layers->count = keep ? keep_layers(planned->before, layers->list) : 0;
    if (runs > 0) {
        mls_extent *list = (mls_extent *)(layers->list + old + 1);
        mls_layer *fresh = &layers->list[layers->count++];
        (void)mls_rows_runs(rows, bits, list);
        *fresh = (mls_layer){.row = rows->row, .runs = list, .run_count = runs};
        fresh->bytes = mls_layer_held(fresh, rows->elements) * rows->item;
        planned->fresh = fresh;
    }
    planned->layers = layers;
    return MLS_OK;
}

/* ---- what stays where it is ---- */

/* Of each file of before: the bytes of everything in it, and of what stays if it does.
 */
typedef struct use {
    uint64_t all, live;
    size_t moved; /* where it is in the new index; SIZE_MAX: nothing of it stays so far */
} use;

/* Whether nothing, or not much, of a shard changed: what is stored of it may stay. */
static bool may_stay(const mls_planned *planned)
{
    return planned->same || planned->layers != NULL;
}

/* Whether a place of before is of use to a shard that stays: a layer that is hidden is
 * not. */
static bool is_seen(const mls_index_shard *before, const mls_layer *place)
{
    return before->layers == NULL || place->visible_count > 0;
}

/* By file of before, in one walk over each of the two indexes.  Shards that are gone
 * since count as dead, like those that changed. */
static mls_code count_use(const mls_shard_plan *plan, use **out, mls_status *st)
{
    const mls_index *before = plan->job->before;
    use *uses = mls_alloc(before->file_count, sizeof *uses);
    if (uses == NULL) {
        return no_memory(plan, st);
    }
    for (size_t i = 0; i < before->file_count; i++) {
        uses[i].moved = SIZE_MAX;
    }
    /* all that lies there, what is hidden too: it takes room like anything else */
    for (size_t i = 0; i < before->shard_count; i++) {
        for (size_t j = 0; j < mls_index_place_count(&before->shards[i]); j++) {
            const mls_layer place = mls_index_place(&before->shards[i], j);
            uses[place.file].all += place.bytes;
        }
    }
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        const mls_index_shard *shard = plan->planned[i].before;
        for (size_t j = 0;
             may_stay(&plan->planned[i]) && j < mls_index_place_count(shard); j++) {
            const mls_layer place = mls_index_place(shard, j);
            uses[place.file].live += is_seen(shard, &place) ? place.bytes : 0;
        }
    }
    *out = uses;
    return MLS_OK;
}

/* A file that is mostly dead is given up, be it a segment or one of layers: what lives in
 * it is in memory now, and is written with the rest.  So of a shard all places stay, or
 * none. */
static bool can_stay(const mls_planned *planned, const use *uses)
{
    const mls_index_shard *before = planned->before;
    for (size_t i = 0; may_stay(planned) && i < mls_index_place_count(before); i++) {
        const mls_layer place = mls_index_place(before, i);
        const use *u = &uses[place.file];
        if (is_seen(before, &place) && u->live < u->all - u->live) {
            return false;
        }
    }
    return may_stay(planned);
}

/* Where a file of before is in the new index, which lists only those that something lives
 * in. */
static size_t move_file(mls_shard_plan *plan, use *uses, size_t file)
{
    use *u = &uses[file];
    if (u->moved == SIZE_MAX) {
        u->moved = plan->index.file_count;
        plan->index.files[plan->index.file_count++] = plan->job->before->files[file];
    }
    return u->moved;
}

/* Give a shard its record in the new index. */
static mls_code keep(mls_shard_plan *plan, size_t number, use *uses, mls_status *st)
{
    mls_planned *planned = &plan->planned[number];
    mls_index_shard *shard = &plan->index.shards[number];
    const mls_index_shard *before = planned->before;
    planned->kept = true;
    /* what did not change has its layers on, what changed a little got them when it was
     * compared: with the new one behind */
    if (before->layers != NULL && planned->layers == NULL &&
        mls_planned_set_layers(planned, true, NULL, NULL, st) != MLS_OK) {
        return st->code;
    }
    if (planned->layers == NULL) {
        shard->file = move_file(plan, uses, before->file);
        shard->offset = before->offset;
        shard->crc = before->crc;
        shard->crcs = before->crcs;
        return MLS_OK;
    }
    for (size_t i = 0; i < planned->layers->count; i++) {
        mls_layer *layer = &planned->layers->list[i];
        if (layer != planned->fresh) {
            layer->file = move_file(plan, uses, layer->file);
        }
    }
    return MLS_OK;
}

/* What cannot stay where it is is written as a whole, whatever was meant to be added to
 * it. */
static mls_code keep_all(mls_shard_plan *plan, mls_status *st)
{
    use *uses = NULL;
    mls_code code = count_use(plan, &uses, st);
    for (size_t i = 0; code == MLS_OK && i < plan->index.shard_count; i++) {
        if (can_stay(&plan->planned[i], uses)) {
            code = keep(plan, i, uses, st);
        } else {
            mls_planned_drop_layers(&plan->planned[i]);
        }
    }
    mls_free(uses);
    return code;
}

/* At most one file for each shard that is written, and those of before.  Pages of the
 * table that stay unused are never touched, and cost nothing. */
static mls_code allocate_files(mls_shard_plan *plan, mls_status *st)
{
    const mls_index *before = plan->job->before;
    size_t most;
    if (!mls_size_add(plan->index.shard_count, before == NULL ? 0 : before->file_count,
                      &most) ||
        (plan->index.files = mls_alloc(most, sizeof *plan->index.files)) == NULL) {
        return no_memory(plan, st);
    }
    return MLS_OK;
}

/* What is kept decides what is left to write, and its files come first in the list. */
mls_code mls_shard_plan_keep(mls_shard_plan *plan, mls_status *st)
{
    const mls_code code = allocate_files(plan, st);
    return code == MLS_OK && plan->job->before != NULL ? keep_all(plan, st) : code;
}

/* Versions go up with changes only; the caller's own, where there is one, was checked.
 * One that cannot go up (a caller who counts in hashes has had it) would make an index
 * that nobody can read. */
static mls_code set_versions(mls_shard_plan *plan, mls_status *st)
{
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        const mls_planned *planned = &plan->planned[i];
        const uint64_t old = planned->before == NULL ? 0 : planned->before->version;
        const bool counted = planned->item->version == 0 && !planned->same;
        if (counted && old >= INT64_MAX) {
            mls_fail(st, MLS_E_VALUE,
                     "the version of a shard cannot go up any more: it "
                     "is the highest one, as a caller set it");
            return about(planned->item, st);
        }
        plan->index.shards[i].version = planned->item->version != 0
                                            ? planned->item->version
                                        : counted ? old + 1
                                                  : old;
    }
    return MLS_OK;
}

/* ---- new files ---- */

/* A shard that must be written, and how its file is chosen: one of its own, or the next
 * segment that takes the nth shard of its tensor. */
typedef struct placing {
    size_t shard;
    size_t nth; /* of the shards of one tensor, or SIZE_MAX: a file of its own */
} placing;

/* For qsort: segments by section, first shards of tensors first, so that no file has two
 * of one tensor, which its keys could not tell apart. */
static int compare_placings(const void *a, const void *b)
{
    const placing *x = a, *y = b;
    return x->nth != y->nth       ? (x->nth < y->nth ? -1 : 1)
           : x->shard != y->shard ? (x->shard < y->shard ? -1 : 1)
                                  : 0;
}

/* Everything that is not kept, in the order in which it goes into files.  Counting starts
 * anew with each tensor, whether or not its earlier shards are written. */
static size_t list_placings(const mls_shard_plan *plan, placing *out)
{
    size_t count = 0, nth = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        const mls_index_shard *shard = &plan->index.shards[i];
        const bool again = i > 0 && mls_tensor_id_compare(&shard[-1].id, &shard->id) == 0;
        nth = again ? nth + 1 : 0;
        if (mls_planned_is_written(&plan->planned[i])) {
            /* counted over all shards of the tensor, kept ones too: what matters is only
             * that no two have the same number */
            const bool small =
                mls_planned_bytes(&plan->planned[i], shard) < plan->job->pack_below;
            out[count++] = (placing){.shard = i, .nth = small ? nth : SIZE_MAX};
        }
    }
    qsort(out, count, sizeof *out, compare_placings);
    return count;
}

/* Bytes that one of the placings takes. */
static size_t placed_bytes(const mls_shard_plan *plan, const placing *p)
{
    return mls_planned_bytes(&plan->planned[p->shard], &plan->index.shards[p->shard]);
}

/* How many of `left` placings share the next file.  At least one, however large it is. */
static size_t next_file(const mls_shard_plan *plan, const placing *placings, size_t left)
{
    const mls_index_shard *shards = plan->index.shards;
    const mls_section section = shards[placings[0].shard].id.section;
    size_t count = 1, bytes = placed_bytes(plan, &placings[0]);
    while (placings[0].nth != SIZE_MAX && count < left &&
           placings[count].nth == placings[0].nth &&
           shards[placings[count].shard].id.section == section && bytes < SEGMENT_BYTES &&
           placed_bytes(plan, &placings[count]) <= SEGMENT_BYTES - bytes) {
        bytes += placed_bytes(plan, &placings[count]);
        count++;
    }
    return count;
}

/* "params/layer.0.weight.3-8.<generation>-<rank>.safetensors", or "segment-12" in place
 * of a name and its parts, which no name can become: it lacks them. */
static mls_code name_file(const mls_shard_plan *plan, const placing *first, char *path,
                          mls_status *st)
{
    const mls_index_shard *shard = &plan->index.shards[first->shard];
    char name[MLS_FILENAME_BYTES + 64];
    if (first->nth != SIZE_MAX) {
        snprintf(name, sizeof name, "segment-%zu", plan->file_count);
    } else {
        char encoded[MLS_FILENAME_BYTES + 1];
        size_t parts = 1;
        /* its number in the index tells names apart that are cut alike */
        (void)mls_filename_encode(plan->planned[first->shard].key, first->shard, encoded);
        (void)mls_layout_parts(&shard->layout, &parts, st); /* looked at before */
        snprintf(name, sizeof name, "%s.%zu-%zu", encoded, shard->part, parts);
    }
    const int length =
        snprintf(path, MLS_PATH_BYTES + 1, "%s/%s.%s-%llu.safetensors",
                 mls_section_name(shard->id.section), name, plan->index.generation,
                 (unsigned long long)plan->index.rank);
    return length > 0 && length <= MLS_PATH_BYTES
               ? MLS_OK
               : mls_fail(st, MLS_E_SIZE, "the name of a file is too long");
}

/* Decide on one file: its name, and which shards it takes, whose numbers go to `shards`.
 */
static mls_code place_file(mls_shard_plan *plan, const placing *placings, size_t count,
                           size_t *shards, mls_status *st)
{
    mls_planned_file *file = &plan->files[plan->file_count];
    mls_index_file *record = &plan->index.files[plan->index.file_count];
    const mls_code code = name_file(plan, placings, record->path, st);
    if (code != MLS_OK) {
        return code;
    }
    for (size_t i = 0; i < count; i++) {
        mls_planned *planned = &plan->planned[placings[i].shard];
        shards[i] = placings[i].shard;
        /* of a shard with layers only the new one is in this file */
        if (planned->fresh != NULL) {
            planned->fresh->file = plan->index.file_count;
        } else {
            plan->index.shards[shards[i]].file = plan->index.file_count;
        }
    }
    *file = (mls_planned_file){
        .shards = shards, .count = count, .file = plan->index.file_count};
    plan->index.file_count++;
    plan->file_count++;
    return MLS_OK;
}

/* First versions, which the files' headers repeat; then the files. */
mls_code mls_shard_plan_place(mls_shard_plan *plan, mls_status *st)
{
    mls_code code = set_versions(plan, st);
    placing *placings = NULL;
    size_t count = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        /* known for good now: the new ones' places are filled in as files come about */
        plan->index.shards[i].layers = plan->planned[i].layers;
    }
    if (code == MLS_OK &&
        (placings = mls_alloc(plan->index.shard_count, sizeof *placings)) == NULL) {
        code = no_memory(plan, st);
    }
    if (code == MLS_OK) {
        count = list_placings(plan, placings);
        plan->files = mls_alloc(count, sizeof *plan->files);
        plan->written = mls_alloc(count, sizeof *plan->written);
        code =
            plan->files == NULL || plan->written == NULL ? no_memory(plan, st) : MLS_OK;
    }
    for (size_t done = 0; code == MLS_OK && done < count;) {
        const size_t shared = next_file(plan, placings + done, count - done);
        code = place_file(plan, placings + done, shared, plan->written + done, st);
        done += shared;
    }
    mls_free(placings);
    return code;
}

/* ---- one file ---- */

/* The text that says of each tensor in a file which shard it is: with it a file speaks
 * for itself when its index is lost. */
static void describe_file(const mls_shard_plan *plan, const mls_planned_file *file,
                          mls_buffer *text)
{
    mls_buffer_text(text, "{");
    for (size_t i = 0; i < file->count; i++) {
        mls_buffer_text(text, i == 0 ? "" : ",");
        mls_buffer_json(text, plan->planned[file->shards[i]].key);
        mls_buffer_text(text, ":");
        mls_index_put_shard(text, &plan->index.shards[file->shards[i]]);
        if (plan->planned[file->shards[i]].fresh != NULL) {
            mls_index_put_layer(text, plan->planned[file->shards[i]].fresh);
        }
        mls_buffer_text(text, "}");
    }
    mls_buffer_text(text, "}");
}

/* The header, with what it is to say of its shards. */
static mls_code make_header(mls_shard_plan *plan, mls_planned_file *file, mls_status *st)
{
    static const char key[] = MLS_SAFETENSORS_PREFIX "shards";
    mls_buffer text = {.most = MLS_SAFETENSORS_MAX_HEADER};
    describe_file(plan, file, &text);
    const mls_text_pair pair = {.key = {key, sizeof key - 1},
                                .value = {text.data, text.length}};
    const mls_code code =
        text.code != MLS_OK
            ? mls_fail(st, text.code, "no room to describe %zu shards", file->count)
            : mls_header_init(&file->header, file->tensors, file->count, &pair, 1,
                              MLS_SHARD_ALIGNMENT, st);
    mls_buffer_fini(&text);
    return code;
}

/* What a file's header says of a shard: its part, as it is, or a layer's bytes. */
static mls_header_tensor header_of(const mls_shard_plan *plan, size_t number)
{
    const mls_planned *planned = &plan->planned[number];
    const mls_index_shard *shard = &plan->index.shards[number];
    mls_header_tensor tensor = {.name = planned->key,
                                .shape = planned->shape,
                                .rank = planned->rank,
                                .dtype = shard->dtype,
                                .bytes = shard->bytes,
                                .number = number};
    /* what a layer's rows are a part of stands in "mlstate.shards": here, where any
     * reader of safetensors looks, they are bytes and no tensor of some other shape */
    if (planned->fresh != NULL) {
        tensor.shape = &planned->fresh->bytes;
        tensor.rank = 1;
        tensor.dtype = MLS_U8;
        tensor.bytes = planned->fresh->bytes;
    }
    return tensor;
}

/* The header sorts the tensors, so who is where is read off it. */
mls_code mls_shard_plan_lay_out(mls_shard_plan *plan, mls_planned_file *file,
                                mls_status *st)
{
    file->tensors = mls_alloc(file->count, sizeof *file->tensors);
    if (file->tensors == NULL) {
        return no_memory(plan, st);
    }
    for (size_t i = 0; i < file->count; i++) {
        file->tensors[i] = header_of(plan, file->shards[i]);
    }
    const mls_code code = make_header(plan, file, st);
    if (code != MLS_OK) {
        mls_shard_plan_finish(file);
        return code;
    }
    for (size_t i = 0; i < file->count; i++) {
        const mls_header_tensor *tensor = &file->tensors[i];
        mls_index_shard *shard = &plan->index.shards[tensor->number];
        mls_layer *fresh = plan->planned[tensor->number].fresh;
        if (fresh != NULL) {
            fresh->offset = tensor->offset;
            fresh->crcs = tensor->crcs;
        } else {
            shard->offset = tensor->offset;
            shard->crcs = tensor->crcs;
        }
    }
    plan->index.files[file->file].bytes = file->header.file_bytes;
    return MLS_OK;
}

/* The index lists the checksums, which go with the plan. */
void mls_shard_plan_finish(mls_planned_file *file)
{
    mls_buffer_fini(&file->header.text);
    mls_free(file->tensors);
    file->tensors = NULL;
}

/* Every step of a save but those that look at bytes. */
mls_code mls_shard_plan_index(const mls_shard_job *job, mls_buffer *out, mls_status *st)
{
    mls_shard_plan plan;
    uint32_t crc;
    mls_code code = mls_shard_plan_init(&plan, job, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_shard_plan_keep(&plan, st);
    if (code == MLS_OK) {
        code = mls_shard_plan_place(&plan, st);
    }
    for (size_t i = 0; code == MLS_OK && i < plan.file_count; i++) {
        code = mls_shard_plan_lay_out(&plan, &plan.files[i], st);
        if (code == MLS_OK) {
            mls_shard_plan_finish(&plan.files[i]);
        }
    }
    if (code == MLS_OK) {
        code = mls_index_build(&plan.index, job->crc, out, &crc, st);
    }
    mls_shard_plan_fini(&plan);
    return code;
}
