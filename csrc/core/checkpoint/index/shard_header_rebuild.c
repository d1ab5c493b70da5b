/* shard_header_rebuild: repairs a damaged header of a shard file: rebuilds it from the
 * places and checksums in an index.
 *
 * The steps are the same as for a new file. */
#include "checkpoint/index/shard_header_rebuild.h"

#include "base/memory.h"
#include "safetensors/safetensors_header_build.h"

#include <string.h>

/* A tensor of the file: one place of one shard. `shape` is that of the array in the file:
 * of the shard's part, or of the place's bytes. */
typedef struct member {
    const mls_index_shard *shard;
    mls_layer place;
    size_t shape[MLS_LAYOUT_RANK];
    char *key; /* its name in the file, without NUL: see mls_tensor_id_key_length */
} member;

/* The content of the header that is rebuilt. */
typedef struct rebuild {
    member *members;            /* in the order of the index */
    mls_header_tensor *tensors; /* one for each member; mls_header_init sorts them */
    size_t count;               /* of members */
    char *keys;                 /* the texts of all keys */
} rebuild;

static mls_code fail_memory(mls_status *st)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory for the file's header");
}

/* Return whether a place is stored as an array of the part's shape; other places are
 * stored as one-dimensional uint8 arrays. */
static bool is_tensor(const mls_layer *place)
{
    return place->row == 0 && place->frames == NULL;
}

/* Allocate room for every place that is in file number `file` (a place is one stored
 * byte range of a shard), and for their keys. `r->count` stays 0 until collect_places.
 * The caller frees the arrays, also after a failure. MLS_E_MEMORY. */
static mls_code allocate_members(rebuild *r, const mls_index *index, size_t file,
                                 mls_status *st)
{
    size_t count = 0, keys = 0;
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_index_shard *shard = &index->shards[i];
        for (size_t j = 0; j < mls_index_place_count(shard); j++) {
            if (mls_index_place(shard, j).file == file) {
                count++;
                keys += mls_tensor_id_key_length(&shard->id);
            }
        }
    }
    r->members = mls_alloc(count, sizeof *r->members);
    r->tensors = mls_alloc(count, sizeof *r->tensors);
    r->keys = mls_alloc(keys, 1);
    return r->members == NULL || r->tensors == NULL || r->keys == NULL ? fail_memory(st)
                                                                       : MLS_OK;
}

/* Describe the place of member `m` as a tensor in `out`, whose shape is stored in `m`.
 * `number` is the member's index. A flat part is an array of one dimension; a place with
 * row ranges or compression is an array of its bytes. */
static void describe_tensor(member *m, size_t number, mls_header_tensor *out)
{
    const mls_index_shard *shard = m->shard;
    const mls_part part = mls_index_part(shard);
    *out = (mls_header_tensor){
        .name = {m->key, mls_tensor_id_key_length(&shard->id)},
        .shape = m->shape,
        .rank = 1,
        .dtype = MLS_U8,
        .bytes = m->place.bytes,
        .element_bytes =
            m->place.frames == NULL ? mls_dtype_of(shard->dtype)->item_bytes : 1,
        .number = number};
    m->shape[0] = m->place.bytes;
    if (is_tensor(&m->place)) {
        out->dtype = shard->dtype;
        out->rank = part.flat ? 1 : part.rank;
        for (int i = 0; i < out->rank; i++) {
            m->shape[i] = part.flat ? mls_part_count(&part) : part.length[i];
        }
    }
}

/* Fill in the members: each place in file number `file`, in the order of the index, which
 * is the order in which a save lists them. */
static void collect_places(rebuild *r, const mls_index *index, size_t file)
{
    char *key = r->keys;
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_index_shard *shard = &index->shards[i];
        for (size_t j = 0; j < mls_index_place_count(shard); j++) {
            const mls_layer place = mls_index_place(shard, j);
            if (place.file != file) {
                continue;
            }
            member *m = &r->members[r->count];
            *m = (member){.shard = shard, .place = place, .key = key};
            mls_tensor_id_write_key(&shard->id, key);
            key += mls_tensor_id_key_length(&shard->id);
            describe_tensor(m, r->count, &r->tensors[r->count]);
            r->count++;
        }
    }
}

/* Append the JSON object that maps each tensor's key to its shard, exactly as a save
 * writes it; the header's checksum depends on each byte. */
static void describe_shards(const rebuild *r, mls_json_writer *text)
{
    mls_json_writer_text(text, "{");
    for (size_t i = 0; i < r->count; i++) {
        const member *m = &r->members[i];
        mls_json_writer_text(text, i == 0 ? "" : ",");
        mls_json_writer_json(text,
                             (mls_str){m->key, mls_tensor_id_key_length(&m->shard->id)});
        mls_json_writer_text(text, ":");
        mls_index_put_shard(text, m->shard);
        mls_index_put_layer(text, &m->place);
        mls_json_writer_text(text, "}");
    }
    mls_json_writer_text(text, "}");
}

/* Lay out the header with the checksums that the index records. After MLS_OK the caller
 * releases it with mls_header_fini. MLS_E_MEMORY, or MLS_E_SIZE: the header is too
 * long. */
static mls_code lay_out_header(const rebuild *r, mls_header *header, mls_status *st)
{
    static const char key[] = MLS_SAFETENSORS_PREFIX "shards";
    mls_json_writer text = {.most = MLS_SAFETENSORS_MAX_HEADER};
    describe_shards(r, &text);
    const mls_str_pair pair = {.key = {key, sizeof key - 1},
                               .value = {text.data, text.length}};
    const mls_code code =
        text.code != MLS_OK
            ? mls_fail(st, text.code, "no room to describe %zu shards", r->count)
            : mls_header_init(header, r->tensors, r->count, &pair, 1, MLS_SHARD_ALIGNMENT,
                              st);
    mls_json_writer_fini(&text);
    for (size_t i = 0; code == MLS_OK && i < r->count; i++) {
        /* mls_header_init has sorted the tensors: `number` is the member's index */
        const mls_header_tensor *tensor = &r->tensors[i];
        const size_t blocks = mls_safetensors_blocks(tensor->bytes);
        if (blocks > 0) {
            memcpy(tensor->crcs, r->members[tensor->number].place.crcs,
                   blocks * sizeof *tensor->crcs);
        }
    }
    return code;
}

/* Finish the header and append its text to `out`, if its checksum and the file's length
 * equal those in `record`: this proves that it is the original header. MLS_E_VALUE: they
 * differ, and nothing is appended. */
static mls_code append_header(mls_header *header, const mls_index_file *record,
                              const mls_crc_kernels *crc, mls_json_writer *out,
                              mls_status *st)
{
    if (mls_header_finish(header, crc) != record->header_crc ||
        header->file_bytes != record->bytes) {
        return mls_fail(st, MLS_E_VALUE, "the index does not list all of the file");
    }
    mls_json_writer_put(out, header->text.data, header->text.length);
    return out->code == MLS_OK ? MLS_OK : fail_memory(st);
}

/* Rebuild the header of file number `file` from the places that the index lists in it,
 * and append it to `out`. */
mls_code mls_shard_header_rebuild(const mls_index *index, size_t file,
                                  const mls_crc_kernels *crc, mls_json_writer *out,
                                  mls_status *st)
{
    rebuild r = {0};
    mls_header header = {0};
    mls_code code = allocate_members(&r, index, file, st);
    if (code == MLS_OK) {
        collect_places(&r, index, file);
        code = lay_out_header(&r, &header, st);
    }
    if (code == MLS_OK) {
        code = append_header(&header, &index->files[file], crc, out, st);
        mls_header_fini(&header);
    }
    mls_free(r.members);
    mls_free(r.tensors);
    mls_free(r.keys);
    return code;
}

/* Rebuild the header of the file at `path` from the first of `count` indexes that lists
 * all of it. Ranks may share a file: an index that lists only some of its tensors is
 * skipped. */
mls_code mls_shard_header_rebuild_path(const mls_index *indexes, size_t count,
                                       const char *path, const mls_crc_kernels *crc,
                                       mls_json_writer *out, mls_status *st)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t file = 0; file < indexes[i].file_count; file++) {
            if (strcmp(indexes[i].files[file].path, path) == 0) {
                const mls_code code =
                    mls_shard_header_rebuild(&indexes[i], file, crc, out, st);
                if (code == MLS_OK || code == MLS_E_MEMORY) {
                    return code;
                }
            }
        }
    }
    return mls_fail(st, MLS_E_VALUE, "no index lists all of the file");
}
