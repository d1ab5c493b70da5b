/* safetensors_header: the header of a file in the making.
 *
 * It is laid out before any tensor is written: checksums have a fixed width, so its
 * length, and with it every tensor's place, is known before they are.  For the files that
 * save_file writes and for those of sharded checkpoints.
 */
#ifndef MLS_SAFETENSORS_HEADER_H
#define MLS_SAFETENSORS_HEADER_H

#include "io/json_writer.h"
#include "crc32c/crc32c.h"
#include "array/dtype.h"
#include "safetensors/safetensors.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

/* One tensor; texts and shapes are borrowed. */
typedef struct mls_header_tensor {
    mls_text name;
    const size_t *shape;
    int rank;
    mls_dtype dtype;
    size_t bytes;    /* what shape and dtype make */
    size_t number;   /* the caller's own; nothing here looks at it */
    uint64_t offset; /* given: of its first byte in the file */
    uint32_t
        *crcs; /* given: room for the checksums of its blocks, the caller's to fill */
} mls_header_tensor;

typedef struct mls_header {
    mls_header_tensor *tensors; /* the caller's, in the order of the file */
    size_t count;
    mls_buffer text; /* the length bytes and the JSON, padded: the file up to the first
                        tensor */
    uint64_t file_bytes; /* all of it */
    uint32_t *crcs;      /* of all blocks */
    size_t block_count;
    size_t header_crc, block_crcs; /* where their digits go in the text */
} mls_header;

/* Bring `tensors` into the file's order (by falling item size, then by name, so that each
 * lies at a multiple of its item size), give them their places and lay out the header.
 * The first tensor starts at a multiple of `alignment`.  `metadata` is written as it is,
 * by key; the two entries of checksums are added.  Gives: release with mls_header_fini;
 * `tensors` must outlive it.
 * MLS_E_VALUE: a name that is not UTF-8, is reserved or appears twice, a key that appears
 * twice or is not UTF-8.  MLS_E_SIZE: a header over 100 MB, or a file over 2**63 bytes.
 * MLS_E_MEMORY.  On failure there is nothing to release. */
mls_code mls_header_init(mls_header *out, mls_header_tensor *tensors, size_t count,
                         const mls_text_pair *metadata, size_t metadata_count,
                         size_t alignment, mls_status *st);

/* Fill in length and checksums, those of all blocks being known now.  `text` is then what
 * the file starts with.  Returns the header's own checksum. */
uint32_t mls_header_finish(mls_header *header, const mls_crc_kernels *crc);

void mls_header_fini(mls_header *header); /* accepts a zeroed one; zeroes it */

#endif
