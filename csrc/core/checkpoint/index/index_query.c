/* index_query: refuses paths outside the folder, duplicate shards and overlapping bytes
 * in an index; keys and places.
 *
 * A place is a byte range of a file that stores a shard or one of its layers: a plain
 * shard has one place, any other shard one for each layer. The checks sort first: equal
 * shards and overlapping places are then neighbours. */
#include "checkpoint/index/index.h"

#include "base/memory.h"
#include "base/size.h"

#include <stdlib.h>
#include <string.h>

enum { SHOWN_NAME = 100 }; /* bytes of a name in a message */

/* Return the constant name of a section, which is also its folder and its word in the
 * index. */
const char *mls_section_name(mls_section section)
{
    static const char *const names[MLS_SECTION_COUNT] = {[MLS_PARAMS] = "params",
                                                         [MLS_OPTIM_STATE] =
                                                             "optim_state",
                                                         [MLS_STATES] = "states"};
    return names[section];
}

/* Return the word for a tier in the index. Index 0 is unused in files: a shard without a
 * tier has no "tier" member. */
const char *mls_tier_name(mls_tier tier)
{
    static const char *const names[MLS_TIER_COUNT] = {[MLS_TIER_NONE] = "",
                                                      [MLS_TIER_HOT] = "hot",
                                                      [MLS_TIER_WARM] = "warm",
                                                      [MLS_TIER_COLD] = "cold"};
    return names[tier];
}

/* Split a key into name and state, at the last dot of an optimizer key. Parameter names
 * may contain dots; names of optimizer states do not. */
mls_tensor_id mls_tensor_id_of(mls_section section, mls_str key)
{
    size_t dot = key.length;
    while (section == MLS_OPTIM_STATE && dot > 0 && key.data[dot - 1] != '.') {
        dot--;
    }
    if (section != MLS_OPTIM_STATE || dot == 0) {
        return (mls_tensor_id){.section = section, .name = key};
    }
    return (mls_tensor_id){.section = section,
                           .name = {key.data, dot - 1},
                           .state = {key.data + dot, key.length - dot},
                           .has_state = true};
}

/* Return the length of the key, without a NUL. The key is the tensor's name in the state
 * dict, so that any safetensors reader shows the familiar name. */
size_t mls_tensor_id_key_length(const mls_tensor_id *id)
{
    return id->name.length + (id->has_state ? 1 + id->state.length : 0);
}

/* Write name, dot and state, without a NUL: `to` has room for mls_tensor_id_key_length
 * bytes. Missing data is NULL, which memcpy must not receive. */
void mls_tensor_id_write_key(const mls_tensor_id *id, char *to)
{
    memcpy(to, id->name.data == NULL ? "" : id->name.data, id->name.length);
    if (id->has_state) {
        to[id->name.length] = '.';
        memcpy(to + id->name.length + 1, id->state.data == NULL ? "" : id->state.data,
               id->state.length);
    }
}

mls_code mls_status_tensor(mls_status *st, const mls_tensor_id *id)
{
    char key[2 * MLS_NAME_BYTES]; /* more than a status holds */
    mls_tensor_id short_id = *id;
    if (mls_tensor_id_key_length(id) > sizeof key) {
        short_id.has_state = false; /* the name alone is cut */
        short_id.name.length =
            id->name.length < sizeof key ? id->name.length : sizeof key;
    }
    mls_tensor_id_write_key(&short_id, key);
    return mls_status_name(st, key, mls_tensor_id_key_length(&short_id));
}

/* Compare section, then name, then state; a tensor without a state comes first. Names are
 * compared as bytes, independent of the locale: the order is part of the format, so it
 * must be equal on all machines. */
int mls_tensor_id_compare(const mls_tensor_id *a, const mls_tensor_id *b)
{
    if (a->section != b->section) {
        return a->section < b->section ? -1 : 1;
    }
    const int names = mls_str_compare(a->name, b->name);
    if (names != 0) {
        return names;
    }
    if (a->has_state != b->has_state) {
        return a->has_state ? 1 : -1;
    }
    return a->has_state ? mls_str_compare(a->state, b->state) : 0;
}

/* Order by tensor, then by part number, so that the parts of one tensor are
 * neighbours. */
int mls_index_compare(const mls_index_shard *a, const mls_index_shard *b)
{
    const int ids = mls_tensor_id_compare(&a->id, &b->id);
    return ids != 0 ? ids : a->part < b->part ? -1 : a->part > b->part;
}

/* Multiply all dimensions and the bytes of an element; the product must not exceed
 * PTRDIFF_MAX. Dimensions of 0 count as 1: other libraries multiply the remaining
 * dimensions. */
bool mls_index_fits(mls_dtype dtype, int rank, const size_t *shape)
{
    size_t bytes = mls_dtype_of(dtype)->item_bytes;
    for (int axis = 0; axis < rank; axis++) {
        if (!mls_size_mul(bytes, shape[axis] == 0 ? 1 : shape[axis], &bytes)) {
            return false;
        }
    }
    return bytes <= PTRDIFF_MAX;
}

/* Return whether two header entries describe tensors of the same dtype and shape that no
 * array can hold. Both are NULL for ordinary tensors, which are equal here. */
static bool same_opaque(const mls_stored *a, const mls_stored *b)
{
    return a == b || (a != NULL && b != NULL && mls_str_equal(a->opaque, b->opaque) &&
                      mls_shape_equal(a->rank, a->shape, b->rank, b->shape));
}

/* Return whether dtype, shape and layout are equal. Axes and tier may differ: they do not
 * affect the bytes. */
bool mls_index_same_tensor(const mls_index_shard *a, const mls_index_shard *b)
{
    return a->dtype == b->dtype && same_opaque(a->opaque, b->opaque) &&
           mls_shape_equal(a->rank, a->shape, b->rank, b->shape) &&
           mls_layout_equal(&a->layout, &b->layout);
}

/* Return the part of the whole tensor that a shard stores. Computed at each call instead
 * of stored: a part takes 300 bytes, and an index has many. */
mls_part mls_index_part(const mls_index_shard *shard)
{
    mls_part part = {0};
    mls_status ignored;
    /* cannot fail: parsing the index made the same call */
    (void)mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part, &part,
                          &ignored);
    return part;
}

/* Free all arrays of the index, and zero it. The names, which other arrays point into,
 * are freed last. */
void mls_index_fini(mls_index *index)
{
    for (size_t i = 0; index->headers != NULL && i < index->file_count; i++) {
        mls_safetensors_fini(&index->headers[i]);
    }
    mls_free(index->headers);
    mls_free(index->files);
    mls_free(index->shards);
    mls_free(index->dims);
    mls_free(index->axes);
    mls_free(index->crcs);
    mls_free(index->layer_lists);
    mls_free(index->layers);
    mls_free(index->row_ranges);
    mls_free(index->frames);
    mls_free(index->ends);
    mls_json_free(index->json);
    *index = (mls_index){0};
}

/* A shard with layers has one place for each, so a shard of zeros only has none. */
size_t mls_index_place_count(const mls_index_shard *shard)
{
    return shard->layers == NULL ? 1 : shard->layers->count;
}

/* Return whether a name has only characters of the file names that we write
 * (safe_filename.h), and does not start with a dot. Anything else could leave the
 * folder. */
static bool is_safe_name(mls_str text)
{
    for (size_t i = 0; i < text.length; i++) {
        const char c = text.data[i];
        if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
              c == '=' || c == '~' || c == '.')) {
            return false;
        }
    }
    return text.length > 0 && text.data[0] != '.';
}

/* Return whether a path has the form "<section>/<safe name>.safetensors". The name before
 * the suffix must not be empty. */
bool mls_index_is_path(mls_str path)
{
    static const char suffix[] = ".safetensors";
    const size_t suffix_length = sizeof suffix - 1;
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        const char *folder = mls_section_name((mls_section)s);
        const size_t start = strlen(folder) + 1;
        if (path.length > start + suffix_length && path.length <= MLS_PATH_BYTES &&
            memcmp(path.data, folder, start - 1) == 0 && path.data[start - 1] == '/') {
            const mls_str name = {path.data + start, path.length - start};
            return is_safe_name(name) && memcmp(path.data + path.length - suffix_length,
                                                suffix, suffix_length) == 0;
        }
    }
    return false;
}

/* Return place `number` of a shard, where its bytes are stored. By value: a plain shard
 * has no stored layer to point to. */
mls_layer mls_index_place(const mls_index_shard *shard, size_t number)
{
    if (shard->layers != NULL) {
        return shard->layers->list[number];
    }
    return (mls_layer){.file = shard->file,
                       .offset = shard->offset,
                       .bytes = shard->bytes,
                       .crc = shard->crc,
                       .crcs = shard->crcs};
}

/* One full layer, compressed or not, stores the same elements as a plain shard, so such a
 * shard is not sparse. */
bool mls_index_is_sparse(const mls_index_shard *shard)
{
    const mls_layers *layers = shard->layers;
    return layers != NULL && (layers->count != 1 || layers->list[0].row != 0);
}

/* Return the bytes that a shard takes in files: all its layers, in compressed form.
 * Cannot overflow: the bytes of the layers fit their files, and the number of files fits
 * size_t. */
uint64_t mls_index_stored_bytes(const mls_index_shard *shard)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < mls_index_place_count(shard); i++) {
        bytes += mls_index_place(shard, i).bytes;
    }
    return bytes;
}

/* ---- checks across all shards ---- */

/* Sort the `count` elements of `size` bytes at `base` in ascending order, like qsort;
 * sorted elements, the usual case, are only compared. Returns whether elements may be
 * equal: false if none are, true also if it is unknown, after qsort. */
static bool sort_unless_sorted(void *base, size_t count, size_t size,
                               int (*compare)(const void *, const void *))
{
    const char *at = base;
    bool has_equal = false;
    for (size_t i = 1; i < count; i++, at += size) {
        const int order = compare(at, at + size);
        if (order > 0) {
            qsort(base, count, size, compare);
            return true;
        }
        has_equal = has_equal || order == 0;
    }
    return has_equal;
}

/* mls_index_compare for qsort. */
static int compare_shards(const void *a, const void *b)
{
    return mls_index_compare(a, b);
}

/* Report a problem of a shard, or of the index if `shard` is NULL. Returns
 * MLS_E_FORMAT. */
static mls_code fail_shard(const mls_index_shard *shard, const char *problem,
                           mls_status *st)
{
    if (shard == NULL || shard->id.name.data == NULL) {
        return mls_fail_at(st, 0, "%s", problem);
    }
    const mls_str name = shard->id.name;
    const int width = (int)(name.length < SHOWN_NAME ? name.length : SHOWN_NAME);
    mls_fail_at(st, 0, "shard of '%.*s': %s", width, name.data, problem);
    return mls_status_tensor(st, &shard->id);
}

/* Sort the shards by id and part. MLS_E_FORMAT: a part is listed twice. Indexes that we
 * write are sorted already; others may not be. */
static mls_code sort_shards(const mls_index *index, mls_status *st)
{
    const bool may_repeat = sort_unless_sorted(index->shards, index->shard_count,
                                               sizeof *index->shards, compare_shards);
    for (size_t i = 1; may_repeat && i < index->shard_count; i++) {
        if (mls_index_compare(&index->shards[i - 1], &index->shards[i]) == 0) {
            return fail_shard(&index->shards[i], "\"part\" appears twice", st);
        }
    }
    return MLS_OK;
}

/* Order for qsort of pointers to files: by path. */
static int compare_paths(const void *a, const void *b)
{
    const mls_index_file *x = *(const mls_index_file *const *)a;
    const mls_index_file *y = *(const mls_index_file *const *)b;
    return strcmp(x->path, y->path);
}

/* A place and its shard; `layer` is NULL for a plain shard. */
typedef struct shard_place {
    const mls_index_shard *shard;
    const mls_layer *layer;
} shard_place;

/* Return the number of the file that stores the place. */
static size_t file_of(const shard_place *s)
{
    return s->layer == NULL ? s->shard->file : s->layer->file;
}

/* Return the offset of the place in its file. */
static uint64_t offset_of(const shard_place *s)
{
    return s->layer == NULL ? s->shard->offset : s->layer->offset;
}

/* Order for qsort: by file, then by offset in the file. */
static int compare_places(const void *a, const void *b)
{
    const shard_place *x = a, *y = b;
    return file_of(x) != file_of(y)       ? (file_of(x) < file_of(y) ? -1 : 1)
           : offset_of(x) != offset_of(y) ? (offset_of(x) < offset_of(y) ? -1 : 1)
                                          : 0;
}

/* Check that no path is listed twice. Pointers are sorted instead of the files, because
 * shards refer to files by their index. MLS_E_FORMAT, MLS_E_MEMORY. */
static mls_code check_files(const mls_index *index, mls_status *st)
{
    const void **sorted = mls_alloc(index->file_count, sizeof *sorted);
    mls_code code = MLS_OK;
    if (sorted == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for an index of %zu files",
                        index->file_count);
    }
    for (size_t i = 0; i < index->file_count; i++) {
        sorted[i] = &index->files[i];
    }
    const bool may_repeat =
        sort_unless_sorted(sorted, index->file_count, sizeof *sorted, compare_paths);
    for (size_t i = 1; may_repeat && code == MLS_OK && i < index->file_count; i++) {
        const mls_index_file *file = sorted[i];
        if (compare_paths(&sorted[i - 1], &sorted[i]) == 0) {
            code = fail_shard(NULL, "\"path\" appears twice among the files", st);
            mls_status_got(st, "%.*s", SHOWN_NAME, file->path);
        }
    }
    mls_free(sorted);
    return code;
}

/* Store in `out` all places that have bytes, and return their number; `out` NULL only
 * counts. */
static size_t list_places(const mls_index *index, shard_place *out)
{
    size_t count = 0;
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_index_shard *shard = &index->shards[i];
        const bool has_layers = shard->layers != NULL;
        const size_t places = has_layers ? shard->layers->count : shard->bytes > 0;
        for (size_t j = 0; j < places; j++, count++) {
            if (out != NULL) {
                out[count] = (shard_place){
                    .shard = shard, .layer = has_layers ? &shard->layers->list[j] : NULL};
            }
        }
    }
    return count;
}

/* Check that no byte of a file belongs to two places. So reading all places reads at most
 * the size of the files. MLS_E_FORMAT names the later of two shards that overlap.
 * MLS_E_MEMORY. */
static mls_code check_overlaps(const mls_index *index, mls_status *st)
{
    const size_t count = list_places(index, NULL);
    shard_place *sorted = mls_alloc(count, sizeof *sorted);
    mls_code code = MLS_OK;
    if (sorted == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for an index of %zu shards",
                        index->shard_count);
    }
    (void)list_places(index, sorted);
    (void)sort_unless_sorted(sorted, count, sizeof *sorted, compare_places);
    for (size_t i = 1; code == MLS_OK && i < count; i++) {
        const shard_place *before = &sorted[i - 1], *next = &sorted[i];
        const size_t bytes =
            before->layer == NULL ? before->shard->bytes : before->layer->bytes;
        if (file_of(before) == file_of(next) &&
            /* sorted, so the difference is not negative */
            offset_of(next) - offset_of(before) < bytes) {
            code = fail_shard(next->shard,
                              next->shard == before->shard
                                  ? "\"offset\" overlaps another layer of the shard"
                                  : "\"offset\" overlaps another shard in the file",
                              st);
        }
    }
    mls_free(sorted);
    return code;
}

/* Check that the total uncompressed bytes of all shards, which a manifest records, fit an
 * int64. Files limit the stored bytes, but sparse shards may have any number of zeros.
 * MLS_E_FORMAT. */
static mls_code check_sum(const mls_index *index, mls_status *st)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < index->shard_count; i++) {
        if (!mls_u64_add(sum, index->shards[i].bytes, &sum) || sum > INT64_MAX) {
            return fail_shard(&index->shards[i],
                              "\"shape\" gives too many bytes in total", st);
        }
    }
    return MLS_OK;
}

/* Sort, then check paths, overlaps and the total size. The order is fixed, so that an
 * index with several faults always reports the same one. */
mls_code mls_index_arrange(mls_index *index, mls_status *st)
{
    const bool is_valid = sort_shards(index, st) == MLS_OK &&
                          check_files(index, st) == MLS_OK &&
                          check_overlaps(index, st) == MLS_OK;
    return is_valid ? check_sum(index, st) : st->code;
}
