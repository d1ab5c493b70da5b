/* string_view: validates UTF-8, compares and hashes strings, and reads lists of numbers
 * such as "0,17,4".
 *
 * Strings are compared by bytes: Unicode normalisation is not applied.
 */
#include "base/string_view.h"

#include <string.h>

/* Return the length of the first character, 0 if it is invalid. Follow the Unicode
 * standard's table of well-formed sequences: the lead byte determines the length, and
 * four lead bytes restrict the range of the second byte. */
size_t mls_utf8_length(const unsigned char *bytes, size_t room)
{
    if (room == 0) {
        return 0;
    }
    const unsigned lead = bytes[0];
    if (lead < 0x80U) {
        return 1;
    }
    const size_t length = lead >= 0xF0U ? 4 : lead >= 0xE0U ? 3 : 2;
    if (lead < 0xC2U || lead > 0xF4U || length > room) {
        return 0;
    }
    for (size_t i = 1; i < length; i++) {
        if ((bytes[i] & 0xC0U) != 0x80U) {
            return 0;
        }
    }
    /* overlong forms, surrogates, beyond U+10FFFF */
    const bool is_ill_formed =
        (lead == 0xE0U && bytes[1] < 0xA0U) || (lead == 0xEDU && bytes[1] >= 0xA0U) ||
        (lead == 0xF0U && bytes[1] < 0x90U) || (lead == 0xF4U && bytes[1] >= 0x90U);
    return is_ill_formed ? 0 : length;
}

/* Return whether all bytes are UTF-8, character by character. */
bool mls_utf8_valid(const char *text, size_t length)
{
    size_t at = 0;
    while (at < length) {
        const size_t step =
            mls_utf8_length((const unsigned char *)text + at, length - at);
        if (step == 0) {
            return false;
        }
        at += step;
    }
    return true;
}

/* Write a code point as UTF-8. The caller has checked the code point. */
size_t mls_utf8_put(char *out, unsigned long code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | (code >> 6));
        out[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xE0 | (code >> 12));
        out[1] = (char)(0x80 | ((code >> 6) & 0x3F));
        out[2] = (char)(0x80 | (code & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | (code >> 18));
    out[1] = (char)(0x80 | ((code >> 12) & 0x3F));
    out[2] = (char)(0x80 | ((code >> 6) & 0x3F));
    out[3] = (char)(0x80 | (code & 0x3F));
    return 4;
}

/* Return whether a text equals a C string. Compare byte by byte: the expected keys and
 * words are short, and most others differ in the first byte. */
bool mls_str_is(mls_str text, const char *expected)
{
    size_t same = 0;
    while (same < text.length && expected[same] != '\0' &&
           text.data[same] == expected[same]) {
        same++;
    }
    return same == text.length && expected[same] == '\0';
}

/* Names are often shared, so the pointers are compared first. */
bool mls_str_equal(mls_str a, mls_str b)
{
    return a.length == b.length &&
           (a.data == b.data || a.length == 0 || memcmp(a.data, b.data, a.length) == 0);
}

/* If one string is a prefix of the other, the shorter comes first. */
int mls_str_compare(mls_str a, mls_str b)
{
    const size_t common = a.length < b.length ? a.length : b.length;
    const int order = common == 0 ? 0 : memcmp(a.data, b.data, common);
    return order != 0 ? order : (a.length > b.length) - (a.length < b.length);
}

/* memcmp does not accept NULL, even for zero bytes. */
bool mls_str_starts(mls_str text, mls_str prefix)
{
    return text.length >= prefix.length &&
           (prefix.length == 0 || memcmp(text.data, prefix.data, prefix.length) == 0);
}

/* Return how often a character occurs in a text. */
size_t mls_str_count(mls_str text, char character)
{
    size_t count = 0;
    for (size_t i = 0; i < text.length; i++) {
        count += text.data[i] == character;
    }
    return count;
}

/* Read the next number of a list; false: the text is not such a list. Each number has one
 * spelling, so equal lists are equal strings. */
bool mls_str_next_number(const char **at, const char *end, uint64_t *out)
{
    const char *p = *at;
    uint64_t value = 0;
    while (p < end && *p >= '0' && *p <= '9') {
        const unsigned digit = (unsigned)(*p - '0');
        if (value > UINT64_MAX / 10 || value * 10 > UINT64_MAX - digit ||
            (value == 0 && p > *at)) {
            return false;
        }
        value = value * 10 + digit;
        p++;
    }
    if (p == *at || (p < end && (*p != ',' || p + 1 == end))) {
        return false;
    }
    *at = p < end ? p + 1 : end;
    *out = value;
    return true;
}

/* Return the hash with `word` mixed in: each bit of `word` reaches the upper half of the
 * product, and the shift copies the upper half down. */
static uint64_t mix_word(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 32);
}

/* Return the `length` bytes at `data`, 0 to 8, as a number for hashing. Lengths below 8
 * use overlapping reads; the length, mixed in elsewhere, distinguishes them. */
static uint64_t tail_word(const char *data, size_t length)
{
    if (length >= 4) {
        uint32_t low, high;
        memcpy(&low, data, sizeof low);
        memcpy(&high, data + length - sizeof high, sizeof high);
        return ((uint64_t)high << 32) | low;
    }
    if (length == 0) {
        return 0;
    }
    const unsigned char *bytes = (const unsigned char *)data;
    return bytes[0] | ((unsigned)bytes[length / 2] << 8) |
           ((unsigned)bytes[length - 1] << 16);
}

/* Return a hash of a text. Read eight bytes at a time. Byte order does not matter: no
 * hash leaves the process. */
uint64_t mls_str_hash(uint64_t seed, mls_str text)
{
    uint64_t hash = mix_word(seed, text.length);
    const char *data = text.data;
    size_t length = text.length;
    for (; length > 8; length -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, sizeof word);
        hash = mix_word(hash, word);
    }
    hash = mix_word(hash, tail_word(data, length));
    return mix_word(hash, length);
}
