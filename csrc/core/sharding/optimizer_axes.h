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

/* Returns whether a state's axes differ from its parameter's. If so, `axes` receives for
 * each axis of the state the parameter's axis, or MLS_NO_AXIS. If the shapes allow
 * several answers, the state's name decides ("row" or "col" in it); otherwise the first
 * candidate is used, beginning with the last axis. */
bool mls_optimizer_axes(mls_str state, int rank, const size_t *shape, int parameter_rank,
                        const size_t *parameter_shape, signed char *axes);

/* Computes the layout of a tensor whose parameter is divided by `layout`, and the part of
 * it that corresponds to part `index` of the parameter. Steps along axes that the tensor
 * lacks are dropped, because every part of the parameter needs all of the tensor there.
 * `axes` is NULL if the tensor has the parameter's own axes; only then is a flat step
 * kept. */
void mls_layout_project(const mls_layout *layout, size_t index, int rank,
                        const signed char *axes, mls_layout *out, size_t *out_index);

#endif
