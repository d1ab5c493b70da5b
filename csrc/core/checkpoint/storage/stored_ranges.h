/* stored_ranges: the stored bytes that contain a requested part of a shard.
 *
 * A place stores a whole shard, or one layer of it with some visible elements
 * (shard_layers.h). The requested part is a part of the tensor (layout.h). The iterator
 * returns their intersection run by run, in the order of the stored bytes. */
#ifndef MLS_STORED_RANGES_H
#define MLS_STORED_RANGES_H

#include "base/status.h"
#include "base/string_view.h"
#include "checkpoint/storage/shard_layers.h"
#include "sharding/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One place; all pointers are borrowed. Elements that no layer stores also form a place,
 * without a file and with the size of the whole shard. */
typedef struct mls_stored_shard {
    const char *file;     /* path relative to the folder; NULL: not stored, all zeros */
    uint64_t file_bytes;  /* required length of the file */
    uint64_t offset;      /* offset of the place in the file */
    size_t item_bytes;    /* bytes of one element */
    const uint32_t *crcs; /* CRC32C of each MLS_SAFETENSORS_BLOCK bytes; the last block
                             may be shorter. NULL: the file has no checksums */
    mls_str name;         /* name of the tensor, for errors */
    mls_str state;        /* state of an optimizer, for errors; no data: none */
    size_t bytes;         /* uncompressed size of the place; used only with `visible` */
    const mls_row_range *visible; /* NULL: the place stores the whole shard, packed */
    size_t visible_count;
    const mls_compressed_frames *frames; /* NULL: not compressed */
    const mls_part *part;                /* the shard's part of the tensor */
} mls_stored_shard;

/* Compute the uncompressed size of the place, `*out`. Returns false if it overflows, or
 * the stored bytes exceed the file. */
bool mls_stored_bytes(const mls_stored_shard *place, size_t *out);

/* Bytes `at` .. `at + count` of the place (uncompressed) are bytes `to` ..
 * `to + count` of the packed requested part. */
typedef struct mls_stored_run {
    size_t at, count, to;
} mls_stored_run;

/* Iterator over the runs in bytes `from` .. `end` of a place. `place` and `to`, the
 * requested part, are borrowed. */
typedef struct mls_stored_runs {
    const mls_stored_shard *place;
    const mls_part *to;
    size_t from, end;
    mls_overlap overlap; /* intersection of `to` with the shard from element `first` on */
    size_t first;
    size_t visible_index,
        visible_end; /* current visible range; the end of those to visit */
    mls_run run; /* rest of the current run, in elements: `a` in the shard, `b` in `to` */
    bool missed; /* the previous run was dropped, and the iterator did not restart */
} mls_stored_runs;

/* Start an iterator over the runs of a place that the part `to` needs, in bytes `from` ..
 * `end` of the place (uncompressed). Runs outside them are not visited. */
void mls_stored_runs_init(mls_stored_runs *runs, const mls_stored_shard *place,
                          const mls_part *to, size_t from, size_t end);

/* Return the next run in `*out`, never empty and behind the previous one. Returns false
 * after the last. */
bool mls_stored_runs_next(mls_stored_runs *runs, mls_stored_run *out);

/* Convert position `at` among the place's visible elements to its element number in the
 * shard. */
size_t mls_stored_element(const mls_stored_shard *place, size_t at);

/* The smallest range `from` .. `end` of a place that contains all requested bytes. Byte
 * `from` goes to byte `to` of the packed requested part. `together`: the whole range is
 * requested and contiguous in the part. */
typedef struct mls_stored_range {
    size_t from, end, to;
    bool together;
} mls_stored_range;

/* Compute that range for the requested part `to`. Returns false if nothing of the place
 * is requested. The caller has checked the place with mls_stored_bytes. */
bool mls_stored_range_of(const mls_stored_shard *place, const mls_part *to,
                         mls_stored_range *out);

/* Bytes `begin` .. `end` of a file, of which a read loads `bytes`. With verification
 * these are whole blocks. */
typedef struct mls_stored_reads {
    uint64_t begin, end, bytes;
} mls_stored_reads;

/* Compute what reading the part `to` loads from a place that has a file; `bytes` is 0 if
 * nothing is requested. `verify`: checksums are checked, if the file has any. */
mls_stored_reads mls_stored_reads_of(const mls_stored_shard *place, const mls_part *to,
                                     bool verify);

/* Prefix an error with tensor and file; other fields of the status are kept. Returns its
 * code. */
mls_code mls_stored_blame(const mls_stored_shard *place, mls_status *st);

#endif
