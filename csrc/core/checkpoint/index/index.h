/* index: which shards one rank has stored, and where.
 *
 * An index is a sealed JSON text (json_checksum.h) that lists files and, of each shard, what it is
 * of which tensor, its version and checksums, and where in which file its bytes lie.
 * docs/format.md describes it member by member.  Reading believes nothing: a text that
 * passes describes shards that fit their tensors, their files and the address space.
 */
#ifndef MLS_INDEX_H
#define MLS_INDEX_H

#include "sharding/optimizer_axes.h"
#include "io/json_writer.h"
#include "crc32c/crc32c.h"
#include "array/dtype.h"
#include "io/json_reader.h"
#include "checkpoint/storage/shard_layers.h"
#include "sharding/layout.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a tensor belongs to; also the folder of its files. */
typedef enum mls_section { MLS_PARAMS, MLS_OPTIM_STATE, MLS_SECTION_COUNT } mls_section;

/* "params", "optim_state". */
const char *mls_section_name(mls_section section);

/* Where the tensor was kept when it was saved; nothing of it matters to its file. */
typedef enum mls_tier {
    MLS_TIER_NONE, /* not stated */
    MLS_TIER_HOT,  /* memory of an accelerator */
    MLS_TIER_WARM, /* main memory */
    MLS_TIER_COLD, /* a file */
    MLS_TIER_COUNT
} mls_tier;

/* "", "hot", "warm", "cold". */
const char *mls_tier_name(mls_tier tier);

enum {
    MLS_INDEX_VERSION = 3,      /* of the format; earlier ones were drafts */
    MLS_GENERATION_DIGITS = 16, /* lower-case hexadecimal */
    MLS_PATH_BYTES = 240        /* of a file's path in the pool, without NUL */
};

/* A tensor, whichever of its shards is concerned. */
typedef struct mls_tensor_id {
    mls_section section;
    mls_text name;  /* of the parameter */
    mls_text state; /* of the optimizer, such as "m"; without dots */
    bool has_state; /* never in `params` */
} mls_tensor_id;

/* The tensor under a key of a section: of MLS_OPTIM_STATE, "layer.0.weight.m" is the
 * state "m" of the parameter "layer.0.weight".  Shares the key's text. */
mls_tensor_id mls_tensor_id_of(mls_section section, mls_text key);

/* By section, name and state: below, at or above 0. */
int mls_tensor_id_compare(const mls_tensor_id *a, const mls_tensor_id *b);

/* One of the files that shards lie in. */
typedef struct mls_index_file {
    char path[MLS_PATH_BYTES + 1]; /* "params/x.safetensors": no way out of the pool */
    uint64_t bytes;
    uint32_t header_crc; /* "mlstate.header.crc32c" of its header: tells it from others */
} mls_index_file;

/* One shard.  A plain one has its place in the shard itself, since there may be a million
 * of them; a sparse one has layers, and then `file`, `offset`, `crc` and `crcs` say
 * nothing and are zero.  `bytes` are those of the part either way. */
typedef struct mls_index_shard {
    mls_tensor_id id;
    mls_dtype dtype;
    int rank;            /* at most MLS_LAYOUT_RANK */
    const size_t *shape; /* of the whole tensor */
    mls_layout layout;
    size_t part;             /* which part of the layout */
    const signed char *axes; /* for each axis of a state the parameter's, or MLS_NO_AXIS;
                                NULL: they have the same axes */
    uint64_t version;        /* from 1 */
    size_t file;             /* in the index's files */
    uint64_t offset;         /* of its first byte in that file */
    size_t bytes;            /* fit part and dtype */
    mls_tier tier;
    uint32_t crc;             /* of all of it */
    const uint32_t *crcs;     /* of its blocks */
    const mls_layers *layers; /* NULL: plain */
} mls_index_shard;

typedef struct mls_index {
    char generation[MLS_GENERATION_DIGITS + 1];
    uint64_t rank, world_size;
    mls_index_file *files; /* no path twice */
    size_t file_count;
    mls_index_shard *shards; /* by id, then by part; no part twice, no byte in two
                                places */
    size_t shard_count;
    /* what the shards point to; NULL if another owns it */
    mls_json *json; /* names */
    size_t *dims;
    signed char *axes;
    uint32_t *crcs;
    mls_layers *sparse; /* of all sparse shards; below, of all of these */
    mls_layer *layers;
    mls_extent *extents;
    mls_frames *frames; /* of all layers that are coded; below, of all of these */
    size_t *ends;
} mls_index;

/* Understand an index.  `text` need not outlive the call.  Gives: release with
 * mls_index_fini.  Memory grows with the text only.
 * MLS_E_FORMAT, with offset and tensor name where they apply; MLS_E_CHECKSUM;
 * MLS_E_MEMORY.  `*out` is untouched on failure. */
mls_code mls_index_parse(const char *text, size_t length, const mls_crc_kernels *crc,
                         mls_index *out, mls_status *st);

/* Append the text of an index to an empty buffer; returns its CRC32C as a whole by
 * `*crc_out`.  Of layers only what is stored matters, not what is visible.  What is
 * written is what mls_index_parse would accept: the caller's names are UTF-8, its shards
 * in order and of a size that fits.  MLS_E_MEMORY, MLS_E_SIZE (over 512 MiB). */
mls_code mls_index_build(const mls_index *index, const mls_crc_kernels *crc,
                         mls_buffer *out, uint32_t *crc_out, mls_status *st);

/* Append the start of a shard's JSON object, what it is and its version, without a
 * closing brace: shard files say the same of what they hold. */
void mls_index_put_shard(mls_buffer *b, const mls_index_shard *shard);

/* Append the members of a layer that are not its place, each with its comma in front:
 * "row" and "rows", unless it is full; "codec" and "frames", where it is coded.  Shard
 * files say the same of what they hold. */
void mls_index_put_layer(mls_buffer *b, const mls_layer *layer);

/* Whether a path is one that a shard file can have, "params/x.safetensors": one folder
 * and one file, so that whoever opens or deletes what an index names stays inside the
 * pool, whoever wrote the index. */
bool mls_index_is_path(mls_text path);

/* Whether a tensor of that shape could lie in memory: its bytes, with dimensions of 0
 * taken for 1, so that any library can hold it. */
bool mls_index_fits(mls_dtype dtype, int rank, const size_t *shape);

/* The part of its tensor that a shard of a good index is. */
mls_part mls_index_part(const mls_index_shard *shard);

/* Whether two shards say the same of their tensor: dtype, shape and layout. */
bool mls_index_same_tensor(const mls_index_shard *a, const mls_index_shard *b);

/* Shards are sorted by this: id, then part. */
int mls_index_compare(const mls_index_shard *a, const mls_index_shard *b);

/* Places where a shard's bytes lie: one of a plain shard, else as many as it has layers.
 */
size_t mls_index_place_count(const mls_index_shard *shard);

/* One of them; that of a plain shard is a full layer of which nothing is said to be
 * visible. */
mls_layer mls_index_place(const mls_index_shard *shard, size_t number);

/* Whether it has layers of rows, or none at all: not whether it is merely coded. */
bool mls_index_is_sparse(const mls_index_shard *shard);

/* Bytes of all places. */
uint64_t mls_index_stored_bytes(const mls_index_shard *shard);

/* Sort the shards of an index that is good otherwise, and see that no shard and no path
 * is in it twice, and no byte in two places.  Part of parsing.  MLS_E_FORMAT with the
 * tensor's name; MLS_E_MEMORY. */
mls_code mls_index_arrange(mls_index *index, mls_status *st);

void mls_index_fini(mls_index *index); /* accepts a zeroed one; zeroes it */

#endif
