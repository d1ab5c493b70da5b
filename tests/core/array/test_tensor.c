#include "array/tensor.h"
#include "support/tensors.h"

#include <stdint.h>

static unsigned char memory[4096];

TEST(a_packed_view_has_c_strides)
{
    const size_t shape[] = {2, 3, 4};
    const mls_tensor t = tensor_of(memory, MLS_F16, 3, shape);
    size_t count = 0, bytes = 0;
    CHECK(t.strides[0] == 24 && t.strides[1] == 8 && t.strides[2] == 2);
    CHECK(mls_tensor_count(&t, &count) && count == 24);
    CHECK(mls_tensor_bytes(&t, &bytes) && bytes == 48);
    CHECK(mls_tensor_is_contiguous(&t));
}

TEST(a_scalar_has_one_element)
{
    const mls_tensor t = tensor_of(memory, MLS_F64, 0, NULL);
    size_t count = 0;
    CHECK(mls_tensor_count(&t, &count) && count == 1);
    CHECK(mls_tensor_is_contiguous(&t));
}

TEST(sizes_that_overflow_are_refused)
{
    const size_t shape[] = {SIZE_MAX / 2, 3};
    mls_tensor t = {.rank = -7};
    CHECK_FAILS(mls_tensor_init(&t, memory, MLS_F16, 2, shape, &status), MLS_E_SIZE,
                "shape (9223372036854775807, 3) of float16 is larger than memory");
    CHECK(t.rank == -7);
    CHECK_FAILS(mls_tensor_init(&t, memory, MLS_F16, MLS_MAX_RANK + 1, shape, &status),
                MLS_E_SHAPE, "65 dimensions: at most 64 are supported");
    CHECK(mls_tensor_init(&t, memory, MLS_F16, -1, shape, &status) == MLS_E_SHAPE);
}

TEST(empty_view_may_have_huge_other_lengths)
{
    const size_t shape[] = {SIZE_MAX / 4, 0, 1};
    const mls_tensor t = tensor_of(memory, MLS_U8, 3, shape);
    size_t count = 7;
    CHECK(mls_tensor_count(&t, &count) && count == 0);
    CHECK(mls_tensor_is_contiguous(&t));
}

TEST(slices_move_the_start_and_lose_contiguity)
{
    const size_t shape[] = {2, 3, 4};
    const mls_tensor t = tensor_of(memory, MLS_F16, 3, shape);
    const mls_tensor part = mls_tensor_slice(&t, 1, 1, 2);
    CHECK(part.data == memory + 8 && part.shape[1] == 2 && part.strides[1] == 8);
    CHECK(!mls_tensor_is_contiguous(&part));
    const mls_tensor row = mls_tensor_slice(&t, 0, 1, 1);
    CHECK(mls_tensor_is_contiguous(&row));
}

/* Frameworks give empty tensors a null pointer; adding to it is undefined. */
TEST(addresses_beyond_memory_are_refused)
{
    const size_t shape[] = {2, 3};
    mls_tensor t;
    REQUIRE(mls_tensor_init(&t, &t, MLS_F32, 2, shape, &status) == MLS_OK);
    CHECK(mls_tensor_is_addressable(&t));
    t.strides[0] = -8;
    CHECK(mls_tensor_is_addressable(&t));
    t.strides[1] = PTRDIFF_MAX / 2 + 1; /* the reach of one axis wraps */
    CHECK(!mls_tensor_is_addressable(&t));
    t.strides[1] = PTRDIFF_MIN / 2; /* the address wraps */
    t.strides[0] = 4;
    CHECK(!mls_tensor_is_addressable(&t));
    t.strides[0] = t.strides[1] = PTRDIFF_MAX / 2 - 1; /* the sum of the axes wraps */
    CHECK(!mls_tensor_is_addressable(&t));
    t.shape[0] = 0;
    CHECK(mls_tensor_is_addressable(&t));
}

TEST(an_empty_view_with_any_strides_has_no_range)
{
    uintptr_t low, high;
    unsigned char byte = 0;
    const mls_tensor view = {.data = &byte,
                             .dtype = MLS_U8,
                             .rank = 2,
                             .shape = {8, 0},
                             .strides = {PTRDIFF_MAX, PTRDIFF_MIN}};
    CHECK(mls_tensor_is_addressable(&view));
    CHECK(!mls_tensor_range(&view, &low, &high));
}

TEST(an_empty_view_without_memory_is_sliced)
{
    mls_tensor t = tensor_of(NULL, MLS_F32, 3, (const size_t[]){2, 0, 4});
    t.strides[0] = 16;
    CHECK(mls_tensor_slice(&t, 0, 1, 1).data == NULL);
    CHECK(mls_tensor_slice(&t, 2, 3, 1).data == NULL);
}

TEST(shapes_are_formatted_like_python_tuples)
{
    char text[16];
    const size_t shape[] = {2, 30, 4};
    CHECK_TEXT(mls_shape_text(text, sizeof text, 3, shape), "(2, 30, 4)");
    CHECK_TEXT(mls_shape_text(text, sizeof text, 1, shape), "(2,)");
    CHECK_TEXT(mls_shape_text(text, sizeof text, 0, shape), "()");
    CHECK_TEXT(mls_shape_text(text, 6, 3, shape), "(2, 3"); /* truncated */
}
