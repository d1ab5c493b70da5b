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
