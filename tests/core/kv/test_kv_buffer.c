#include "kv/kv_buffer.h"
#include "support/runner.h"

#include <stdint.h>

TEST(sizes_beyond_memory_are_refused)
{
    const size_t shape[] = {2, 3, 8, 4}, huge[] = {SIZE_MAX / 2, 3, 1, 4};
    mls_kv_buffer b = {0};
    CHECK(mls_kv_buffer_init(&b, 4, huge, 2, 1, MLS_F16, &status) == MLS_E_SIZE);
    CHECK(b.pages.data == NULL);
    REQUIRE(mls_kv_buffer_init(&b, 4, shape, 2, 16, MLS_F16, &status) == MLS_OK);
    CHECK(mls_kv_buffer_reserve(&b, SIZE_MAX / 4, &status) == MLS_E_SIZE);
    CHECK(mls_kv_buffer_reserve(&b, (size_t)1 << 50, &status) == MLS_E_MEMORY);
    CHECK(mls_kv_buffer_length(&b) == 8 && b.capacity == 16);
    mls_kv_buffer_fini(&b);
    mls_kv_buffer_fini(&b);
}

TEST(lengths_beyond_the_capacity_are_refused)
{
    const size_t shape[] = {2, 3, 8, 4};
    const mls_kernels *kernels = mls_kernels_of(MLS_CPU_SCALAR);
    mls_kv_buffer b = {0};
    CHECK_FAILS(mls_kv_buffer_init(&b, 4, shape, 2, 7, MLS_F16, &status), MLS_E_CAPACITY,
                "sequence length 8 is beyond the capacity 7");
    REQUIRE(mls_kv_buffer_init(&b, 4, shape, 2, 16, MLS_F16, &status) == MLS_OK);
    CHECK_FAILS(mls_kv_buffer_resize(&b, kernels, 17, 0, "position", &status),
                MLS_E_CAPACITY, "sequence length 17 is beyond the reserved capacity 16");
    CHECK_FAILS(mls_kv_buffer_resize(&b, kernels, 9, 9, "position", &status),
                MLS_E_CAPACITY, "position 9 is beyond the sequence length 8");
    CHECK_FAILS(mls_kv_buffer_reserve(&b, 15, &status), MLS_E_CAPACITY,
                "capacity 15 is below the present 16, and a capacity cannot shrink");
    CHECK(mls_kv_buffer_length(&b) == 8 && b.capacity == 16);
    mls_kv_buffer_fini(&b);
}
