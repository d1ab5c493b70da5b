/* layout: which part of a tensor each rank has, and the intersection of two parts.
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

typedef struct mls_layout_step {
    int axis; /* 0 .. rank-1, or MLS_LAYOUT_FLAT */
    size_t parts;
} mls_layout_step;

typedef struct mls_layout {
    int count;
    mls_layout_step steps[MLS_LAYOUT_STEPS];
} mls_layout;

/* Names of the layouts that users ask for, such as "rows"; NULL after the last. */
const char *mls_layout_name(size_t number);

/* Parse a named layout or "axis:K".  "=N" may follow, the parts of its step; without it,
 * `*has_parts` is false and the step has 0.  Numbers have at most nine digits.  False for
 * any other text: `*out` and `*has_parts` are untouched. */
bool mls_layout_parse(mls_str text, mls_layout *out, bool *has_parts);

/* The name of a step that cuts along no axis, such as "flat" for MLS_LAYOUT_FLAT, or
 * NULL. Indexes and mlstate.checkpoint.Layout have it in place of an axis. */
const char *mls_layout_step_name(int axis);

/* The same the other way round; false if the core has no such step. */
bool mls_layout_step_from_name(mls_str name, int *axis);

/* A part: a box of the tensor and, of the box's elements in C order, the range from
 * `begin` to before `end`. The part's array is packed and starts with element `begin`. */
typedef struct mls_part {
    int rank;
    bool flat; /* true: a one-dimensional range of the box; false: the whole box */
    size_t begin, end;
    size_t start[MLS_LAYOUT_RANK];  /* entries beyond `rank` are undefined, also in
                                       `length` */
    size_t length[MLS_LAYOUT_RANK]; /* any may be 0 */
} mls_part;

/* Computes the number of parts. On failure `*out` is unchanged.
 * - MLS_E_VALUE: too many steps, a step with 0 parts, a negative axis, or a flat step
 *   that is not the last.
 * - MLS_E_SIZE: more parts than size_t can count.
 */
mls_code mls_layout_parts(const mls_layout *layout, size_t *out, mls_status *st);

/* Returns whether two layouts have the same steps. */
bool mls_layout_equal(const mls_layout *a, const mls_layout *b);

/* Computes part `index` of a tensor of `shape`. On failure `*out` is unchanged. Errors as
 * for mls_layout_parts, and:
 * - MLS_E_SHAPE: an axis that the tensor does not have, or more than MLS_LAYOUT_RANK
 *   axes.
 * - MLS_E_VALUE: `index` is out of range.
 * - MLS_E_SIZE: more elements than size_t can count.
 */
mls_code mls_layout_part(const mls_layout *layout, int rank, const size_t *shape,
                         size_t index, mls_part *out, mls_status *st);

/* Replaces a part by part `index` of those that a step makes of it. The step must be
 * valid: the part is not flat, and it has the axis. */
void mls_part_cut(mls_part *part, mls_layout_step step, size_t index);

/* Copies a part without its unused entries, which are most of it. */
void mls_part_copy(mls_part *to, const mls_part *from);

/* Returns the elements of a part. */
size_t mls_part_count(const mls_part *part);

/* Computes the shape of a part's array: the box, or one dimension if it is flat. `dims`
 * has room for MLS_LAYOUT_RANK. Returns the rank. */
int mls_part_dims(const mls_part *part, size_t *dims);

/* Returns whether two parts of one tensor have the same elements in the same order. */
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

/* Starts the iteration. The two parts belong to tensors of the same shape; no pointer is
 * kept. */
void mls_overlap_init(mls_overlap *overlap, const mls_part *a, const mls_part *b);

/* Returns the next run, never empty; returns false after the last. Runs that are
 * consecutive in both parts are joined. */
bool mls_overlap_next(mls_overlap *overlap, mls_run *out);

#endif
