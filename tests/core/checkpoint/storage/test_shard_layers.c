/* The visible ranges of layers, compared with painting every element. */
#include "checkpoint/storage/shard_layers.h"
#include "support/random_bytes.h"
#include "support/runner.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 300, RUNS = MOST };

/* A layer over random rows of a shard; its elements are painted with its number. */
static void random_layer(mls_layer *layer, mls_row_range *runs, size_t elements,
                         int number, int *painted, size_t *places)
{
    *layer = (mls_layer){.row = 1 + below(7), .stored = runs};
    mls_rows rows = mls_layer_rows(layer->row, elements);
    while (rows.at < rows.row_count) {
        const size_t skip = below(4) + (rows.at > 0), count = 1 + below(3);
        if (skip + count > rows.row_count - rows.at) {
            break;
        }
        CHECK(mls_rows_next(&rows, skip, count, &runs[layer->stored_count]));
        const mls_row_range *run = &runs[layer->stored_count++];
        for (size_t i = 0; i < run->count; i++) {
            painted[run->begin + i] = number;
            places[run->begin + i] = run->at + i;
        }
    }
    CHECK(mls_layer_element_count(layer, elements) == rows.stored_before);
}

/* Every element is in exactly one list, at its painted position; lists are as short as
 * possible. */
static void check_lists(const mls_layers *layers, size_t elements, const int *painted,
                        const size_t *places, size_t used)
{
    size_t seen = 0, range_count = 0, changes = elements > 0;
    for (size_t i = 1; i < elements; i++) {
        changes += painted[i] != painted[i - 1] || places[i] != places[i - 1] + 1;
    }
    for (size_t i = 0; i <= layers->count; i++) {
        const bool zeros = i == layers->count;
        const mls_row_range *list = zeros ? layers->zeros : layers->list[i].visible;
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
                CHECK(mls_row_ranges_find(list, count, at) == j);
                seen++;
            }
        }
        CHECK(mls_row_ranges_find(list, count, end) == count);
        range_count += count;
    }
    /* a single layer shows exactly its runs, and needs no room */
    const bool alone = layers->count == 1 && layers->list[0].row != 0;
    const size_t elsewhere = alone ? layers->list[0].stored_count : 0;
    CHECK(seen == elements && range_count == used + elsewhere && range_count == changes);
}

TEST(newest_overlay_is_visible)
{
    static mls_row_range runs[MLS_LAYERS_MOST][RUNS];
    mls_row_range *room = malloc((2 * MLS_LAYERS_MOST * RUNS + 1) * sizeof *room);
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

TEST(shard_without_overlays_is_zero)
{
    mls_layers layers = {0};
    mls_row_range room[1];
    CHECK(mls_layers_room(&layers) == 1);
    CHECK(mls_layers_resolve(&layers, 0, room) == 0 && layers.zero_count == 0);
    CHECK(mls_layers_resolve(&layers, SIZE_MAX, room) == 1 && layers.zeros == room);
    CHECK(room[0].begin == 0 && room[0].count == SIZE_MAX);
}

TEST(rows_beyond_the_shard_are_refused)
{
    mls_row_range run = {9, 9, 9};
    mls_rows rows = mls_layer_rows(4, 10); /* three rows, the last of two elements */
    CHECK(!mls_rows_next(&rows, 0, 0, &run));
    CHECK(!mls_rows_next(&rows, 0, 4, &run));
    CHECK(!mls_rows_next(&rows, 4, 1, &run));
    CHECK(!mls_rows_next(&rows, UINT64_MAX, 1, &run));
    CHECK(!mls_rows_next(&rows, 1, UINT64_MAX, &run));
    CHECK(run.begin == 9 && rows.at == 0 && rows.stored_before == 0);
    CHECK(mls_rows_next(&rows, 0, 1, &run) && run.begin == 0 && run.count == 4);
    CHECK(!mls_rows_next(&rows, 0, 1, &run)); /* it would belong to the previous run */
    CHECK(mls_rows_next(&rows, 1, 1, &run) && run.begin == 8 && run.count == 2);
    CHECK(run.at == 4 && rows.stored_before == 6);
    CHECK(!mls_rows_next(&rows, 1, 1, &run));
    mls_rows none = mls_layer_rows(4, 0);
    CHECK(!mls_rows_next(&none, 0, 1, &run));
    mls_rows huge = mls_layer_rows(SIZE_MAX, SIZE_MAX);
    CHECK(mls_rows_next(&huge, 0, 1, &run) && run.count == SIZE_MAX);
}

/* The number of runs in a text; SIZE_MAX if it is refused. */
static size_t runs_of(const char *text, size_t row, size_t elements, mls_row_range *runs)
{
    size_t count;
    mls_rows rows = mls_layer_rows(row, elements);
    const mls_str all = {text, strlen(text)};
    return mls_layer_rows_read(&rows, all, runs, &count) ? count : SIZE_MAX;
}

TEST(rows_are_read_from_their_text)
{
    static const char *const refused[] = {"",
                                          "1",
                                          "0,1,1",
                                          ",",
                                          "0,",
                                          ",1",
                                          "0,1,",
                                          "0,,1",
                                          "0 ,1",
                                          " 0,1",
                                          "0,1 ",
                                          "00,1",
                                          "0,01",
                                          "-1,1",
                                          "+0,1",
                                          "0,1.0",
                                          "0;1",
                                          "0,1,0,1",
                                          "0,0",
                                          "3,1",
                                          "0x0,1",
                                          "0,18446744073709551616",
                                          "18446744073709551615,1",
                                          "99999999999999999999,1"};
    mls_row_range runs[4];
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        CHECK(runs_of(refused[i], 4, 10, runs) == SIZE_MAX);
    }
    CHECK(runs_of("1,1", 4, 10, runs) == 1 && runs[0].begin == 4 && runs[0].count == 4);
    REQUIRE(runs_of("0,1,1,1", 4, 10, runs) == 2);
    CHECK(runs[0].begin == 0 && runs[0].count == 4 && runs[0].at == 0);
    CHECK(runs[1].begin == 8 && runs[1].count == 2 && runs[1].at == 4);
    CHECK(runs_of("0,18446744073709551615", 1, SIZE_MAX, runs) == 1);
    CHECK(runs[0].count == SIZE_MAX);
    CHECK(mls_layer_rows_count((mls_str){"0,1,1,1", 7}) == 2);
    CHECK(mls_layer_rows_count((mls_str){"0,1", 3}) == 1);
}
