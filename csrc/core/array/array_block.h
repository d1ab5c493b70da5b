/* array_block: sizes of the blocks of memory that small loaded arrays share, and the
 * alignment in them.
 *
 * NumPy requests huge pages for allocations of 4 MiB and more only. Allocating the same
 * memory in many small blocks takes the system several times as long.
 */
#ifndef MLS_ARRAY_BLOCK_H
#define MLS_ARRAY_BLOCK_H

#include <stddef.h>

enum {
    MLS_BLOCK_LARGE = 4 << 20,  /* arrays and blocks of this size get huge pages */
    MLS_BLOCK_BYTES = 16 << 20, /* a block ends with the array that exceeds this size */
    MLS_BLOCK_LINE = 64 /* alignment of arrays: a cache line, also the widest register */
};

/* Returns the bytes of array number `index`, or 0 for an array that is allocated in
 * another way. `context` is the caller's, passed through. */
typedef size_t mls_block_bytes_of(const void *context, size_t index);

/* Return the bytes that an array of `bytes` bytes takes in a block: rounded up to whole
 * lines. */
size_t mls_block_padded_bytes(size_t bytes);

/* Plan the block for arrays number `from`, `from` + 1, ... of `count`; `bytes_of` gives
 * their sizes. Returns the bytes of the block; its memory may have any address. Sets
 * `*until` to the number of the first array after the block. Large arrays are skipped:
 * they get their own memory. Returns 0 if the arrays before `*until` are too small
 * together: a block would not pay off, since any one of its arrays keeps the whole block
 * alive. */
size_t mls_block_plan(mls_block_bytes_of *bytes_of, const void *context, size_t from,
                      size_t count, size_t *until);

/* Return whether an array of `bytes` bytes belongs in a block, if there are blocks: it is
 * neither empty nor large. */
static inline int mls_block_takes(size_t bytes)
{
    return bytes > 0 && bytes < MLS_BLOCK_LARGE;
}

#endif
