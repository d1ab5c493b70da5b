/* index_read: parses an index, and refuses invalid files, kinds, shards and layers.
 *
 * The reader makes two passes over the document. The first counts the elements that the
 * shards need; the second fills the index shard by shard, with a cursor for each column:
 * an array, or a string of numbers or checksums. Each count is bounded by a number of
 * JSON values or digits, so memory is proportional to the length of the text. Errors are
 * MLS_E_FORMAT or MLS_E_MEMORY; they name the shard once its name has been read. */
#include "checkpoint/index/index.h"

#include "base/memory.h"
#include "base/size.h"
#include "checkpoint/index/index_read_values.h"
#include "io/json_checksum.h"
#include "safetensors/safetensors.h"

#include <stdlib.h>
#include <string.h>

enum {
    DEPTH = 8,           /* an index needs 5 */
    NODES = 64 << 20,    /* JSON values; more than the rows in 512 MiB of text */
    HEADER_BYTES = 8,    /* the smallest prefix of a shard file */
    WORLD_MOST = 1 << 24 /* ranks */
};

typedef mls_json_member member;  /* an entry for mls_index_find_members */
typedef mls_index_column column; /* copied before a read, so that errors show the value */

/* Columns of the shards: strings of numbers and digests first, then arrays. */
enum {
    KIND,
    SHAPE,
    PART,
    VERSION,
    LAYER_COUNT,
    DIGEST,
    SHARD_NUMBERS,
    NAME = SHARD_NUMBERS,
    SHARD_COLUMNS
};

/* Columns of the layers: strings of numbers and checksums first, then arrays. */
enum {
    FILE_NUMBER,
    OFFSET,
    BYTES,
    ROW,
    CRC,
    BLOCKS,
    LAYER_NUMBERS,
    ROWS = LAYER_NUMBERS,
    CODEC,
    FRAMES,
    LAYER_COLUMNS
};

enum { LAYER_ARRAYS = LAYER_COLUMNS - LAYER_NUMBERS };

/* Properties that many shards share, and their nodes in the text, for errors. */
typedef struct shard_kind {
    mls_section section;
    mls_str state;
    bool has_state;
    mls_dtype dtype;
    mls_layout layout;
    const signed char *axes; /* NULL: those of the parameter */
    size_t axis_count;
    mls_tier tier;
    mls_json_node layout_node, axes_node;
} shard_kind;

typedef struct reader {
    mls_index_source in;
    mls_index index; /* counts are final; arrays are being filled */
    shard_kind *kinds;
    size_t kind_count;
    column shards[SHARD_NUMBERS], layers[LAYER_NUMBERS];
    mls_json_node name, arrays[LAYER_ARRAYS]; /* next values, or MLS_JSON_NONE */
    size_t layer_rows, layer_rows_read;       /* rows of the layer table */
    size_t dims_used, axes_used, crcs_used;   /* used elements of the arrays */
    size_t lists_used, layers_used, ranges_used, frames_used, ends_used; /* the same */
} reader;

/* These three are for mls_index_read_word, which takes enums as int. */
static const char *section_of(int i)
{
    return mls_section_name((mls_section)i);
}

static const char *codec_of(int i)
{
    return mls_codec_name((mls_codec)i);
}

/* Skips the empty name of MLS_TIER_NONE, which is never written. */
static const char *tier_of(int i)
{
    return mls_tier_name((mls_tier)(i + 1));
}

/* ---- files ---- */

/* Read the table of files from `object`: an array of paths, and columns of lengths and
 * header checksums. Each file is at least as long as its header's length field. */
static mls_code read_files(reader *r, mls_json_node object)
{
    enum { PATH, FILE_BYTES, HEADER_CRC, COUNT };
    member m[COUNT] = {[PATH] = MLS_INDEX_MEMBER("path", MLS_JSON_ARRAY, true),
                       [FILE_BYTES] = MLS_INDEX_MEMBER("bytes", MLS_JSON_STRING, true),
                       [HEADER_CRC] =
                           MLS_INDEX_MEMBER("header_crc32c", MLS_JSON_STRING, true)};
    mls_index *x = &r->index;
    mls_code code = mls_index_find_members(&r->in, object, m, COUNT);
    if (code != MLS_OK) {
        return code;
    }
    column columns[] = {mls_index_open_column(&r->in, &m[FILE_BYTES]),
                        mls_index_open_column(&r->in, &m[HEADER_CRC])};
    x->file_count = mls_json_size(r->in.json, m[PATH].node);
    if ((x->files = mls_alloc(x->file_count, sizeof *x->files)) == NULL) {
        return mls_fail(r->in.st, MLS_E_MEMORY, "no memory for an index of %zu files",
                        x->file_count);
    }
    mls_json_node node = mls_json_first(r->in.json, m[PATH].node);
    for (size_t i = 0; i < x->file_count; i++, node = mls_json_next(r->in.json, node)) {
        mls_index_file *file = &x->files[i];
        mls_str path;
        if ((code = mls_index_read_text(&r->in, node, "path", &path)) != MLS_OK) {
            return code;
        }
        if (!mls_index_is_path(path)) {
            return mls_index_fail_value(&r->in, node, "path",
                                        "is not the path of a shard file");
        }
        memcpy(file->path, path.data, path.length);
        if ((code = mls_index_next_number(&r->in, &columns[0], HEADER_BYTES, INT64_MAX,
                                          &file->bytes)) != MLS_OK ||
            (code = mls_index_next_crc(&r->in, &columns[1], &file->header_crc)) !=
                MLS_OK) {
            return code;
        }
    }
    return mls_index_end_columns(&r->in, columns, 2);
}

/* ---- kinds ---- */

/* Read the layout step `node`, [axis or name, parts], the only array with mixed types in
 * the format. Returns false if it has another form. */
static bool read_step(reader *r, mls_json_node node, mls_layout_step *step)
{
    uint64_t axis, parts;
    const mls_json_node first = mls_json_first(r->in.json, node);
    if (mls_json_type_of(r->in.json, node) != MLS_JSON_ARRAY ||
        mls_json_size(r->in.json, node) != 2 ||
        !mls_json_u64(r->in.json, mls_json_next(r->in.json, first), &parts) ||
        !mls_size_from_u64(parts, &step->parts)) {
        return false;
    }
    if (mls_json_type_of(r->in.json, first) == MLS_JSON_STRING) {
        return mls_layout_step_from_name(mls_json_text(r->in.json, first), &step->axis);
    }
    if (!mls_json_u64(r->in.json, first, &axis) || axis >= MLS_LAYOUT_RANK) {
        return false;
    }
    step->axis = (int)axis;
    return true;
}

/* Read the steps of the layout that is member `m` into `layout`, which is zeroed.
 * read_part checks later, for each shard, whether they fit its shape. */
static mls_code read_layout(reader *r, const member *m, mls_layout *layout)
{
    if (mls_json_size(r->in.json, m->node) > MLS_LAYOUT_STEPS) {
        return mls_index_fail_value(&r->in, m->node, m->key, "has too many steps");
    }
    for (mls_json_node node = mls_json_first(r->in.json, m->node); node != MLS_JSON_NONE;
         node = mls_json_next(r->in.json, node)) {
        if (!read_step(r, node, &layout->steps[layout->count])) {
            return mls_index_fail_value(&r->in, node, m->key,
                                        "has a step that is not [axis or name, parts]");
        }
        layout->count++;
    }
    return MLS_OK;
}

/* Read member `m` into `kind`: for each axis of a state its parameter's axis, or null.
 * The parameter may be in another index, so the axes are not checked against it. */
static mls_code read_axes(reader *r, const member *m, shard_kind *kind)
{
    signed char *axes = r->index.axes + r->axes_used;
    const size_t count = mls_json_size(r->in.json, m->node);
    mls_json_node node = mls_json_first(r->in.json, m->node);
    for (size_t i = 0; i < count; i++, node = mls_json_next(r->in.json, node)) {
        uint64_t axis;
        if (mls_json_type_of(r->in.json, node) == MLS_JSON_NULL) {
            axes[i] = MLS_NO_AXIS;
        } else if (mls_json_u64(r->in.json, node, &axis) && axis < MLS_LAYOUT_RANK) {
            axes[i] = (signed char)axis;
        } else {
            return mls_index_fail_value(&r->in, node, m->key,
                                        "must contain only axes or null");
        }
    }
    kind->axes = axes;
    kind->axis_count = count;
    r->axes_used += count;
    return MLS_OK;
}

/* Read member `m`, the optimizer state of a kind, which may be absent. A dot separates
 * parameter and state in a state dict key, so a state contains none. */
static mls_code read_state(reader *r, const member *m, shard_kind *kind)
{
    kind->has_state = m->node != MLS_JSON_NONE;
    if (!kind->has_state) {
        return MLS_OK;
    }
    if (kind->section != MLS_OPTIM_STATE) {
        return mls_index_fail_value(&r->in, m->node, "state",
                                    "outside the section \"optim_state\"");
    }
    kind->state = mls_json_text(r->in.json, m->node);
    return kind->state.length > 0 &&
                   memchr(kind->state.data, '.', kind->state.length) != NULL
               ? mls_index_fail_value(&r->in, m->node, "state", "has a dot")
               : MLS_OK;
}

enum { SECTION, STATE, DTYPE, LAYOUT, AXES, TIER, KIND_MEMBERS };

/* Fill in one kind from its members `m`, which mls_index_find_members has filled. Tiers
 * are read without MLS_TIER_NONE, which no file contains: -1 means that the member is
 * absent. */
static mls_code read_kind(reader *r, const member *m, shard_kind *kind)
{
    int section, tier = -1;
    mls_code code = mls_index_read_word(
        &r->in, m[SECTION].node, "section", section_of, MLS_SECTION_COUNT,
        "is not \"params\", \"optim_state\" or \"states\"", &section);
    if (code != MLS_OK) {
        return code;
    }
    kind->section = (mls_section)section;
    kind->layout_node = m[LAYOUT].node;
    kind->axes_node = m[AXES].node;
    const mls_str dtype = mls_json_text(r->in.json, m[DTYPE].node);
    if (!mls_dtype_from_file_name(dtype.data, dtype.length, &kind->dtype)) {
        return mls_index_fail_value(&r->in, m[DTYPE].node, "dtype", "is unknown");
    }
    if ((code = read_state(r, &m[STATE], kind)) != MLS_OK ||
        (code = read_layout(r, &m[LAYOUT], &kind->layout)) != MLS_OK ||
        (m[AXES].node != MLS_JSON_NONE &&
         (code = read_axes(r, &m[AXES], kind)) != MLS_OK) ||
        (m[TIER].node != MLS_JSON_NONE &&
         (code = mls_index_read_word(
              &r->in, m[TIER].node, "tier", tier_of, MLS_TIER_COUNT - 1,
              "is not \"hot\", \"warm\" or \"cold\"", &tier)) != MLS_OK)) {
        return code;
    }
    kind->tier = (mls_tier)(tier + 1);
    return MLS_OK;
}

/* Read the kinds in `array` into `r->kinds`; all axes are counted first, to allocate. */
static mls_code read_kinds(reader *r, mls_json_node array)
{
    member m[KIND_MEMBERS] = {[SECTION] =
                                  MLS_INDEX_MEMBER("section", MLS_JSON_STRING, true),
                              [STATE] = MLS_INDEX_MEMBER("state", MLS_JSON_STRING, false),
                              [DTYPE] = MLS_INDEX_MEMBER("dtype", MLS_JSON_STRING, true),
                              [LAYOUT] = MLS_INDEX_MEMBER("layout", MLS_JSON_ARRAY, true),
                              [AXES] = MLS_INDEX_MEMBER("axes", MLS_JSON_ARRAY, false),
                              [TIER] = MLS_INDEX_MEMBER("tier", MLS_JSON_STRING, false)};
    const size_t count = mls_json_size(r->in.json, array);
    size_t axes = 0;
    for (mls_json_node node = mls_json_first(r->in.json, array); node != MLS_JSON_NONE;
         node = mls_json_next(r->in.json, node)) {
        const mls_json_node axes_node = mls_json_find(r->in.json, node, "axes");
        axes += axes_node == MLS_JSON_NONE ? 0 : mls_json_size(r->in.json, axes_node);
    }
    if ((r->kinds = mls_alloc(count, sizeof *r->kinds)) == NULL ||
        (r->index.axes = mls_alloc(axes, sizeof *r->index.axes)) == NULL) {
        return mls_fail(r->in.st, MLS_E_MEMORY, "no memory for %zu kinds of shards",
                        count);
    }
    r->kind_count = count;
    mls_code code = MLS_OK;
    mls_json_node node = mls_json_first(r->in.json, array);
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        code = mls_json_type_of(r->in.json, node) == MLS_JSON_OBJECT
                   ? mls_index_find_members(&r->in, node, m, KIND_MEMBERS)
                   : mls_index_fail_value(&r->in, node, "kinds", "must contain objects");
        code = code == MLS_OK ? read_kind(r, m, &r->kinds[i]) : code;
        node = mls_json_next(r->in.json, node);
    }
    return code;
}

/* ---- layers: byte ranges in files ---- */

/* Read the next number of column `c`, from 0 to `most`, into `*out`. */
static mls_code next_size(reader *r, column *c, size_t most, size_t *out)
{
    uint64_t value;
    const mls_code code = mls_index_next_number(&r->in, c, 0, most, &value);
    if (code == MLS_OK) {
        *out = (size_t)value;
    }
    return code;
}

/* Return the value at `*cursor` in an array column, and advance the cursor.
 * MLS_JSON_NONE: the column is absent, or the value is null. */
static mls_json_node next_value(const reader *r, mls_json_node *cursor)
{
    const mls_json_node node = *cursor;
    if (node == MLS_JSON_NONE) {
        return node;
    }
    *cursor = mls_json_next(r->in.json, node);
    return mls_json_type_of(r->in.json, node) == MLS_JSON_NULL ? MLS_JSON_NONE : node;
}

/* Read the next layer's file, offset and length, and check that the file is that long, as
 * recorded. The actual length is checked when the file is opened. */
static mls_code read_range(reader *r, mls_layer *layer)
{
    const column file = r->layers[FILE_NUMBER], offset = r->layers[OFFSET];
    uint64_t end;
    mls_code code = next_size(r, &r->layers[FILE_NUMBER], SIZE_MAX, &layer->file);
    if (code != MLS_OK) {
        return code;
    }
    if (layer->file >= r->index.file_count) {
        mls_index_fail_column(&r->in, &file, "is not one of the files");
        return mls_status_expected(r->in.st, "below %zu", r->index.file_count);
    }
    if ((code = mls_index_next_number(&r->in, &r->layers[OFFSET], HEADER_BYTES, INT64_MAX,
                                      &layer->offset)) != MLS_OK ||
        (code = next_size(r, &r->layers[BYTES], SIZE_MAX, &layer->bytes)) != MLS_OK) {
        return code;
    }
    if (!mls_u64_add(layer->offset, layer->bytes, &end) ||
        end > r->index.files[layer->file].bytes) {
        mls_index_fail_column(&r->in, &offset,
                              "plus bytes exceeds the length of the file");
        return mls_status_expected(r->in.st, "%zu bytes before %llu", layer->bytes,
                                   (unsigned long long)r->index.files[layer->file].bytes);
    }
    return MLS_OK;
}

/* Read the checksums of the layer and of its blocks. A layer of one block stores only the
 * layer's. The two are not compared: verification reads the blocks. */
static mls_code read_crcs(reader *r, mls_layer *layer)
{
    const column crc = r->layers[CRC];
    const size_t count = mls_safetensors_blocks(layer->bytes);
    uint32_t *crcs = r->index.crcs + r->crcs_used;
    mls_code code = mls_index_next_crc(&r->in, &r->layers[CRC], &layer->crc);
    if (code != MLS_OK) {
        return code;
    }
    if (layer->bytes == 0 && layer->crc != 0) {
        return mls_index_fail_column(&r->in, &crc, "of an empty layer must be 00000000");
    }
    if (count > 1 && r->layers[BLOCKS].rest.length / MLS_CRC_DIGITS < count) {
        return mls_index_fail_column(&r->in, &r->layers[BLOCKS],
                                     "must have 8 digits for each MiB of the layers");
    }
    crcs[0] = layer->crc; /* allocated for each row of the layer table */
    for (size_t i = 0; code == MLS_OK && count > 1 && i < count; i++) {
        code = mls_index_next_crc(&r->in, &r->layers[BLOCKS], &crcs[i]);
    }
    layer->crcs = crcs;
    r->crcs_used += count > 1 ? count : 1;
    return code;
}

/* Read a layer's row ranges from the string `node`; the shard has `elements` elements. */
static mls_code read_rows(reader *r, mls_json_node node, size_t elements,
                          mls_layer *layer)
{
    mls_row_range *ranges = r->index.row_ranges + r->ranges_used;
    mls_rows rows = mls_layer_rows(layer->row, elements);
    mls_str text;
    const mls_code code = mls_index_read_text(&r->in, node, "rows", &text);
    if (code != MLS_OK) {
        return code;
    }
    if (!mls_layer_rows_read(&rows, text, ranges, &layer->stored_count)) {
        return mls_index_fail_value(&r->in, node, "rows",
                                    "must alternate numbers of skipped and stored rows, "
                                    "at most as many as the shard has");
    }
    layer->stored = ranges;
    r->ranges_used += layer->stored_count;
    return MLS_OK;
}

/* Read the lengths of a layer's frames from the string `node`, the codec from
 * `codec_node`. `item` is the bytes of an element, `elements` the elements of the whole
 * shard. */
static mls_code read_frames(reader *r, mls_json_node codec_node, mls_json_node node,
                            size_t item, size_t elements, mls_layer *layer)
{
    mls_compressed_frames *frames = &r->index.frames[r->frames_used];
    int codec;
    mls_str text;
    mls_code code = mls_index_read_word(
        &r->in, codec_node, "codec", codec_of, MLS_CODEC_COUNT,
        "is unknown to this version of mlstate: use a newer one", &codec);
    if (code != MLS_OK ||
        (code = mls_index_read_text(&r->in, node, "frames", &text)) != MLS_OK) {
        return code;
    }
    *frames =
        (mls_compressed_frames){.codec = (mls_codec)codec,
                                .item = item,
                                .bytes = mls_layer_element_count(layer, elements) * item,
                                .ends = r->index.ends + r->ends_used};
    /* memory was allocated by the length of the text, so the frames are counted before
     * reading */
    const size_t count = mls_compressed_frames_count(frames->bytes);
    if (count == 0 || count != mls_compressed_frames_text_count(text) ||
        !mls_compressed_frames_read(frames, text)) {
        return mls_index_fail_value(
            &r->in, node, "frames",
            "must have a length for each MiB of the layer's elements");
    }
    layer->frames = frames;
    r->frames_used++;
    r->ends_used += count;
    return MLS_OK;
}

/* Read rows and compression of the next layer of a shard with `elements` elements.
 * `first`: it is the shard's first layer, the only one that may be full. */
static mls_code read_coding(reader *r, const mls_index_shard *shard, size_t elements,
                            bool first, mls_layer *layer)
{
    const column row = r->layers[ROW];
    mls_json_node values[LAYER_ARRAYS];
    mls_code code = MLS_OK;
    for (int i = 0; i < LAYER_ARRAYS; i++) {
        values[i] = next_value(r, &r->arrays[i]);
    }
    const mls_json_node rows = values[0], codec = values[CODEC - ROWS],
                        frames = values[FRAMES - ROWS];
    if (row.rest.data != NULL &&
        (code = next_size(r, &r->layers[ROW], SIZE_MAX, &layer->row)) != MLS_OK) {
        return code;
    }
    if ((layer->row == 0) != (rows == MLS_JSON_NONE)) {
        return layer->row != 0
                   ? mls_index_fail_column(&r->in, &row,
                                           "is not allowed in a layer without \"rows\"")
                   : mls_index_fail_value(&r->in, rows, "rows",
                                          "is not allowed in a layer without \"row\"");
    }
    if (layer->row == 0 && !first) {
        return mls_index_fail_column(&r->in, &row,
                                     "is missing: only the first layer is full");
    }
    if ((codec == MLS_JSON_NONE) != (frames == MLS_JSON_NONE)) {
        return codec != MLS_JSON_NONE
                   ? mls_index_fail_value(&r->in, codec, "codec",
                                          "is not allowed in a layer without \"frames\"")
                   : mls_index_fail_value(&r->in, frames, "frames",
                                          "is not allowed in a layer without \"codec\"");
    }
    if (layer->row != 0) {
        code = read_rows(r, rows, elements, layer);
    }
    return code == MLS_OK && codec != MLS_JSON_NONE
               ? read_frames(r, codec, frames, mls_dtype_of(shard->dtype)->item_bytes,
                             elements, layer)
               : code;
}

/* Read the next row of the layer table: layer `number` of a shard with `elements`
 * elements. Its range must have exactly the bytes of its elements or frames. */
static mls_code read_layer(reader *r, const mls_index_shard *shard, size_t elements,
                           size_t number, mls_layer *layer)
{
    const column bytes = r->layers[BYTES];
    r->layer_rows_read++;
    mls_code code = read_range(r, layer);
    if (code != MLS_OK ||
        (code = read_coding(r, shard, elements, number == 0, layer)) != MLS_OK) {
        return code;
    }
    const size_t row_bytes =
        layer->frames == NULL
            ? mls_layer_element_count(layer, elements) *
                  mls_dtype_of(shard->dtype)->item_bytes
            : layer->frames->ends[mls_compressed_frames_count(layer->frames->bytes) - 1];
    if (layer->bytes != row_bytes) {
        mls_index_fail_column(&r->in, &bytes,
                              layer->row == 0 && layer->frames == NULL
                                  ? "does not match shape, layout and dtype"
                                  : "does not match the elements or frames of the layer");
        return mls_status_expected(r->in.st, "%zu", row_bytes);
    }
    return read_crcs(r, layer);
}

/* Read all `count` layers (0: only zeros) of a shard with `elements` elements, and
 * compute the visible ranges of each. One full, uncompressed layer makes a plain shard,
 * the usual case, whose place is stored in `shard` itself. */
static mls_code read_layers(reader *r, mls_index_shard *shard, size_t elements,
                            size_t count)
{
    mls_layer first = {0};
    mls_code code = count > 0 ? read_layer(r, shard, elements, 0, &first) : MLS_OK;
    if (code != MLS_OK) {
        return code;
    }
    if (count == 1 && first.row == 0 && first.frames == NULL) {
        shard->file = first.file;
        shard->offset = first.offset;
        shard->crc = first.crc;
        shard->crcs = first.crcs;
        return MLS_OK;
    }
    mls_layers *layers = &r->index.layer_lists[r->lists_used++];
    layers->list = r->index.layers + r->layers_used;
    for (layers->count = 0; layers->count < count; layers->count++) {
        mls_layer *layer = &layers->list[layers->count];
        if (layers->count == 0) {
            *layer = first;
        } else if ((code = read_layer(r, shard, elements, layers->count, layer)) !=
                   MLS_OK) {
            return code;
        }
        if (layer->bytes == 0) {
            return mls_index_fail_column(&r->in, &r->layers[BYTES],
                                         "must not be 0 in one of several layers");
        }
    }
    r->layers_used += count;
    r->ranges_used +=
        mls_layers_resolve(layers, elements, r->index.row_ranges + r->ranges_used);
    shard->layers = layers;
    return MLS_OK;
}

/* ---- shards ---- */

/* Read one shape of a column such as "3;4,6;", each ended by a semicolon, into `shard`.
 * Its dimensions are appended to the index's shared array. */
static mls_code read_shape(reader *r, mls_index_shard *shard)
{
    column *shapes = &r->shards[SHAPE], shape = *shapes;
    size_t *dims = r->index.dims + r->dims_used;
    const char *end =
        shape.rest.length == 0 ? NULL : memchr(shape.rest.data, ';', shape.rest.length);
    mls_code code = MLS_OK;
    if (end == NULL) {
        return mls_index_fail_column(&r->in, shapes,
                                     "must have a \";\" after each shape");
    }
    shape.rest.length = (size_t)(end - shape.rest.data);
    while (code == MLS_OK && shape.rest.length > 0) {
        if (shard->rank == MLS_LAYOUT_RANK) {
            return mls_index_fail_column(&r->in, shapes, "has too many dimensions");
        }
        code = next_size(r, &shape, SIZE_MAX, &dims[shard->rank++]);
    }
    shard->shape = dims;
    r->dims_used += (size_t)shard->rank;
    shapes->offset = shape.offset + 1;
    shapes->rest.length -= (size_t)(end + 1 - shapes->rest.data);
    shapes->rest.data = end + 1;
    return code;
}

/* Read name and kind of the next shard; `*out` is its kind, which sets dtype, layout,
 * axes and tier. From here on errors name the shard. */
static mls_code read_identity(reader *r, mls_index_shard *shard, const shard_kind **out)
{
    const mls_json_node node = r->name;
    const column kind_column = r->shards[KIND];
    size_t number = 0;
    mls_str name;
    mls_code code = mls_index_read_text(&r->in, node, "name", &name);
    if (code != MLS_OK) {
        return code;
    }
    r->name = mls_json_next(r->in.json, node);
    r->in.name = name;
    if ((code = next_size(r, &r->shards[KIND], SIZE_MAX, &number)) != MLS_OK) {
        return code;
    }
    if (number >= r->kind_count) {
        mls_index_fail_column(&r->in, &kind_column, "is not one of the kinds");
        return mls_status_expected(r->in.st, "below %zu", r->kind_count);
    }
    const shard_kind *kind = &r->kinds[number];
    shard->id = (mls_tensor_id){.section = kind->section,
                                .name = name,
                                .state = kind->state,
                                .has_state = kind->has_state};
    shard->dtype = kind->dtype;
    shard->layout = kind->layout;
    shard->axes = kind->axes;
    shard->tier = kind->tier;
    *out = kind;
    /* without a state the name is the whole key, which would be split at its last dot */
    return kind->section == MLS_OPTIM_STATE && !kind->has_state && name.length > 0 &&
                   memchr(name.data, '.', name.length) != NULL
               ? mls_index_fail_value(&r->in, node, "name", "has a dot")
               : MLS_OK;
}

/* Check that axes and layout fit the shard's shape, and compute the size of its part:
 * `*elements` and `shard->bytes`. `shape` is the column before this shape was read, for
 * errors. */
static mls_code read_part(reader *r, const column *shape, const shard_kind *kind,
                          mls_index_shard *shard, size_t *elements)
{
    mls_part part;
    mls_status why;
    if (kind->axes != NULL && kind->axis_count != (size_t)shard->rank) {
        return mls_index_fail_value(&r->in, kind->axes_node, "axes",
                                    "must have one entry for each dimension of the "
                                    "shape");
    }
    if (!mls_index_fits(shard->dtype, shard->rank, shard->shape)) {
        return mls_index_fail_column(&r->in, shape, "is larger than memory");
    }
    if (mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part, &part,
                        &why) != MLS_OK) {
        return mls_index_fail_value(&r->in, kind->layout_node, "layout",
                                    why.code == MLS_E_VALUE
                                        ? "is invalid or does not have this part"
                                        : "does not fit the shape");
    }
    *elements = mls_part_count(&part);
    shard->bytes =
        *elements * mls_dtype_of(shard->dtype)->item_bytes; /* cannot overflow */
    return MLS_OK;
}

/* Set `*out` to the next shard's number of layers; 1 if the index lacks that column. */
static mls_code read_layer_count(reader *r, size_t *out)
{
    const column c = r->shards[LAYER_COUNT];
    *out = 1;
    const mls_code code =
        c.rest.data == NULL ? MLS_OK
                            : next_size(r, &r->shards[LAYER_COUNT], MLS_LAYERS_MOST, out);
    return code == MLS_OK && *out > r->layer_rows - r->layer_rows_read
               ? mls_index_fail_column(&r->in, c.rest.data == NULL ? &r->layers[CRC] : &c,
                                       "has too few layers for the shards")
               : code;
}

/* Read the next shard's digest, four numbers of 8 digits, if the index has that column.
 */
static mls_code read_digest(reader *r, mls_index_shard *shard)
{
    uint32_t halves[2 * MLS_DIGEST_LANES];
    mls_code code = MLS_OK;
    shard->has_digest = r->shards[DIGEST].rest.data != NULL;
    if (!shard->has_digest) {
        return MLS_OK;
    }
    for (int i = 0; code == MLS_OK && i < 2 * MLS_DIGEST_LANES; i++) {
        code = mls_index_next_crc(&r->in, &r->shards[DIGEST], &halves[i]);
    }
    for (int lane = 0; code == MLS_OK && lane < MLS_DIGEST_LANES; lane++) {
        shard->digest.lanes[lane] =
            (uint64_t)halves[2 * lane] << 32 | halves[2 * lane + 1];
    }
    return code;
}

/* Read the next shard. The order matters: the layout is checked against the shape, the
 * bytes against both, and the number of checksums depends on the bytes. */
static mls_code read_shard(reader *r, mls_index_shard *shard)
{
    const shard_kind *kind = NULL;
    const column shape = r->shards[SHAPE];
    size_t elements = 0, count = 0;
    r->in.name = (mls_str){0}; /* errors name no shard */
    mls_code code = read_identity(r, shard, &kind);
    if (code != MLS_OK || (code = read_shape(r, shard)) != MLS_OK ||
        (code = mls_index_next_number(&r->in, &r->shards[VERSION], 1, INT64_MAX,
                                      &shard->version)) != MLS_OK ||
        (code = next_size(r, &r->shards[PART], PTRDIFF_MAX, &shard->part)) != MLS_OK ||
        (code = read_part(r, &shape, kind, shard, &elements)) != MLS_OK ||
        (code = read_digest(r, shard)) != MLS_OK ||
        (code = read_layer_count(r, &count)) != MLS_OK) {
        return code;
    }
    return read_layers(r, shard, elements, count);
}

/* ---- the whole index ---- */

typedef struct array_sizes {
    size_t dims, layer_lists, layers, row_ranges, frames, ends;
} array_sizes;

/* Count in `n` the array elements that all layers need. A row range takes one, and
 * mls_layers_resolve two for each range or full layer, and one for each shard. */
static void count_layers(const reader *r, array_sizes *n)
{
    mls_json_node rows = r->arrays[0], frames = r->arrays[FRAMES - ROWS];
    n->layer_lists = r->index.shard_count;
    n->layers = r->layer_rows;
    n->row_ranges = n->layer_lists;
    for (size_t i = 0; i < r->layer_rows; i++) {
        const mls_json_node text = next_value(r, &rows), lengths = next_value(r, &frames);
        const size_t ranges = text == MLS_JSON_NONE
                                  ? 0
                                  : mls_layer_rows_count(mls_json_text(r->in.json, text));
        n->row_ranges += ranges == 0 ? 2 : 3 * ranges;
        if (lengths != MLS_JSON_NONE) {
            n->frames++;
            n->ends +=
                mls_compressed_frames_text_count(mls_json_text(r->in.json, lengths));
        }
    }
}

/* Allocate all arrays at once, with their final sizes: shards point into them. The last
 * five are empty unless shards are sparse or compressed. */
static mls_code allocate_arrays(reader *r)
{
    mls_index *x = &r->index;
    array_sizes n = {0};
    /* each dimension has at least a digit and a separator */
    n.dims = r->shards[SHAPE].rest.length / 2;
    if (r->shards[LAYER_COUNT].rest.data != NULL || r->arrays[0] != MLS_JSON_NONE ||
        r->arrays[FRAMES - ROWS] != MLS_JSON_NONE) {
        count_layers(r, &n);
    }
    const size_t crcs = r->layer_rows + r->layers[BLOCKS].rest.length / MLS_CRC_DIGITS;
    if ((x->shards = mls_alloc(x->shard_count, sizeof *x->shards)) == NULL ||
        (x->dims = mls_alloc(n.dims, sizeof *x->dims)) == NULL ||
        (x->crcs = mls_alloc(crcs, sizeof *x->crcs)) == NULL ||
        (x->layer_lists = mls_alloc(n.layer_lists, sizeof *x->layer_lists)) == NULL ||
        (x->layers = mls_alloc(n.layers, sizeof *x->layers)) == NULL ||
        (x->row_ranges = mls_alloc(n.row_ranges, sizeof *x->row_ranges)) == NULL ||
        (x->frames = mls_alloc(n.frames, sizeof *x->frames)) == NULL ||
        (x->ends = mls_alloc(n.ends, sizeof *x->ends)) == NULL) {
        return mls_fail(r->in.st, MLS_E_MEMORY, "no memory for an index of %zu shards",
                        x->shard_count);
    }
    return MLS_OK;
}

/* Open the columns of the table of shards, the object `object`. The number of names is
 * the number of shards. */
static mls_code open_shards(reader *r, mls_json_node object)
{
    member m[SHARD_COLUMNS] = {
        [KIND] = MLS_INDEX_MEMBER("kind", MLS_JSON_STRING, true),
        [PART] = MLS_INDEX_MEMBER("part", MLS_JSON_STRING, true),
        [VERSION] = MLS_INDEX_MEMBER("version", MLS_JSON_STRING, true),
        [LAYER_COUNT] = MLS_INDEX_MEMBER("layer_count", MLS_JSON_STRING, false),
        [DIGEST] = MLS_INDEX_MEMBER("digest", MLS_JSON_STRING, false),
        [NAME] = MLS_INDEX_MEMBER("name", MLS_JSON_ARRAY, true),
        [SHAPE] = MLS_INDEX_MEMBER("shape", MLS_JSON_STRING, true)};
    const mls_code code = mls_index_find_members(&r->in, object, m, SHARD_COLUMNS);
    if (code != MLS_OK) {
        return code;
    }
    for (int i = 0; i < SHARD_NUMBERS; i++) {
        r->shards[i] = mls_index_open_column(&r->in, &m[i]);
    }
    r->index.shard_count = mls_json_size(r->in.json, m[NAME].node);
    r->name = mls_json_first(r->in.json, m[NAME].node);
    return MLS_OK;
}

/* Open the columns of the table of layers, the object `object`. The number of checksums
 * is the number of layers. */
static mls_code open_layers(reader *r, mls_json_node object)
{
    member m[LAYER_COLUMNS] = {
        [FILE_NUMBER] = MLS_INDEX_MEMBER("file", MLS_JSON_STRING, true),
        [OFFSET] = MLS_INDEX_MEMBER("offset", MLS_JSON_STRING, true),
        [BYTES] = MLS_INDEX_MEMBER("bytes", MLS_JSON_STRING, true),
        [ROW] = MLS_INDEX_MEMBER("row", MLS_JSON_STRING, false),
        [CRC] = MLS_INDEX_MEMBER("crc32c", MLS_JSON_STRING, true),
        [BLOCKS] = MLS_INDEX_MEMBER("blocks", MLS_JSON_STRING, false),
        [ROWS] = MLS_INDEX_MEMBER("rows", MLS_JSON_ARRAY, false),
        [CODEC] = MLS_INDEX_MEMBER("codec", MLS_JSON_ARRAY, false),
        [FRAMES] = MLS_INDEX_MEMBER("frames", MLS_JSON_ARRAY, false)};
    mls_code code = mls_index_find_members(&r->in, object, m, LAYER_COLUMNS);
    if (code != MLS_OK) {
        return code;
    }
    for (int i = 0; i < LAYER_NUMBERS; i++) {
        r->layers[i] = mls_index_open_column(&r->in, &m[i]);
    }
    r->layer_rows = r->layers[CRC].rest.length / MLS_CRC_DIGITS;
    for (int i = 0; code == MLS_OK && i < LAYER_ARRAYS; i++) {
        code = mls_index_open_array(&r->in, &m[ROWS + i], r->layer_rows, &r->arrays[i]);
    }
    return code;
}

/* Read the tables `shards` and `layers`; files and kinds were read before. */
static mls_code read_shards(reader *r, mls_json_node shards, mls_json_node layers)
{
    mls_code code = open_shards(r, shards);
    code = code == MLS_OK ? open_layers(r, layers) : code;
    code = code == MLS_OK ? allocate_arrays(r) : code;
    for (size_t i = 0; code == MLS_OK && i < r->index.shard_count; i++) {
        code = read_shard(r, &r->index.shards[i]);
    }
    if (code != MLS_OK) {
        return code;
    }
    r->in.name = (mls_str){0}; /* errors name no shard */
    code = mls_index_end_columns(&r->in, r->shards, SHARD_NUMBERS);
    return code == MLS_OK ? mls_index_end_columns(&r->in, r->layers, LAYER_NUMBERS)
                          : code;
}

/* Check that the text is an index of a supported version. This comes first, since other
 * versions may differ in everything else. */
static mls_code read_format(reader *r)
{
    enum { FORMAT, FORMAT_NUMBER, COUNT };
    member m[COUNT] = {[FORMAT] = MLS_INDEX_MEMBER("format", MLS_JSON_STRING, true),
                       [FORMAT_NUMBER] =
                           MLS_INDEX_MEMBER("format_version", MLS_JSON_NUMBER, true)};
    const mls_code code = mls_index_find_members(&r->in, 0, m, COUNT);
    uint64_t version;
    if (code != MLS_OK) {
        return code;
    }
    if (!mls_str_is(mls_json_text(r->in.json, m[FORMAT].node), "mlstate.index")) {
        return mls_index_fail_value(&r->in, m[FORMAT].node, "format",
                                    "is not \"mlstate.index\"");
    }
    if (mls_json_u64(r->in.json, m[FORMAT_NUMBER].node, &version) &&
        version == MLS_INDEX_VERSION) {
        return MLS_OK;
    }
    const mls_str text = mls_json_text(r->in.json, m[FORMAT_NUMBER].node);
    const int width = (int)(text.length < 20 ? text.length : 20);
    mls_fail_at(r->in.st, mls_json_offset(r->in.json, m[FORMAT_NUMBER].node),
                "\"format_version\" %.*s is not supported: this mlstate reads version %d",
                width, text.data, (int)MLS_INDEX_VERSION);
    mls_status_expected(r->in.st, "%d", (int)MLS_INDEX_VERSION);
    return mls_status_got(r->in.st, "%.*s", width, text.data);
}

/* Read generation, rank and world size; the rank must be below the world size. */
static mls_code read_head(reader *r, const member *generation, const member *rank,
                          const member *world)
{
    const mls_str text = mls_json_text(r->in.json, generation->node);
    uint32_t half;
    if (text.length != MLS_GENERATION_DIGITS || !mls_crc_from_digits(text.data, &half) ||
        !mls_crc_from_digits(text.data + MLS_CRC_DIGITS, &half)) {
        return mls_index_fail_value(&r->in, generation->node, "generation",
                                    "is not 16 hexadecimal digits");
    }
    memcpy(r->index.generation, text.data, text.length);
    const mls_code code =
        mls_index_read_number(&r->in, world, 1, WORLD_MOST, &r->index.world_size);
    return code == MLS_OK ? mls_index_read_number(&r->in, rank, 0,
                                                  r->index.world_size - 1, &r->index.rank)
                          : code;
}

/* Read the whole document into `r->index`, then sort and check it. Shards refer to files
 * and kinds, which come first. */
static mls_code read_index(reader *r)
{
    enum { GENERATION, RANK, WORLD, FILES, KINDS, SHARDS, LAYERS, COUNT };
    member m[COUNT] = {[GENERATION] =
                           MLS_INDEX_MEMBER("generation", MLS_JSON_STRING, true),
                       [RANK] = MLS_INDEX_MEMBER("rank", MLS_JSON_NUMBER, true),
                       [WORLD] = MLS_INDEX_MEMBER("world_size", MLS_JSON_NUMBER, true),
                       [FILES] = MLS_INDEX_MEMBER("files", MLS_JSON_OBJECT, true),
                       [KINDS] = MLS_INDEX_MEMBER("kinds", MLS_JSON_ARRAY, true),
                       [SHARDS] = MLS_INDEX_MEMBER("shards", MLS_JSON_OBJECT, true),
                       [LAYERS] = MLS_INDEX_MEMBER("layers", MLS_JSON_OBJECT, true)};
    mls_code code = read_format(r);
    if (code != MLS_OK ||
        (code = mls_index_find_members(&r->in, 0, m, COUNT)) != MLS_OK ||
        (code = read_head(r, &m[GENERATION], &m[RANK], &m[WORLD])) != MLS_OK ||
        (code = read_files(r, m[FILES].node)) != MLS_OK ||
        (code = read_kinds(r, m[KINDS].node)) != MLS_OK ||
        (code = read_shards(r, m[SHARDS].node, m[LAYERS].node)) != MLS_OK) {
        return code;
    }
    return mls_index_arrange(&r->index, r->in.st);
}

/* Check, parse and read an index. The JSON checksum is verified first, so that a damaged
 * text is never parsed. */
mls_code mls_index_parse(const char *text, size_t length, const mls_crc_kernels *crc,
                         mls_index *out, mls_status *st)
{
    mls_json *json = NULL;
    mls_code code = mls_json_checksum_check(text, length, crc, st);
    if (code != MLS_OK ||
        (code = mls_json_parse(text, length, (mls_json_limits){DEPTH, NODES}, &json,
                               st)) != MLS_OK) {
        return code;
    }
    reader r = {.in = {.json = json, .st = st}, .index = {.json = json}};
    code = read_index(&r); /* the prefix is a brace: the root is an object */
    mls_free(r.kinds);
    if (code != MLS_OK) {
        mls_index_fini(&r.index);
        return code;
    }
    mls_json_forget(json); /* frees the nodes; the names remain */
    *out = r.index;
    return MLS_OK;
}
