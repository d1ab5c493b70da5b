/* load_plan: the parts of tensors to load, the stored ranges to read for them, and their
 * destinations.
 *
 * A plan borrows its merged index. Use it in this order: add tensors and choose their
 * parts, find the stored ranges, set destinations, read the pieces (shard_read.h). */
#ifndef MLS_LOAD_PLAN_H
#define MLS_LOAD_PLAN_H

#include "array/copy/copy.h"
#include "array/tensor.h"
#include "base/status.h"
#include "checkpoint/ranks/merged_index.h"
#include "checkpoint/read/shard_read.h"
#include "checkpoint/storage/stored_ranges.h"
#include "sharding/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How to cut a tensor: into part `index` of `layout`. Without a layout, the stored one
 * divides it among `world` ranks instead; `world` 0: load the whole tensor. */
typedef struct mls_cutting {
    bool has_layout;
    mls_layout layout;
    size_t index;
    size_t world;
} mls_cutting;

/* A part of a tensor to load. */
typedef struct mls_load_item {
    const mls_merged_index_tensor *tensor;
    size_t first, count; /* its range in the plan's pieces */
    bool long_zeros;     /* zeroed destination memory saves work */
    mls_part part;       /* last member: most of it is usually unused and never touched */
} mls_load_item;

typedef struct mls_load_plan {
    const mls_merged_index *merged;
    mls_load_item *items;
    size_t count;
    /* One element of each for each piece, as of mls_read_scratch; NULL until
     * mls_load_plan_find. */
    mls_stored_shard *stored;
    mls_part *parts;
    mls_read_piece *pieces;
    size_t piece_count; /* an upper bound until then */
    size_t last;        /* position in the merged index of the tensor added last */
} mls_load_plan;

/* ---- choose parts ---- */

/* Create a plan for at most `most` tensors. Gives: free with mls_load_plan_fini.
 * MLS_E_MEMORY: the plan is zeroed. */
mls_code mls_load_plan_init(mls_load_plan *plan, const mls_merged_index *merged,
                            size_t most, mls_status *st);

void mls_load_plan_fini(mls_load_plan *plan); /* accepts a zeroed one; zeroes it */

/* Add a tensor. Its part is undefined until one of the functions below chooses it. Adding
 * in the order of the merged index is fastest. Returns NULL, and adds nothing, if the
 * merged index has no such tensor. */
mls_load_item *mls_load_plan_add(mls_load_plan *plan, const mls_tensor_id *id);

/* Choose the part that `how` selects. A given layout divides the parameter; an
 * optimizer state is cut along the axes that it shares with its parameter. Without a
 * layout, a tensor that was cut in one step is cut in the same way for the new world, and
 * a tensor that was stored whole stays whole.
 * MLS_E_VALUE: the tensor was cut in several steps and no layout is given; the status
 * names the tensor. Other errors as mls_layout_part. */
mls_code mls_load_item_select(mls_load_item *item, const mls_cutting *how,
                              mls_status *st);

/* Check that the target's whole tensor, of `rank` dimensions `shape`, has the shape of
 * the stored one. Equal part shapes do not prove that: 3 of 5 rows and 3 of 6 rows have
 * the same shape. MLS_E_SHAPE: the status contains both shapes and the tensor's name. */
mls_code mls_load_item_check_full(const mls_load_item *item, int rank,
                                  const size_t *shape, mls_status *st);

/* Choose part `index` of `layout`, independent of the stored layout. Errors as
 * mls_layout_part. */
mls_code mls_load_item_part(mls_load_item *item, const mls_layout *layout, size_t index,
                            mls_status *st);

/* Choose the elements `begin` .. `end` of the whole tensor in C order; the range may be
 * empty. MLS_E_VALUE: it is outside the tensor. */
mls_code mls_load_item_run(mls_load_item *item, int64_t begin, int64_t end,
                           mls_status *st);

/* Check that a target has the dtype and shape of the part: loading converts nothing.
 * MLS_E_SHAPE: the status contains both and the tensor's name. */
mls_code mls_load_item_check_target(const mls_load_item *item, const mls_tensor *target,
                                    mls_status *st);

/* ---- find stored ranges ---- */

/* Find the pieces of all parts, and compare the files in `folder`, a file descriptor,
 * with the sizes in the indexes; -1: no files are compared. Call this before allocating
 * destinations, since a damaged index may claim terabytes. After a failure `*file` is the
 * path of the file that does not match, or of the last one that was compared; NULL: none
 * was. Errors as mls_requested_part_pieces and mls_file_expect; MLS_E_MEMORY. */
mls_code mls_load_plan_find(mls_load_plan *plan, int folder, const char **file,
                            mls_status *st);

/* Return the bytes of the item's part, packed. */
size_t mls_load_item_bytes(const mls_load_item *item);

/* ---- set destinations ---- */

/* Set the destination of part `i`: memory that receives the packed part. If `zeroed`, the
 * memory is already zero when `long_zeros` is set, so pieces of zeros write nothing. */
void mls_load_plan_place(mls_load_plan *plan, size_t i, unsigned char *data, bool zeroed);

/* Set placeholder destinations before memory is allocated. The addresses must not be read
 * or written. */
void mls_load_plan_foresee(mls_load_plan *plan);

/* Keep the pieces of part `i`, and overwrite dropped ones: move them down to piece
 * `*used`, and add their number to it. Call it for the parts to keep in ascending order,
 * with `*used` 0 at first, then set `piece_count` to `*used`. The items' ranges are out
 * of date then. */
void mls_load_plan_keep(mls_load_plan *plan, size_t i, size_t *used);

/* Existing destination memory: packed, or a strided tensor. */
typedef struct mls_load_target {
    unsigned char *data;  /* NULL if `strided` */
    mls_tensor *strided;  /* owned; its data is borrowed */
    unsigned char *block; /* owned packed staging memory for `strided` */
} mls_load_target;

/* Create a target for a view. MLS_E_MEMORY. */
mls_code mls_load_target_init(mls_load_target *target, const mls_tensor *view,
                              mls_status *st);

void mls_load_target_fini(mls_load_target *target); /* accepts a zeroed one */

/* Set the destinations of all parts: `targets[i]` for part `i`. Strided targets get a
 * packed staging block. MLS_E_MEMORY. */
mls_code mls_load_plan_place_all(mls_load_plan *plan, mls_load_target *targets,
                                 mls_status *st);

/* After reading, copy the staging blocks to their strided targets, in the targets' byte
 * order. */
void mls_load_plan_scatter(const mls_load_plan *plan, const mls_load_target *targets,
                           const mls_kernels *kernels);

#endif
