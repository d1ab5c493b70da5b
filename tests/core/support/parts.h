/* parts: layouts, their parts, and the elements of a part by the definition. */
#ifndef MLS_TEST_PARTS_H
#define MLS_TEST_PARTS_H

#include "sharding/layout.h"
#include "support/runner.h"

static inline mls_layout cut(int axis, size_t parts)
{
    return (mls_layout){.count = 1, .steps = {{.axis = axis, .parts = parts}}};
}

static inline mls_layout cut_twice(int axis, size_t parts, int then, size_t more)
{
    return (mls_layout){
        .count = 2,
        .steps = {{.axis = axis, .parts = parts}, {.axis = then, .parts = more}}};
}

static inline size_t parts_of(mls_layout layout)
{
    size_t parts = 0;
    mls_status st;
    CHECK(mls_layout_parts(&layout, &parts, &st) == MLS_OK);
    return parts;
}

/* Part `index` of a tensor. */
static inline mls_part part_at(mls_layout layout, int rank, const size_t *shape,
                               size_t index)
{
    mls_part part = {0};
    mls_status st;
    CHECK(mls_layout_part(&layout, rank, shape, index, &part, &st) == MLS_OK);
    return part;
}

/* The number of each element of a part: the elements of the box in C order, restricted
 * to the flat range.  Returns how many there are. */
static inline size_t elements_of(const mls_part *part, const size_t *shape, size_t *out)
{
    size_t total = 1, box = 0, count = 0;
    for (int axis = 0; axis < part->rank; axis++) {
        total *= shape[axis];
    }
    for (size_t element = 0; element < total; element++) {
        size_t rest = element;
        bool inside = true;
        for (int axis = part->rank - 1; axis >= 0; axis--) {
            const size_t at = rest % shape[axis];
            rest /= shape[axis];
            inside = inside && at >= part->start[axis] &&
                     at - part->start[axis] < part->length[axis];
        }
        if (inside && box >= part->begin && box < part->end) {
            out[count++] = element;
        }
        box += inside;
    }
    return count;
}

#endif
