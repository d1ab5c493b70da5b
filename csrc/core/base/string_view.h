/* text: UTF-8 with its length, where it lies.
 *
 * Names of tensors and states, keys and values of metadata: all of them are borrowed runs
 * of bytes, which may hold NUL characters and are not terminated.
 */
#ifndef MLS_TEXT_H
#define MLS_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Borrowed; `data` may be NULL where `length` is 0. */
typedef struct mls_text {
    const char *data;
    size_t length;
} mls_text;

/* Bytes of the UTF-8 character that `bytes` starts with (1 to 4), or 0 where it is none:
 * cut off by `room`, overlong, a surrogate, beyond U+10FFFF. */
size_t mls_utf8_length(const unsigned char *bytes, size_t room);

/* Write a code point, which is no surrogate and at most U+10FFFF, as UTF-8; returns how
 * many bytes that took, 1 to 4. */
size_t mls_utf8_put(char *out, unsigned long code);

/* Whether all of `text` is UTF-8. */
bool mls_utf8_valid(const char *text, size_t length);

/* Whether `text` is exactly the C string `expected`. */
bool mls_text_is(mls_text text, const char *expected);

/* Whether two texts are the same bytes. */
bool mls_text_equal(mls_text a, mls_text b);

/* Below, at or above 0: by bytes, which for UTF-8 is the order of code points, on every
 * machine and in every locale. */
int mls_text_compare(mls_text a, mls_text b);

/* Whether `text` starts with all of `prefix`; true for an empty one. */
bool mls_text_starts(mls_text text, mls_text prefix);

/* A hash of all bytes of a text, for tables in memory: it differs between machines. */
uint64_t mls_text_hash(uint64_t seed, mls_text text);

/* How many of the eight characters at `text` are plain before the first that is not, all
 * looked at together: no quote, no backslash, no DEL, nothing below a space or beyond
 * ASCII.  In JSON such a character can only stand for itself. */
static inline size_t mls_text_eight_plain(const char *text)
{
    static const uint64_t ones = 0x0101010101010101U;
    uint64_t x;
    memcpy(&x, text, sizeof x);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x); /* the first character lowest */
#endif
    /* Each term lifts the top bit of a byte that is not plain.  Borrows only reach bytes
     * above one that is lifted anyway, so the lowest one that is lifted is the first. */
    const uint64_t quote = (x ^ (ones * '"')) - ones;
    const uint64_t slash = (x ^ (ones * '\\')) - ones;
    const uint64_t control = x - ones * ' ';
    const uint64_t beyond = x + ones; /* DEL becomes 0x80 */
    const uint64_t lifted = (quote | slash | control | beyond | x) & (ones * 0x80U);
    return lifted == 0 ? 8 : (size_t)__builtin_ctzll(lifted) / 8;
}

/* The decimal number at `*at`, which moves behind it and the comma that follows, where
 * one does: lists of numbers that are one string.  False: there is none, or not in its
 * only form (no sign, no zeros in front), or nothing behind the comma, or it is 2^64 or
 * more. */
bool mls_text_next_number(const char **at, const char *end, uint64_t *out);

#endif
