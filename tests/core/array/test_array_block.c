/* Small arrays in large blocks. */
#include "array/array_block.h"
#include "support/runner.h"

static size_t size_at(const void *context, size_t index)
{
    return ((const size_t *)context)[index];
}

static size_t all_alike(const void *context, size_t index)
{
    (void)index;
    return *(const size_t *)context;
}

TEST(arrays_are_rounded_up_to_cache_lines)
{
    CHECK(mls_block_padded_bytes(0) == 0 && mls_block_padded_bytes(1) == 64);
    CHECK(mls_block_padded_bytes(64) == 64 && mls_block_padded_bytes(65) == 128);
}

TEST(few_small_arrays_are_not_combined)
{
    const size_t small = 1 << 10;
    size_t until = 0;
    CHECK(mls_block_plan(all_alike, &small, 3, 50, &until) == 0 && until == 50);
    CHECK(mls_block_plan(all_alike, &small, 50, 50, &until) == 0 && until == 50);
}

TEST(a_block_ends_with_the_array_that_exceeds_it)
{
    const size_t mebibyte = 1 << 20;
    size_t until = 0;
    CHECK(mls_block_plan(all_alike, &mebibyte, 5, 100, &until) ==
          16 * mebibyte + MLS_BLOCK_LINE);
    CHECK(until == 5 + 16);
    CHECK(mls_block_plan(all_alike, &mebibyte, 95, 100, &until) ==
          5 * mebibyte + MLS_BLOCK_LINE);
    CHECK(until == 100);
}

TEST(large_arrays_stay_outside_blocks)
{
    const size_t sizes[] = {MLS_BLOCK_LARGE, MLS_BLOCK_LARGE - 1, 0, 7, 3 << 20};
    size_t until = 0;
    CHECK(!mls_block_takes(sizes[0]) && mls_block_takes(sizes[1]));
    CHECK(!mls_block_takes(sizes[2]));
    CHECK(mls_block_plan(size_at, sizes, 0, 5, &until) ==
          MLS_BLOCK_LINE + MLS_BLOCK_LARGE + 64 + (3 << 20));
    CHECK(until == 5);
}
