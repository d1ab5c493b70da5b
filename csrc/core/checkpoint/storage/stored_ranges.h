/* stored: which stored bytes hold what is wanted of a shard.
 *
 * A place holds a whole shard, or one layer of it, of which some elements are visible
 * (shard_layers.h); wanted is a part of the tensor (layout.h).  What the two have in common is
 * walked run by run, in the order in which the bytes lie.
 */
#ifndef MLS_STORED_H
#define MLS_STORED_H

#include "checkpoint/storage/shard_layers.h"
#include "sharding/layout.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One place; everything is borrowed.  Elements that no place holds are one too: without a
 * file, and with the bytes that the whole shard would have. */
typedef struct mls_stored_shard {
    const char *file;    /* its path under the folder; NULL: not stored, all zeros */
    uint64_t file_bytes; /* length that the file must have */
    uint64_t offset;     /* of the place's first byte in it */
    size_t item_bytes;   /* of one element */
    const uint32_t
        *crcs;     /* one for each MLS_SAFETENSORS_BLOCK bytes, the last one short */
    mls_text name; /* of the tensor, for messages */
    size_t bytes;  /* of the place's elements; counts only with `visible` */
    const mls_extent *visible; /* NULL: it holds the whole shard, its elements packed */
    size_t visible_count;
    const mls_frames *frames; /* of coded bytes; NULL: they are those of the elements */
    const mls_part *part;     /* what the shard is of its tensor; borrowed */
} mls_stored_shard;

/* Bytes of the place's elements.  False: more than can be counted, or those that are
 * stored lie behind the end of the file. */
bool mls_stored_bytes(const mls_stored_shard *shard, size_t *out);

/* Bytes `at` .. `at + count` of the place's elements are bytes `to` .. of what is wanted,
 * where that lies packed. */
typedef struct mls_stored_run {
    size_t at, count, to;
} mls_stored_run;

/* The runs of bytes `from` .. `end` of a place.  `shard` and `to` are borrowed. */
typedef struct mls_stored_runs {
    const mls_stored_shard *shard;
    const mls_part *to;
    size_t from, end;
    mls_overlap overlap; /* of what is wanted with the shard from element `first` on */
    size_t first;
    size_t extent, last; /* of what is visible: the present one, and the end */
    mls_run run;         /* what is left of the present run, in elements of the shard */
    bool missed;         /* the last run was in front of the present extent */
} mls_stored_runs;

/* Start at byte `from`: neither what lies in front of it nor what lies behind `end` is
 * walked. */
void mls_stored_runs_init(mls_stored_runs *runs, const mls_stored_shard *shard,
                          const mls_part *to, size_t from, size_t end);

/* The next run, never empty; false after the last.  Each starts behind the one before. */
bool mls_stored_runs_next(mls_stored_runs *runs, mls_stored_run *out);

/* Which element of the shard element `at` of a place is, one that is visible. */
size_t mls_stored_element(const mls_stored_shard *shard, size_t at);

/* Bytes `from` .. `end` of a place hold all that is wanted of it; `from` is the first of
 * these, and goes to byte `to` of what is wanted.  `together`: so do all others, one
 * behind the other. */
typedef struct mls_stored_range {
    size_t from, end, to;
    bool together;
} mls_stored_range;

/* False: nothing is wanted of the place.  Its bytes are good, as mls_stored_bytes says.
 */
bool mls_stored_range_of(const mls_stored_shard *shard, const mls_part *to,
                         mls_stored_range *out);

/* What reading takes of a file: bytes `begin` .. `end` of it, of which `bytes` are read.
 * Where they are verified these are whole blocks. */
typedef struct mls_stored_reads {
    uint64_t begin, end, bytes;
} mls_stored_reads;

/* The same for what is wanted of a place that has a file; `bytes` 0: nothing is. */
mls_stored_reads mls_stored_reads_of(const mls_stored_shard *shard, const mls_part *to,
                                     bool verify);

/* Put tensor and file in front of what failed; the status is otherwise as it was. */
mls_code mls_stored_blame(const mls_stored_shard *shard, mls_status *st);

#endif
