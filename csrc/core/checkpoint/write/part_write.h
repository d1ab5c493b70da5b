/* part_write: write parts of tensors into existing files, at known offsets.
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

#include <stddef.h>
#include <stdint.h>

#if !defined(_WIN32)

/* The place of a whole tensor, and results for it. */
typedef struct mls_tensor_place {
    int fd;
    uint64_t offset;   /* of the tensor's first byte in the file */
    uint32_t *crcs;    /* one for each block of the tensor; shares are XORed to them */
    uint64_t *written; /* bytes written; added to */
    uint64_t *started; /* end of the file's bytes whose writeback has started */
} mls_tensor_place;

/* How to write; everything is borrowed. */
typedef struct mls_part_writer {
    const mls_kernels *kernels;
    const mls_crc_kernels *crc;
    const mls_progress *progress; /* or NULL */
    unsigned char *buffer;        /* MLS_PART_STEP bytes */
} mls_part_writer;

enum { MLS_PART_STEP = 256 << 10 };

/* Write the part that an item stores to its place in the whole tensor. The file is not
 * synced. The bytes of the item must not change meanwhile.
 * MLS_E_IO; MLS_E_STOPPED: `progress` returned false. */
mls_code mls_part_write(const mls_part_writer *writer, const mls_shard_item *item,
                        const mls_tensor_place *place, mls_status *st);

#endif
#endif
