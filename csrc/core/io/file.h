/* fsio: files, opened safely, read whole, and replaced atomically.
 *
 * Messages say what was tried and why it failed; the path is the caller's to add.  POSIX
 * only: on Windows this file is empty.
 */
#ifndef MLS_FSIO_H
#define MLS_FSIO_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

#if !defined(_WIN32)

/* Most bytes that one system call is asked to move. */
#    define MLS_FILE_STEP ((size_t)1 << 30)

/* Open a regular file for reading, without waiting on a FIFO.  Gives: close(*fd).
 * MLS_E_IO: cannot be opened (os_error says why; EISDIR for a folder).
 * MLS_E_FORMAT: not a regular file.  Outputs are untouched on failure. */
mls_code mls_file_open(const char *path, int *fd, uint64_t *length, mls_status *st);

/* The same for `path` under an open folder; a symbolic link at its end is no regular
 * file. */
mls_code mls_file_open_at(int folder, const char *path, int *fd, uint64_t *length,
                          mls_status *st);

/* Look whether `path` under an open folder is a regular file of `bytes` bytes.
 * MLS_E_IO (ENOENT: there is none); MLS_E_FORMAT: it is something else. */
mls_code mls_file_expect(int folder, const char *path, uint64_t bytes, mls_status *st);

/* Read exactly `bytes` bytes at `offset`, through interruptions and short reads.
 * MLS_E_IO; MLS_E_FORMAT: the file ends before that. */
mls_code mls_file_read_at(int fd, void *data, size_t bytes, uint64_t offset,
                          mls_status *st);

/* Write all of `bytes` bytes at `offset`, through interruptions and short writes.
 * MLS_E_IO. */
mls_code mls_file_write_at(int fd, const void *data, size_t bytes, uint64_t offset,
                           mls_status *st);

/* Make a file, or the names in a folder, durable: 0, or errno.  After a failure it must
 * not be tried again: the system may have dropped the pages it could not write, and would
 * report success. */
int mls_file_sync(int fd);

/* The same for a folder; file systems whose folders cannot be synced at all count as
 * done. */
int mls_folder_sync(int fd);

/* Read a regular file whole.  Gives: free `*data` with mls_free.
 * MLS_E_IO: cannot be opened or read (os_error says why; EISDIR for a folder).
 * MLS_E_FORMAT: not a regular file (FIFO, device), or longer than `limit` bytes, or its
 * length changed while it was read.  MLS_E_MEMORY.  Outputs are untouched on failure. */
mls_code mls_file_read(const char *path, size_t limit, unsigned char **data,
                       size_t *length, mls_status *st);

/* Whole pages of a file, readable, shared with the system's own cache.  Reading past a
 * place where another process cut the file short ends in SIGBUS, as with every mapping.
 * They are for reading; a write by mistake stays in this process, where the system allows
 * it, and never reaches the file.
 */
typedef struct mls_mapping {
    const unsigned char *data; /* NULL for an empty file */
    size_t bytes;
} mls_mapping;

/* Map the first `bytes` bytes of an open file for reading.  The descriptor may be closed
 * afterwards.  Gives: end with mls_mapping_fini.  MLS_E_IO; MLS_E_SIZE: more than the
 * address space.  `*out` is untouched on failure. */
mls_code mls_mapping_init(mls_mapping *out, int fd, uint64_t bytes, mls_status *st);

void mls_mapping_fini(mls_mapping *mapping); /* accepts a zeroed one; zeroes it */

/* A file in the making.  Its bytes go to a temporary file in the target's folder, called
 * ".mlstate-" + 16 random hexadecimal digits + ".tmp", which takes the target's place in
 * one step when it is whole and on the disk.  Until then the old file is untouched; after
 * a failure or an abort no temporary remains.  (A process that is killed leaves its
 * temporary behind: delete it at will.)
 *
 * As when a file is opened for writing, a symbolic link is followed: what it points to is
 * replaced, the link stays.  The permission bits of an existing file are kept, its owner
 * too where the system allows; a new file has `mode` less the umask.  A file without
 * write permission is refused, like a folder, FIFO or device.  Other hard links to the
 * old file keep the old content. */
typedef struct mls_atomic_file {
    int fd;     /* of the temporary */
    int folder; /* where both live */
    char *name; /* the target's, within the folder */
    char temporary[40];
    uint64_t started; /* bytes whose way to the disk has begun */
} mls_atomic_file;

/* Start to write `path`; `mode` is 0666 for an ordinary file.  Gives: end with
 * mls_atomic_commit or mls_atomic_abort. MLS_E_IO: the folder or the file may not be
 * written (os_error says why); MLS_E_VALUE: the target is neither absent nor a regular
 * file; MLS_E_MEMORY. */
mls_code mls_atomic_begin(const char *path, unsigned mode, mls_atomic_file *out,
                          mls_status *st);

/* Write all of `bytes` bytes at `offset`, through interruptions and short writes.
 * MLS_E_IO; the caller then aborts. */
mls_code mls_atomic_write(mls_atomic_file *file, const void *data, size_t bytes,
                          uint64_t offset, mls_status *st);

/* Make the bytes durable, put them in the target's place, make that durable too, and
 * release `file`, whatever happens.
 * MLS_E_IO: the target is what it was and no temporary remains; only where the text says
 * "replaced" was the last step (making the new name durable) the one that failed. */
mls_code mls_atomic_commit(mls_atomic_file *file, mls_status *st);

/* Give up: remove the temporary and release `file`. */
void mls_atomic_abort(mls_atomic_file *file);

#endif
#endif
