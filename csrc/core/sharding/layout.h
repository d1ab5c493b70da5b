/* layout: layouts (steps along axes, or flat), the parts that they make, and the limits
 * of both.
 *
 * A layout divides a tensor in steps. A step along an axis gives each part a range of
 * ceil(n / parts) indices, as torch.chunk does, so the last parts may be shorter or
 * empty. A flat step, which must be the last one, divides the remaining elements in C
 * order the same way. With several steps, parts are numbered row-major: the last step
 * varies fastest.
 *     fully sharded, flat chunks    {flat, n}
 *     fully sharded, rows           {axis 0, n}
 *     tensor parallel               {axis k, n}
 *     both                          {axis k, t} {axis 0, n}   or   {axis k, t} {flat, n}
 * Several steps may divide the same axis (for example if both use axis 0): each divides
 * the parts of the step before. A layout without steps is the whole tensor.
 */
#ifndef MLS_LAYOUT_H
#define MLS_LAYOUT_H

#include "array/tensor.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    MLS_LAYOUT_STEPS = 4,
    MLS_LAYOUT_RANK = 16, /* axes of a tensor; small, since thousands of parts are kept */
    MLS_LAYOUT_FLAT = -1  /* used instead of an axis */
};

/* One division of a tensor, or of the parts that the steps before it made. */
typedef struct mls_layout_step {
    int axis;     /* the axis that is cut, 0 .. rank - 1, or MLS_LAYOUT_FLAT */
    size_t parts; /* parts that each part becomes */
} mls_layout_step;

typedef struct mls_layout {
    int count; /* steps, 0 to MLS_LAYOUT_STEPS */
    mls_layout_step steps[MLS_LAYOUT_STEPS];
} mls_layout;

/* Return the name of layout number `number`, such as "rows", of those that users ask for
 * by name; NULL after the last. */
const char *mls_layout_name(size_t number);

/* Parse the name of a layout or "axis:K" to a layout of at most one step. "=N" may
 * follow, the parts of the step; without it, `*has_parts` is false and the step has 0
 * parts. Numbers have at most nine digits. Returns false for any other text: `*out` and
 * `*has_parts` are untouched. */
bool mls_layout_parse(mls_str text, mls_layout *out, bool *has_parts);

/* Return the name of a step that cuts along no axis, such as "flat" for MLS_LAYOUT_FLAT;
 * NULL for a real axis. Indexes and mlstate.checkpoint.Layout have this name in place of
 * an axis. */
const char *mls_layout_step_name(int axis);

/* Set `*axis` to the negative number of the step with this name, such as MLS_LAYOUT_FLAT.
 * Returns false if the core has no such step. */
bool mls_layout_step_from_name(mls_str name, int *axis);

/* A part of a tensor: a box (a range of indices along each axis) and, of the box's
 * elements in C order, those with numbers begin .. end - 1. The part's array has these
 * elements without gaps. */
typedef struct mls_part {
    int rank;
    bool flat; /* true: a one-dimensional range of the box; false: the whole box */
    size_t begin, end;
    size_t start[MLS_LAYOUT_RANK];  /* entries beyond `rank` are undefined, also in
                                       `length` */
    size_t length[MLS_LAYOUT_RANK]; /* any may be 0 */
} mls_part;

/* Set `*out` to the number of parts, the product over all steps. On failure it is
 * unchanged.
 * - MLS_E_VALUE: too many steps, a step with 0 parts, a negative axis, or a flat step
 *   that is not the last.
 * - MLS_E_SIZE: more parts than size_t can count.
 */
mls_code mls_layout_parts(const mls_layout *layout, size_t *out, mls_status *st);

/* Return whether two layouts have the same steps in the same order. */
bool mls_layout_equal(const mls_layout *a, const mls_layout *b);

/* Set `*out` to part number `index` of a tensor with `rank` axes of the lengths `shape`.
 * On failure it is unchanged. Errors as for mls_layout_parts, and:
 * - MLS_E_SHAPE: an axis that the tensor does not have, or more than MLS_LAYOUT_RANK
 *   axes.
 * - MLS_E_VALUE: `index` is out of range.
 * - MLS_E_SIZE: more elements than size_t can count.
 */
mls_code mls_layout_part(const mls_layout *layout, int rank, const size_t *shape,
                         size_t index, mls_part *out, mls_status *st);

/* Replace a part by one of the parts that `step` makes of it: number `index`, below
 * step.parts. The step must be valid: the part is not flat, and it has the axis. */
void mls_part_cut(mls_part *part, mls_layout_step step, size_t index);

/* Copy a part without its unused entries, which are most of it. */
void mls_part_copy(mls_part *to, const mls_part *from);

/* Return the number of elements of a part. */
size_t mls_part_count(const mls_part *part);

/* Set `dims` to the shape of a part's array: the box, or one dimension if it is flat.
 * `dims` has room for MLS_LAYOUT_RANK lengths. Returns the number of dimensions. */
int mls_part_dims(const mls_part *part, size_t *dims);

/* Return whether two parts of one tensor have the same elements in the same order. */
bool mls_part_equal(const mls_part *a, const mls_part *b);

/* Iterates over the common elements of two parts of one tensor, run by run, in the order
 * of `a`. Start with mls_overlap_init, which cannot fail. */
typedef struct mls_overlap {
    int rank; /* of the box, after merging axes that both parts have whole */
    size_t index[MLS_LAYOUT_RANK];
    size_t length[MLS_LAYOUT_RANK];   /* of the intersection of the boxes */
    size_t a_stride[MLS_LAYOUT_RANK]; /* in elements of a's box */
    size_t b_stride[MLS_LAYOUT_RANK];
    size_t a_at, b_at; /* start of the current row, in elements of the boxes */
    size_t a_begin, a_end, b_begin,
        b_end; /* the flat ranges; a_end is lowered to the last common element */
    bool done;
} mls_overlap;

/* A run of `count` elements, at positions `a` and `b` of the two parts' arrays. */
typedef struct mls_run {
    size_t a, b, count;
} mls_run;

/* Start the iteration over the elements that `a` and `b` share. The two parts belong to
 * tensors of the same shape; no pointer is kept. */
void mls_overlap_init(mls_overlap *overlap, const mls_part *a, const mls_part *b);

/* Set `*out` to the next run of shared elements, never empty; returns false after the
 * last. Runs that are consecutive in both parts are joined. */
bool mls_overlap_next(mls_overlap *overlap, mls_run *out);

#endif
