/* seal: JSON texts that carry a checksum of themselves.
 *
 * The text starts with {"checksum":"xxxxxxxx" and goes on with a comma or its closing
 * brace.  The eight lower-case hexadecimal digits are the CRC32C of the whole text with
 * those digits as '0': so the text stays JSON for everyone, and every flipped bit of it,
 * spaces included, is found before it is parsed.
 */
#ifndef MLS_SEAL_H
#define MLS_SEAL_H

#include "crc32c/crc32c.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a sealed text starts with, before its checksum is known. */
#define MLS_SEAL_START "{\"checksum\":\"00000000\""

/* Fill in the checksum of a text that starts with MLS_SEAL_START.  Returns it. */
uint32_t mls_seal(char *text, size_t length, const mls_crc_kernels *crc);

/* Whether a text is what was sealed.  MLS_E_FORMAT: it does not start so;
 * MLS_E_CHECKSUM: other bytes than were sealed. */
mls_code mls_seal_check(const char *text, size_t length, const mls_crc_kernels *crc,
                        mls_status *st);

/* Eight lower-case hexadecimal digits: written to `digits`, without a NUL; read from
 * them, false where they are none. */
enum { MLS_CRC_DIGITS = 8 };
void mls_crc_to_digits(uint32_t crc, char *digits);
bool mls_crc_from_digits(const char *digits, uint32_t *out);

#endif
