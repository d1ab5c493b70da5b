/* layout_intersection: which parts of a layout intersect a part of another one, without a
 * visit of all parts.
 *
 * Each step divides a range into parts of one length, so a division finds the first and
 * the last part that a range touches. A flat range is replaced by its bounding box, which
 * may be larger; therefore every candidate is checked exactly at the end.
 */
#include "sharding/layout_intersection.h"

/* Return the bounding box of a part: for a part that is not flat or has no elements, its
 * own box. The first and the last element of a flat part have equal outer coordinates up
 * to some axis; all axes inside that one are whole in the box. */
static mls_part bounding_box(const mls_part *part)
{
    mls_part box = *part;
    size_t inside[MLS_LAYOUT_RANK + 1]; /* elements of one index along an axis */
    inside[box.rank] = 1;
    for (int axis = box.rank; axis > 0; axis--) {
        inside[axis - 1] = inside[axis] * part->length[axis - 1];
    }
    size_t first = part->begin, last = part->end - 1;
    bool same = part->flat && part->begin < part->end;
    for (int axis = 0; same && axis < box.rank; axis++) {
        const size_t low = first / inside[axis + 1], high = last / inside[axis + 1];
        box.start[axis] += low;
        box.length[axis] = high - low + 1;
        first -= low * inside[axis + 1];
        last -= high * inside[axis + 1];
        same = low == high;
    }
    return box;
}

/* Set `*from` and `*end` to the range of indices along an axis that both boxes have,
 * `*from` to *end - 1, counted from the start of `a`. Returns false if it is empty. */
static bool intersect_axis(const mls_part *a, const mls_part *b, int axis, size_t *from,
                           size_t *end)
{
    const size_t a_end = a->start[axis] + a->length[axis];
    const size_t b_end = b->start[axis] + b->length[axis];
    const size_t start =
        a->start[axis] > b->start[axis] ? a->start[axis] : b->start[axis];
    const size_t stop = a_end < b_end ? a_end : b_end;
    *from = start - a->start[axis];
    *end = stop > start ? stop - a->start[axis] : *from;
    return stop > start;
}

/* Return whether two parts have the same box; flat ranges within it are not compared. */
static bool same_box(const mls_part *a, const mls_part *b)
{
    bool same = a->rank == b->rank;
    for (int axis = 0; same && axis < a->rank; axis++) {
        same = a->start[axis] == b->start[axis] && a->length[axis] == b->length[axis];
    }
    return same;
}

/* Set `*from` and `*end` to the range of elements of `box`, numbered in C order, that may
 * belong to the part `iter->to`: `*from` to *end - 1, from the first to the last
 * element that is also in the bounding box of the part. Returns false if it is empty. */
static bool flat_range(const mls_layout_intersection *iter, const mls_part *box,
                       size_t *from, size_t *end)
{
    size_t stride = 1, first = 0, last = 0;
    for (int axis = box->rank - 1; axis >= 0; axis--) {
        size_t low, high;
        if (!intersect_axis(box, &iter->bounds, axis, &low, &high)) {
            return false;
        }
        first += low * stride;
        last += (high - 1) * stride;
        stride *= box->length[axis];
    }
    *from = first;
    *end = last + 1;
    if (same_box(box, iter->to)) { /* equal boxes: the part's own range is exact */
        *from = iter->to->begin > first ? iter->to->begin : first;
        *end = iter->to->end < last + 1 ? iter->to->end : last + 1;
    }
    return *from < *end;
}

/* Set `from` and `end` of the iterator at the current depth to the range of parts of this
 * step that may intersect `to`; an empty range for none. Parts have the length
 * `part_length`, except at the end, so a division finds them. */
static void enter_step(mls_layout_intersection *iter)
{
    const mls_part *box = &iter->box[iter->depth];
    const mls_layout_step step = iter->layout->steps[iter->depth];
    size_t from = 0, end = 0, length;
    bool has_range;
    if (step.axis == MLS_LAYOUT_FLAT) {
        length = mls_part_count(box);
        has_range = flat_range(iter, box, &from, &end);
    } else {
        length = box->length[step.axis];
        has_range = intersect_axis(box, &iter->bounds, step.axis, &from, &end);
    }
    const size_t part_length = length / step.parts + (length % step.parts != 0 ? 1 : 0);
    /* a range implies that `part_length` is above 0 */
    iter->from[iter->depth] = has_range ? from / part_length : 0;
    iter->end[iter->depth] = has_range ? (end - 1) / part_length + 1 : 0;
}

/* Start the iteration over the parts that intersect `to`. The first box is the whole
 * tensor: the only part of the layout without steps, `none`. An empty part intersects
 * nothing, so the iteration is then at its end. */
void mls_layout_intersection_init(mls_layout_intersection *iter, const mls_layout *layout,
                                  int rank, const size_t *shape, const mls_part *to)
{
    static const mls_layout none = {0};
    mls_status ignored; /* cannot fail: the shape was accepted before */
    iter->layout = layout;
    iter->to = to;
    iter->bounds = bounding_box(to);
    iter->depth = mls_part_count(to) > 0 ? 0 : -1;
    (void)mls_layout_part(&none, rank, shape, 0, &iter->box[0], &ignored);
    if (iter->depth == 0 && layout->count > 0) {
        enter_step(iter);
    }
}

/* Return the number of the part that the current path through the steps leads to. Steps
 * count in mixed radix; each `from` is already one further, hence `- 1`. */
static size_t part_number(const mls_layout_intersection *iter)
{
    size_t part = 0;
    for (int i = 0; i < iter->layout->count; i++) {
        part = part * iter->layout->steps[i].parts + iter->from[i] - 1;
    }
    return part;
}

/* Set `*part` to the next part that shares an element with `to`. Visit the steps depth
 * first: at each depth, the parts that intersect the bounding box of `to`; at the end, a
 * part is returned if it really shares an element. */
bool mls_layout_intersection_next(mls_layout_intersection *iter, size_t *part)
{
    while (iter->depth >= 0) {
        const int depth = iter->depth;
        if (depth == iter->layout->count) {
            mls_overlap overlap;
            mls_run run;
            mls_overlap_init(&overlap, &iter->box[depth], iter->to);
            iter->depth--;
            if (mls_overlap_next(&overlap, &run)) {
                *part = part_number(iter);
                return true;
            }
        } else if (iter->from[depth] < iter->end[depth]) {
            iter->box[depth + 1] = iter->box[depth];
            mls_part_cut(&iter->box[depth + 1], iter->layout->steps[depth],
                         iter->from[depth]++);
            if (++iter->depth < iter->layout->count) {
                enter_step(iter);
            }
        } else {
            iter->depth--;
        }
    }
    return false;
}
