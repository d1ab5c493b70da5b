/* index_of_files: an index for safetensors files of another program.
 *
 * Such files have no index of ours, but their headers list the same facts: each tensor is
 * one plain shard, stored whole. So everything that reads an index can read them.
 */
#ifndef MLS_INDEX_OF_FILES_H
#define MLS_INDEX_OF_FILES_H

#include "base/status.h"
#include "checkpoint/index/index.h"
#include "crc32c/crc32c.h"

#include <stddef.h>

/* Read the headers of `count` files in `folder`, in the order of `names`, and list their
 * tensors as parameters. The bytes of an opaque tensor are listed as an array of uint8.
 * Names have at most MLS_PATH_BYTES bytes; the caller has checked that they do not leave
 * the folder. Symbolic links are followed. The index has no generation. Shards of files
 * without checksums have `crcs` NULL, and `header_crc` of such files is 0. If several
 * files have a tensor of one name, the first file's is listed; the others are the index's
 * copies, and the caller compares their bytes. Gives: release with mls_index_fini.
 * `*failed` is the number of the file that an error is about. MLS_E_FORMAT also if two
 * files have a tensor of one name with other dtypes or shapes. Other errors as
 * mls_safetensors_open. `*out` is untouched on failure. */
mls_code mls_index_of_files(const char *folder, const char *const *names, size_t count,
                            const mls_crc_kernels *crc, mls_index *out, size_t *failed,
                            mls_status *st);

#endif
