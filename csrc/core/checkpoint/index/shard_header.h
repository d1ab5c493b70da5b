/* shard_header: the header of a stored shard file, made again from an index.
 *
 * An index has everything that a header says, if it still lists every tensor of the file
 * as it was written.  So a damaged header can be replaced by the one that was written.
 */
#ifndef MLS_SHARD_HEADER_H
#define MLS_SHARD_HEADER_H

#include "io/json_writer.h"
#include "crc32c/crc32c.h"
#include "checkpoint/index/index.h"
#include "base/status.h"

#include <stddef.h>

enum { MLS_SHARD_ALIGNMENT = 4096 }; /* of a file's first tensor: direct writes need it */

/* Bytes of a tensor's key in a file, and the key itself, written to `to`.  A state has no
 * dot in its own name, so the last dot of its key parts it again, and no two tensors of a
 * section have one key. */
size_t mls_shard_key_length(const mls_tensor_id *id);
void mls_shard_write_key(const mls_tensor_id *id, char *to);

/* Append the header of file number `file` of the index to an empty buffer: the length
 * bytes and the text, up to the first tensor. MLS_E_VALUE, MLS_E_SIZE: the index does not
 * list all that the file was written with; its recorded checksum tells.  MLS_E_MEMORY. On
 * failure the buffer is as it was. */
mls_code mls_shard_header(const mls_index *index, size_t file, const mls_crc_kernels *crc,
                          mls_buffer *out, mls_status *st);

/* The same for the file of a path, from the first index that lists all of it.
 * MLS_E_VALUE: none does. */
mls_code mls_shard_header_find(const mls_index *indexes, size_t count, const char *path,
                               const mls_crc_kernels *crc, mls_buffer *out,
                               mls_status *st);

#endif
