/* status: fills in an error: code, message, name, expected, got, offset, the system's
 * reason; cuts long texts.
 *
 * Text is written to the caller's fixed arrays and truncated to fit. A truncated text
 * never ends in half a UTF-8 character: names come from files, and the bindings decode
 * these texts. Nothing here allocates or keeps state, because running out of memory must
 * be reportable and threads report at the same time.
 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Zeros are valid: MLS_OK is 0, and every string becomes empty. */
void mls_status_clear(mls_status *st)
{
    memset(st, 0, sizeof *st);
}

/* Cut off an incomplete UTF-8 character at the end of `text` if the text fills its `room`
 * (bytes with the NUL). Shorter text was not truncated and stays as it is. Only the last
 * character is examined: its first byte gives the number of bytes that should follow. */
static void cut_at_character(char *text, size_t room)
{
    size_t end = strlen(text);
    if (end + 1 < room) {
        return;
    }
    size_t start = end;
    while (start > 0 && ((unsigned char)text[start - 1] & 0xC0U) == 0x80U) {
        start--;
    }
    if (start == 0) {
        return;
    }
    const unsigned char lead = (unsigned char)text[start - 1];
    const size_t want = lead >= 0xF0U ? 4 : lead >= 0xE0U ? 3 : lead >= 0xC0U ? 2 : 1;
    if (end - (start - 1) < want) {
        text[start - 1] = '\0';
    }
}

/* Print to `text`, cut off at `room` bytes; an encoding error gives an empty text. */
MLS_PRINTF(3, 0)
static void print_into(char *text, size_t room, const char *format, va_list args)
{
    if (vsnprintf(text, room, format, args) < 0) {
        text[0] = '\0';
    }
    cut_at_character(text, room);
}

/* Clears everything first, so that no detail of an earlier failure remains. */
MLS_PRINTF(3, 0)
static void set_failure(mls_status *st, mls_code code, const char *format, va_list args)
{
    mls_status_clear(st);
    st->code = code;
    print_into(st->text, sizeof st->text, format, args);
}

/* Fill a status with a code and a text, and return the code. The status is cleared before
 * the text is formatted, so no argument may point into it. */
mls_code mls_fail(mls_status *st, mls_code code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set_failure(st, code, format, args);
    va_end(args);
    return code;
}

/* strerror_r is strerror without its shared static buffer. Its XSI and GNU variants
 * return different types, so the text comes from the result or from the buffer. The XSI
 * variant fills the buffer and returns 0, or an error number. */
static const char *choose_xsi_text(int result, const char *buffer)
{
    return result == 0 ? buffer : "unknown error";
}

/* The GNU variant returns the text, which may be in the buffer or elsewhere. */
static const char *choose_gnu_text(const char *result, const char *buffer)
{
    (void)buffer;
    return result;
}

/* Return the system's text for `os_error`, perhaps in `buffer`, which has `room` bytes.
 * The type of the result picks the variant at compile time. */
static const char *error_text(int os_error, char *buffer, size_t room)
{
    return _Generic(strerror_r(os_error, buffer, room),
        int: choose_xsi_text,
        char *: choose_gnu_text)(strerror_r(os_error, buffer, room), buffer);
}

/* Fill a status with MLS_E_IO, a text and the system's reason. The message comes first,
 * and the reason is appended as far as there is room. */
mls_code mls_fail_os(mls_status *st, int os_error, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set_failure(st, MLS_E_IO, format, args);
    va_end(args);
    st->os_error = os_error;
    char buffer[96] = "";
    const char *reason = error_text(os_error, buffer, sizeof buffer);
    const size_t used = strlen(st->text);
    snprintf(st->text + used, sizeof st->text - used, ": %s", reason);
    cut_at_character(st->text, sizeof st->text);
    return MLS_E_IO;
}

/* Fill a status with MLS_E_FORMAT, a text and an offset. The offset is set after
 * set_failure, which clears it. */
mls_code mls_fail_at(mls_status *st, uint64_t offset, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set_failure(st, MLS_E_FORMAT, format, args);
    va_end(args);
    st->has_offset = true;
    st->offset = offset;
    return MLS_E_FORMAT;
}

/* Add the name of a tensor or state, of `length` bytes, to a filled status. Names from
 * files may hold a NUL; the characters after it are not shown. */
mls_code mls_status_name(mls_status *st, const char *name, size_t length)
{
    const size_t stored_length =
        length < sizeof st->name - 1 ? length : sizeof st->name - 1;
    memcpy(st->name, name, stored_length);
    st->name[stored_length] = '\0';
    cut_at_character(st->name, stored_length + 1);
    return st->code;
}

/* Add to a filled status the expected value, a phrase such as "at least 4", and return
 * its code. */
mls_code mls_status_expected(mls_status *st, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_into(st->expected, sizeof st->expected, format, args);
    va_end(args);
    return st->code;
}

/* Add to a filled status the value that caused the failure, and return its code. */
mls_code mls_status_got(mls_status *st, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_into(st->got, sizeof st->got, format, args);
    va_end(args);
    return st->code;
}

mls_code mls_status_differ(mls_status *st, const char *expected, const char *got)
{
    mls_status_expected(st, "%s", expected);
    return mls_status_got(st, "%s", got);
}
