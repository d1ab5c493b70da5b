#include "base/status.h"
#include "support/runner.h"

#include <errno.h>

TEST(failing_fills_every_field_and_returns_the_code)
{
    mls_code code = mls_fail(&status, MLS_E_SHAPE, "layer %d: %s", 3, "too short");
    CHECK(code == MLS_E_SHAPE && status.code == MLS_E_SHAPE);
    CHECK_TEXT(status.text, "layer 3: too short");
    CHECK_TEXT(status.name, "");
    CHECK(!status.has_offset && status.os_error == 0);
}

TEST(second_failure_clears_fields_of_the_first)
{
    mls_fail_at(&status, 77, "bad");
    mls_status_name(&status, "w", 1);
    mls_status_expected(&status, "%d", 4);
    mls_status_got(&status, "%d", 5);
    CHECK(status.has_offset && status.offset == 77);
    CHECK_TEXT(status.name, "w");
    CHECK_TEXT(status.expected, "4");
    CHECK_TEXT(status.got, "5");
    mls_fail(&status, MLS_E_VALUE, "other");
    CHECK(!status.has_offset);
    CHECK_TEXT(status.name, "");
    CHECK_TEXT(status.expected, "");
    CHECK_TEXT(status.got, "");
}

TEST(system_errors_carry_errno_and_its_text)
{
    CHECK(mls_fail_os(&status, ENOENT, "cannot open %s", "x") == MLS_E_IO);
    CHECK(status.os_error == ENOENT);
    CHECK(strstr(status.text, "cannot open x: ") == status.text);
    CHECK(strlen(status.text) > strlen("cannot open x: "));
}

TEST(long_texts_are_cut_at_a_character)
{
    char long_text[2 * MLS_TEXT_BYTES];
    for (size_t shift = 0; shift < 4; shift++) {
        memset(long_text, 'a', shift);
        for (size_t i = shift; i + 2 < sizeof long_text; i += 2) {
            memcpy(long_text + i, "\xC3\xA9", 2); /* e with an accent: two bytes */
        }
        long_text[sizeof long_text - 1] = '\0';
        long_text[sizeof long_text - 2] = '\0';
        mls_fail(&status, MLS_E_VALUE, "%s", long_text);
        const size_t length = strlen(status.text);
        CHECK(length < MLS_TEXT_BYTES && length + 3 > MLS_TEXT_BYTES);
        CHECK((length - shift) % 2 == 0);
        mls_status_name(&status, long_text, strlen(long_text));
        CHECK((strlen(status.name) - shift) % 2 == 0);
    }
}
