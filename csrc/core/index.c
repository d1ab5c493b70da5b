/* index: reading.
 *
 * Most texts are in our own words and are read by index_lines.c; this one reads all the
 * others, and says what is wrong.
 *
 * The reader goes over the document twice: once to check its outline and to count what
 * will be needed, once to fill it in.  Each count is a number of JSON values, so memory
 * stays in proportion to the text.  Whatever is wrong with a shard is said with its name.
 */
#include "index.h"

#include "index_lines.h"
#include "mem.h"
#include "safetensors.h"
#include "seal.h"
#include "size.h"

#include <stdlib.h>
#include <string.h>

enum {
    DEPTH = 8,           /* an index needs 6 */
    NODES = 64 << 20,    /* values in a text of 512 MiB, and more than it can hold */
    SHOWN_NAME = 100,    /* bytes of a name in a message */
    HEADER_BYTES = 8,    /* a shard file has no payload before that */
    WORLD_MOST = 1 << 24 /* ranks */
};

/* ---- reading: what can be asked of any value ---- */

typedef struct reader {
    const mls_json *json;
    mls_index index;                        /* its counts are final, its arrays grow */
    size_t dims_used, axes_used, crcs_used; /* of what was counted beforehand */
    size_t sparse_used, layers_used, extents_used; /* the same */
    size_t frames_used, ends_used;                 /* the same */
    uint64_t version;                              /* of the format */
    mls_text name; /* of the present shard, for messages */
    mls_status *st;
} reader;

/* "shard of 'x': 'key' what", at the value's place. */
static mls_code fail_member(reader *r, mls_json_node node, const char *key,
                            const char *what)
{
    const size_t at = node == MLS_JSON_NONE ? 0 : mls_json_offset(r->json, node);
    if (r->name.data == NULL) {
        return mls_fail_at(r->st, at, "\"%s\" %s", key, what);
    }
    const int shown = (int)(r->name.length < SHOWN_NAME ? r->name.length : SHOWN_NAME);
    mls_fail_at(r->st, at, "shard of '%.*s': \"%s\" %s", shown, r->name.data, key, what);
    mls_status_name(r->st, r->name.data, r->name.length);
    return MLS_E_FORMAT;
}

typedef mls_json_member member; /* one that an object may have */

/* Such a member before it was looked for. */
#define MEMBER(name, kind, must)                                                         \
    {.key = (name), .length = sizeof(name) - 1, .needed = (must), .type = (kind)}

/* "is not of that type" in words. */
static const char *wrong_type(mls_json_type type)
{
    switch (type) {
    case MLS_JSON_STRING:
        return "is not a string";
    case MLS_JSON_ARRAY:
        return "is not an array";
    default:
        return "is not a number";
    }
}

/* A member that is needed and not there, or not of its type. */
static mls_code refuse_member(reader *r, mls_json_node object, const member *m)
{
    return m->node == MLS_JSON_NONE
               ? fail_member(r, object, m->key, "is missing")
               : fail_member(r, m->node, m->key, wrong_type(m->type));
}

/* Find the members of an object and see that they have the right types.  Members that are
 * not in the table are left alone: later versions may have more. */
static mls_code find_members(reader *r, mls_json_node object, member *table, size_t count)
{
    const size_t bad = mls_json_members(r->json, object, table, count);
    return bad == count ? MLS_OK : refuse_member(r, object, &table[bad]);
}

/* A whole number from `least` to `most`. */
static mls_code read_number(reader *r, const member *m, uint64_t least, uint64_t most,
                            uint64_t *out)
{
    uint64_t value;
    if (!mls_json_u64(r->json, m->node, &value) || value < least || value > most) {
        fail_member(r, m->node, m->key, "is no whole number in its range");
        mls_status_expected(r->st, "%llu to %llu", (unsigned long long)least,
                            (unsigned long long)most);
        return MLS_E_FORMAT;
    }
    *out = value;
    return MLS_OK;
}

/* As read_number, for what must fit the address space. */
static mls_code read_size(reader *r, const member *m, size_t most, size_t *out)
{
    uint64_t value;
    const mls_code code = read_number(r, m, 0, most, &value);
    if (code == MLS_OK) {
        *out = (size_t)value;
    }
    return code;
}

/* Exactly eight digits, in the writer's own form: anything else was not written by one.
 */
static mls_code read_crc(reader *r, const member *m, uint32_t *out)
{
    const mls_text text = mls_json_text(r->json, m->node);
    return text.length == MLS_CRC_DIGITS && mls_crc_from_digits(text.data, out)
               ? MLS_OK
               : fail_member(r, m->node, m->key, "is not 8 hexadecimal digits");
}

/* ---- reading: files ---- */

/* One of the files, which shards name by its number.  No file is shorter than the length
 * that each starts with. */
static mls_code read_file(reader *r, mls_json_node node, mls_index_file *file)
{
    enum { PATH, BYTES, HEADER_CRC, COUNT };
    member m[COUNT] = {[PATH] = MEMBER("path", MLS_JSON_STRING, true),
                       [BYTES] = MEMBER("bytes", MLS_JSON_NUMBER, true),
                       [HEADER_CRC] = MEMBER("header_crc32c", MLS_JSON_STRING, true)};
    mls_code code = find_members(r, node, m, COUNT);
    if (code != MLS_OK) {
        return code;
    }
    const mls_text path = mls_json_text(r->json, m[PATH].node);
    if (!mls_index_is_path(path)) {
        return fail_member(r, m[PATH].node, "path", "is not that of a shard file");
    }
    memcpy(file->path, path.data, path.length);
    code = read_number(r, &m[BYTES], HEADER_BYTES, INT64_MAX, &file->bytes);
    return code == MLS_OK ? read_crc(r, &m[HEADER_CRC], &file->header_crc) : code;
}

/* ---- reading: shards ---- */

enum {
    SECTION,
    NAME,
    STATE,
    DTYPE,
    SHAPE,
    LAYOUT,
    PART,
    AXES,
    TIER,
    VERSION,
    PLACE, /* the first of the place's */
    FILE_NUMBER = PLACE,
    OFFSET,
    BYTES,
    CRC,
    BLOCKS,
    LAYERS, /* last: version 1 does not know it */
    MEMBERS
};

/* Of a layer: the place's, then its own. */
enum { ROW = LAYERS - PLACE, ROWS, CODEC, FRAMES, LAYER_MEMBERS };

static const member shard_members[MEMBERS] = {
    [SECTION] = MEMBER("section", MLS_JSON_STRING, true),
    [NAME] = MEMBER("name", MLS_JSON_STRING, true),
    [STATE] = MEMBER("state", MLS_JSON_STRING, false),
    [DTYPE] = MEMBER("dtype", MLS_JSON_STRING, true),
    [SHAPE] = MEMBER("shape", MLS_JSON_ARRAY, true),
    [LAYOUT] = MEMBER("layout", MLS_JSON_ARRAY, true),
    [PART] = MEMBER("part", MLS_JSON_NUMBER, true),
    [AXES] = MEMBER("axes", MLS_JSON_ARRAY, false),
    [TIER] = MEMBER("tier", MLS_JSON_STRING, false),
    [VERSION] = MEMBER("version", MLS_JSON_NUMBER, true),
    [FILE_NUMBER] = MEMBER("file", MLS_JSON_NUMBER, true),
    [OFFSET] = MEMBER("offset", MLS_JSON_NUMBER, true),
    [BYTES] = MEMBER("bytes", MLS_JSON_NUMBER, true),
    [CRC] = MEMBER("crc32c", MLS_JSON_STRING, true),
    [BLOCKS] = MEMBER("blocks", MLS_JSON_STRING, false),
    [LAYERS] = MEMBER("layers", MLS_JSON_ARRAY, false),
};

static const member layer_members[LAYER_MEMBERS] = {
    [FILE_NUMBER - PLACE] = MEMBER("file", MLS_JSON_NUMBER, true),
    [OFFSET - PLACE] = MEMBER("offset", MLS_JSON_NUMBER, true),
    [BYTES - PLACE] = MEMBER("bytes", MLS_JSON_NUMBER, true),
    [CRC - PLACE] = MEMBER("crc32c", MLS_JSON_STRING, true),
    [BLOCKS - PLACE] = MEMBER("blocks", MLS_JSON_STRING, false),
    [ROW] = MEMBER("row", MLS_JSON_NUMBER, false),
    [ROWS] = MEMBER("rows", MLS_JSON_STRING, false),
    [CODEC] = MEMBER("codec", MLS_JSON_STRING, false),
    [FRAMES] = MEMBER("frames", MLS_JSON_STRING, false),
};

/* The name of a text among `count` names, or `count`. */
static int which_name(mls_text text, const char *(*name_of)(int), int count)
{
    int i = 0;
    while (i < count && !mls_text_is(text, name_of(i))) {
        i++;
    }
    return i;
}

/* For which_name, which knows no enum by name; so are the next two. */
static const char *section_of(int i)
{
    return mls_section_name((mls_section)i);
}

static const char *codec_of(int i)
{
    return mls_codec_name((mls_codec)i);
}

/* Among the names is the empty one, of no tier: whoever asks refuses it himself. */
static const char *tier_of(int i)
{
    return mls_tier_name((mls_tier)i);
}

/* Dots divide parameter and state: where both are joined, they must come apart again. */
static mls_code read_id(reader *r, const member *m, mls_tensor_id *id)
{
    const mls_text section = mls_json_text(r->json, m[SECTION].node);
    const int which = which_name(section, section_of, MLS_SECTION_COUNT);
    if (which == MLS_SECTION_COUNT) {
        return fail_member(r, m[SECTION].node, "section",
                           "is neither \"params\" nor \"optim_state\"");
    }
    *id = (mls_tensor_id){.section = (mls_section)which,
                          .name = mls_json_text(r->json, m[NAME].node),
                          .has_state = m[STATE].node != MLS_JSON_NONE};
    if (id->section == MLS_PARAMS) {
        return id->has_state
                   ? fail_member(r, m[STATE].node, "state", "in the section \"params\"")
                   : MLS_OK;
    }
    /* what stands behind the last dot of the key in a file */
    const mls_text divided =
        id->has_state ? mls_json_text(r->json, m[STATE].node) : id->name;
    if (divided.length > 0 && memchr(divided.data, '.', divided.length) != NULL) {
        return fail_member(r, m[id->has_state ? STATE : NAME].node,
                           id->has_state ? "state" : "name", "has a dot");
    }
    if (id->has_state) {
        id->state = divided;
    }
    return MLS_OK;
}

/* Dimensions go to the index's array of all of them, where room for as many as the text
 * has was made. */
static mls_code read_shape(reader *r, const member *m, mls_index_shard *shard)
{
    size_t *dims = r->index.dims + r->dims_used;
    const size_t rank = mls_json_size(r->json, m->node);
    if (rank > MLS_LAYOUT_RANK) {
        return fail_member(r, m->node, m->key, "has too many dimensions");
    }
    mls_json_node node = mls_json_first(r->json, m->node);
    for (size_t i = 0; i < rank; i++, node = mls_json_next(r->json, node)) {
        uint64_t dim;
        if (!mls_json_u64(r->json, node, &dim) || !mls_size_from_u64(dim, &dims[i])) {
            return fail_member(r, node, m->key, "has a dimension that is no size");
        }
    }
    shard->rank = (int)rank;
    shard->shape = dims;
    r->dims_used += rank;
    return MLS_OK;
}

/* [axis or "flat", parts]: the only arrays of two kinds of values in the format. */
static bool read_step(reader *r, mls_json_node node, mls_layout_step *step)
{
    uint64_t axis, parts;
    const mls_json_node first = mls_json_first(r->json, node);
    if (mls_json_type_of(r->json, node) != MLS_JSON_ARRAY ||
        mls_json_size(r->json, node) != 2 ||
        !mls_json_u64(r->json, mls_json_next(r->json, first), &parts) ||
        !mls_size_from_u64(parts, &step->parts)) {
        return false;
    }
    if (mls_json_type_of(r->json, first) == MLS_JSON_STRING) {
        step->axis = MLS_LAYOUT_FLAT;
        return mls_text_is(mls_json_text(r->json, first), "flat");
    }
    if (!mls_json_u64(r->json, first, &axis) || axis >= MLS_LAYOUT_RANK) {
        return false;
    }
    step->axis = (int)axis;
    return true;
}

/* Whether the steps make sense together, and with the shape, is asked later, when the
 * part is made of them. */
static mls_code read_layout(reader *r, const member *m, mls_layout *layout)
{
    if (mls_json_size(r->json, m->node) > MLS_LAYOUT_STEPS) {
        return fail_member(r, m->node, m->key, "has too many steps");
    }
    for (mls_json_node node = mls_json_first(r->json, m->node); node != MLS_JSON_NONE;
         node = mls_json_next(r->json, node)) {
        if (!read_step(r, node, &layout->steps[layout->count])) {
            return fail_member(r, node, m->key,
                               "has a step that is not [axis or \"flat\", parts]");
        }
        layout->count++;
    }
    return MLS_OK;
}

/* For each of the state's axes the parameter's, or null.  The parameter itself may be in
 * another index, or nowhere: what is said here is only used to cut. */
static mls_code read_axes(reader *r, const member *m, mls_index_shard *shard)
{
    signed char *axes = r->index.axes + r->axes_used;
    if (m->node == MLS_JSON_NONE) {
        return MLS_OK;
    }
    if (mls_json_size(r->json, m->node) != (size_t)shard->rank) {
        return fail_member(r, m->node, m->key, "are not as many as the shape has");
    }
    mls_json_node node = mls_json_first(r->json, m->node);
    for (int i = 0; i < shard->rank; i++, node = mls_json_next(r->json, node)) {
        uint64_t axis;
        if (mls_json_type_of(r->json, node) == MLS_JSON_NULL) {
            axes[i] = MLS_NO_AXIS;
        } else if (mls_json_u64(r->json, node, &axis) && axis < MLS_LAYOUT_RANK) {
            axes[i] = (signed char)axis;
        } else {
            return fail_member(r, node, m->key, "hold neither an axis nor null");
        }
    }
    shard->axes = axes;
    r->axes_used += (size_t)shard->rank;
    return MLS_OK;
}

/* Not stated is no tier; stated wrongly is an error, since nobody could tell what was
 * meant. */
static mls_code read_tier(reader *r, const member *m, mls_tier *tier)
{
    if (m->node == MLS_JSON_NONE) {
        return MLS_OK;
    }
    const int which =
        which_name(mls_json_text(r->json, m->node), tier_of, MLS_TIER_COUNT);
    if (which == MLS_TIER_NONE || which == MLS_TIER_COUNT) {
        return fail_member(r, m->node, m->key, "is none of \"hot\", \"warm\", \"cold\"");
    }
    *tier = (mls_tier)which;
    return MLS_OK;
}

/* What the shard is, by layout and shape; `*out` is the number of its elements. */
static mls_code read_part(reader *r, const member *m, mls_index_shard *shard, size_t *out)
{
    mls_part part;
    mls_status why;
    if (!mls_index_fits(shard->dtype, shard->rank, shard->shape)) {
        return fail_member(r, m[SHAPE].node, "shape", "is larger than any memory");
    }
    if (mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part, &part,
                        &why) != MLS_OK) {
        return fail_member(r, m[LAYOUT].node, "layout",
                           why.code == MLS_E_VALUE
                               ? "does not have this part, or no sense"
                               : "does not fit the shape");
    }
    *out = mls_part_count(&part);
    shard->bytes = *out * mls_dtype_of(shard->dtype)->item_bytes; /* no more than fit */
    return MLS_OK;
}

/* One checksum a block; a place of one block has but the one.  That of the whole place is
 * not compared with those of its blocks: whoever verifies reads the blocks.  `m` are the
 * members of a place. */
static mls_code read_blocks(reader *r, const member *m, mls_layer *place)
{
    const member *whole = &m[CRC - PLACE], *blocks = &m[BLOCKS - PLACE];
    const size_t count = mls_safetensors_blocks(place->bytes);
    uint32_t *crcs = r->index.crcs + r->crcs_used;
    mls_code code = read_crc(r, whole, &place->crc);
    if (code != MLS_OK) {
        return code;
    }
    if ((blocks->node == MLS_JSON_NONE) != (count <= 1)) {
        return fail_member(r, (count <= 1 ? blocks : whole)->node, "blocks",
                           count <= 1 ? "of a shard that is no longer than one"
                                      : "is missing");
    }
    place->crcs = crcs;
    r->crcs_used += count;
    if (count <= 1) {
        crcs[0] = place->crc; /* room for it was counted, by "crc32c" */
        r->crcs_used = (size_t)(crcs - r->index.crcs) + 1;
        return place->bytes > 0 || place->crc == 0
                   ? MLS_OK
                   : fail_member(r, whole->node, "crc32c", "is not that of no bytes");
    }
    const mls_text digits = mls_json_text(r->json, blocks->node);
    if (digits.length % MLS_CRC_DIGITS != 0 || digits.length / MLS_CRC_DIGITS != count) {
        return fail_member(r, blocks->node, "blocks",
                           "are not 8 digits for each MiB of the shard");
    }
    for (size_t i = 0; i < count; i++) {
        if (!mls_crc_from_digits(digits.data + i * MLS_CRC_DIGITS, &crcs[i])) {
            return fail_member(r, blocks->node, "blocks", "are not hexadecimal");
        }
    }
    return MLS_OK;
}

/* Where it lies: inside its file, as far as the file's recorded length tells.  Whether
 * the file has that length is seen when it is opened.  `m` are the members of a place. */
static mls_code read_place(reader *r, const member *m, mls_layer *place)
{
    uint64_t end;
    mls_code code = read_size(r, &m[BYTES - PLACE], SIZE_MAX, &place->bytes);
    if (code == MLS_OK) {
        code =
            read_number(r, &m[OFFSET - PLACE], HEADER_BYTES, INT64_MAX, &place->offset);
    }
    if (code == MLS_OK) {
        code = read_size(r, &m[0], SIZE_MAX, &place->file);
    }
    if (code != MLS_OK) {
        return code;
    }
    if (place->file >= r->index.file_count) {
        return fail_member(r, m[0].node, "file", "is not one of the files");
    }
    if (!mls_u64_add(place->offset, place->bytes, &end) ||
        end > r->index.files[place->file].bytes) {
        return fail_member(r, m[OFFSET - PLACE].node, "offset",
                           "and bytes lead behind the end of the file");
    }
    return MLS_OK;
}

/* A shard that has all its bytes in one place, and is of as many as there are there. */
static mls_code read_plain(reader *r, const member *m, mls_index_shard *shard)
{
    mls_layer place = {0};
    size_t elements;
    mls_code code = read_place(r, m + PLACE, &place);
    if (code == MLS_OK) {
        code = read_part(r, m, shard, &elements);
    }
    if (code != MLS_OK) {
        return code;
    }
    if (place.bytes != shard->bytes) {
        return fail_member(r, m[BYTES].node, "bytes",
                           "are not as many as shape, layout and dtype make");
    }
    code = read_blocks(r, m + PLACE, &place);
    shard->file = place.file;
    shard->offset = place.offset;
    shard->crc = place.crc;
    shard->crcs = place.crcs;
    return code;
}

/* ---- reading: sparse shards ---- */

/* Which elements a layer holds: "row" and "rows", for whose runs room was counted. */
static mls_code read_rows(reader *r, const member *m, size_t elements, mls_layer *layer)
{
    mls_extent *runs = r->index.extents + r->extents_used;
    uint64_t row;
    const mls_code code = read_number(r, &m[ROW], 1, SIZE_MAX, &row);
    if (code != MLS_OK) {
        return code;
    }
    mls_rows rows = mls_layer_rows((size_t)row, elements);
    if (!mls_layer_rows_read(&rows, mls_json_text(r->json, m[ROWS].node), runs,
                             &layer->run_count)) {
        return fail_member(r, m[ROWS].node, "rows",
                           "are not rows passed over and rows held in turn, as many as "
                           "the shard has");
    }
    /* only what passed takes room: a refused index is freed as a whole */
    layer->row = (size_t)row;
    layer->runs = runs;
    r->extents_used += layer->run_count;
    return MLS_OK;
}

/* How a layer is coded: "codec" and "frames", for whose lengths room was counted. */
static mls_code read_frames(reader *r, const member *m, size_t item, size_t elements,
                            mls_layer *layer)
{
    mls_frames *frames = &r->index.frames[r->frames_used];
    const int codec =
        which_name(mls_json_text(r->json, m[CODEC].node), codec_of, MLS_CODEC_COUNT);
    if (codec == MLS_CODEC_COUNT) {
        return fail_member(r, m[CODEC].node, "codec",
                           "is one that this mlstate does not know: use a newer one");
    }
    *frames = (mls_frames){.codec = (mls_codec)codec,
                           .item = item,
                           .bytes = mls_layer_held(layer, elements) * item,
                           .ends = r->index.ends + r->ends_used};
    /* as many lengths as frames: what a layer claims to hold is bounded by the text, or
     * there would be no room for all of them */
    const mls_text text = mls_json_text(r->json, m[FRAMES].node);
    const size_t count = mls_frames_count(frames->bytes);
    if (count == 0 || count != mls_frames_text_count(text) ||
        !mls_frames_read(frames, text)) {
        return fail_member(r, m[FRAMES].node, "frames",
                           "are not a length for each MiB of the layer's elements");
    }
    layer->frames = frames;
    r->frames_used++;
    r->ends_used += count;
    return MLS_OK;
}

/* One layer.  What it holds comes before its bytes, which must be as many as that makes,
 * and some: a layer that holds nothing says nothing. */
static mls_code read_layer(reader *r, mls_json_node node, const mls_index_shard *shard,
                           bool first, mls_layer *layer)
{
    member m[LAYER_MEMBERS];
    const size_t size = mls_dtype_of(shard->dtype)->item_bytes;
    const size_t elements = shard->bytes / size;
    memcpy(m, layer_members, sizeof m);
    if (mls_json_type_of(r->json, node) != MLS_JSON_OBJECT) {
        return fail_member(r, node, "layers", "hold what is no object");
    }
    mls_code code = find_members(r, node, m, LAYER_MEMBERS);
    if (code != MLS_OK) {
        return code;
    }
    if ((m[ROW].node == MLS_JSON_NONE) != (m[ROWS].node == MLS_JSON_NONE)) {
        return fail_member(r, node, m[ROW].node == MLS_JSON_NONE ? "row" : "rows",
                           "is missing");
    }
    if ((m[CODEC].node == MLS_JSON_NONE) != (m[FRAMES].node == MLS_JSON_NONE)) {
        return fail_member(r, node, m[CODEC].node == MLS_JSON_NONE ? "codec" : "frames",
                           "is missing");
    }
    if (m[ROW].node == MLS_JSON_NONE && !first) {
        return fail_member(r, node, "rows", "is missing: only the first layer is full");
    }
    /* place first: what it says of bytes is checked against the rows below */
    code = read_place(r, m, layer);
    if (code == MLS_OK && m[ROW].node != MLS_JSON_NONE) {
        code = read_rows(r, m, elements, layer);
    }
    if (code == MLS_OK && m[CODEC].node != MLS_JSON_NONE) {
        code = read_frames(r, m, size, elements, layer);
    }
    if (code != MLS_OK) {
        return code;
    }
    const size_t made =
        layer->frames == NULL
            ? mls_layer_held(layer, elements) * size
            : layer->frames->ends[mls_frames_count(layer->frames->bytes) - 1];
    if (layer->bytes == 0 || layer->bytes != made) {
        return fail_member(r, m[BYTES - PLACE].node, "bytes",
                           "are not as many as its elements or frames make, and some");
    }
    return read_blocks(r, m, layer);
}

/* A shard with layers.  Which of their elements are visible is worked out at once, into
 * room that was counted, so that nobody has to later. */
static mls_code read_layers(reader *r, const member *m, mls_index_shard *shard)
{
    mls_layers *layers = &r->index.sparse[r->sparse_used++];
    const mls_json_node array = m[LAYERS].node;
    size_t elements;
    mls_code code = read_part(r, m, shard, &elements);
    /* one that had both could be read in two ways */
    for (int i = PLACE; code == MLS_OK && i <= BLOCKS; i++) {
        if (m[i].node != MLS_JSON_NONE) {
            code = fail_member(r, m[i].node, m[i].key, "is beside \"layers\"");
        }
    }
    if (code != MLS_OK) {
        return code;
    }
    if (mls_json_size(r->json, array) > MLS_LAYERS_MOST) {
        fail_member(r, array, "layers", "are too many");
        mls_status_expected(r->st, "at most %d", (int)MLS_LAYERS_MOST);
        return MLS_E_FORMAT;
    }
    /* its layers lie together, behind those of the shards before it */
    layers->list = r->index.layers + r->layers_used;
    mls_json_node node = mls_json_first(r->json, array);
    for (; code == MLS_OK && node != MLS_JSON_NONE; node = mls_json_next(r->json, node)) {
        code =
            read_layer(r, node, shard, layers->count == 0, &layers->list[layers->count]);
        layers->count++;
    }
    if (code == MLS_OK) {
        r->layers_used += layers->count;
        r->extents_used +=
            mls_layers_resolve(layers, elements, r->index.extents + r->extents_used);
        shard->layers = layers;
    }
    return code;
}

/* In its one place, all members of which must be there, or in layers. */
static mls_code read_places(reader *r, mls_json_node node, const member *m,
                            mls_index_shard *shard)
{
    if (m[LAYERS].node != MLS_JSON_NONE) {
        return read_layers(r, m, shard);
    }
    for (int i = PLACE; i < BLOCKS; i++) {
        if (m[i].node == MLS_JSON_NONE) {
            return refuse_member(r, node, &m[i]);
        }
    }
    return read_plain(r, m, shard);
}

/* Everything that a shard says of itself.
 *
 * Member by member, each on the shoulders of those before: the shape before the layout
 * that cuts it, both before the bytes that must fit them, the bytes before the checksums
 * that cover them. */
static mls_code read_shard(reader *r, mls_json_node node, member *m,
                           mls_index_shard *shard)
{
    mls_code code = MLS_OK;
    /* to version 1 "layers" is one of the members that are passed over */
    const size_t count = r->version == MLS_INDEX_VERSION ? LAYERS : MEMBERS;
    const size_t bad = mls_json_members(r->json, node, m, count);
    /* known first, so that whatever is wrong can be said with it */
    r->name = m[NAME].node == MLS_JSON_NONE ? (mls_text){0}
                                            : mls_json_text(r->json, m[NAME].node);
    if (bad < count) {
        return refuse_member(r, node, &m[bad]);
    }
    const mls_text dtype = mls_json_text(r->json, m[DTYPE].node);
    if (!mls_dtype_from_file_name(dtype.data, dtype.length, &shard->dtype)) {
        return fail_member(r, m[DTYPE].node, "dtype", "is unknown");
    }
    if ((code = read_id(r, m, &shard->id)) != MLS_OK ||
        (code = read_shape(r, &m[SHAPE], shard)) != MLS_OK ||
        (code = read_layout(r, &m[LAYOUT], &shard->layout)) != MLS_OK ||
        (code = read_axes(r, &m[AXES], shard)) != MLS_OK ||
        (code = read_tier(r, &m[TIER], &shard->tier)) != MLS_OK ||
        (code = read_number(r, &m[VERSION], 1, INT64_MAX, &shard->version)) != MLS_OK ||
        (code = read_size(r, &m[PART], PTRDIFF_MAX, &shard->part)) != MLS_OK) {
        return code;
    }
    return read_places(r, node, m, shard);
}

/* ---- reading: the whole ---- */

/* How many there will be of what, at most. */
typedef struct needs {
    size_t dims, axes, crcs, sparse, layers, extents, frames, ends;
} needs;

/* Checksums of a shard or a layer, by the digits that there are. */
static size_t count_crcs(const reader *r, mls_json_node blocks)
{
    return 1 + (blocks == MLS_JSON_NONE
                    ? 0
                    : mls_json_text(r->json, blocks).length / MLS_CRC_DIGITS);
}

/* What the layers of one shard will need: for each run one extent, and what resolving
 * takes, which is that of mls_layers_room. */
static void count_layers(const reader *r, mls_json_node array, needs *n)
{
    enum { COUNTED_BLOCKS, COUNTED_ROWS, COUNTED_FRAMES, COUNT };
    member m[COUNT] = {[COUNTED_BLOCKS] = MEMBER("blocks", MLS_JSON_STRING, false),
                       [COUNTED_ROWS] = MEMBER("rows", MLS_JSON_STRING, false),
                       [COUNTED_FRAMES] = MEMBER("frames", MLS_JSON_STRING, false)};
    n->sparse++;
    n->extents++;
    for (mls_json_node node = mls_json_first(r->json, array); node != MLS_JSON_NONE;
         node = mls_json_next(r->json, node)) {
        if (mls_json_type_of(r->json, node) != MLS_JSON_OBJECT) {
            continue; /* refused when it is read */
        }
        (void)mls_json_members(r->json, node, m, COUNT);
        const mls_json_node rows = m[COUNTED_ROWS].node;
        const mls_json_node frames = m[COUNTED_FRAMES].node;
        n->layers++;
        n->crcs += count_crcs(r, m[COUNTED_BLOCKS].node);
        n->extents += rows == MLS_JSON_NONE
                          ? 2
                          : 3 * mls_layer_rows_count(mls_json_text(r->json, rows));
        if (frames != MLS_JSON_NONE) {
            n->frames++;
            n->ends += mls_frames_text_count(mls_json_text(r->json, frames));
        }
    }
}

/* How much the shards will need of each array: counted generously, from values and
 * digits that really are in the text. */
static mls_code count_needs(reader *r, mls_json_node shards, needs *n)
{
    enum { DIMS, AXIS, CRCS, COUNTED_LAYERS, COUNT };
    member m[COUNT] = {[DIMS] = MEMBER("shape", MLS_JSON_ARRAY, false),
                       [AXIS] = MEMBER("axes", MLS_JSON_ARRAY, false),
                       [CRCS] = MEMBER("blocks", MLS_JSON_STRING, false),
                       [COUNTED_LAYERS] = MEMBER("layers", MLS_JSON_ARRAY, false)};
    const size_t count = r->version == MLS_INDEX_VERSION ? COUNTED_LAYERS : COUNT;
    for (mls_json_node node = mls_json_first(r->json, shards); node != MLS_JSON_NONE;
         node = mls_json_next(r->json, node)) {
        if (mls_json_type_of(r->json, node) != MLS_JSON_OBJECT) {
            return fail_member(r, node, "shards", "hold what is no object");
        }
        m[COUNTED_LAYERS].node = MLS_JSON_NONE;
        (void)mls_json_members(r->json, node, m, count); /* types are asked later */
        n->dims +=
            m[DIMS].node == MLS_JSON_NONE ? 0 : mls_json_size(r->json, m[DIMS].node);
        n->axes +=
            m[AXIS].node == MLS_JSON_NONE ? 0 : mls_json_size(r->json, m[AXIS].node);
        n->crcs += count_crcs(r, m[CRCS].node);
        if (m[COUNTED_LAYERS].node != MLS_JSON_NONE) {
            count_layers(r, m[COUNTED_LAYERS].node, n);
        }
    }
    return MLS_OK;
}

/* All arrays at once: their addresses must not change any more, since shards point into
 * them as soon as they are read. */
static mls_code allocate(reader *r, mls_json_node files, mls_json_node shards)
{
    mls_index *x = &r->index;
    needs n = {0};
    const mls_code code = count_needs(r, shards, &n);
    if (code != MLS_OK) {
        return code;
    }
    x->file_count = mls_json_size(r->json, files);
    x->shard_count = mls_json_size(r->json, shards);
    if ((x->files = mls_alloc(x->file_count, sizeof *x->files)) == NULL ||
        (x->shards = mls_alloc(x->shard_count, sizeof *x->shards)) == NULL ||
        (x->dims = mls_alloc(n.dims, sizeof *x->dims)) == NULL ||
        (x->axes = mls_alloc(n.axes, sizeof *x->axes)) == NULL ||
        (x->crcs = mls_alloc(n.crcs, sizeof *x->crcs)) == NULL ||
        (x->sparse = mls_alloc(n.sparse, sizeof *x->sparse)) == NULL ||
        (x->layers = mls_alloc(n.layers, sizeof *x->layers)) == NULL ||
        (x->extents = mls_alloc(n.extents, sizeof *x->extents)) == NULL ||
        (x->frames = mls_alloc(n.frames, sizeof *x->frames)) == NULL ||
        (x->ends = mls_alloc(n.ends, sizeof *x->ends)) == NULL) {
        return mls_fail(r->st, MLS_E_MEMORY, "no memory for an index of %zu shards",
                        x->shard_count);
    }
    return MLS_OK;
}

/* Whether it is an index, and of a version that is understood: asked before anything
 * else, since what a later version has besides, or lacks, is not known. */
static mls_code read_format(reader *r)
{
    enum { FORMAT, FORMAT_NUMBER, COUNT };
    member m[COUNT] = {[FORMAT] = MEMBER("format", MLS_JSON_STRING, true),
                       [FORMAT_NUMBER] = MEMBER("format_version", MLS_JSON_NUMBER, true)};
    const mls_code code = find_members(r, 0, m, COUNT);
    if (code != MLS_OK) {
        return code;
    }
    if (!mls_text_is(mls_json_text(r->json, m[FORMAT].node), "mlstate.index")) {
        return fail_member(r, m[FORMAT].node, "format", "is not \"mlstate.index\"");
    }
    if (!mls_json_u64(r->json, m[FORMAT_NUMBER].node, &r->version) ||
        (r->version != MLS_INDEX_VERSION && r->version != MLS_INDEX_SPARSE)) {
        fail_member(r, m[FORMAT_NUMBER].node, "format_version",
                    "is one that this mlstate does not read: use a newer one");
        mls_status_expected(r->st, "%d or %d", (int)MLS_INDEX_VERSION,
                            (int)MLS_INDEX_SPARSE);
        return MLS_E_FORMAT;
    }
    return MLS_OK;
}

/* The members in front of the lists. */
static mls_code read_head(reader *r, const member *generation, const member *rank,
                          const member *world)
{
    const mls_text text = mls_json_text(r->json, generation->node);
    uint32_t half;
    if (text.length != MLS_GENERATION_DIGITS || !mls_crc_from_digits(text.data, &half) ||
        !mls_crc_from_digits(text.data + MLS_CRC_DIGITS, &half)) {
        return fail_member(r, generation->node, "generation",
                           "is not 16 hexadecimal digits");
    }
    memcpy(r->index.generation, text.data, text.length);
    const mls_code code = read_number(r, world, 1, WORLD_MOST, &r->index.world_size);
    return code == MLS_OK
               ? read_number(r, rank, 0, r->index.world_size - 1, &r->index.rank)
               : code;
}

/* Each file and each shard, in the order of the text. */
static mls_code read_lists(reader *r, mls_json_node files, mls_json_node shards)
{
    member m[MEMBERS];
    memcpy(m, shard_members, sizeof m);
    m[LAYERS].node = MLS_JSON_NONE; /* should nobody look for it */
    /* where a shard may have layers instead, that is said when its place is read */
    for (int i = PLACE; r->version != MLS_INDEX_VERSION && i < BLOCKS; i++) {
        m[i].needed = false;
    }
    mls_code code = allocate(r, files, shards);
    mls_json_node node = mls_json_first(r->json, files);
    for (size_t i = 0; code == MLS_OK && i < r->index.file_count; i++) {
        code = mls_json_type_of(r->json, node) == MLS_JSON_OBJECT
                   ? read_file(r, node, &r->index.files[i])
                   : fail_member(r, node, "files", "hold what is no object");
        node = mls_json_next(r->json, node);
    }
    node = code == MLS_OK ? mls_json_first(r->json, shards) : MLS_JSON_NONE;
    for (size_t i = 0; code == MLS_OK && i < r->index.shard_count; i++) {
        code = read_shard(r, node, m, &r->index.shards[i]);
        node = mls_json_next(r->json, node);
    }
    return code;
}

/* Everything but the seal. */
static mls_code read_index(reader *r)
{
    enum { GENERATION, RANK, WORLD, FILES, SHARDS, COUNT };
    member m[COUNT] = {[GENERATION] = MEMBER("generation", MLS_JSON_STRING, true),
                       [RANK] = MEMBER("rank", MLS_JSON_NUMBER, true),
                       [WORLD] = MEMBER("world_size", MLS_JSON_NUMBER, true),
                       [FILES] = MEMBER("files", MLS_JSON_ARRAY, true),
                       [SHARDS] = MEMBER("shards", MLS_JSON_ARRAY, true)};
    mls_code code = read_format(r);
    if (code != MLS_OK || (code = find_members(r, 0, m, COUNT)) != MLS_OK ||
        (code = read_head(r, &m[GENERATION], &m[RANK], &m[WORLD])) != MLS_OK ||
        (code = read_lists(r, m[FILES].node, m[SHARDS].node)) != MLS_OK) {
        return code;
    }
    return mls_index_arrange(&r->index, r->st);
}

/* As any JSON, whoever wrote it. */
static mls_code parse_any(const char *text, size_t length, mls_index *out, mls_status *st)
{
    mls_json *json = NULL;
    mls_code code =
        mls_json_parse(text, length, (mls_json_limits){DEPTH, NODES}, &json, st);
    if (code != MLS_OK) {
        return code;
    }
    reader r = {.json = json, .index = {.json = json}, .st = st};
    /* a sealed text starts with a brace, so the root is an object */
    code = read_index(&r);
    if (code != MLS_OK) {
        mls_index_fini(&r.index);
        return code;
    }
    mls_json_forget(json); /* names stay, values are not asked for any more */
    *out = r.index;
    return MLS_OK;
}

/* The seal comes first: of a text that was damaged nothing is parsed, and whatever is
 * found wrong behind it was written so.  What is not in our own words, or is not good, is
 * read once more. */
mls_code mls_index_parse(const char *text, size_t length, const mls_crc_kernels *crc,
                         mls_index *out, mls_status *st)
{
    mls_code code = mls_seal_check(text, length, crc, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_index_lines_read(text, length, out, st);
    return code == MLS_E_FORMAT ? parse_any(text, length, out, st) : code;
}
