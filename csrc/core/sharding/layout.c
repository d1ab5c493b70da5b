/* layout: which part of a tensor each rank has, also of uneven axes; texts of layouts;
 * elements that two parts share.
 *
 * The intersection of two boxes is a box. It is visited row by row: along a row, the
 * positions in both parts grow by one, so a flat range of either part cuts a row only at
 * its ends. Inner axes that both boxes contain whole are merged first, which makes the
 * rows as long as possible.
 *
 * No function here allocates. No product overflows after mls_layout_part has checked the
 * tensor's element count: every later product is of lengths within that tensor.
 */
#include "sharding/layout.h"

#include "base/size.h"

#include <string.h>

/* ---- names ---- */

/* Every layout with a name: its steps, at most one, and the axis that the step cuts. */
static const struct {
    const char *name;
    int count;
    int axis;
} names[] = {
    {"rows", 1, 0},
    {"flat", 1, MLS_LAYOUT_FLAT},
    {"whole", 0, 0},
};

enum { NAMES = sizeof names / sizeof names[0], MOST_DIGITS = 9 };

const char *mls_layout_name(size_t number)
{
    return number < NAMES ? names[number].name : NULL;
}

/* Return the name of a step without an axis, or NULL. Steps along an axis have no name,
 * so only names with a negative `axis` are compared. */
const char *mls_layout_step_name(int axis)
{
    for (size_t i = 0; axis < 0 && i < NAMES; i++) {
        if (names[i].count > 0 && names[i].axis == axis) {
            return names[i].name;
        }
    }
    return NULL;
}

/* Set `*axis` to the negative number of a step's name; false: unknown. Names of layouts
 * with a real axis, such as "rows", do not name a step. */
bool mls_layout_step_from_name(mls_str name, int *axis)
{
    for (size_t i = 0; i < NAMES; i++) {
        if (names[i].count > 0 && names[i].axis < 0 && mls_str_is(name, names[i].name)) {
            *axis = names[i].axis;
            return true;
        }
    }
    return false;
}

/* Set `*out` to a number of 1 to MOST_DIGITS digits; false: the text is something else.
 * So many digits always fit an int. */
static bool parse_number(mls_str text, int *out)
{
    int number = 0;
    for (size_t i = 0; i < text.length; i++) {
        if (text.data[i] < '0' || text.data[i] > '9' || i == MOST_DIGITS) {
            return false;
        }
        number = 10 * number + (text.data[i] - '0');
    }
    *out = number;
    return text.length > 0;
}

/* Set `*out` to the layout with this name, or of one step for "axis:K", with 0 parts;
 * false: the text is something else. */
static bool parse_layout_name(mls_str text, mls_layout *out)
{
    static const char prefix[] = "axis:";
    const size_t length = sizeof prefix - 1;
    for (size_t i = 0; i < NAMES; i++) {
        if (mls_str_is(text, names[i].name)) {
            *out = (mls_layout){.count = names[i].count, .steps = {{names[i].axis, 0}}};
            return true;
        }
    }
    int axis;
    if (!mls_str_starts(text, (mls_str){prefix, length}) ||
        !parse_number((mls_str){text.data + length, text.length - length}, &axis)) {
        return false;
    }
    *out = (mls_layout){.count = 1, .steps = {{axis, 0}}};
    return true;
}

/* Parse a text such as "axis:0=4" to a layout. Split the text at the first '='. A layout
 * without steps cannot have a number of parts. */
bool mls_layout_parse(mls_str text, mls_layout *out, bool *has_parts)
{
    mls_layout layout;
    int parts = 0;
    const char *sign = text.length == 0 ? NULL : memchr(text.data, '=', text.length);
    const size_t length = sign == NULL ? text.length : (size_t)(sign - text.data);
    if (!parse_layout_name((mls_str){text.data, length}, &layout)) {
        return false;
    }
    if (sign != NULL) {
        const mls_str rest = {sign + 1, text.length - length - 1};
        if (layout.count == 0 || !parse_number(rest, &parts)) {
            return false;
        }
        layout.steps[0].parts = (size_t)parts;
    }
    *out = layout;
    *has_parts = sign != NULL;
    return true;
}

/* ---- parts ---- */

/* Check step number `number`, independently of a tensor; the earlier steps are valid.
 * Whether a tensor has the axis is checked later (check_shape), because one layout serves
 * many tensors. MLS_E_VALUE. */
static mls_code check_step(const mls_layout *layout, int number, mls_status *st)
{
    const mls_layout_step step = layout->steps[number];
    if (step.parts == 0) {
        return mls_fail(st, MLS_E_VALUE, "step %d of the layout has no parts", number);
    }
    if (step.axis == MLS_LAYOUT_FLAT) {
        return number == layout->count - 1
                   ? MLS_OK
                   : mls_fail(st, MLS_E_VALUE, "a flat step must be the layout's last");
    }
    if (step.axis < 0) {
        return mls_fail(st, MLS_E_VALUE, "step %d of the layout has axis %d", number,
                        step.axis);
    }
    return MLS_OK;
}

/* Compute the number of parts. The only check of a layout that needs no tensor. */
mls_code mls_layout_parts(const mls_layout *layout, size_t *out, mls_status *st)
{
    size_t parts = 1;
    if (layout->count < 0 || layout->count > MLS_LAYOUT_STEPS) {
        return mls_fail(st, MLS_E_VALUE, "a layout has 0 to %d steps, not %d",
                        (int)MLS_LAYOUT_STEPS, layout->count);
    }
    for (int i = 0; i < layout->count; i++) {
        const mls_code code = check_step(layout, i, st);
        if (code != MLS_OK) {
            return code;
        }
        if (!mls_size_mul(parts, layout->steps[i].parts, &parts)) {
            return mls_fail(st, MLS_E_SIZE,
                            "the layout has more parts than can be counted");
        }
    }
    *out = parts;
    return MLS_OK;
}

/* Compare the steps one by one, after their numbers. */
bool mls_layout_equal(const mls_layout *a, const mls_layout *b)
{
    bool same = a->count == b->count;
    for (int i = 0; same && i < a->count; i++) {
        same = a->steps[i].axis == b->steps[i].axis &&
               a->steps[i].parts == b->steps[i].parts;
    }
    return same;
}

/* Set `*start` and `*length` to the range of part number `index` if `count` elements are
 * divided into `parts` parts. Matches torch.chunk, so that a part made by torch's own
 * sharding is the same part here. Empty parts start at `count`, which is within
 * bounds. */
static void compute_range(size_t count, size_t parts, size_t index, size_t *start,
                          size_t *length)
{
    const size_t part_length = count / parts + (count % parts != 0 ? 1 : 0);
    /* `index` is below `parts`, so the product exceeds the count by less than one part;
     * the division rules out overflow */
    const size_t first =
        part_length == 0 || index > count / part_length ? count : index * part_length;
    *start = first < count ? first : count;
    *length = count - *start < part_length ? count - *start : part_length;
}

/* Return the number of elements of a part's box; 1 for a scalar. */
static size_t box_count(const mls_part *part)
{
    size_t count = 1;
    for (int axis = 0; axis < part->rank; axis++) {
        count *=
            part->length[axis]; /* cannot overflow: the tensor's elements were counted */
    }
    return count;
}

/* Check that the elements of a tensor with `rank` axes can be counted (MLS_E_SIZE), and
 * that it has the axes of the layout (MLS_E_SHAPE). */
static mls_code check_shape(const mls_layout *layout, int rank, const size_t *shape,
                            mls_status *st)
{
    size_t count = 1;
    for (int axis = 0; axis < rank; axis++) {
        if (!mls_size_mul(count, shape[axis] == 0 ? 1 : shape[axis], &count)) {
            return mls_fail(st, MLS_E_SIZE,
                            "the tensor has more elements than can be counted");
        }
    }
    for (int i = 0; i < layout->count; i++) {
        if (layout->steps[i].axis >= rank) {
            return mls_fail(st, MLS_E_SHAPE, "the layout cuts axis %d of %d dimensions",
                            layout->steps[i].axis, rank);
        }
    }
    return MLS_OK;
}

/* Copy a part. Copy only used entries: thousands of parts are copied, and most of a part
 * is unused room for axes. */
void mls_part_copy(mls_part *to, const mls_part *from)
{
    to->rank = from->rank;
    to->flat = from->flat;
    to->begin = from->begin;
    to->end = from->end;
    for (int axis = 0; axis < from->rank; axis++) {
        to->start[axis] = from->start[axis];
        to->length[axis] = from->length[axis];
    }
}

/* Replace a part by one of the parts that a step makes of it. An empty part is at the end
 * of its axis or box. */
void mls_part_cut(mls_part *part, mls_layout_step step, size_t index)
{
    size_t start, length;
    if (step.axis == MLS_LAYOUT_FLAT) {
        compute_range(box_count(part), step.parts, index, &part->begin, &length);
        part->end = part->begin + length;
        part->flat = true;
        return;
    }
    compute_range(part->length[step.axis], step.parts, index, &start, &length);
    part->length[step.axis] = length;
    part->start[step.axis] += start;
    part->end = box_count(part);
}

/* Compute one part of a tensor. Start with the whole tensor; each step narrows the box or
 * picks a range of its elements. */
mls_code mls_layout_part(const mls_layout *layout, int rank, const size_t *shape,
                         size_t index, mls_part *out, mls_status *st)
{
    size_t parts;
    mls_code code = mls_layout_parts(layout, &parts, st);
    if (code != MLS_OK) {
        return code;
    }
    if (rank < 0 || rank > MLS_LAYOUT_RANK) {
        return mls_fail(st, MLS_E_SHAPE, "%d dimensions: at most %d are possible", rank,
                        (int)MLS_LAYOUT_RANK);
    }
    if (index >= parts) {
        return mls_fail(st, MLS_E_VALUE, "part %zu of %zu does not exist", index, parts);
    }
    if ((code = check_shape(layout, rank, shape, st)) != MLS_OK) {
        return code;
    }
    /* the whole tensor; no failure is possible below */
    out->rank = rank;
    out->flat = false;
    out->begin = 0;
    for (int axis = 0; axis < rank; axis++) {
        out->start[axis] = 0;
        out->length[axis] = shape[axis];
    }
    out->end = box_count(out);
    /* each step divides the result of the one before; `parts` becomes the number of parts
     * that the later steps make of each */
    for (int i = 0; i < layout->count; i++) {
        const mls_layout_step step = layout->steps[i];
        parts /= step.parts;
        mls_part_cut(out, step, index / parts % step.parts);
    }
    return MLS_OK;
}

/* Compute the shape of a part's array. A flat part is one-dimensional, for any rank of
 * the tensor. */
int mls_part_dims(const mls_part *part, size_t *dims)
{
    if (part->flat) {
        dims[0] = mls_part_count(part);
        return 1;
    }
    for (int i = 0; i < part->rank; i++) {
        dims[i] = part->length[i];
    }
    return part->rank;
}

/* Holds for unflattened parts too: `begin` and `end` then span the box. */
size_t mls_part_count(const mls_part *part)
{
    return part->end - part->begin;
}

/* Return whether two parts have the same elements. `flat` is not compared: it does not
 * change the elements. */
bool mls_part_equal(const mls_part *a, const mls_part *b)
{
    bool same = a->begin == b->begin && a->end == b->end;
    for (int i = 0; same && i < a->rank; i++) {
        same = a->start[i] == b->start[i] && a->length[i] == b->length[i];
    }
    return same;
}

/* ---- overlap ---- */

/* Return the number of indices along an axis that two boxes have in common, 0 for none,
 * and set `*start` to the first of them. */
static size_t intersect_axis(const mls_part *a, const mls_part *b, int axis,
                             size_t *start)
{
    const size_t a_end = a->start[axis] + a->length[axis];
    const size_t b_end = b->start[axis] + b->length[axis];
    const size_t end = a_end < b_end ? a_end : b_end;
    *start = a->start[axis] > b->start[axis] ? a->start[axis] : b->start[axis];
    return end > *start ? end - *start : 0;
}

/* Advance to the last row that starts at or before element `begin` of one part; `at` is
 * the start of the current row in that part, and `stride` the part's strides. Rows ascend
 * and do not overlap, so every skipped row ends before `begin` too. */
static void skip_rows(mls_overlap *o, size_t at, size_t begin, const size_t *stride)
{
    size_t rest = begin > at ? begin - at : 0; /* elements to skip at most */
    for (int axis = 0; axis < o->rank - 1; axis++) {
        const size_t left = o->length[axis] - 1 - o->index[axis];
        const size_t rows = rest / stride[axis] < left ? rest / stride[axis] : left;
        o->index[axis] += rows;
        o->a_at += rows * o->a_stride[axis];
        o->b_at += rows * o->b_stride[axis];
        rest -= rows * stride[axis];
    }
}

/* Return the end, as a position in `a`, of the common elements that precede b's end:
 * within the last row that starts before b's end, or at the end of that row. */
static size_t find_end_by_b(const mls_overlap *o)
{
    size_t rest = o->b_end > o->b_at ? o->b_end - o->b_at : 0, at = o->a_at;
    for (int axis = 0; axis < o->rank - 1 && rest > 0; axis++) {
        /* the row with b's last element, if the box reaches that far */
        const size_t last = o->length[axis] - 1, end_row = (rest - 1) / o->b_stride[axis];
        const size_t row = end_row < last ? end_row : last;
        at += row * o->a_stride[axis];
        rest -= row * o->b_stride[axis];
    }
    const size_t length = o->length[o->rank - 1];
    return at + (rest < length ? rest : length);
}

/* Restrict the iteration to the rows within both flat ranges, so that a small part of a
 * large tensor costs only its own rows. */
static void skip_outside_rows(mls_overlap *o)
{
    const size_t end = find_end_by_b(o);
    o->a_end = end < o->a_end ? end : o->a_end;
    skip_rows(o, o->a_at, o->a_begin, o->a_stride);
    skip_rows(o, o->b_at, o->b_begin, o->b_stride);
}

/* Start the iteration over common elements. Visit the axes from the innermost outwards.
 * An axis is merged into the axis outside it if both boxes contain it, and all axes
 * inside it, whole. The innermost axis always merges with the initial axis of one
 * element, so at most a->rank axes remain (one for a scalar). */
void mls_overlap_init(mls_overlap *overlap, const mls_part *a, const mls_part *b)
{
    size_t a_stride = 1, b_stride = 1;
    mls_overlap *o = overlap; /* filled in place: most of it stays unused */
    o->a_begin = a->begin;
    o->a_end = a->end;
    o->b_begin = b->begin;
    o->b_end = b->end;
    o->a_at = o->b_at = 0;
    o->rank = 0;
    o->done = false;
    size_t length[MLS_LAYOUT_RANK + 1], a_strides[MLS_LAYOUT_RANK + 1],
        b_strides[MLS_LAYOUT_RANK + 1];
    /* initial axis: one element, into which the innermost axis is merged */
    length[0] = a_strides[0] = b_strides[0] = 1;
    int axes = 1;
    for (int axis = a->rank - 1; axis >= 0; axis--) {
        size_t start;
        const size_t shared = intersect_axis(a, b, axis, &start);
        /* empty along one axis means an empty intersection */
        o->done = o->done || shared == 0;
        o->a_at += (start - a->start[axis]) * a_stride;
        o->b_at += (start - b->start[axis]) * b_stride;
        /* if the inner axis spans as many elements as this stride, no gap follows */
        const size_t inside = length[axes - 1] * a_strides[axes - 1];
        const size_t b_inside = length[axes - 1] * b_strides[axes - 1];
        if (inside == a_stride && b_inside == b_stride) {
            length[axes - 1] *= shared; /* continues where the inner axis ends */
        } else {
            length[axes] = shared;
            a_strides[axes] = a_stride;
            b_strides[axes++] = b_stride;
        }
        a_stride *= a->length[axis];
        b_stride *= b->length[axis];
    }
    /* outermost first, the order of iteration */
    for (int i = axes - 1; i >= 0; i--) {
        o->index[o->rank] = 0;
        o->length[o->rank] = length[i];
        o->a_stride[o->rank] = a_strides[i];
        o->b_stride[o->rank++] = b_strides[i];
    }
    if (!o->done) {
        skip_outside_rows(o);
    }
}

/* Advance to the next row that the boxes share, like an odometer over all axes but the
 * last, and update its positions in both parts. Sets `done` after the last row. */
static void next_row(mls_overlap *o)
{
    for (int axis = o->rank - 2; axis >= 0; axis--) {
        o->a_at += o->a_stride[axis];
        o->b_at += o->b_stride[axis];
        if (++o->index[axis] < o->length[axis]) {
            return;
        }
        o->a_at -= o->a_stride[axis] * o->length[axis];
        o->b_at -= o->b_stride[axis] * o->length[axis];
        o->index[axis] = 0;
    }
    o->done = true;
}

/* Set `*out` to the elements of the current row within both flat ranges; returns false if
 * none is left. Positions in the run count from the start of each part's range. */
static bool clip_row(const mls_overlap *o, mls_run *out)
{
    /* `skip` elements precede one of the ranges; the row ends after `keep` elements */
    const size_t length = o->length[o->rank - 1];
    size_t keep = length;
    size_t skip = o->a_begin > o->a_at ? o->a_begin - o->a_at : 0;
    const size_t b_skip = o->b_begin > o->b_at ? o->b_begin - o->b_at : 0;
    skip = b_skip > skip ? b_skip : skip;
    const size_t a_left = o->a_end > o->a_at ? o->a_end - o->a_at : 0;
    const size_t b_left = o->b_end > o->b_at ? o->b_end - o->b_at : 0;
    keep = a_left < keep ? a_left : keep;
    keep = b_left < keep ? b_left : keep;
    if (skip >= keep) {
        return false;
    }
    *out = (mls_run){.a = o->a_at + skip - o->a_begin,
                     .b = o->b_at + skip - o->b_begin,
                     .count = keep - skip};
    return true;
}

/* Set `*out` to the next run of common elements; false: none is left. Join rows that are
 * consecutive in both parts, so that many small rows become few large reads. */
bool mls_overlap_next(mls_overlap *overlap, mls_run *out)
{
    mls_run run = {0}, next;
    while (!overlap->done) {
        /* rows ascend in both parts, so none follows the end of either */
        if (overlap->a_at >= overlap->a_end || overlap->b_at >= overlap->b_end) {
            overlap->done = true;
            break;
        }
        if (clip_row(overlap, &next)) {
            /* join consecutive rows */
            if (run.count == 0) {
                run = next;
            } else if (next.a == run.a + run.count && next.b == run.b + run.count) {
                run.count += next.count;
            } else {
                break; /* keep the row for the next call */
            }
        } else if (run.count > 0) {
            next_row(overlap);
            break;
        }
        next_row(overlap);
    }
    if (run.count > 0) {
        *out = run;
    }
    return run.count > 0;
}
