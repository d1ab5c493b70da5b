/* The list of shards to write. */
#include "checkpoint/write/shard_list.h"
#include "support/parts.h"
#include "support/tensors.h"

#include <stdlib.h>

enum { ROWS = 6, COLUMNS = 4 };

static const mls_tensor_id weight = {.name = {"w", 1}};
static const size_t matrix[] = {ROWS, COLUMNS};

TEST(items_keep_their_shapes_while_the_list_grows)
{
    mls_shard_list list = {0};
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
    static float data[ROWS * COLUMNS];
    const mls_tensor array = tensor_of(data, MLS_F32, 2, matrix);
    const mls_layout rows = {.count = 1, .steps = {{.axis = 0, .parts = 3}}};
    for (uint64_t rank = 0; rank < 2; rank++) {
        mls_shard_list list = {0};
        REQUIRE(mls_shard_list_add_whole(&list, &weight, &array, &rows, NULL, rank, 2,
                                         &status) == MLS_OK);
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

TEST(without_parts_the_array_is_this_ranks)
{
    static float data[ROWS * COLUMNS];
    const mls_tensor array = tensor_of(data, MLS_F32, 2, matrix);
    const mls_layout none = {0};
    mls_shard_list list = {0};
    REQUIRE(mls_shard_list_add_whole(&list, &weight, &array, &none, NULL, 3, 4,
                                     &status) == MLS_OK);
    CHECK(list.count == 1 && list.items[0].part == 0 && list.items[0].layout.count == 0);
    mls_shard_list_fini(&list);
}

TEST(flat_parts_begin_inside_the_array)
{
    static float data[ROWS * COLUMNS];
    const mls_tensor array = tensor_of(data, MLS_F32, 2, matrix);
    const mls_layout flat = {.count = 1, .steps = {{MLS_LAYOUT_FLAT, 5}}};
    mls_shard_list list = {0};
    REQUIRE(mls_shard_list_add_whole(&list, &weight, &array, &flat, NULL, 1, 5,
                                     &status) == MLS_OK);
    REQUIRE(list.count == 1);
    CHECK(list.items[0].first == 5); /* of 24 elements in parts of 5 */
    mls_shard_list_fini(&list);
}

TEST(what_is_not_packed_has_a_view)
{
    static float data[2 * ROWS * COLUMNS];
    mls_tensor array = tensor_of(data, MLS_F32, 2, matrix);
    const mls_layout none = {0};
    mls_shard_list list = {0};
    array.strides[1] *= 2;
    array.strides[0] *= 2;
    REQUIRE(mls_shard_list_add_whole(&list, &weight, &array, &none, NULL, 0, 1,
                                     &status) == MLS_OK);
    CHECK(list.items[0].data == NULL && list.items[0].strided != NULL);
    CHECK(list.items[0].strided != &array && list.items[0].strided->strides[1] == 8);
    const size_t empty[] = {0};
    const mls_tensor nothing = tensor_of(NULL, MLS_F32, 1, empty);
    REQUIRE(mls_shard_list_add_whole(&list, &weight, &nothing, &none, NULL, 0, 1,
                                     &status) == MLS_OK);
    CHECK(list.items[1].data != NULL);
    mls_shard_list_fini(&list);
}

TEST(memory_must_have_the_elements_of_its_part)
{
    static float data[ROWS * COLUMNS];
    const size_t eight[] = {8}, nine[] = {9};
    const mls_shard_item item = {
        .rank = 2, .layout = {.count = 1, .steps = {{.axis = 0, .parts = 3}}}, .part = 1};
    mls_shard_item none = item;
    none.part = 3;
    const mls_tensor good = tensor_of(data, MLS_F32, 1, eight),
                     bad = tensor_of(data, MLS_F32, 1, nine);
    CHECK(mls_shard_item_check(&item, matrix, &good, "params 'w'", &status) == MLS_OK);
    CHECK(mls_shard_item_check(&item, matrix, &bad, "params 'w'", &status) ==
          MLS_E_SHAPE);
    CHECK_TEXT(status.text,
               "params 'w': the shard has 9 elements, and its part of the tensor 8");
    CHECK(mls_shard_item_check(&none, matrix, &good, "w", &status) == MLS_E_VALUE);
}
