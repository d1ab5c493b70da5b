#include "base/memory.h"
#include "state/name_tree_preview.h"
#include "support/runner.h"
#include "support/text.h"

enum { MOST = 12000, NAME = 48 };

static char texts[MOST][NAME];
static mls_str names[MOST];

/* ---- of the current test ---- */

static mls_name_tree *tree;
static mls_name_tree_preview_row *rows;
static size_t count;

AFTER_EACH
{
    mls_free(rows);
    mls_name_tree_free(tree);
    rows = NULL;
    tree = NULL;
}

/* Make the tree of `most` names written by `write`. */
static void make_tree(size_t most, void (*write)(char *chars, size_t i))
{
    mls_name_tree_free(tree);
    for (size_t i = 0; i < most; i++) {
        write(texts[i], i);
        names[i] = text(texts[i]);
    }
    CHECK(mls_name_tree_new(names, most, &tree, &status) == MLS_OK);
}

/* Make the rows of the tree; returns their number. */
static size_t preview(size_t limit, size_t siblings)
{
    mls_free(rows);
    count = SIZE_MAX;
    CHECK(mls_name_tree_preview_new(tree, limit, siblings, &rows, &count, &status) ==
          MLS_OK);
    return count;
}

static void layered(char *chars, size_t i)
{
    snprintf(chars, NAME, "layers.%zu.part%zu", i / 9, i % 9);
}

static void flat(char *chars, size_t i)
{
    snprintf(chars, NAME, "t%zu", i);
}

static void few(char *chars, size_t i)
{
    snprintf(chars, NAME, "%c.%zu", (char)('a' + i / 2), i % 2);
}

/* The number of names that the rows stand for: names below closed rows, below counted
 * siblings, and names that end at an open row. */
static size_t names_shown(void)
{
    const mls_name_node *nodes = mls_name_tree_nodes(tree);
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t node = rows[i].node;
        if (rows[i].open) {
            sum += nodes[node].name != MLS_NAME_NONE;
            continue;
        }
        for (uint32_t k = 0; k < (rows[i].hidden == 0 ? 1 : rows[i].hidden); k++) {
            sum += nodes[node].count;
            node = nodes[node].next_sibling;
        }
    }
    return sum;
}

TEST(every_name_is_shown_or_counted_within_the_rows)
{
    static const size_t limits[] = {1, 2, 3, 12, 40, 120, SIZE_MAX};
    void (*const kinds[])(char *, size_t) = {layered, flat, few};
    const size_t counts[] = {10000, 10000, 8};
    for (size_t kind = 0; kind < 3; kind++) {
        make_tree(counts[kind], kinds[kind]);
        for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
            CHECK(preview(limits[i], 12) > 0 && count <= limits[i]);
            CHECK(names_shown() == counts[kind]);
        }
    }
}

TEST(rows_come_in_pre_order_with_the_last_sibling)
{
    make_tree(8, few); /* a.0 a.1 b.0 ... d.1 */
    const mls_name_node *nodes = mls_name_tree_nodes(tree);
    /* a with two members, two siblings counted, d with two members */
    CHECK(preview(7, 3) == 7);
    CHECK(mls_str_is(nodes[rows[0].node].path, "a") && rows[0].open);
    CHECK(mls_str_is(nodes[rows[1].node].path, "a.0") && !rows[1].open);
    CHECK(mls_str_is(nodes[rows[2].node].path, "a.1"));
    CHECK(mls_str_is(nodes[rows[3].node].path, "b") && rows[3].hidden == 2);
    CHECK(mls_str_is(nodes[rows[4].node].path, "d") && rows[4].open);
}

static void one(char *chars, size_t i)
{
    snprintf(chars, NAME, "%c.x.y", (char)('a' + i));
}

TEST(a_single_name_needs_one_row)
{
    make_tree(3, one);
    CHECK(preview(50, 12) == 3);
    CHECK(!rows[0].open && mls_name_tree_nodes(tree)[rows[0].node].count == 1);
}

TEST(no_rows_and_no_names_give_nothing)
{
    make_tree(8, few);
    CHECK(preview(0, 12) == 0);
    make_tree(0, few);
    CHECK(preview(50, 12) == 0);
}

TEST(a_deep_name_costs_no_stack)
{
    enum { DEEP = 200000 };
    char *chars = mls_alloc(DEEP, 1);
    for (size_t i = 0; i < DEEP; i++) {
        chars[i] = i % 2 == 0 ? 'x' : '.';
    }
    /* two names that share all parts except the last */
    const mls_str both[] = {{.data = chars, .length = DEEP - 1},
                            {.data = chars, .length = DEEP - 3}};
    CHECK(mls_name_tree_new(both, 2, &tree, &status) == MLS_OK);
    CHECK(preview(SIZE_MAX, 3) == DEEP / 2);
    mls_free(chars);
}

/* "a", "a.b", "c.x.y", "d.0", "d.1" with 1, 2, 4, 8 and 16 bytes. */
TEST(rows_say_what_lies_under_them)
{
    const mls_str five[] = {{"a", 1}, {"a.b", 3}, {"c.x.y", 5}, {"d.0", 3}, {"d.1", 3}};
    const mls_name_tree_preview_sum leaves[] = {
        {1, "int8"}, {2, "int8"}, {4, NULL}, {8, "int8"}, {16, "float32"}};
    mls_name_tree_preview_sum *sums = NULL;
    REQUIRE(mls_name_tree_new(five, 5, &tree, &status) == MLS_OK);
    REQUIRE(mls_name_tree_preview_sums(tree, leaves, &sums, &status) == MLS_OK);
    CHECK(sums[0].bytes == 31);
    CHECK_TEXT(sums[0].dtype, "mixed");
    const uint32_t a = mls_name_tree_find(tree, five[0]);
    const uint32_t c = mls_name_tree_find(tree, (mls_str){"c", 1});
    mls_name_tree_preview_row row = {.node = a};
    mls_name_tree_preview_entry e = mls_name_tree_preview_describe(tree, sums, &row);
    CHECK(e.count == 2 && e.name == 0 && e.sum.bytes == 3 && mls_str_is(e.label, "a"));
    CHECK_TEXT(e.sum.dtype, "int8");
    row.node = c; /* a single name is shown in full */
    e = mls_name_tree_preview_describe(tree, sums, &row);
    CHECK(e.count == 1 && e.name == 2 && mls_str_is(e.label, "c.x.y"));
    CHECK(e.sum.bytes == 4 && e.sum.dtype == NULL);
    row = (mls_name_tree_preview_row){.node = c, .hidden = 2};
    e = mls_name_tree_preview_describe(tree, sums, &row);
    CHECK(e.count == 3 && e.name == MLS_NAME_NONE && e.sum.bytes == 28);
    CHECK_TEXT(e.sum.dtype, "mixed");
    row = (mls_name_tree_preview_row){.node = mls_name_tree_find(tree, five[1])};
    e = mls_name_tree_preview_describe(tree, sums, &row);
    CHECK(e.name == 1 && mls_str_is(e.label, "b"));
    mls_free(sums);
}
