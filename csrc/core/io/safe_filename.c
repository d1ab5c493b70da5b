/* safe_filename: which bytes of a tensor's name a file name keeps or escapes; names of
 * Windows devices; long names.
 *
 * The encoding of a byte depends only on that byte and on those before it. The result can
 * be decoded byte by byte, so two names never have the same result.
 */
#include "io/safe_filename.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum {
    ESCAPE_BYTES = 3,   /* bytes of an escape */
    MARK_BYTES = 2 + 16 /* "=~" and a number in hexadecimal */
};

/* Return whether `name` up to its first dot is a device name on Windows. Only lower case
 * is tested: capitals are escaped anyway. */
static bool is_device(mls_str name)
{
    static const char *const devices[] = {"con", "prn", "aux", "nul"};
    size_t length = 0;
    while (length < name.length && name.data[length] != '.') {
        length++;
    }
    if (length == 4 &&
        (memcmp(name.data, "com", 3) == 0 || memcmp(name.data, "lpt", 3) == 0)) {
        return name.data[3] >= '0' && name.data[3] <= '9';
    }
    for (size_t i = 0; length == 3 && i < sizeof devices / sizeof devices[0]; i++) {
        if (memcmp(name.data, devices[i], 3) == 0) {
            return true;
        }
    }
    return false;
}

/* Return whether byte number `at` of a name stays as it is in a file name.
 * `is_device_name`: the name is the name of a Windows device, so its first letter is
 * escaped. Two dots never follow each other. */
static bool is_unescaped(mls_str name, size_t at, bool is_device_name)
{
    const char c = name.data[at];
    if (at == 0 && (is_device_name || c == '.' || c == '-')) {
        return false;
    }
    if (c == '.') {
        return name.data[at - 1] != '.';
    }
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

/* Encode as many bytes of `name` as fit into `room` bytes of `out`, without splitting an
 * escape or adding a NUL. Returns the number of bytes written, and sets `*consumed` to
 * the number of bytes of the name that they encode. */
static size_t encode_name(mls_str name, char *out, size_t room, size_t *consumed)
{
    static const char digits[] = "0123456789abcdef";
    const bool is_device_name = is_device(name);
    size_t length = 0, at = 0;
    for (; at < name.length; at++) {
        const unsigned char c = (unsigned char)name.data[at];
        const bool unescaped = is_unescaped(name, at, is_device_name);
        if (length + (unescaped ? 1 : ESCAPE_BYTES) > room) {
            break;
        }
        if (unescaped) {
            out[length++] = (char)c;
        } else {
            out[length++] = '=';
            out[length++] = digits[c >> 4];
            out[length++] = digits[c & 15];
        }
    }
    *consumed = at;
    return length;
}

/* Write the file name for a tensor's name. Encode a name that is too long again with less
 * room, so that the mark with its number fits. */
size_t mls_filename_encode(mls_str name, uint64_t number,
                           char out[MLS_FILENAME_BYTES + 1])
{
    size_t consumed;
    size_t length = encode_name(name, out, MLS_FILENAME_BYTES, &consumed);
    if (name.length == 0) {
        out[length++] = '=';
    } else if (consumed < name.length) {
        length = encode_name(name, out, MLS_FILENAME_BYTES - MARK_BYTES, &consumed);
        length += (size_t)snprintf(out + length, MARK_BYTES + 1, "=~%" PRIx64, number);
    }
    out[length] = '\0';
    return length;
}
