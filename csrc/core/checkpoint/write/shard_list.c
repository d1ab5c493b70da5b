/* shard_list: lists the items of a save, such as this rank's parts of a replicated array,
 * and checks their sizes.
 *
 * Three arrays grow together. Until the list is finished, nothing points into them. */
#include "checkpoint/write/shard_list.h"

#include "base/memory.h"
#include "sharding/optimizer_axes.h"

#include <string.h>

/* Ensure room for `more` elements of `size` bytes behind the `used` ones; `*room` is the
 * number of allocated elements. `block` is the address of the array's pointer, which is
 * updated. Returns false if memory runs out; the array is then unchanged. */
static bool ensure_capacity(void *block, size_t size, size_t used, size_t more,
                            size_t *room)
{
    void *old, *larger;
    if (used + more <= *room) {
        return true;
    }
    memcpy(&old, block, sizeof old); /* pointers to any type have the same size */
    larger = mls_realloc(old, 2 * (used + more), size);
    if (larger == NULL) {
        return false;
    }
    memcpy(block, &larger, sizeof larger);
    *room = 2 * (used + more);
    return true;
}

/* Free a list and its views, but not the memory that its items describe. */
void mls_shard_list_fini(mls_shard_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        mls_free(list->views[i]);
    }
    mls_free(list->items);
    mls_free(list->views);
    mls_free(list->dims);
    *list = (mls_shard_list){0};
}

/* Append an item with this id, dtype and shape, but without memory; its `rank` dimensions
 * go to a shared array, which may still move, so `shape` is set later. The result is
 * valid until the next call. */
mls_shard_item *mls_shard_list_add(mls_shard_list *list, const mls_tensor_id *id,
                                   mls_dtype dtype, int rank, const size_t *dims,
                                   mls_status *st)
{
    const size_t count = list->count;
    if (!ensure_capacity(&list->items, sizeof *list->items, count, 1, &list->item_room) ||
        !ensure_capacity(&list->views, sizeof *list->views, count, 1, &list->view_room) ||
        !ensure_capacity(&list->dims, sizeof *list->dims, list->dims_used, (size_t)rank,
                         &list->dims_room)) {
        mls_fail(st, MLS_E_MEMORY, "no memory to save %zu shards", count + 1);
        return NULL;
    }
    for (int i = 0; i < rank; i++) {
        list->dims[list->dims_used++] = dims[i];
    }
    list->views[count] = NULL;
    list->items[count] = (mls_shard_item){.id = *id, .dtype = dtype, .rank = rank};
    return &list->items[list->count++];
}

/* Set the memory of the last item: a pointer if it is contiguous, otherwise an owned
 * view. An array without elements may have a NULL address, which must not look like
 * missing memory. */
mls_code mls_shard_list_set_memory(mls_shard_list *list, const mls_tensor *memory,
                                   size_t first, mls_status *st)
{
    mls_shard_item *item = &list->items[list->count - 1];
    item->first = first;
    if (!memory->swapped && mls_tensor_is_contiguous(memory)) {
        item->data = memory->data != NULL ? memory->data : (const unsigned char *)"";
        return MLS_OK;
    }
    mls_tensor *view = mls_alloc(1, sizeof *view);
    if (view == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to save %zu shards", list->count);
    }
    *view = *memory;
    list->views[list->count - 1] = view;
    item->strided = view;
    return MLS_OK;
}

/* Add the item for part `index` of `layout` of a replicated array of tensor `id`: a view
 * of the part's box, and for a flat part the position of its first element in the box.
 * Errors of mls_layout_part, with the tensor's name; MLS_E_MEMORY. */
static mls_code add_part(mls_shard_list *list, const mls_tensor_id *id,
                         const mls_tensor *array, const mls_layout *layout, size_t index,
                         mls_status *st)
{
    mls_part part;
    if (mls_layout_part(layout, array->rank, array->shape, index, &part, st) != MLS_OK) {
        return mls_status_name(st, id->name.data, id->name.length);
    }
    mls_shard_item *item =
        mls_shard_list_add(list, id, array->dtype, array->rank, array->shape, st);
    if (item == NULL) {
        return st->code;
    }
    mls_tensor box = *array;
    for (int i = 0; i < array->rank; i++) {
        box = mls_tensor_slice(&box, i, part.start[i], part.length[i]);
    }
    item->layout = *layout;
    item->part = index;
    return mls_shard_list_set_memory(list, &box, part.begin, st);
}

/* Add this rank's share of a replicated array: parts `rank`, `rank + world_size`, and so
 * on; all of the array if `layout` has one part. `layout` divides the parameter; `axes`
 * maps the array's axes to the parameter's (NULL: the same). An array that cannot be cut
 * is one part, which rank 0 stores. */
mls_code mls_shard_list_add_whole(mls_shard_list *list, const mls_tensor_id *id,
                                  const mls_tensor *array, const mls_layout *layout,
                                  const signed char *axes, uint64_t rank,
                                  uint64_t world_size, mls_status *st)
{
    mls_layout projected = {0};
    size_t parts = 1, ignored;
    if (mls_layout_parts(layout, &parts, st) != MLS_OK) {
        return st->code;
    }
    if (parts <= 1) {
        return add_part(list, id, array, &projected, 0, st);
    }
    mls_layout_project(layout, 0, array->rank, axes, &projected, &ignored);
    (void)mls_layout_parts(&projected, &parts, st); /* at most as many as `layout` has */
    for (uint64_t part = rank; part < parts; part += world_size) {
        if (add_part(list, id, array, &projected, (size_t)part, st) != MLS_OK) {
            return st->code;
        }
    }
    return MLS_OK;
}

/* Check that `memory` has as many elements as the item's part of a tensor of shape
 * `shape`. `label` names the tensor in the message. */
mls_code mls_shard_item_check(const mls_shard_item *item, const size_t *shape,
                              const mls_tensor *memory, const char *label, mls_status *st)
{
    mls_part part;
    size_t count = 0;
    if (mls_layout_part(&item->layout, item->rank, shape, item->part, &part, st) !=
        MLS_OK) {
        return st->code;
    }
    (void)mls_tensor_count(memory, &count); /* fits: the array is in memory */
    if (count == mls_part_count(&part)) {
        return MLS_OK;
    }
    return mls_fail(st, MLS_E_SHAPE,
                    "%s: the shard has %zu elements, and its part of the tensor %zu",
                    label, count, mls_part_count(&part));
}

/* Point each item of the list to its dimensions, which no longer move. */
void mls_shard_list_finish(mls_shard_list *list)
{
    const size_t *dims = list->dims;
    for (size_t i = 0; i < list->count; i++) {
        list->items[i].shape = dims;
        dims += list->items[i].rank;
    }
}
