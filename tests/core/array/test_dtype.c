#include "array/dtype.h"
#include "support/runner.h"

TEST(both_names_are_parsed_to_their_dtype)
{
    for (int i = 0; i < MLS_DTYPE_COUNT; i++) {
        const mls_dtype_info *info = mls_dtype_of((mls_dtype)i);
        mls_dtype dtype = MLS_DTYPE_COUNT;
        CHECK(mls_dtype_from_name(info->name, strlen(info->name), &dtype));
        CHECK((int)dtype == i);
        dtype = MLS_DTYPE_COUNT;
        CHECK(mls_dtype_from_file_name(info->file_name, strlen(info->file_name), &dtype));
        CHECK((int)dtype == i);
        CHECK(info->item_bytes == 1 || info->item_bytes == 2 || info->item_bytes == 4 ||
              info->item_bytes == 8);
    }
}

TEST(convertible_dtypes_come_first)
{
    for (int i = 0; i < MLS_DTYPE_COUNT; i++) {
        const mls_dtype_kind kind = mls_dtype_of((mls_dtype)i)->kind;
        CHECK((i < MLS_CONVERTIBLE) == (kind == MLS_KIND_FLOAT));
    }
    CHECK(mls_dtype_of(MLS_C64)->item_bytes == 8 && MLS_CONVERTIBLE == 4);
    CHECK(mls_dtype_of(MLS_U64)->kind == MLS_KIND_UINT);
}

TEST(packed_lengths_are_whole_numbers)
{
    size_t count = 7;
    CHECK(mls_dtype_items(MLS_F32, 5, &count) && count == 5);
    CHECK(mls_dtype_items(MLS_F4, 32, &count) && count == 16);
    CHECK(mls_dtype_elements(MLS_F4, 16, &count) && count == 32);
    CHECK(mls_dtype_items(MLS_F6_E2M3, 8, &count) && count == 6);
    CHECK(mls_dtype_elements(MLS_F6_E3M2, 6, &count) && count == 8);
    CHECK(mls_dtype_items(MLS_F6_E3M2, 0, &count) && count == 0);
    CHECK(!mls_dtype_items(MLS_F4, 3, &count));
    CHECK(!mls_dtype_items(MLS_F6_E2M3, 6, &count));
    CHECK(!mls_dtype_elements(MLS_F6_E2M3, 4, &count));
    CHECK(!mls_dtype_elements(MLS_F4, SIZE_MAX, &count) && count == 0);
}

TEST(unknown_names_and_prefixes_are_refused)
{
    mls_dtype dtype = MLS_F16;
    CHECK(!mls_dtype_from_name("float1", 6, &dtype));
    CHECK(!mls_dtype_from_name("float16x", 8, &dtype));
    CHECK(!mls_dtype_from_name("", 0, &dtype));
    CHECK(!mls_dtype_from_file_name("F", 1, &dtype));
    CHECK(dtype == MLS_F16);
}

TEST(only_floats_convert)
{
    CHECK(mls_dtype_converts(MLS_F16, MLS_F64));
    CHECK(mls_dtype_converts(MLS_I8, MLS_I8));
    CHECK(!mls_dtype_converts(MLS_I8, MLS_F32));
    CHECK(!mls_dtype_converts(MLS_F32, MLS_I8));
    CHECK(!mls_dtype_converts(MLS_F8_E4M3, MLS_F16));
}
