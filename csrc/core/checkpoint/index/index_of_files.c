/* index_of_files: makes an index from safetensors headers of another program; which of
 * several copies of a tensor counts.
 *
 * The headers own names and shapes, and the index owns the headers. */
#include "checkpoint/index/index_of_files.h"

#include "base/memory.h"
#include "io/json_checksum.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Read the header of the file `name` in `folder` into the next element of
 * `index->headers`, and append the file to `index->files`; both have room for it. The
 * file is closed again. Errors of mls_safetensors_open; MLS_E_MEMORY. */
static mls_code read_file(mls_index *index, const char *folder, const char *name,
                          const mls_crc_kernels *crc, mls_status *st)
{
    int fd;
    const size_t length = strlen(folder) + strlen(name) + 2;
    char *path = mls_alloc(length, 1);
    if (path == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a path of %zu bytes", length);
    }
    snprintf(path, length, "%s/%s", folder, name);
    mls_safetensors *header = &index->headers[index->file_count];
    const mls_code code =
        mls_safetensors_open(path, crc, true /* verify */, &fd, header, st);
    mls_free(path);
    if (code != MLS_OK) {
        return code;
    }
    mls_index_file *file = &index->files[index->file_count++];
    snprintf(file->path, sizeof file->path, "%s", name);
    file->header_crc = header->has_crc ? header->header_crc : 0;
    file->bytes = header->bytes;
    (void)close(fd);
    return MLS_OK;
}

/* Convert the checksums of a tensor's blocks from digits, which the header reader has
 * checked, to numbers. They are stored in `index->crcs` from element `*used` on; `*used`
 * then is the end of them. Returns the tensor's first checksum. */
static const uint32_t *convert_crcs(mls_index *index, const mls_stored *tensor,
                                    size_t *used)
{
    uint32_t *crcs = index->crcs + *used;
    const size_t blocks = mls_safetensors_blocks(tensor->bytes);
    for (size_t i = 0; i < blocks; i++) {
        (void)mls_crc_from_digits(tensor->block_digits + i * MLS_CRC_DIGITS, &crcs[i]);
    }
    *used += blocks;
    return crcs;
}

/* Append the tensors of file number `file` to `index->shards`: each is a whole tensor of
 * version 1. An opaque tensor, whose dtype no array can have, is listed as one axis of
 * its bytes. `*crcs_used` counts the used elements of `index->crcs`. MLS_E_FORMAT: a
 * tensor has too many dimensions. */
static mls_code list_tensors(mls_index *index, size_t file, size_t *crcs_used,
                             mls_status *st)
{
    const mls_safetensors *header = &index->headers[file];
    for (size_t i = 0; i < header->count; i++) {
        const mls_stored *t = &header->tensors[i];
        if (t->rank > MLS_LAYOUT_RANK && t->opaque.length == 0) {
            mls_fail(st, MLS_E_FORMAT, "%d dimensions, but at most %d are supported",
                     t->rank, (int)MLS_LAYOUT_RANK);
            return mls_status_name(st, t->name.data, t->name.length);
        }
        mls_index_shard *shard = &index->shards[index->shard_count++];
        shard->id = (mls_tensor_id){.section = MLS_PARAMS, .name = t->name};
        shard->dtype = t->dtype;
        shard->rank = t->rank;
        shard->shape = t->shape;
        if (t->opaque.length > 0) {
            shard->opaque = t;
            shard->rank = 1;
            shard->shape = &t->bytes;
        }
        shard->version = 1;
        shard->file = file;
        shard->offset = t->offset;
        shard->bytes = t->bytes;
        if (header->has_crc) {
            shard->crcs = convert_crcs(index, t, crcs_used);
            shard->crc = mls_safetensors_join_crcs(shard->crcs, t->bytes);
        }
    }
    return MLS_OK;
}

/* Allocate `index->shards` and `index->crcs` for all files, whose headers have been read.
 * MLS_E_MEMORY: mls_index_fini frees both. */
static mls_code allocate_shards(mls_index *index, mls_status *st)
{
    size_t tensors = 0, blocks = 0; /* cannot overflow: the headers are in memory */
    for (size_t i = 0; i < index->file_count; i++) {
        tensors += index->headers[i].count;
        for (size_t j = 0; index->headers[i].has_crc && j < index->headers[i].count;
             j++) {
            blocks += mls_safetensors_blocks(index->headers[i].tensors[j].bytes);
        }
    }
    index->shards = mls_alloc(tensors, sizeof *index->shards);
    index->crcs = mls_alloc(blocks, sizeof *index->crcs);
    return index->shards != NULL && index->crcs != NULL
               ? MLS_OK
               : mls_fail(st, MLS_E_MEMORY, "no memory for an index of %zu tensors",
                          tensors);
}

/* Order for qsort: by tensor, then by the number of the file, so that the first file's
 * copy of a tensor comes first. */
static int compare_shards(const void *a, const void *b)
{
    const mls_index_shard *x = a, *y = b;
    const int order = mls_index_compare(x, y);
    return order != 0 ? order : x->file < y->file ? -1 : x->file > y->file;
}

/* Sort the shards by name, and move further copies of a tensor behind the first shard of
 * each name: `shard_count` then counts only the first ones, `copy_count` the others.
 * MLS_E_FORMAT: a copy has another dtype or shape; `*failed` is the number of its
 * file. */
static mls_code sort_shards(mls_index *index, size_t *failed, mls_status *st)
{
    size_t kept = 0;
    qsort(index->shards, index->shard_count, sizeof *index->shards, compare_shards);
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_index_shard next = index->shards[i];
        const mls_index_shard *last = kept > 0 ? &index->shards[kept - 1] : NULL;
        if (last == NULL || mls_tensor_id_compare(&last->id, &next.id) != 0) {
            /* swap: a copy that was at `kept` moves behind the shards */
            index->shards[i] = index->shards[kept];
            index->shards[kept++] = next;
        } else if (!mls_index_same_tensor(last, &next)) {
            *failed = next.file;
            mls_fail(st, MLS_E_FORMAT,
                     "the tensor is in %.100s too, with another dtype or shape",
                     index->files[last->file].path);
            return mls_status_name(st, next.id.name.data, next.id.name.length);
        }
    }
    index->copy_count = index->shard_count - kept;
    index->shard_count = kept;
    return MLS_OK;
}

/* Read all headers first, so that the shards and checksums of all files can be allocated
 * at once. `*failed` stays the last file that was worked on. */
mls_code mls_index_of_files(const char *folder, const char *const *names, size_t count,
                            const mls_crc_kernels *crc, mls_index *out, size_t *failed,
                            mls_status *st)
{
    mls_index index = {.world_size = 1, .links = true};
    size_t crcs_used = 0;
    mls_code code = MLS_OK;
    *failed = 0;
    index.files = mls_alloc(count, sizeof *index.files);
    index.headers = mls_alloc(count, sizeof *index.headers);
    if (index.files == NULL || index.headers == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for %zu files", count);
    }
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        *failed = i;
        code = read_file(&index, folder, names[i], crc, st);
    }
    code = code == MLS_OK ? allocate_shards(&index, st) : code;
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        *failed = i;
        code = list_tensors(&index, i, &crcs_used, st);
    }
    code = code == MLS_OK ? sort_shards(&index, failed, st) : code;
    code = code == MLS_OK ? mls_index_arrange(&index, st) : code;
    if (code != MLS_OK) {
        mls_index_fini(&index);
        return code;
    }
    *out = index;
    return MLS_OK;
}
