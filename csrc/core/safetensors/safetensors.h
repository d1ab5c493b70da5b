/* safetensors: one file of named tensors: longest header, bytes of a checksum, mlstate's
 * keys in the metadata.
 *
 * The format is defined by the safetensors package: 8 bytes with the header's length, the
 * header (a JSON object), then the tensors without gaps. This library reads every file
 * that the package accepts, and writes files that the package accepts. A dtype of a later
 * version of the format does not make a file invalid: only its tensor cannot be read.
 *
 * Files written by mlstate contain checksums in the header's "__metadata__". Other
 * readers treat them as user metadata and ignore them:
 *   "mlstate.header.crc32c"   CRC32C of the first 8 bytes and the header, padding
 *                             included, with '0' for the 8 digits of this value itself
 *   "mlstate.blocks.crc32c"   CRC32C of each MiB of each tensor (the last block of a
 *                             tensor may be shorter), in the header's order, without gaps
 * Each checksum has 8 lower-case hexadecimal digits. A file has both entries or neither,
 * so that a damaged key is noticed too. Elements are little-endian on disk and in memory.
 */
#ifndef MLS_SAFETENSORS_H
#define MLS_SAFETENSORS_H

#include "array/copy/copy.h"
#include "array/tensor.h"
#include "base/status.h"
#include "crc32c/crc32c.h"
#include "io/json_reader.h"
#include "runtime/thread_pool.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The longest header that the safetensors package reads. */
#define MLS_SAFETENSORS_MAX_HEADER ((size_t)100000000)

/* MLS_SAFETENSORS_BLOCK: bytes covered by one checksum. mls_safetensors_blocks: return
 * the number of checksums of a tensor of `bytes` bytes; the last one may cover fewer. */
enum { MLS_SAFETENSORS_BLOCK = 1 << 20 };
size_t mls_safetensors_blocks(size_t bytes);

/* Combine `crcs`, the checksums of a tensor's blocks, into the checksum of its `bytes`
 * bytes. */
uint32_t mls_safetensors_join_crcs(const uint32_t *crcs, size_t bytes);

typedef struct mls_str_pair {
    mls_str key, value;
} mls_str_pair;

/* Prefix of the keys in "__metadata__" that are reserved for mlstate. */
#define MLS_SAFETENSORS_PREFIX "mlstate."

/* The only reserved key that the caller reads and writes as metadata: the kind of state
 * in the file. */
#define MLS_SAFETENSORS_STATE MLS_SAFETENSORS_PREFIX "state"

/* mlx-lm parses the whole "__metadata__" of a prompt cache as one tree of three branches,
 * "0.<key>", "1.<key>" and "2.<key>", and refuses every other key. The branch of the
 * user's texts may have any keys: it is "0." if "2.0" is "" (mlx-lm 0.32 and later),
 * otherwise "1.". A file with such metadata has the keys of mlstate in that branch, such
 * as "0.mlstate.header.crc32c". */

/* Return the branch of the user's texts, "0." or "1."; "" unless the `count` pairs of
 * `metadata` are a tree. Reserved keys are ignored. */
mls_str mls_safetensors_branch(const mls_str_pair *metadata, size_t count);

/* Return a key of mlstate without its branch, and any other key as it is. */
mls_str mls_safetensors_own_key(mls_str key);

/* ---- reading ---- */

/* Header entry of one tensor. Name and shape belong to the header. The shape counts the
 * items of an array, also for packed dtypes, whose elements the file counts. */
typedef struct mls_stored {
    mls_str name;
    const size_t *shape;
    uint64_t offset; /* of the tensor's first byte in the file */
    size_t bytes;    /* match shape and dtype, and fit the address space */
    mls_dtype dtype;
    int rank;
    mls_str opaque; /* empty, or the dtype in the file of a tensor that no array can hold:
                       the dtype is unknown, or the last axis of a packed dtype has no
                       whole bytes. Then `dtype` is MLS_U8, and only `bytes` counts:
                       `shape` is the file's. */
    uint64_t opaque_offset;   /* of that dtype in the file */
    const char *block_digits; /* 8 for the checksum of each block; valid only with
                                 `has_crc` */
} mls_stored;

/* Fail with MLS_E_FORMAT, name and offset if `tensor` is opaque. Its bytes can still be
 * copied. */
mls_code mls_stored_check(const mls_stored *tensor, mls_status *st);

/* A parsed header. Everything in it was checked: the tensors cover the file exactly. */
typedef struct mls_safetensors {
    uint64_t bytes;      /* of the whole file */
    mls_stored *tensors; /* in the header's order */
    size_t count;
    mls_str_pair *metadata; /* without the checksum entries */
    size_t metadata_count;
    bool has_crc; /* the header was verified, and the tensors have `block_digits` */
    uint32_t header_crc; /* as stored in the header; valid only with `has_crc` */
    mls_json *json;      /* owns all names and texts */
    size_t *dims;        /* all shapes */
} mls_safetensors;

/* mls_stored_check for all tensors of a file: the first opaque one is reported. */
mls_code mls_safetensors_check(const mls_safetensors *file, mls_status *st);

/* Parse a header from `head`, the first `head_bytes` bytes of a file of `file_bytes`
 * bytes: the 8 length bytes and the header, which need not outlive the call. Memory grows
 * with the header only. If `verify` is true, the header is compared with its checksum, if
 * it has one. The caller releases `*out` with mls_safetensors_fini. `*out` is untouched
 * on failure.
 * MLS_E_FORMAT, with offset and tensor name if they apply: truncated file, wrong length,
 * invalid JSON, duplicate name, overlap, gap, bytes after the last tensor, a shape that
 * does not match its bytes.
 * MLS_E_CHECKSUM: the header changed since it was written. MLS_E_VALUE: `head` ends
 * before the header.
 * MLS_E_MEMORY. */
mls_code mls_safetensors_parse(const unsigned char *head, size_t head_bytes,
                               uint64_t file_bytes, const mls_crc_kernels *crc,
                               bool verify, mls_safetensors *out, mls_status *st);

void mls_safetensors_fini(mls_safetensors *file); /* accepts a zeroed struct; zeroes it */

/* Open `path` and parse its header; `verify` as in mls_safetensors_parse. The caller
 * closes `*fd` and releases `*out` with mls_safetensors_fini. Fails as
 * mls_safetensors_parse and mls_file_open do; the file is closed then. */
mls_code mls_safetensors_open(const char *path, const mls_crc_kernels *crc, bool verify,
                              int *fd, mls_safetensors *out, mls_status *st);

/* Read the bytes of all tensors of the open file `fd` into `places`, one buffer for each
 * tensor, in the order of `file->tensors`. `places` NULL: only compare checksums, which
 * the file must have; each thread then needs 1 MiB. The threads of `pool` (NULL: none)
 * read large tensors in parts. If `crc` is NULL, checksums are not verified. After a
 * failure the content of the buffers is undefined.
 * MLS_E_IO; MLS_E_MEMORY. MLS_E_FORMAT: the file became shorter. MLS_E_CHECKSUM: bytes
 * changed since they were written; the status has the offset of the first such block. */
mls_code mls_safetensors_read(int fd, const mls_safetensors *file, void *const *places,
                              const mls_crc_kernels *crc, mls_pool *pool, mls_status *st);

/* ---- writing ---- */

/* A tensor to write; borrows name and tensor. */
typedef struct mls_named_tensor {
    mls_str name;
    const mls_tensor *tensor;
} mls_named_tensor;

/* The content of one file, borrowed for the call. */
typedef struct mls_safetensors_content {
    const mls_named_tensor *tensors;
    size_t count;
    const mls_str_pair *metadata;
    size_t metadata_count;
} mls_safetensors_content;

/* Write a file atomically (see mls_atomic_file). Equal content produces equal bytes on
 * every machine, in any order of the caller: tensors are sorted by descending item
 * size, then by name, so that each starts at a multiple of its item size; metadata
 * is sorted by key. The first tensor starts at a multiple of 64. Contiguous tensors are
 * copied through a buffer in steps of 256 KiB; other tensors are packed into a buffer of
 * 1 MiB. On failure an existing file is unchanged, but see mls_atomic_commit.
 * MLS_E_VALUE: a name or key is not UTF-8, is a duplicate, or is reserved ("__metadata__"
 * for a tensor; for metadata, any key that starts with "mlstate." or with a branch and
 * "mlstate.", except MLS_SAFETENSORS_STATE).
 * MLS_E_SHAPE: see mls_header_check.
 * MLS_E_SIZE: a header over 100 MB. MLS_E_IO, MLS_E_MEMORY. */
mls_code mls_safetensors_write(const char *path, const mls_safetensors_content *content,
                               const mls_kernels *kernels, const mls_crc_kernels *crc,
                               mls_status *st);

#endif
