#include "kv/kv_buffer.h"
#include "kv/kv_transition.h"
#include "support/runner.h"

#include <stdint.h>

enum { RANK = 4, AXIS = 2 };

static const size_t shape[RANK] = {2, 3, 8, 4};

static mls_kv_buffer b; /* of the current test */

AFTER_EACH
{
    mls_kv_buffer_fini(&b);
}

static const mls_kernels *kernels(void)
{
    return mls_kernels_of(MLS_CPU_SCALAR);
}

/* The two bytes of the first element at a row and position. */
static unsigned char *element(size_t row, size_t position)
{
    const mls_tensor t = mls_kv_buffer_view(&b);
    return t.data + (ptrdiff_t)row * t.strides[1] + (ptrdiff_t)position * t.strides[2];
}

static bool make(size_t capacity)
{
    if (mls_kv_buffer_init(&b, RANK, shape, AXIS, capacity, MLS_F16, &status) != MLS_OK) {
        return false;
    }
    for (size_t row = 0; row < 6; row++) {
        for (size_t position = 0; position < 8; position++) {
            memset(element(row, position), (int)(row * 8 + position + 1), 8);
        }
    }
    return true;
}

TEST(growth_keeps_the_address_and_zeroes_new_positions)
{
    REQUIRE(make(32));
    const unsigned char *before = b.pages.data;
    CHECK(mls_kv_buffer_resize(&b, kernels(), 32, 8, "at", &status) == MLS_OK);
    CHECK(b.pages.data == before && mls_kv_buffer_length(&b) == 32);
    for (size_t row = 0; row < 6; row++) {
        CHECK(element(row, 7)[0] == row * 8 + 8);
        CHECK(element(row, 8)[0] == 0 && element(row, 31)[7] == 0);
    }
}

TEST(refused_requests_keep_the_buffer)
{
    const size_t huge[RANK] = {SIZE_MAX / 2, 3, 1, 4};
    CHECK(mls_kv_buffer_init(&b, RANK, shape, AXIS, 7, MLS_F16, &status) ==
          MLS_E_CAPACITY);
    CHECK(mls_kv_buffer_init(&b, RANK, huge, AXIS, 1, MLS_F16, &status) == MLS_E_SIZE);
    CHECK(b.pages.data == NULL);
    REQUIRE(make(16));
    CHECK(mls_kv_buffer_resize(&b, kernels(), 17, 0, "at", &status) == MLS_E_CAPACITY);
    CHECK(mls_kv_buffer_resize(&b, kernels(), 12, 9, "at", &status) == MLS_E_CAPACITY);
    CHECK(strncmp(status.text, "at 9 is beyond", 14) == 0);
    CHECK(mls_kv_buffer_resize(&b, kernels(), 4, 5, "at", &status) == MLS_E_CAPACITY);
    CHECK(mls_kv_buffer_reserve(&b, 15, &status) == MLS_E_CAPACITY);
    CHECK(mls_kv_buffer_reserve(&b, SIZE_MAX / 4, &status) == MLS_E_SIZE);
    CHECK(mls_kv_buffer_reserve(&b, (size_t)1 << 50, &status) == MLS_E_MEMORY);
    CHECK(mls_kv_buffer_length(&b) == 8 && b.capacity == 16 && element(5, 7)[0] == 48);
    mls_kv_buffer_fini(&b);
}

TEST(an_empty_cache_is_a_cache)
{
    const size_t none[RANK] = {0, 3, 8, 4};
    REQUIRE(mls_kv_buffer_init(&b, RANK, none, AXIS, 8, MLS_F32, &status) == MLS_OK);
    CHECK(mls_kv_buffer_resize(&b, kernels(), 2, 2, "at", &status) == MLS_OK);
    CHECK(mls_kv_buffer_reserve(&b, 100, &status) == MLS_OK);
}

/* The bytes of a view in C order, each masked by whether it is one
 * of `kept` positions. */
static bool holds(size_t position_count)
{
    const mls_tensor t = mls_kv_buffer_view(&b);
    const size_t columns = t.shape[0] * t.shape[1] * t.shape[2];
    for (size_t i = 0; i < columns; i++) {
        const size_t at[] = {i / t.shape[2] / t.shape[1], i / t.shape[2] % t.shape[1],
                             i % t.shape[2]};
        ptrdiff_t offset = 0;
        for (int axis = 0; axis < 3; axis++) {
            offset += (ptrdiff_t)at[axis] * t.strides[axis];
        }
        const size_t number = at[0] * 49 + at[1] * 7 + at[2] + 1;
        if (t.data[offset] != (at[b.axis] < position_count ? number : 0)) {
            return false;
        }
    }
    return true;
}

TEST(any_axis_can_be_the_sequence)
{
    static const size_t three[] = {5, 5, 5};
    for (int axis = 0; axis < 3; axis++) {
        REQUIRE(mls_kv_buffer_init(&b, 3, three, axis, 6, MLS_U8, &status) == MLS_OK);
        const mls_tensor t = mls_kv_buffer_view(&b);
        for (size_t i = 0; i < 125; i++) {
            t.data[(ptrdiff_t)(i / 25) * t.strides[0] +
                   (ptrdiff_t)(i / 5 % 5) * t.strides[1] +
                   (ptrdiff_t)(i % 5) * t.strides[2]] =
                (unsigned char)(i / 25 * 49 + i / 5 % 5 * 7 + i % 5 + 1);
        }
        for (size_t capacity = 6; capacity < 40000; capacity = capacity * 3 + 1) {
            REQUIRE(mls_kv_buffer_reserve(&b, capacity, &status) == MLS_OK);
            CHECK(holds(5));
            CHECK(mls_kv_buffer_resize(&b, kernels(), capacity, 5, "at", &status) ==
                  MLS_OK);
            CHECK(mls_kv_buffer_length(&b) == capacity && holds(5));
            CHECK(mls_kv_buffer_resize(&b, kernels(), 5, 5, "at", &status) == MLS_OK);
        }
        CHECK(mls_kv_buffer_resize(&b, kernels(), 5, 3, "at", &status) == MLS_OK);
        CHECK(holds(3));
        CHECK(mls_kv_buffer_resize(&b, kernels(), 2, 1, "at", &status) == MLS_OK);
        CHECK(mls_kv_buffer_resize(&b, kernels(), 9, 2, "at", &status) == MLS_OK);
        CHECK(holds(1));
        mls_kv_buffer_fini(&b);
    }
}
