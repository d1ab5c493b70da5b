/* Reading our own words: one pass, from left to right, in which each key is a comparison
 * of constant length and each value is checked where it stands.
 *
 * Two things make that safe.  The words leave no room for anything that JSON would have
 * to be read for: no spaces, no escapes, no member besides, no second spelling of a
 * number; so whatever is accepted is JSON, and means the same to every reader.  And to be
 * refused costs nothing but time: the reader of any JSON has the last word.
 *
 * What shards point to grows while they are read, and may move: so they are told where it
 * is when all of them are there, each has its own behind that of the one before.
 */
#include "index_lines.h"

#include "mem.h"
#include "safetensors.h"
#include "seal.h"
#include "size.h"

#include <string.h>

enum {
    HEADER_BYTES = 8,      /* a shard file has no payload before that */
    WORLD_MOST = 1 << 24,  /* ranks */
    SURE_DIGITS = 18,      /* of a number that is below 2^63 */
    TEXT_MOST = 256 << 20, /* bytes: a longer one may have more values than the reader of
                              any JSON takes */
    NAME_STEP = 8          /* characters that are looked at together */
};

/* The shortest line that a shard can have, which bounds how many there are. */
#define LEAST_SHARD                                                                      \
    (sizeof "{\"section\":\"params\",\"name\":\"\",\"dtype\":\"U8\",\"shape\":[],"       \
            "\"layout\":[],\"part\":0,\"version\":1,\"file\":0,\"offset\":8,\"bytes\":"  \
            "0,\"crc32c\":\"00000000\"}\n" -                                             \
     1)

/* How much of an array is used, and how much of it there is. */
typedef struct extent {
    size_t used, all;
} extent;

/* What is read, and how far its arrays are filled. */
typedef struct lines {
    const char *at, *end;
    extent names, dims, axes, crcs;
    bool no_memory; /* that is why something was not read */
    mls_index index;
} lines;

/* Make room for `more` behind what is used of `*block`. */
static bool grow(lines *l, void **block, extent *r, size_t more, size_t size)
{
    if (*block != NULL && r->all - r->used >= more) {
        return true;
    }
    const size_t all = 2 * r->used + more + 64; /* no more than some times the text */
    void *grown = mls_realloc(*block, all, size);
    l->no_memory = grown == NULL;
    if (grown != NULL) {
        *block = grown;
        r->all = all;
    }
    return grown != NULL;
}

/* The same for one of the arrays, which have types of their own. */
#define GROWS(array, type)                                                               \
    static bool grow_##array(lines *l, size_t more)                                      \
    {                                                                                    \
        void *block = l->index.array;                                                    \
        const bool good = grow(l, &block, &l->array, more, sizeof(type));                \
        l->index.array = block;                                                          \
        return good;                                                                     \
    }
GROWS(names, char)
GROWS(dims, size_t)
GROWS(axes, signed char)
GROWS(crcs, uint32_t)

/* ---- words and values: false where there is something else ---- */

/* Whether two runs of bytes are the same.  For a length that the compiler knows: it makes
 * a few loads and comparisons of this, where memcmp is called for more than some bytes.
 */
static inline __attribute__((always_inline)) bool same_words(const char *a, const char *b,
                                                             size_t length)
{
    uint64_t x, y, differ = 0;
    if (length < sizeof x) {
        return memcmp(a, b, length) == 0;
    }
    for (size_t at = 0; at < length; at += sizeof x) {
        /* the last ones overlap those before */
        const size_t from = length - at < sizeof x ? length - sizeof x : at;
        memcpy(&x, a + from, sizeof x);
        memcpy(&y, b + from, sizeof y);
        differ |= x ^ y;
    }
    return differ == 0;
}

/* These very words; then they are behind us. */
static inline __attribute__((always_inline)) bool take(lines *l, const char *words,
                                                       size_t length)
{
    if ((size_t)(l->end - l->at) < length || !same_words(l->at, words, length)) {
        return false;
    }
    l->at += length;
    return true;
}

/* The length is known to the compiler. */
#define TAKE(l, words) take((l), (words), sizeof(words) - 1)

/* A whole number from `least` to `most` in its only form, without zeros in front.  One of
 * more digits than surely fit leaves some of them behind, which nothing goes on with. */
static inline bool take_number(lines *l, uint64_t least, uint64_t most, uint64_t *out)
{
    const char *const start = l->at;
    uint64_t value = 0;
    while (l->at < l->end && *l->at >= '0' && *l->at <= '9' &&
           l->at - start < SURE_DIGITS) {
        value = 10 * value + (uint64_t)(*l->at - '0');
        l->at++;
    }
    *out = value;
    return l->at > start && (*start != '0' || l->at == start + 1) && value >= least &&
           value <= most;
}

/* The same for what must fit the address space. */
static inline bool take_size(lines *l, size_t most, size_t *out)
{
    uint64_t value;
    const bool good = take_number(l, 0, most, &value);
    *out = (size_t)value; /* not above `most`, or of no use */
    return good;
}

/* What is left of a string, its opening quote being behind us.  Characters that JSON
 * spells in more than one way are none of ours to read, nor are those beyond ASCII, which
 * would have to be checked. */
static inline bool take_text(lines *l, mls_text *out)
{
    const char *const start = l->at;
    size_t plain = NAME_STEP;
    while (plain == NAME_STEP && l->end - l->at >= NAME_STEP) {
        plain = mls_text_eight_plain(l->at);
        l->at += plain;
    }
    *out = (mls_text){start, (size_t)(l->at - start)};
    return TAKE(l, "\""); /* the text goes on behind the last string for long enough */
}

/* The same, for one that is kept: its characters go to those of all names. */
static inline bool take_name(lines *l, mls_text *out)
{
    if (!take_text(l, out) || !grow_names(l, out->length)) {
        return false;
    }
    memcpy(l->index.names + l->names.used, out->data, out->length);
    l->names.used += out->length;
    return true;
}

/* Eight digits of a checksum. */
static inline bool take_crc(lines *l, uint32_t *out)
{
    if (l->end - l->at < MLS_CRC_DIGITS || !mls_crc_from_digits(l->at, out)) {
        return false;
    }
    l->at += MLS_CRC_DIGITS;
    return true;
}

/* ---- the head: what it is, whose, and the files ---- */

/* Everything in front of the files. */
static bool take_head(lines *l)
{
    uint32_t half; /* of the generation's digits; or the seal, which was checked */
    if (!TAKE(l, "{\"checksum\":\"") || !take_crc(l, &half) ||
        !TAKE(l, "\",\n\"format\":\"mlstate.index\",\"format_version\":1,\n"
                 "\"generation\":\"")) {
        return false;
    }
    const char *const generation = l->at;
    if (!take_crc(l, &half) || !take_crc(l, &half)) {
        return false;
    }
    memcpy(l->index.generation, generation, MLS_GENERATION_DIGITS);
    return TAKE(l, "\",\"rank\":") && take_number(l, 0, WORLD_MOST, &l->index.rank) &&
           TAKE(l, ",\"world_size\":") &&
           take_number(l, l->index.rank + 1, WORLD_MOST, &l->index.world_size) &&
           TAKE(l, ",\n\"files\":[");
}

/* The line of one file. */
static bool take_file(lines *l, mls_index_file *file)
{
    mls_text path;
    if (!TAKE(l, "\n{\"path\":\"") || !take_text(l, &path) || !mls_index_is_path(path)) {
        return false;
    }
    *file = (mls_index_file){0};
    memcpy(file->path, path.data, path.length);
    return TAKE(l, ",\"bytes\":") &&
           take_number(l, HEADER_BYTES, INT64_MAX, &file->bytes) &&
           TAKE(l, ",\"header_crc32c\":\"") && take_crc(l, &file->header_crc) &&
           TAKE(l, "\"}");
}

/* ---- shards ---- */

/* Which tensor.  A name that the key in a file is divided by has no dot. */
static bool take_id(lines *l, mls_tensor_id *id)
{
    const bool params = TAKE(l, "{\"section\":\"params\",\"name\":\"");
    if ((!params && !TAKE(l, "{\"section\":\"optim_state\",\"name\":\"")) ||
        !take_name(l, &id->name)) {
        return false;
    }
    id->section = params ? MLS_PARAMS : MLS_OPTIM_STATE;
    if (params) {
        return true;
    }
    id->has_state = TAKE(l, ",\"state\":\"");
    if (id->has_state && !take_name(l, &id->state)) {
        return false;
    }
    const mls_text divided = id->has_state ? id->state : id->name;
    return memchr(divided.data, '.', divided.length) == NULL;
}

/* Dimensions, for as many as a shape may have. */
static bool take_shape(lines *l, mls_index_shard *shard)
{
    if (!grow_dims(l, MLS_LAYOUT_RANK)) {
        return false;
    }
    size_t *dims = l->index.dims + l->dims.used;
    shard->shape = dims; /* up to the next shard */
    while (!TAKE(l, "]")) {
        if (shard->rank == MLS_LAYOUT_RANK || (shard->rank > 0 && !TAKE(l, ",")) ||
            !take_size(l, SIZE_MAX, &dims[shard->rank])) {
            return false;
        }
        shard->rank++;
    }
    l->dims.used += (size_t)shard->rank;
    return true;
}

/* [axis or "flat", parts] */
static bool take_step(lines *l, mls_layout_step *step)
{
    size_t axis;
    step->axis = MLS_LAYOUT_FLAT;
    if (!TAKE(l, "[\"flat\"")) {
        if (!TAKE(l, "[") || !take_size(l, MLS_LAYOUT_RANK - 1, &axis)) {
            return false;
        }
        step->axis = (int)axis;
    }
    return TAKE(l, ",") && take_size(l, SIZE_MAX, &step->parts) && TAKE(l, "]");
}

/* Whether the steps make sense is asked when the part is made of them. */
static bool take_layout(lines *l, mls_layout *layout)
{
    while (!TAKE(l, "]")) {
        if (layout->count == MLS_LAYOUT_STEPS || (layout->count > 0 && !TAKE(l, ",")) ||
            !take_step(l, &layout->steps[layout->count])) {
            return false;
        }
        layout->count++;
    }
    return true;
}

/* For each axis of the state the parameter's, or null. */
static bool take_axes(lines *l, mls_index_shard *shard)
{
    static const signed char some = 0;
    if (!grow_axes(l, MLS_LAYOUT_RANK)) {
        return false;
    }
    shard->axes = &some; /* that it has any is all that is asked before place_all */
    for (int i = 0; i < shard->rank; i++) {
        signed char *const to = &l->index.axes[l->axes.used++];
        size_t axis;
        if (i > 0 && !TAKE(l, ",")) {
            return false;
        }
        if (TAKE(l, "null")) {
            *to = MLS_NO_AXIS;
        } else if (take_size(l, MLS_LAYOUT_RANK - 1, &axis)) {
            *to = (signed char)axis;
        } else {
            return false;
        }
    }
    return TAKE(l, "]");
}

/* Every tier has its own word, but for none. */
static bool take_tier(lines *l, mls_tier *tier)
{
    mls_text word;
    int which = MLS_TIER_NONE + 1;
    if (!take_text(l, &word)) {
        return false;
    }
    while (which < MLS_TIER_COUNT && !mls_text_is(word, mls_tier_name((mls_tier)which))) {
        which++;
    }
    *tier = (mls_tier)which;
    return which < MLS_TIER_COUNT;
}

/* What a shard is, all that does not say where it lies. */
static bool take_facts(lines *l, mls_index_shard *shard)
{
    mls_text dtype;
    return take_id(l, &shard->id) && TAKE(l, ",\"dtype\":\"") && take_text(l, &dtype) &&
           mls_dtype_from_file_name(dtype.data, dtype.length, &shard->dtype) &&
           TAKE(l, ",\"shape\":[") && take_shape(l, shard) && TAKE(l, ",\"layout\":[") &&
           take_layout(l, &shard->layout) && TAKE(l, ",\"part\":") &&
           take_size(l, PTRDIFF_MAX, &shard->part) &&
           (!TAKE(l, ",\"axes\":[") || take_axes(l, shard)) &&
           (!TAKE(l, ",\"tier\":\"") || take_tier(l, &shard->tier)) &&
           TAKE(l, ",\"version\":") && take_number(l, 1, INT64_MAX, &shard->version);
}

/* Whether the bytes are as many as shape, layout and dtype make. */
static bool fits_part(const mls_index_shard *shard)
{
    mls_part part;
    mls_status ignored;
    return mls_index_fits(shard->dtype, shard->rank, shard->shape) &&
           mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part, &part,
                           &ignored) == MLS_OK &&
           mls_part_count(&part) * mls_dtype_of(shard->dtype)->item_bytes == shard->bytes;
}

/* Whether the place is inside one of the files. */
static bool fits_file(const mls_index *index, const mls_index_shard *shard)
{
    uint64_t end;
    return shard->file < index->file_count &&
           mls_u64_add(shard->offset, shard->bytes, &end) &&
           end <= index->files[shard->file].bytes;
}

/* One checksum for each block, where there are several; else that of the whole. */
static bool take_blocks(lines *l, mls_index_shard *shard)
{
    const size_t count = mls_safetensors_blocks(shard->bytes);
    /* no more room than there may be digits for */
    if (count > 1 && count > (size_t)(l->end - l->at) / MLS_CRC_DIGITS) {
        return false;
    }
    if (!grow_crcs(l, count <= 1 ? 1 : count)) {
        return false;
    }
    uint32_t *const crcs = l->index.crcs + l->crcs.used;
    l->crcs.used += count <= 1 ? 1 : count;
    if (count <= 1) {
        crcs[0] = shard->crc;
        return shard->bytes > 0 || shard->crc == 0;
    }
    bool good = TAKE(l, ",\"blocks\":\"");
    for (size_t i = 0; good && i < count; i++) {
        good = take_crc(l, &crcs[i]);
    }
    return good && TAKE(l, "\"");
}

/* The line of one shard, from its brace to its brace. */
static bool take_shard(lines *l, mls_index_shard *shard)
{
    *shard = (mls_index_shard){0};
    return take_facts(l, shard) && TAKE(l, ",\"file\":") &&
           take_size(l, SIZE_MAX, &shard->file) && TAKE(l, ",\"offset\":") &&
           take_number(l, HEADER_BYTES, INT64_MAX, &shard->offset) &&
           TAKE(l, ",\"bytes\":") && take_size(l, SIZE_MAX, &shard->bytes) &&
           TAKE(l, ",\"crc32c\":\"") && take_crc(l, &shard->crc) && TAKE(l, "\"") &&
           fits_file(&l->index, shard) && fits_part(shard) && take_blocks(l, shard) &&
           TAKE(l, "}");
}

/* ---- the whole ---- */

/* Nothing of the text was believed yet but its length. */
static mls_code no_memory(size_t length, mls_status *st)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory for an index of %zu bytes", length);
}

/* The files, room for which grows: nobody points to them before all are there. */
static mls_code read_files(lines *l, mls_status *st)
{
    mls_index *x = &l->index;
    size_t room = 0;
    while (!TAKE(l, "],\n\"shards\":[")) {
        if (x->file_count == room) {
            room = room == 0 ? 16 : 2 * room;
            mls_index_file *files = mls_realloc(x->files, room, sizeof *files);
            if (files == NULL) {
                return no_memory((size_t)(l->end - l->at), st);
            }
            x->files = files;
        }
        if ((x->file_count > 0 && !TAKE(l, ",")) ||
            !take_file(l, &x->files[x->file_count])) {
            return MLS_E_FORMAT;
        }
        x->file_count++;
    }
    return MLS_OK;
}

/* Give back what was not used.  A block of none is one all the same. */
static bool trim(void **block, size_t used, size_t size)
{
    void *trimmed = mls_realloc(*block, used, size);
    *block = trimmed == NULL ? *block : trimmed;
    return trimmed != NULL;
}

/* All arrays at their places for good. */
static bool trim_all(lines *l)
{
    mls_index *x = &l->index;
    void *shards = x->shards, *names = x->names, *dims = x->dims, *axes = x->axes,
         *crcs = x->crcs;
    const bool good =
        trim(&shards, x->shard_count, sizeof *x->shards) &&
        trim(&names, l->names.used, 1) && trim(&dims, l->dims.used, sizeof *x->dims) &&
        trim(&axes, l->axes.used, 1) && trim(&crcs, l->crcs.used, sizeof *x->crcs);
    x->shards = shards;
    x->names = names;
    x->dims = dims;
    x->axes = axes;
    x->crcs = crcs;
    return good;
}

/* Tell the shards where what they point to is, in the order in which they were read. */
static void place_all(mls_index *x)
{
    const char *names = x->names;
    const size_t *dims = x->dims;
    const signed char *axes = x->axes;
    const uint32_t *crcs = x->crcs;
    for (size_t i = 0; i < x->shard_count; i++) {
        mls_index_shard *shard = &x->shards[i];
        const size_t blocks = mls_safetensors_blocks(shard->bytes);
        shard->id.name.data = names;
        names += shard->id.name.length;
        if (shard->id.has_state) {
            shard->id.state.data = names;
            names += shard->id.state.length;
        }
        shard->shape = dims;
        dims += shard->rank;
        if (shard->axes != NULL) {
            shard->axes = axes;
            axes += shard->rank;
        }
        shard->crcs = crcs;
        crcs += blocks <= 1 ? 1 : blocks;
    }
}

/* The shards, and the end of the text behind the last one. */
static mls_code read_shards(lines *l, mls_status *st)
{
    mls_index *x = &l->index;
    const size_t left = (size_t)(l->end - l->at);
    x->shards = mls_realloc(NULL, left / LEAST_SHARD + 1, sizeof *x->shards);
    if (x->shards == NULL) {
        return no_memory(left, st);
    }
    while (!TAKE(l, "]}\n")) {
        if ((x->shard_count > 0 && !TAKE(l, ",")) || !TAKE(l, "\n") ||
            (size_t)(l->end - l->at) < LEAST_SHARD ||
            !take_shard(l, &x->shards[x->shard_count])) {
            return l->no_memory ? no_memory(left, st) : MLS_E_FORMAT;
        }
        x->shard_count++;
    }
    if (l->at != l->end) {
        return MLS_E_FORMAT;
    }
    if (!trim_all(l)) {
        return no_memory(left, st);
    }
    place_all(x);
    return MLS_OK;
}

/* What was checked of each line is checked of all of them together as for any index. */
mls_code mls_index_lines_read(const char *text, size_t length, mls_index *out,
                              mls_status *st)
{
    lines l = {.at = text, .end = text + length};
    mls_status why; /* told only where there is no memory */
    mls_code code = MLS_E_FORMAT;
    if (length <= TEXT_MOST && take_head(&l)) {
        code = read_files(&l, &why);
    }
    if (code == MLS_OK) {
        code = read_shards(&l, &why);
    }
    if (code == MLS_OK) {
        code = mls_index_arrange(&l.index, &why);
    }
    if (code == MLS_OK) {
        *out = l.index;
        return MLS_OK;
    }
    if (code == MLS_E_MEMORY) {
        *st = why;
    }
    mls_index_fini(&l.index);
    return code;
}
