/* file: opens files safely, reads them whole or in ranges, and replaces them atomically.
 *
 * Messages name the failed step and the reason; the caller adds the path. POSIX only.
 */
#ifndef MLS_FILE_H
#define MLS_FILE_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The largest number of bytes that one system call is asked to transfer. */
#define MLS_FILE_STEP ((size_t)1 << 30)

/* Open the regular file `path` for reading, and set `*fd` to a descriptor that the caller
 * closes and `*length` to its size in bytes. Does not block on a FIFO. Outputs are
 * untouched on failure.
 * MLS_E_IO: cannot be opened (os_error gives the reason; EISDIR for a folder).
 * MLS_E_FORMAT: not a regular file. */
mls_code mls_file_open(const char *path, int *fd, uint64_t *length, mls_status *st);

/* mls_file_open for `path` relative to the open folder `folder`. Unless `follow_links`, a
 * symbolic link as the last name of the path counts as not a regular file. */
mls_code mls_file_open_at(int folder, const char *path, bool follow_links, int *fd,
                          uint64_t *length, mls_status *st);

/* Check that `path`, relative to an open folder, is a regular file of `bytes` bytes;
 * `follow_links` as for mls_file_open_at.
 * MLS_E_IO (ENOENT: it does not exist); MLS_E_FORMAT: another kind or another length. */
mls_code mls_file_expect(int folder, const char *path, bool follow_links, uint64_t bytes,
                         mls_status *st);

/* Read exactly `bytes` bytes at `offset` into `data`; continues after interruptions and
 * short reads. Threads may share `fd`. `data` has unknown content after a failure.
 * MLS_E_IO; MLS_E_FORMAT: the file ends earlier. */
mls_code mls_file_read_at(int fd, void *data, size_t bytes, uint64_t offset,
                          mls_status *st);

/* Bytes `begin` .. `end` of a file, in memory; the last ones are missing if the file ends
 * earlier. */
typedef struct mls_file_range {
    const char *file; /* its name; compared with the `file` of a source */
    uint64_t begin, end;
    uint64_t file_bytes; /* length of the whole file */
    const unsigned char *data;
    size_t bytes; /* of `data` */
} mls_file_range;

/* A file to read: an open descriptor, or ranges of some files, one of them `file`. */
typedef struct mls_source {
    int fd;
    const char *file;
    const mls_file_range *ranges; /* NULL: `fd` is read */
    size_t range_count;
} mls_source;

/* Return the range with the name of the source's file that contains byte `offset`, or
 * NULL. */
const mls_file_range *mls_source_range(const mls_source *source, uint64_t offset);

/* mls_file_read_at for a source: reads its descriptor, or copies from its ranges.
 * MLS_E_FORMAT also if a byte is in none of the ranges. */
mls_code mls_source_read_at(const mls_source *source, void *data, size_t bytes,
                            uint64_t offset, mls_status *st);

/* Write exactly `bytes` bytes of `data` at `offset`; continues after interruptions and
 * short writes. After a failure the file has an unknown number of them.
 * MLS_E_IO. */
mls_code mls_file_write_at(int fd, const void *data, size_t bytes, uint64_t offset,
                           mls_status *st);

/* Start to write bytes `*started` .. `end` of a file to the disk if there are enough of
 * them (8 MiB), and then set `*started` to `end`. A hint, so that the final sync has
 * little left to do. */
void mls_file_start_writeback(int fd, uint64_t *started, uint64_t end);

/* Make a file, or the names in a folder, durable. Returns 0 or errno. Do not retry after
 * a failure: the system may have dropped the pages that it could not write, and would
 * then report success. */
int mls_file_sync(int fd);

/* mls_file_sync for a folder. Returns 0 on file systems that cannot sync folders. */
int mls_folder_sync(int fd);

/* Return whether a path has a file, folder or link. False only if the system has no such
 * name, or no file can have it (ENAMETOOLONG); true after any other error, which an open
 * of the path reports. Costs a third of an open that fails. */
bool mls_path_exists(const char *path);

/* What mls_path_rename does with the name `to`. */
typedef enum mls_rename_mode {
    MLS_RENAME_NEW, /* it must not exist */
    MLS_RENAME_SWAP /* it must exist, and gets the name `from` */
} mls_rename_mode;

/* Rename a file, folder or link in one step that replaces nothing. Both names are on one
 * file system. Returns 0 or errno; EEXIST: `to` exists; ENOTSUP: the system or the file
 * system has no such operation. */
int mls_path_rename(const char *from, const char *to, mls_rename_mode mode);

/* Whole pages of a file, shared with the system's page cache. If another process
 * truncates the file, reading past its new end raises SIGBUS, as with every mapping. The
 * pages are for reading. An accidental write changes a private copy of the page, if the
 * system allows it, and never the file. */
typedef struct mls_mapping {
    const unsigned char *data; /* NULL for an empty file */
    size_t bytes;
} mls_mapping;

/* Map the first `bytes` bytes of an open file for reading. The descriptor may be closed
 * afterwards. The caller ends the mapping with mls_mapping_fini. MLS_E_IO; MLS_E_SIZE:
 * more than the address space. `*out` is untouched on failure. */
mls_code mls_mapping_init(mls_mapping *out, int fd, uint64_t bytes, mls_status *st);

/* mls_mapping_init for all bytes of the file that mls_file_open_at opens with the same
 * parameters, and with its errors. MLS_E_FORMAT also if the file does not have exactly
 * `bytes` bytes. */
mls_code mls_mapping_init_at(mls_mapping *out, int folder, const char *path,
                             bool follow_links, uint64_t bytes, mls_status *st);

void mls_mapping_fini(mls_mapping *mapping); /* accepts a zeroed struct; zeroes it */

/* A file that is being written. Its bytes are written to a temporary file in the target's
 * folder, named ".mlstate-" + 16 random hexadecimal digits + ".tmp". The commit renames
 * it to the target when it is complete and durable. Until then the old file is untouched;
 * after a failure or an abort the temporary is removed. A killed process leaves its
 * temporary behind; it may be deleted at any time.
 *
 * As when a file is opened for writing, a symbolic link is followed: its target is
 * replaced and the link stays. The permission bits of an existing file are kept, and its
 * owner if the system allows it. A new file has `mode` less the umask. A file without
 * write permission is refused, like a folder, FIFO or device. Other hard links to the old
 * file keep the old content. */
typedef struct mls_atomic_file {
    int fd;     /* of the temporary */
    int folder; /* folder of the target and of the temporary */
    char *name; /* the target's name within the folder */
    char temporary[40];
    uint64_t started; /* end of the bytes whose writeback has started */
} mls_atomic_file;

/* Begin to replace or create the file `path`; `mode` has the permission bits of a new
 * file, 0666 for an ordinary one. The caller ends it with mls_atomic_commit or
 * mls_atomic_abort. After a failure nothing needs to be ended.
 * MLS_E_IO: the folder or the file is not writable (os_error gives the reason).
 * MLS_E_VALUE: the target exists and is not a regular file. MLS_E_MEMORY. */
mls_code mls_atomic_begin(const char *path, unsigned mode, mls_atomic_file *out,
                          mls_status *st);

/* mls_atomic_begin for the file `name` in the open folder `folder`, which stays open for
 * the caller. A symbolic link is refused with MLS_E_VALUE. */
mls_code mls_atomic_begin_at(int folder, const char *name, unsigned mode,
                             mls_atomic_file *out, mls_status *st);

/* Return whether a file's name is one that mls_atomic_begin gives to its temporary. */
bool mls_atomic_is_temporary(const char *name);

/* Write exactly `bytes` bytes of `data` at `offset` of the temporary; continues after
 * interruptions and short writes. Bytes may be written in any order.
 * MLS_E_IO; the caller must then abort. */
mls_code mls_atomic_write(mls_atomic_file *file, const void *data, size_t bytes,
                          uint64_t offset, mls_status *st);

/* Make the bytes durable, rename the temporary to the target, make the new name durable,
 * and release `file`, also on failure.
 * MLS_E_IO: the target is unchanged and the temporary is removed. Exception: if the text
 * contains "replaced", only the last step failed (making the new name durable). */
mls_code mls_atomic_commit(mls_atomic_file *file, mls_status *st);

/* Remove the temporary and release `file`. */
void mls_atomic_abort(mls_atomic_file *file);

/* Replace or create the file `path` with the `bytes` bytes of `data`: mls_atomic_begin
 * (with `mode`), mls_atomic_write and mls_atomic_commit, with their errors. */
mls_code mls_file_replace(const char *path, unsigned mode, const void *data, size_t bytes,
                          mls_status *st);

/* mls_file_replace for the file `name` in the open folder `folder`. A symbolic link is
 * refused with MLS_E_VALUE. */
mls_code mls_file_replace_at(int folder, const char *name, unsigned mode,
                             const void *data, size_t bytes, mls_status *st);

#endif
