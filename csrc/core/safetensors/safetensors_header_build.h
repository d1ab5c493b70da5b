/* safetensors_header_build: builds the header of a file; safetensors_read.c reads one.
 *
 * The header is laid out before any tensor is written: checksums have a fixed width, so
 * its length and the offsets of all tensors are known before the checksums. Used by
 * save_file and for the files of sharded checkpoints.
 */
#ifndef MLS_SAFETENSORS_HEADER_BUILD_H
#define MLS_SAFETENSORS_HEADER_BUILD_H

#include "array/dtype.h"
#include "base/status.h"
#include "base/string_view.h"
#include "crc32c/crc32c.h"
#include "io/json_writer.h"
#include "safetensors/safetensors.h"

#include <stddef.h>
#include <stdint.h>

/* One tensor; borrows name and shape. */
typedef struct mls_header_tensor {
    mls_str name;
    const size_t *shape;
    int rank;
    mls_dtype dtype;
    size_t bytes;         /* the product of shape and item size */
    size_t element_bytes; /* sets the place in the file order, and so the alignment: the
                             size of an element whose bytes are stored as MLS_U8; 0: the
                             item size of `dtype` */
    size_t number;        /* any number, to find the tensor again after sorting */
    uint64_t offset;      /* set here: offset of the tensor's first byte in the file */
    uint32_t *crcs; /* set here: room for its blocks' checksums; the caller fills it */
} mls_header_tensor;

typedef struct mls_header {
    mls_header_tensor *tensors; /* belong to the caller; in file order */
    size_t count;
    mls_json_writer text; /* length and padded JSON: the file up to the first tensor */
    uint64_t file_bytes;  /* length of the whole file */
    uint32_t *crcs;       /* checksums of all blocks */
    size_t block_count;
    size_t header_crc_at, block_crcs_at; /* positions of their first digits in `text` */
} mls_header;

/* Return the dtype under which a header lists items of this dtype and shape: MLS_U8 for
 * bytes of a packed dtype that are not whole elements along the last axis, as in a part
 * of a tensor. Readers of the format then see bytes. */
mls_dtype mls_header_dtype(mls_dtype dtype, int rank, const size_t *shape);

/* Fail with MLS_E_SHAPE if a header would list `tensor` under another dtype than its
 * own. */
mls_code mls_header_check(const mls_header_tensor *tensor, mls_status *st);

/* Sort the `count` entries of `tensors` into file order (by descending size of an
 * element, then by name, so that each starts at a multiple of that size), compute their
 * offsets and build the header. The first tensor starts at a multiple of `alignment`.
 * Metadata is sorted by key, and the two checksum entries are added to it. The caller
 * releases `*out` with mls_header_fini; `tensors` must outlive it. On failure nothing
 * needs to be released. MLS_E_VALUE: a name is not UTF-8, is reserved or is a duplicate;
 * a key is not UTF-8 or is a duplicate. MLS_E_SIZE: a header over 100 MB, or tensors of
 * 2**62 bytes or more. MLS_E_MEMORY. */
mls_code mls_header_init(mls_header *out, mls_header_tensor *tensors, size_t count,
                         const mls_str_pair *metadata, size_t metadata_count,
                         size_t alignment, mls_status *st);

/* Write the length and all checksums into `text`, which is then the start of the file.
 * The caller has filled `crcs`, the checksums of all blocks. Returns the header's own
 * checksum. */
uint32_t mls_header_finish(mls_header *header, const mls_crc_kernels *crc);

void mls_header_fini(mls_header *header); /* accepts a zeroed struct; zeroes it */

#endif
