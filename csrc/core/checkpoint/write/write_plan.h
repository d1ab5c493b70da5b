/* write_plan: the plan of a save and its steps; write_digest.c, write_unchanged.c,
 * write_sparse.c, write_compressed.c have one step each.
 *
 * A plan sorts the caller's items into index order and matches each item with its
 * committed shard. When the changes are known, it lists the new files and builds the new
 * index. */
#ifndef MLS_WRITE_PLAN_H
#define MLS_WRITE_PLAN_H

#include "base/status.h"
#include "checkpoint/index/index.h"
#include "checkpoint/storage/row_bitmap.h"
#include "checkpoint/write/shard_write.h"
#include "io/json_writer.h"
#include "safetensors/safetensors_header_build.h"

#include <stdbool.h>
#include <stddef.h>

/* State of a shard in the plan; it has the same number in the new index. */
typedef struct mls_planned {
    const mls_shard_item *item;
    const mls_index_shard *before; /* the committed shard, or NULL */
    bool is_unchanged;             /* its bytes are those of `before` */
    bool is_reused;                /* its stored bytes stay in place */
    int rank;
    const size_t *shape;  /* shape of the part */
    mls_str key;          /* its key in a file */
    mls_layers *layers;   /* its layers after this save; NULL: plain. One allocation */
    mls_layer *new_layer; /* the layer that this save writes, the last one; or NULL */
    mls_compressed_frames *frames; /* of `new_layer`, or NULL; contains its `ends` */
    bool digested;         /* the writer adds the digest of the bytes that it copies */
    uint64_t digest_start; /* then: byte of the whole tensor at which the part begins */
} mls_planned;

/* A file to write. */
typedef struct mls_planned_file {
    const size_t *shards; /* numbers of its shards */
    size_t count;
    size_t file; /* index into the new index's files */
    /* Both exist from layout until the file is written; checksums remain. */
    mls_header header; /* tensor numbers are shard numbers */
    mls_header_tensor *tensors;
} mls_planned_file;

typedef struct mls_write_plan {
    const mls_shard_job *job;
    mls_index index;      /* borrows names, shapes and axes from the items */
    mls_planned *planned; /* one for each shard of the index */
    size_t *dims;         /* shapes of parts */
    signed char *axes;    /* of states whose axes differ from their parameter's */
    char *keys;
    size_t *written; /* numbers of all shards in files, grouped by file */
    mls_planned_file *files;
    size_t file_count;
} mls_write_plan;

/* Check and sort the items. Gives: release with mls_write_plan_fini. MLS_E_VALUE,
 * MLS_E_SHAPE, MLS_E_SIZE, MLS_E_MEMORY; on failure nothing must be released. */
mls_code mls_write_plan_init(mls_write_plan *plan, const mls_shard_job *job,
                             mls_status *st);

/* Find the unchanged shards (planned.is_unchanged), by version or by reading the files.
 * If the job is incremental, also find shards whose changed rows can become a new layer
 * (planned.new_layer). MLS_E_VALUE: a version decreases, or exceeds INT64_MAX.
 * MLS_E_MEMORY, MLS_E_STOPPED. */
mls_code mls_write_plan_unchanged(mls_write_plan *plan, mls_status *st);

/* Decide which stored bytes stay in place (planned.is_reused), and list their files.
 * MLS_E_MEMORY. */
mls_code mls_write_plan_reuse(mls_write_plan *plan, mls_status *st);

/* If the job is sparse, find the zero rows of the shards to write, and omit them if that
 * saves enough. MLS_E_MEMORY, MLS_E_STOPPED. */
mls_code mls_write_plan_sparse(mls_write_plan *plan, mls_status *st);

/* If the job compresses, choose the shards to compress by samples: those that are not
 * packed with others in a file and shrink by a quarter get frames (planned.frames), whose
 * ends are set later. They are in the new layer of the shard's rows if it has one, else
 * in a new full layer. MLS_E_MEMORY, MLS_E_STOPPED, errors of the codec. */
mls_code mls_write_plan_compress(mls_write_plan *plan, mls_status *st);

/* Assign files to everything that must be written, and versions to all shards. Call it
 * after the functions above. Lengths and checksums of new files, and places in them, are
 * set later. MLS_E_VALUE, MLS_E_SIZE, MLS_E_MEMORY. */
mls_code mls_write_plan_assign_files(mls_write_plan *plan, mls_status *st);

/* If the job records digests, compute them, except those that the writer adds up
 * (planned.digested). Call it after mls_write_plan_assign_files. MLS_E_MEMORY. */
mls_code mls_write_plan_digest(mls_write_plan *plan, mls_status *st);

/* Lay out a file: its header, its length, the places of its shards. Files are laid out
 * when they are written, because all headers together are twice as long as the index.
 * Different threads may lay out different files. MLS_E_SIZE, MLS_E_MEMORY. */
mls_code mls_write_plan_lay_out(mls_write_plan *plan, mls_planned_file *file,
                                mls_status *st);

/* Release the header and tensors of a written file. */
void mls_write_plan_finish(mls_planned_file *file);

/* Append to an empty buffer the index that a first save would write, with zeros for
 * checksums. Neither the items' memory nor any file is read, so shapes are enough.
 * MLS_E_VALUE, MLS_E_SHAPE, MLS_E_SIZE, MLS_E_MEMORY. */
mls_code mls_write_plan_index(const mls_shard_job *job, mls_json_writer *out,
                              mls_status *st);

void mls_write_plan_fini(mls_write_plan *plan); /* accepts a zeroed one; zeroes it */

/* ---- one shard ---- */

/* Return whether a shard has an entry in a new file; an empty shard has one too. */
static inline bool mls_planned_is_written(const mls_planned *planned)
{
    return planned->layers == NULL ? !planned->is_reused : planned->new_layer != NULL;
}

/* Bytes of the shard in a new file. */
static inline size_t mls_planned_bytes(const mls_planned *planned,
                                       const mls_index_shard *shard)
{
    return planned->new_layer != NULL        ? planned->new_layer->bytes
           : mls_planned_is_written(planned) ? shard->bytes
                                             : 0;
}

/* Give a shard layers: with `keep`, the committed layers that are still visible; then a
 * new layer of the `rows` whose bits are set. `bits` may be NULL for no rows.
 * MLS_E_MEMORY: nothing changes. */
mls_code mls_planned_set_layers(mls_planned *planned, bool keep, const mls_row_cut *rows,
                                const unsigned char *bits, mls_status *st);

/* Compress shard `number`, which has frames, before its file is laid out. Gives: free
 * `*out` with mls_free; it has the size of the new layer. `*out` is NULL if the shard did
 * not shrink enough; its frames are then removed. Errors as mls_write_plan_compress.
 * Reports the progress of all its bytes. */
mls_code mls_planned_encode(mls_write_plan *plan, size_t number, unsigned char **out,
                            mls_status *st);

/* Remove layers and frames: the shard becomes plain. */
void mls_planned_drop_layers(mls_planned *planned);

/* Return elements `first` .. `first + count` of the item's part, packed: a pointer into
 * its memory if it is packed, else a copy in `buffer`, which has space for them. */
const unsigned char *mls_planned_elements(const mls_shard_job *job,
                                          const mls_shard_item *item, size_t first,
                                          size_t count, unsigned char *buffer);

#endif
