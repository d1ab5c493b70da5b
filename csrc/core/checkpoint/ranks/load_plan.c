/* load_plan: which part of a tensor a load gives a rank; checks of targets (shape, dtype)
 * and of the lengths of files; destinations of bytes.
 *
 * A part is what a rank needs of a tensor: a box or a flat range of its elements. A place
 * is a byte range of a file that stores a shard or one of its layers, or the zeros of a
 * shard that are not stored. A piece is what the part needs of one place. */
#include "checkpoint/ranks/load_plan.h"

#include "base/memory.h"
#include "checkpoint/ranks/requested_part.h"
#include "io/file.h"

#include <string.h>

/* ---- choose parts ---- */

/* Create a plan with room for `most` tensors. A part takes hundreds of bytes, and most
 * are never touched. So the arrays are not zeroed, here and in mls_load_plan_find. */
mls_code mls_load_plan_init(mls_load_plan *plan, const mls_merged_index *merged,
                            size_t most, mls_status *st)
{
    *plan = (mls_load_plan){0};
    plan->items = mls_realloc(NULL, most, sizeof *plan->items);
    if (plan->items == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to load %zu tensors", most);
    }
    plan->merged = merged;
    plan->last = SIZE_MAX; /* so that the next position is 0 */
    return MLS_OK;
}

/* Free the plan, but not the merged index or any destination. */
void mls_load_plan_fini(mls_load_plan *plan)
{
    mls_free(plan->items);
    mls_free(plan->stored);
    mls_free(plan->parts);
    mls_free(plan->pieces);
    *plan = (mls_load_plan){0};
}

/* Add a tensor to the items, which have room for it, and count its pieces; NULL if it is
 * not in the merged index. Callers that load all tensors add them in the order of the
 * merged index: each then follows the previous one, and no search is needed. */
mls_load_item *mls_load_plan_add(mls_load_plan *plan, const mls_tensor_id *id)
{
    const mls_merged_index *merged = plan->merged;
    const size_t next = plan->last + 1;
    const size_t at =
        next < merged->tensor_count &&
                mls_tensor_id_compare(&merged->tensors[next].any_shard->id, id) == 0
            ? next
            : mls_merged_index_find(merged, id);
    if (at == SIZE_MAX) {
        return NULL;
    }
    plan->last = at;
    mls_load_item *item = &plan->items[plan->count++];
    item->tensor = &merged->tensors[at];
    item->first = item->count = 0;
    item->long_zeros = false;
    plan->piece_count += item->tensor->places;
    return item;
}

/* Add the name of the item's tensor to the error in the status. Returns the error's
 * code. */
static mls_code name_tensor(const mls_load_item *item, mls_status *st)
{
    return mls_status_tensor(st, &item->tensor->any_shard->id);
}

/* Set `item->part` to the part that `how` selects. Without a layout, `how->world` ranks
 * define how to cut one axis, but not several. */
mls_code mls_load_item_select(mls_load_item *item, const mls_cutting *how, mls_status *st)
{
    const mls_index_shard *shard = item->tensor->any_shard;
    mls_layout layout = {0};
    size_t index = 0;
    if (how->has_layout) {
        mls_layout_project(&how->layout, how->index, shard->rank, shard->axes, &layout,
                           &index);
    } else if (how->world > 0 && shard->layout.count > 1) {
        mls_fail(st, MLS_E_VALUE, "its layout has %d steps: give a layout of %zu parts",
                 shard->layout.count, how->world);
        return name_tensor(item, st);
    } else if (how->world > 0 && shard->layout.count == 1) {
        layout = shard->layout;
        layout.steps[0].parts = how->world;
        index = how->index;
    }
    return mls_layout_part(&layout, shard->rank, shard->shape, index, &item->part, st);
}

/* Add the stored shape `have`, the expected shape `want` and the tensor's name to the
 * error in the status. Returns its code. */
static mls_code set_shapes(const mls_load_item *item, const char *have, const char *want,
                           mls_status *st)
{
    mls_status_differ(st, want, have);
    return name_tensor(item, st);
}

/* Check that the stored tensor has the shape of the target's whole tensor: `rank`
 * dimensions `shape`. MLS_E_SHAPE. */
mls_code mls_load_item_check_full(const mls_load_item *item, int rank,
                                  const size_t *shape, mls_status *st)
{
    const mls_index_shard *shard = item->tensor->any_shard;
    char have[64], want[64];
    if (mls_shape_equal(rank, shape, shard->rank, shard->shape)) {
        return MLS_OK;
    }
    mls_shape_text(have, sizeof have, shard->rank, shard->shape);
    mls_shape_text(want, sizeof want, rank, shape);
    mls_fail(st, MLS_E_SHAPE, "the checkpoint has shape %s, the target %s", have, want);
    return set_shapes(item, have, want, st);
}

mls_code mls_load_item_part(mls_load_item *item, const mls_layout *layout, size_t index,
                            mls_status *st)
{
    const mls_index_shard *shard = item->tensor->any_shard;
    return mls_layout_part(layout, shard->rank, shard->shape, index, &item->part, st);
}

/* Set `item->part` to elements `begin` .. `end` of the tensor, a flat range. No layout
 * describes it: a range of several concatenated tensors may be cut anywhere. */
mls_code mls_load_item_run(mls_load_item *item, int64_t begin, int64_t end,
                           mls_status *st)
{
    const mls_index_shard *shard = item->tensor->any_shard;
    mls_part part = {.rank = shard->rank, .flat = true};
    size_t count = 1; /* cannot overflow: the index was checked */
    for (int i = 0; i < shard->rank; i++) {
        part.length[i] = shard->shape[i];
        count *= shard->shape[i];
    }
    if (begin < 0 || end < begin || (uint64_t)end > count) {
        return mls_fail(st, MLS_E_VALUE,
                        "elements %lld to %lld do not exist: the tensor has %zu",
                        (long long)begin, (long long)end, count);
    }
    part.begin = (size_t)begin;
    part.end = (size_t)end;
    item->part = part;
    return MLS_OK;
}

/* Check that the target has dtype and shape of the part to load; MLS_E_SHAPE if either
 * differs. */
mls_code mls_load_item_check_target(const mls_load_item *item, const mls_tensor *target,
                                    mls_status *st)
{
    const mls_index_shard *shard = item->tensor->any_shard;
    size_t dims[MLS_LAYOUT_RANK];
    char have[64], want[64];
    const int rank = mls_part_dims(&item->part, dims);
    if (target->dtype == shard->dtype &&
        mls_shape_equal(target->rank, target->shape, rank, dims)) {
        return MLS_OK;
    }
    mls_shape_text(have, sizeof have, rank, dims);
    mls_shape_text(want, sizeof want, target->rank, target->shape);
    mls_fail(st, MLS_E_SHAPE, "the checkpoint has %s of %s, the target is %s of %s",
             mls_dtype_of(shard->dtype)->name, have, mls_dtype_of(target->dtype)->name,
             want);
    return set_shapes(item, have, want, st);
}

/* ---- find stored ranges ---- */

/* Return whether the zeros in the `count` places `stored` (ranges of places without a
 * file) have 64 KiB or more each on average. Pages of zeroed memory inside long ranges
 * are never touched. Between short ranges every page is touched, so zeroing first would
 * be wasted. */
static bool has_long_zeros(const mls_stored_shard *stored, size_t count)
{
    enum { LONG = 64 << 10 };
    size_t bytes = 0, ranges = 0;
    for (size_t j = 0; j < count; j++) {
        for (size_t i = 0; stored[j].file == NULL && i < stored[j].visible_count; i++) {
            bytes += stored[j].visible[i].count * stored[j].item_bytes;
            ranges++;
        }
    }
    return ranges > 0 && bytes / ranges >= LONG;
}

/* Compare the sizes of the files of the `count` places `stored`, in `folder`, with the
 * recorded sizes. Neighbours usually share a file, which is checked once: `*file` is the
 * path of the last checked file, and after a failure the one that differs. `links`:
 * files may be symbolic links. Errors of mls_file_expect. */
static mls_code check_files(const mls_stored_shard *stored, size_t count, int folder,
                            bool links, const char **file, mls_status *st)
{
    for (size_t j = 0; j < count; j++) {
        if (stored[j].file != NULL && stored[j].file != *file) {
            *file = stored[j].file;
            if (mls_file_expect(folder, *file, links, stored[j].file_bytes, st) !=
                MLS_OK) {
                return st->code;
            }
        }
    }
    return MLS_OK;
}

/* List the pieces of all items: each item gets its range `first`, `count` in `pieces`.
 * `piece_count` was an upper bound until now, and becomes their number. After a failure
 * `*file` is the path of the file that was checked last, or NULL. */
mls_code mls_load_plan_find(mls_load_plan *plan, int folder, const char **file,
                            mls_status *st)
{
    size_t used = 0;
    const char *checked = NULL;
    *file = NULL;
    plan->stored = mls_realloc(NULL, plan->piece_count, sizeof *plan->stored);
    plan->parts = mls_realloc(NULL, plan->piece_count, sizeof *plan->parts);
    plan->pieces = mls_realloc(NULL, plan->piece_count, sizeof *plan->pieces);
    if (plan->stored == NULL || plan->parts == NULL || plan->pieces == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to load %zu tensors", plan->count);
    }
    for (size_t i = 0; i < plan->count; i++) {
        mls_load_item *item = &plan->items[i];
        const mls_read_scratch arrays = {plan->stored + used, plan->parts + used,
                                         plan->pieces + used};
        if (mls_requested_part_pieces(plan->merged, item->tensor, &item->part, NULL,
                                      &arrays, &item->count, st) != MLS_OK) {
            *file = checked;
            return st->code;
        }
        item->first = used;
        item->long_zeros = has_long_zeros(plan->stored + used, item->count);
        if (folder >= 0 && check_files(plan->stored + used, item->count, folder,
                                       plan->merged->links, &checked, st) != MLS_OK) {
            *file = checked;
            return st->code;
        }
        used += item->count;
    }
    plan->piece_count = used;
    return MLS_OK;
}

/* Return the size of the item's part in bytes. Cannot overflow: see mls_index_fits. */
size_t mls_load_item_bytes(const mls_load_item *item)
{
    return mls_part_count(&item->part) *
           mls_dtype_of(item->tensor->any_shard->dtype)->item_bytes;
}

/* ---- set destinations ---- */

/* Set the destination of item `i`'s pieces to `data`. Pieces of zeros get NULL if the
 * memory is zero already (`zeroed`) and skipping them saves work: nothing is written
 * then. */
void mls_load_plan_place(mls_load_plan *plan, size_t i, unsigned char *data, bool zeroed)
{
    const mls_load_item *item = &plan->items[i];
    for (size_t j = item->first; j < item->first + item->count; j++) {
        const bool is_zero = plan->stored[j].file == NULL;
        plan->pieces[j].data = zeroed && item->long_zeros && is_zero ? NULL : data;
    }
}

/* Use the address of each item as its placeholder: the read plan only compares addresses
 * (mls_maker). */
void mls_load_plan_foresee(mls_load_plan *plan)
{
    for (size_t i = 0; i < plan->count; i++) {
        mls_load_plan_place(plan, i, (unsigned char *)(uintptr_t)&plan->items[i],
                            true /* zeroed */);
    }
}

/* Move the pieces of item `i` down to piece `*used`, over pieces that are not needed.
 * `*used` then is the end of the kept pieces. */
void mls_load_plan_keep(mls_load_plan *plan, size_t i, size_t *used)
{
    const mls_load_item *item = &plan->items[i];
    if (*used != item->first) {
        memmove(plan->pieces + *used, plan->pieces + item->first,
                item->count * sizeof *plan->pieces);
    }
    *used += item->count;
}

/* Create a target for existing memory. A contiguous view in native byte order receives
 * the bytes directly; any other is copied, and gets a staging block later. */
mls_code mls_load_target_init(mls_load_target *target, const mls_tensor *view,
                              mls_status *st)
{
    *target = (mls_load_target){0};
    if (!view->swapped && mls_tensor_is_contiguous(view)) {
        target->data = view->data;
        return MLS_OK;
    }
    target->strided = mls_alloc(1, sizeof *target->strided);
    if (target->strided == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a view");
    }
    *target->strided = *view;
    return MLS_OK;
}

void mls_load_target_fini(mls_load_target *target)
{
    mls_free(target->strided);
    mls_free(target->block);
    *target = (mls_load_target){0};
}

/* Set each item's destination to its target's memory, or for a strided target to a new
 * staging block, which the target owns, also after a failure. */
mls_code mls_load_plan_place_all(mls_load_plan *plan, mls_load_target *targets,
                                 mls_status *st)
{
    for (size_t i = 0; i < plan->count; i++) {
        mls_load_target *t = &targets[i];
        size_t bytes = 0;
        if (t->strided != NULL) {
            (void)mls_tensor_bytes(t->strided, &bytes); /* fits, being in memory */
            t->block = mls_alloc(bytes, 1);
            if (t->block == NULL) {
                return mls_fail(st, MLS_E_MEMORY, "no memory to read %zu bytes", bytes);
            }
        }
        mls_load_plan_place(plan, i, t->strided == NULL ? t->data : t->block,
                            false /* not zeroed */);
    }
    return MLS_OK;
}

/* Copy each staging block to its strided target; other targets have their bytes already.
 * A block has the target's dtype and shape, so its description cannot be refused. */
void mls_load_plan_scatter(const mls_load_plan *plan, const mls_load_target *targets,
                           const mls_kernels *kernels)
{
    for (size_t i = 0; i < plan->count; i++) {
        const mls_tensor *t = targets[i].strided;
        mls_tensor packed;
        mls_status ignored;
        if (t != NULL && mls_tensor_init(&packed, targets[i].block, t->dtype, t->rank,
                                         t->shape, &ignored) == MLS_OK) {
            mls_copy(kernels, t, &packed, mls_cached());
        }
    }
}
