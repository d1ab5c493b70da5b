/* safe_filename: a file name for any tensor name, valid on every file system.
 *
 * Lower-case letters, digits, '_', '-' and '.' are kept; every other byte of the UTF-8 is
 * written as '=' and two lower-case hexadecimal digits: "a/b" becomes "a=2fb". So names
 * stay distinct on file systems that ignore case or normalise Unicode, and no name has a
 * meaning in a shell or a path. These are escaped too: a '.' or '-' at the start, a '.'
 * after another '.', and the first letter of a Windows device name ("con", "com1", ... up
 * to the first dot). The empty name becomes "=". A name that becomes too long is
 * truncated and ends in "=~" and the caller's number, which makes it unique.
 */
#ifndef MLS_SAFE_FILENAME_H
#define MLS_SAFE_FILENAME_H

#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

/* The longest result without its NUL; leaves room for suffixes within 255 bytes. */
enum { MLS_FILENAME_BYTES = 160 };

/* Write the file name for the tensor `name` to `out`, with a NUL. Returns its length
 * without it. `number` is used only if the name is truncated, and must be unique among
 * truncated names. */
size_t mls_filename_encode(mls_str name, uint64_t number,
                           char out[MLS_FILENAME_BYTES + 1]);

#endif
