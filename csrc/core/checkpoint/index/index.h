/* index: the index of one rank: its shards, their files, offsets and checksums; version
 * and limits of the format.
 *
 * An index is a JSON text with its own checksum (json_checksum.h). It lists the files,
 * and for each shard its tensor, its part of that tensor, version, checksums, and the
 * byte ranges in files that store it. docs/format_index.md describes every member.
 *
 * The parser treats the text as untrusted. An index that parses describes shards that fit
 * their tensors, their files and the address space. */
#ifndef MLS_INDEX_H
#define MLS_INDEX_H

#include "array/dtype.h"
#include "base/status.h"
#include "base/string_view.h"
#include "checkpoint/storage/shard_layers.h"
#include "crc32c/crc32c.h"
#include "io/json_reader.h"
#include "io/json_writer.h"
#include "safetensors/safetensors.h"
#include "sharding/layout.h"
#include "sharding/optimizer_axes.h"
#include "state/digest.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The section of a tensor; also the name of the folder that stores its files. */
typedef enum mls_section {
    MLS_PARAMS,
    MLS_OPTIM_STATE,
    MLS_STATES,
    MLS_SECTION_COUNT
} mls_section;

/* Returns "params", "optim_state" or "states". */
const char *mls_section_name(mls_section section);

/* Storage tier of the tensor when it was saved. It does not affect the stored bytes. */
typedef enum mls_tier {
    MLS_TIER_NONE, /* not recorded */
    MLS_TIER_HOT,  /* accelerator memory */
    MLS_TIER_WARM, /* main memory */
    MLS_TIER_COLD, /* a file */
    MLS_TIER_COUNT
} mls_tier;

/* Returns "", "hot", "warm" or "cold". */
const char *mls_tier_name(mls_tier tier);

enum {
    MLS_INDEX_VERSION = 3,      /* format version; earlier versions were drafts */
    MLS_GENERATION_DIGITS = 16, /* lower-case hexadecimal digits */
    MLS_PATH_BYTES = 240,       /* longest path in the folder, without NUL */
    MLS_SHARD_ALIGNMENT = 4096  /* offset of a file's first tensor, for direct I/O */
};

/* Identifies a tensor, independent of its shards. */
typedef struct mls_tensor_id {
    mls_section section;
    mls_str name;   /* parameter name */
    mls_str state;  /* optimizer state such as "m"; contains no dots */
    bool has_state; /* always false in `params` */
} mls_tensor_id;

/* Split a key of a section into parameter and state. In MLS_OPTIM_STATE,
 * "layer.0.weight.m" is the state "m" of the parameter "layer.0.weight", and a key
 * without a dot has no state; in other sections the whole key is the name. The result
 * points into the key's text. */
mls_tensor_id mls_tensor_id_of(mls_section section, mls_str key);

/* The key of a tensor in a file: return its length in bytes, and write it to `to`, which
 * has room for that and gets no NUL. The last dot of a state's key separates parameter
 * and state, so keys are unique within a section. */
size_t mls_tensor_id_key_length(const mls_tensor_id *id);
void mls_tensor_id_write_key(const mls_tensor_id *id, char *to);

/* Set the name in the filled status `st` to the key of a tensor, as far as it fits;
 * return its code. */
mls_code mls_status_tensor(mls_status *st, const mls_tensor_id *id);

/* Compare by section, name and state. Returns a value below, equal to or above 0. */
int mls_tensor_id_compare(const mls_tensor_id *a, const mls_tensor_id *b);

/* A file that stores shards. */
typedef struct mls_index_file {
    char path[MLS_PATH_BYTES + 1]; /* "params/x.safetensors"; stays in the folder */
    uint64_t bytes;
    uint32_t header_crc; /* "mlstate.header.crc32c" of its header; identifies this version
                            of the file */
} mls_index_file;

/* One shard. A plain shard stores its place in this struct, since there may be a million
 * of them. A sparse or compressed shard has `layers`; its `file`, `offset`, `crc` and
 * `crcs` are unused and zero. In both cases `bytes` is the uncompressed size of the
 * part. */
typedef struct mls_index_shard {
    mls_tensor_id id;
    mls_dtype dtype;
    int rank;            /* at most MLS_LAYOUT_RANK */
    const size_t *shape; /* shape of the whole tensor */
    mls_layout layout;
    size_t part;             /* index of the part in the layout */
    const signed char *axes; /* parameter axis of each state axis, or MLS_NO_AXIS; NULL:
                                state and parameter have the same axes */
    uint64_t version;        /* at least 1 */
    size_t file;             /* index into `files` */
    uint64_t offset;         /* offset of its first byte in that file */
    size_t bytes;            /* size of the part in this dtype */
    mls_tier tier;
    uint32_t crc;             /* CRC32C of all bytes */
    const uint32_t *crcs;     /* CRC32C of each block; NULL: the file has no checksums */
    const mls_layers *layers; /* NULL: plain */
    const mls_stored *opaque; /* NULL, or the header entry of a tensor that no array can
                                 hold; this struct describes its bytes */
    bool has_digest;          /* the save recorded the digest of the part */
    mls_digest digest;        /* of the part, at its place in the whole tensor */
} mls_index_shard;

typedef struct mls_index {
    char generation[MLS_GENERATION_DIGITS + 1];
    uint64_t rank, world_size;
    mls_index_file *files; /* paths are unique */
    size_t file_count;
    mls_index_shard *shards; /* sorted by id, then part; parts are unique, and no byte
                                belongs to two places */
    size_t shard_count;
    size_t copy_count; /* further copies of listed tensors, after the last shard; only of
                          files of another program */
    bool links; /* another program wrote the files, and they may be symbolic links */
    /* Storage that the shards point into; NULL if it has another owner. */
    mls_json *json; /* holds the names */
    size_t *dims;
    signed char *axes;
    uint32_t *crcs;
    mls_layers *layer_lists; /* one for each shard that has layers; the arrays below cover
                                all of these */
    mls_layer *layers;
    mls_row_range *row_ranges;
    mls_compressed_frames *frames; /* of all compressed layers */
    size_t *ends;
    mls_safetensors *headers; /* one for each file, see index_of_files.h */
} mls_index;

/* Parse an index. `text` need not outlive the call. Gives: release with mls_index_fini.
 * Memory is proportional to the length of the text.
 * Errors: MLS_E_FORMAT, with offset and tensor name if they apply; MLS_E_CHECKSUM;
 * MLS_E_MEMORY. `*out` is untouched on failure. */
mls_code mls_index_parse(const char *text, size_t length, const mls_crc_kernels *crc,
                         mls_index *out, mls_status *st);

/* Append the text of an index to an empty buffer, and return the CRC32C of the whole text
 * in `*crc_out`. Of layers, only the stored rows matter, not the visible ones. The caller
 * guarantees that the result parses with mls_index_parse: names are UTF-8, shards are
 * sorted, and sizes are in range. Errors: MLS_E_MEMORY; MLS_E_SIZE (over 512 MiB). */
mls_code mls_index_build(const mls_index *index, const mls_crc_kernels *crc,
                         mls_json_writer *out, uint32_t *crc_out, mls_status *st);

/* Append the start of a shard's JSON object (tensor, part and version) without the
 * closing brace. Headers of shard files contain the same text. */
void mls_index_put_shard(mls_json_writer *json, const mls_index_shard *shard);

/* Append the members of a layer except its place in a file, each with a leading comma:
 * "row" and "rows" unless the layer is full, "codec" and "frames" if it is compressed.
 * Headers of shard files contain the same text. */
void mls_index_put_layer(mls_json_writer *json, const mls_layer *layer);

/* Return whether a path is a valid path of a shard file, such as "params/x.safetensors":
 * one folder and one file. Paths from an untrusted index therefore
 * cannot leave the folder. */
bool mls_index_is_path(mls_str path);

/* Return whether a tensor of this dtype and shape fits the address space. Dimensions of 0
 * count as 1, because other libraries multiply the remaining dimensions. */
bool mls_index_fits(mls_dtype dtype, int rank, const size_t *shape);

/* Return the part of the tensor that a shard of a valid index stores. */
mls_part mls_index_part(const mls_index_shard *shard);

/* Return whether two shards have the same dtype, shape and layout. */
bool mls_index_same_tensor(const mls_index_shard *a, const mls_index_shard *b);

/* The sort order of shards: id, then part. */
int mls_index_compare(const mls_index_shard *a, const mls_index_shard *b);

/* Number of places (byte ranges in files) that store a shard: 1 for a plain shard, else
 * the number of its layers. */
size_t mls_index_place_count(const mls_index_shard *shard);

/* Return place `number`, counted from 0 (oldest layer first). The place of a plain shard
 * is returned as a full layer without visible ranges. */
mls_layer mls_index_place(const mls_index_shard *shard, size_t number);

/* Return whether a shard stores rows or several layers, or consists of zeros only. A
 * shard that is only compressed is not sparse. */
bool mls_index_is_sparse(const mls_index_shard *shard);

/* Total bytes of all places of a shard in their files, compressed if they are. */
uint64_t mls_index_stored_bytes(const mls_index_shard *shard);

/* Sort the shards of an index that is otherwise valid, and check that shards and paths
 * are unique and that no byte belongs to two places. mls_index_parse calls it. Errors:
 * MLS_E_FORMAT with the tensor's name; MLS_E_MEMORY. */
mls_code mls_index_arrange(mls_index *index, mls_status *st);

void mls_index_fini(mls_index *index); /* accepts a zeroed one; zeroes it */

#endif
