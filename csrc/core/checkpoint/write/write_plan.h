/* shard_plan: which shards are written, into which files.
 *
 * Between the caller's items and the writing: items in the order of an index, each beside
 * what was committed of it before; then, when it is known what changed, the new files and
 * the new index.
 */
#ifndef MLS_SHARD_PLAN_H
#define MLS_SHARD_PLAN_H

#include "io/json_writer.h"
#include "checkpoint/index/index.h"
#include "checkpoint/storage/row_bitmap.h"
#include "safetensors/safetensors_header.h"
#include "checkpoint/write/shard_write.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>

/* A shard of the new index, beside it: the same number in both. */
typedef struct mls_planned {
    const mls_shard_item *item;
    const mls_index_shard *before; /* the same shard as committed; NULL: there is none */
    bool same;                     /* its bytes did not change */
    bool kept;                     /* what is stored of it stays where it is */
    int rank;
    const size_t *shape; /* of the part */
    mls_text key;        /* its name in a file */
    mls_layers *layers;  /* what it will be stored as; NULL: plain.  One block */
    mls_layer *fresh;    /* of these the one that is written now, the last, or NULL */
    mls_frames *frames;  /* how that one is coded, or NULL.  One block with its lengths */
} mls_planned;

/* A file to write. */
typedef struct mls_planned_file {
    const size_t *shards; /* the numbers of those that it takes */
    size_t count;
    size_t file; /* in the new index's files */
    /* from when it is laid out up to when it is written; checksums stay */
    mls_header header; /* its tensors' numbers are those of the shards */
    mls_header_tensor *tensors;
} mls_planned_file;

typedef struct mls_shard_plan {
    const mls_shard_job *job;
    mls_index index;      /* shares names, shapes and axes with the items */
    mls_planned *planned; /* as many as the index has shards */
    size_t *dims;         /* shapes of parts */
    signed char *axes;    /* of states that do not have their parameter's own */
    char *keys;
    size_t *written; /* the numbers of all shards that files take, file by file */
    mls_planned_file *files;
    size_t file_count;
} mls_shard_plan;

/* Check the items and bring them into order.  Gives: release with mls_shard_plan_fini.
 * MLS_E_VALUE, MLS_E_SHAPE, MLS_E_SIZE, MLS_E_MEMORY; then nothing is to be released. */
mls_code mls_shard_plan_init(mls_shard_plan *plan, const mls_shard_job *job,
                             mls_status *st);

/* Find out what did not change (planned.same), by versions, else by reading the files;
 * where the job is incremental also which rows did, where these are to become one more
 * layer (planned.fresh).
 * MLS_E_VALUE: a version that goes back.  MLS_E_MEMORY, MLS_E_STOPPED. */
mls_code mls_shard_plan_compare(mls_shard_plan *plan, mls_status *st);

/* Decide what stays where it is (planned.kept), and list its files.  MLS_E_MEMORY. */
mls_code mls_shard_plan_keep(mls_shard_plan *plan, mls_status *st);

/* Where the job asks for it: look which rows of the shards that are written hold anything
 * at all, and leave out the others where that pays.  MLS_E_MEMORY, MLS_E_STOPPED. */
mls_code mls_shard_plan_sift(mls_shard_plan *plan, mls_status *st);

/* Where the job asks for it: code samples of what is written, and note what becomes
 * shorter by it (planned.frames), which has a new layer then, be it a full one.
 * MLS_E_MEMORY, MLS_E_STOPPED, errors of the codec. */
mls_code mls_shard_plan_compress(mls_shard_plan *plan, mls_status *st);

/* Give everything that must be written its file, and all shards their versions, once it
 * is decided what stays.  What is left open in the new index are lengths and checksums of
 * new files, and the places of shards in them.  MLS_E_VALUE, MLS_E_SIZE, MLS_E_MEMORY. */
mls_code mls_shard_plan_place(mls_shard_plan *plan, mls_status *st);

/* Lay out a file: its header, its length, the places of its shards.  Files are laid out
 * when they are written, since all headers together are twice as long as the index; by
 * different threads, each file by one.  MLS_E_SIZE, MLS_E_MEMORY. */
mls_code mls_shard_plan_lay_out(mls_shard_plan *plan, mls_planned_file *file,
                                mls_status *st);

/* Give back what a file needs no more that was written. */
void mls_shard_plan_finish(mls_planned_file *file);

/* Append to an empty buffer the index that saving would give where nothing was saved
 * before, with zeros for checksums.  Of the items only what they are is looked at, not
 * their memory, and no file either: shapes are enough.  MLS_E_VALUE, MLS_E_SHAPE,
 * MLS_E_SIZE, MLS_E_MEMORY. */
mls_code mls_shard_plan_index(const mls_shard_job *job, mls_buffer *out, mls_status *st);

void mls_shard_plan_fini(mls_shard_plan *plan); /* accepts a zeroed one; zeroes it */

/* ---- one shard ---- */

/* Whether anything of a shard goes into a new file, be it nothing but a name. */
static inline bool mls_planned_is_written(const mls_planned *planned)
{
    return planned->layers == NULL ? !planned->kept : planned->fresh != NULL;
}

/* Bytes of the shard that do. */
static inline size_t mls_planned_bytes(const mls_planned *planned,
                                       const mls_index_shard *shard)
{
    return planned->fresh != NULL            ? planned->fresh->bytes
           : mls_planned_is_written(planned) ? shard->bytes
                                             : 0;
}

/* Give a shard layers: with `keep` those of before of which anything is visible, and then
 * one of the rows whose bit is set, if there are any; `bits` NULL: none is.
 * MLS_E_MEMORY. */
mls_code mls_planned_set_layers(mls_planned *planned, bool keep, const mls_row_cut *rows,
                                const unsigned char *bits, mls_status *st);

/* Code a shard that has frames, before its file is laid out.  Gives: free `*out` with
 * mls_free, which is as long as the new layer.  NULL: it did not become shorter, and has
 * no frames any more.  As mls_shard_plan_compress; progress is told of all its bytes. */
mls_code mls_planned_encode(mls_shard_plan *plan, size_t number, unsigned char **out,
                            mls_status *st);

/* Take layers, and frames, away again: it is plain. */
void mls_planned_drop_layers(mls_planned *planned);

/* The item's elements `first` .. `first + count`: where they lie, or packed to `room`. */
const unsigned char *mls_planned_elements(const mls_shard_job *job,
                                          const mls_shard_item *item, size_t first,
                                          size_t count, unsigned char *room);

#endif
