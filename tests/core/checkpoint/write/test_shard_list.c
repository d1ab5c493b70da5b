/* The list of shards to write. */
#include "checkpoint/write/shard_list.h"
#include "support/parts.h"
#include "support/tensors.h"

#include <stdlib.h>

enum { ROWS = 6, COLUMNS = 4 };

static const mls_tensor_id weight = {.name = {"w", 1}};
static const size_t matrix[] = {ROWS, COLUMNS};

static float data[2 * ROWS * COLUMNS];
static mls_shard_list list; /* of the current test */

AFTER_EACH
{
    mls_shard_list_fini(&list);
}

/* Add an array, or this rank's parts of it, as the weight. */
static void add_full(const mls_tensor *array, mls_layout layout, uint64_t rank,
                     uint64_t ranks)
{
    CHECK(mls_shard_list_add_whole(&list, &weight, array, &layout, NULL, rank, ranks,
                                   &status) == MLS_OK);
}

TEST(items_keep_their_shapes_while_the_list_grows)
{
    for (size_t i = 0; i < 300; i++) {
        const size_t dims[] = {i, 2 * i, 3 * i};
        REQUIRE(mls_shard_list_add(&list, &weight, MLS_F32, (int)(i % 4), dims,
                                   &status) != NULL);
    }
    mls_shard_list_finish(&list);
    REQUIRE(list.count == 300);
    for (size_t i = 0; i < 300; i++) {
        const mls_shard_item *item = &list.items[i];
        CHECK(item->rank == (int)(i % 4) && mls_str_is(item->id.name, "w"));
        for (size_t axis = 0; axis < i % 4; axis++) {
            CHECK(item->shape[axis] == (axis + 1) * i);
        }
    }
    mls_shard_list_fini(&list);
    mls_shard_list_fini(&list); /* zeroed */
}

TEST(ranks_take_turns_over_the_parts)
{
    const mls_tensor array = tensor_of(data, MLS_F32, 2, matrix);
    for (uint64_t rank = 0; rank < 2; rank++) {
        add_full(&array, cut(0, 3), rank, 2);
        REQUIRE(list.count == (rank == 0 ? 2U : 1U)); /* 0 and 2, or 1 */
        for (size_t i = 0; i < list.count; i++) {
            const size_t part = rank + 2 * i;
            CHECK(list.items[i].part == part && list.items[i].layout.count == 1);
            CHECK(list.items[i].data ==
                  (const unsigned char *)(data + 2 * part * COLUMNS));
        }
        mls_shard_list_fini(&list);
    }
}

TEST(unsharded_array_belongs_to_the_rank)
{
    const mls_tensor array = tensor_of(data, MLS_F32, 2, matrix);
    add_full(&array, (mls_layout){0}, 3, 4);
    CHECK(list.count == 1 && list.items[0].part == 0 && list.items[0].layout.count == 0);
}

TEST(flat_parts_begin_inside_the_array)
{
    const mls_tensor array = tensor_of(data, MLS_F32, 2, matrix);
    add_full(&array, cut(MLS_LAYOUT_FLAT, 5), 1, 5);
    REQUIRE(list.count == 1);
    CHECK(list.items[0].first == 5); /* of 24 elements in parts of 5 */
}

TEST(strided_array_is_stored_as_a_view)
{
    mls_tensor array = tensor_of(data, MLS_F32, 2, matrix);
    array.strides[1] *= 2;
    array.strides[0] *= 2;
    add_full(&array, (mls_layout){0}, 0, 1);
    CHECK(list.items[0].data == NULL && list.items[0].strided != NULL);
    CHECK(list.items[0].strided != &array && list.items[0].strided->strides[1] == 8);
    const mls_tensor empty = vector_of(NULL, MLS_F32, 0);
    add_full(&empty, (mls_layout){0}, 0, 1);
    CHECK(list.items[1].data != NULL);
}

TEST(memory_must_match_its_part_size)
{
    const mls_shard_item item = {.rank = 2, .layout = cut(0, 3), .part = 1};
    mls_shard_item none = item;
    none.part = 3;
    const mls_tensor good = vector_of(data, MLS_F32, 8),
                     bad = vector_of(data, MLS_F32, 9);
    CHECK(mls_shard_item_check(&item, matrix, &good, "params 'w'", &status) == MLS_OK);
    CHECK(mls_shard_item_check(&item, matrix, &bad, "params 'w'", &status) ==
          MLS_E_SHAPE);
    CHECK_TEXT(status.text,
               "params 'w': the shard has 9 elements, and its part of the tensor 8");
    CHECK_FAILS(mls_shard_item_check(&none, matrix, &good, "w", &status), MLS_E_VALUE,
                "part 3 of 3 does not exist");
}
