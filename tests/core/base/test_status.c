#include "base/status.h"
#include "support/runner.h"

#include <errno.h>

TEST(failing_fills_every_field_and_returns_the_code)
{
    mls_status st;
    mls_code code = mls_fail(&st, MLS_E_SHAPE, "layer %d: %s", 3, "too short");
    CHECK(code == MLS_E_SHAPE && st.code == MLS_E_SHAPE);
    CHECK_TEXT(st.text, "layer 3: too short");
    CHECK_TEXT(st.name, "");
    CHECK(!st.has_offset && st.os_error == 0);
}

TEST(a_second_failure_drops_the_facts_of_the_first)
{
    mls_status st;
    mls_fail_at(&st, 77, "bad");
    mls_status_name(&st, "w", 1);
    mls_status_expected(&st, "%d", 4);
    mls_status_got(&st, "%d", 5);
    CHECK(st.has_offset && st.offset == 77);
    CHECK_TEXT(st.name, "w");
    CHECK_TEXT(st.expected, "4");
    CHECK_TEXT(st.got, "5");
    mls_fail(&st, MLS_E_VALUE, "other");
    CHECK(!st.has_offset);
    CHECK_TEXT(st.name, "");
    CHECK_TEXT(st.expected, "");
    CHECK_TEXT(st.got, "");
}

TEST(system_errors_carry_errno_and_its_text)
{
    mls_status st;
    CHECK(mls_fail_os(&st, ENOENT, "cannot open %s", "x") == MLS_E_IO);
    CHECK(st.os_error == ENOENT);
    CHECK(strstr(st.text, "cannot open x: ") == st.text);
    CHECK(strlen(st.text) > strlen("cannot open x: "));
}

TEST(long_texts_are_cut_at_a_character)
{
    mls_status st;
    char long_text[2 * MLS_TEXT_BYTES];
    for (size_t shift = 0; shift < 4; shift++) {
        memset(long_text, 'a', shift);
        for (size_t i = shift; i + 2 < sizeof long_text; i += 2) {
            memcpy(long_text + i, "\xC3\xA9", 2); /* e with an accent: two bytes */
        }
        long_text[sizeof long_text - 1] = '\0';
        long_text[sizeof long_text - 2] = '\0';
        mls_fail(&st, MLS_E_VALUE, "%s", long_text);
        const size_t length = strlen(st.text);
        CHECK(length < MLS_TEXT_BYTES && length + 3 > MLS_TEXT_BYTES);
        CHECK((length - shift) % 2 == 0);
        mls_status_name(&st, long_text, strlen(long_text));
        CHECK((strlen(st.name) - shift) % 2 == 0);
    }
}
