#include "base/memory.h"
#include "state/name_tree.h"

#include "support/runner.h"
#include "support/text.h"

#include <stdlib.h>
#include <time.h>

static mls_name_tree *names; /* of the current test */

AFTER_EACH
{
    mls_name_tree_free(names);
    names = NULL;
}

/* Make the tree of a list. */
static bool grows(const mls_str *list, size_t count)
{
    mls_status st;
    mls_name_tree_free(names);
    names = NULL;
    return mls_name_tree_new(list, count, &names, &st) == MLS_OK && names != NULL;
}

static const mls_name_node *node_at(mls_str path)
{
    const uint32_t node = mls_name_tree_find(names, path);
    return node == MLS_NAME_NONE ? NULL : &mls_name_tree_nodes(names)[node];
}

/* The position of a whole name, or MLS_NAME_NONE. */
static uint32_t position_of(mls_str name)
{
    const mls_name_node *node = node_at(name);
    return node == NULL ? MLS_NAME_NONE : node->name;
}

/* Whether exactly these positions are below `path`, or in the tree for an empty path. */
static bool under_is(mls_str path, const uint32_t *want, size_t count)
{
    uint32_t got[64];
    const uint32_t node = path.length == 0 ? 0 : mls_name_tree_find(names, path);
    return node != MLS_NAME_NONE && mls_name_tree_nodes(names)[node].count <= 64 &&
           mls_name_tree_under(names, node, got) == count &&
           (count == 0 || memcmp(got, want, count * sizeof *want) == 0);
}

#define UNDER(path, ...)                                                                 \
    under_is(path, (const uint32_t[]){__VA_ARGS__},                                      \
             sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

TEST(no_names_are_a_tree_of_one_node)
{
    REQUIRE(grows(NULL, 0));
    uint32_t none;
    CHECK(mls_name_tree_size(names) == 1 && mls_name_tree_nodes(names)[0].count == 0);
    CHECK(mls_name_tree_under(names, 0, &none) == 0);
    CHECK(mls_name_tree_find(names, TEXT("a")) == MLS_NAME_NONE);
    mls_name_tree_free(NULL);
}

TEST(an_empty_name_may_have_no_memory)
{
    const mls_str list[] = {TEXT("a"), {.data = NULL, .length = 0}, TEXT("b")};
    REQUIRE(grows(list, 3));
    CHECK(position_of((mls_str){0}) == 1);
    CHECK(position_of(TEXT("b")) == 2);
}

TEST(any_bytes_are_a_name)
{
    const mls_str list[] = {TEXT("a\0b.c"),
                            TEXT("a\0c.c"),
                            TEXT("a"),
                            TEXT("%s%n.\"quoted\".'x'"),
                            TEXT("sch\xC3\xB6n"),
                            TEXT("sch\xC3\xB6"),
                            TEXT("\xFF\xFE.\x80"),
                            TEXT("a b.\n")};
    REQUIRE(grows(list, 8));
    for (uint32_t i = 0; i < 8; i++) {
        CHECK(position_of(list[i]) == i);
    }
    CHECK(UNDER(TEXT("a\0b"), 0));
    CHECK(UNDER(TEXT("%s%n"), 3));
    CHECK(under_is(TEXT("a"), NULL, 0));
}

TEST(a_name_that_occurs_twice_is_refused)
{
    const mls_str list[] = {TEXT("a.b"), TEXT("100%s.x"), TEXT("c"), TEXT("100%s.x")};
    CHECK(mls_name_tree_new(list, 4, &names, &status) == MLS_E_VALUE && names == NULL);
    CHECK_TEXT(status.name, "100%s.x");
    CHECK_TEXT(status.text, "names 1 and 3 of the list are the same");
    const mls_str neighbours[] = {TEXT(""), TEXT("")};
    CHECK(mls_name_tree_new(neighbours, 2, &names, &status) == MLS_E_VALUE &&
          names == NULL);
    CHECK(mls_name_tree_new(neighbours, 1, &names, &status) == MLS_OK);
}

TEST(a_list_that_is_too_long_is_refused_unread)
{
    CHECK_FAILS(mls_name_tree_new(NULL, (size_t)1 << 31, &names, &status), MLS_E_CAPACITY,
                "the names have more than 2147483648 segments");
    CHECK(mls_name_tree_new(NULL, SIZE_MAX, &names, &status) == MLS_E_CAPACITY);
    CHECK(names == NULL);
}

enum { DEPTH = 2000, LONG = 5000 };

TEST(depth_costs_no_stack)
{
    /* "a.a.a...", the same with another end, and siblings of all its ancestors */
    static char deep[2][2 * DEPTH];
    for (size_t i = 0; i < DEPTH; i++) {
        memcpy(deep[0] + 2 * i, "a.", 2);
    }
    memcpy(deep[1], deep[0], sizeof deep[0]);
    deep[1][2 * DEPTH - 2] = 'b';
    const mls_str list[] = {
        {deep[0], 2 * DEPTH - 1}, TEXT("b"), {deep[1], 2 * DEPTH - 1}};
    REQUIRE(grows(list, 3));
    CHECK(mls_name_tree_size(names) == DEPTH + 3);
    CHECK(position_of(list[2]) == 2);
    const mls_name_node *last = node_at(list[2]);
    REQUIRE(last != NULL);
    CHECK(last->depth == DEPTH && mls_str_is(last->segment, "b"));
    CHECK(UNDER(TEXT("a.a.a"), 0, 2));
    CHECK(UNDER(TEXT(""), 0, 1, 2));
}

TEST(long_names_differ_by_any_byte)
{
    /* one segment of 5,000 characters, and its copies with one byte changed */
    enum { COPIES = 40 };
    static char chars[COPIES][LONG];
    mls_str list[COPIES];
    for (size_t i = 0; i < COPIES; i++) {
        memset(chars[i], 'x', LONG);
        if (i > 0) {
            chars[i][i < 20 ? i : LONG - i + 19] = 'y';
        }
        list[i] = (mls_str){chars[i], LONG};
    }
    REQUIRE(grows(list, COPIES));
    for (uint32_t i = 0; i < COPIES; i++) {
        CHECK(position_of(list[i]) == i);
    }
    CHECK(position_of((mls_str){chars[0], LONG - 1}) == MLS_NAME_NONE);
}

/* Whether `name` is below `path`, by its bytes alone. */
static bool is_under(mls_str name, mls_str path)
{
    return mls_str_starts(name, path) && name.length > path.length &&
           name.data[path.length] == '.';
}

/* Random distinct names of few letters; returns their number. */
static size_t random_names(char chars[][12], mls_str *list, size_t count)
{
    static const char letters[] = "ab.";
    size_t name_count = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t length = (size_t)rand() % 12;
        for (size_t j = 0; j < length; j++) {
            chars[name_count][j] = letters[rand() % 3];
        }
        list[name_count] = (mls_str){chars[name_count], length};
        bool is_new = true;
        for (size_t j = 0; j < name_count; j++) {
            is_new = is_new && !mls_str_equal(list[j], list[name_count]);
        }
        name_count += is_new;
    }
    return name_count;
}

/* Compare one node with a scan of all names. */
static void check_node(uint32_t node, const mls_str *list, size_t count)
{
    uint32_t got[64];
    const mls_name_node *at = &mls_name_tree_nodes(names)[node];
    const size_t name_count = mls_name_tree_under(names, node, got);
    size_t want = 0;
    for (size_t i = 0; i < count; i++) {
        if (node == 0 || is_under(list[i], at->path)) {
            CHECK(want < name_count && got[want] == i);
            want++;
        } else if (mls_str_equal(list[i], at->path)) {
            CHECK(at->name == i);
        }
    }
    CHECK(name_count == want && at->count == want + (at->name != MLS_NAME_NONE));
    CHECK(node == 0 || mls_name_tree_find(names, at->path) == node);
}

TEST(random_trees_agree_with_a_look_at_all_names)
{
    static char chars[60][12];
    mls_str list[60];
    srand(20);
    for (int round = 0; round < 300; round++) {
        const size_t count = random_names(chars, list, 60);
        REQUIRE(grows(list, count));
        for (uint32_t node = 0; node < mls_name_tree_size(names); node++) {
            check_node(node, list, count);
        }
        for (size_t i = 0; i < count; i++) {
            CHECK(position_of(list[i]) == i);
        }
    }
}

enum { MANY = 60000 };

/* Names that differ in a few bytes only, as generated names do: a number, in random
 * order, between two constants. */
static void many_names(const char *head, int digits, const char *tail, char (*chars)[48],
                       mls_str *list)
{
    for (size_t i = 0; i < MANY; i++) {
        const unsigned number = (unsigned)(i * 7919 % MANY);
        const int length =
            snprintf(chars[i], sizeof chars[i], "%s%0*u%s", head, digits, number, tail);
        list[i] = (mls_str){chars[i], (size_t)length};
    }
}

TEST(many_children_of_one_node_take_no_longer)
{
    static const char *const heads[] = {"", "", "x", "a.b.", "12345678"};
    static const int digits[] = {1, 8, 1, 16, 24};
    static const char *const tails[] = {"", "", ".w", ".weight", "00000000"};
    static char chars[MANY][48];
    static mls_str list[MANY];
    for (size_t form = 0; form < 5; form++) {
        many_names(heads[form], digits[form], tails[form], chars, list);
        const clock_t start = clock();
        REQUIRE(grows(list, MANY));
        for (uint32_t i = 0; i < MANY; i += 7) {
            CHECK(position_of(list[i]) == i);
        }
        /* about 20 ms; with linear searches it would take a minute */
        CHECK((double)(clock() - start) / CLOCKS_PER_SEC < 10);
    }
}

/* The paths of the layers, concatenated, each followed by a bar. */
static const char *layers_of(const char *const *list, size_t count, uint32_t depth)
{
    static char text[400];
    mls_status st;
    mls_str borrowed[16];
    mls_name_tree *tree = NULL;
    uint32_t *layers = NULL;
    size_t layer_count = 0, length = 0;
    for (size_t i = 0; i < count; i++) {
        borrowed[i] = (mls_str){.data = list[i], .length = strlen(list[i])};
    }
    CHECK(mls_name_tree_new(borrowed, count, &tree, &st) == MLS_OK);
    CHECK(mls_name_tree_layers(tree, depth, &layers, &layer_count, &st) == MLS_OK);
    for (size_t i = 0; i < layer_count; i++) {
        const mls_str path = mls_name_tree_nodes(tree)[layers[i]].path;
        memcpy(text + length, path.data, path.length);
        length += path.length;
        text[length++] = '|';
    }
    text[length] = '\0';
    mls_free(layers);
    mls_name_tree_free(tree);
    return text;
}

TEST(layers_come_in_the_order_of_their_first_names)
{
    static const char *const list[] = {"a.b.w", "c", "a.x", "d.e.f.w", "a.b.v", "d.w"};
    CHECK(strcmp(layers_of(list, 6, 0), "a.b||a|d.e.f|d|") == 0);
    CHECK(strcmp(layers_of(list, 6, 1), "a|d|") == 0);
    CHECK(strcmp(layers_of(list, 6, 2), "a.b|d.e|") == 0);
    CHECK(strcmp(layers_of(list, 6, 9), "") == 0);
    CHECK(strcmp(layers_of(list, 0, 0), "") == 0);
}
