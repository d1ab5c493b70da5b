/* seal: the checksum of a text, in the text.
 *
 * The digits have their place at the start, so neither side has to look for them, and
 * nothing of the text is believed before it was compared.  Writer and reader compute over
 * the same bytes: a start with zeros for digits, then the text behind it as it is.
 */
#include "seal.h"

#include <string.h>

/* Where the digits start: the closing quote is the last character of the start. */
enum { DIGITS_AT = sizeof MLS_SEAL_START - 1 - 1 - MLS_CRC_DIGITS };

/* The highest digit first, always all eight: whoever leaves room for them knows how much.
 */
void mls_crc_to_digits(uint32_t crc, char *digits)
{
    static const char hexadecimal[] = "0123456789abcdef";
    for (int i = 0; i < MLS_CRC_DIGITS; i++) {
        digits[i] = hexadecimal[crc >> (28 - 4 * i) & 15];
    }
}

/* Exactly what mls_crc_to_digits writes.  Capitals are refused, so that a flipped bit
 * that makes one of a small letter is noticed. */
bool mls_crc_from_digits(const char *digits, uint32_t *out)
{
    uint32_t value = 0;
    for (int i = 0; i < MLS_CRC_DIGITS; i++) {
        const char c = digits[i];
        if (c >= '0' && c <= '9') {
            value = value * 16 + (uint32_t)(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            value = value * 16 + (uint32_t)(c - 'a' + 10);
        } else {
            return false;
        }
    }
    *out = value;
    return true;
}

/* Of a text whose start is MLS_SEAL_START but for the digits. */
static uint32_t checksum(const char *text, size_t length, const mls_crc_kernels *crc)
{
    const size_t start = sizeof MLS_SEAL_START - 1;
    const uint32_t first = crc->update(0, MLS_SEAL_START, start);
    return crc->update(first, text + start, length - start);
}

/* The digits are not part of what is summed: the constant start stands in for them. */
uint32_t mls_seal(char *text, size_t length, const mls_crc_kernels *crc)
{
    const uint32_t found = checksum(text, length, crc);
    mls_crc_to_digits(found, text + DIGITS_AT);
    return found;
}

/* A byte of the start that changed is not a sealed text any more, which says the same.
 * It has to be compared: the checksum is computed over what the start should be. */
mls_code mls_seal_check(const char *text, size_t length, const mls_crc_kernels *crc,
                        mls_status *st)
{
    uint32_t expected;
    if (length < sizeof MLS_SEAL_START - 1 ||
        memcmp(text, MLS_SEAL_START, DIGITS_AT) != 0 ||
        !mls_crc_from_digits(text + DIGITS_AT, &expected) ||
        text[DIGITS_AT + MLS_CRC_DIGITS] != '"') {
        mls_fail_at(st, 0, "the text does not start with its checksum");
        mls_status_expected(st, "{\"checksum\":\"xxxxxxxx\"");
        return MLS_E_FORMAT;
    }
    const uint32_t found = checksum(text, length, crc);
    if (found == expected) {
        return MLS_OK;
    }
    mls_fail(st, MLS_E_CHECKSUM,
             "the text is not what was written (checksum %08lx, expected %08lx, over "
             "%zu bytes): the file is damaged",
             (unsigned long)found, (unsigned long)expected, length);
    mls_status_expected(st, "%08lx", (unsigned long)expected);
    mls_status_got(st, "%08lx", (unsigned long)found);
    return MLS_E_CHECKSUM;
}
