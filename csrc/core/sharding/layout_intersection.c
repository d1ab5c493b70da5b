/* meeting: a walk through the steps of a layout, into those positions that matter.
 *
 * Each step cuts a range into pieces of one length, so which of them a range touches is a
 * division.  Flat ranges are judged by the box round them, which may be a little larger:
 * whatever the walk arrives at is asked once more, exactly.
 */
#include "sharding/layout_intersection.h"

/* The smallest box round a part.  Its first and last element agree in their outer
 * coordinates up to some axis; all that is inside that one is taken whole. */
static mls_part box_round(const mls_part *part)
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

/* What two boxes share along an axis, counted from the start of `a`; false: nothing. */
static bool shared(const mls_part *a, const mls_part *b, int axis, size_t *from,
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

/* Whether two parts have the same box. */
static bool same_box(const mls_part *a, const mls_part *b)
{
    bool same = a->rank == b->rank;
    for (int axis = 0; same && axis < a->rank; axis++) {
        same = a->start[axis] == b->start[axis] && a->length[axis] == b->length[axis];
    }
    return same;
}

/* The elements of `box`, in C order, from the first to behind the last that may be of the
 * wanted part.  False: none. */
static bool flat_range(const mls_meeting *m, const mls_part *box, size_t *from,
                       size_t *end)
{
    size_t stride = 1, first = 0, last = 0;
    for (int axis = box->rank - 1; axis >= 0; axis--) {
        size_t low, high;
        if (!shared(box, &m->near, axis, &low, &high)) {
            return false;
        }
        first += low * stride;
        last += (high - 1) * stride;
        stride *= box->length[axis];
    }
    *from = first;
    *end = last + 1;
    if (same_box(box, m->to)) { /* then its own range is to the point */
        *from = m->to->begin > first ? m->to->begin : first;
        *end = m->to->end < last + 1 ? m->to->end : last + 1;
    }
    return *from < *end;
}

/* Which positions of the next step to look at. */
static void enter(mls_meeting *m)
{
    const mls_part *box = &m->box[m->depth];
    const mls_layout_step step = m->layout->steps[m->depth];
    size_t from = 0, end = 0, length;
    bool any;
    if (step.axis == MLS_LAYOUT_FLAT) {
        length = mls_part_count(box);
        any = flat_range(m, box, &from, &end);
    } else {
        length = box->length[step.axis];
        any = shared(box, &m->near, step.axis, &from, &end);
    }
    const size_t each = length / step.parts + (length % step.parts != 0 ? 1 : 0);
    m->from[m->depth] = any ? from / each : 0; /* there is something: each is above 0 */
    m->end[m->depth] = any ? (end - 1) / each + 1 : 0;
}

/* Without elements, wanted or at all, no part has any of them. */
void mls_meeting_init(mls_meeting *meeting, const mls_layout *layout, int rank,
                      const size_t *shape, const mls_part *to)
{
    static const mls_layout none = {0};
    mls_status ignored; /* the shape was accepted before */
    meeting->layout = layout;
    meeting->to = to;
    meeting->near = box_round(to);
    meeting->depth = mls_part_count(to) > 0 ? 0 : -1;
    (void)mls_layout_part(&none, rank, shape, 0, &meeting->box[0], &ignored);
    if (meeting->depth == 0 && layout->count > 0) {
        enter(meeting);
    }
}

/* The number of the part that the walk has arrived at. */
static size_t number(const mls_meeting *m)
{
    size_t part = 0;
    for (int i = 0; i < m->layout->count; i++) {
        part = part * m->layout->steps[i].parts + m->from[i] - 1;
    }
    return part;
}

/* Down into the next position, up where there is none left. */
bool mls_meeting_next(mls_meeting *meeting, size_t *part)
{
    mls_meeting *m = meeting;
    while (m->depth >= 0) {
        const int depth = m->depth;
        if (depth == m->layout->count) {
            mls_overlap overlap;
            mls_run run;
            mls_overlap_init(&overlap, &m->box[depth], m->to);
            m->depth--;
            if (mls_overlap_next(&overlap, &run)) {
                *part = number(m);
                return true;
            }
        } else if (m->from[depth] < m->end[depth]) {
            m->box[depth + 1] = m->box[depth];
            mls_part_cut(&m->box[depth + 1], m->layout->steps[depth], m->from[depth]++);
            if (++m->depth < m->layout->count) {
                enter(m);
            }
        } else {
            m->depth--;
        }
    }
    return false;
}
