/* The parts that intersect a part, compared with testing each one. */
#include "sharding/layout_intersection.h"
#include "support/parts.h"

#include <stdint.h>

enum { LAYOUTS = 11 };

static const mls_layout layouts[LAYOUTS] = {
    {0},
    {1, {{0, 3}}},
    {1, {{0, 7}}},
    {1, {{1, 4}}},
    {1, {{MLS_LAYOUT_FLAT, 5}}},
    {1, {{MLS_LAYOUT_FLAT, 64}}},
    {2, {{0, 2}, {1, 3}}},
    {2, {{1, 2}, {MLS_LAYOUT_FLAT, 3}}},
    {2, {{0, 3}, {MLS_LAYOUT_FLAT, 4}}},
    {3, {{0, 2}, {0, 2}, {2, 2}}},
    {4, {{2, 2}, {0, 2}, {1, 2}, {MLS_LAYOUT_FLAT, 2}}},
};

static bool meet(const mls_part *a, const mls_part *b)
{
    mls_overlap overlap;
    mls_run run;
    mls_overlap_init(&overlap, a, b);
    return mls_overlap_next(&overlap, &run);
}

/* Both methods give the same parts, in the same order. */
static void compare(const mls_layout *stored, int rank, const size_t *shape,
                    const mls_part *to)
{
    mls_layout_intersection meeting;
    mls_layout_intersection_init(&meeting, stored, rank, shape, to);
    const size_t parts = parts_of(*stored);
    for (size_t i = 0; i < parts; i++) {
        const mls_part part = part_at(*stored, rank, shape, i);
        if (meet(&part, to)) {
            size_t index = SIZE_MAX;
            CHECK(mls_layout_intersection_next(&meeting, &index) && index == i);
        }
    }
    size_t more;
    CHECK(!mls_layout_intersection_next(&meeting, &more));
    CHECK(!mls_layout_intersection_next(&meeting, &more));
}

TEST(search_returns_the_intersecting_parts)
{
    static const size_t shapes[][3] = {{5, 4, 6}, {7, 3, 2}, {1, 1, 1}, {2, 9, 3},
                                       {0, 4, 2}, {4, 0, 3}, {13, 2, 5}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        for (int a = 0; a < LAYOUTS; a++) {
            for (int b = 0; b < LAYOUTS; b++) {
                const size_t parts = parts_of(layouts[b]);
                for (size_t i = 0; i < parts; i++) {
                    const mls_part to = part_at(layouts[b], 3, shapes[s], i);
                    compare(&layouts[a], 3, shapes[s], &to);
                }
            }
        }
    }
}

TEST(a_scalar_is_in_the_first_part)
{
    const mls_layout flat = {1, {{MLS_LAYOUT_FLAT, 3}}};
    const mls_layout unsharded = {0};
    for (size_t i = 0; i < 3; i++) {
        const mls_part to = part_at(flat, 0, NULL, i);
        compare(&flat, 0, NULL, &to);
        compare(&unsharded, 0, NULL, &to);
    }
}

/* A thousand million parts: the cost does not depend on their number. */
TEST(the_number_of_parts_does_not_matter)
{
    const size_t shape[] = {1U << 20, 1U << 12};
    const mls_layout old = {1, {{MLS_LAYOUT_FLAT, 1U << 30}}};
    const mls_layout two = {2, {{0, 1U << 18}, {1, 1U << 10}}};
    const mls_layout new = {1, {{MLS_LAYOUT_FLAT, (1U << 30) / 4 * 3}}};
    const mls_part to = part_at(new, 2, shape, 12345678);
    mls_layout_intersection meeting;
    size_t part, count = 0;
    for (mls_layout_intersection_init(&meeting, &old, 2, shape, &to);
         mls_layout_intersection_next(&meeting, &part); count++) {
        const mls_part from = part_at(old, 2, shape, part);
        CHECK(meet(&from, &to));
    }
    CHECK(count == 2 || count == 3);
    count = 0;
    for (mls_layout_intersection_init(&meeting, &two, 2, shape, &to);
         mls_layout_intersection_next(&meeting, &part); count++) {
        const mls_part from = part_at(two, 2, shape, part);
        CHECK(meet(&from, &to));
    }
    CHECK(count == 2 || count == 3);
}
