/* array_block: which small arrays of a load share a block of memory; array_block.h has
 * the sizes. */
#include "array/array_block.h"

size_t mls_block_padded_bytes(size_t bytes)
{
    return (bytes + MLS_BLOCK_LINE - 1) / MLS_BLOCK_LINE * MLS_BLOCK_LINE;
}

/* Plan one block. Add up whole lines until the block is full. Starts with one extra line,
 * since the memory may not start at a line boundary. */
size_t mls_block_plan(mls_block_bytes_of *bytes_of, const void *context, size_t from,
                      size_t count, size_t *until)
{
    size_t bytes = MLS_BLOCK_LINE;
    for (; from < count && bytes < MLS_BLOCK_BYTES; from++) {
        const size_t more = bytes_of(context, from);
        bytes += mls_block_takes(more) ? mls_block_padded_bytes(more) : 0;
    }
    *until = from;
    return bytes < MLS_BLOCK_LARGE ? 0 : bytes;
}
