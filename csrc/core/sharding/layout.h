/* layout: which part of a tensor each rank has, and what two parts have in common.
 *
 * A layout cuts a tensor step by step.  A step along an axis gives each part a range of
 * its indices, ceil(n / parts) of them as long as there are any (as torch.chunk does), so
 * that the last parts may have fewer or none.  A flat step, which can only be the last
 * one, cuts what is left in C order the same way.  With several steps the parts are
 * numbered row-major: the last step counts fastest.
 *   fully sharded, flat chunks    {flat, n}
 *   fully sharded, rows           {axis 0, n}
 *   tensor parallel               {axis k, n}
 *   both                          {axis k, t} {axis 0, n}   or   {axis k, t} {flat, n}
 * An axis may be cut again, as where both go along axis 0: then each part is.
 * No step at all is the whole tensor.
 */
#ifndef MLS_LAYOUT_H
#define MLS_LAYOUT_H

#include "array/tensor.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    MLS_LAYOUT_STEPS = 4,
    MLS_LAYOUT_RANK = 16, /* axes of a tensor: parts are kept by the thousand */
    MLS_LAYOUT_FLAT = -1  /* in place of an axis */
};

typedef struct mls_layout_step {
    int axis; /* 0 .. rank-1, or MLS_LAYOUT_FLAT */
    size_t parts;
} mls_layout_step;

typedef struct mls_layout {
    int count;
    mls_layout_step steps[MLS_LAYOUT_STEPS];
} mls_layout;

/* A part: a box of the tensor and, of the box's elements in C order, those from `begin`
 * to before `end`.  They lie packed, so that element `begin` comes first. */
typedef struct mls_part {
    int rank;
    bool flat; /* a one-dimensional piece of the box; else the whole box in its shape */
    size_t begin, end;
    size_t
        start[MLS_LAYOUT_RANK]; /* here and below, what is beyond the rank is anything */
    size_t length[MLS_LAYOUT_RANK]; /* any may be 0 */
} mls_part;

/* Number of parts.  MLS_E_VALUE: too many steps, no parts, an axis that is negative, a
 * flat step that is not the last.
 * MLS_E_SIZE: more parts than size_t counts.  `*out` is untouched on failure. */
mls_code mls_layout_parts(const mls_layout *layout, size_t *out, mls_status *st);

/* Part `index` of a tensor of `shape`.  As above, and MLS_E_SHAPE: an axis that the
 * tensor lacks, or more than MLS_LAYOUT_RANK of them; MLS_E_VALUE: no such part;
 * MLS_E_SIZE: more elements than size_t counts.  `*out` is untouched on failure. */
mls_code mls_layout_part(const mls_layout *layout, int rank, const size_t *shape,
                         size_t index, mls_part *out, mls_status *st);

/* Cut one part further: it becomes part `index` of those that a step makes of it.  The
 * step is a good one for it: not behind a flat one, along an axis that there is. */
void mls_part_cut(mls_part *part, mls_layout_step step, size_t index);

/* Copy a part, but not its room for more axes, which is most of it. */
void mls_part_copy(mls_part *to, const mls_part *from);

/* Elements of a part. */
size_t mls_part_count(const mls_part *part);

/* Shape of a part's array: of the box, or one dimension if it is flat.  `dims` has room
 * for MLS_LAYOUT_RANK; returns the rank, at least 1 for a flat part. */
int mls_part_dims(const mls_part *part, size_t *dims);

/* Whether two parts of one tensor have the same elements in the same order. */
bool mls_part_equal(const mls_part *a, const mls_part *b);

/* Elements that two parts of one tensor have in common, run by run, in the order in which
 * they lie in `a`.  Start with mls_overlap_init; it cannot fail. */
typedef struct mls_overlap {
    int rank; /* of the box, after axes that both have whole were merged */
    size_t index[MLS_LAYOUT_RANK];
    size_t length[MLS_LAYOUT_RANK];   /* of what the boxes have in common */
    size_t a_stride[MLS_LAYOUT_RANK]; /* in elements of a's box */
    size_t b_stride[MLS_LAYOUT_RANK];
    size_t a_at, b_at; /* of the present row, in elements of the boxes */
    size_t a_begin, a_end, b_begin, b_end; /* no run ends behind a_end */
    bool done;
} mls_overlap;

/* A run: `count` elements that are `from` .. in part a and `to` .. in part b. */
typedef struct mls_run {
    size_t a, b, count;
} mls_run;

/* The two parts are of one shape; neither is kept. */
void mls_overlap_init(mls_overlap *overlap, const mls_part *a, const mls_part *b);

/* The next run, never empty; false after the last.  Runs that go on in both parts are
 * given as one. */
bool mls_overlap_next(mls_overlap *overlap, mls_run *out);

#endif
