/* optimizer_axes: how the axes of an optimizer state correspond to its parameter's axes.
 *
 * Most states have their parameter's shape and are sharded like it. Factorised states
 * lack an axis (row and column statistics of Adafactor) or have it with length 1.
 * Counters have no axes.
 */
#ifndef MLS_OPTIMIZER_AXES_H
#define MLS_OPTIMIZER_AXES_H

#include "base/string_view.h"
#include "sharding/layout.h"

#include <stdbool.h>
#include <stddef.h>

enum { MLS_NO_AXIS = -1 }; /* the state's axis corresponds to no axis of the parameter */

/* Return whether the axes of the optimizer state named `state` differ from its
 * parameter's. If so, set axes[i] for each axis i of the state to the parameter's axis,
 * or to MLS_NO_AXIS. Returns false too for a state without axes. If the shapes allow
 * several answers, the state's name decides ("row" or "col" in it); otherwise the first
 * candidate is used, beginning with the last axis. */
bool mls_optimizer_axes(mls_str state, int rank, const size_t *shape, int parameter_rank,
                        const size_t *parameter_shape, signed char *axes);

/* Set `*out` to the layout of a tensor whose parameter is divided by `layout`, and
 * `*out_index` to the number of its part that corresponds to part number `index` of the
 * parameter. `rank` is the number of the tensor's axes, and axes[i] the parameter's axis
 * for axis i (from mls_optimizer_axes); NULL if the tensor has the parameter's own axes.
 * Steps along axes that the tensor lacks are dropped, because every part of the parameter
 * needs all of the tensor there. A flat step is kept only if `axes` is NULL and `rank` is
 * above 0. */
void mls_layout_project(const mls_layout *layout, size_t index, int rank,
                        const signed char *axes, mls_layout *out, size_t *out_index);

#endif
