/* write_plan: which stored files stay; packs small shards into files; names of new files;
 * versions; axes of states.
 *
 * A place is a byte range of a file that stores a shard or one of its layers. A plain
 * shard has one place; any other has layers, the newest of which hides the elements that
 * it stores in older ones. A part is what the item stores of its tensor.
 *
 * Items and the previous index have the same order, so one merge pass matches them. Small
 * shards share segments: files of limited size, so that several threads can write them,
 * and obsolete data can be dropped without rewriting much. */
#include "checkpoint/write/write_plan.h"

#include "base/memory.h"
#include "base/size.h"
#include "checkpoint/index/index.h"
#include "io/safe_filename.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEGMENT_BYTES = 32 << 20, /* most bytes of small shards in one file */
    PARTS_MOST = 1000000000   /* parts of a tensor, to keep file names short */
};

/* ---- sort items ---- */

/* Report MLS_E_MEMORY. All arrays of a plan grow with the number of shards, so they share
 * one message. */
static mls_code fail_memory(const mls_write_plan *plan, mls_status *st)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory to save %zu shards", plan->job->count);
}

/* Add the tensor's name to the error in the status, and return its code. A state is named
 * by its parameter. */
static mls_code name_tensor(const mls_shard_item *item, mls_status *st)
{
    return mls_status_name(st, item->id.name.data, item->id.name.length);
}

/* Order for qsort of pointers to items: by tensor, then part. Pointers, because items are
 * large, and the caller's array must not change. */
static int compare_items(const void *a, const void *b)
{
    const mls_shard_item *x = *(const mls_shard_item *const *)a;
    const mls_shard_item *y = *(const mls_shard_item *const *)b;
    const int ids = mls_tensor_id_compare(&x->id, &y->id);
    return ids != 0 ? ids : x->part < y->part ? -1 : x->part > y->part;
}

/* Return the most dimensions that the shape of any part of the item's tensor has. A flat
 * part has one, even if the tensor has none. */
static size_t dims_of(const mls_shard_item *item)
{
    return item->rank > 0 ? (size_t)item->rank : 1;
}

/* Allocate everything whose size follows from the items. The sums cannot overflow, since
 * they are smaller than the items in memory. MLS_E_SHAPE: an item has too many
 * dimensions; MLS_E_MEMORY. After an error the caller frees the arrays. */
static mls_code allocate_arrays(mls_write_plan *plan, mls_status *st)
{
    const mls_shard_job *job = plan->job;
    size_t dims = 0, keys = 0;
    for (size_t i = 0; i < job->count; i++) {
        /* checked first, since the sums below rely on it */
        if (job->items[i].rank < 0 || job->items[i].rank > MLS_LAYOUT_RANK) {
            mls_fail(st, MLS_E_SHAPE, "%d dimensions: at most %d can be stored",
                     job->items[i].rank, (int)MLS_LAYOUT_RANK);
            return name_tensor(&job->items[i], st);
        }
        dims += dims_of(&job->items[i]);
        keys += mls_tensor_id_key_length(&job->items[i].id);
    }
    /* there are at most as many axes as dimensions */
    plan->index.shards = mls_alloc(job->count, sizeof *plan->index.shards);
    plan->planned = mls_alloc(job->count, sizeof *plan->planned);
    plan->dims = mls_alloc(dims, sizeof *plan->dims);
    plan->axes = mls_alloc(dims, sizeof *plan->axes);
    plan->keys = mls_alloc(keys, 1);
    return plan->index.shards == NULL || plan->planned == NULL || plan->dims == NULL ||
                   plan->axes == NULL || plan->keys == NULL
               ? fail_memory(plan, st)
               : MLS_OK;
}

/* Fill in `shard` and `planned` from an item; `dims` receives the shape of its part, and
 * has room for dims_of(item). Layout and shape are validated here, once, for all later
 * steps. Errors of mls_layout_part, or MLS_E_SIZE; they name the tensor. */
static mls_code describe_shard(const mls_shard_item *item, mls_index_shard *shard,
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
        return name_tensor(item, st);
    }
    if (parts > PARTS_MOST || !mls_index_fits(item->dtype, item->rank, item->shape) ||
        !mls_size_mul(mls_part_count(&part), mls_dtype_of(item->dtype)->item_bytes,
                      &shard->bytes)) {
        mls_fail(st, MLS_E_SIZE, "the tensor has more parts or bytes than can be stored");
        return name_tensor(item, st);
    }
    planned->item = item;
    planned->shape = dims;
    planned->rank = part.flat ? 1 : part.rank;
    for (int i = 0; i < planned->rank; i++) {
        dims[i] = part.flat ? mls_part_count(&part) : part.length[i];
    }
    return MLS_OK;
}

/* Refuse an item that a file cannot store or the reader would refuse, by its name; `key`
 * is the whole name in the file. MLS_E_VALUE. */
static mls_code check_id(const mls_shard_item *item, mls_str key, mls_status *st)
{
    const mls_tensor_id *id = &item->id;
    /* the text behind the key's last dot; for a tensor without state, the whole name */
    const mls_str undivided = id->has_state ? id->state : id->name;
    if (!mls_utf8_valid(key.data, key.length)) {
        mls_fail(st, MLS_E_VALUE, "a name is not valid UTF-8");
    } else if (mls_str_is(key, "__metadata__")) {
        mls_fail(st, MLS_E_VALUE, "the name '__metadata__' is reserved by the format");
    } else if (id->section == MLS_OPTIM_STATE && undivided.length > 0 &&
               memchr(undivided.data, '.', undivided.length) != NULL) {
        mls_fail(st, MLS_E_VALUE, "the name of a state has a dot");
    } else {
        return MLS_OK;
    }
    return name_tensor(item, st);
}

/* Fill in shards, keys and planned from `sorted`, the items in index order. MLS_E_VALUE:
 * a part is listed twice (duplicates are neighbours). `shard_count` counts the shards
 * that were described. */
static mls_code describe_shards(mls_write_plan *plan, const mls_shard_item **sorted,
                                mls_status *st)
{
    size_t *dims = plan->dims;
    char *keys = plan->keys;
    for (size_t i = 0; i < plan->job->count; i++) {
        mls_planned *planned = &plan->planned[i];
        planned->key = (mls_str){keys, mls_tensor_id_key_length(&sorted[i]->id)};
        mls_tensor_id_write_key(&sorted[i]->id, keys);
        mls_code code = check_id(sorted[i], planned->key, st);
        if (code == MLS_OK) {
            code = describe_shard(sorted[i], &plan->index.shards[i], planned, dims, st);
        }
        if (code != MLS_OK) {
            return code;
        }
        if (i > 0 && compare_items(&sorted[i - 1], &sorted[i]) == 0) {
            mls_fail(st, MLS_E_VALUE, "part %zu of one tensor appears twice",
                     sorted[i]->part);
            return name_tensor(sorted[i], st);
        }
        dims += dims_of(sorted[i]);
        keys += planned->key.length;
        plan->index.shard_count++;
    }
    return MLS_OK;
}

/* Guess the shape of a parameter that is not among the items, from its `count` states:
 * for each axis the largest length in the states of the highest rank. These must have
 * this length or 1 on each axis. Returns the rank; 0 if the guess is not safe. */
static int guess_shape(const mls_index_shard *states, size_t count, size_t *shape)
{
    int rank = 0;
    memset(shape, 0, MLS_LAYOUT_RANK * sizeof *shape);
    for (size_t i = 0; i < count; i++) {
        rank = states[i].rank > rank ? states[i].rank : rank;
    }
    for (size_t i = 0; i < count; i++) {
        for (int axis = 0; states[i].rank == rank && axis < rank; axis++) {
            const size_t length = states[i].shape[axis];
            if (shape[axis] > 1 && length > 1 && length != shape[axis]) {
                return 0;
            }
            shape[axis] = length > shape[axis] ? length : shape[axis];
        }
    }
    return rank;
}

/* Return whether a guessed parameter tells the axes of a state: it has the same rank, or
 * one element. */
static bool fits_guess(const mls_index_shard *state, int rank)
{
    size_t count = 1; /* cannot overflow: the shape was checked */
    for (int axis = 0; axis < state->rank; axis++) {
        count *= state->shape[axis];
    }
    return rank > 0 && (state->rank == rank || count == 1);
}

/* Set the axes of states whose axes differ from their parameter's, unless the caller set
 * them. The shape of a parameter that is not among the items is guessed. Parameters come
 * first and both are sorted by name, so one merge pass is enough. */
static void set_state_axes(mls_write_plan *plan)
{
    mls_index_shard *shards = plan->index.shards;
    signed char *axes = plan->axes;
    size_t parameter = 0, guessed = 0; /* shards before `guessed`: the shape is known */
    size_t shape[MLS_LAYOUT_RANK];
    int rank = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        mls_index_shard *s = &shards[i];
        if (s->id.section != MLS_OPTIM_STATE) {
            continue;
        }
        /* stops at the first state at the latest */
        while (shards[parameter].id.section == MLS_PARAMS &&
               mls_str_compare(shards[parameter].id.name, s->id.name) < 0) {
            parameter++;
        }
        const mls_index_shard *p = &shards[parameter];
        if (s->axes == NULL && p->id.section == MLS_PARAMS &&
            mls_str_equal(p->id.name, s->id.name) &&
            mls_optimizer_axes(s->id.state, s->rank, s->shape, p->rank, p->shape, axes)) {
            s->axes = axes;
            axes += s->rank;
            continue;
        }
        /* with other ranks, which may have other states, guesses could differ */
        if (s->axes != NULL || plan->job->world_size > 1 ||
            (p->id.section == MLS_PARAMS && mls_str_equal(p->id.name, s->id.name))) {
            continue;
        }
        if (i >= guessed) {
            guessed = i + 1;
            while (guessed < plan->index.shard_count &&
                   shards[guessed].id.section == MLS_OPTIM_STATE &&
                   mls_str_equal(shards[guessed].id.name, s->id.name)) {
                guessed++;
            }
            rank = guess_shape(s, guessed - i, shape);
        }
        if (fits_guess(s, rank) &&
            mls_optimizer_axes(s->id.state, s->rank, s->shape, rank, shape, axes)) {
            s->axes = axes;
            axes += s->rank;
        }
    }
}

/* Set `planned.before` of each shard to its shard in the previous index, by a merge pass
 * over the two sorted lists. A shard whose shape, dtype or layout changed has none
 * (NULL), and its versions restart. */
static void match_committed(mls_write_plan *plan)
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

/* Sort pointers to the items, check and describe them, and match them with the previous
 * index. */
mls_code mls_write_plan_init(mls_write_plan *plan, const mls_shard_job *job,
                             mls_status *st)
{
    *plan = (mls_write_plan){.job = job};
    plan->index.rank = job->rank;
    plan->index.world_size = job->world_size;
    memcpy(plan->index.generation, job->generation, MLS_GENERATION_DIGITS);
    mls_code code = allocate_arrays(plan, st);
    const mls_shard_item **sorted =
        code == MLS_OK ? mls_alloc(job->count, sizeof *sorted) : NULL;
    if (code == MLS_OK && sorted == NULL) {
        code = fail_memory(plan, st);
    }
    for (size_t i = 0; code == MLS_OK && i < job->count; i++) {
        sorted[i] = &job->items[i];
    }
    if (code == MLS_OK) {
        qsort(sorted, job->count, sizeof *sorted, compare_items);
        code = describe_shards(plan, sorted, st);
    }
    mls_free(sorted);
    if (code != MLS_OK) {
        mls_write_plan_fini(plan);
        return code;
    }
    set_state_axes(plan);
    match_committed(plan);
    return MLS_OK;
}

/* Free the plan. The new index borrows names and shapes from the items and from this
 * plan. */
void mls_write_plan_fini(mls_write_plan *plan)
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
    *plan = (mls_write_plan){0};
}

/* ---- layers of a shard ---- */

/* Free the layers and frames of a shard, which becomes plain. The new layer and its row
 * ranges are in the same allocation. */
void mls_planned_drop_layers(mls_planned *planned)
{
    mls_free(planned->layers);
    mls_free(planned->frames);
    planned->layers = NULL;
    planned->frames = NULL;
    planned->new_layer = NULL;
}

/* Copy the layers of the committed shard that are still visible to `out`, and return
 * their number; a plain shard counts as one. A hidden layer is dropped, so that its file
 * can be deleted when nothing else needs it. */
static size_t keep_layers(const mls_index_shard *before, mls_layer *out)
{
    size_t layer_count = 0;
    for (size_t i = 0; i < mls_index_place_count(before); i++) {
        const mls_layer layer = mls_index_place(before, i);
        if (before->layers == NULL || layer.visible_count > 0) {
            out[layer_count++] = layer;
        }
    }
    return layer_count;
}

/* Give a shard the visible committed layers (`keep`), and a new layer of the rows in
 * `bits`, unless it has no row. One allocation contains the struct, the list and the new
 * layer's row ranges, so that one call frees all. */
mls_code mls_planned_set_layers(mls_planned *planned, bool keep, const mls_row_cut *rows,
                                const unsigned char *bits, mls_status *st)
{
    const size_t old = keep ? mls_index_place_count(planned->before) : 0;
    const size_t range_count = bits == NULL ? 0 : mls_rows_list_ranges(rows, bits, NULL);
    mls_layers *layers =
        mls_alloc(1, sizeof *layers + (old + 1) * sizeof(mls_layer) +
                         range_count * sizeof(mls_row_range)); /* cannot overflow */
    if (layers == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a layer of %zu row ranges",
                        range_count);
    }
    layers->list = (mls_layer *)(layers + 1);
    layers->count = keep ? keep_layers(planned->before, layers->list) : 0;
    if (range_count > 0) {
        mls_row_range *ranges = (mls_row_range *)(layers->list + old + 1);
        mls_layer *new_layer = &layers->list[layers->count++];
        (void)mls_rows_list_ranges(rows, bits, ranges);
        *new_layer =
            (mls_layer){.row = rows->row, .stored = ranges, .stored_count = range_count};
        new_layer->bytes =
            mls_layer_element_count(new_layer, rows->elements) * rows->item;
        planned->new_layer = new_layer;
    }
    planned->layers = layers;
    return MLS_OK;
}

/* ---- keep stored bytes ---- */

/* For each file of the previous index: its total bytes, and the bytes of shards that may
 * be kept. */
typedef struct file_use {
    uint64_t all, live;
    size_t new_number; /* its number in the new index; SIZE_MAX: not listed yet */
} file_use;

/* Return whether a shard is unchanged, or changed so little that its stored bytes may be
 * kept. */
static bool may_keep(const mls_planned *planned)
{
    return planned->is_unchanged || planned->layers != NULL;
}

/* Return whether any element of the place is read: it is not hidden by later layers. */
static bool is_visible(const mls_index_shard *before, const mls_layer *place)
{
    return before->layers == NULL || place->visible_count > 0;
}

/* Count, for each file of the previous index, the bytes of all its places (`all`) and of
 * those that may stay (`live`). Removed shards count as dead, like changed ones. The
 * caller frees `*out` with mls_free. MLS_E_MEMORY. */
static mls_code count_uses(const mls_write_plan *plan, file_use **out, mls_status *st)
{
    const mls_index *before = plan->job->before;
    file_use *uses = mls_alloc(before->file_count, sizeof *uses);
    if (uses == NULL) {
        return fail_memory(plan, st);
    }
    for (size_t i = 0; i < before->file_count; i++) {
        uses[i].new_number = SIZE_MAX;
    }
    /* includes hidden layers, which use disk space too */
    for (size_t i = 0; i < before->shard_count; i++) {
        for (size_t j = 0; j < mls_index_place_count(&before->shards[i]); j++) {
            const mls_layer place = mls_index_place(&before->shards[i], j);
            uses[place.file].all += place.bytes;
        }
    }
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        const mls_index_shard *shard = plan->planned[i].before;
        for (size_t j = 0;
             may_keep(&plan->planned[i]) && j < mls_index_place_count(shard); j++) {
            const mls_layer place = mls_index_place(shard, j);
            uses[place.file].live += is_visible(shard, &place) ? place.bytes : 0;
        }
    }
    *out = uses;
    return MLS_OK;
}

/* Return whether the stored bytes of a shard may stay; `uses` has an entry for each file
 * of the previous index. A file with less than half of its bytes in use is given up: its
 * live shards are in memory, and are written again. So either all places of a shard stay,
 * or none. */
static bool can_keep(const mls_planned *planned, const file_use *uses)
{
    const mls_index_shard *before = planned->before;
    for (size_t i = 0; may_keep(planned) && i < mls_index_place_count(before); i++) {
        const mls_layer place = mls_index_place(before, i);
        const file_use *u = &uses[place.file];
        if (is_visible(before, &place) && u->live < u->all - u->live) {
            return false;
        }
    }
    return may_keep(planned);
}

/* Return the number in the new index of file number `file` of the previous index. The
 * first call for a file lists it there, and notes its number in `uses[file].new_number`.
 * So the new index lists only files in use. */
static size_t list_kept_file(mls_write_plan *plan, file_use *uses, size_t file)
{
    file_use *u = &uses[file];
    if (u->new_number == SIZE_MAX) {
        u->new_number = plan->index.file_count;
        plan->index.files[plan->index.file_count++] = plan->job->before->files[file];
    }
    return u->new_number;
}

/* Reuse the stored bytes of shard `number`: copy its place, or its layers, from the
 * previous index. `uses` has the numbers of the previous files in the new index, see
 * list_kept_file. A new layer, if any, gets its file later. MLS_E_MEMORY. */
static mls_code keep_shard(mls_write_plan *plan, size_t number, file_use *uses,
                           mls_status *st)
{
    mls_planned *planned = &plan->planned[number];
    mls_index_shard *shard = &plan->index.shards[number];
    const mls_index_shard *before = planned->before;
    planned->is_reused = true;
    /* an unchanged shard keeps its layers; a partly changed one got them during
     * comparison, with the new layer at the end */
    if (before->layers != NULL && planned->layers == NULL &&
        mls_planned_set_layers(planned, true /* committed layers too */, NULL, NULL,
                               st) != MLS_OK) {
        return st->code;
    }
    if (planned->layers == NULL) {
        shard->file = list_kept_file(plan, uses, before->file);
        shard->offset = before->offset;
        shard->crc = before->crc;
        shard->crcs = before->crcs;
        return MLS_OK;
    }
    for (size_t i = 0; i < planned->layers->count; i++) {
        mls_layer *layer = &planned->layers->list[i];
        if (layer != planned->new_layer) {
            layer->file = list_kept_file(plan, uses, layer->file);
        }
    }
    return MLS_OK;
}

/* Keep the stored bytes of all shards that can_keep allows. The others are written
 * whole, and lose their new layers. MLS_E_MEMORY. */
static mls_code keep_shards(mls_write_plan *plan, mls_status *st)
{
    file_use *uses = NULL;
    mls_code code = count_uses(plan, &uses, st);
    for (size_t i = 0; code == MLS_OK && i < plan->index.shard_count; i++) {
        if (can_keep(&plan->planned[i], uses)) {
            code = keep_shard(plan, i, uses, st);
        } else {
            mls_planned_drop_layers(&plan->planned[i]);
        }
    }
    mls_free(uses);
    return code;
}

/* Allocate the new index's list of files: at most one for each written shard, plus the
 * previous files. Unused pages of the list are never touched, so they cost nothing.
 * MLS_E_MEMORY. */
static mls_code allocate_files(mls_write_plan *plan, mls_status *st)
{
    const mls_index *before = plan->job->before;
    size_t most;
    if (!mls_size_add(plan->index.shard_count, before == NULL ? 0 : before->file_count,
                      &most) ||
        (plan->index.files = mls_alloc(most, sizeof *plan->index.files)) == NULL) {
        return fail_memory(plan, st);
    }
    return MLS_OK;
}

/* List the files that stay first; new files are appended later. */
mls_code mls_write_plan_reuse(mls_write_plan *plan, mls_status *st)
{
    const mls_code code = allocate_files(plan, st);
    return code == MLS_OK && plan->job->before != NULL ? keep_shards(plan, st) : code;
}

/* Set the version of each shard: the caller's if it is not 0, otherwise the committed one
 * (0 without a committed shard), plus one if the shard changed. MLS_E_VALUE: the
 * committed version cannot increase, for example because a caller used a hash as
 * version. */
static mls_code set_versions(mls_write_plan *plan, mls_status *st)
{
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        const mls_planned *planned = &plan->planned[i];
        const uint64_t old = planned->before == NULL ? 0 : planned->before->version;
        const bool is_incremented = planned->item->version == 0 && !planned->is_unchanged;
        if (is_incremented && old >= INT64_MAX) {
            mls_fail(st, MLS_E_VALUE,
                     "the version of a shard cannot increase: it is already the largest "
                     "one");
            return name_tensor(planned->item, st);
        }
        plan->index.shards[i].version = planned->item->version != 0
                                            ? planned->item->version
                                        : is_incremented ? old + 1
                                                         : old;
    }
    return MLS_OK;
}

/* ---- new files ---- */

/* A shard to write, and its kind of file: its own, or a segment shared by the nth shards
 * of several tensors. */
typedef struct assignment {
    size_t shard;
    size_t nth; /* position among the shards of its tensor; SIZE_MAX: its own file */
} assignment;

/* For qsort: by `nth`, then shard, so that no segment contains two shards of one tensor,
 * whose keys would be equal. */
static int compare_assignments(const void *a, const void *b)
{
    const assignment *x = a, *y = b;
    return x->nth != y->nth       ? (x->nth < y->nth ? -1 : 1)
           : x->shard != y->shard ? (x->shard < y->shard ? -1 : 1)
                                  : 0;
}

/* List everything to write in `out`, in file order, and return the number. `nth` counts
 * all shards of a tensor, including kept ones: it only needs to differ between the shards
 * of a tensor. */
static size_t list_assignments(const mls_write_plan *plan, assignment *out)
{
    size_t count = 0, nth = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        const mls_index_shard *shard = &plan->index.shards[i];
        const bool again = i > 0 && mls_tensor_id_compare(&shard[-1].id, &shard->id) == 0;
        nth = again ? nth + 1 : 0;
        if (mls_planned_is_written(&plan->planned[i])) {
            const bool small =
                mls_planned_bytes(&plan->planned[i], shard) < plan->job->pack_below;
            out[count++] = (assignment){.shard = i, .nth = small ? nth : SIZE_MAX};
        }
    }
    qsort(out, count, sizeof *out, compare_assignments);
    return count;
}

/* Return the bytes that the shard takes in its new file. */
static size_t assigned_bytes(const mls_write_plan *plan, const assignment *p)
{
    return mls_planned_bytes(&plan->planned[p->shard], &plan->index.shards[p->shard]);
}

/* Return how many of the `left` assignments from `assignments` on share the next file; at
 * least one, even if it is large. They have one section and one `nth`, and at most
 * SEGMENT_BYTES bytes together. */
static size_t count_in_next_file(const mls_write_plan *plan,
                                 const assignment *assignments, size_t left)
{
    const mls_index_shard *shards = plan->index.shards;
    const mls_section section = shards[assignments[0].shard].id.section;
    size_t count = 1, bytes = assigned_bytes(plan, &assignments[0]);
    while (assignments[0].nth != SIZE_MAX && count < left &&
           assignments[count].nth == assignments[0].nth &&
           shards[assignments[count].shard].id.section == section &&
           bytes < SEGMENT_BYTES &&
           assigned_bytes(plan, &assignments[count]) <= SEGMENT_BYTES - bytes) {
        bytes += assigned_bytes(plan, &assignments[count]);
        count++;
    }
    return count;
}

/* Write the path of a new file, whose first shard is `first`, to `path`:
 * "params/layer.0.weight.3-8.<generation>-<rank>.safetensors", or "segment-12" instead
 * of tensor and part. No tensor's file can have that name, since it has no part.
 * MLS_E_SIZE: the path is too long. */
static mls_code name_file(const mls_write_plan *plan, const assignment *first, char *path,
                          mls_status *st)
{
    const mls_index_shard *shard = &plan->index.shards[first->shard];
    char name[MLS_FILENAME_BYTES + 64];
    if (first->nth != SIZE_MAX) {
        snprintf(name, sizeof name, "segment-%zu", plan->file_count);
    } else {
        char encoded[MLS_FILENAME_BYTES + 1];
        size_t parts = 1;
        /* the shard number distinguishes names that are truncated to the same text */
        (void)mls_filename_encode(plan->planned[first->shard].key, first->shard, encoded);
        (void)mls_layout_parts(&shard->layout, &parts, st); /* cannot fail */
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

/* Create the next file for the `count` shards at `assignments`: name it, list it in the
 * index, and set the shards' file. `shards` has room for their numbers, which the file
 * borrows. MLS_E_SIZE: the path is too long. */
static mls_code add_file(mls_write_plan *plan, const assignment *assignments,
                         size_t count, size_t *shards, mls_status *st)
{
    mls_planned_file *file = &plan->files[plan->file_count];
    mls_index_file *record = &plan->index.files[plan->index.file_count];
    const mls_code code = name_file(plan, assignments, record->path, st);
    if (code != MLS_OK) {
        return code;
    }
    for (size_t i = 0; i < count; i++) {
        mls_planned *planned = &plan->planned[assignments[i].shard];
        shards[i] = assignments[i].shard;
        /* of a shard with layers, only the new layer is in this file */
        if (planned->new_layer != NULL) {
            planned->new_layer->file = plan->index.file_count;
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

/* Set all versions, then distribute everything that is written over files. Versions come
 * first, since the headers of files contain them. */
mls_code mls_write_plan_assign_files(mls_write_plan *plan, mls_status *st)
{
    mls_code code = set_versions(plan, st);
    assignment *assignments = NULL;
    size_t count = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        /* final now, except for the places of new layers */
        plan->index.shards[i].layers = plan->planned[i].layers;
    }
    if (code == MLS_OK &&
        (assignments = mls_alloc(plan->index.shard_count, sizeof *assignments)) == NULL) {
        code = fail_memory(plan, st);
    }
    if (code == MLS_OK) {
        count = list_assignments(plan, assignments);
        plan->files = mls_alloc(count, sizeof *plan->files);
        plan->written = mls_alloc(count, sizeof *plan->written);
        code =
            plan->files == NULL || plan->written == NULL ? fail_memory(plan, st) : MLS_OK;
    }
    for (size_t done = 0; code == MLS_OK && done < count;) {
        const size_t shared = count_in_next_file(plan, assignments + done, count - done);
        code = add_file(plan, assignments + done, shared, plan->written + done, st);
        done += shared;
    }
    mls_free(assignments);
    return code;
}

/* ---- one file ---- */

/* Append the JSON object that maps each tensor of a file to its shard, so that the file
 * is usable without an index. */
static void describe_file(const mls_write_plan *plan, const mls_planned_file *file,
                          mls_json_writer *text)
{
    mls_json_writer_text(text, "{");
    for (size_t i = 0; i < file->count; i++) {
        mls_json_writer_text(text, i == 0 ? "" : ",");
        mls_json_writer_json(text, plan->planned[file->shards[i]].key);
        mls_json_writer_text(text, ":");
        mls_index_put_shard(text, &plan->index.shards[file->shards[i]]);
        if (plan->planned[file->shards[i]].new_layer != NULL) {
            mls_index_put_layer(text, plan->planned[file->shards[i]].new_layer);
        }
        mls_json_writer_text(text, "}");
    }
    mls_json_writer_text(text, "}");
}

/* Make the header of a file, with the text that maps its tensors to shards.
 * mls_header_init sorts `file->tensors` and sets their offsets; checksums are filled in
 * later. MLS_E_SIZE, MLS_E_MEMORY. */
static mls_code make_header(mls_write_plan *plan, mls_planned_file *file, mls_status *st)
{
    static const char key[] = MLS_SAFETENSORS_PREFIX "shards";
    mls_json_writer text = {.most = MLS_SAFETENSORS_MAX_HEADER};
    describe_file(plan, file, &text);
    const mls_str_pair pair = {.key = {key, sizeof key - 1},
                               .value = {text.data, text.length}};
    const mls_code code =
        text.code != MLS_OK
            ? mls_fail(st, text.code, "no room to describe %zu shards", file->count)
            : mls_header_init(&file->header, file->tensors, file->count, &pair, 1,
                              MLS_SHARD_ALIGNMENT, st);
    mls_json_writer_fini(&text);
    return code;
}

/* Describe shard `number` as a tensor of a file: an array of its part's shape, or, for a
 * new layer, an array of the layer's bytes. */
static mls_header_tensor header_tensor(const mls_write_plan *plan, size_t number)
{
    const mls_planned *planned = &plan->planned[number];
    const mls_index_shard *shard = &plan->index.shards[number];
    mls_header_tensor tensor = {.name = planned->key,
                                .shape = planned->shape,
                                .rank = planned->rank,
                                .dtype = shard->dtype,
                                .bytes = shard->bytes,
                                .number = number};
    /* "mlstate.shards" describes the rows of a layer; other safetensors readers see bytes
     * instead of a tensor with a wrong shape */
    if (planned->new_layer != NULL) {
        tensor.shape = &planned->new_layer->bytes;
        tensor.rank = 1;
        tensor.dtype = MLS_U8;
        tensor.bytes = planned->new_layer->bytes;
        /* elements must not straddle the end of a buffer; compressed bytes may */
        tensor.element_bytes =
            planned->frames == NULL ? mls_dtype_of(shard->dtype)->item_bytes : 1;
    }
    return tensor;
}

/* Make the header, and copy the offsets that it gives the tensors to the shards or their
 * new layers. Checksums point into the header. On failure the tensors are freed. */
mls_code mls_write_plan_lay_out(mls_write_plan *plan, mls_planned_file *file,
                                mls_status *st)
{
    file->tensors = mls_alloc(file->count, sizeof *file->tensors);
    if (file->tensors == NULL) {
        return fail_memory(plan, st);
    }
    for (size_t i = 0; i < file->count; i++) {
        file->tensors[i] = header_tensor(plan, file->shards[i]);
    }
    const mls_code code = make_header(plan, file, st);
    if (code != MLS_OK) {
        mls_write_plan_finish(file);
        return code;
    }
    for (size_t i = 0; i < file->count; i++) {
        const mls_header_tensor *tensor = &file->tensors[i];
        mls_index_shard *shard = &plan->index.shards[tensor->number];
        mls_layer *new_layer = plan->planned[tensor->number].new_layer;
        if (new_layer != NULL) {
            new_layer->offset = tensor->offset;
            new_layer->crcs = tensor->crcs;
        } else {
            shard->offset = tensor->offset;
            shard->crcs = tensor->crcs;
        }
    }
    plan->index.files[file->file].bytes = file->header.file_bytes;
    return MLS_OK;
}

/* Free the header's text and the tensors. The checksums remain until the plan is
 * released, since the index needs them. */
void mls_write_plan_finish(mls_planned_file *file)
{
    mls_json_writer_fini(&file->header.text);
    mls_free(file->tensors);
    file->tensors = NULL;
}

/* Append the index of a first save to `out`: run all steps of a save except those that
 * read bytes. */
mls_code mls_write_plan_index(const mls_shard_job *job, mls_json_writer *out,
                              mls_status *st)
{
    mls_write_plan plan;
    uint32_t crc;
    mls_code code = mls_write_plan_init(&plan, job, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_write_plan_reuse(&plan, st);
    if (code == MLS_OK) {
        code = mls_write_plan_assign_files(&plan, st);
    }
    for (size_t i = 0; code == MLS_OK && i < plan.file_count; i++) {
        code = mls_write_plan_lay_out(&plan, &plan.files[i], st);
        if (code == MLS_OK) {
            mls_write_plan_finish(&plan.files[i]);
        }
    }
    if (code == MLS_OK) {
        code = mls_index_build(&plan.index, job->crc, out, &crc, st);
    }
    mls_write_plan_fini(&plan);
    return code;
}
