/* array_block: many small arrays laid out in few large blocks of memory.
 *
 * NumPy asks for large pages for a block of 4 MiB, and for nothing smaller, and the
 * system takes several times as long to hand out the same memory in small blocks.
 */
#ifndef MLS_ARRAY_BLOCK_H
#define MLS_ARRAY_BLOCK_H

#include <stddef.h>

enum {
    MLS_BLOCK_LARGE = 4 << 20,  /* an array or block of so many bytes gets large pages */
    MLS_BLOCK_BYTES = 16 << 20, /* a block ends with the array that exceeds it */
    MLS_BLOCK_LINE = 64         /* arrays begin at cache lines, the widest registers */
};

/* Bytes of the array `index`; 0 for one that is allocated in another way. */
typedef size_t mls_block_bytes_of(const void *context, size_t index);

/* Bytes that an array takes in a block. */
size_t mls_block_lines(size_t bytes);

/* Bytes of the block for the arrays from `from` on, at any address; `*until` is the first
 * array behind it.  Large arrays have memory of their own.  0: the arrays before `*until`
 * are too small to be worth a block, which any of them would keep whole. */
size_t mls_block_plan(mls_block_bytes_of *bytes_of, const void *context, size_t from,
                      size_t count, size_t *until);

/* Whether an array of so many bytes lies in a block, if there is one. */
static inline int mls_block_takes(size_t bytes)
{
    return bytes > 0 && bytes < MLS_BLOCK_LARGE;
}

#endif
