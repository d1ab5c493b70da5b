/* part_write: writes parts of tensors into existing files that several processes fill, at
 * known offsets.
 *
 * Several processes write different parts of one tensor into one file, each the bytes of
 * its own parts. No process needs the others' bytes for the checksums: checksums of
 * adjacent ranges combine linearly (crc32c.h), so each process computes its share of a
 * block's checksum, and the XOR of all shares is the checksum.
 */
#ifndef MLS_PART_WRITE_H
#define MLS_PART_WRITE_H

#include "array/copy/copy.h"
#include "base/status.h"
#include "checkpoint/write/shard_write.h"
#include "crc32c/crc32c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An item, and the place of its whole tensor. */
typedef struct mls_placed_item {
    const mls_shard_item *item;
    int64_t file;    /* index of the file's name */
    int64_t offset;  /* of the tensor's first byte in the file */
    int64_t block;   /* index of the checksum of the tensor's first block */
    int64_t number;  /* index in `written` */
    mls_dtype dtype; /* in the file: the item's, or a float that 8-bit and other floats
                        are converted to in the copy */
} mls_placed_item;

/* What to write, and where. Everything is borrowed. */
typedef struct mls_parts_job {
    int folder;         /* descriptor of the files' folder */
    const char **names; /* of existing files in the folder */
    size_t file_count;
    bool syncs;             /* make the bytes of the files durable */
    mls_placed_item *items; /* in any order; mls_parts_write sorts them */
    size_t count;
    uint32_t *crcs; /* shares of the blocks' checksums are XORed to them */
    size_t block_count;
    uint64_t *written; /* numbers of bytes written; added to */
    size_t written_count;
    const mls_kernels *kernels;
    const mls_crc_kernels *crc;
    const mls_progress *progress; /* or NULL */
} mls_parts_job;

enum { MLS_PART_STEP = 256 << 10 }; /* bytes of one write, at most */

/* Write the parts that the items store to their places in the whole tensors, file by
 * file. The bytes of the items must not change meanwhile. On failure, `*failed` is the
 * name of the file that the error is about, or NULL if it is about the job; files before
 * it are complete.
 * MLS_E_VALUE: a place is outside the files or the results, and nothing was written.
 * MLS_E_DTYPE: an item does not convert to its place's dtype; nothing was written.
 * MLS_E_IO; MLS_E_MEMORY; MLS_E_STOPPED: `progress` returned false. */
mls_code mls_parts_write(const mls_parts_job *job, const char **failed, mls_status *st);

#endif
