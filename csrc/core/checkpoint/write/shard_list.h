/* shard_list: the list of items of a save, with their shapes and memory.
 *
 * Items are kept small: most states have tens of thousands of small arrays, and a full
 * view of each would take a kilobyte. The shapes of all items are copied into one block,
 * since arrays may be reshaped during the save. */
#ifndef MLS_SHARD_LIST_H
#define MLS_SHARD_LIST_H

#include "array/tensor.h"
#include "base/status.h"
#include "checkpoint/write/shard_write.h"
#include "sharding/layout.h"

#include <stddef.h>
#include <stdint.h>

/* Zero it, add items, finish it, and release it with mls_shard_list_fini. */
typedef struct mls_shard_list {
    mls_shard_item *items;
    mls_tensor **views; /* owned view of each item that is not packed, else NULL */
    size_t count, item_room, view_room;
    size_t *dims; /* shapes of all items */
    size_t dims_used, dims_room;
} mls_shard_list;

void mls_shard_list_fini(mls_shard_list *list); /* accepts a zeroed one; zeroes it */

/* Add an item for a tensor with this id and dtype, and the `rank` dimensions `dims`,
 * which are copied. Its `shape` is NULL until the list is finished. The item may move
 * when another is added. Returns NULL on MLS_E_MEMORY, and adds nothing. */
mls_shard_item *mls_shard_list_add(mls_shard_list *list, const mls_tensor_id *id,
                                   mls_dtype dtype, int rank, const size_t *dims,
                                   mls_status *st);

/* Set the memory of the last item. Element `first` of the memory is the first element of
 * the item's part. Borrows the memory. MLS_E_MEMORY. */
mls_code mls_shard_list_set_memory(mls_shard_list *list, const mls_tensor *memory,
                                   size_t first, mls_status *st);

/* Add the items of a replicated array, which every rank holds whole. The array is cut by
 * `layout`, along the parameter's `axes` (mls_layout_project). Part i belongs to rank i
 * modulo `world_size`: all ranks share a tensor of many parts, and the first rank stores
 * a tensor that cannot be cut. If the layout has one part, this rank stores the whole
 * array.
 * Errors of mls_layout_part, with the tensor's name; MLS_E_MEMORY. */
mls_code mls_shard_list_add_whole(mls_shard_list *list, const mls_tensor_id *id,
                                  const mls_tensor *array, const mls_layout *layout,
                                  const signed char *axes, uint64_t rank,
                                  uint64_t world_size, mls_status *st);

/* Check that memory has as many elements as the item's part of a tensor of shape `shape`.
 * The shape of the memory may differ: flat parts are often views of a larger array.
 * `label` names the tensor. MLS_E_SHAPE; errors of mls_layout_part. */
mls_code mls_shard_item_check(const mls_shard_item *item, const size_t *shape,
                              const mls_tensor *memory, const char *label,
                              mls_status *st);

/* Set the `shape` of every item. Nothing may be added afterwards. */
void mls_shard_list_finish(mls_shard_list *list);

#endif
