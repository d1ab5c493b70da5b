#include "io/json_writer.h"
#include "support/runner.h"

TEST(strings_and_numbers_are_concatenated)
{
    mls_json_writer b = {.most = SIZE_MAX};
    mls_json_writer_text(&b, "[");
    mls_json_writer_number(&b, 0);
    mls_json_writer_text(&b, ",");
    mls_json_writer_number(&b, UINT64_MAX);
    mls_json_writer_put(&b, NULL, 0);
    mls_json_writer_put(&b, "]x", 1);
    CHECK(b.code == MLS_OK);
    CHECK(mls_str_is((mls_str){b.data, b.length}, "[0,18446744073709551615]"));
    mls_json_writer_fini(&b);
    CHECK(b.data == NULL && b.length == 0);
}

TEST(strings_are_json_escaped)
{
    mls_json_writer b = {.most = SIZE_MAX};
    const char text[] = "a\"\\\n\0\x1f \xC3\xA9z";
    mls_json_writer_json(&b, (mls_str){text, sizeof text - 1});
    CHECK(mls_str_is((mls_str){b.data, b.length},
                     "\"a\\\"\\\\\\u000a\\u0000\\u001f \xC3\xA9z\""));
    mls_json_writer_fini(&b);
    b = (mls_json_writer){.most = SIZE_MAX};
    mls_json_writer_json(&b, (mls_str){0});
    CHECK(mls_str_is((mls_str){b.data, b.length}, "\"\""));
    mls_json_writer_fini(&b);
}

TEST(text_above_the_limit_sets_the_error)
{
    mls_json_writer b = {.most = 5};
    mls_json_writer_text(&b, "12345");
    CHECK(b.code == MLS_OK);
    mls_json_writer_text(&b, "6");
    CHECK(b.code == MLS_E_SIZE && b.length == 5);
    mls_json_writer_text(&b, "");
    mls_json_writer_number(&b, 7);
    CHECK(b.code == MLS_E_SIZE && b.length == 5);
    mls_json_writer_fini(&b);
}
