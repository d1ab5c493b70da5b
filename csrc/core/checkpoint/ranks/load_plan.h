/* load_plan: the parts of tensors that a load wants, what it must read for them, and
 * where the bytes go.
 *
 * A plan borrows its catalog.  It is used in this order: add tensors and choose their
 * parts; find what must be read; place; read its pieces (shard_read.h).
 */
#ifndef MLS_LOAD_PLAN_H
#define MLS_LOAD_PLAN_H

#include "checkpoint/ranks/merged_index.h"
#include "array/copy/copy.h"
#include "sharding/layout.h"
#include "checkpoint/read/shard_read.h"
#include "base/status.h"
#include "checkpoint/storage/stored_ranges.h"
#include "array/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How tensors are cut: by `layout`, into part `index`; without a layout as they were
 * stored, for a world of `world` ranks; or not at all, if `world` is 0 too. */
typedef struct mls_cutting {
    bool has_layout;
    mls_layout layout;
    size_t index;
    size_t world;
} mls_cutting;

/* A part of a tensor that is wanted. */
typedef struct mls_wanted {
    const mls_catalog_tensor *tensor;
    size_t first, count; /* of the plan's pieces */
    bool long_zeros;     /* zeroed memory for the part saves work */
    mls_part part;       /* last: most of it is room that is never touched */
} mls_wanted;

typedef struct mls_load_plan {
    const mls_catalog *catalog;
    mls_wanted *wanted;
    size_t count;
    mls_stored_shard *stored; /* of each piece; NULL until mls_load_plan_find */
    mls_part *parts;
    mls_piece *pieces;
    size_t piece_count;
    size_t last; /* place in the catalog of the tensor added last */
} mls_load_plan;

/* ---- what is wanted ---- */

/* Make a plan with room for `most` tensors.  Gives: free with mls_load_plan_fini.
 * MLS_E_MEMORY: the plan is zeroed. */
mls_code mls_load_plan_init(mls_load_plan *plan, const mls_catalog *catalog, size_t most,
                            mls_status *st);

void mls_load_plan_fini(mls_load_plan *plan); /* accepts a zeroed one; zeroes it */

/* Add the tensor of an id; its part is undefined until one of the functions below chose
 * it.  Fastest if tensors are added in the catalog's order.  NULL: the catalog has no
 * such tensor, and nothing was added. */
mls_wanted *mls_load_plan_add(mls_load_plan *plan, const mls_tensor_id *id);

/* Choose the part that `how` makes of the tensor.  A given layout is that of the
 * parameters: optimizer states are cut along the axes that they share with theirs.
 * Without one, a tensor that was cut once is cut the same way for the new world.
 * MLS_E_VALUE: it was cut in several steps, and no layout says how to cut it now; the
 * status names the tensor.  Other errors as mls_layout_part. */
mls_code mls_wanted_cut(mls_wanted *w, const mls_cutting *how, mls_status *st);

/* Check that the target's whole tensor has the shape of the stored one.  Equal part
 * shapes do not prove that: 3 of 5 rows and 3 of 6 rows look the same. MLS_E_SHAPE: the
 * status has both shapes and names the tensor. */
mls_code mls_wanted_check_whole(const mls_wanted *w, int rank, const size_t *shape,
                                mls_status *st);

/* Choose part `index` of the tensor's own layout, whatever the layout it is stored with.
 * Errors as mls_layout_part. */
mls_code mls_wanted_part(mls_wanted *w, const mls_layout *layout, size_t index,
                         mls_status *st);

/* Choose the elements `begin` .. `end` of the whole tensor, in C order; none is possible.
 * MLS_E_VALUE: it has no such elements. */
mls_code mls_wanted_run(mls_wanted *w, int64_t begin, int64_t end, mls_status *st);

/* Check that a target has exactly the dtype and the shape of the part: loading converts
 * nothing.  MLS_E_SHAPE: the status has both and names the tensor. */
mls_code mls_wanted_check_target(const mls_wanted *w, const mls_tensor *target,
                                 mls_status *st);

/* ---- what must be read ---- */

/* Find the pieces of all parts, and compare the files in `folder` with what the indexes
 * recorded: no memory for the result need be allocated before, since an index may claim
 * terabytes.  `*file` is the file that is not as recorded, else NULL.
 * Errors as mls_catalog_pieces and mls_file_expect; MLS_E_MEMORY. */
mls_code mls_load_plan_find(mls_load_plan *plan, int folder, const char **file,
                            mls_status *st);

/* Bytes of the elements of a part. */
size_t mls_wanted_bytes(const mls_wanted *w);

/* ---- where it goes ---- */

/* Give the pieces of part `i` the memory in which the part lies packed.  `zeroed`: it is
 * zero already if `long_zeros`, so what was never stored goes nowhere. */
void mls_load_plan_place(mls_load_plan *plan, size_t i, unsigned char *data, bool zeroed);

/* Before there is memory: give every piece that will have any some address, which must
 * not be read or written. */
void mls_load_plan_foresee(mls_load_plan *plan);

/* Keep the pieces of part `i` by moving them up to piece `*used`, and count them in it.
 * After the last part set `piece_count` to `*used`: pieces of other parts are left out.
 */
void mls_load_plan_keep(mls_load_plan *plan, size_t i, size_t *used);

/* Memory that exists: packed, or a tensor that is not packed. */
typedef struct mls_load_target {
    unsigned char *data;  /* NULL if `strided` */
    mls_tensor *strided;  /* owned; its memory is borrowed */
    unsigned char *block; /* owned: packed memory for `strided` */
} mls_load_target;

/* Take a view as a target.  MLS_E_MEMORY. */
mls_code mls_load_target_init(mls_load_target *target, const mls_tensor *view,
                              mls_status *st);

void mls_load_target_fini(mls_load_target *target); /* accepts a zeroed one */

/* Place all parts, `targets[i]` for part `i`; those of strided targets go to a block of
 * their own first.  MLS_E_MEMORY. */
mls_code mls_load_plan_place_all(mls_load_plan *plan, mls_load_target *targets,
                                 mls_status *st);

/* After reading: copy the blocks to their strided targets, in their byte order. */
void mls_load_plan_scatter(const mls_load_plan *plan, const mls_load_target *targets,
                           const mls_kernels *kernels);

#endif
