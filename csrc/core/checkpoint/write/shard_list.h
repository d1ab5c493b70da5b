/* shard_list: the items of a save, collected one by one.
 *
 * An item holds what a save needs and no more: most states have tens of thousands of
 * small arrays, and a view of each would take a kilobyte.  The shapes of all items follow
 * one another in one block, since arrays may be given another shape during the save.
 */
#ifndef MLS_SHARD_LIST_H
#define MLS_SHARD_LIST_H

#include "array/tensor.h"
#include "base/status.h"
#include "checkpoint/write/shard_write.h"
#include "sharding/layout.h"

#include <stddef.h>
#include <stdint.h>

/* Zero it, add items, seal it, and release it with mls_shard_list_fini. */
typedef struct mls_shard_list {
    mls_shard_item *items;
    mls_tensor **views; /* of each item that is not packed, owned; else NULL */
    size_t count, item_room, view_room;
    size_t *dims; /* shapes of all items */
    size_t dims_used, dims_room;
} mls_shard_list;

void mls_shard_list_fini(mls_shard_list *list); /* accepts a zeroed one; zeroes it */

/* Add an item for a tensor of shape `dims`; its `shape` is NULL until the list is sealed.
 * NULL: MLS_E_MEMORY, and nothing was added. */
mls_shard_item *mls_shard_list_add(mls_shard_list *list, const mls_tensor_id *id,
                                   mls_dtype dtype, int rank, const size_t *dims,
                                   mls_status *st);

/* Set the memory of the last item, in which element `first` is the first of its part.
 * Borrows the memory.  MLS_E_MEMORY. */
mls_code mls_shard_list_set_memory(mls_shard_list *list, const mls_tensor *memory,
                                   size_t first, mls_status *st);

/* Add the items of an array that all ranks have whole.  It is cut by `layout`, along the
 * parameter's `axes` (mls_layout_project), and the ranks take turns by the number of the
 * part: a tensor of many parts is divided among all, and one that cannot be cut is the
 * first rank's.  A layout of one part makes all of the array this rank's.
 * Errors of mls_layout_part, with the tensor's name; MLS_E_MEMORY. */
mls_code mls_shard_list_add_whole(mls_shard_list *list, const mls_tensor_id *id,
                                  const mls_tensor *array, const mls_layout *layout,
                                  const signed char *axes, uint64_t rank,
                                  uint64_t world_size, mls_status *st);

/* Check that memory has as many elements as the part of a tensor of shape `shape`, in
 * whatever shape: flat parts often are views of something larger.  `what` names the
 * tensor. MLS_E_SHAPE; errors of mls_layout_part. */
mls_code mls_shard_item_check(const mls_shard_item *item, const size_t *shape,
                              const mls_tensor *memory, const char *what, mls_status *st);

/* Point every item to its shape.  Nothing may be added afterwards. */
void mls_shard_list_seal(mls_shard_list *list);

#endif
