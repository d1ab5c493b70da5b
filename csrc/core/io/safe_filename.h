/* filename: a file name for any name of a tensor, the same on every file system.
 *
 * Lower-case letters, digits, '_', '-' and '.' stand for themselves; every other byte of
 * the UTF-8 is written as '=' and two lower-case hexadecimal digits.  So no two names
 * become one where case or Unicode forms are folded, and none means anything to a shell
 * or a path: "a/b" is "a=2fb".  Escaped besides are a '.' or '-' at the start, a '.' that
 * follows another one, and the first letter of what Windows takes for a device ("con",
 * "com1", ... up to the first dot).  The empty name is "=".  A name that becomes too long
 * is cut, and "=~" and the caller's number for it stand at the cut: that number tells it
 * from every other one.
 */
#ifndef MLS_FILENAME_H
#define MLS_FILENAME_H

#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

/* The longest result, without its NUL: leaves room for suffixes in 255 bytes. */
enum { MLS_FILENAME_BYTES = 160 };

/* Write the file name of `name` to `out`, with a NUL; returns its length.  `number` is
 * only used where the name is cut, and must then be unique among them. */
size_t mls_filename_encode(mls_text name, uint64_t number,
                           char out[MLS_FILENAME_BYTES + 1]);

#endif
