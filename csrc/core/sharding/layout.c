/* layout: parts computed, and two parts laid over one another.
 *
 * What two boxes have in common is a box again.  It is walked row by row: along a row,
 * the positions in both parts grow by one, so that the flat ranges of either cut a row at
 * its ends only.  Inner axes that both boxes have whole are merged first, which makes
 * rows as long as memory allows.
 *
 * No function here allocates, and none can wrap once mls_layout_part has counted the
 * tensor's elements: every later product is of lengths inside that tensor.
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

const char *mls_layout_name(size_t which)
{
    return which < NAMES ? names[which].name : NULL;
}

const char *mls_layout_step_name(int axis)
{
    for (size_t i = 0; axis < 0 && i < NAMES; i++) {
        if (names[i].count > 0 && names[i].axis == axis) {
            return names[i].name;
        }
    }
    return NULL;
}

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

/* A number of 1 to MOST_DIGITS digits. */
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

/* The part in front of "=N": a name or "axis:K". */
static bool parse_cut(mls_str text, mls_layout *out)
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

bool mls_layout_parse(mls_str text, mls_layout *out, bool *has_parts)
{
    mls_layout layout;
    int parts = 0;
    const char *sign = text.length == 0 ? NULL : memchr(text.data, '=', text.length);
    const size_t length = sign == NULL ? text.length : (size_t)(sign - text.data);
    if (!parse_cut((mls_str){text.data, length}, &layout)) {
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

/* Why a step cannot be; the earlier steps are good.  Whether the tensor has the axis is
 * asked when there is a tensor: a layout is made before, and for many of them. */
static mls_code check_step(const mls_layout *layout, int which, mls_status *st)
{
    const mls_layout_step step = layout->steps[which];
    if (step.parts == 0) {
        return mls_fail(st, MLS_E_VALUE, "step %d of the layout has no parts", which);
    }
    if (step.axis == MLS_LAYOUT_FLAT) {
        return which == layout->count - 1
                   ? MLS_OK
                   : mls_fail(st, MLS_E_VALUE, "a flat step must be the layout's last");
    }
    if (step.axis < 0) {
        return mls_fail(st, MLS_E_VALUE, "step %d of the layout has axis %d", which,
                        step.axis);
    }
    return MLS_OK;
}

/* The one place where a layout is judged by itself; the tensor comes in later. */
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

/* The range that part `index` of `parts` gets of `count`, as torch.chunk cuts: a piece
 * that torch's own sharding made must be the same piece here.  Parts that get nothing
 * start at `count`, inside the bounds. */
static void cut(size_t count, size_t parts, size_t index, size_t *start, size_t *length)
{
    const size_t each = count / parts + (count % parts != 0 ? 1 : 0);
    /* `index` is below `parts`, so the product is at most one part beyond the count, but
     * for wrapping, which the division rules out */
    const size_t first = each == 0 || index > count / each ? count : index * each;
    *start = first < count ? first : count;
    *length = count - *start < each ? count - *start : each;
}

/* Elements of a part's box; 1 for a scalar, which has no axes. */
static size_t box_count(const mls_part *part)
{
    size_t count = 1;
    for (int axis = 0; axis < part->rank; axis++) {
        count *= part->length[axis]; /* no more than the tensor's, which was counted */
    }
    return count;
}

/* Why a tensor of that shape cannot be cut so. */
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

/* Only what the part has is written: most of it is room, and there are parts by the
 * thousand. */
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

/* Parts that get nothing are at the end of their axis, or of their box. */
void mls_part_cut(mls_part *part, mls_layout_step step, size_t index)
{
    size_t start, length;
    if (step.axis == MLS_LAYOUT_FLAT) {
        cut(box_count(part), step.parts, index, &part->begin, &length);
        part->end = part->begin + length;
        part->flat = true;
        return;
    }
    cut(part->length[step.axis], step.parts, index, &start, &length);
    part->length[step.axis] = length;
    part->start[step.axis] += start;
    part->end = box_count(part);
}

/* From the whole tensor inward: each step narrows the box, or ends in a range of it. */
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
    /* the whole tensor first; nothing can fail any more */
    out->rank = rank;
    out->flat = false;
    out->begin = 0;
    for (int axis = 0; axis < rank; axis++) {
        out->start[axis] = 0;
        out->length[axis] = shape[axis];
    }
    out->end = box_count(out);
    /* each step cuts what the one before left; `parts` becomes the number of parts that
     * the later steps make of each */
    for (int i = 0; i < layout->count; i++) {
        const mls_layout_step step = layout->steps[i];
        parts /= step.parts;
        mls_part_cut(out, step, index / parts % step.parts);
    }
    return MLS_OK;
}

/* Flat parts are one-dimensional, whatever their tensor is. */
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

/* Of a part that is its whole box too: `begin` and `end` are then those of the box. */
size_t mls_part_count(const mls_part *part)
{
    return part->end - part->begin;
}

/* Whether a box is whole or flat changes nothing of its elements. */
bool mls_part_equal(const mls_part *a, const mls_part *b)
{
    bool same = a->begin == b->begin && a->end == b->end;
    for (int i = 0; same && i < a->rank; i++) {
        same = a->start[i] == b->start[i] && a->length[i] == b->length[i];
    }
    return same;
}

/* ---- overlap ---- */

/* Where the common range of two axes starts, and how long it is. */
static size_t common(const mls_part *a, const mls_part *b, int axis, size_t *start)
{
    const size_t a_end = a->start[axis] + a->length[axis];
    const size_t b_end = b->start[axis] + b->length[axis];
    const size_t end = a_end < b_end ? a_end : b_end;
    *start = a->start[axis] > b->start[axis] ? a->start[axis] : b->start[axis];
    return end > *start ? end - *start : 0;
}

/* Step over rows while those stepped to start at or before `begin`, in the part whose
 * strides are given and which is at `at` now.  Rows rise and do not overlap, so whatever
 * is stepped over ends there too. */
static void skip_rows(mls_overlap *o, size_t at, size_t begin, const size_t *stride)
{
    size_t rest = begin > at ? begin - at : 0;
    for (int axis = 0; axis < o->rank - 1; axis++) {
        const size_t left = o->length[axis] - 1 - o->index[axis];
        const size_t rows = rest / stride[axis] < left ? rest / stride[axis] : left;
        o->index[axis] += rows;
        o->a_at += rows * o->a_stride[axis];
        o->b_at += rows * o->b_stride[axis];
        rest -= rows * stride[axis];
    }
}

/* Where, in `a`, the last element ends that lies in front of b's end: of the last row
 * that starts there, as much as does. */
static size_t end_by_b(const mls_overlap *o)
{
    size_t rest = o->b_end > o->b_at ? o->b_end - o->b_at : 0, at = o->a_at;
    for (int axis = 0; axis < o->rank - 1 && rest > 0; axis++) {
        const size_t last = o->length[axis] - 1, among = (rest - 1) / o->b_stride[axis];
        const size_t row = among < last ? among : last;
        at += row * o->a_stride[axis];
        rest -= row * o->b_stride[axis];
    }
    const size_t length = o->length[o->rank - 1];
    return at + (rest < length ? rest : length);
}

/* Only the rows between the flat ranges' ends need to be walked: a small part of a large
 * tensor costs no more than it has rows. */
static void skip_ends(mls_overlap *o)
{
    const size_t end = end_by_b(o);
    o->a_end = end < o->a_end ? end : o->a_end;
    skip_rows(o, o->a_at, o->a_begin, o->a_stride);
    skip_rows(o, o->b_at, o->b_begin, o->b_stride);
}

/* Axes from the innermost out.  An axis that both boxes have whole, and all inside it
 * too, becomes part of the one outside it.  The innermost axis always joins the row that
 * is there to begin with, so that there are no more rows than axes (one for a scalar). */
void mls_overlap_init(mls_overlap *overlap, const mls_part *a, const mls_part *b)
{
    size_t a_stride = 1, b_stride = 1;
    mls_overlap *o = overlap; /* filled in where it is: most of its room stays unused */
    o->a_begin = a->begin;
    o->a_end = a->end;
    o->b_begin = b->begin;
    o->b_end = b->end;
    o->a_at = o->b_at = 0;
    o->rank = 0;
    o->done = false;
    size_t length[MLS_LAYOUT_RANK + 1], a_strides[MLS_LAYOUT_RANK + 1],
        b_strides[MLS_LAYOUT_RANK + 1];
    /* the innermost row to begin with: one element, which the first axis takes in */
    length[0] = a_strides[0] = b_strides[0] = 1;
    int rows = 1;
    for (int axis = a->rank - 1; axis >= 0; axis--) {
        size_t start;
        const size_t shared = common(a, b, axis, &start);
        /* nothing in common along one axis is nothing in common at all */
        o->done = o->done || shared == 0;
        o->a_at += (start - a->start[axis]) * a_stride;
        o->b_at += (start - b->start[axis]) * b_stride;
        /* the row inside: where it is as long as the stride, there is no gap */
        const size_t inside = length[rows - 1] * a_strides[rows - 1];
        const size_t b_inside = length[rows - 1] * b_strides[rows - 1];
        if (inside == a_stride && b_inside == b_stride) {
            length[rows - 1] *= shared; /* goes on where the axis inside ends */
        } else {
            length[rows] = shared;
            a_strides[rows] = a_stride;
            b_strides[rows++] = b_stride;
        }
        a_stride *= a->length[axis];
        b_stride *= b->length[axis];
    }
    /* outermost first, as it is walked */
    for (int i = rows - 1; i >= 0; i--) {
        o->index[o->rank] = 0;
        o->length[o->rank] = length[i];
        o->a_stride[o->rank] = a_strides[i];
        o->b_stride[o->rank++] = b_strides[i];
    }
    if (!o->done) {
        skip_ends(o);
    }
}

/* Step to the next row; sets `done` after the last. */
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

/* The present row as far as both flat ranges have it; false where no element of it is in
 * both.  Positions in the run are those in the parts, which start where the ranges do. */
static bool row_run(const mls_overlap *o, mls_run *out)
{
    /* `skip` elements at the front are before one of the ranges, `keep` of them end it */
    const size_t length = o->length[o->rank - 1];
    size_t skip = 0, keep = length;
    skip = o->a_begin > o->a_at ? o->a_begin - o->a_at : 0;
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

/* Rows that follow on from one another in both parts become one run here, which is what
 * makes a few large reads of many small rows. */
bool mls_overlap_next(mls_overlap *overlap, mls_run *out)
{
    mls_run run = {0}, next;
    while (!overlap->done) {
        /* rows rise in both, so nothing more comes behind the end of either */
        if (overlap->a_at >= overlap->a_end || overlap->b_at >= overlap->b_end) {
            overlap->done = true;
            break;
        }
        if (row_run(overlap, &next)) {
            /* joined as long as the rows go on in both; the first that does not waits */
            if (run.count == 0) {
                run = next;
            } else if (next.a == run.a + run.count && next.b == run.b + run.count) {
                run.count += next.count;
            } else {
                break; /* the row stays for the next call */
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
