#include "sharding/layout.h"
#include "support/parts.h"

enum { MOST = 400 }; /* maximum number of elements of a tensor */

static const mls_layout whole_tensor = {0};

TEST(flat_chunks_are_never_of_negative_size)
{
    const size_t shape[] = {3};
    const mls_layout flat = cut(MLS_LAYOUT_FLAT, 8);
    for (size_t i = 0; i < 8; i++) {
        const mls_part part = part_at(flat, 1, shape, i);
        CHECK(mls_part_count(&part) == (i < 3 ? 1U : 0U) && part.flat);
    }
}

/* All layouts under test, for a tensor of three dimensions. */
static size_t layouts(mls_layout *out)
{
    size_t count = 0;
    out[count++] = whole_tensor;
    for (size_t parts = 1; parts <= 5; parts += 2) {
        out[count++] = cut(MLS_LAYOUT_FLAT, parts + 1);
        for (int axis = 0; axis < 3; axis++) {
            out[count++] = cut(axis, parts);
            out[count++] = cut_twice(axis, parts, MLS_LAYOUT_FLAT, 3);
            out[count++] = cut_twice(axis, parts, (axis + 1) % 3, 2);
            out[count++] = cut_twice(axis, parts, axis, 2);
        }
    }
    return count;
}

TEST(parts_of_a_layout_cover_the_tensor)
{
    const size_t shape[] = {5, 4, 3};
    mls_layout all[64];
    const size_t count = layouts(all);
    for (size_t i = 0; i < count; i++) {
        size_t seen[MOST] = {0}, elements[MOST];
        for (size_t index = 0; index < parts_of(all[i]); index++) {
            const mls_part part = part_at(all[i], 3, shape, index);
            const size_t element_count = elements_of(&part, shape, elements);
            CHECK(element_count == mls_part_count(&part));
            for (size_t j = 0; j < element_count; j++) {
                seen[elements[j]]++;
            }
        }
        for (size_t element = 0; element < 60; element++) {
            CHECK(seen[element] == 1);
        }
    }
}

/* Compare the runs with the definition: each common element once, in order. */
static void check_overlap(const mls_part *a, const mls_part *b, const size_t *shape)
{
    size_t in_a[MOST], in_b[MOST];
    const size_t a_count = elements_of(a, shape, in_a);
    const size_t b_count = elements_of(b, shape, in_b);
    mls_overlap overlap;
    mls_run run, last = {0};
    size_t i = 0;
    mls_overlap_init(&overlap, a, b);
    while (mls_overlap_next(&overlap, &run)) {
        CHECK(run.count > 0 && run.a + run.count <= a_count);
        CHECK(run.b + run.count <= b_count);
        CHECK(last.count == 0 || run.a != last.a + last.count ||
              run.b != last.b + last.count);
        for (size_t k = 0; k < run.count && run.a + k < a_count; k++) {
            CHECK(in_a[run.a + k] == in_b[run.b + k]);
            /* the elements of a in between are not in b */
            for (; i < run.a + k; i++) {
                for (size_t j = 0; j < b_count; j++) {
                    CHECK(in_b[j] != in_a[i]);
                }
            }
            i++;
        }
        last = run;
        CHECK(run.a + run.count <= overlap.a_end - overlap.a_begin);
    }
    /* after the last run there is only the end of a, which may be in a gap of the box */
    CHECK(last.count == 0 || overlap.a_end == a->end ||
          overlap.a_end - overlap.a_begin == last.a + last.count);
    for (; i < a_count; i++) {
        for (size_t j = 0; j < b_count; j++) {
            CHECK(in_b[j] != in_a[i]);
        }
    }
}

TEST(intersection_contains_the_shared_elements)
{
    const size_t shapes[][3] = {{5, 4, 3}, {1, 7, 2}, {3, 0, 2}, {6, 1, 1}};
    mls_layout all[64];
    const size_t count = layouts(all);
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        for (size_t i = 0; i < count; i++) {
            for (size_t j = 0; j < count; j++) {
                const size_t a_parts = parts_of(all[i]), b_parts = parts_of(all[j]);
                for (size_t x = 0; x < a_parts; x++) {
                    const mls_part a = part_at(all[i], 3, shapes[s], x);
                    const mls_part b = part_at(all[j], 3, shapes[s], (x * 7) % b_parts);
                    check_overlap(&a, &b, shapes[s]);
                }
            }
        }
    }
}

TEST(a_scalar_is_one_element)
{
    const mls_part all = part_at(whole_tensor, 0, NULL, 0);
    const mls_layout flat = cut(MLS_LAYOUT_FLAT, 2);
    const mls_part first = part_at(flat, 0, NULL, 0), second = part_at(flat, 0, NULL, 1);
    mls_overlap overlap;
    mls_run run;
    CHECK(mls_part_count(&all) == 1 && mls_part_count(&first) == 1);
    CHECK(mls_part_count(&second) == 0);
    mls_overlap_init(&overlap, &all, &first);
    CHECK(mls_overlap_next(&overlap, &run) && run.count == 1);
    CHECK(!mls_overlap_next(&overlap, &run));
    mls_overlap_init(&overlap, &all, &second);
    CHECK(!mls_overlap_next(&overlap, &run));
}

TEST(rows_complete_in_both_parts_are_one_run)
{
    const size_t shape[] = {8, 4, 5};
    const mls_layout rows = cut(0, 4);
    const mls_part all = part_at(whole_tensor, 3, shape, 0);
    const mls_part third = part_at(rows, 3, shape, 2);
    mls_overlap overlap;
    mls_run run;
    mls_overlap_init(&overlap, &all, &third);
    CHECK(mls_overlap_next(&overlap, &run));
    CHECK(run.a == 80 && run.b == 0 && run.count == 40);
    CHECK(!mls_overlap_next(&overlap, &run));
}

TEST(impossible_layouts_are_refused)
{
    const size_t shape[] = {4, 4};
    mls_layout many = {.count = MLS_LAYOUT_STEPS + 1};
    const mls_layout none = cut(0, 0), negative = cut(-2, 2);
    const mls_layout early = cut_twice(MLS_LAYOUT_FLAT, 2, 0, 2);
    const mls_layout beyond = cut(2, 2), later = cut_twice(0, 2, 2, 2);
    const mls_layout huge = cut_twice(0, SIZE_MAX, 1, 2), rows = cut(0, 2);
    const size_t enormous[] = {SIZE_MAX, 2};
    mls_part part = {.rank = 77};
    CHECK_FAILS(mls_layout_part(&many, 2, shape, 0, &part, &status), MLS_E_VALUE,
                "a layout has 0 to 4 steps, not 5");
    CHECK_FAILS(mls_layout_part(&none, 2, shape, 0, &part, &status), MLS_E_VALUE,
                "step 0 of the layout has no parts");
    CHECK_FAILS(mls_layout_part(&negative, 2, shape, 0, &part, &status), MLS_E_VALUE,
                "step 0 of the layout has axis -2");
    CHECK_FAILS(mls_layout_part(&early, 2, shape, 0, &part, &status), MLS_E_VALUE,
                "a flat step must be the layout's last");
    CHECK_FAILS(mls_layout_part(&beyond, 2, shape, 0, &part, &status), MLS_E_SHAPE,
                "the layout cuts axis 2 of 2 dimensions");
    CHECK(mls_layout_part(&later, 2, shape, 0, &part, &status) == MLS_E_SHAPE);
    CHECK_FAILS(mls_layout_part(&huge, 2, shape, 0, &part, &status), MLS_E_SIZE,
                "the layout has more parts than can be counted");
    CHECK(mls_layout_part(&rows, 2, shape, 2, &part, &status) == MLS_E_VALUE);
    CHECK(mls_layout_part(&rows, 2, enormous, 0, &part, &status) == MLS_E_SIZE);
    CHECK_FAILS(mls_layout_part(&rows, MLS_LAYOUT_RANK + 1, shape, 0, &part, &status),
                MLS_E_SHAPE, "17 dimensions: at most 16 are possible");
    CHECK(part.rank == 77);
}

TEST(a_copy_of_a_part_is_that_part)
{
    const size_t shape[] = {5, 3, 2};
    const mls_layout both = cut_twice(1, 2, MLS_LAYOUT_FLAT, 3);
    for (size_t i = 0; i < 6; i++) {
        const mls_part part = part_at(both, 3, shape, i);
        mls_part copy = {.start = {7, 7, 7, 7}, .length = {7, 7, 7, 7}};
        mls_part_copy(&copy, &part);
        CHECK(copy.rank == 3 && copy.flat && copy.begin == part.begin);
        CHECK(copy.end == part.end && copy.start[3] == 7 && copy.length[3] == 7);
        CHECK(memcmp(copy.start, part.start, sizeof shape) == 0);
        CHECK(memcmp(copy.length, part.length, sizeof shape) == 0);
    }
}

/* Values beyond the rank are ignored, and a flat part may be a whole box. */
TEST(parts_with_the_same_elements_are_equal)
{
    const mls_part rows = {
        .rank = 2, .start = {1, 0, 7}, .length = {2, 3, 7}, .begin = 0, .end = 6};
    mls_part other = {.rank = 2, .start = {1}, .length = {2, 3}, .end = 6, .flat = true};
    size_t *const fields[] = {&other.start[1], &other.length[0], &other.begin,
                              &other.end};
    CHECK(mls_part_equal(&rows, &rows) && mls_part_equal(&rows, &other));
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        ++*fields[i];
        CHECK(!mls_part_equal(&rows, &other));
        --*fields[i];
    }
    CHECK(mls_part_equal(&rows, &other));
}

TEST(more_parts_than_elements_leave_the_last_ones_empty)
{
    const size_t shape[] = {2, 2};
    const mls_layout rows = cut(0, SIZE_MAX);
    const mls_part last = part_at(rows, 2, shape, SIZE_MAX - 1);
    CHECK(mls_part_count(&last) == 0 && last.start[0] == 2);
}

/* ---- names ---- */

static bool parse(const char *text, mls_layout *out, bool *has_parts)
{
    return mls_layout_parse((mls_str){text, strlen(text)}, out, has_parts);
}

static bool is_step(const char *text, int axis, size_t parts)
{
    mls_layout layout;
    bool has_parts;
    return parse(text, &layout, &has_parts) && layout.count == 1 &&
           layout.steps[0].axis == axis && layout.steps[0].parts == parts &&
           has_parts == (strchr(text, '=') != NULL);
}

TEST(layout_names_are_parsed_exactly)
{
    static const char *const bad[] = {
        "",       "row",     "rows=",   "rows=x",          "rows ",
        "axis",   "axis:",   "axis:-1", "axis:1234567890", "whole=2",
        "flat=+", "flat==2", "ROWS",    "rows=1234567890", "=2",
    };
    mls_layout layout = {.count = 3};
    bool has_parts = true;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(!parse(bad[i], &layout, &has_parts) && layout.count == 3 && has_parts);
    }
    size_t names = 0;
    for (; mls_layout_name(names) != NULL; names++) {
        CHECK(parse(mls_layout_name(names), &layout, &has_parts) && !has_parts);
    }
    CHECK(names == 3 && parse("whole", &layout, &has_parts) && layout.count == 0);
    CHECK(is_step("rows", 0, 0) && is_step("rows=0", 0, 0) && is_step("rows=07", 0, 7));
    CHECK(is_step("flat=3", MLS_LAYOUT_FLAT, 3) &&
          is_step("axis:12=999999999", 12, 999999999));
}

TEST(steps_without_an_axis_have_a_name)
{
    int axis = 5;
    const char *flat = mls_layout_step_name(MLS_LAYOUT_FLAT);
    CHECK(flat != NULL && strcmp(flat, "flat") == 0);
    CHECK(mls_layout_step_name(0) == NULL && mls_layout_step_name(3) == NULL);
    CHECK(mls_layout_step_name(-2) == NULL);
    CHECK(!mls_layout_step_from_name((mls_str){"rows", 4}, &axis) && axis == 5);
    CHECK(!mls_layout_step_from_name((mls_str){"whole", 5}, &axis) && axis == 5);
    CHECK(mls_layout_step_from_name((mls_str){flat, 4}, &axis) &&
          axis == MLS_LAYOUT_FLAT);
}
