/* index_facts: what can be asked of an index, and what holds for all of its shards
 * together.
 *
 * Sorting comes first: equal shards are neighbours then, and places that share a byte are
 * too.
 */
#include "checkpoint/index/index.h"

#include "base/memory.h"
#include "base/size.h"

#include <stdlib.h>
#include <string.h>

enum { SHOWN_NAME = 100 }; /* bytes of a name in a message */

/* Also the names of the folders that the files of a section are in. */
const char *mls_section_name(mls_section section)
{
    static const char *const names[MLS_SECTION_COUNT] = {
        [MLS_PARAMS] = "params", [MLS_OPTIM_STATE] = "optim_state"};
    return names[section];
}

/* The first has no name: a shard that states no tier has no such member. */
const char *mls_tier_name(mls_tier tier)
{
    static const char *const names[MLS_TIER_COUNT] = {[MLS_TIER_NONE] = "",
                                                      [MLS_TIER_HOT] = "hot",
                                                      [MLS_TIER_WARM] = "warm",
                                                      [MLS_TIER_COLD] = "cold"};
    return names[tier];
}

/* Parameters may have dots in their names; names of optimizer states have none. */
mls_tensor_id mls_tensor_id_of(mls_section section, mls_text key)
{
    size_t dot = key.length;
    while (section == MLS_OPTIM_STATE && dot > 0 && key.data[dot - 1] != '.') {
        dot--;
    }
    if (section == MLS_PARAMS || dot == 0) {
        return (mls_tensor_id){.section = section, .name = key};
    }
    return (mls_tensor_id){.section = section,
                           .name = {key.data, dot - 1},
                           .state = {key.data + dot, key.length - dot},
                           .has_state = true};
}

/* Names are compared as bytes, never by locale: the order is part of the format, and two
 * machines must agree on it. */
int mls_tensor_id_compare(const mls_tensor_id *a, const mls_tensor_id *b)
{
    if (a->section != b->section) {
        return a->section < b->section ? -1 : 1;
    }
    const int names = mls_text_compare(a->name, b->name);
    if (names != 0) {
        return names;
    }
    if (a->has_state != b->has_state) {
        return a->has_state ? 1 : -1;
    }
    return a->has_state ? mls_text_compare(a->state, b->state) : 0;
}

/* Parts of one tensor follow one another. */
int mls_index_compare(const mls_index_shard *a, const mls_index_shard *b)
{
    const int ids = mls_tensor_id_compare(&a->id, &b->id);
    return ids != 0 ? ids : a->part < b->part ? -1 : a->part > b->part;
}

/* Dimensions of 0 count as 1: NumPy and torch multiply the others all the same. */
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

/* Axes and tier may differ: they do not say what the bytes are. */
bool mls_index_same_tensor(const mls_index_shard *a, const mls_index_shard *b)
{
    bool same =
        a->dtype == b->dtype && a->rank == b->rank && a->layout.count == b->layout.count;
    for (int i = 0; same && i < a->rank; i++) {
        same = a->shape[i] == b->shape[i];
    }
    for (int i = 0; same && i < a->layout.count; i++) {
        same = a->layout.steps[i].axis == b->layout.steps[i].axis &&
               a->layout.steps[i].parts == b->layout.steps[i].parts;
    }
    return same;
}

/* Made anew for each who asks: a part takes 300 bytes, and an index has many. */
mls_part mls_index_part(const mls_index_shard *shard)
{
    mls_part part = {0};
    mls_status ignored;
    /* it was made once already, when the index was */
    (void)mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part, &part,
                          &ignored);
    return part;
}

/* The names are freed last. */
void mls_index_fini(mls_index *index)
{
    mls_free(index->files);
    mls_free(index->shards);
    mls_free(index->dims);
    mls_free(index->axes);
    mls_free(index->crcs);
    mls_free(index->sparse);
    mls_free(index->layers);
    mls_free(index->extents);
    mls_free(index->frames);
    mls_free(index->ends);
    mls_json_free(index->json);
    *index = (mls_index){0};
}

/* What is not sparse has one place, wherever that is. */
size_t mls_index_place_count(const mls_index_shard *shard)
{
    return shard->layers == NULL ? 1 : shard->layers->count;
}

/* Characters of our own file names (safe_filename.h), so that no path leads anywhere else. */
static bool plain_name(mls_text text)
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

/* The suffix has a length of its own: a name of nothing else is none. */
bool mls_index_is_path(mls_text path)
{
    static const char suffix[] = ".safetensors";
    const size_t suffix_length = sizeof suffix - 1;
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        const char *folder = mls_section_name((mls_section)s);
        const size_t start = strlen(folder) + 1;
        if (path.length > start + suffix_length && path.length <= MLS_PATH_BYTES &&
            memcmp(path.data, folder, start - 1) == 0 && path.data[start - 1] == '/') {
            const mls_text name = {path.data + start, path.length - start};
            return plain_name(name) && memcmp(path.data + path.length - suffix_length,
                                              suffix, suffix_length) == 0;
        }
    }
    return false;
}

/* By value: a plain shard has no layer that could be pointed to. */
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

/* A full layer that is the only one holds what a plain shard would. */
bool mls_index_is_sparse(const mls_index_shard *shard)
{
    const mls_layers *layers = shard->layers;
    return layers != NULL && (layers->count != 1 || layers->list[0].row != 0);
}

/* The layers' bytes fit their files, of which there are no more than a size can count. */
uint64_t mls_index_stored_bytes(const mls_index_shard *shard)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < mls_index_place_count(shard); i++) {
        bytes += mls_index_place(shard, i).bytes;
    }
    return bytes;
}

/* ---- the whole ---- */

/* qsort, for what mostly is in order: then nothing is moved, and no memory is taken.
 * False: no two are equal.  True: some may be. */
static bool sort(void *base, size_t count, size_t size,
                 int (*compare)(const void *, const void *))
{
    const char *at = base;
    bool twins = false;
    for (size_t i = 1; i < count; i++, at += size) {
        const int order = compare(at, at + size);
        if (order > 0) {
            qsort(base, count, size, compare);
            return true;
        }
        twins = twins || order == 0;
    }
    return twins;
}

/* For sort. */
static int compare_shards(const void *a, const void *b)
{
    return mls_index_compare(a, b);
}

/* What is wrong with which member; of a shard, or of none. */
static mls_code refuse(const mls_index_shard *shard, const char *what, mls_status *st)
{
    if (shard == NULL || shard->id.name.data == NULL) {
        return mls_fail_at(st, 0, "%s", what);
    }
    const mls_text name = shard->id.name;
    const int shown = (int)(name.length < SHOWN_NAME ? name.length : SHOWN_NAME);
    mls_fail_at(st, 0, "shard of '%.*s': %s", shown, name.data, what);
    mls_status_name(st, name.data, name.length);
    return MLS_E_FORMAT;
}

/* Ours are sorted already; others' may not be.  Then equal ones are neighbours. */
static mls_code sort_shards(const mls_index *x, mls_status *st)
{
    const bool twins = sort(x->shards, x->shard_count, sizeof *x->shards, compare_shards);
    for (size_t i = 1; twins && i < x->shard_count; i++) {
        if (mls_index_compare(&x->shards[i - 1], &x->shards[i]) == 0) {
            return refuse(&x->shards[i], "\"part\" appears twice", st);
        }
    }
    return MLS_OK;
}

/* For sort, over pointers to files. */
static int compare_paths(const void *a, const void *b)
{
    const mls_index_file *x = *(const mls_index_file *const *)a;
    const mls_index_file *y = *(const mls_index_file *const *)b;
    return strcmp(x->path, y->path);
}

/* A place, and whose it is; `layer` is NULL where the shard is plain. */
typedef struct spot {
    const mls_index_shard *shard;
    const mls_layer *layer;
} spot;

/* The file of a place, and below, where it begins there. */
static size_t file_of(const spot *s)
{
    return s->layer == NULL ? s->shard->file : s->layer->file;
}

/* Of the first byte, in that file. */
static uint64_t offset_of(const spot *s)
{
    return s->layer == NULL ? s->shard->offset : s->layer->offset;
}

/* For sort, over spots: as they lie in their files. */
static int compare_places(const void *a, const void *b)
{
    const spot *x = a, *y = b;
    return file_of(x) != file_of(y)       ? (file_of(x) < file_of(y) ? -1 : 1)
           : offset_of(x) != offset_of(y) ? (offset_of(x) < offset_of(y) ? -1 : 1)
                                          : 0;
}

/* No file is listed twice. */
static mls_code check_files(const mls_index *x, mls_status *st)
{
    const void **sorted = mls_alloc(x->file_count, sizeof *sorted);
    mls_code code = MLS_OK;
    if (sorted == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for an index of %zu files",
                        x->file_count);
    }
    for (size_t i = 0; i < x->file_count; i++) {
        sorted[i] = &x->files[i];
    }
    const bool twins = sort(sorted, x->file_count, sizeof *sorted, compare_paths);
    for (size_t i = 1; twins && code == MLS_OK && i < x->file_count; i++) {
        const mls_index_file *file = sorted[i];
        if (compare_paths(&sorted[i - 1], &sorted[i]) == 0) {
            code = refuse(NULL, "\"path\" appears twice among the files", st);
            mls_status_got(st, "%.*s", SHOWN_NAME, file->path);
        }
    }
    mls_free(sorted);
    return code;
}

/* All places that have bytes; returns how many.  With `out` NULL they are only counted.
 */
static size_t list_places(const mls_index *x, spot *out)
{
    size_t count = 0;
    for (size_t i = 0; i < x->shard_count; i++) {
        const mls_index_shard *shard = &x->shards[i];
        const size_t layers = shard->layers == NULL ? 0 : shard->layers->count;
        if (shard->layers == NULL && shard->bytes > 0) {
            if (out != NULL) {
                out[count] = (spot){.shard = shard};
            }
            count++;
        }
        for (size_t j = 0; j < layers; j++, count++) {
            if (out != NULL) {
                out[count] = (spot){.shard = shard, .layer = &shard->layers->list[j]};
            }
        }
    }
    return count;
}

/* No byte belongs to two places: so all that is read by an index is no larger than its
 * files. */
static mls_code check_overlaps(const mls_index *x, mls_status *st)
{
    const size_t count = list_places(x, NULL);
    spot *sorted = mls_alloc(count, sizeof *sorted);
    mls_code code = MLS_OK;
    if (sorted == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for an index of %zu shards",
                        x->shard_count);
    }
    (void)list_places(x, sorted);
    (void)sort(sorted, count, sizeof *sorted, compare_places);
    for (size_t i = 1; code == MLS_OK && i < count; i++) {
        const spot *before = &sorted[i - 1], *next = &sorted[i];
        const size_t bytes =
            before->layer == NULL ? before->shard->bytes : before->layer->bytes;
        if (file_of(before) == file_of(next) &&
            offset_of(next) - offset_of(before) < bytes) {
            code = refuse(next->shard,
                          next->shard == before->shard
                              ? "\"offset\" is inside another of its layers"
                              : "\"offset\" is inside another shard of the file",
                          st);
        }
    }
    mls_free(sorted);
    return code;
}

/* A manifest says how many bytes all shards have: those that are stored fit their files,
 * but zeros that are not may be any number. */
static mls_code check_sum(const mls_index *x, mls_status *st)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < x->shard_count; i++) {
        if (!mls_u64_add(sum, x->shards[i].bytes, &sum) || sum > INT64_MAX) {
            return refuse(&x->shards[i], "\"shape\" makes too many bytes in all", st);
        }
    }
    return MLS_OK;
}

/* In this order, so that of several faults always the same one is told. */
mls_code mls_index_arrange(mls_index *index, mls_status *st)
{
    mls_code code = sort_shards(index, st);
    if (code == MLS_OK) {
        code = check_files(index, st);
    }
    if (code == MLS_OK) {
        code = check_overlaps(index, st);
    }
    return code == MLS_OK ? check_sum(index, st) : code;
}
