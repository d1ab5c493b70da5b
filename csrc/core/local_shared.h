/* local_shared: arrays of a rank that the others of its host read where they lie.
 *
 * Each rank has blocks of memory in the group's file, behind the slots, in a range of
 * offsets of its own.  A block keeps its offset as long as the group lives: others map it
 * once, when an operation first reads it.  Of one that is given back the pages go to the
 * system at once, and its place waits for another array of about its size.
 *
 * Where ranks are threads, or the system is not Linux, blocks are ordinary memory, and
 * operations send what is in them as they send other arrays.
 */
#ifndef MLS_LOCAL_SHARED_H
#define MLS_LOCAL_SHARED_H

#if !defined(_WIN32)

#    include "local.h"

/* Where an array lies, as one rank tells it to another; `start` is 0 for one that others
 * cannot read. */
typedef struct mls_local_spot {
    uint64_t start, bytes; /* of its block: offset into the file, length */
    uint64_t at;           /* from there on */
} mls_local_spot;

/* ---- a rank's own blocks ---- */

/* Blocks for a rank of a group with the file `fd`, which is borrowed; ordinary memory for
 * -1.  Give: free with mls_local_blocks_leave.  NULL: no memory. */
mls_local_blocks *mls_local_blocks_new(size_t rank, int fd);

/* The group lets go of its blocks, which live on as long as an array is in one.  Accepts
 * NULL. */
void mls_local_blocks_leave(mls_local_blocks *b);

/* See mls_local_take. */
mls_code mls_local_blocks_take(mls_local_blocks *b, size_t bytes, void **out,
                               mls_status *st);

/* Where others find `bytes` at `data`; a spot with start 0 for what lies elsewhere. */
mls_local_spot mls_local_blocks_find(mls_local_blocks *b, const void *data, size_t bytes);

/* ---- blocks of another rank ---- */

/* A block of another rank, mapped to be read. */
typedef struct mls_local_view {
    uint64_t start;
    size_t bytes;
    const unsigned char *data;
} mls_local_view;

/* All that were mapped so far.  Zeroed, there is none. */
typedef struct mls_local_views {
    mls_local_view *list;
    size_t count, room;
    size_t next; /* the one that is likely to be asked for */
} mls_local_views;

/* Where this process reads `bytes` at a spot that `rank` told of.
 * MLS_E_FORMAT: there is no such place in its part of the file.  MLS_E_IO, MLS_E_MEMORY.
 */
mls_code mls_local_views_find(mls_local_views *v, int fd, size_t rank,
                              const mls_local_spot *spot, size_t bytes,
                              const unsigned char **out, mls_status *st);

/* Unmap all.  Accepts a zeroed struct; zeroes it. */
void mls_local_views_fini(mls_local_views *v);

#endif
#endif
