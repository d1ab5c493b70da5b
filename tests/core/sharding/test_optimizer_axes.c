/* Which axes optimizer states share with their parameter, and how its layout divides
 * them. */
#include "sharding/optimizer_axes.h"
#include "support/parts.h"
#include "support/text.h"

#include <string.h>

enum { NONE = MLS_NO_AXIS, UNTOUCHED = 99 };

/* Whether mls_optimizer_axes finds `expected`; NULL: the parameter's own axes. */
static bool aligns(const char *state, int rank, const size_t *shape, int parameter_rank,
                   const size_t *parameter_shape, const signed char *expected)
{
    signed char axes[MLS_LAYOUT_RANK];
    memset(axes, UNTOUCHED, sizeof axes);
    const bool is_aligned = mls_optimizer_axes(text(state), rank, shape, parameter_rank,
                                               parameter_shape, axes);
    if (expected == NULL) {
        return !is_aligned && axes[0] == UNTOUCHED;
    }
    return is_aligned && memcmp(axes, expected, (size_t)rank) == 0 &&
           axes[rank] == UNTOUCHED;
}

TEST(a_state_of_the_same_shape_has_the_same_axes)
{
    const size_t shape[] = {4, 4, 1};
    CHECK(aligns("m", 3, shape, 3, shape, NULL));
    CHECK(aligns("row", 3, shape, 3, shape, NULL));
    CHECK(aligns("m", 1, shape, 1, shape, NULL));
}

TEST(a_counter_has_no_axes_at_all)
{
    const size_t shape[] = {4, 4};
    CHECK(aligns("step", 0, NULL, 2, shape, NULL));
    CHECK(aligns("step", 0, NULL, 1, shape, NULL)); /* more than one axis missing */
    CHECK(aligns("step", 0, NULL, 0, NULL, NULL));
}

TEST(reduced_axis_is_missing)
{
    const size_t shape[] = {6, 4}, rows[] = {6}, columns[] = {4};
    CHECK(aligns("exp_avg_sq_row", 1, rows, 2, shape, (const signed char[]){0}));
    CHECK(aligns("exp_avg_sq_col", 1, columns, 2, shape, (const signed char[]){1}));
    /* the shapes permit one answer, for any name */
    CHECK(aligns("vr", 1, rows, 2, shape, (const signed char[]){0}));
    CHECK(aligns("vc", 1, columns, 2, shape, (const signed char[]){1}));
    CHECK(aligns("col", 1, rows, 2, shape, (const signed char[]){0}));
    CHECK(aligns("row", 1, columns, 2, shape, (const signed char[]){1}));
}

TEST(names_decide_for_square_matrices)
{
    const size_t shape[] = {5, 5, 5}, sums[] = {5, 5};
    CHECK(aligns("exp_avg_sq_row", 1, sums, 2, shape, (const signed char[]){0}));
    CHECK(aligns("exp_avg_sq_col", 1, sums, 2, shape, (const signed char[]){1}));
    CHECK(aligns("row", 2, sums, 3, shape, (const signed char[]){0, 1}));
    CHECK(aligns("col", 2, sums, 3, shape, (const signed char[]){0, 2}));
    CHECK(aligns("factor", 1, sums, 2, shape, (const signed char[]){0}));
    CHECK(aligns("", 1, sums, 2, shape, (const signed char[]){0}));
    CHECK(aligns("co", 1, sums, 2, shape, (const signed char[]){0}));
    CHECK(mls_optimizer_axes((mls_str){0}, 1, sums, 2, shape, (signed char[]){7}));
}

TEST(batches_of_matrices_keep_their_first_axes)
{
    const size_t shape[] = {3, 6, 4}, rows[] = {3, 6}, columns[] = {3, 4};
    const size_t first[] = {6, 4};
    CHECK(aligns("row", 2, rows, 3, shape, (const signed char[]){0, 1}));
    CHECK(aligns("col", 2, columns, 3, shape, (const signed char[]){0, 2}));
    CHECK(aligns("x", 2, first, 3, shape, (const signed char[]){1, 2}));
}

TEST(axes_of_length_one_count_as_missing)
{
    const size_t shape[] = {6, 4}, rows[] = {6, 1}, columns[] = {1, 4}, both[] = {1, 1};
    const size_t vector[] = {6}, single[] = {1}, narrow[] = {1, 4};
    CHECK(aligns("v", 2, rows, 2, shape, (const signed char[]){0, NONE}));
    CHECK(aligns("v", 2, columns, 2, shape, (const signed char[]){NONE, 1}));
    CHECK(aligns("v", 2, both, 2, shape, (const signed char[]){NONE, NONE}));
    CHECK(aligns("v", 1, single, 1, vector, (const signed char[]){NONE}));
    /* an axis of length 1 is kept if the parameter has one too */
    CHECK(aligns("v", 2, both, 2, narrow, (const signed char[]){0, NONE}));
}

TEST(mismatched_shapes_share_no_axes)
{
    const size_t shape[] = {6, 4}, other[] = {6, 5, 4}, wrong[] = {7};
    const size_t none = 0;
    CHECK(aligns("v", 1, wrong, 2, shape, (const signed char[]){NONE}));
    CHECK(aligns("v", 2, other, 2, shape, (const signed char[]){NONE, NONE}));
    CHECK(aligns("v", 3, other, 2, shape, (const signed char[]){NONE, NONE, NONE}));
    CHECK(aligns("v", 1, shape, 0, NULL, (const signed char[]){NONE}));
    CHECK(aligns("v", 1, &none, 2, shape, (const signed char[]){NONE}));
}

/* ---- layouts ---- */

/* Whether a projection equals `expected`, and part `index` becomes `becomes`. */
static bool projects(mls_layout layout, size_t index, int rank, const signed char *axes,
                     mls_layout expected, size_t becomes)
{
    mls_layout got = {.count = 3};
    size_t part = 77;
    mls_layout_project(&layout, index, rank, axes, &got, &part);
    bool same = got.count == expected.count && part == becomes;
    for (int i = 0; same && i < got.count; i++) {
        same = got.steps[i].axis == expected.steps[i].axis &&
               got.steps[i].parts == expected.steps[i].parts;
    }
    return same;
}

TEST(the_same_axes_are_cut_the_same_way)
{
    const mls_layout unsharded = {0}, both = cut_twice(1, 3, MLS_LAYOUT_FLAT, 4);
    CHECK(projects(unsharded, 0, 2, NULL, unsharded, 0));
    for (size_t part = 0; part < 12; part++) {
        CHECK(projects(both, part, 2, NULL, both, part));
    }
}

TEST(steps_along_lacking_axes_are_left_out)
{
    const signed char columns[] = {1}, swapped[] = {1, 0}, rows[] = {0, NONE};
    const mls_layout both = cut_twice(0, 3, 1, 4);
    for (size_t part = 0; part < 12; part++) {
        CHECK(projects(both, part, 1, columns, cut(0, 4), part % 4));
        CHECK(projects(both, part, 2, rows, cut(0, 3), part / 4));
        CHECK(projects(both, part, 2, swapped, cut_twice(1, 3, 0, 4), part));
    }
    const signed char none[] = {NONE, NONE};
    CHECK(projects(both, 11, 2, none, (mls_layout){0}, 0));
}

TEST(nested_layout_is_projected)
{
    const signed char rows[] = {0};
    const mls_layout again = {.count = 3, .steps = {{0, 2}, {1, 3}, {0, 5}}};
    for (size_t part = 0; part < 30; part++) {
        CHECK(projects(again, part, 1, rows, cut_twice(0, 2, 0, 5),
                       part / 15 * 5 + part % 5));
    }
}

TEST(flat_layout_projects_only_equal_axes)
{
    const signed char rows[] = {0};
    const mls_layout flat = cut(MLS_LAYOUT_FLAT, 4);
    const mls_layout both = cut_twice(0, 3, MLS_LAYOUT_FLAT, 4);
    CHECK(projects(flat, 3, 1, NULL, flat, 3));
    CHECK(projects(flat, 3, 1, rows, (mls_layout){0}, 0));
    CHECK(projects(flat, 3, 0, NULL, (mls_layout){0}, 0)); /* a counter */
    CHECK(projects(both, 7, 1, rows, cut(0, 3), 1));
    CHECK(projects(both, 7, 0, NULL, (mls_layout){0}, 0));
}

/* Each rank's part of a row sum covers that rank's rows, for any layout. */
TEST(a_projected_part_has_the_indices_of_its_parameter)
{
    const size_t shape[] = {7, 5}, sums[] = {7};
    const signed char rows[] = {0};
    const mls_layout layout = {.count = 3, .steps = {{0, 2}, {1, 2}, {0, 3}}};
    for (size_t index = 0; index < 12; index++) {
        mls_layout projected;
        size_t part_index;
        mls_layout_project(&layout, index, 1, rows, &projected, &part_index);
        const mls_part full_part = part_at(layout, 2, shape, index);
        const mls_part part = part_at(projected, 1, sums, part_index);
        CHECK(part.start[0] == full_part.start[0] &&
              part.length[0] == full_part.length[0]);
    }
}
