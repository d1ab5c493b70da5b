/* file_checksums: checksums of whole files of another program, kept in another
 * file.
 *
 * A record divides its file into parts: of a safetensors file the header and each tensor,
 * of any other file the whole of it. Each MiB of a part has a CRC32C; the last block of a
 * part may be shorter. So a reader verifies a tensor, or some blocks of it, alone.
 */
#ifndef MLS_FILE_CHECKSUMS_H
#define MLS_FILE_CHECKSUMS_H

#include "base/status.h"
#include "checkpoint/index/index.h"
#include "crc32c/crc32c.h"

#include <stddef.h>
#include <stdint.h>

/* The record of one file; borrows its arrays. Nothing in it was checked. */
typedef struct mls_file_checksums {
    uint64_t bytes;         /* of the file */
    const uint64_t *starts; /* offset of each part */
    size_t count;           /* of parts; 0: the file has no record */
    const uint32_t *crcs;   /* of the blocks of all parts, in order */
    size_t crc_count;
} mls_file_checksums;

/* Compare the sizes and headers of the `count` files `names` in `folder` with their
 * records. Call it before headers are parsed, so that a damaged header is reported as
 * changed, not as invalid. Files without a record are skipped.
 * `*failed` is the number of the file that an error is about. MLS_E_FORMAT: the size
 * changed, or the record does not fit the file. MLS_E_CHECKSUM: the header changed.
 * MLS_E_IO; MLS_E_MEMORY. */
mls_code mls_file_checksums_compare(const mls_file_checksums *records, const char *folder,
                                    const char *const *names, size_t count,
                                    const mls_crc_kernels *crc, size_t *failed,
                                    mls_status *st);

/* Give each tensor of an index that mls_index_of_files made the checksums of its blocks
 * from `records`, one record for each file, so that reading verifies it. The index copies
 * them: the records may be freed.
 * `*failed` is the number of the file that an error is about. MLS_E_FORMAT: a part of a
 * record is not the tensor, or the size of a file has changed. MLS_E_MEMORY. The index is
 * unchanged on failure. */
mls_code mls_index_use_checksums(mls_index *index, const mls_file_checksums *records,
                                 size_t *failed, mls_status *st);

#endif
