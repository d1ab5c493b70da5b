#include "base/size.h"
#include "support/runner.h"

TEST(sums_and_products_detect_overflow)
{
    size_t out = 9;
    CHECK(mls_size_add(SIZE_MAX - 1, 1, &out) && out == SIZE_MAX);
    out = 9;
    CHECK(!mls_size_add(SIZE_MAX, 1, &out) && out == 9);
    CHECK(mls_size_mul(SIZE_MAX / 3, 3, &out) && out == SIZE_MAX / 3 * 3);
    out = 9;
    CHECK(!mls_size_mul(SIZE_MAX / 2 + 1, 2, &out) && out == 9);
    CHECK(mls_size_mul(0, SIZE_MAX, &out) && out == 0);
    const size_t parts[] = {SIZE_MAX - 3, 2, 1, 1};
    CHECK(mls_size_sum(parts, 3, &out) && out == SIZE_MAX);
    CHECK(!mls_size_sum(parts, 4, &out) && out == SIZE_MAX);
    CHECK(mls_size_sum(parts, 0, &out) && out == 0);
    uint64_t wide = 9;
    CHECK(!mls_u64_add(UINT64_MAX, 1, &wide) && wide == 9);
    CHECK(!mls_u64_mul(UINT64_MAX, 2, &wide) && wide == 9);
    CHECK(mls_u64_add(1, 2, &wide) && wide == 3);
    CHECK(mls_u64_mul(3, 4, &wide) && wide == 12);
    CHECK(mls_size_from_u64(77, &out) && out == 77);
}

TEST(little_endian_round_trips_at_every_alignment)
{
    unsigned char bytes[16];
    for (int at = 0; at < 8; at++) {
        memset(bytes, 0xEE, sizeof bytes);
        mls_store_le64(bytes + at, 0x0102030405060708U);
        CHECK(bytes[at] == 8 && bytes[at + 7] == 1 && bytes[at + 8] == 0xEE);
        CHECK(mls_load_le64(bytes + at) == 0x0102030405060708U);
    }
}
