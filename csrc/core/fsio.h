/* fsio: files, opened safely, read whole, and replaced atomically.
 *
 * Messages say what was tried and why it failed; the path is the caller's to add.  POSIX
 * only: on Windows this file is empty.
 */
#ifndef MLS_FSIO_H
#define MLS_FSIO_H

#include "status.h"

#include <stddef.h>
#include <stdint.h>

#if !defined(_WIN32)

/* Most bytes that one system call is asked to move. */
#    define MLS_FILE_STEP ((size_t)1 << 30)

/* Open a regular file for reading, without waiting on a FIFO.  Gives: close(*fd).
 * MLS_E_IO: cannot be opened (os_error says why; EISDIR for a folder).
 * MLS_E_FORMAT: not a regular file.  Outputs are untouched on failure. */
mls_code mls_file_open(const char *path, int *fd, uint64_t *length, mls_status *st);

/* Read exactly `bytes` bytes at `offset`, through interruptions and short reads.
 * MLS_E_IO; MLS_E_FORMAT: the file ends before that. */
mls_code mls_file_read_at(int fd, void *data, size_t bytes, uint64_t offset,
                          mls_status *st);

/* Read a regular file whole.  Gives: free `*data` with mls_free.
 * MLS_E_IO: cannot be opened or read (os_error says why; EISDIR for a folder).
 * MLS_E_FORMAT: not a regular file (FIFO, device), or longer than `limit` bytes, or its
 * length changed while it was read.  MLS_E_MEMORY.  Outputs are untouched on failure. */
mls_code mls_file_read(const char *path, size_t limit, unsigned char **data,
                       size_t *length, mls_status *st);

#endif
#endif
