/* shard_layers: shards that are stored as several byte ranges, or partly not at all.
 *
 * The elements of a shard are numbered from 0 in their packed order. A plain shard stores
 * all elements in one place of one file. A sparse shard has layers. Each layer is a place
 * that stores the elements of its row ranges, packed. If two layers store the same
 * element, the later layer wins. Elements that no layer stores are zero.
 *
 * Readers do not apply layers on top of each other. mls_layers_resolve computes once
 * which elements of each layer are visible, and only those are read. */
#ifndef MLS_SHARD_LAYERS_H
#define MLS_SHARD_LAYERS_H

#include "base/string_view.h"
#include "checkpoint/storage/compressed_frames.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Limit for one shard: each layer costs some time to read, and keeps a file alive. */
enum { MLS_LAYERS_MOST = 16 };

/* Elements `begin` .. `begin + count` of a shard. `at` is the position of the first
 * element in its layer, in elements; for elements that no layer stores it equals
 * `begin`. */
typedef struct mls_row_range {
    size_t begin, count;
    size_t at;
} mls_row_range;

/* One stored byte range. Lists of row ranges are ascending, and adjacent ranges are
 * merged. */
typedef struct mls_layer {
    size_t file;          /* index into the index's files */
    uint64_t offset;      /* offset of its first byte in that file */
    size_t bytes;         /* bytes in the file; never 0 in a sparse shard */
    uint32_t crc;         /* CRC32C of all bytes */
    const uint32_t *crcs; /* CRC32C of each MLS_SAFETENSORS_BLOCK bytes; a single block
                             has the same value as `crc` */
    size_t row; /* elements of a row; the shard's last row may have fewer. 0: the layer is
                   full: it stores all elements and has no row ranges */
    const mls_row_range *stored; /* all stored elements, in whole rows */
    size_t stored_count;
    const mls_row_range *visible; /* elements that no later layer stores */
    size_t visible_count;
    const mls_compressed_frames *frames; /* NULL: not compressed */
} mls_layer;

/* The layers of a shard that is not plain. */
typedef struct mls_layers {
    mls_layer *list;            /* oldest first; only the first may be full */
    size_t count;               /* 0: all elements are zero */
    const mls_row_range *zeros; /* elements that no layer stores */
    size_t zero_count;
} mls_layers;

/* Number of elements that a layer stores, for a shard of `elements` elements. */
size_t mls_layer_element_count(const mls_layer *layer, size_t elements);

/* A builder of row ranges from pairs of numbers: rows to skip, then rows stored, starting
 * at the shard's first row. Start with mls_layer_rows. */
typedef struct mls_rows {
    size_t row, elements;     /* elements of a row; elements of the shard */
    size_t row_count;         /* rows of the shard */
    size_t at, stored_before; /* rows so far; stored elements so far */
} mls_rows;

/* Start a builder for a shard of `elements` elements. `row`, the elements of a row, is at
 * least 1. */
mls_rows mls_layer_rows(size_t row, size_t elements);

/* Return the next range in `*out`, after `skip` rows and with `count` rows. Returns
 * false, and leaves the builder as it is, if the pair is invalid: no rows are skipped
 * between two ranges, no rows are stored, or the shard has too few rows. */
bool mls_rows_next(mls_rows *rows, uint64_t skip, uint64_t count, mls_row_range *out);

/* Maximum number of ranges in a text such as "0,2,17,1", which has two numbers for
 * each. */
size_t mls_layer_rows_count(mls_str text);

/* Parse all ranges of such a text into `ranges`, which has space for mls_layer_rows_count
 * of them; `*count` receives their number. `rows` is a new builder. Returns false if the
 * text is invalid or empty. */
bool mls_layer_rows_read(mls_rows *rows, mls_str text, mls_row_range *ranges,
                         size_t *count);

/* Maximum number of ranges that mls_layers_resolve writes: two for each row range, plus
 * one. */
size_t mls_layers_room(const mls_layers *layers);

/* Compute the visible ranges of each layer, and the zeros, of a shard of `elements`
 * elements. They are written to `ranges`, which the caller owns. The visible ranges of a
 * single layer are its own row ranges and need no space. Returns the number of ranges in
 * `ranges`. The time depends on the number of row ranges and layers, not on the number of
 * elements. */
size_t mls_layers_resolve(mls_layers *layers, size_t elements, mls_row_range *ranges);

/* Return the index of the first range that ends after element `element` of the shard, or
 * after position `at` of the layer; `count` if there is none. */
size_t mls_row_ranges_find(const mls_row_range *list, size_t count, size_t element);
size_t mls_row_ranges_find_at(const mls_row_range *list, size_t count, size_t at);

#endif
