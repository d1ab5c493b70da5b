/* safetensors: one file of named tensors, read with suspicion and written atomically.
 *
 * The format is that of the safetensors package: 8 bytes with the header's length, the
 * header (a JSON object), then the tensors without a gap.  Every file that the package
 * accepts and whose element types are in dtype.h is read; what this writes, it accepts.
 *
 * Our own files carry checksums in the header's "__metadata__", which other readers take
 * for a user's text and ignore:
 *   "mlstate.header.crc32c"   CRC32C of the first 8 bytes and the header, padding
 *                             included, with the 8 digits of this value itself as '0'
 *   "mlstate.blocks.crc32c"   CRC32C of each MiB of each tensor, the last one of a tensor
 *                             being shorter, in the header's order, without gaps
 * All in lower-case hexadecimal, 8 digits each.  A file has both or neither: so that a
 * damaged key is noticed too.  Elements are little-endian on disk and, for those who read
 * them here, in memory.
 */
#ifndef MLS_SAFETENSORS_H
#define MLS_SAFETENSORS_H

#include "array/copy/copy.h"
#include "crc32c/crc32c.h"
#include "io/json_reader.h"
#include "runtime/thread_pool.h"
#include "base/status.h"
#include "array/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The longest header that the package reads. */
#define MLS_SAFETENSORS_MAX_HEADER ((size_t)100000000)

/* Bytes that one checksum covers, and how many checksums a tensor of `bytes` has. */
enum { MLS_SAFETENSORS_BLOCK = 1 << 20 };
size_t mls_safetensors_blocks(size_t bytes);

/* Keys of "__metadata__" that are ours start so. */
#define MLS_SAFETENSORS_PREFIX "mlstate."

/* The one of them that is metadata like any other here: what kind of state it is, which
 * is the caller's to write and to understand. */
#define MLS_SAFETENSORS_STATE MLS_SAFETENSORS_PREFIX "state"

/* ---- reading ---- */

/* What the header says of one tensor.  Name and shape share the header's memory. */
typedef struct mls_stored {
    mls_text name;
    const size_t *shape;
    uint64_t offset; /* of its first byte in the file */
    size_t bytes;    /* fit the shape, the dtype and the address space */
    mls_dtype dtype;
    int rank;
    const char *blocks; /* 8 digits for each block, where mls_safetensors.has_crc */
} mls_stored;

typedef struct mls_text_pair {
    mls_text key, value;
} mls_text_pair;

/* A header.  Everything in it was checked: the tensors cover the file exactly. */
typedef struct mls_safetensors {
    mls_stored *tensors; /* in the header's order */
    size_t count;
    mls_text_pair *metadata; /* without our own entries */
    size_t metadata_count;
    bool has_crc; /* `blocks` of the tensors may be relied on: one of our files, verified
                   */
    uint32_t header_crc; /* as written in it; only with `has_crc` */
    mls_json *json;
    size_t *dims;
} mls_safetensors;

/* Understand a header, from the first `head_bytes` bytes of a file of `file_bytes`.
 * `head` holds the 8 length bytes and the header, and need not outlive the call.  Memory
 * grows with the header only.  Gives: release with mls_safetensors_fini.
 * `verify`: compare the header with its checksum, where it has one.
 * MLS_E_FORMAT, with offset and tensor name where they apply: cut off, a length that
 * lies, no JSON, a duplicate name, overlaps, gaps, bytes behind the last tensor, a shape
 * that does not fit its bytes, an unknown type.  MLS_E_CHECKSUM: the header changed since
 * it was written.  MLS_E_MEMORY.  `*out` is untouched on failure. */
mls_code mls_safetensors_parse(const unsigned char *head, size_t head_bytes,
                               uint64_t file_bytes, const mls_crc_kernels *crc,
                               bool verify, mls_safetensors *out, mls_status *st);

/* Offset of the end of the last tensor in the file, which mls_safetensors_parse checked
 * to be the file's end; 0 without tensors. */
uint64_t mls_safetensors_end(const mls_safetensors *file);

void mls_safetensors_fini(mls_safetensors *file); /* accepts a zeroed one; zeroes it */

#if !defined(_WIN32)

/* Open `path` and understand its header.  Gives: close(*fd) and mls_safetensors_fini.
 * As mls_safetensors_parse, and MLS_E_IO, MLS_E_FORMAT of mls_file_open. */
mls_code mls_safetensors_open(const char *path, const mls_crc_kernels *crc, bool verify,
                              int *fd, mls_safetensors *out, mls_status *st);

/* Read the bytes of all tensors, each to its place, which has room for its bytes; large
 * ones in parts by several threads.  `crc` NULL: checksums are not looked at.
 * MLS_E_IO; MLS_E_FORMAT: the file became shorter; MLS_E_CHECKSUM: its bytes are not
 * those that were written; the status's offset is that of the first such block.
 * MLS_E_MEMORY.  After a failure the places hold anything. */
mls_code mls_safetensors_read(int fd, const mls_safetensors *file, void *const *places,
                              const mls_crc_kernels *crc, mls_pool *pool, mls_status *st);

#endif

/* ---- writing ---- */

/* A tensor to write: both are borrowed. */
typedef struct mls_named_tensor {
    mls_text name;
    const mls_tensor *tensor;
} mls_named_tensor;

/* Everything that goes into one file, borrowed for the call. */
typedef struct mls_safetensors_content {
    const mls_named_tensor *tensors;
    size_t count;
    const mls_text_pair *metadata;
    size_t metadata_count;
} mls_safetensors_content;

#if !defined(_WIN32)

/* Write a file atomically (see mls_atomic_file).  The same content gives the same bytes
 * on every machine, in whatever order it is handed over: tensors by falling item size and
 * then by name, so that each lies at a multiple of its item size; metadata by key; the
 * tensors start at a multiple of 64.  Contiguous tensors are written from where they lie,
 * others through a buffer of 1 MiB.
 * MLS_E_VALUE: a name or key that is not UTF-8, appears twice, or is reserved
 * ("__metadata__" for a tensor, "mlstate." at the start of any key but
 * MLS_SAFETENSORS_STATE).  MLS_E_SIZE: a header
 * over 100 MB.  MLS_E_IO, MLS_E_MEMORY.  On failure an existing file is what it was. */
mls_code mls_safetensors_write(const char *path, const mls_safetensors_content *content,
                               const mls_kernels *kernels, const mls_crc_kernels *crc,
                               mls_status *st);

#endif
#endif
