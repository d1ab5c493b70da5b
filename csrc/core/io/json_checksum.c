/* json_checksum: sets and verifies the checksum at the start of a JSON text (manifests,
 * indexes).
 *
 * The digits have a fixed position at the start, so they are found without parsing, and
 * the text is verified before it is parsed. Writer and reader compute over the same
 * bytes: the start with zeros for digits, then the rest of the text.
 */
#include "io/json_checksum.h"

#include "base/size.h"

#include <string.h>

/* Position of the digits; the start ends with their closing quote. */
enum { DIGITS_AT = sizeof MLS_JSON_CHECKSUM_START - 1 - 1 - MLS_CRC_DIGITS };

/* The highest digit first, always eight digits. */
void mls_crc_to_digits(uint32_t crc, char *digits)
{
    static const char hexadecimal[] = "0123456789abcdef";
    for (int i = 0; i < MLS_CRC_DIGITS; i++) {
        digits[i] = hexadecimal[crc >> (28 - 4 * i) & 15];
    }
}

/* Convert eight digits to a checksum; false: they are not such digits. Accept exactly the
 * output of mls_crc_to_digits. Capitals are refused, so that a flipped bit that turns a
 * small letter into a capital is noticed. All eight digits are tested at once, since an
 * index has a checksum for each shard. Each sum sets the top bit of every byte that is at
 * least a given character. ASCII bytes plus less than 0x80 never carry into the next
 * byte. */
bool mls_crc_from_digits(const char *digits, uint32_t *out)
{
    const uint64_t ones = 0x0101010101010101U, tops = ones * 0x80U;
    unsigned char bytes[MLS_CRC_DIGITS];
    memcpy(bytes, digits, sizeof bytes);
    const uint64_t x = mls_load_le64(bytes);
    const uint64_t digit = (x + ones * (0x80U - '0')) & ~(x + ones * (0x7FU - '9'));
    const uint64_t letter = (x + ones * (0x80U - 'a')) & ~(x + ones * (0x7FU - 'f'));
    if ((x & tops) != 0 || ((digit | letter) & tops) != tops) {
        return false;
    }
    /* Value of each byte: only letters have bit 0x40, and 'a' ends in 1, so 9 is added
     * for a letter. Then join neighbours; the first digit is the lowest byte. */
    uint64_t value = (x & ones * 0x0FU) + (x >> 6 & ones) * 9;
    value = (value << 4 | value >> 8) & 0x00FF00FF00FF00FFU;
    value = (value << 8 | value >> 16) & 0x0000FFFF0000FFFFU;
    *out = (uint32_t)((value << 16 | value >> 32) & UINT32_MAX);
    return true;
}

/* Return the checksum of a text that starts with MLS_JSON_CHECKSUM_START and any digits:
 * computed as if the digits were zeros. */
static uint32_t checksum_text(const char *text, size_t length, const mls_crc_kernels *crc)
{
    const size_t start = sizeof MLS_JSON_CHECKSUM_START - 1;
    const uint32_t first = crc->update(0, MLS_JSON_CHECKSUM_START, start);
    return crc->update(first, text + start, length - start);
}

/* The zeros of the constant start take the place of the digits in the checksum. */
uint32_t mls_json_checksum_set(char *text, size_t length, const mls_crc_kernels *crc)
{
    const uint32_t checksum = checksum_text(text, length, crc);
    mls_crc_to_digits(checksum, text + DIGITS_AT);
    return checksum;
}

/* Verify the checksum of a text. Compare the start of the text too, because the checksum
 * is computed over the expected start. A changed byte in the start is reported as a
 * missing checksum. */
mls_code mls_json_checksum_check(const char *text, size_t length,
                                 const mls_crc_kernels *crc, mls_status *st)
{
    uint32_t expected;
    if (length < sizeof MLS_JSON_CHECKSUM_START - 1 ||
        memcmp(text, MLS_JSON_CHECKSUM_START, DIGITS_AT) != 0 ||
        !mls_crc_from_digits(text + DIGITS_AT, &expected) ||
        text[DIGITS_AT + MLS_CRC_DIGITS] != '"') {
        mls_fail_at(st, 0, "the text does not start with its checksum");
        return mls_status_expected(st, "{\"checksum\":\"xxxxxxxx\"");
    }
    const uint32_t checksum = checksum_text(text, length, crc);
    if (checksum == expected) {
        return MLS_OK;
    }
    mls_fail(st, MLS_E_CHECKSUM,
             "the text has changed since it was written (checksum %08lx, expected %08lx, "
             "over "
             "%zu bytes): the file is damaged",
             (unsigned long)checksum, (unsigned long)expected, length);
    mls_status_expected(st, "%08lx", (unsigned long)expected);
    return mls_status_got(st, "%08lx", (unsigned long)checksum);
}
