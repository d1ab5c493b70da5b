/* layers: shards that are stored in several runs of bytes, or not at all.
 *
 * A shard's elements, in their packed order, are numbered from 0.  A plain shard has all
 * of them in one place of one file.  A sparse one has layers: each is a place that holds,
 * packed one after the other, the elements of its runs.  Where two layers hold the same
 * element the later one counts, and what no layer holds is zero in all its bytes.
 *
 * Nobody who reads lays one layer over another: which elements of each layer are visible
 * is worked out once (mls_layers_resolve), and what is not visible is never read.
 */
#ifndef MLS_LAYERS_H
#define MLS_LAYERS_H

#include "checkpoint/storage/compressed_frames.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of a shard: each layer costs every reader a little, and a file to be kept. */
enum { MLS_LAYERS_MOST = 16 };

/* Elements `begin` .. `begin + count` of a shard.  `at` is where the first of them is in
 * its layer, in elements; of what is in no layer, the same as `begin`. */
typedef struct mls_extent {
    size_t begin, count;
    size_t at;
} mls_extent;

/* One run of stored bytes.  Lists of extents are ascending, and no two of them meet. */
typedef struct mls_layer {
    size_t file;     /* in the index's files */
    uint64_t offset; /* of its first byte in that file */
    size_t bytes;    /* that it takes there; never 0 */
    uint32_t crc;    /* of all of it */
    const uint32_t
        *crcs;  /* one for each MLS_SAFETENSORS_BLOCK bytes; fewer: the same as crc */
    size_t row; /* elements of a row, of which the shard's last may have fewer; 0: the
                   layer is full, that is, it holds all elements, and has no runs */
    const mls_extent *runs; /* all that it holds, in whole rows */
    size_t run_count;
    const mls_extent *visible; /* what no later layer holds */
    size_t visible_count;
    const mls_frames *frames; /* how the bytes are coded; NULL: they are not, and are
                                 those of the elements */
} mls_layer;

/* What a sparse shard has instead of a place. */
typedef struct mls_layers {
    mls_layer *list; /* oldest first; at most MLS_LAYERS_MOST, and only the first full */
    size_t count;    /* 0: all elements are zero */
    const mls_extent *zeros; /* what no layer holds */
    size_t zero_count;
} mls_layers;

/* Elements that a layer of a shard of so many holds. */
size_t mls_layer_held(const mls_layer *layer, size_t elements);

/* Making runs of numbers of rows: how many are passed over, how many follow that are
 * held, and so on, from the shard's first row on. */
typedef struct mls_rows {
    size_t row, elements; /* of a row; of the shard */
    size_t all;           /* rows of the shard */
    size_t at, held;      /* rows so far; elements that were held */
} mls_rows;

/* Of a shard of so many elements; a row has one at least. */
mls_rows mls_layer_rows(size_t row, size_t elements);

/* The next run.  False: none of it makes sense, since no rows are passed over between two
 * runs, none are held, or the shard has not so many. */
bool mls_rows_next(mls_rows *rows, uint64_t skip, uint64_t count, mls_extent *out);

/* How many runs a text such as "0,2,17,1" can be: two numbers each. */
size_t mls_layer_rows_count(mls_text text);

/* All runs of such a text, for which there is room.  False: it is none, holds nothing, or
 * makes no sense. */
bool mls_layer_rows_read(mls_rows *rows, mls_text text, mls_extent *runs, size_t *count);

/* How many extents mls_layers_resolve may need room for: no more than two for each run,
 * and one. */
size_t mls_layers_room(const mls_layers *layers);

/* Fill in what is visible of each layer, and the zeros, of a shard of so many elements.
 * They lie in `room`, which is the caller's, but for those of a layer that is alone:
 * these are its runs.  Returns how many are in the room.  Takes time for each run and
 * layer, none for elements. */
size_t mls_layers_resolve(mls_layers *layers, size_t elements, mls_extent *room);

/* The first extent of a list that ends behind an element, or `count`. */
size_t mls_extents_find(const mls_extent *list, size_t count, size_t element);

#endif
