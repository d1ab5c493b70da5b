/* align: how the states of an optimizer lie beside their parameter.
 *
 * Most states have their parameter's shape, and are cut as it is.  Factorised ones lack
 * an axis (the rows and columns of Adafactor) or have it only once; counters have none.
 */
#ifndef MLS_ALIGN_H
#define MLS_ALIGN_H

#include "sharding/layout.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>

enum { MLS_NO_AXIS = -1 }; /* an axis of a state that its parameter lacks */

/* Whether a state's axes are not simply its parameter's; then `axes` holds for each of
 * them the parameter's axis, or MLS_NO_AXIS.  Where the shapes allow several answers the
 * state's name decides ("row" or "col" in it), else the first. */
bool mls_align(mls_text state, int rank, const size_t *shape, int parameter_rank,
               const size_t *parameter_shape, signed char *axes);

/* The layout of a tensor whose parameter is cut by `layout`, and which of its parts goes
 * with part `index` of the parameter.  Steps along axes that the tensor lacks are left
 * out: every part of the parameter has all of that.  `axes` NULL: the parameter's own;
 * a flat step only cuts what has those. */
void mls_layout_project(const mls_layout *layout, size_t index, int rank,
                        const signed char *axes, mls_layout *out, size_t *out_index);

#endif
