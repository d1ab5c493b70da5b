/* What is visible of layers, against painting every element by hand. */
#include "layers.h"
#include "runner.h"

#include <stdlib.h>

enum { MOST = 300, RUNS = MOST };

static uint64_t state = 7;

static size_t below(size_t limit)
{
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (size_t)(state >> 33) % limit;
}

/* One layer over random rows of a shard; what it holds is painted with its number. */
static void random_layer(mls_layer *layer, mls_extent *runs, size_t elements, int number,
                         int *painted, size_t *places)
{
    *layer = (mls_layer){.row = 1 + below(7), .runs = runs};
    mls_rows rows = {.row = layer->row, .elements = elements};
    const size_t all = (elements + layer->row - 1) / layer->row;
    while (rows.at < all) {
        const size_t skip = below(4) + (rows.at > 0), count = 1 + below(3);
        if (skip + count > all - rows.at) {
            break;
        }
        CHECK(mls_rows_next(&rows, skip, count, &runs[layer->run_count]));
        const mls_extent *run = &runs[layer->run_count++];
        for (size_t i = 0; i < run->count; i++) {
            painted[run->begin + i] = number;
            places[run->begin + i] = run->at + i;
        }
    }
    CHECK(mls_layer_held(layer, elements) == rows.held);
}

/* Every element is in exactly one list, and where it was painted; lists are as short as
 * can be. */
static void check_lists(const mls_layers *layers, size_t elements, const int *painted,
                        const size_t *places, size_t used)
{
    size_t seen = 0, extents = 0, changes = elements > 0;
    for (size_t i = 1; i < elements; i++) {
        changes += painted[i] != painted[i - 1] || places[i] != places[i - 1] + 1;
    }
    for (size_t i = 0; i <= layers->count; i++) {
        const bool zeros = i == layers->count;
        const mls_extent *list = zeros ? layers->zeros : layers->list[i].visible;
        const size_t count = zeros ? layers->zero_count : layers->list[i].visible_count;
        size_t end = 0;
        for (size_t j = 0; j < count; j++) {
            CHECK(list[j].count > 0 && (j == 0 || list[j].begin > end));
            end = list[j].begin + list[j].count;
            REQUIRE(end <= elements);
            for (size_t k = 0; k < list[j].count; k++) {
                const size_t at = list[j].begin + k;
                CHECK(painted[at] == (zeros ? -1 : (int)i));
                CHECK(list[j].at + k == places[at]);
                CHECK(mls_extents_find(list, count, at) == j);
                seen++;
            }
        }
        CHECK(mls_extents_find(list, count, end) == count);
        extents += count;
    }
    CHECK(seen == elements && extents == used && used == changes);
}

static void layers_show_what_was_painted_last(void)
{
    static mls_extent runs[MLS_LAYERS_MOST][RUNS];
    mls_extent *room = malloc((2 * MLS_LAYERS_MOST * RUNS + 1) * sizeof *room);
    REQUIRE(room != NULL);
    for (int round = 0; round < 2000; round++) {
        mls_layer list[MLS_LAYERS_MOST];
        mls_layers layers = {.list = list};
        int painted[MOST];
        size_t places[MOST];
        const size_t elements = below(MOST), count = below(MLS_LAYERS_MOST + 1);
        for (size_t i = 0; i < elements; i++) {
            painted[i] = -1;
            places[i] = i;
        }
        if (below(2) == 0 && count > 0) {
            list[layers.count++] = (mls_layer){.row = 0};
            for (size_t i = 0; i < elements; i++) {
                painted[i] = 0;
            }
        }
        while (layers.count < count) {
            random_layer(&list[layers.count], runs[layers.count], elements,
                         (int)layers.count, painted, places);
            layers.count++;
        }
        const size_t used = mls_layers_resolve(&layers, elements, room);
        CHECK(used <= mls_layers_room(&layers));
        check_lists(&layers, elements, painted, places, used);
    }
    free(room);
}

static void without_layers_all_is_zero(void)
{
    mls_layers layers = {0};
    mls_extent room[1];
    CHECK(mls_layers_room(&layers) == 1);
    CHECK(mls_layers_resolve(&layers, 0, room) == 0 && layers.zero_count == 0);
    CHECK(mls_layers_resolve(&layers, SIZE_MAX, room) == 1 && layers.zeros == room);
    CHECK(room[0].begin == 0 && room[0].count == SIZE_MAX);
}

static void rows_that_the_shard_has_not_are_refused(void)
{
    mls_extent run = {9, 9, 9};
    mls_rows rows = {.row = 4, .elements = 10}; /* three rows, the last of two elements */
    CHECK(!mls_rows_next(&rows, 0, 0, &run));
    CHECK(!mls_rows_next(&rows, 0, 4, &run));
    CHECK(!mls_rows_next(&rows, 4, 1, &run));
    CHECK(!mls_rows_next(&rows, UINT64_MAX, 1, &run));
    CHECK(!mls_rows_next(&rows, 1, UINT64_MAX, &run));
    CHECK(run.begin == 9 && rows.at == 0 && rows.held == 0);
    CHECK(mls_rows_next(&rows, 0, 1, &run) && run.begin == 0 && run.count == 4);
    CHECK(!mls_rows_next(&rows, 0, 1, &run)); /* it would belong to the run before */
    CHECK(mls_rows_next(&rows, 1, 1, &run) && run.begin == 8 && run.count == 2);
    CHECK(run.at == 4 && rows.held == 6);
    CHECK(!mls_rows_next(&rows, 1, 1, &run));
    mls_rows none = {.row = 4};
    CHECK(!mls_rows_next(&none, 0, 1, &run));
    mls_rows huge = {.row = SIZE_MAX, .elements = SIZE_MAX};
    CHECK(mls_rows_next(&huge, 0, 1, &run) && run.count == SIZE_MAX);
}

static const test_case tests[] = {
    TEST(layers_show_what_was_painted_last),
    TEST(without_layers_all_is_zero),
    TEST(rows_that_the_shard_has_not_are_refused),
};

int main(void)
{
    return RUN_TESTS(tests);
}
