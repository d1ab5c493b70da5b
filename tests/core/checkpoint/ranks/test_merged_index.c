/* The indexes of all ranks as one list of tensors, and the reads that a part needs. */
#include "checkpoint/ranks/merged_index.h"
#include "support/parts.h"
#include "support/text.h"

#include <stdint.h>

enum { RANKS = 4, MOST = 6, PAYLOAD = 4096 };

static const size_t matrix[] = {8, 6}, hundred[] = {100};

/* The shards that one rank stored, added in order. */
typedef struct rank {
    mls_index index;
    mls_index_file file;
    mls_index_shard shards[MOST];
} rank;

static rank rank_of(uint64_t number)
{
    rank r = {.index = {.rank = number, .world_size = RANKS, .file_count = 1}};
    snprintf(r.file.path, sizeof r.file.path, "params/%d.safetensors", (int)number);
    r.file.bytes = PAYLOAD;
    return r;
}

static void add(rank *r, const char *name, mls_dtype dtype, int dims, const size_t *shape,
                mls_layout layout, size_t part)
{
    mls_index_shard *shard = &r->shards[r->index.shard_count++];
    *shard = (mls_index_shard){.id = {.name = text(name)},
                               .dtype = dtype,
                               .rank = dims,
                               .shape = shape,
                               .layout = layout,
                               .part = part,
                               .version = 1,
                               .offset = r->file.bytes};
    const mls_part full_part = mls_index_part(shard);
    shard->bytes = mls_part_count(&full_part) * mls_dtype_of(dtype)->item_bytes;
    r->file.bytes += shard->bytes;
}

/* The index of a rank, which must not move. */
static const mls_index *index_of(rank *r)
{
    r->index.files = &r->file;
    r->index.shards = r->shards;
    return &r->index;
}

static mls_tensor_id id_of(const char *name)
{
    return (mls_tensor_id){.name = text(name)};
}

/* Four ranks, each with a row part of "w"; "only.0" .. "only.3" are on one rank each. */
static rank ranks[RANKS];
static const mls_index *indexes[RANKS];
static mls_merged_index merged;
static const mls_index *failed; /* by the last mls_merged_index_init */

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
    return mls_merged_index_pieces(&merged, tensor, to, place, &scratch, &count, &status);
}

BEFORE_EACH
{
    static const char *const names[] = {"only.0", "only.1", "only.2", "only.3"};
    for (size_t i = 0; i < RANKS; i++) {
        ranks[i] = rank_of(i);
        add(&ranks[i], names[i], MLS_U8, 1, hundred, (mls_layout){0}, 0);
        add(&ranks[i], "w", MLS_F32, 2, matrix, cut(0, 4), i);
        indexes[i] = index_of(&ranks[i]);
    }
}

AFTER_EACH
{
    mls_merged_index_fini(&merged);
}

TEST(parts_of_all_ranks_come_together)
{
    static const char *const names[] = {"only.0", "only.1", "only.2", "only.3", "w"};
    const mls_index *turned[RANKS] = {indexes[2], indexes[0], indexes[3], indexes[1]};
    REQUIRE(mls_merged_index_init(&merged, turned, RANKS, &failed, &status) == MLS_OK);
    REQUIRE(merged.tensor_count == 5 && merged.shard_count == 8);
    for (size_t i = 0; i < 5; i++) {
        const mls_tensor_id id = id_of(names[i]);
        CHECK(mls_str_is(merged.tensors[i].any_shard->id.name, names[i]));
        CHECK(merged.tensors[i].count == (i == 4 ? 4U : 1U));
        CHECK(mls_merged_index_find(&merged, &id) == i);
    }
    for (size_t i = 0; i < RANKS; i++) {
        const mls_merged_index_shard *shard = &merged.shards[merged.tensors[4].from + i];
        CHECK(shard->shard->part == i && shard->index->rank == i);
    }
    mls_merged_index_fini(&merged);
    mls_merged_index_fini(&merged); /* zeroed */
}

TEST(absent_tensors_return_no_index)
{
    static const char *const absent[] = {"", "only", "only.4", "w.", "x"};
    REQUIRE(mls_merged_index_init(&merged, indexes, RANKS, &failed, &status) == MLS_OK);
    for (size_t i = 0; i < sizeof absent / sizeof absent[0]; i++) {
        const mls_tensor_id id = id_of(absent[i]);
        CHECK(mls_merged_index_find(&merged, &id) == SIZE_MAX);
    }
    mls_tensor_id state = id_of("w");
    state.section = MLS_OPTIM_STATE;
    CHECK(mls_merged_index_find(&merged, &state) == SIZE_MAX);
    mls_merged_index_fini(&merged);
    REQUIRE(mls_merged_index_init(&merged, NULL, 0, &failed, &status) == MLS_OK);
    CHECK(merged.tensor_count == 0 && mls_merged_index_find(&merged, &state) == SIZE_MAX);
}

/* Replicated tensors: the first index in the list wins. */
TEST(replicated_part_belongs_to_the_first_rank)
{
    for (size_t i = 0; i < 3; i++) {
        ranks[i] = rank_of(i + 1);
        add(&ranks[i], "b", MLS_F32, 2, matrix, cut(1, 2), i == 2);
        add(&ranks[i], "w", MLS_U8, 1, hundred, (mls_layout){0}, 0);
        indexes[i] = index_of(&ranks[i]);
    }
    const mls_index *turned[] = {indexes[2], indexes[1], indexes[0]};
    REQUIRE(mls_merged_index_init(&merged, turned, 3, &failed, &status) == MLS_OK);
    REQUIRE(merged.tensor_count == 2 && merged.shard_count == 3);
    CHECK(merged.tensors[0].count == 2 && merged.tensors[1].count == 1);
    CHECK(merged.shards[0].index->rank == 1 && merged.shards[1].index->rank == 3);
    CHECK(merged.shards[2].index->rank == 1);
}

TEST(disagreeing_ranks_are_refused)
{
    const size_t other[] = {6, 8};
    for (size_t i = 0; i < 5; i++) {
        rank a = rank_of(0), b = rank_of(1);
        add(&a, "w", MLS_F32, 2, matrix, cut(0, 2), 0);
        add(&b, "w", i == 0 ? MLS_I32 : MLS_F32, i == 1 ? 1 : 2, i == 2 ? other : matrix,
            i == 3 ? cut(0, 3) : cut(i == 4 ? MLS_LAYOUT_FLAT : 0, 2), 1);
        const mls_index *both[] = {index_of(&a), index_of(&b)};
        merged = (mls_merged_index){.tensor_count = 77};
        CHECK(mls_merged_index_init(&merged, both, 2, &failed, &status) == MLS_E_FORMAT);
        CHECK_TEXT(status.name, "w");
        CHECK(strstr(status.text, "rank 0 and one of rank 1") != NULL);
        CHECK(failed == both[1] && merged.tensor_count == 77);
    }
    merged = (mls_merged_index){0};
}

/* Two ranks share a file: their shards must fit into it, and both must describe the same
 * file. */
TEST(a_file_of_several_ranks_is_one_file)
{
    for (uint64_t claimed = 200; claimed >= 199; claimed--) {
        for (size_t i = 0; i < 2; i++) {
            ranks[i] = rank_of(i);
            add(&ranks[i], i == 0 ? "a" : "b", MLS_U8, 1, hundred, (mls_layout){0}, 0);
            snprintf(ranks[i].file.path, sizeof ranks[i].file.path, "params/x");
            ranks[i].file.bytes = claimed;
            indexes[i] = index_of(&ranks[i]);
        }
        merged = (mls_merged_index){.tensor_count = 77};
        CHECK(mls_merged_index_init(&merged, indexes, 2, &failed, &status) ==
              (claimed == 200 ? MLS_OK : MLS_E_FORMAT));
        CHECK(merged.tensor_count == (claimed == 200 ? 2U : 77U));
        if (claimed == 200) {
            mls_merged_index_fini(&merged);
        }
        ranks[1].file.header_crc = 1;
        CHECK(mls_merged_index_init(&merged, indexes, 2, &failed, &status) ==
              MLS_E_FORMAT);
        CHECK(strstr(status.text, "ranks 0 and 1") != NULL && failed == indexes[1]);
        CHECK(strstr(status.text, "params/x") != NULL);
        ranks[1].file.header_crc = 0;
        ranks[1].file.bytes = 4000;
        CHECK(mls_merged_index_init(&merged, indexes, 2, &failed, &status) ==
              MLS_E_FORMAT);
    }
    merged = (mls_merged_index){0};
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
    CHECK(mls_merged_index_pieces(&merged, &merged.tensors[4], &none, place,
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
    CHECK(mls_merged_index_pieces(&merged, w, &row, NULL,
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
            mls_merged_index_run(&merged, w, &to, &offset);
        REQUIRE(from != NULL);
        CHECK(from->index->rank == row / 2);
        CHECK(offset == PAYLOAD + 100 + row % 2 * 24);
    }
    uint64_t offset;
    const mls_part two = part_at(cut(0, 2), 2, matrix, 0);    /* from two files */
    const mls_part column = part_at(cut(1, 2), 2, matrix, 0); /* from many places */
    const mls_part none = part_at(cut(0, 9), 2, matrix, 8);
    CHECK(mls_merged_index_run(&merged, w, &two, &offset) == NULL);
    CHECK(mls_merged_index_run(&merged, w, &column, &offset) == NULL);
    CHECK(mls_merged_index_run(&merged, w, &none, &offset) == NULL);
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
    CHECK(mls_merged_index_run(&merged, w, &row, &offset) == NULL);
}

TEST(a_part_that_is_not_stored_has_no_run)
{
    uint64_t offset;
    REQUIRE(mls_merged_index_init(&merged, indexes, 2, &failed, &status) == MLS_OK);
    const mls_part last = part_at(cut(0, 4), 2, matrix, 3);
    const mls_part middle =
        part_at(cut(0, 3), 2, matrix, 1); /* starts within a stored part */
    CHECK(mls_merged_index_run(&merged, &merged.tensors[2], &last, &offset) == NULL);
    CHECK(mls_merged_index_run(&merged, &merged.tensors[2], &middle, &offset) == NULL);
}
