/* The indexes of all ranks as one list of tensors. */
#include "support/rank_indexes.h"

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
        CHECK_FAILS(mls_merged_index_init(&merged, both, 2, &failed, &status),
                    MLS_E_FORMAT,
                    "the dtype, shape or layout of a tensor differs between a shard of "
                    "rank 0 and one of rank 1");
        CHECK_TEXT(status.name, "w");
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
        CHECK_FAILS(mls_merged_index_init(&merged, indexes, 2, &failed, &status),
                    MLS_E_FORMAT,
                    "ranks 0 and 1 have different records of the file params/x");
        CHECK(failed == indexes[1]);
        ranks[1].file.header_crc = 0;
        ranks[1].file.bytes = 4000;
        CHECK(mls_merged_index_init(&merged, indexes, 2, &failed, &status) ==
              MLS_E_FORMAT);
    }
    merged = (mls_merged_index){0};
}
