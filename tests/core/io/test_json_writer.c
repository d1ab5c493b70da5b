#include "io/json_writer.h"
#include "support/runner.h"

static void texts_and_numbers_are_put_together(void)
{
    mls_buffer b = {.most = SIZE_MAX};
    mls_buffer_text(&b, "[");
    mls_buffer_number(&b, 0);
    mls_buffer_text(&b, ",");
    mls_buffer_number(&b, UINT64_MAX);
    mls_buffer_put(&b, NULL, 0);
    mls_buffer_put(&b, "]x", 1);
    CHECK(b.code == MLS_OK);
    CHECK(mls_text_is((mls_text){b.data, b.length}, "[0,18446744073709551615]"));
    mls_buffer_fini(&b);
    CHECK(b.data == NULL && b.length == 0);
}

static void strings_are_escaped_as_json_wants(void)
{
    mls_buffer b = {.most = SIZE_MAX};
    const char text[] = "a\"\\\n\0\x1f \xC3\xA9z";
    mls_buffer_json(&b, (mls_text){text, sizeof text - 1});
    CHECK(mls_text_is((mls_text){b.data, b.length},
                      "\"a\\\"\\\\\\u000a\\u0000\\u001f \xC3\xA9z\""));
    mls_buffer_fini(&b);
    b = (mls_buffer){.most = SIZE_MAX};
    mls_buffer_json(&b, (mls_text){0});
    CHECK(mls_text_is((mls_text){b.data, b.length}, "\"\""));
    mls_buffer_fini(&b);
}

static void a_text_that_is_too_long_stops_growing(void)
{
    mls_buffer b = {.most = 5};
    mls_buffer_text(&b, "12345");
    CHECK(b.code == MLS_OK);
    mls_buffer_text(&b, "6");
    CHECK(b.code == MLS_E_SIZE && b.length == 5);
    mls_buffer_text(&b, "");
    mls_buffer_number(&b, 7);
    CHECK(b.code == MLS_E_SIZE && b.length == 5);
    mls_buffer_fini(&b);
}

static const test_case tests[] = {
    TEST(texts_and_numbers_are_put_together),
    TEST(strings_are_escaped_as_json_wants),
    TEST(a_text_that_is_too_long_stops_growing),
};

int main(void)
{
    return RUN_TESTS(tests);
}
