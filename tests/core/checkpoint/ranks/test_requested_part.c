/* The stored ranges that a part of a tensor needs. */
#include "checkpoint/ranks/requested_part.h"
#include "support/rank_indexes.h"

/* The reads that a part needs, of the last call of find_pieces. */
static mls_stored_shard stored[MOST];
static mls_part parts[MOST];
static mls_read_piece pieces[MOST];
static size_t count;
static unsigned char place[1];

static mls_code find_pieces(const mls_merged_index_tensor *tensor, const mls_part *to)
{
    const mls_read_scratch scratch = {stored, parts, pieces};
    count = 77;
    return mls_requested_part_pieces(&merged, tensor, to, place, &scratch, &count,
                                     &status);
}

TEST(only_intersecting_shards_are_read)
{
    REQUIRE(mls_merged_index_init(&merged, indexes, RANKS, &failed, &status) == MLS_OK);
    static const size_t counts[] = {2, 2, 1}; /* rows 0 .. 3, 3 .. 6, 6 .. 8 of 2 each */
    for (size_t i = 0; i < 3; i++) {
        const mls_part to = part_at(cut(0, 3), 2, matrix, i);
        CHECK(find_pieces(&merged.tensors[4], &to) == MLS_OK);
        REQUIRE(count == counts[i]);
        for (size_t j = 0; j < count; j++) {
            const mls_stored_shard *shard = pieces[j].shard;
            const rank *from = &ranks[(3 * i) / 2 + j];
            CHECK(shard == &stored[j] && pieces[j].to == &to && pieces[j].data == place);
            CHECK_TEXT(shard->file, from->file.path);
            CHECK(shard->file_bytes == from->file.bytes);
            CHECK(shard->offset == from->shards[1].offset && shard->item_bytes == 4);
            CHECK(shard->part->start[0] == from->shards[1].part * 2);
            CHECK(mls_str_is(shard->name, "w") && shard->crcs == from->shards[1].crcs);
        }
    }
    const mls_part none = part_at(cut(0, 9), 2, matrix, 8);
    count = 77;
    CHECK(mls_requested_part_pieces(&merged, &merged.tensors[4], &none, place,
                                    &(mls_read_scratch){0}, &count, &status) == MLS_OK);
    CHECK(count == 0);
}

TEST(missing_part_is_an_error_only_if_requested)
{
    indexes[1] = indexes[3]; /* rows 2 .. 4 are missing */
    REQUIRE(mls_merged_index_init(&merged, indexes, 3, &failed, &status) == MLS_OK);
    const mls_tensor_id id = id_of("w");
    const mls_merged_index_tensor *w =
        &merged.tensors[mls_merged_index_find(&merged, &id)];
    const mls_part full_part = part_at((mls_layout){0}, 2, matrix, 0);
    CHECK(find_pieces(w, &full_part) == MLS_E_FORMAT);
    CHECK_TEXT(status.name, "w");
    CHECK(strstr(status.text, "3 of its 4 parts") != NULL);
    CHECK(strstr(status.text, "36 of the 48 requested elements") != NULL);
    const mls_part half = part_at(cut(0, 2), 2, matrix, 1);
    CHECK(find_pieces(w, &half) == MLS_OK);
    CHECK(count == 2 && stored[0].part != &half);
    const mls_part row = part_at(cut(0, 4), 2, matrix, 0);
    CHECK(mls_requested_part_pieces(&merged, w, &row, NULL,
                                    &(mls_read_scratch){stored, NULL, pieces}, &count,
                                    &status) == MLS_OK);
    CHECK(count == 1 && stored[0].part == &row); /* a plain shard needs no room */
    const mls_part column = part_at(cut(1, 6), 2, matrix, 3);
    CHECK(find_pieces(w, &column) == MLS_E_FORMAT);
}

/* The work does not grow with the number of parts. */
TEST(huge_part_counts_are_handled)
{
    rank r = rank_of(0);
    add(&r, "w", MLS_U8, 1, hundred, cut(0, 1000000000), 7);
    const mls_index *index = index_of(&r);
    REQUIRE(mls_merged_index_init(&merged, &index, 1, &failed, &status) == MLS_OK);
    const mls_part seventh = part_at(cut(0, 100), 1, hundred, 7);
    const mls_part eighth = part_at(cut(0, 100), 1, hundred, 8);
    CHECK(find_pieces(merged.tensors, &seventh) == MLS_OK);
    CHECK(count == 1);
    CHECK(find_pieces(merged.tensors, &eighth) == MLS_E_FORMAT);
}

TEST(contiguous_part_is_read_in_place)
{
    REQUIRE(mls_merged_index_init(&merged, indexes, RANKS, &failed, &status) == MLS_OK);
    const mls_merged_index_tensor *w = &merged.tensors[4];
    for (size_t row = 0; row < 8; row++) {
        const mls_part to = part_at(cut(0, 8), 2, matrix, row);
        uint64_t offset = 77;
        const mls_merged_index_shard *from =
            mls_requested_part_run(&merged, w, &to, &offset);
        REQUIRE(from != NULL);
        CHECK(from->index->rank == row / 2);
        CHECK(offset == PAYLOAD + 100 + row % 2 * 24);
    }
    uint64_t offset;
    const mls_part two = part_at(cut(0, 2), 2, matrix, 0);    /* from two files */
    const mls_part column = part_at(cut(1, 2), 2, matrix, 0); /* from many places */
    const mls_part none = part_at(cut(0, 9), 2, matrix, 8);
    CHECK(mls_requested_part_run(&merged, w, &two, &offset) == NULL);
    CHECK(mls_requested_part_run(&merged, w, &column, &offset) == NULL);
    CHECK(mls_requested_part_run(&merged, w, &none, &offset) == NULL);
}

/* Part 0 of w, rows 0 and 1: the first half of row 0 in an old layer, then its second
 * sixth in a new one; nothing else. */
TEST(only_visible_overlay_ranges_are_read)
{
    const mls_row_range old = {0, 3, 0}, new = {1, 1, 0};
    mls_layer list[] = {
        {.offset = 8, .bytes = 12, .row = 1, .stored = &old, .stored_count = 1},
        {.offset = 20, .bytes = 4, .row = 1, .stored = &new, .stored_count = 1}};
    mls_layers layers = {.list = list, .count = 2};
    mls_row_range ranges[5];
    CHECK(mls_layers_room(&layers) == 5);
    CHECK(mls_layers_resolve(&layers, 12, ranges) == 4);
    ranks[0].shards[1].layers = &layers;
    REQUIRE(mls_merged_index_init(&merged, indexes, RANKS, &failed, &status) == MLS_OK);
    const mls_merged_index_tensor *w = &merged.tensors[4];
    REQUIRE(w->places == 6); /* three plain ones, two layers, zeros */
    static const struct {
        size_t columns, part, pieces;
        uint64_t offsets[3];
    } cases[] = {{6, 0, 2, {8, 0}},
                 {6, 1, 2, {20, 0}},
                 {6, 2, 2, {8, 0}},
                 {6, 3, 1, {0}},
                 {2, 0, 3, {8, 20, 0}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const mls_part to = part_at(cut(1, cases[i].columns), 2, matrix, cases[i].part);
        CHECK(find_pieces(w, &to) == MLS_OK);
        REQUIRE(count == cases[i].pieces + 3);
        for (size_t j = 0; j < cases[i].pieces; j++) {
            const bool zeros = j == cases[i].pieces - 1;
            CHECK((stored[j].file == NULL) == zeros);
            CHECK(stored[j].visible != NULL && stored[j].offset == cases[i].offsets[j]);
            CHECK(stored[j].bytes == (zeros ? 48U : stored[j].offset == 8 ? 12U : 4U));
        }
        CHECK(stored[cases[i].pieces].visible == NULL);
    }
    uint64_t offset;
    const mls_part row = part_at(cut(0, 8), 2, matrix, 0);
    CHECK(mls_requested_part_run(&merged, w, &row, &offset) == NULL);
}

TEST(a_part_that_is_not_stored_has_no_run)
{
    uint64_t offset;
    REQUIRE(mls_merged_index_init(&merged, indexes, 2, &failed, &status) == MLS_OK);
    const mls_part last = part_at(cut(0, 4), 2, matrix, 3);
    const mls_part middle =
        part_at(cut(0, 3), 2, matrix, 1); /* starts within a stored part */
    CHECK(mls_requested_part_run(&merged, &merged.tensors[2], &last, &offset) == NULL);
    CHECK(mls_requested_part_run(&merged, &merged.tensors[2], &middle, &offset) == NULL);
}
