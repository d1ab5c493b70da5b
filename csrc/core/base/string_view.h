/* string_view: borrowed UTF-8 strings with a length.
 *
 * Names of tensors and states and the keys and values of metadata are mls_str. They point
 * into memory of the caller, may hold NUL characters and are not NUL-terminated.
 */
#ifndef MLS_STRING_VIEW_H
#define MLS_STRING_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Borrowed; `data` may be NULL if `length` is 0. */
typedef struct mls_str {
    const char *data;
    size_t length;
} mls_str;

/* Return the length of the UTF-8 character at `bytes` (1 to 4), or 0 if the bytes are not
 * a valid character: it does not fit into `room` bytes, or is overlong, a surrogate, or
 * beyond U+10FFFF. */
size_t mls_utf8_length(const unsigned char *bytes, size_t room);

/* Write the code point `code` as UTF-8 to `out`, without a NUL, and return the number of
 * bytes written, 1 to 4. `code` must be at most U+10FFFF and not a surrogate. */
size_t mls_utf8_put(char *out, unsigned long code);

/* Return whether the `length` bytes of `text` are UTF-8. A NUL character is valid. */
bool mls_utf8_valid(const char *text, size_t length);

/* Return whether `text` equals the C string `expected`. */
bool mls_str_is(mls_str text, const char *expected);

/* Return whether two strings have the same bytes. */
bool mls_str_equal(mls_str a, mls_str b);

/* Compare by bytes; the result is below, equal to or above 0. For UTF-8 this is the order
 * of code points, on every machine and in every locale. */
int mls_str_compare(mls_str a, mls_str b);

/* Return whether `text` starts with `prefix`. An empty prefix is always found. */
bool mls_str_starts(mls_str text, mls_str prefix);

/* Return how often a character occurs. */
size_t mls_str_count(mls_str text, char character);

/* Return a hash of all bytes of a string, for tables in memory. Another `seed` gives
 * another hash, for example the number of the parent in a tree of names. The result
 * depends on the machine's byte order. */
uint64_t mls_str_hash(uint64_t seed, mls_str text);

/* Return how many of the eight characters at `text` precede the first special one; all
 * eight are tested together. Special are the quote, the backslash, DEL, characters below
 * a space and bytes beyond ASCII. In JSON every other character represents itself. */
static inline size_t mls_str_eight_printable(const char *text)
{
    static const uint64_t ones = 0x0101010101010101U;
    uint64_t x;
    memcpy(&x, text, sizeof x);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x); /* put the first character into the lowest byte */
#endif
    /* Each term sets the top bit of a special byte. A borrow only reaches bytes above one
     * that is already marked, so the lowest marked byte is the first special one. */
    const uint64_t quote = (x ^ (ones * '"')) - ones;
    const uint64_t slash = (x ^ (ones * '\\')) - ones;
    const uint64_t control = x - ones * ' ';
    const uint64_t beyond = x + ones; /* DEL becomes 0x80 */
    const uint64_t lifted = (quote | slash | control | beyond | x) & (ones * 0x80U);
    return lifted == 0 ? 8 : (size_t)__builtin_ctzll(lifted) / 8;
}

/* Set `*out` to the decimal number at `*at`, in a list of numbers separated by commas
 * that ends at `end`, and move `*at` past it and its comma. Returns false if the text is
 * not a number, if the number has a sign or leading zeros, if it is 2^64 or more, or if
 * the list ends after a comma; `*at` and `*out` are then unchanged. */
bool mls_str_next_number(const char **at, const char *end, uint64_t *out);

#endif
