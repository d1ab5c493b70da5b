/* shard_header_rebuild: rebuilds the header of a stored shard file from an index, for a
 * repair.
 *
 * An index contains everything that a header contains, provided that it still lists every
 * tensor of the file as it was written. So a damaged header can be restored exactly. */
#ifndef MLS_SHARD_HEADER_REBUILD_H
#define MLS_SHARD_HEADER_REBUILD_H

#include "base/status.h"
#include "checkpoint/index/index.h"
#include "crc32c/crc32c.h"
#include "io/json_writer.h"

#include <stddef.h>

/* Append the header of file number `file` of the index to an empty buffer: the length
 * field and the text, up to the first tensor.
 * MLS_E_VALUE, MLS_E_SIZE: the index does not list everything that the file was written
 * with, so the header does not match its recorded checksum. MLS_E_MEMORY. The buffer is
 * unchanged on failure. */
mls_code mls_shard_header_rebuild(const mls_index *index, size_t file,
                                  const mls_crc_kernels *crc, mls_json_writer *out,
                                  mls_status *st);

/* The same for the file at `path` in the folder, from the first of `count` indexes that
 * lists the complete file. MLS_E_VALUE: no index does. MLS_E_MEMORY. */
mls_code mls_shard_header_rebuild_path(const mls_index *indexes, size_t count,
                                       const char *path, const mls_crc_kernels *crc,
                                       mls_json_writer *out, mls_status *st);

#endif
