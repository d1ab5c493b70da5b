/* json_checksum: JSON texts that contain their own checksum.
 *
 * The text starts with {"checksum":"xxxxxxxx" followed by a comma or the closing brace.
 * The eight lower-case hexadecimal digits are the CRC32C of the whole text with '0' for
 * these digits. The text is valid JSON for every reader, and any changed bit, in spaces
 * too, is detected before the text is parsed.
 */
#ifndef MLS_JSON_CHECKSUM_H
#define MLS_JSON_CHECKSUM_H

#include "base/status.h"
#include "crc32c/crc32c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Start of such a text, before its checksum is known. */
#define MLS_JSON_CHECKSUM_START "{\"checksum\":\"00000000\""

/* Compute the checksum of a text of `length` bytes that starts with
 * MLS_JSON_CHECKSUM_START, store its digits in the text, and return it. */
uint32_t mls_json_checksum_set(char *text, size_t length, const mls_crc_kernels *crc);

/* Verify the checksum at the start of a text of `length` bytes. MLS_E_FORMAT: the text
 * does not start with a checksum. MLS_E_CHECKSUM: the text changed since it was
 * written. */
mls_code mls_json_checksum_check(const char *text, size_t length,
                                 const mls_crc_kernels *crc, mls_status *st);

/* Convert a checksum to eight lower-case hexadecimal digits, without a NUL
 * (mls_crc_to_digits), and back (mls_crc_from_digits, which returns false if `digits` has
 * other characters). */
enum { MLS_CRC_DIGITS = 8 };
void mls_crc_to_digits(uint32_t crc, char *digits);
bool mls_crc_from_digits(const char *digits, uint32_t *out);

#endif
