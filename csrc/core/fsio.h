/* fsio: files, opened safely, read whole, and replaced atomically.
 */
#ifndef MLS_FSIO_H
#define MLS_FSIO_H

#include "status.h"

#include <stddef.h>
#include <stdint.h>

/* Read a regular file whole.  Gives: free `*data` with mls_free.
 * MLS_E_IO: cannot be opened or read (os_error says why; EISDIR for a folder).
 * MLS_E_FORMAT: not a regular file (FIFO, device), or longer than `limit` bytes, or its
 * length changed while it was read.  MLS_E_MEMORY. */
mls_code mls_file_read(const char *path, size_t limit, unsigned char **data,
                       size_t *length, mls_status *st);

#endif
